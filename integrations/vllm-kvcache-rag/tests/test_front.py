"""Laws of the front end before servers of vLLM, over servers that say what they were asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from zoo import byte_tokenizer

from kvcache_rag import BestFew, BestLast, CacheBlend, FullRecompute, LegoLink, Reuse
from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.models.pretrained import is_trained, width_of
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.prompt.template import PromptTemplate
from kvcache_rag.verdict import Gate, Identity, PolicyScore, Verdict
from kvcache_rag_server.backend import (
    BackendRequest,
    Failed,
    Finished,
    Piece,
    Prefilled,
    Started,
)
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
    from collections.abc import AsyncIterator
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

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

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
        if self.hold is not None and body.get("stream"):
            await self.hold.wait()
        if not body.get("stream"):
            return httpx.Response(200, json={"choices": [], "kv_transfer_params": reply})
        return httpx.Response(200, content=self._stream(cached))

    def _understood(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids = body["prompt"]
        params = TransferParams.of(body.get("kv_transfer_params"), len(ids))
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
        pieces, start = [], params.prefix
        for tokens in params.chunks:
            pieces.append((tenant, *ids[: params.prefix], "|", *ids[start : start + tokens]))
            start += tokens
        if params.mode == "store":
            were_there = {*pieces} <= self.stored
            self.stored.update(pieces)
            return 0, {FIELD: {"reused": params.context if were_there else 0}}
        return params.context if {*pieces} <= self.stored else 0, {}

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
        found = []
        for body in self.bodies:
            given = (body.get("kv_transfer_params") or {}).get(FIELD)
            if (given or {"mode": "plain"})["mode"] == mode:
                found.append(body)
        return found


def backend_of(*engines: FakeEngine, **options: Any) -> VLLMBackend:
    clients = [
        EngineClient(f"http://engine-{place}:8000", engine.transport())
        for place, engine in enumerate(engines)
    ]
    prompts = Prompts(byte_tokenizer(), TEMPLATE, options.pop("window", 4096))
    return VLLMBackend(clients, prompts, KEY, model="m", **{"policy": Reuse(), **options})


def request(name: str = "r", **changes: Any) -> BackendRequest:
    return BackendRequest(
        name, changes.pop("question", "When?"), changes.pop("chunks", TEXTS), **changes
    )


async def events_of(backend: VLLMBackend, work: BackendRequest) -> list[Any]:
    return [event async for event in backend.answer(work)]


async def settled(backend: VLLMBackend) -> None:
    """All that is to be stored is stored."""
    if backend._storer is not None:
        await backend._storer


async def test_a_missing_chunk_is_stored_once_and_reused_from_then_on() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    first = (await events_of(backend, request()))[-1].answer.metrics
    assert (first.reused_tokens, first.misses) == (0, 3)
    await settled(backend)
    assert len(engine.stored) == 3
    assert [len(body["prompt"]) for body in engine.asked("law")] == [768] * 2
    assert all(body["priority"] == 1 for body in engine.asked("store"))
    second = (await events_of(backend, request(chunks=TEXTS[::-1])))[-1].answer.metrics
    expected = PromptRenderer(TEMPLATE, byte_tokenizer()).tokenize("When?", TEXTS, [])
    assert second.reused_tokens == sum(map(len, expected.chunks))
    assert (second.prefix_tokens, second.query_tokens) == (
        len(expected.prefix), len(expected.query),
    )  # fmt: skip
    assert (second.misses, second.policy) == (0, "Reuse(positions='reordered')")
    await settled(backend)
    assert (len(engine.asked("store")), len(engine.asked("law"))) == (3, 2)
    await backend.close()


async def test_a_server_goes_on_with_the_trace_of_the_request() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await events_of(backend, request(trace={"traceparent": trace}))
    await events_of(backend, request(name="untraced"))
    await settled(backend)
    assert engine.traces == [trace], "what is stored behind an answer is nobody's trace"
    await backend.close()


async def test_a_server_that_has_begun_anew_measures_again() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    for _ in range(2):
        await events_of(backend, request())
        await settled(backend)
    engine.is_proven = False  # what it has stored lies in a folder
    for _ in range(2):
        await events_of(backend, request())
        await settled(backend)
    assert len(engine.asked("law")) == 3
    assert (await events_of(backend, request()))[-1].answer.metrics.misses == 0
    await backend.close()


async def test_documents_are_stored_before_anybody_asks() -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[0].stored = engines[1].stored  # a folder of both
    backend = backend_of(*engines)
    work = request(chunks=(*TEXTS, TEXTS[0]), namespace="a")
    tokens = sum(map(len, backend._prompts.context(TEXTS, "").chunks))
    assert await backend.prefill(work) == Prefilled(3, tokens, 3)
    assert await backend.prefill(work) == Prefilled(3, tokens, 0)
    assert await backend.prefill(request(chunks=TEXTS)) == Prefilled(3, tokens, 3)
    asked = [body for engine in engines for body in engine.asked("store")]
    assert all((body["priority"], body["max_tokens"]) == (1, 1) for body in asked)
    answered = (await events_of(backend, request(namespace="a")))[-1].answer
    assert answered.metrics.misses == 0
    with pytest.raises(ContextTooLongError, match="split the document"):
        await backend.prefill(request(chunks=("long " * 5000,)))
    engines[0].dies = engines[1].dies = "before"
    with pytest.raises(ApiError, match=r"not every document is stored: .*refused") as caught:
        await backend.prefill(work)
    assert caught.value.failed.status == 503
    await backend.close()
    with pytest.raises(ApiError, match="shut"):
        await backend.prefill(work)


def verdict_on(identity: Identity, kept: float) -> Verdict:
    """What `verify` might have found: so much of full prefill's score, for sure."""
    score = PolicyScore(repr(Reuse()), score=kept, kept=kept, kept_low=kept, kept_high=kept)
    return Verdict(
        identity, "2026-11-23", "own", "d", 200, "f1", 0.95, PolicyScore("FullRecompute()"),
        (score,), score.policy,
    )  # fmt: skip


