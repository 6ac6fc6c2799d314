"""Laws of the front end before servers of vLLM, over servers that say what they were asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from verdicts import make_verdict
from zoo import byte_tokenizer

from kvcache_rag import BestFew, BestLast, CacheBlend, FullRecompute, LegoLink, Reuse
from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.models.pretrained import is_trained, width_of
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.prompt.template import PromptTemplate
from kvcache_rag.verdict import Gate, Identity
from kvcache_rag_server.backend import BackendRequest, Failed, Finished, Piece, Prefilled, Started
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.http import LostError
from kvcache_rag_server.settings import ServerSettings
from vllm_kvcache_rag.front import launch
from vllm_kvcache_rag.front.backend import VLLMBackend
from vllm_kvcache_rag.front.client import EngineClient, EngineDescription
from vllm_kvcache_rag.front.prompts import Prompts
from vllm_kvcache_rag.front.routing import Routing, home_of
from vllm_kvcache_rag.transfer.grants import GrantKey
from vllm_kvcache_rag.transfer.params import FIELD, TransferParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

KEY = GrantKey(b"0123456789abcdef0123456789abcdef")
TEMPLATE = PromptTemplate(system="Answer by the text.")
TEXTS = ("The bridge opened in 1937.", "It is painted orange.", "Fog is frequent in summer.")


@dataclass
class FakeEngine:
    """A server that knows the connector: it stores what it is told to, and counts what it reuses.

    Attributes:
        stored: What it holds: tenant, prefix and chunk.
        bodies: What it was asked.
        traces: From which traces its answers were to go on.
        dies: "" to live; "before" its first token, or "after" it.
        status: Of its refusals; 200 for none.
        hold: Set to let its streams begin.
        law: Why it stores nothing; "" if it does.
    """

    stored: set[tuple[Any, ...]] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    dies: str = ""
    status: int = 200
    hold: asyncio.Event | None = None
    law: str = ""
    is_proven: bool = False
    has_told: bool = False
    spec: str = "vllm 0.32, weights"

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 4096}]})
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "0.32.0"})
        if request.url.path == "/health":
            return httpx.Response(200 if not self.dies else 503)
        body = json.loads(request.content)
        self.bodies.append(body)
        self.traces += request.headers.get_list("traceparent")
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "no, because"}})
        if self.dies == "before":
            raise httpx.ConnectError("refused")
        cached, reply = self._understood(body)
        if not body.get("stream"):
            return httpx.Response(200, json={"choices": [], "kv_transfer_params": reply})
        if self.hold is not None:
            await self.hold.wait()
        return httpx.Response(200, content=self._stream(cached))

    def _understood(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids = body["prompt"]
        params = TransferParams.from_params(body.get("kv_transfer_params"), len(ids))
        if params is None:
            return 0, {}
        tenant = KEY.namespace(params.grant, params.digest(ids))
        if params.mode == "law":
            assert len({*ids}) == 1
            # The first one ends before its workers have told.
            law = self.law if self.has_told else None
            self.has_told, self.is_proven = True, not self.law
            return 0, {FIELD: {"reused": 0, "law": law, "engine": self.spec}}
        if not self.is_proven:
            return 0, {FIELD: {"reused": 0, "why": "how it rotates keys was not measured"}}
        pieces, start = set(), params.prefix
        for tokens in params.chunks:
            pieces.add((tenant, *ids[: params.prefix], "|", *ids[start : start + tokens]))
            start += tokens
        found = params.context if pieces <= self.stored else 0
        if params.mode == "store":
            self.stored |= pieces
            return 0, {FIELD: {"reused": found}}
        return found, {}

    async def _stream(self, cached: int) -> AsyncIterator[bytes]:
        def line(part: dict[str, Any]) -> bytes:
            return f"data: {json.dumps(part)}\n\n".encode()

        yield line({"choices": [{"text": "In "}]})
        if self.dies == "after":
            raise httpx.ReadError("reset")
        yield line({"choices": [{"text": "1937.", "finish_reason": "stop"}]})
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        yield line({"choices": [], "usage": {"completion_tokens": 5, **details}})
        yield b"data: [DONE]\n\n"

    def asked(self, mode: str) -> list[dict[str, Any]]:
        """Bodies of one mode."""
        params = [(body.get("kv_transfer_params") or {}).get(FIELD) for body in self.bodies]
        modes = [one["mode"] if one else "plain" for one in params]
        return [body for body, one in zip(self.bodies, modes, strict=True) if one == mode]


def client_of(engine: FakeEngine, place: int = 0) -> EngineClient:
    return EngineClient(f"http://engine-{place}:8000", httpx.MockTransport(engine.handle))


Made = Callable[..., VLLMBackend]


@pytest.fixture
async def backend_of() -> AsyncIterator[Made]:
    """A backend before engines, which is closed behind the test."""
    made: list[VLLMBackend] = []

    def make(*engines: FakeEngine, **options: Any) -> VLLMBackend:
        clients = [client_of(engine, place) for place, engine in enumerate(engines)]
        prompts = Prompts(byte_tokenizer(), TEMPLATE, 4096)
        made.append(VLLMBackend(clients, prompts, KEY, model="m", **{"policy": Reuse(), **options}))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()


def ids_of(question: str = "When?", chunks: Sequence[str] = TEXTS) -> Any:
    """The prompt of an engine of our own."""
    return PromptRenderer(TEMPLATE, byte_tokenizer()).tokenize(question, chunks, [])


def request(name: str = "r", **changes: Any) -> BackendRequest:
    return BackendRequest(
        name, changes.pop("question", "When?"), changes.pop("chunks", TEXTS), **changes
    )


async def events_of(backend: VLLMBackend, work: BackendRequest) -> list[Any]:
    return [event async for event in backend.answer(work)]


async def metrics_of(backend: VLLMBackend, work: BackendRequest) -> Any:
    """Of an answer; all that is to be stored behind it is stored."""
    finished = (await events_of(backend, work))[-1]
    assert isinstance(finished, Finished)
    if backend._storer is not None:
        await backend._storer
    return finished.answer.metrics


async def test_a_missing_chunk_is_stored_once_and_reused_from_then_on(backend_of: Made) -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    first = await metrics_of(backend, request())
    assert (first.reused_tokens, first.misses) == (0, 3)
    assert len(engine.stored) == 3
    assert [len(body["prompt"]) for body in engine.asked("law")] == [768] * 2
    assert all(body["priority"] == 1 for body in engine.asked("store"))
    second = await metrics_of(backend, request(chunks=TEXTS[::-1]))
    expected = ids_of()
    assert second.reused_tokens == sum(map(len, expected.chunks))
    assert (second.prefix_tokens, second.query_tokens) == (
        len(expected.prefix), len(expected.query),
    )  # fmt: skip
    assert (second.misses, second.policy) == (0, "Reuse(positions='reordered')")
    assert (len(engine.asked("store")), len(engine.asked("law"))) == (3, 2)
    # What is evicted is stored again.
    engine.stored.pop()
    for misses in (3, 0):
        assert (await metrics_of(backend, request())).misses == misses
    assert len(engine.stored) == 3
    # An engine that has begun anew measures again; what it has stored lies in a folder.
    engine.is_proven, measured = False, len(engine.asked("law"))
    for _ in range(2):
        await metrics_of(backend, request())
    assert len(engine.asked("law")) == measured + 1
    assert (await metrics_of(backend, request())).misses == 0


async def test_a_server_goes_on_with_the_trace_of_the_request(backend_of: Made) -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await metrics_of(backend, request(trace={"traceparent": trace}))
    await metrics_of(backend, request(name="untraced"))
    assert engine.traces == [trace], "what is stored behind an answer is nobody's trace"


async def test_documents_are_stored_before_anybody_asks(backend_of: Made) -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[0].stored = engines[1].stored  # a folder of both
    backend = backend_of(*engines)
    work = request(chunks=(*TEXTS, TEXTS[0]), namespace="a")
    tokens = sum(map(len, ids_of().chunks))
    assert await backend.prefill(work) == Prefilled(3, tokens, 3)
    assert await backend.prefill(work) == Prefilled(3, tokens, 0)
    assert await backend.prefill(request(chunks=TEXTS)) == Prefilled(3, tokens, 3)
    asked = [body for engine in engines for body in engine.asked("store")]
    assert all((body["priority"], body["max_tokens"]) == (1, 1) for body in asked)
    assert (await metrics_of(backend, request(namespace="a"))).misses == 0
    with pytest.raises(ContextTooLongError, match="split the document"):
        await backend.prefill(request(chunks=("long " * 5000,)))
    engines[0].dies = engines[1].dies = "before"
    with pytest.raises(ApiError, match=r"not every document is stored: .*refused") as caught:
        await backend.prefill(work)
    assert caught.value.failed.status == 503
    await backend.close()
    with pytest.raises(ApiError, match="shut"):
        await backend.prefill(work)


def gate_on(identity: Identity, kept: float, **options: Any) -> Gate:
    """Of a verdict that found so much of full prefill's score kept, for sure."""
    verdict = make_verdict(identity, {repr(Reuse()): kept + 0.02})
    return Gate(verdict, **options)


