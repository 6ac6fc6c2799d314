"""An engine of another machine answers as that machine's engine does; nothing is loaded here."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import socket
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serve_fakes import running, settings, tiny_backend

from kvcache_rag import (
    BestLast,
    CacheBlend,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    Message,
    Reuse,
)
from kvcache_rag.errors import ContextTooLongError, FingerprintMismatchError, RemoteServerError
from kvcache_rag.generation import StoredChunk, cancellable
from kvcache_rag.integration import (
    ConversationForms,
    Reference,
    ToolChoice,
    prefill_texts,
    remote_engine,
)
from kvcache_rag.policies import POLICY_NAMES, policy_by_name
from kvcache_rag.policies.policy_registry import name_of
from kvcache_rag_lab.evaluation.tasks import own_score
from kvcache_rag_lab.evaluation.verification import Verification
from kvcache_rag_lab.scoring.question import Question
from kvcache_rag_server import responses
from kvcache_rag_server.app import build_app
from kvcache_rag_server.keys import new_key
from kvcache_rag_server.remote import OWNER, RemoteEngine
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

QUESTION = "Where does Bralo keep the red lamp?"
DOCUMENTS = [
    "Bralo keeps the red lamp in the hall. The blue cup belongs to Mira.",
    "Sorin keeps the old map in the cellar. The key belongs to Tano.",
    "Mira keeps the blue cup in the kitchen. The lamp belongs to Bralo.",
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """What the server's answers are held against; it shares nothing with it."""
    return Engine.from_pretrained("tiny", device="cpu")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        tiny_backend(tmp_path_factory.mktemp("kv")) as backend,
        running(build_app(backend, settings())) as found,
    ):
        yield found


@pytest.fixture
def remote(url: str) -> Iterator[RemoteEngine]:
    found = RemoteEngine(url)
    yield found
    found.close()
    found.close()  # which does nothing


SERVED = {"id": "tiny", "owned_by": OWNER, "max_model_len": 512}


def told(
    handle: Callable[[httpx.Request], Any], model: dict[str, Any] = SERVED, **options: Any
) -> RemoteEngine:
    """An engine whose server is a function."""

    async def answered(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [model]})
        reply = handle(request)
        return await reply if inspect.isawaitable(reply) else reply

    return RemoteEngine("http://server", transport=httpx.MockTransport(answered), **options)


def yes(_: httpx.Request) -> httpx.Response:
    body = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}], "kvcache": {}}
    return httpx.Response(200, json=body)


# ---------------------------------------------------------------------- the same answers
@pytest.mark.parametrize("policy", [None, Reuse("composite"), CacheBlend(0.5), FullRecompute()])
def test_answers_are_those_of_the_engine_there(
    remote: RemoteEngine, engine: Engine, policy: Any
) -> None:
    for chunks in ([], DOCUMENTS, DOCUMENTS[::-1]):
        expected = engine.generate(QUESTION, chunks, policy=policy, max_new_tokens=12)
        answer = remote.generate(QUESTION, chunks, policy=policy, max_new_tokens=12)
        assert answer.text == expected.text
        assert answer.finish_reason == expected.finish_reason
        for name in ("prompt_tokens", "generated_tokens", "query_tokens", "policy"):
            assert getattr(answer.metrics, name) == getattr(expected.metrics, name)
    assert answer.metrics.misses == 0
    assert answer.metrics.reused_tokens > 0 or isinstance(policy, FullRecompute)


def test_streams_batches_and_histories_too(remote: RemoteEngine, engine: Engine) -> None:
    history = [Message("user", "Where is Mira?"), Message("assistant", "In the kitchen.")]
    expected = engine.generate(QUESTION, DOCUMENTS, history=history, max_new_tokens=12)
    stream = remote.stream(QUESTION, DOCUMENTS, history=history, max_new_tokens=12)
    assert "".join(stream) == expected.text == stream.text
    assert stream.metrics.generated_tokens == expected.metrics.generated_tokens
    questions = [(QUESTION, DOCUMENTS), ("Where is the map?", DOCUMENTS[1:], history)]
    batches = [one.generate_batch(questions, max_new_tokens=8) for one in (remote, engine)]
    there, here = ([answer.text for answer in batch] for batch in batches)
    assert there == here


def test_texts_and_conversations_go_on(remote: RemoteEngine, engine: Engine) -> None:
    turns = [{"role": "user", "content": "Where is the lamp?"}]
    assert remote.render_chat(turns, tools=None) == "user: Where is the lamp?"
    for there, here in (
        ("The red lamp", "The red lamp"),
        (remote.render_chat(turns, tools=None), engine.render_chat(turns)),
    ):
        expected = engine.complete(here, max_new_tokens=6).text
        assert remote.complete(there, max_new_tokens=6).text == expected
        assert "".join(remote.stream_complete(there, max_new_tokens=6)) == expected


