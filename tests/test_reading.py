"""A question read behind each chunk alone: as by a full prefill of that chunk and the question."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import LONG_QUESTION, QUESTION, TEXTS, make_engine
from zoo import FAMILIES, HYBRIDS, REFUSED

from kvcache_rag import BestFew, BestRead, Engine, FullRecompute, InvalidInputError, Reuse
from kvcache_rag.errors import ChunkNotFoundError, ContextTooLongError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.generation.request import NONE_SAYS, OtherLengthsError
from kvcache_rag.models.language import StoppedError
from kvcache_rag.policies.relevance import Retrieved

if TYPE_CHECKING:
    from collections.abc import Sequence

NATS = 2e-3
STATES_NATS = 5e-3  # of recurrent layers, over some thirty tokens


def plainly(engine: Engine, question: str, texts: Sequence[str]) -> float:
    """The question's likelihood by one forward pass of stock transformers, token by token."""
    whole = engine.tokenize(question, [*texts])
    start = len(whole.context)
    text = access.renderer(engine).query_text(question)
    before = text[: text.index(question)]
    own = start + len(engine.brought_ids(before))
    ids = torch.tensor([whole.all])
    with torch.no_grad():
        logits = engine.model(ids).logits[0].float().log_softmax(-1)
    stop = own + len(engine.brought_ids(question))
    return sum(float(logits[place - 1, ids[0, place]]) for place in range(own, stop))


def stitched(engine: Engine, question: str, texts: Sequence[str]) -> float:
    """The same over chunks that do not see each other, which other laws hold to be right."""
    whole = engine.tokenize(question, [*texts])
    text = access.renderer(engine).query_text(question)
    own = len(engine.brought_ids(text[: text.index(question)]))
    query = whole.all[len(whole.context) :]
    logits = engine.logits(question, [*texts], policy=Reuse()).log_softmax(-1)
    stop = own + len(engine.brought_ids(question))
    return sum(float(logits[place - 1, query[place]]) for place in range(own, stop))


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRIDS])
@pytest.mark.parametrize("question", [QUESTION, LONG_QUESTION], ids=["short", "long"])
def test_law_each_is_a_full_prefill_of_that_chunk_alone(name: str, question: str) -> None:
    engine = make_engine(name)
    expected = [plainly(engine, question, [text]) for text in TEXTS]
    without = plainly(engine, question, [])
    for _ in range(2):  # computed, then out of the store
        reading = engine.read(question, TEXTS)
        tolerance = STATES_NATS if name in HYBRIDS else NATS
        assert reading.likelihoods == pytest.approx(expected, abs=tolerance)
        assert reading.without == pytest.approx(without, abs=tolerance)
    assert reading.question_tokens == len(question)
    assert reading.relevance == pytest.approx([one - without for one in expected], abs=0.01)


@pytest.mark.parametrize("name", list(REFUSED))
def test_law_models_that_keep_no_chunks_read_them_too(name: str) -> None:
    engine = make_engine(name)
    expected = [plainly(engine, QUESTION, [text]) for text in TEXTS]
    found = engine.read(QUESTION, TEXTS)
    assert found.likelihoods == pytest.approx(expected, abs=STATES_NATS)


