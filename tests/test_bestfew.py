"""The retriever's best few chunks: the first as it is stored, the others computed behind it.

Law: it equals one ordinary forward pass of these chunks, best first, whatever else was retrieved.
The first stands where it was prefilled, so the law holds of every model, also of one whose keys
cannot move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
import transformers
from laws import (
    LONG_QUESTION,
    QUESTION,
    TEMPLATE,
    TEXTS,
    TOLERANCE,
    TURNS,
    Recorder,
    behind_system,
    error,
    make_engine,
    over_stored,
    plain_logits,
)
from packaging import version
from recurrent_reference import reference_logits
from zoo import FAMILIES, HYBRIDS, REFUSED, SEVERAL, build, byte_tokenizer

from kvcache_rag import (
    BestFew,
    DiskStore,
    Engine,
    FullRecompute,
    MemoryStore,
)
from kvcache_rag.codecs import Int4, Int8
from kvcache_rag.errors import ChunkNotFoundError, UnsupportedModelError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.models.adapters import note_training
from kvcache_rag.policies.base import Plan
from kvcache_rag.policies.bestfew import MOST
from kvcache_rag.policies.relevance import Retrieved

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.codecs import Codec
    from kvcache_rag.prompt import Message

IMMOVABLE = [name for name in ("gpt2", "opt", "hunyuan") if name in REFUSED]
KEEPING_NOTHING = [name for name in REFUSED if name not in IMMOVABLE]
COUNTS = (1, 2, 3)
SCORES = (0.1, -2.0, 0.7)
# The texts share no word with the questions, so that the scores alone decide.
ASKED: list[tuple[str, list[str], tuple[Message, ...], tuple[float, ...]]] = [
    (QUESTION, TEXTS, TURNS, SCORES),
    (LONG_QUESTION, TEXTS[:2], (), (0.0, 1.0)),
    ("x", TEXTS[:1], TURNS, (1.0,)),
    (QUESTION, TEXTS, (), SCORES[::-1]),
]


def best(texts: Sequence[str], scores: Sequence[float], count: int) -> list[str]:
    """The best first, of texts that have different scores."""
    return [text for _, text in sorted(zip(scores, texts, strict=True), reverse=True)][:count]


def one_pass(
    engine: Engine,
    texts: list[str],
    question: str = QUESTION,
    history: Sequence[Message] = (),
    answer: Sequence[int] = (),
) -> Tensor:
    """Logits of question and answer in one ordinary forward pass."""
    ids = engine.tokenize(question, texts, history)
    with torch.no_grad():
        logits: Tensor = engine.model(torch.tensor([[*ids.all, *answer]])).logits[0]
    return logits[-len(ids.query) - len(answer) :].float()


def holds_the_law(engine: Engine, count: int, tolerance: float = TOLERANCE) -> None:
    """Law: the logits are those of the best chunks alone; and of no others, nor in another order.

    Twice, as the first chunk is computed at first and comes from the store then.
    """
    few = TEXTS[:count]
    expected = plain_logits(engine, few)
    for _ in range(2):
        found = engine.logits(QUESTION, TEXTS, policy=BestFew(count))
        assert found.shape == expected.shape
        assert error(found, expected) < tolerance
    wrong = [TEXTS[count - 1 :: -1] if count > 1 else TEXTS[1:2], [*few, TEXTS[0]], few[:-1]]
    assert all(error(plain_logits(engine, one), expected) > 10 * tolerance for one in wrong)


def costs_no_more_than_it_must(engine: Engine, count: int) -> None:
    """The first chunk is reused, the others are computed once, and nothing is computed again."""
    policy, sizes = BestFew(count), [key.tokens for key in engine.keys(TEXTS)]
    engine.add(TEXTS[:1])
    metrics = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
    assert metrics.reused_tokens == sizes[0]
    assert metrics.fresh_tokens == sum(sizes[1:count])
    assert metrics.recomputed_tokens == metrics.prefilled_tokens == metrics.misses == 0
    assert metrics.answered_from == tuple(range(count))
    assert (metrics.unused_chunks, metrics.dropped_chunks) == (len(TEXTS) - count, 0)
    assert metrics.policy == repr(policy)
    assert not any(map(engine.store.contains, engine.keys(TEXTS[1:]))), "others are not stored"


# ---------------------------------------------------------------------- of every family
@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest) -> Engine:
    """Deferred wherever it can be, which is copying to the bit of a law (test_deferred.py)."""
    return make_engine(request.param, rotation="deferred")


@pytest.mark.parametrize("count", [1, 3])
def test_law_the_best_few_are_a_plain_prefill_of_them(engine: Engine, count: int) -> None:
    holds_the_law(engine, count)
    costs_no_more_than_it_must(engine, count)


@pytest.mark.parametrize("family", IMMOVABLE)
@pytest.mark.parametrize("count", COUNTS)
def test_law_of_models_whose_keys_cannot_move(family: str, count: int) -> None:
    engine = make_engine(family, policy=BestFew(count))
    assert engine.refusal
    assert not engine.why_useless
    holds_the_law(engine, count)
    costs_no_more_than_it_must(engine, count)


@pytest.mark.parametrize("family", KEEPING_NOTHING)
def test_who_insists_where_nothing_is_kept_is_told_what_works(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"FullRecompute\(\)"):
        make_engine(family).generate(QUESTION, TEXTS, policy=BestFew(1), max_new_tokens=1)


# As tests/test_hybrids.py.
HYBRID_TOLERANCE = 5e-4


@pytest.fixture(scope="module", params=list(HYBRIDS))
def hybrid(request: pytest.FixtureRequest) -> Engine:
    engine = make_engine(request.param)
    if engine.refusal and version.parse(transformers.__version__) < version.parse("5.23"):
        pytest.skip(engine.refusal)  # where its modules keep their states by themselves
    return engine


@pytest.mark.parametrize("count", [1, 3])
def test_law_of_recurrent_layers(hybrid: Engine, count: int) -> None:
    holds_the_law(hybrid, count, HYBRID_TOLERANCE)
    costs_no_more_than_it_must(hybrid, count)


@pytest.mark.parametrize(
    "family", [name for name in ("qwen3_5", "bamba", "lfm2") if name in HYBRIDS]
)
def test_law_of_recurrent_layers_they_are_tokens_one_by_one(family: str) -> None:
    engine = make_engine(family)
    ids = engine.tokenize(QUESTION, TEXTS[:2])
    first, second = ids.chunks
    expected = reference_logits(engine.model, ids.prefix, [first], (*second, *ids.query))
    found = engine.logits(QUESTION, TEXTS, policy=BestFew(2))
    assert error(found, expected[len(second) :]) < HYBRID_TOLERANCE


# ---------------------------------------------------------------------- of every way to ask
@pytest.mark.parametrize("rotation", ["copied", "deferred"])
@pytest.mark.parametrize("system", ["no prefix", "a long one"])
@pytest.mark.parametrize("family", SEVERAL)
def test_law_answers_streams_and_batches_are_one_pass_behind_any_prefix(
    family: str, system: str, rotation: Any
) -> None:
    """With turns behind the chunks and scores that move them, step by step."""
    engine = behind_system(family, system, rotation=rotation)
    options: dict[str, Any] = {"policy": BestFew(2), "max_new_tokens": 3}
    together = Recorder()
    batch = engine.generate_batch(ASKED, **options, logits_processor=[together])
    for row, (question, texts, history, scores) in enumerate(ASKED):
        options |= {"history": history, "scores": scores}
        alone, piecewise = Recorder(), Recorder()
        answer = engine.generate(question, texts, **options, logits_processor=[alone])
        stream = engine.stream(question, texts, **options, logits_processor=[piecewise])
        assert "".join(stream) == answer.text
        assert stream.answer.token_ids == batch[row].token_ids == answer.token_ids
        said, few = [int(step[0].argmax()) for step in alone.steps], best(texts, scores, 2)
        asked = question, history, said[:-1]
        expected = one_pass(engine, few, *asked)[-len(said) :]
        for seen, place in ((alone, 0), (piecewise, 0), (together, row)):
            found = torch.stack([step[place] for step in seen.steps[: len(said)]])
            assert error(found, expected) < TOLERANCE
        # The law can fail: which they are matters, their order, and the turns behind them.
        wrong = [one_pass(engine, few, question, (), said[:-1])] * bool(history)
        if len(texts) > 1:
            wrong.append(one_pass(engine, few[::-1], *asked))
        if len(texts) > len(few):
            wrong.append(one_pass(engine, best(texts, scores, 3), *asked))
        assert all(error(one[-len(said) :], expected) > 10 * TOLERANCE for one in wrong)


@pytest.mark.parametrize("family", ["llama", "gemma3", *IMMOVABLE])
@pytest.mark.parametrize("count", [1, 2])
def test_beams_and_samples_are_those_of_a_full_prefill(family: str, count: int) -> None:
    engine = make_engine(family)
    options: dict[str, Any] = {"max_new_tokens": 6}
    for more in ({"num_beams": 3}, {"do_sample": True, "top_k": 1}, {"repetition_penalty": 1.3}):
        found = engine.generate(QUESTION, TEXTS, policy=BestFew(count), **options, **more)
        full = engine.generate(QUESTION, TEXTS[:count], policy=FullRecompute(), **options, **more)
        assert found.token_ids == full.token_ids
        assert found.text == full.text


@pytest.mark.parametrize("rotation", ["copied", "deferred"])
@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral window"])
def test_law_of_chunks_in_few_bits_the_first_is_what_is_stored(
    family: str, codec: Codec, rotation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place by the kernel's specification, which needs neither its CPU nor its dtype."""
    monkeypatch.setattr("kvcache_rag.generation.buffered.int8_refusal", lambda model: "")

    def opened() -> Engine:
        return Engine(
            build(family),
            byte_tokenizer(),
            template=TEMPLATE,
            store=DiskStore(tmp_path, codec=codec),
            rotation=rotation,
        )

    opened().add(TEXTS)  # by another engine, as who computes the prefix has it exact
    engine = opened()
    for count in COUNTS:
        few = TEXTS[:count]
        ids = engine.tokenize(QUESTION, few)
        chosen = torch.zeros(len(ids.context), dtype=torch.bool)
        chosen[len(ids.prefix) + len(ids.chunks[0]) :] = True
        output = over_stored(engine, build(family), few, chosen, "reordered")
        expected = output.logits[0, -len(ids.query) :]
        found = engine.logits(QUESTION, TEXTS, policy=BestFew(count))
        assert error(found, expected) < TOLERANCE
        # The law can fail: of whole chunks it is another answer.
        exact = make_engine(family).logits(QUESTION, TEXTS, policy=BestFew(count))
        assert error(exact, expected) > 3 * TOLERANCE
        metrics = engine.generate(QUESTION, TEXTS, policy=BestFew(count), max_new_tokens=1).metrics
        in_place = rotation if isinstance(codec, Int8) else "copied"  # attention reads 8 bits
        assert (metrics.rotation, metrics.hits) == (in_place, {"disk": 1})