def test_what_was_prefilled_is_reused(remote: RemoteEngine) -> None:
    texts = [f"The box number {place} is green." for place in range(20)]
    assert remote.add(texts, show_progress=False) == [None] * 20
    answer = remote.generate("What is green?", texts[3:6], max_new_tokens=4)
    assert (answer.metrics.misses, sum(answer.metrics.hits.values())) == (0, 3)
    assert remote.keys(texts[:1]) == [None]
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(CancelledError):
        remote.add(texts, cancelled=stopped)


def test_a_server_that_takes_less_at_once_is_given_less() -> None:
    texts = [f"The box number {place} is green." for place in range(20)]
    large = [*texts[:9], "The box is " + "very " * 50 + "green.", *texts[9:]]
    limits = RequestLimits(max_documents=3, max_document_bytes=100)
    with tiny_backend() as backend, running(build_app(backend, settings(limits=limits))) as found:
        few = RemoteEngine(found)
        with pytest.raises(ContextTooLongError, match=r"chunk 9 is more .* document_bytes of 100"):
            few.add(large)
        with pytest.warns(UserWarning, match=r"row 'r9' written without .*: it is more than the"):
            prefill_texts(few, [f"r{index}" for index in range(21)], large)
        for place in (0, 8, 9, 19):
            answer = few.generate("What is green?", [texts[place]], max_new_tokens=4)
            assert (answer.metrics.misses, sum(answer.metrics.hits.values())) == (0, 1)
        few.close()