def test_the_order_of_chunks_says_nothing_and_equal_ones_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("qwen2")
    # Two rows of three in a pass: which are together decides about the padding.
    logits = (len(LONG_QUESTION) + 1) * engine.model.config.vocab_size * 4
    monkeypatch.setattr("kvcache_rag.generation.reading._LOGITS", 2 * logits)
    engine.add(TEXTS)
    reading = engine.read(LONG_QUESTION, TEXTS)
    for order in permutations(range(len(TEXTS))):
        other = engine.read(LONG_QUESTION, [TEXTS[number] for number in order])
        assert other.likelihoods == tuple(reading.likelihoods[number] for number in order)
        assert other.without == reading.without
    twice = engine.read(LONG_QUESTION, [*TEXTS, *TEXTS])
    assert twice.likelihoods == (*reading.likelihoods, *reading.likelihoods)
    assert twice.read_tokens == reading.read_tokens


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_are_as_many_as_memory_allows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen2")
    reading = engine.read(LONG_QUESTION, TEXTS)
    logits = (len(LONG_QUESTION) + 1) * engine.model.config.vocab_size * 4
    monkeypatch.setattr("kvcache_rag.generation.reading._LOGITS", rows * logits)
    seen: list[int] = []
    passed = type(access.adapter(engine)).forward

    def forward(self: Any, ids: Any, *rest: Any, **options: Any) -> Any:
        seen.append(len(ids))
        return passed(self, ids, *rest, **options)

    monkeypatch.setattr(type(access.adapter(engine)), "forward", forward)
    again = engine.read(LONG_QUESTION, TEXTS)
    assert max(seen) == rows
    assert again.likelihoods == pytest.approx(reading.likelihoods, abs=NATS)


@pytest.mark.parametrize("rotation", ["copied", "deferred"])
def test_reading_changes_nothing_of_the_next_answer(rotation: Any) -> None:
    engine = make_engine("qwen2", rotation=rotation)
    engine.add(TEXTS)
    options: Any = {"policy": Reuse(), "max_new_tokens": 4}
    first = engine.generate(QUESTION, TEXTS, **options)
    engine.read(LONG_QUESTION, TEXTS[::-1])
    again = engine.generate(QUESTION, TEXTS, **options)
    assert again.token_ids == first.token_ids
    assert again.metrics.continued_tokens == again.metrics.query_tokens - 1


def test_what_was_wrong_is_told() -> None:
    engine = make_engine("qwen2", context_window=120)
    with pytest.raises(InvalidInputError, match="the question is empty"):
        engine.read(" ", TEXTS)
    with pytest.raises(InvalidInputError, match="chunk 1 is empty"):
        engine.read(QUESTION, [TEXTS[0], " "])
    with pytest.raises(ContextTooLongError, match=r"question has .* and chunk 1 77"):
        engine.read(QUESTION * 10, [TEXTS[0], "x" * 70])
    with pytest.raises(ContextTooLongError, match="is too long for the model's context window"):
        engine.read(QUESTION * 40, [])
    with pytest.raises(InvalidInputError, match="the question must be a text, not None"):
        engine.read(None, TEXTS)  # type: ignore[arg-type]  # as an app may
    (key,) = engine.add(TEXTS[:1])
    engine.delete([key])
    with pytest.raises(ChunkNotFoundError):
        engine.read(QUESTION, [key])
    assert engine.read(QUESTION, []).likelihoods == ()


@pytest.mark.parametrize("length", [30, 1000])
def test_what_a_reference_says_of_a_length_is_a_hint(length: int) -> None:
    engine = make_engine("qwen2", context_window=140)
    (key,) = engine.add(TEXTS[:1])
    lying = replace(key, tokens=length)
    expected = engine.read(QUESTION, TEXTS[:1]).likelihoods
    if length < len(TEXTS[0]):
        assert engine.read(QUESTION, [StoredChunk(lying, TEXTS[0])]).likelihoods == expected
    # Longer than it says, and too long with the question.
    (key,) = engine.add(["y" * 100])
    with pytest.raises(ContextTooLongError, match="question has"):
        engine.read(LONG_QUESTION, [StoredChunk(replace(key, tokens=5), "y" * 100)])


def test_tenants_read_in_the_same_memory_which_is_released_with_the_others() -> None:
    engine = make_engine("qwen2")
    tenants = [engine, engine.in_namespace("other")]
    for one in tenants:
        one.read(QUESTION, TEXTS)
    first, second = (access.runner(one).aside for one in tenants)
    assert first is second
    assert first.kept is not None
    engine.forget_buffer()
    assert first.kept is None


