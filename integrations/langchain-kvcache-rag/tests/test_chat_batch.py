"""`batch` and `abatch`: answered together, reported apart."""

from __future__ import annotations

import signal
import threading
import uuid
from typing import TYPE_CHECKING, Any

import langchain_core.globals
import pytest
from chat_model_helpers import LONG, Recorder, Steps, details, over
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda

from kvcache_rag import Engine, InvalidInputError
from kvcache_rag.errors import ContextTooLongError
from langchain_kvcache_rag.chat_model import ChatKVCache

if TYPE_CHECKING:
    from collections.abc import Callable


QUESTIONS = [over("what?", "one"), over("who is it?", "two", "three"), over("why?", "one", "four")]


@pytest.fixture
def batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each padded batch, 1 for each single answer."""
    rows: list[int] = []
    together, alone = engine.generate_batch, engine.generate

    def batch(questions: Any, **options: Any) -> Any:
        rows.append(len(questions))
        return together(questions, **options)

    def single(*arguments: Any, **options: Any) -> Any:
        rows.append(1)
        return alone(*arguments, **options)

    monkeypatch.setattr(engine, "generate_batch", batch)
    monkeypatch.setattr(engine, "generate", single)
    return rows


async def test_a_batch_equals_its_singles_in_one_generate(
    llm: ChatKVCache, batches: list[int]
) -> None:
    singles = [llm.invoke(question) for question in QUESTIONS]
    batches.clear()
    for answers in (llm.batch(QUESTIONS), await llm.abatch(QUESTIONS)):
        assert [one.text for one in answers] == [one.text for one in singles]
        assert len({one.id for one in answers}) == 3
        for answer, single in zip(answers, singles, strict=True):
            counted, wanted = answer.usage_metadata, single.usage_metadata
            assert counted
            assert wanted
            assert counted["input_tokens"] == wanted["input_tokens"]
            assert details(answer)["cache_read"] > 0
    assert batches == [3, 3]
    assert llm.batch([]) == await llm.abatch([]) == []


async def test_equal_prompts_get_a_sample_each(llm: ChatKVCache, batches: list[int]) -> None:
    sampling = llm.model_copy(update={"temperature": 1.0, "max_tokens": 12})
    for answers in (sampling.batch([QUESTIONS[0]] * 4), await sampling.abatch([QUESTIONS[0]] * 4)):
        assert len({one.text for one in answers}) == 4
    assert batches == [4, 4]


def test_questions_without_documents_are_answered_alone(
    llm: ChatKVCache, batches: list[int]
) -> None:
    inputs = ["Hello", QUESTIONS[0], [HumanMessage("who?")], over("why?", ""), QUESTIONS[2]]
    answers = llm.batch(inputs)
    assert batches == [3]
    assert [one.text for one in answers] == [llm.invoke(one).text for one in inputs]


def test_history_and_instruction_are_each_rows_own(llm: ChatKVCache, batches: list[int]) -> None:
    told = [SystemMessage("Be brief."), *QUESTIONS[1]]
    inputs: list[Any] = [[("human", "a"), ("ai", "b"), *QUESTIONS[0]], told, QUESTIONS[2]]
    with pytest.warns(UserWarning, match="system message"):
        answers = llm.batch(inputs)
    assert batches == [3]
    assert [one.text for one in answers] == [llm.invoke(one).text for one in inputs]
    mismatches = [one.response_metadata["kv_cache"]["prefix_mismatch"] for one in answers]
    assert mismatches == [False, True, False]


def test_rows_are_limited(llm: ChatKVCache, batches: list[int]) -> None:
    five = [over(f"what {index}?", "one") for index in range(5)]
    llm.batch(five, config={"max_concurrency": 2})
    assert batches == [2, 2, 1]
    batches.clear()
    small = llm.model_copy(update={"max_batch_size": 3})
    assert [one.text for one in small.batch(five)] == [llm.invoke(one).text for one in five]
    assert batches[:2] == [3, 2]


def test_each_input_is_reported_as_a_call_of_its_own(llm: ChatKVCache, batches: list[int]) -> None:
    recorders = [Recorder() for _ in QUESTIONS]
    ids = [uuid.uuid4() for _ in QUESTIONS]
    configs: list[Any] = [
        {"callbacks": [recorder], "run_name": f"run {at}", "run_id": id_, "tags": [f"tag {at}"]}
        for at, (recorder, id_) in enumerate(zip(recorders, ids, strict=True))
    ]
    answers = llm.batch(QUESTIONS, config=configs)
    assert batches == [3]
    for index, (recorder, answer) in enumerate(zip(recorders, answers, strict=True)):
        (start,), (end,) = recorder.starts, recorder.ends
        assert (start["name"], start["run_id"]) == (f"run {index}", ids[index])
        assert start["tags"] == [f"tag {index}"]
        assert end.generations[0][0].message == answer
        assert recorder.errors == recorder.tokens == []


async def test_one_error_leaves_the_others_their_answers(llm: ChatKVCache) -> None:
    """Nor does a row that no message can be made of."""
    inputs: list[Any] = [QUESTIONS[0], over("x" * 5000, "one"), over(" ", "one"), [5], QUESTIONS[1]]
    recorder = Recorder()
    for answers in (
        llm.batch(inputs, config={"callbacks": [recorder]}, return_exceptions=True),
        await llm.abatch(inputs, return_exceptions=True),
    ):
        first, *failures, last = answers
        assert [first.text, last.text] == [llm.invoke(one).text for one in (inputs[0], inputs[-1])]
        kinds = [ContextTooLongError, InvalidInputError, NotImplementedError]
        assert [type(one) for one in failures] == kinds
    assert (len(recorder.errors), len(recorder.ends)) == (2, 2)
    with pytest.raises(ContextTooLongError):
        llm.batch(inputs[:2])
    with pytest.raises(ContextTooLongError):
        await llm.abatch(inputs[:2])
    with pytest.raises(InvalidInputError, match="no model folder"):
        ChatKVCache(model="./no/such/model").batch(QUESTIONS)


def test_what_breaks_generation_reaches_every_row(
    llm: ChatKVCache, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "generate_batch", broken)
    recorder = Recorder()
    answers = llm.batch(QUESTIONS, config={"callbacks": [recorder]}, return_exceptions=True)
    assert [str(one) for one in answers] == ["out of memory"] * 3
    assert len(recorder.errors) == 3


def test_several_rounds_are_answered_alone(make_engine: Callable[..., Engine]) -> None:
    llm = ChatKVCache(engine=make_engine(context_window=400), max_tokens=6)
    inputs = [over("what?", "a" * 150, "b" * 150, "c" * 150), over("who?", "a")]
    answers = llm.batch(inputs)
    assert [one.response_metadata["kv_cache"]["rounds"] > 1 for one in answers] == [True, False]
    assert [one.text for one in answers] == [llm.invoke(one).text for one in inputs]


@pytest.mark.parametrize("shared", [False, True])
def test_a_cache_of_answers_works_as_for_single_calls(
    llm: ChatKVCache, batches: list[int], monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    cached = llm if shared else llm.model_copy(update={"cache": InMemoryCache()})
    if shared:
        monkeypatch.setattr(langchain_core.globals, "_llm_cache", InMemoryCache())
    first = cached.batch(QUESTIONS)
    assert batches == [1, 1, 1]
    assert [one.text for one in cached.batch(QUESTIONS)] == [one.text for one in first]
    assert batches == [1, 1, 1]


def test_what_watches_one_answer_is_not_shared(llm: ChatKVCache, batches: list[int]) -> None:
    steps = Steps(0)
    llm.batch(QUESTIONS, logits_processor=[steps])
    assert batches == [1, 1, 1]
    assert steps.count == 18


def test_a_model_that_streams_reports_each_rows_tokens(engine: Engine, batches: list[int]) -> None:
    streaming = ChatKVCache(engine=engine, max_tokens=6, streaming=True)
    recorder = Recorder()
    answers = streaming.batch(QUESTIONS, config={"callbacks": [recorder]})
    assert sorted("".join(recorder.tokens)) == sorted("".join(one.text for one in answers))
    assert batches == []


class _Refusing(Recorder):
    raise_error = True

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        raise RuntimeError("not this one")


@pytest.mark.parametrize("refused", [0, 2])
async def test_a_row_that_a_callback_refuses_spoils_only_itself(
    llm: ChatKVCache, batches: list[int], refused: int
) -> None:
    configs: list[Any] = [{} for _ in QUESTIONS]
    configs[refused] = {"callbacks": [_Refusing()]}
    for answers in (
        llm.batch(QUESTIONS, config=configs, return_exceptions=True),
        await llm.abatch(QUESTIONS, config=configs, return_exceptions=True),
    ):
        assert str(answers.pop(refused)) == "not this one"
        others = [one for index, one in enumerate(QUESTIONS) if index != refused]
        assert [one.text for one in answers] == [llm.invoke(one).text for one in others]
    assert batches == [3, 3, 1, 1, 1, 1]


async def test_a_batch_in_a_chain_streams_events(llm: ChatKVCache, batches: list[int]) -> None:
    async def ask(questions: Any) -> Any:
        return await llm.abatch(questions)

    events = [event async for event in RunnableLambda(ask).astream_events(QUESTIONS)]
    names = [event["event"] for event in events]
    assert names.count("on_chat_model_start") == names.count("on_chat_model_end") == 3


def test_an_interrupt_stops_a_batch(
    llm: ChatKVCache, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(Steps):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if self.count == 3:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return super().__call__(input_ids, scores)

    steps, together = Interrupting(), engine.generate_batch

    def slow(questions: Any, **options: Any) -> Any:
        return together(questions, **options, logits_processor=[steps])

    monkeypatch.setattr(engine, "generate_batch", slow)
    # A shell's background job starts with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.batch([over("what?", "one"), over("who?", "one")], **LONG)
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps.count == 3