@pytest.mark.parametrize(
    ("name", "config", "trained", "width"),
    [
        ("plain", {"hidden_size": 64}, False, 64),
        ("blocks", {"hidden_size": 64, "kvcache_rag": {"trained_for": "blocks"}}, True, 64),
        ("Tulu3-Block-FT", {"hidden_size": 64}, True, 64),
        ("tokenizer", None, False, 0),
    ],
)
def test_what_a_model_was_trained_for_is_told_without_its_weights(
    tmp_path: Path, name: str, config: dict[str, Any] | None, trained: bool, width: int
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    if config is not None:
        written = json.dumps({"model_type": "llama", **config})
        (folder / "config.json").write_text(written, encoding="utf-8")
    assert is_trained(str(folder), {}) == trained
    assert width_of(str(folder), {}) == width


@pytest.mark.parametrize(
    ("trained", "given", "name"),
    [(False, "", "bestfew"), (True, "", "reuse"), (False, "full", "full")],
)
async def test_the_default_is_that_of_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: bool, given: str, name: str
) -> None:
    async def described(_: object) -> EngineDescription:
        return EngineDescription("m", 4096, "0.32.0")

    monkeypatch.setattr(launch, "load_tokenizer", lambda *_: byte_tokenizer())
    monkeypatch.setattr(launch, "_described", described)
    monkeypatch.setattr(launch, "is_trained", lambda *_: trained)
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n", encoding="utf-8")
    key.chmod(0o600)
    servers: dict[str, Any] = {"backend": "vllm", "base_url": ("http://a",)}
    settings = ServerSettings(model=str(tmp_path), backend_key=str(key), policy=given, **servers)
    backend = await asyncio.to_thread(launch.vllm_backend, settings)
    assert (await backend.own_policy()).name == name
    await backend.close()