@pytest.mark.parametrize(
    "question", ["Answer:", "a", "\nAnswer", " Who? "], ids=["again", "letter", "line", "spaces"]
)
def test_a_question_is_found_where_it_stands(question: str) -> None:
    engine = make_engine("qwen2")
    expected = plainly(engine, question.strip(), TEXTS[:1])
    if question == question.strip():
        found = engine.read(question, TEXTS[:1])
        assert found.likelihoods == pytest.approx([expected], abs=NATS)
    assert engine.read(question, []).question_tokens == len(question.strip())


def test_it_stops_when_it_is_told_to() -> None:
    engine = make_engine("qwen2")
    cancelled = threading.Event()
    for _ in range(2):  # before chunks are computed, and when they are there
        cancelled.set()
        with pytest.raises(CancelledError):
            engine.read(QUESTION, TEXTS, cancelled=cancelled)
        engine.add(TEXTS)
    cancelled.clear()
    assert len(engine.read(QUESTION, TEXTS, cancelled=cancelled).likelihoods) == len(TEXTS)


# ---------------------------------------------------------------------------- to choose by it
# Longer chunks, of which many questions may be read for a quarter of a full prefill.
LONGER = [f"{text * 3}!" for text in TEXTS]


def nats(answer: Any) -> list[float]:
    return [one.nats for one in answer.metrics.relevance]


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "bloom", "qwen3_5", "falcon_h1"])
def test_law_the_answer_is_that_of_the_chunks_that_were_chosen(name: str) -> None:
    engine = make_engine(name)
    reading = engine.read(QUESTION, LONGER)
    best = max(range(3), key=lambda number: reading.likelihoods[number])
    answer = engine.generate(QUESTION, LONGER, policy=BestRead(1), max_new_tokens=6)
    metrics = answer.metrics
    assert metrics.answered_from == (best,)
    alone = engine.generate(QUESTION, [LONGER[best]], policy=BestFew(1), max_new_tokens=6)
    assert answer.token_ids == alone.token_ids
    assert [one.chunk for one in metrics.relevance] == [0, 1, 2]
    assert nats(answer) == pytest.approx(reading.relevance, abs=0.01)
    assert metrics.read_chunks == 3
    assert metrics.read_tokens == reading.read_tokens
    assert metrics.computed_tokens >= metrics.read_tokens + metrics.query_tokens - 1
    assert 0 < metrics.reading < metrics.ttft
    explained = engine.explain(QUESTION, LONGER, policy=BestRead(1))
    assert explained.answered_from == (best,)


@pytest.mark.parametrize("name", [name for name in ("gpt2", "opt") if name in REFUSED])
def test_no_pairs_are_read_where_keys_cannot_be_moved(name: str) -> None:
    engine = make_engine(name, policy=BestRead())
    engine.add(LONGER)
    answer = engine.generate(QUESTION, LONGER, max_new_tokens=6)
    assert answer.metrics.read_chunks == 3
    assert answer.metrics.answered_from


def test_a_second_reading_by_texts_is_cancelled_as_the_first_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("qwen2")
    cancelled = threading.Event()

    def read(_: Any, given: threading.Event | None) -> Any:
        if given is not None and given.is_set():
            raise StoppedError
        cancelled.set()
        raise OtherLengthsError

    monkeypatch.setattr(type(engine._bound.reader), "read", lambda _, *given: read(*given))
    with pytest.raises(CancelledError):
        engine.read(QUESTION, TEXTS, cancelled=cancelled)