# ---------------------------------------------------------------------- what is stored and found
def test_a_missing_first_is_kept_and_the_others_need_not_be() -> None:
    engine, policy = make_engine("llama"), BestFew(2)
    sizes = [key.tokens for key in engine.keys(TEXTS)]
    expected = plain_logits(engine, TEXTS[:2])
    first = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=2).metrics
    assert [(miss.chunk, miss.reason) for miss in first.missed] == [(0, "not prefilled")]
    assert (first.prefilled_tokens, first.fresh_tokens) == (sizes[0], sizes[1])
    assert first.reused_tokens == 0
    kept = [engine.store.contains(key) for key in engine.keys(TEXTS)]
    assert kept == [True, False, False]
    again = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=2).metrics
    assert (again.misses, again.hits) == (0, {"memory": 1})
    assert (again.reused_tokens, again.fresh_tokens) == (sizes[0], sizes[1])
    assert error(engine.logits(QUESTION, TEXTS, policy=policy), expected) < TOLERANCE
    # Another first one is a chunk of its own, though it was computed behind the other before.
    moved = engine.generate(
        QUESTION, TEXTS, policy=policy, scores=(0.0, 1.0, -1.0), max_new_tokens=2
    ).metrics
    assert (moved.misses, moved.answered_from) == (1, (1, 0))


