"""Streams: the pieces join to the text, errors arrive, and who goes away stops the model."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import access
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, PromptTemplate, prefill
from kvcache_rag.generation.stream import AnswerStream, AsyncAnswerStream
from kvcache_rag.generation.text_decoder import TextDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUESTION, TEXTS = "Who?", ["The cat sat on the mat.", "A dog ran away."]
LONG = 1500
PATIENCE = 20.0


@pytest.fixture(scope="module")
def shared() -> Engine:
    template = PromptTemplate(system="Read this.\n", chunk_start="<d>", chunk_end="</d>")
    return Engine(build("qwen2"), byte_tokenizer(), template=template)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """With no token that ends an answer early, and certainly idle before and after."""
    shared.model.generation_config.eos_token_id = None
    yield shared
    assert access.lock(shared).acquire(timeout=PATIENCE), "a stream still holds the model"
    access.lock(shared).release()


class Steps:
    """Counts the forward passes of a model, and can make one of them fail or slow."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.count, self.fails_at, self.pause = 0, 0, 0.0
        forward = engine.model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            time.sleep(self.pause)
            if self.count == self.fails_at:
                raise RuntimeError("the device is gone")
            return forward(*args, **kwargs)

        patch.setattr(engine.model, "forward", counted)


@pytest.fixture
def steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Steps:
    engine.generate(QUESTION, TEXTS, max_new_tokens=1)  # prefix and chunks are cached now
    return Steps(engine, monkeypatch)


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def token_of_byte(value: int) -> int:
    return int(byte_tokenizer().get_vocab()[bytes_to_unicode()[value]])


async def read(stream: AsyncAnswerStream) -> list[str]:
    return [piece async for piece in stream]


async def sees_that_the_model_stopped(engine: Engine, steps: Steps) -> None:
    answer = await asyncio.wait_for(engine.agenerate(QUESTION, TEXTS, max_new_tokens=2), PATIENCE)
    assert answer.metrics.generated_tokens == 2
    assert steps.count < LONG / 2


def push_all(decoder: TextDecoder, raw: bytes) -> list[str]:
    pieces = [decoder.push([token_of_byte(value)]) for value in raw]
    return [*pieces, decoder.finish()]


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.binary(max_size=12), st.text("ab€", max_size=12).map(str.encode)),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
def test_pieces_join_to_the_text_before_the_first_stop(raw: bytes, stop: list[str]) -> None:
    decoder = TextDecoder(byte_tokenizer(), stop)
    pieces = push_all(decoder, raw)
    whole = str(byte_tokenizer().decode([token_of_byte(value) for value in raw]))
    cut = len(whole)
    for end in range(len(whole) + 1):  # the first stop that is complete, where it begins
        found = [whole.find(one, 0, end) for one in stop if one in whole[:end]]
        if found:
            cut = min(found)
            break
    assert "".join(pieces) == decoder.text == whole[:cut]
    assert decoder.stopped == (cut < len(whole))


def test_an_incomplete_character_is_held_back() -> None:
    decoder = TextDecoder(byte_tokenizer())
    assert push_all(decoder, "a€😀b".encode()) == [
        *("a", "", "", "€", "", "", "", "😀", "b", ""),
    ]
    broken = TextDecoder(byte_tokenizer())
    pieces = push_all(broken, b"a\xe2\x82")
    assert pieces[:3] == ["a", "", ""]
    assert pieces[3].startswith("\ufffd"), "what never becomes a character is still told"


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop(
    text: str, stop: list[str]
) -> None:
    decoder = TextDecoder(byte_tokenizer(), stop)
    for value in text.encode():
        decoder.push([token_of_byte(value)])
    assume(not decoder.stopped)
    ends = {text[start:] for start in range(len(text))}
    held = max((len(end) for end in ends if any(one.startswith(end) for one in stop)), default=0)
    assert decoder.text == text[: len(text) - held]