@pytest.mark.parametrize("policy", [BestRead(2), BestRead()], ids=repr)
def test_law_without_scores_no_order_of_chunks_changes_the_answer(policy: Any) -> None:
    engine = make_engine("qwen2")
    engine.add(LONGER)
    seen: set[Any] = set()
    for order in permutations(range(3)):
        texts = [LONGER[number] for number in order]
        answer = engine.generate(QUESTION, texts, policy=policy, max_new_tokens=6)
        used = tuple(texts[number] for number in answer.metrics.answered_from)
        seen.add((used, answer.token_ids))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("added", "used"), [(2.4, 1), (2.6, 3), (9.9, 3), (10.1, 1)], ids=lambda one: str(one)
)
def test_law_what_a_second_chunk_adds_says_how_many_are_needed(added: float, used: int) -> None:
    policy, texts = BestRead(), ("a", "b", "c", "d", "e")
    retrieved = Retrieved("?", texts, (5.0, 4.0, 3.0, 2.0, 1.0))
    alone: dict[Any, float] = {(): -30.0, **{(one,): -10.0 - one for one in range(5)}}
    assert {*policy.wants(retrieved)} == alone.keys()
    read = replace(retrieved, read=alone)
    assert policy.wants(read) == ((0, 1), (0, 2), (0, 3))
    assert BestRead(2).wants(read) == ()
    pairs = {(0, 1): -20.0, (0, 2): -10.0 + added, (0, 3): None}
    known = replace(retrieved, read={**alone, **pairs})
    assert policy.wants(known) == ()
    assert policy.plan(known).order == (0, 1, 2)[:used]
    # The largest one counts.
    more = policy.plan(replace(known, read={**known.read, (0, 3): -5.0}))
    assert more.order == ((0,) if added > 10 else (0, 1, 2))


@pytest.mark.parametrize("name", ["qwen2", "bloom", "falcon_h1"])
def test_law_pairs_are_read_over_their_stitched_chunks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(name)
    engine.add(LONGER)
    seen: dict[Any, float | None] = {}
    plan_of = BestRead.plan

    def plan(self: BestRead, retrieved: Retrieved) -> Any:
        seen.update(retrieved.read)
        return plan_of(self, retrieved)

    monkeypatch.setattr(BestRead, "plan", plan)
    metrics = engine.generate(QUESTION, LONGER, policy=BestRead(), max_new_tokens=1).metrics
    pairs = {context: said for context, said in seen.items() if len(context) == 2}
    assert len(pairs) == 2
    assert metrics.read_chunks == 3
    for numbers, said in pairs.items():
        texts = [LONGER[number] for number in numbers]
        assert said == pytest.approx(stitched(engine, QUESTION, texts), abs=STATES_NATS)


def test_streams_batches_and_conversations_choose_alike() -> None:
    engine = make_engine("qwen2")
    options: Any = {"policy": BestRead(1), "max_new_tokens": 6}
    answer = engine.generate(QUESTION, LONGER, **options)
    stream = engine.stream(QUESTION, LONGER, **options)
    assert "".join(stream) == answer.text
    assert nats(stream) == nats(answer)
    batch = engine.generate_batch([(QUESTION, LONGER), (LONG_QUESTION, LONGER)], **options)
    assert batch[0].token_ids == answer.token_ids
    assert nats(batch[0]) == pytest.approx(nats(answer), abs=0.01)
    # What is asked by itself is read, and no turn before it.
    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "No."}]
    told = engine.generate(
        f"Be brief. {QUESTION}", LONGER, asked=QUESTION, history=turns, **options
    )
    assert nats(told) == pytest.approx(nats(answer), abs=0.01)


def test_no_more_is_read_than_a_quarter_of_a_full_prefill() -> None:
    engine = make_engine("qwen2")
    scores = [0.1, 0.2, 0.9]
    metrics = engine.generate(
        LONG_QUESTION, TEXTS, scores=scores, policy=BestRead(1), max_new_tokens=1
    ).metrics
    ids = engine.tokenize(LONG_QUESTION, TEXTS)
    assert metrics.read_tokens <= len(ids.all) / 4
    # One alone can be compared with nothing.
    assert metrics.read_chunks != 1
    nothing = engine.generate("Who? " * 30, TEXTS, policy=BestRead(1), max_new_tokens=1).metrics
    assert (nothing.read_tokens, nothing.relevance) == (0, ())