async def test_servers_say_what_a_verdict_is_about(backend_of: Made) -> None:
    same, other = [FakeEngine(), FakeEngine()], FakeEngine(spec="other weights")
    identity = await backend_of(*same).identity()
    assert (identity.model, identity.revision) == ("m", "vllm 0.32, weights")
    assert identity == await backend_of(FakeEngine()).identity()
    assert identity.spec != (await backend_of(other).identity()).spec
    with pytest.raises(ApiError, match="say different things of themselves"):
        await backend_of(same[0], other).identity()
    with pytest.raises(ApiError, match="do not say what they are"):
        await backend_of(FakeEngine(dies="before")).identity()


@pytest.mark.parametrize(
    ("kept", "spec", "policy", "words"),
    [
        (0.99, "", None, ""),
        (0.5, "", None, "kept 52.0 % of full"),
        (0.99, "new", None, "the verdict was made for"),
        (0.99, "", Reuse("composite"), "does not cover"),
        (0.99, "", BestFew(), "does not cover"),
    ],
)
async def test_the_gate_lets_pass_what_a_verdict_on_these_servers_says(
    backend_of: Made, kept: float, spec: str, policy: Any, words: str
) -> None:
    identity = await backend_of(FakeEngine()).identity()
    engine = FakeEngine(spec=spec) if spec else FakeEngine()
    backend = backend_of(engine, gate=gate_on(identity, kept))
    cost = await metrics_of(backend, request(policy=policy))
    assert words in cost.gate
    assert bool(words) == bool(cost.gate)
    assert (cost.policy, cost.answered_from) == (
        repr(FullRecompute() if words else Reuse()),
        (0, 1, 2),
    )
    (body,) = engine.asked("plain" if words else "reuse")
    assert body["prompt"] == list(ids_of().all), "all chunks, if a gate refuses"