@pytest.mark.parametrize(("policy", "name"), [(None, "bestfew"), (FullRecompute(), "full")])
async def test_servers_do_as_their_model_wants_unless_they_are_told_otherwise(
    policy: Any, name: str
) -> None:
    assert (await backend_of(FakeEngine(), policy=policy).own_policy()).name == name


def test_what_a_model_was_trained_for_is_told_without_its_weights(tmp_path: Path) -> None:
    for name, config, expected in (
        ("plain", {"hidden_size": 64}, False),
        ("blocks", {"hidden_size": 64, "kvcache_rag": {"trained_for": "blocks"}}, True),
        ("Tulu3-Block-FT", {"hidden_size": 64}, True),
        ("tokenizer", None, False),
    ):
        folder = tmp_path / name
        folder.mkdir()
        if config is not None:
            written = json.dumps({"model_type": "llama", **config})
            (folder / "config.json").write_text(written, encoding="utf-8")
        assert is_trained(str(folder), {}) == expected
        assert width_of(str(folder), {}) == (0 if config is None else 64)


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
    settings = ServerSettings(
        model=str(tmp_path),
        backend="vllm",
        base_url=("http://a",),
        backend_key=str(key),
        policy=given,
    )
    backend = await asyncio.to_thread(launch.vllm_backend, settings)
    assert (await backend.own_policy()).name == name
    await backend.close()


async def test_servers_say_what_a_verdict_is_about() -> None:
    same, other = [FakeEngine(), FakeEngine()], FakeEngine(spec="other weights")
    backend = backend_of(*same)
    identity = await backend.identity()
    assert (identity.model, identity.revision) == ("m", "vllm 0.32, weights")
    assert identity == await backend_of(FakeEngine()).identity()
    assert identity.spec != (await backend_of(other).identity()).spec
    with pytest.raises(ApiError, match="say different things of themselves"):
        await backend_of(same[0], other).identity()
    with pytest.raises(ApiError, match="do not say what they are"):
        await backend_of(FakeEngine(dies="before")).identity()


async def test_the_gate_lets_pass_what_a_verdict_on_these_servers_says() -> None:
    identity = await backend_of(FakeEngine()).identity()
    cases = {
        "": (Gate(verdict_on(identity, 0.99)), FakeEngine()),
        "kept 50.0 % of full": (Gate(verdict_on(identity, 0.5)), FakeEngine()),
        "the verdict was made for": (Gate(verdict_on(identity, 0.99)), FakeEngine(spec="new")),
        "does not cover": (Gate(verdict_on(identity, 0.99)), FakeEngine()),
    }
    for words, (gate, engine) in cases.items():
        backend = backend_of(engine, gate=gate)
        policy = Reuse("composite") if words == "does not cover" else None
        cost = (await events_of(backend, request(policy=policy)))[-1].answer.metrics
        assert words in cost.gate
        assert bool(words) == bool(cost.gate)
        assert cost.policy == ("FullRecompute()" if words else repr(Reuse()))
        assert len(engine.asked("reuse")) == (not words)
        await backend.close()
    strict = backend_of(FakeEngine(), gate=Gate(verdict_on(identity, 0.5), below="error"))
    failed = (await events_of(strict, request()))[-1]
    assert (failed.status, "use the policy full" in failed.message) == (400, True)
    full = (await events_of(strict, request(policy=FullRecompute())))[-1]
    assert not full.answer.metrics.gate