def test_chunks_that_were_computed_to_be_read_are_misses() -> None:
    engine = make_engine("qwen2")
    engine.add(LONGER[:1])
    cold = engine.generate(QUESTION, LONGER, policy=BestRead(1), max_new_tokens=1).metrics
    warm = engine.generate(QUESTION, LONGER, policy=BestRead(1), max_new_tokens=1).metrics
    assert [one.chunk for one in cold.missed] == [1, 2]
    assert {one.reason for one in cold.missed} == {"not prefilled"}
    (used,) = cold.answered_from
    tokens = len(engine.tokenize(QUESTION, LONGER).chunks[used])
    computed = 0 if used == 0 else tokens
    assert (cold.prefilled_tokens, cold.reused_tokens) == (computed, tokens - computed)
    assert sum(cold.hits.values()) == (used == 0)
    every = sum(one.tokens for one in cold.missed)
    assert cold.read_tokens == warm.read_tokens + every - computed
    assert (warm.misses, warm.prefilled_tokens, warm.reused_tokens) == (0, 0, tokens)
    assert cold.computed_tokens > warm.computed_tokens
    engine.delete_namespace()
    none = engine.generate(QUESTION, LONGER, none_below=1e6).metrics
    assert [one.chunk for one in none.missed] == [0, 1, 2]
    assert none.read_tokens == none.computed_tokens > warm.read_tokens


@pytest.mark.parametrize("policy", [FullRecompute(), Reuse(), BestFew(2)], ids=repr)
def test_any_policy_answers_over_chunks_that_were_computed_to_be_read(policy: Any) -> None:
    engine = make_engine("qwen2")
    options: Any = {"policy": policy, "max_new_tokens": 3}
    cold = engine.generate(QUESTION, LONGER, none_below=-1e6, **options)
    engine.forget_buffer()
    plain = engine.generate(QUESTION, LONGER, **options)
    assert cold.token_ids == plain.token_ids
    assert [one.chunk for one in cold.metrics.missed] == [0, 1, 2]
    assert cold.metrics.prompt_tokens == plain.metrics.prompt_tokens
    assert cold.metrics.computed_tokens > plain.metrics.computed_tokens


def test_what_was_computed_to_be_read_counts_once_over_several_rounds() -> None:
    whole = make_engine("qwen2")
    longest = max(len(whole.tokenize(QUESTION, [text]).all) for text in LONGER)
    engine = make_engine("qwen2", context_window=longest + 160)
    options: Any = {"policy": Reuse(), "max_new_tokens": 4, "overflow": "refine"}
    cold = engine.generate(QUESTION, LONGER, none_below=-1e6, **options).metrics
    engine.forget_buffer()
    warm = engine.generate(QUESTION, LONGER, none_below=-1e6, **options).metrics
    assert cold.rounds == warm.rounds > 1
    assert (cold.misses, [one.chunk for one in cold.missed]) == (3, [0, 1, 2])
    assert cold.prompt_tokens == warm.prompt_tokens
    chunks = sum(one.tokens for one in cold.missed)
    assert cold.prefilled_tokens == chunks
    assert (cold.read_tokens, cold.reused_tokens) == (warm.read_tokens, warm.reused_tokens - chunks)


class Asks(BestFew):
    """Wants the same again and again."""

    def wants(self, retrieved: Any) -> Any:
        return ((0,), (1,))


class AsksBeyond(BestFew):
    def wants(self, retrieved: Any) -> Any:
        return ((7,),)


def test_a_policy_that_asks_for_ever_is_answered_once() -> None:
    engine = make_engine("qwen2")
    metrics = engine.generate(QUESTION, LONGER, policy=Asks(), max_new_tokens=1).metrics
    assert metrics.read_chunks == 2
    with pytest.raises(InvalidInputError, match=r"wants \(7,\) read of 3 chunks"):
        engine.generate(QUESTION, LONGER, policy=AsksBeyond(), max_new_tokens=1)