async def test_a_strict_gate_refuses(backend_of: Made) -> None:
    identity = await backend_of(FakeEngine()).identity()
    strict = backend_of(FakeEngine(), gate=gate_on(identity, 0.5, below="error"))
    failed = (await events_of(strict, request()))[-1]
    assert (failed.status, "use the policy full" in failed.message) == (400, True)
    assert not (await metrics_of(strict, request(policy=FullRecompute()))).gate


async def test_many_at_once_let_a_server_measure_once(backend_of: Made) -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    await asyncio.gather(*(metrics_of(backend, request(str(n))) for n in range(5)))
    assert (len(engine.asked("law")), len(engine.asked("store"))) == (2, 3)


async def test_what_is_asked_is_the_very_prompt_of_an_engine(backend_of: Made) -> None:
    engine = FakeEngine()
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}
    work = request(options=options, stop=("\n",), max_new_tokens=9, policy=Reuse("composite"))
    backend = backend_of(engine)
    for scores in (None, (0.1, 0.2, 0.9)):  # which change nothing here
        await metrics_of(backend, replace(work, scores=scores))
    ids = ids_of()
    for body in engine.asked("reuse"):
        assert body["prompt"] == list(ids.all)
        given = body["kv_transfer_params"][FIELD]
        assert (given["prefix"], given["chunks"]) == (len(ids.prefix), [*map(len, ids.chunks)])
        assert given["positions"] == "composite"
        assert {name: body[name] for name in options} == options
        assert (body["max_tokens"], body["stop"]) == (9, ["\n", "\nDocument:"])
    assert len(engine.asked("reuse")) == 2


async def test_the_best_chunk_comes_first_and_is_all_that_is_stored(backend_of: Made) -> None:
    engine = FakeEngine()
    backend = backend_of(engine, policy=None)
    asked = request(question="What is frequent?", scores=(0.2, 0.1, 0.9))
    ids = ids_of(asked.question, TEXTS[2:])
    for number, misses in enumerate((1, 0)):
        cost = await metrics_of(backend, asked)
        assert (cost.policy, cost.answered_from) == ("BestFew(count=None)", (2,))
        assert (cost.unused_chunks, cost.misses) == (2, misses)
        body = engine.asked("reuse")[number]
        assert body["prompt"] == list(ids.all)
        assert body["kv_transfer_params"][FIELD]["chunks"] == [len(ids.chunks[0])]
    assert (cost.reused_tokens, cost.fresh_tokens) == (len(ids.chunks[0]), 0)
    assert len(engine.stored) == 1
    assert await backend.count(asked) == len(ids.all)
    assert await backend.count(request(policy=Reuse())) > len(ids.all)


async def test_an_apps_instruction_chooses_no_chunk(backend_of: Made) -> None:
    backend = backend_of(FakeEngine(), policy=None)
    told = (" ".join(["The bridge opened in 1937."] * 5),)
    for system in ((), told):
        asked = request(question="Is fog frequent?", system=system, policy=BestFew(1))
        assert (await metrics_of(backend, asked)).answered_from == (2,)


async def test_further_chunks_of_the_few_stand_with_the_question(backend_of: Made) -> None:
    engine = FakeEngine()
    backend = backend_of(engine, policy=None)
    work = request(policy=BestFew(2), scores=(0.2, 0.9, 0.8), question="What?")
    await metrics_of(backend, work)
    cost = await metrics_of(backend, work)
    first, second = ids_of("?", TEXTS[1:]).chunks
    assert (cost.answered_from, cost.unused_chunks) == ((1, 2), 1)
    assert (cost.reused_tokens, cost.fresh_tokens, cost.misses) == (len(first), len(second), 0)
    assert cost.prompt_tokens == len(engine.bodies[-1]["prompt"])
    # The same chunk first with another behind it: what is stored is reused.
    other = await metrics_of(backend, request(scores=(0.8, 0.9, 0.1), policy=BestFew(2)))
    assert (other.answered_from, other.misses) == ((1, 0), 0)
    last = request(scores=(0.1, 0.9, 0.8), policy=BestLast(0.2))
    cost = await metrics_of(backend, last)
    assert (cost.policy, cost.answered_from) == (repr(BestLast(0.2)), (0, 2, 1))
    assert (cost.fresh_tokens, cost.misses) == (len(first), 2)


