"""The retriever's best chunk, computed with the question behind the cached others.

Law: it equals one ordinary forward pass in which the best chunks belong to the query.  So does the
plain path, which loads every chunk in that order and computes the last ones again where they stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import (
    LONG_QUESTION,
    QUESTION,
    TEMPLATE,
    TEXTS,
    TOLERANCE,
    TURNS,
    Picked,
    Recorder,
    behind_system,
    error,
    make_engine,
    over_stored,
    plain_logits,
    refused,
    sequence_logits,
)
from torch import Tensor
from zoo import FAMILIES, SEVERAL, build, byte_tokenizer

from kvcache_rag import BestLast, DiskStore, Engine, Reuse
from kvcache_rag.codecs import Int8
from kvcache_rag.kv.mask import block_mask
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.policies.selection import candidates

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.prompt import Message
    from kvcache_rag.stitching.stitch import StitchedPrompt

SCHEMES: tuple[PositionScheme, ...] = ("reordered", "composite")
# Windows, sinks, layers without positions, MLA, ALiBi, code of its own.
SOME = ["llama", "mistral window", "gemma3", "cohere2", "gpt_oss", "deepseek_v3", "falcon", "bloom"]
SCORES = (0.1, -2.0, 0.7)
# What the tests ask by `BestLast(0.6)`: of three chunks the best two, of two the best.
ASKED: list[tuple[str, list[str], tuple[Message, ...], tuple[float, ...]]] = [
    (QUESTION, TEXTS, TURNS, SCORES),
    (LONG_QUESTION, TEXTS[:2], (), (0.0, 1.0)),
    ("x", TEXTS[:1], TURNS, (1.0,)),
    (QUESTION, TEXTS, (), SCORES[::-1]),
]


def again(ratio: float, positions: PositionScheme) -> Picked:
    """Computes the last chunks again where they stand: the slow, plain path."""

    def last(prompt: StitchedPrompt, _: object) -> Tensor:
        selected = torch.zeros(prompt.context_tokens, dtype=torch.bool)
        selected[prompt.chunks[-max(1, round(ratio * len(prompt.chunks)))].start :] = True
        return selected & candidates(prompt)

    return Picked(last, positions)


def ranked(texts: Sequence[str], scores: Sequence[float]) -> list[str]:
    """Best last, of texts that have different scores."""
    return [text for _, text in sorted(zip(scores, texts, strict=True))]


def best_two_last(scores: Sequence[float], texts: Sequence[str]) -> list[str]:
    """The best two at the end, the others before them as they came."""
    last = ranked(texts, scores)[-2:]
    return [*(text for text in texts if text not in last), *last]


def one_pass(
    engine: Engine,
    moved: Sequence[str],
    fresh: int,
    scheme: Any,
    question: str = QUESTION,
    history: Sequence[Message] = (),
    answer: Sequence[int] = (),
) -> Tensor:
    """Logits of question and answer in one forward pass, the last `fresh` chunks in its query."""
    ids = engine.tokenize(question, moved, history)
    others, best = ids.chunks[: len(moved) - fresh], ids.chunks[len(moved) - fresh :]
    asked = (*ids.query, *answer)
    query = (*(token for chunk in best for token in chunk), *asked)
    sequence = block_mask(ids.prefix, others, query, scheme)
    return sequence_logits(engine, sequence)[-len(asked) :]


@pytest.fixture(scope="module", params=list(FAMILIES))
def name(request: pytest.FixtureRequest) -> str:
    family: str = request.param
    return family


@pytest.fixture(scope="module")
def engine(name: str) -> Engine:
    """Deferred wherever it can be, which is copying to the bit of a law (test_deferred.py)."""
    return make_engine(name, rotation="deferred")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("ratio", "chunks"), [(0.0, 1), (0.6, 2)])
def test_law_the_best_last_is_the_same_chunks_computed_again(
    engine: Engine, ratio: float, chunks: int, scheme: Any
) -> None:
    policy = BestLast(ratio, scheme)
    if refused(engine, policy) or refused(engine, again(ratio, scheme)):
        return
    # TEXTS stand best first.
    best = TEXTS[:chunks][::-1]
    moved = [*TEXTS[chunks:], *best]
    expected = engine.logits(QUESTION, moved, policy=again(ratio, scheme))
    found = engine.logits(QUESTION, TEXTS, policy=policy)
    assert found.shape == expected.shape
    assert error(found, expected) < TOLERANCE
    assert error(found, one_pass(engine, moved, chunks, scheme)) < TOLERANCE
    if chunks == len(TEXTS) - 1:
        assert error(found, plain_logits(engine, moved)) < TOLERANCE
    reused = engine.logits(QUESTION, moved, policy=Reuse(scheme))
    assert error(reused, expected) > 10 * TOLERANCE, "it must be able to fail"


@pytest.mark.parametrize("name", SEVERAL, indirect=True)
def test_the_others_lie_where_they_would_if_all_were_reused(engine: Engine) -> None:
    of = [
        engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
        for policy in (BestLast(), Reuse())
    ]
    assert len({(one.rotation, one.not_deferred) for one in of}) == 1


@pytest.mark.parametrize(
    ("rotation", "scheme"), [("copied", "reordered"), ("deferred", "composite")]
)
@pytest.mark.parametrize("system", ["no prefix", "a long one"])
@pytest.mark.parametrize("family", SOME)
def test_law_answers_streams_and_batches_are_one_pass_behind_any_prefix(
    family: str, system: str, rotation: Any, scheme: Any
) -> None:
    """With turns behind the chunks and scores that move them, step by step."""
    engine, policy = behind_system(family, system, rotation=rotation), BestLast(0.6, scheme)
    if refused(engine, policy):
        return
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 3}
    together = Recorder()
    batch = engine.generate_batch(ASKED, **options, logits_processor=[together])
    for row, (question, texts, history, scores) in enumerate(ASKED):
        options |= {"history": history, "scores": scores}
        alone, piecewise = Recorder(), Recorder()
        answer = engine.generate(question, texts, **options, logits_processor=[alone])
        stream = engine.stream(question, texts, **options, logits_processor=[piecewise])
        assert "".join(stream) == answer.text
        assert stream.answer.token_ids == batch[row].token_ids == answer.token_ids
        said = [int(step[0].argmax()) for step in alone.steps]
        moved, fresh = best_two_last(scores, texts), min(2, len(texts) - 1)
        asked = question, history, said[:-1]
        expected = one_pass(engine, moved, fresh, scheme, *asked)[-len(said) :]
        for seen, place in ((alone, 0), (piecewise, 0), (together, row)):
            found = torch.stack([step[place] for step in seen.steps[: len(said)]])
            assert error(found, expected) < TOLERANCE
        # The law can fail: the order matters, what is computed, and the turns behind the chunks.
        wrong = [one_pass(engine, moved, fresh, scheme, question, (), said[:-1])] * bool(history)
        if fresh:
            wrong.append(one_pass(engine, texts[::-1], fresh, scheme, *asked))
        if fresh > 1:
            wrong.append(one_pass(engine, moved, 0, scheme, *asked))
        assert all(error(one[-len(said) :], expected) > 10 * TOLERANCE for one in wrong)


# ---------------------------------------------------------------------- chunks in 8 bits
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rotation", ["copied", "deferred"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral window"])
def test_law_of_chunks_in_8_bits_the_others_are_what_is_stored(
    family: str, rotation: Any, scheme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place by the kernel's specification, which needs neither its CPU nor its dtype."""
    monkeypatch.setattr("kvcache_rag.generation.buffered.int8_refusal", lambda model: "")

    def opened() -> Engine:
        store = DiskStore(tmp_path, codec=Int8())
        return Engine(
            build(family), byte_tokenizer(), template=TEMPLATE, store=store, rotation=rotation
        )

    opened().add(TEXTS)  # by another engine, as who computes the prefix has it exact
    engine = opened()
    for ratio, chunks in ((0.0, 1), (0.6, 2)):
        policy, moved = BestLast(ratio, scheme), [*TEXTS[chunks:], *TEXTS[:chunks][::-1]]
        ids = engine.tokenize(QUESTION, moved)
        chosen = torch.zeros(len(ids.context), dtype=torch.bool)
        chosen[len(ids.context) - sum(map(len, ids.chunks[-chunks:])) :] = True
        output = over_stored(engine, build(family), moved, chosen, scheme)
        expected = output.logits[0, -len(ids.query) :]
        found = engine.logits(QUESTION, TEXTS, policy=policy)
        assert error(found, expected) < TOLERANCE
        # The law can fail: of whole chunks it is another answer.
        exact = make_engine(family).logits(QUESTION, TEXTS, policy=policy)
        assert error(exact, expected) > 3 * TOLERANCE
        metrics = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
        assert metrics.rotation == rotation
        assert metrics.hits == {"disk": len(TEXTS) - chunks}


# ---------------------------------------------------------------------- how many, and of what
@pytest.mark.parametrize(
    ("ratio", "chunks", "fresh"),
    [(0, 20, 1), (0.2, 1, 0), (0.2, 2, 1), (0.2, 5, 1), (0.2, 10, 2), (0.2, 20, 4), (1, 5, 4)],
)
def test_how_many_are_computed(ratio: float, chunks: int, fresh: int) -> None:
    plan = BestLast(ratio).plan(Retrieved("", ("",) * chunks, range(chunks)))
    assert plan.fresh == fresh
    assert plan.order == tuple(range(chunks)), "the best stand last, whatever their number"