async def test_an_evicted_chunk_is_stored_again() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    await events_of(backend, request())
    await settled(backend)
    engine.stored.pop()
    await events_of(backend, request())
    await settled(backend)
    assert len(engine.stored) == 3
    assert (await events_of(backend, request()))[-1].answer.metrics.misses == 0
    await backend.close()


async def test_many_at_once_let_a_server_measure_once() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    await asyncio.gather(*(events_of(backend, request(str(n))) for n in range(5)))
    await settled(backend)
    assert (len(engine.asked("law")), len(engine.asked("store"))) == (2, 3)
    await backend.close()


async def test_what_is_asked_is_the_very_prompt_of_an_engine() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}
    work = request(options=options, stop=("\n",), max_new_tokens=9, policy=Reuse("composite"))
    await events_of(backend, work)
    (body,) = engine.asked("reuse")
    ids = PromptRenderer(TEMPLATE, byte_tokenizer()).tokenize("When?", TEXTS, [])
    assert body["prompt"] == list(ids.all)
    given = body["kv_transfer_params"][FIELD]
    assert (given["prefix"], given["chunks"]) == (len(ids.prefix), [*map(len, ids.chunks)])
    assert given["positions"] == "composite"
    assert {name: body[name] for name in options} == options
    assert (body["max_tokens"], body["stop"]) == (9, ["\n", "\nDocument:"])
    await backend.close()


async def test_scores_change_nothing_of_a_prompt() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    for scores in (None, (0.1, 0.2, 0.9)):
        await events_of(backend, request(scores=scores))
    first, second = (body["prompt"] for body in engine.asked("reuse"))
    assert first == second
    await backend.close()


async def test_the_best_chunk_comes_first_and_is_all_that_is_stored() -> None:
    engine = FakeEngine()
    backend = backend_of(engine, policy=None)
    asked = request(question="What is frequent?", scores=(0.2, 0.1, 0.9))
    for number, misses in enumerate((1, 0)):
        cost = (await events_of(backend, asked))[-1].answer.metrics
        assert (cost.policy, cost.answered_from) == ("BestFew(count=None)", (2,))
        assert (cost.unused_chunks, cost.misses) == (2, misses)
        await settled(backend)
        body = engine.asked("reuse")[number]
        ids = PromptRenderer(TEMPLATE, byte_tokenizer()).tokenize(asked.question, TEXTS[2:], [])
        assert body["prompt"] == list(ids.all)
        assert body["kv_transfer_params"][FIELD]["chunks"] == [len(ids.chunks[0])]
    assert (cost.reused_tokens, cost.fresh_tokens) == (len(ids.chunks[0]), 0)
    assert len(engine.stored) == 1
    await backend.close()


async def test_further_chunks_of_the_few_stand_with_the_question() -> None:
    engine = FakeEngine()
    backend = backend_of(engine, policy=None)
    work = request(policy=BestFew(2), scores=(0.2, 0.9, 0.8), question="What?")
    await events_of(backend, work)
    await settled(backend)
    cost = (await events_of(backend, work))[-1].answer.metrics
    first, second = PromptRenderer(TEMPLATE, byte_tokenizer()).tokenize("?", TEXTS[1:], []).chunks
    assert (cost.answered_from, cost.unused_chunks) == ((1, 2), 1)
    assert (cost.reused_tokens, cost.fresh_tokens, cost.misses) == (len(first), len(second), 0)
    assert cost.prompt_tokens == len(engine.bodies[-1]["prompt"])
    # The same chunk first with another behind it: what is stored is reused.
    other = (await events_of(backend, request(scores=(0.8, 0.9, 0.1), policy=BestFew(2))))[-1]
    assert (other.answer.metrics.answered_from, other.answer.metrics.misses) == ((1, 0), 0)
    last = request(scores=(0.1, 0.9, 0.8), policy=BestLast(0.2))
    cost = (await events_of(backend, last))[-1].answer.metrics
    assert (cost.policy, cost.answered_from) == (repr(BestLast(0.2)), (0, 2, 1))
    assert (cost.fresh_tokens, cost.misses) == (len(first), 2)
    await backend.close()