def test_a_stopped_question_says_nothing() -> None:
    engine = make_engine("qwen2")
    cancelled = threading.Event()
    cancelled.set()
    answer = engine.generate(QUESTION, LONGER, policy=BestRead(), cancelled=cancelled)
    assert (answer.text, answer.finish_reason) == ("", "length")


def test_what_is_read_is_needed_before() -> None:
    engine = make_engine("qwen2")
    assert len(engine.needed(LONGER, BestRead(1), question=QUESTION)) == 3
    assert len(engine.needed(LONGER, BestFew(1), question=QUESTION)) == 1


# ---------------------------------------------------------------------------- none of these says it
def test_law_none_says_it_where_no_chunk_makes_the_question_likelier() -> None:
    engine = make_engine("qwen2")
    best = max(engine.read(QUESTION, LONGER).relevance)
    for policy in (BestRead(1), BestFew(1), Reuse()):
        options: Any = {"policy": policy, "max_new_tokens": 4}
        plain = engine.generate(QUESTION, LONGER, **options)
        below = engine.generate(QUESTION, LONGER, none_below=best - 0.1, **options)
        assert below.token_ids == plain.token_ids
        assert not below.metrics.says_none
        above = engine.generate(QUESTION, LONGER, none_below=best + 0.1, **options)
        assert (above.text, above.finish_reason, above.token_ids) == (NONE_SAYS, "stop", ())
        metrics = above.metrics
        assert metrics.says_none
        assert max(nats(above)) == pytest.approx(best, abs=0.01)
        assert (metrics.computed_tokens, metrics.answered_from) == (metrics.read_tokens, ())
        stream = engine.stream(QUESTION, LONGER, none_below=best + 0.1, **options)
        assert [*stream] == [NONE_SAYS]
    batch = engine.generate_batch(
        [(QUESTION, LONGER), (QUESTION, []), (QUESTION, LONGER)],
        none_below=best + 0.1,
        max_new_tokens=4,
    )
    assert [one.metrics.says_none for one in batch] == [True, False, True]


def test_none_is_said_of_what_was_read_whole() -> None:
    """All chunks are read for it, however much that is of a full prefill."""
    engine = make_engine("qwen2")
    many = [f"{number}{TEXTS[0]}" for number in range(9)]
    answer = engine.generate(LONG_QUESTION, many, none_below=1e6, max_new_tokens=1)
    assert len(answer.metrics.relevance) == 9
    assert answer.text == NONE_SAYS
    small = make_engine("qwen2", context_window=100)
    given = [TEXTS[0], "x" * 85]  # of which one does not fit with the question
    answer = small.generate(
        LONG_QUESTION, given, none_below=1e6, overflow="drop_lowest", max_new_tokens=1
    )
    assert len(answer.metrics.relevance) == 1
    assert answer.text != NONE_SAYS


def test_an_engine_has_a_threshold_and_an_answer_another_one() -> None:
    engine = make_engine("qwen2", none_below=1e6)
    assert engine.generate(QUESTION, LONGER).text == NONE_SAYS
    assert engine.in_namespace("other").generate(QUESTION, LONGER).text == NONE_SAYS
    assert engine.generate(QUESTION, LONGER, none_below=-1e6, max_new_tokens=2).text != NONE_SAYS
    # Without documents it is answered as ever.
    assert engine.generate(QUESTION, max_new_tokens=2).text != NONE_SAYS
    assert engine.complete(QUESTION, max_new_tokens=2).text != NONE_SAYS
    for wrong in ("3", True, float("nan"), [1]):
        with pytest.raises(InvalidInputError, match="none_below"):
            engine.generate(QUESTION, LONGER, none_below=wrong)
        with pytest.raises(InvalidInputError, match="none_below"):
            make_engine("qwen2", none_below=wrong)