def test_references_are_answered_as_their_texts() -> None:
    engine = make_engine("llama")
    keys = engine.add(TEXTS)
    rows = [StoredChunk(key, text) for key, text in zip(keys, TEXTS, strict=True)]
    for count in COUNTS:
        policy = BestFew(count)
        expected = engine.logits(QUESTION, TEXTS, policy=policy)
        for given in (rows, keys, [keys[0], rows[1], TEXTS[2]]):
            assert torch.equal(engine.logits(QUESTION, given, policy=policy), expected)
            metrics = engine.generate(QUESTION, given, policy=policy, max_new_tokens=1).metrics
            assert metrics.answered_from == tuple(range(count))
            assert metrics.references == sum(not isinstance(one, str) for one in given[:count])
            assert metrics.fresh_tokens == sum(key.tokens for key in keys[1:count])


def test_a_chunk_that_is_known_by_its_key_alone_has_to_be_stored_if_it_is_chosen() -> None:
    engine = make_engine("llama")
    keys = engine.add(TEXTS)
    engine.delete(keys[1:2])
    with pytest.raises(ChunkNotFoundError):
        engine.generate(QUESTION, keys, policy=BestFew(2), max_new_tokens=1)
    found = engine.logits(QUESTION, keys, policy=BestFew(1))
    assert error(found, plain_logits(engine, TEXTS[:1])) < TOLERANCE