async def test_a_server_that_stores_nothing_answers_from_the_few_as_well() -> None:
    engine = FakeEngine(law="it has no connector")
    backend = backend_of(engine, policy=None)
    work = request(question="What is frequent?", scores=(0.2, 0.1, 0.9))
    cost = (await events_of(backend, work))[-1].answer.metrics
    assert (cost.policy, cost.answered_from) == ("BestFew(count=None)", (2,))
    assert (cost.reused_tokens, cost.misses) == (0, 1)
    (body,) = engine.asked("plain")
    ids = PromptRenderer(TEMPLATE, byte_tokenizer()).tokenize(work.question, TEXTS[2:], [])
    assert body["prompt"] == list(ids.all), "its own prefix cache finds the beginning"
    await backend.close()


async def test_what_a_gate_refuses_is_answered_from_all_chunks() -> None:
    identity = await backend_of(FakeEngine()).identity()
    engine = FakeEngine()
    backend = backend_of(engine, policy=None, gate=Gate(verdict_on(identity, 0.99)))
    cost = (await events_of(backend, request()))[-1].answer.metrics
    assert "does not cover" in cost.gate
    assert (cost.policy, cost.answered_from) == ("FullRecompute()", (0, 1, 2))
    (body,) = engine.asked("plain")
    ids = PromptRenderer(TEMPLATE, byte_tokenizer()).tokenize("When?", TEXTS, [])
    assert body["prompt"] == list(ids.all)
    await backend.close()


async def test_a_prompt_is_counted_as_it_is_asked() -> None:
    backend = backend_of(FakeEngine(), policy=None)
    few = await backend.count(request(question="What is frequent?", scores=(0.2, 0.1, 0.9)))
    ids = PromptRenderer(TEMPLATE, byte_tokenizer()).tokenize("What is frequent?", TEXTS[2:], [])
    assert few == len(ids.all)
    assert await backend.count(request(policy=Reuse())) > few


async def test_streams_begin_with_their_first_text_and_end_with_the_whole() -> None:
    backend = backend_of(FakeEngine())
    started, *pieces, finished = await events_of(backend, request(streaming=True))
    assert isinstance(started, Started)
    assert [piece.text for piece in pieces if isinstance(piece, Piece)] == ["In ", "1937."]
    assert isinstance(finished, Finished)
    assert (finished.answer.text, finished.answer.finish_reason) == ("In 1937.", "stop")
    assert finished.answer.metrics.generated_tokens == 5
    whole = await events_of(backend, request())
    assert [type(event) for event in whole] == [Started, Finished]
    await backend.close()


async def test_plain_requests_bring_no_boundaries() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    for work in (
        request(chunks=(), is_plain=True),
        request(chunks=(), is_chat=True),
        request(chunks=()),
        request(policy=FullRecompute()),
    ):
        assert isinstance((await events_of(backend, work))[-1], Finished)
    assert len(engine.asked("plain")) == 4
    assert not engine.asked("law")
    assert not engine.stored
    await backend.close()


async def test_tenants_are_granted_their_own_alone() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    for tenant in ("a", "a", "b"):
        await events_of(backend, request(namespace=tenant))
        await settled(backend)
    assert Counter(piece[0] for piece in engine.stored) == {"a": 3, "b": 3}
    found = (await events_of(backend, request(namespace="c")))[-1].answer.metrics
    assert found.reused_tokens == 0
    await events_of(backend, request(namespace="c", chunks=()))
    salts = [body["cache_salt"] for body in (*engine.asked("reuse"), *engine.asked("plain"))]
    assert salts == [KEY.salt(tenant) for tenant in ("a", "a", "b", "c", "c")]
    await backend.close()


async def test_a_server_that_is_lost_before_its_first_token_is_replaced() -> None:
    for dying in (FakeEngine(dies="before"), FakeEngine(status=503)):
        living = FakeEngine()
        for pair in ((dying, living), (living, dying)):
            backend = backend_of(*pair)
            for number in range(4):  # whichever is asked first
                work = request(str(number), chunks=(TEXTS[number % 3], str(number)))
                assert isinstance((await events_of(backend, work))[-1], Finished)
            assert await backend.ready()
            await backend.close()
        assert dying.bodies