def test_a_long_stop_is_not_read_anew_for_every_token() -> None:
    class Counted(str):
        read = 0

        def __getitem__(self, place: Any) -> str:
            found = super().__getitem__(place)
            Counted.read += len(found)
            return found

    class Letters:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "a" * len(ids)

    tokens = 2000
    decoder = TextDecoder(Letters(), [Counted("a" * 5000 + "b")] * 2)
    for _ in range(tokens):
        assert decoder.push([1]) == ""
    assert Counted.read < 20 * tokens, "characters of the stops that were looked at"
    assert decoder.finish() == "a" * tokens


def test_generation_ends_at_a_stop_string_of_several_tokens(engine: Engine, steps: Steps) -> None:
    whole = engine.generate(QUESTION, TEXTS, max_new_tokens=30)
    letters = [engine.tokenizer.decode(one) for one in whole.token_ids]
    place = next(
        i for i in range(4, 27) if "\ufffd" not in "".join(letters[i : i + 3]) and letters[i]
    )
    stop = "".join(letters[place : place + 3])
    steps.count = 0
    stream = engine.stream(QUESTION, TEXTS, max_new_tokens=30, stop=["never said", stop])
    found = "".join(stream)
    assert found == stream.text == whole.text[: whole.text.index(stop)]
    assert stream.answer.finish_reason == "stop"
    assert steps.count == stream.metrics.generated_tokens <= place + 3
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=30, stop=stop).text == found


def test_a_stream_is_the_answer_in_pieces(engine: Engine) -> None:
    stream = engine.stream(QUESTION, TEXTS, max_new_tokens=12)
    with pytest.raises(InvalidInputError, match="read it to its end"):
        _ = stream.metrics
    pieces = list(stream)
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=12)
    assert "".join(pieces) == answer.text == stream.text
    assert len(pieces) > 3
    assert stream.answer.token_ids == answer.token_ids
    assert stream.metrics.generated_tokens == 12
    assert list(stream) == []
    assert "".join(engine.stream_complete("Once", max_new_tokens=5)) == (
        engine.complete("Once", max_new_tokens=5).text
    )


def test_an_error_inside_reaches_the_consumer(engine: Engine, steps: Steps) -> None:
    steps.fails_at = 3
    stream = engine.stream(QUESTION, TEXTS, max_new_tokens=50)
    with pytest.raises(RuntimeError, match="the device is gone"):
        list(stream)
    assert list(stream) == []
    with pytest.raises(InvalidInputError):
        _ = stream.answer
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=3).metrics.generated_tokens == 3


async def test_an_error_inside_reaches_an_async_consumer(engine: Engine, steps: Steps) -> None:
    steps.fails_at = 3
    stream = engine.astream(QUESTION, TEXTS, max_new_tokens=50)
    with pytest.raises(RuntimeError, match="the device is gone"):
        await asyncio.wait_for(read(stream), PATIENCE)
    with pytest.raises(InvalidInputError, match="empty"):
        await engine.astream("", TEXTS).__anext__()


@pytest.mark.parametrize("how", ["close", "drop", "with"])
def test_who_goes_away_stops_the_model(engine: Engine, steps: Steps, how: str) -> None:
    stream: AnswerStream | None = engine.stream(QUESTION, TEXTS, max_new_tokens=LONG)
    assert stream is not None
    thread = stream._thread
    next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            next(stream)
    else:
        stream = None
        gc.collect()
    assert eventually(lambda: not thread.is_alive())
    assert steps.count < LONG / 2
    steps.count = 0
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    assert steps.count == answer.metrics.generated_tokens == 4


def test_nobody_has_to_read_a_stream_for_others_to_be_answered(engine: Engine) -> None:
    unread = engine.stream(QUESTION, TEXTS, max_new_tokens=20)
    answer = engine.generate(QUESTION, TEXTS, max_new_tokens=20)
    assert "".join(unread) == answer.text