async def test_a_server_that_stores_nothing_answers_from_the_few_as_well(backend_of: Made) -> None:
    engine = FakeEngine(law="it has no connector")
    work = request(question="What is frequent?", scores=(0.2, 0.1, 0.9))
    backend = backend_of(engine, policy=None)
    for _ in range(2):
        cost = await metrics_of(backend, work)
        assert (cost.policy, cost.answered_from) == ("BestFew(count=None)", (2,))
        assert (cost.reused_tokens, cost.misses) == (0, 1)
    whole = list(ids_of(work.question, TEXTS[2:]).all)
    asked = [body["prompt"] for body in engine.asked("plain")]
    assert asked == [whole] * 2, "its own prefix cache finds the beginning"
    assert len(engine.asked("law")) == 2
    assert not engine.asked("store")


async def test_streams_begin_with_their_first_text_and_end_with_the_whole(backend_of: Made) -> None:
    backend = backend_of(FakeEngine())
    started, *pieces, finished = await events_of(backend, request(streaming=True))
    assert isinstance(started, Started)
    assert [piece.text for piece in pieces if isinstance(piece, Piece)] == ["In ", "1937."]
    assert isinstance(finished, Finished)
    assert (finished.answer.text, finished.answer.finish_reason) == ("In 1937.", "stop")
    assert finished.answer.metrics.generated_tokens == 5
    whole = await events_of(backend, request())
    assert [type(event) for event in whole] == [Started, Finished]


@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": (), "is_plain": True},
        {"chunks": (), "is_chat": True},
        {"chunks": ()},
        {"policy": FullRecompute()},
    ],
)
async def test_plain_requests_bring_no_boundaries(
    backend_of: Made, changes: dict[str, Any]
) -> None:
    engine = FakeEngine()
    await metrics_of(backend_of(engine), request(**changes))
    assert len(engine.asked("plain")) == len(engine.bodies) == 1


async def test_tenants_are_granted_their_own_alone(backend_of: Made) -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    for tenant in ("a", "a", "b"):
        await metrics_of(backend, request(namespace=tenant))
    assert Counter(piece[0] for piece in engine.stored) == {"a": 3, "b": 3}
    (finished,) = (await events_of(backend, request(namespace="c")))[1:]
    assert finished.answer.metrics.reused_tokens == 0
    await metrics_of(backend, request(namespace="c", chunks=()))
    salts = [body["cache_salt"] for body in (*engine.asked("reuse"), *engine.asked("plain"))]
    assert salts == [KEY.salt(tenant) for tenant in ("a", "a", "b", "c", "c")]


@pytest.mark.parametrize(
    "fault", [{"dies": "before"}, {"status": 503}, {"status": 401}, {"status": 404}], ids=str
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_server_that_is_lost_before_its_first_token_is_replaced(
    backend_of: Made, fault: dict[str, Any], is_first: bool
) -> None:
    dying, living = FakeEngine(**fault), FakeEngine()
    backend = backend_of(*((dying, living) if is_first else (living, dying)))
    for number in range(4):  # whichever is asked first
        await metrics_of(backend, request(str(number), chunks=(TEXTS[number % 3], str(number))))
    assert await backend.ready()
    assert dying.bodies


async def test_a_begun_answer_ends_with_an_error(backend_of: Made) -> None:
    backend = backend_of(FakeEngine(dies="after"), FakeEngine(dies="after"))
    *_, failed = await events_of(backend, request(streaming=True))
    assert isinstance(failed, Failed)
    assert (failed.status, "has ended" in failed.message) == (503, True)


async def test_without_any_server_the_client_is_told_when_to_ask_again(backend_of: Made) -> None:
    backend = backend_of(FakeEngine(dies="before"), FakeEngine(dies="before"))
    (failed,) = await events_of(backend, request())
    assert (failed.status, failed.retry_after is not None) == (503, True)
    assert not await backend.ready()
    assert (await backend.stats())["replicas"][0]["failed"] == 1


async def test_what_a_server_refuses_is_told(backend_of: Made) -> None:
    (failed,) = await events_of(backend_of(FakeEngine(status=400)), request(chunks=()))
    assert (failed.status, failed.message) == (400, "no, because")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": CacheBlend(0.2)}, "recomputes tokens, which vLLM does not"),
        ({"policy": LegoLink(4)}, "ask for bestfew, reuse, composite or full"),
        ({"options": {"repetition_penalty": 1.1}}, "vLLM is not told repetition_penalty"),
        ({"max_new_tokens": 5000}, "context window is 4096"),
        ({"chunks": ("x" * 300_000,)}, "context window"),
    ],
)
async def test_mistakes_are_one_sentence(
    backend_of: Made, changes: dict[str, Any], words: str
) -> None:
    engine = FakeEngine()
    (failed,) = await events_of(backend_of(engine), request(**changes))
    assert isinstance(failed, Failed)
    assert failed.status == 400
    assert words in failed.message
    assert not engine.asked("reuse")