def test_a_verdict_is_about_the_engine_there(remote: RemoteEngine, engine: Engine) -> None:
    assert remote.identity == engine.identity
    questions = [
        Question("a", QUESTION, tuple(DOCUMENTS), answers=("in the hall",)),
        Question("b", "Where is the map?", tuple(DOCUMENTS), answers=("in the cellar",)),
    ]
    planned = Verification(questions, own_score, "f1", max_new_tokens=8)
    here, there = (
        planned.verdict(one, [Reuse(), LegoLink(4)]) for one in (engine, remote_engine(remote.url))
    )
    assert (there.identity, there.recommended) == (here.identity, here.recommended)
    for mine, theirs in zip(
        (here.full, *here.policies), (there.full, *there.policies), strict=True
    ):
        for name in ("policy", "score", "f1", "agreement", "same_answer", "recomputed"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert math.isnan(theirs.first_divergence)
    assert (there.checks, there.notes[-1][:8]) == ((), "A server")


def test_the_window_and_the_name_are_the_servers(remote: RemoteEngine, engine: Engine) -> None:
    assert remote.context_window == engine.context_window
    assert remote.name == "tiny"
    assert RemoteEngine(f"{remote.url}/v1/", window=100).context_window == 100
    assert OWNER == responses.OWNER


@pytest.fixture(scope="module")
def many(engine: Engine) -> list[str]:
    """More than fits."""
    long = [f"{text} " * (engine.context_window // 60) for text in DOCUMENTS * 3]
    return [f"{place}: {text}" for place, text in enumerate(long)]


@pytest.mark.parametrize("has_scores", [False, True])
def test_what_fits_is_answered_from(
    remote: RemoteEngine, engine: Engine, many: list[str], has_scores: bool
) -> None:
    scores = [float(place) for place in range(len(many))] if has_scores else None
    options: Any = {"overflow": "drop_lowest", "scores": scores, "max_new_tokens": 8}
    expected = engine.generate(QUESTION, many, **options)
    answer = remote.generate(QUESTION, many, **options)
    assert answer.text == expected.text
    for name in ("dropped_chunks", "answered_from"):
        assert getattr(answer.metrics, name) == getattr(expected.metrics, name)
    assert answer.metrics.dropped_chunks > 0
    assert (min(answer.metrics.answered_from) > 0) is has_scores
    assert "".join(remote.stream(QUESTION, many, **options)) == expected.text
    texts = [f"again {text}" for text in many]
    missed = remote.generate(QUESTION, texts, policy="reuse", **options).metrics
    assert [one.chunk for one in missed.missed] == [*missed.answered_from]


def test_what_does_not_fit_is_refused(remote: RemoteEngine, many: list[str]) -> None:
    for asked in (remote.generate, remote.stream):
        with pytest.raises(ContextTooLongError, match="context window"):
            asked(QUESTION, many, max_new_tokens=8)
    with pytest.raises(ContextTooLongError):
        remote.add([" ".join(many)])


def test_what_an_answer_was_computed_from_has_the_callers_numbers(
    remote: RemoteEngine, engine: Engine
) -> None:
    """Also where equal texts are one chunk for the server, and others were not sent to it."""
    texts = [DOCUMENTS[1], DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2]]
    for policy, used, unused in (("bestfew:1", (2,), 2), ("reuse", (0, 2, 3), 0)):
        found = remote.generate(QUESTION, texts, policy=policy, max_new_tokens=4).metrics
        assert (found.answered_from, found.unused_chunks) == (used, unused)
        assert found.prompt_tokens == found.prefix_tokens + found.query_tokens + sum(
            len(engine.tokenize("?", [texts[place]]).chunks[0]) for place in used
        )
        stream = remote.stream(QUESTION, texts, policy=policy, max_new_tokens=4)
        assert "".join(stream)
        assert stream.answer.metrics.answered_from == used
    assert remote.complete("Hello", max_new_tokens=2).metrics.answered_from == ()
    new = ["This was never read before, not once.", "Nor was that, which is another text."]
    remote.add(DOCUMENTS[:1])
    texts = [new[0], new[0], DOCUMENTS[0], new[1]]
    missed = remote.generate(QUESTION, texts, policy="reuse", max_new_tokens=4).metrics.missed
    told = [(one.chunk, one.reason) for one in missed]
    assert told == [(0, "not prefilled"), (3, "not prefilled")]


def test_scores_stand_beside_the_documents(remote: RemoteEngine, engine: Engine) -> None:
    scores, options = (0.1, 0.2, 0.9), {"policy": BestLast(), "max_new_tokens": 12}
    asked: list[Any] = [(QUESTION, DOCUMENTS, (), scores), (QUESTION, DOCUMENTS)]
    expected = [
        engine.generate(QUESTION, DOCUMENTS, scores=given, **options) for given in (scores, None)
    ]
    answer = remote.generate(QUESTION, DOCUMENTS, scores=scores, **options)
    assert answer.text == expected[0].text
    assert answer.metrics.fresh_tokens == expected[0].metrics.fresh_tokens
    there, here = (
        [one.metrics.fresh_tokens for one in answers]
        for answers in (remote.generate_batch(asked, **options), expected)
    )
    assert there == here
    assert len({*here}) == 2, "it must be able to fail"


def test_the_instruction_stands_where_the_server_can_have_it(url: str, engine: Engine) -> None:
    other = RemoteEngine(url, system_prompt="Answer in one word.")
    assert other.template.system == other.prefix_text == "Answer in one word."
    expected = engine.generate(f"Answer in one word.\n\n{QUESTION}", DOCUMENTS, max_new_tokens=6)
    answer = other.generate(QUESTION, DOCUMENTS, max_new_tokens=6)
    assert answer.text == expected.text


def test_tenants_are_told_by_their_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    named = [new_key(keys, name) for name in ("a", "b")]
    with tiny_backend() as backend, running(build_app(backend, settings(api_keys=keys))) as url:
        first, second = (RemoteEngine(url, api_key=key) for key in named)
        first.add(DOCUMENTS)
        for one, misses in ((first, 0), (second, 3)):
            assert one.generate(QUESTION, DOCUMENTS, max_new_tokens=4).metrics.misses == misses
        with pytest.raises(InvalidInputError, match="key"):
            RemoteEngine(url).generate(QUESTION)


# ---------------------------------------------------------------------- what ends before its time
class Slow:
    """A server that does not answer, and notices who goes away."""

    def __init__(self) -> None:
        self.asked, self.left = threading.Event(), threading.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.left.set()
        raise AssertionError("nobody waits so long")


async def test_who_goes_away_ends_the_answer() -> None:
    slow = Slow()
    task = asyncio.create_task(cancellable(told(slow).generate, QUESTION, DOCUMENTS))
    await asyncio.to_thread(slow.asked.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(slow.left.wait, 5)


def test_time_ends_an_answer_where_it_is() -> None:
    slow = Slow()
    answer = told(slow).generate(QUESTION, DOCUMENTS, max_time=0.1)
    assert (answer.text, answer.finish_reason) == ("", "length")
    assert slow.left.wait(5)


def test_a_stream_that_is_closed_ends_there(remote: RemoteEngine) -> None:
    stream = remote.stream(QUESTION, DOCUMENTS, max_new_tokens=400)
    next(stream)
    stream.close()
    assert not list(stream)


def test_a_server_without_room_is_asked_again() -> None:
    asked = []

    def busy(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        if len(asked) == 3:
            return yes(request)
        error = {"message": "full", "type": "x", "param": None, "code": None}
        return httpx.Response(503, json={"error": error}, headers={"retry-after": "0"})

    assert told(busy).generate("?").text == "yes"
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(RemoteServerError, match="server says: full"):
        told(busy, retries=1).generate("?")


def test_a_server_that_is_lost_within_an_answer_is_not_asked_again() -> None:
    asked = []

    def cut(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, text='data: {"choices": [{"delta": {"content": "ye"}}]}\n\n')

    stream = told(cut).stream("?")
    assert next(stream) == "ye"
    with pytest.raises(RemoteServerError, match="the answer has no end"):
        next(stream)
    assert len(asked) == 1


# ---------------------------------------------------------------------- what cannot be
@pytest.mark.parametrize("url", ["", "server:8000", "ftp://server", 3])
def test_what_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises(InvalidInputError, match="no server's URL"):
        RemoteEngine(url)


def test_a_server_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        url = f"http://127.0.0.1:{one.getsockname()[1]}"
    said = rf"cannot reach the server at {url} .*`kvcache-rag serve` running"
    with pytest.raises(RemoteServerError, match=said):
        RemoteEngine(url, retries=0).generate("?")


def test_another_server_or_model_is_told(url: str) -> None:
    other = told(yes, model={"id": "gpt", "owned_by": "vllm"})
    with pytest.raises(RemoteServerError, match="no server of kvcache-rag"):
        other.generate("?", ["text"])
    with pytest.raises(InvalidInputError, match="serves 'tiny', not 'large'"):
        RemoteEngine(url, model="large").generate("?")


def test_an_error_within_a_stream_is_the_clients_or_the_servers() -> None:
    error = {"message": "bad", "type": "invalid_request_error", "code": None}
    text = f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n"
    with pytest.raises(InvalidInputError, match="bad"):
        told(lambda _: httpx.Response(200, text=text)).stream("?")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams is not told to the server"),
        ({"logits_processor": [1], "tools": [2]}, "logits_processor and tools are not told"),
        ({"policy": LegoLink(4, positions="composite")}, "cannot be written down"),
        ({"max_new_tokens": 10**9}, "the server at .* says: "),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
    ],
)
def test_what_the_server_is_not_told_is_refused(
    remote: RemoteEngine, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        remote.generate(QUESTION, DOCUMENTS, **options)


def test_what_needs_the_model_is_refused(remote: RemoteEngine, engine: Engine) -> None:
    for name in ("model", "tokenizer"):
        with pytest.raises(InvalidInputError, match="needs model and tokenizer"):
            getattr(remote, name)
    with pytest.raises(FingerprintMismatchError):
        remote.reference("0" * 64, "spec", 3)
    (key,) = engine.add(DOCUMENTS[:1])
    with pytest.raises(InvalidInputError, match="not keys of chunks"):
        remote.generate(QUESTION, [key])
    stored = StoredChunk(key, DOCUMENTS[0])
    assert remote.generate(QUESTION, [stored], max_new_tokens=2).metrics.query_tokens > 0
    reference = Reference.of(key, DOCUMENTS[0], engine)
    assert reference.chunk("text", remote_engine(remote.url)) == "text"
    assert remote.delete([]) is None
    forms = ConversationForms.of(remote_engine(remote.url))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(InvalidInputError, match="tools are called"):
        forms.form([], ToolChoice.of([tool], None, None))
    with pytest.raises(InvalidInputError, match="chat_template_kwargs are not told"):
        forms.form([], ToolChoice.of(None, None, None), {"enable_thinking": False})


# ---------------------------------------------------------------------- laws of its form
def test_it_has_the_arguments_of_the_engine() -> None:
    shared = [
        name
        for name, one in vars(RemoteEngine).items()
        if not name.startswith("_") and inspect.isfunction(one) and name != "close"
    ]
    assert len(shared) >= 10
    for name in shared:
        mine = inspect.signature(getattr(RemoteEngine, name)).parameters
        its = [*inspect.signature(getattr(Engine, name)).parameters]
        if any(one.kind is one.VAR_KEYWORD for one in mine.values()):  # takes others together
            positional = [
                one.name for one in mine.values() if one.kind is one.POSITIONAL_OR_KEYWORD
            ]
            assert positional == its[: len(positional)], name
        else:
            assert [*mine] == its, name


@pytest.mark.parametrize("name", [*POLICY_NAMES, "cacheblend:0.25", "ape:0.7,1.0"])
def test_a_policy_is_written_as_it_is_read(name: str) -> None:
    assert policy_by_name(name_of(policy_by_name(name))) == policy_by_name(name)