@pytest.mark.parametrize("place", [0, 1])
def test_a_reference_about_another_text_is_what_its_text_is(place: int) -> None:
    engine = make_engine("llama", policy=BestFew(2))
    engine.add(TEXTS)
    (other,) = engine.keys([TEXTS[2]])
    rows: list[Any] = [*TEXTS]
    rows[place] = StoredChunk(other, TEXTS[place], outdated="other text")
    assert other.tokens != engine.keys([TEXTS[place]])[0].tokens
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    found = engine.generate(QUESTION, rows, max_new_tokens=4)
    assert found.token_ids == expected.token_ids
    counts = ("fresh_tokens", "reused_tokens", "query_tokens", "prompt_tokens", "answered_from")
    for name in counts:
        assert getattr(found.metrics, name) == getattr(expected.metrics, name), name
    assert torch.equal(engine.logits(QUESTION, rows), engine.logits(QUESTION, TEXTS))
    assert engine.explain(QUESTION, rows).tokens == engine.explain(QUESTION, TEXTS).tokens


OTHERS = tuple(f"Bananas of kind {number} grow in warm countries." for number in range(9))


def test_without_a_count_one_that_stands_out_is_alone() -> None:
    found = "The bridge of Torgau over the Elbe was opened in 1994."
    asked = "Was the Elbe bridge of Torgau opened?"
    for texts in ((found, *OTHERS), (*OTHERS, found), (*OTHERS[:4], found, *OTHERS[4:])):
        assert BestFew().plan(Retrieved(asked, texts)).order == (texts.index(found),)
    scores = (0.0, 9.0, *[0.0] * 8)
    assert BestFew().plan(Retrieved("", ("a",) * 10, scores)).order == (1,)


def test_without_a_count_those_that_are_alike_are_taken_together() -> None:
    found = "The bridge of Torgau over the Elbe was opened in 1994."
    asked = "Was the Elbe bridge of Torgau opened?"
    two = Retrieved(asked, (*OTHERS[:4], found, *OTHERS[4:], found), (1.0,) * 11)
    assert BestFew().plan(two).order == (4, 10)
    many = Retrieved(asked, (*OTHERS, *[found] * (MOST + 2)), (1.0,) * (11 + MOST))
    assert BestFew().plan(many).order == tuple(range(9, 9 + MOST))
    # Of two, scores alone do not say how far they are apart.
    for scores in ((5.0, 1.0), (5.0, 4.9), (1e-9, 0.0), (-1.0, -7e9)):
        assert BestFew().plan(Retrieved("", ("a", "b"), scores)).order == (0, 1)
        assert BestFew().plan(Retrieved("", ("a", "b"), scores[::-1])).order == (1, 0)
    assert BestFew().plan(Retrieved("", ("a",))).order == (0,)