async def test_who_waits_is_bounded_and_each_has_its_place(backend_of: Made) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    backend = backend_of(engine, max_running=2, max_waiting=3)
    asked = []
    for running, waiting in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 3)):
        work = request(str(len(asked)), chunks=())
        asked.append(asyncio.create_task(events_of(backend, work)))
        while (len(engine.bodies), backend._waiting) != (running, waiting):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    (refused,) = [task for task in asked if task.done()]
    assert "requests wait already" in refused.result()[0].message
    assert engine.hold is not None
    engine.hold.set()
    ends = Counter([type((await task)[-1]) for task in asked])
    assert ends == {Finished: 5, Failed: 1}


async def test_a_request_that_is_taken_back_gives_its_place_to_the_next(backend_of: Made) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    backend = backend_of(engine, max_running=1)
    first, second = (
        asyncio.create_task(events_of(backend, request(name, chunks=()))) for name in "12"
    )
    while not engine.bodies:
        await asyncio.sleep(0.01)
    assert engine.hold is not None
    first.cancel()
    engine.hold.set()
    assert isinstance((await second)[-1], Finished)
    stats = (await backend.stats())["replicas"][0]
    assert stats["replica"] == "engine-0:8000"
    assert (stats["cancelled"], stats["answered"], stats["running"]) == (1, 1, 0)


def test_every_chunk_has_a_home_and_few_move() -> None:
    servers = [f"http://engine-{n}" for n in range(5)]
    chunks = [(n, n + 1, n * 7) for n in range(500)]
    homes = [home_of(chunk, "a", servers) for chunk in chunks]
    assert min(Counter(homes).values()) > 60
    left = [home_of(chunk, "a", servers[1:]) for chunk in chunks]
    moved = [one for one, other in zip(homes, left, strict=True) if one != other]
    assert {*moved} == {servers[0]}
    assert homes != [home_of(chunk, "b", servers) for chunk in chunks]


def test_most_tokens_then_the_least_busy() -> None:
    routing = Routing(["a", "b", "a"])
    assert routing.servers == ("a", "b")
    chunk = (1, 2, 3)
    home = home_of(chunk, "", ["a", "b"])
    (other,) = {"a", "b"} - {home}
    assert routing.choose([chunk], "") == home
    routing.running[home] = 9
    assert routing.choose([chunk], "") == home
    assert routing.choose([], "") == other
    assert routing.choose([chunk], "", {home}) == other
    assert routing.choose([chunk], "", {"a", "b"}) is None


@pytest.mark.parametrize("url", ["", "engine:8000", "ftp://engine", "http://", 3])
def test_what_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises((InvalidInputError, AttributeError), match=r"is no server's URL|rstrip"):
        EngineClient(url)


async def test_what_is_no_vllm_is_refused() -> None:
    def other(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": []})

    client = EngineClient("http://engine", httpx.MockTransport(other))
    with pytest.raises(InvalidInputError, match="at http://engine is no server of vLLM"):
        await client.describe()
    lost = client_of(FakeEngine(dies="before"))
    assert (await lost.describe()).window == 4096
    with pytest.raises(LostError, match="refused"):
        await lost.complete({"prompt": [1]})
    await client.close()
    await lost.close()


VLLM = {"backend": "vllm", "base_url": ("http://a",)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "sglang"}, "backend cannot be used: there is no backend"),
        ({"backend": "vllm"}, "needs its servers: --base-url"),
        ({"base_url": ("http://a",)}, "are for servers: say --backend vllm"),
        ({"backend_key": "file"}, "are for servers: say --backend vllm"),
        ({**VLLM, "kv_dir": "kv"}, "--kv-dir is for a model in this"),
        ({**VLLM, "prefetch": "same"}, "--prefetch is for a model"),
    ],
)
def test_options_of_the_other_engine_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ServerSettings(model="m", **options)