async def test_a_begun_answer_ends_with_an_error() -> None:
    backend = backend_of(FakeEngine(dies="after"), FakeEngine(dies="after"))
    *_, failed = await events_of(backend, request(streaming=True))
    assert isinstance(failed, Failed)
    assert (failed.status, "has ended" in failed.message) == (503, True)
    await backend.close()


async def test_without_any_server_the_client_is_told_when_to_ask_again() -> None:
    backend = backend_of(FakeEngine(dies="before"), FakeEngine(dies="before"))
    (failed,) = await events_of(backend, request())
    assert (failed.status, failed.retry_after is not None) == (503, True)
    assert not await backend.ready()
    assert (await backend.stats())["replicas"][0]["failed"] == 1
    await backend.close()


async def test_what_a_server_refuses_is_told() -> None:
    backend = backend_of(FakeEngine(status=400))
    (failed,) = await events_of(backend, request(chunks=()))
    assert (failed.status, failed.message) == (400, "no, because")
    await backend.close()


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
async def test_mistakes_are_one_sentence(changes: dict[str, Any], words: str) -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    (failed,) = await events_of(backend, request(**changes))
    assert isinstance(failed, Failed)
    assert failed.status == 400
    assert words in failed.message
    assert not engine.asked("reuse")
    await backend.close()


async def test_who_waits_is_bounded_and_each_has_its_place() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    backend = backend_of(engine, max_running=2, max_waiting=3)
    asked = []
    for number in range(6):
        asked.append(asyncio.create_task(events_of(backend, request(str(number), chunks=()))))
        while (len(engine.bodies), backend._waiting) != (
            min(number + 1, 2),
            min(max(number - 1, 0), 3),
        ):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    assert len(engine.bodies) == 2
    (refused,) = [task for task in asked if task.done()]
    assert "requests wait already" in refused.result()[0].message
    assert engine.hold is not None
    engine.hold.set()
    ends = [type((await task)[-1]) for task in asked]
    assert sorted(map(str, ends)) == sorted(map(str, [Finished] * 5 + [Failed]))
    await backend.close()


async def test_a_request_that_is_taken_back_gives_its_place_to_the_next() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    backend = backend_of(engine, max_running=1)
    first = asyncio.create_task(events_of(backend, request("1", chunks=())))
    second = asyncio.create_task(events_of(backend, request("2", chunks=())))
    while not engine.bodies:
        await asyncio.sleep(0.01)
    assert engine.hold is not None
    first.cancel()
    engine.hold.set()
    assert isinstance((await second)[-1], Finished)
    stats = (await backend.stats())["replicas"][0]
    assert stats["replica"] == "engine-0:8000"
    assert (stats["cancelled"], stats["answered"], stats["running"]) == (1, 1, 0)
    await backend.close()


async def test_a_server_whose_law_does_not_hold_answers_all_the_same() -> None:
    engine = FakeEngine(law="keys of layer 2 are 1.2 off")
    backend = backend_of(engine)
    for _ in range(2):
        assert isinstance((await events_of(backend, request()))[-1], Finished)
        await settled(backend)
    assert (len(engine.asked("law")), len(engine.asked("plain"))) == (2, 2)
    assert not engine.asked("store")
    await backend.close()


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
    with pytest.raises(
        InvalidInputError, match="what answers at http://engine is no server of vLLM"
    ):
        await client.describe()
    lost = EngineClient("http://engine", FakeEngine(dies="before").transport())
    assert (await lost.describe()).window == 4096
    with pytest.raises(LostError, match="refused"):
        await lost.complete({"prompt": [1]})
    await client.close()
    await lost.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "sglang"}, "backend cannot be used: must be"),
        ({"backend": "vllm"}, "needs its servers: --base-url"),
        ({"base_url": ("http://a",)}, "are for servers: say --backend vllm"),
        ({"backend_key": "file"}, "are for servers: say --backend vllm"),
        (
            {"backend": "vllm", "base_url": ("http://a",), "kv_dir": "kv"},
            "--kv-dir is for a model in this",
        ),
        (
            {"backend": "vllm", "base_url": ("http://a",), "prefetch": "same"},
            "--prefetch is for a model",
        ),
    ],
)
def test_options_of_the_other_engine_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ServerSettings(model="m", **options)