def test_words_find_what_scores_alone_miss() -> None:
    asked = "Which number has the form for a change of address?"
    texts = ("The form for a birth has number 12.", "The form for a change of address: 77.")
    for scores in (None, (0.71, 0.70)):
        assert BestFew(1).plan(Retrieved("", texts, scores)).order == (0,)
    assert BestFew(1).plan(Retrieved(asked, texts)).order == (1,)


@pytest.mark.parametrize("scores", [(3.0, 2.0, 1.0), (1.0, 2.0, 3.0), (1.0, 1.0, 1.0)])
def test_all_but_the_first_are_computed(scores: tuple[float, ...]) -> None:
    plan = BestFew(3).plan(Retrieved("", ("a",) * 3, scores))
    assert plan.fresh == 2
    assert plan.brought == plan.order[:1]
    assert [scores[index] for index in plan.order] == sorted(scores, reverse=True)
    for alone in ((), ("a",)):
        assert BestFew(3).plan(Retrieved("", alone)).fresh == 0


def test_those_that_are_left_out_are_ranked() -> None:
    retrieved = Retrieved("", ("a", "b", "c", "d"), (0.0, 2.0, 1.0, 3.0))
    assert BestFew(2).plan(retrieved) == Plan((3, 1), 1, (2, 0))
    assert BestFew(9).plan(retrieved).others == ()


# ---------------------------------------------------------------------- where nobody says it
def untrained(name: str) -> Engine:
    model = build(name)
    note_training(model.config, blocks=False)
    return Engine(model, byte_tokenizer(), template=TEMPLATE, store=MemoryStore())


@pytest.mark.parametrize("family", ["llama", *IMMOVABLE])
def test_law_the_default_of_untrained_models_is_exact(family: str) -> None:
    engine = untrained(family)
    assert engine.policy == BestFew()
    others = [f"{text[::-1]} and more" for text in TEXTS]
    texts = [*TEXTS, *others]
    chosen = BestFew().plan(Retrieved(QUESTION, tuple(texts))).order
    expected = plain_logits(engine, [texts[index] for index in chosen])
    assert error(engine.logits(QUESTION, texts), expected) < TOLERANCE
    assert error(plain_logits(engine, texts), expected) > 10 * TOLERANCE
    metrics = engine.generate(QUESTION, texts, max_new_tokens=1).metrics
    assert metrics.answered_from == chosen
    assert access.prefiller(engine) is not None


def test_chunks_are_chosen_by_what_is_asked_where_the_question_has_more_in_it() -> None:
    """In every way of asking: an instruction, or what a tool said, matches other chunks."""
    engine = make_engine("llama")
    chunks = ["The bakery sells rye bread.", "Marlow keeps the lighthouse."]
    question, asked = "Bakery, bread of rye, sold: the lighthouse?", "Who keeps the lighthouse?"
    options: Any = {"policy": BestFew(1), "max_new_tokens": 2}

    def places(**more: Any) -> set[tuple[int, ...]]:
        row = (question, chunks, (), None, more.get("asked", ""))
        answers = [
            engine.generate(question, chunks, **options, **more),
            *engine.generate_batch([row, row], **options),
        ]
        stream = engine.stream(question, chunks, **options, **more)
        "".join(stream)
        told = engine.explain(question, chunks, policy=BestFew(1), **more)
        found = [one.metrics.answered_from for one in (*answers, stream.answer)]
        return {*found, told.answered_from}

    assert places() == {(0,)}
    assert places(asked=asked) == {(1,)}
    expected = engine.generate(question, chunks[1:], **options)
    assert engine.generate(question, chunks, asked=asked, **options).text == expected.text