async def test_an_async_stream_never_blocks_the_loop(engine: Engine, steps: Steps) -> None:
    steps.pause = 0.03
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - before)

    ticking = asyncio.create_task(tick())
    stream = engine.astream(QUESTION, TEXTS, max_new_tokens=12)
    pieces = await read(stream)
    alone = await engine.agenerate(QUESTION, TEXTS, max_new_tokens=12)
    ticking.cancel()
    assert "".join(pieces) == stream.text == alone.text
    assert stream.metrics.generated_tokens == 12
    assert len(gaps) > 50, "24 steps of 30 ms leave room for hundreds of ticks"


async def test_pieces_come_however_many_others_wait(engine: Engine, steps: Steps) -> None:
    steps.pause = 0.02
    running: set[int] = set()
    ended = list[int]()

    async def consume(number: int) -> None:
        stream = engine.astream(QUESTION, TEXTS, max_new_tokens=6 if number else 30)
        async for _ in stream:
            running.add(number)
            # Of what is answered, the pieces come while it is answered.
            assert number or not ended
        ended.append(number)

    first = asyncio.create_task(consume(0))
    while not running:
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(consume(number)) for number in range(1, 100)]
    await first
    assert not running - {0}, "nothing but this one was answered"
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_cancelling_the_consumer_stops_the_model(engine: Engine, steps: Steps) -> None:
    steps.pause = 0.005
    stream = engine.astream(QUESTION, TEXTS, max_new_tokens=LONG)  # held, so not dropped
    task = asyncio.create_task(read(stream))
    while not steps.count:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sees_that_the_model_stopped(engine, steps)


async def test_a_stream_cancelled_while_it_is_started_stops_too(
    engine: Engine, steps: Steps
) -> None:
    going, proceed = threading.Event(), threading.Event()

    def start() -> AnswerStream:
        going.set()
        proceed.wait(PATIENCE)
        return engine.stream(QUESTION, TEXTS, max_new_tokens=LONG)

    stream = AsyncAnswerStream(start)  # held, so not dropped
    task = asyncio.create_task(anext(stream))
    while not going.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    proceed.set()
    await sees_that_the_model_stopped(engine, steps)
    await stream.aclose()


async def test_closing_an_async_stream_stops_the_model(engine: Engine, steps: Steps) -> None:
    unread = engine.astream(QUESTION, TEXTS, max_new_tokens=LONG)
    await unread.aclose()
    assert await read(unread) == [], "as of any generator that was closed"
    assert steps.count == 0
    stream = engine.astream(QUESTION, TEXTS, max_new_tokens=LONG)
    await stream.__anext__()
    await stream.aclose()
    assert steps.count < LONG / 2
    with pytest.raises(InvalidInputError, match="has not ended"):
        _ = stream.metrics


async def test_an_event_of_the_caller_stops_an_async_answer(engine: Engine) -> None:
    cancelled = threading.Event()
    cancelled.set()
    answer = await engine.agenerate(QUESTION, TEXTS, max_new_tokens=LONG, cancelled=cancelled)
    assert not answer.token_ids
    answer = await engine.acomplete("Once", max_new_tokens=LONG, cancelled=cancelled)
    assert not answer.token_ids


def test_a_stream_takes_none_for_what_it_does_by_itself(engine: Engine) -> None:
    options: Any = {"emit": None, "cancelled": None, "max_new_tokens": 3}
    expected = engine.generate(QUESTION, TEXTS, **options)
    assert "".join(engine.stream(QUESTION, TEXTS, **options)) == expected.text
    assert "".join(engine.stream_complete("Once", **options))
    assert engine.generate_batch([(QUESTION, TEXTS)], **options)[0].text == expected.text


def test_missing_chunks_are_computed_until_nobody_wants_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "BATCH_TOKENS", 1)  # a batch for each
    texts = [f"{number} is a number." for number in range(4)]
    cancelled, batches = threading.Event(), list[int]()

    def passed(*_: Any) -> None:
        batches.append(1)
        if len(batches) > 1:
            cancelled.set()

    hook = engine.model.get_submodule("model.layers.0").register_forward_hook(passed)
    try:
        engine.add(["Behind the prefix, which is there now."])
        cancelled.clear()
        batches.clear()
        answer = engine.generate(
            QUESTION, texts, policy="reuse", max_new_tokens=9, cancelled=cancelled
        )
        held = [engine.store.contains(key) for key in engine.keys(texts)]
        again = engine.generate(QUESTION, texts, policy="reuse", max_new_tokens=1)
    finally:
        hook.remove()
    assert (answer.text, answer.finish_reason) == ("", "length")
    assert (held.count(True), again.metrics.misses) == (1, 3)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["ours", "transformers"])
def test_a_full_prefill_ends_before_its_next_layer(engine: Engine, options: Any) -> None:
    cancelled, passed = threading.Event(), list[int]()
    first, second, *_ = layers = engine.model.get_submodule("model.layers")
    hooks = [
        first.register_forward_hook(lambda *_: cancelled.set()),
        second.register_forward_hook(lambda *_: passed.append(1)),
    ]
    try:
        answer = engine.generate(QUESTION, TEXTS, policy="full", cancelled=cancelled, **options)
    finally:
        for hook in hooks:
            hook.remove()
    assert (answer.text, answer.finish_reason) == ("", "length")
    assert not passed
    assert not any(layer._forward_pre_hooks for layer in layers), "the model is as it was"
    assert engine.generate(QUESTION, TEXTS, policy="full", max_new_tokens=1).token_ids


def test_a_callback_of_an_answer_cannot_ask_its_model(engine: Engine) -> None:
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=3)
    calls: list[Callable[[str], Any]] = [
        lambda _: engine.generate("Why?", TEXTS[:1], max_new_tokens=1),
        lambda _: engine.generate_batch([("Why?", TEXTS[:1])], max_new_tokens=1),
        lambda _: engine.complete("Once", max_new_tokens=1),
        lambda _: engine.logits("Why?", TEXTS[:1]),
        lambda _: engine.explain("Why?", TEXTS[:1]),
        lambda _: engine.in_namespace("other").generate("Why?", TEXTS[:1], max_new_tokens=1),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError, match="is answering, and its callbacks"):
            engine.generate(QUESTION, TEXTS, max_new_tokens=3, emit=call)
        assert engine.generate(QUESTION, TEXTS, max_new_tokens=3).token_ids == expected.token_ids
    # Adding has memory of its own, and so has an engine of its own.
    others = Engine(engine.model, engine.tokenizer, template=engine.template)
    allowed: list[Callable[[str], Any]] = [
        lambda _: engine.add(["What is added meanwhile."]),
        lambda _: others.generate("Why?", TEXTS[:1], max_new_tokens=1),
    ]
    for call in allowed:
        found = engine.generate(QUESTION, TEXTS, max_new_tokens=3, emit=call)
        assert found.token_ids == expected.token_ids


def test_a_stream_cancelled_while_it_waits_runs_nothing(engine: Engine, steps: Steps) -> None:
    with access.lock(engine):
        stream = engine.stream(QUESTION, TEXTS, max_new_tokens=50)
        time.sleep(0.05)
        stream._cancelled.set()
    stream.close()
    assert steps.count == 0


def test_a_program_that_ends_in_the_middle_of_a_stream_ends_cleanly() -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from zoo import build, byte_tokenizer\n"
        "from kvcache_rag import Engine\n"
        "model = build('qwen2'); model.generation_config.eos_token_id = None\n"
        "stream = Engine(model, byte_tokenizer()).stream('q', ['text'], max_new_tokens=1500)\n"
        "next(stream)\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-300:]
