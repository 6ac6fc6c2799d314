"""The gate: a policy answers only where a verdict says that it is good enough on this model."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small import make_model, make_tokenizer
from verdicts import REUSE, make_verdict

from kvcache_rag import (
    BestFew,
    CacheClip,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    MemoryStore,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.codecs import Int8
from kvcache_rag.errors import FingerprintMismatchError
from kvcache_rag.verdict import Gate, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

TEMPLATE = PromptTemplate(system="Read.\n", chunk_start="<d>", chunk_end="</d>")
TEXTS = ["the cat sat on a mat", "a dog ran home late", "birds fly south in autumn"]
QUESTION = "Who sat?"
BELOW = (
    "fell back to FullRecompute(): Reuse(positions='reordered') kept 83.1 % of full prefill's "
    "score, below 95 %"
)


def make_engine(**options: Any) -> Engine:
    settings = {"template": TEMPLATE, "context_window": 400, **options}
    return Engine(make_model(), make_tokenizer(), **settings)


@pytest.fixture(scope="module")
def plain() -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def low(plain: Engine) -> Verdict:
    return make_verdict(plain.identity, {REUSE: 0.831})


@pytest.fixture(scope="module")
def gated(low: Verdict) -> Engine:
    return make_engine(gate=low)


def test_a_policy_below_is_answered_by_full_prefill_and_says_why(
    plain: Engine, gated: Engine
) -> None:
    answer = gated.generate(QUESTION, TEXTS, max_new_tokens=6)
    full = plain.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=6)
    assert answer.token_ids == full.token_ids
    assert answer.metrics.gate == answer.metrics.to_dict()["gate"] == BELOW
    assert answer.metrics.policy == "FullRecompute()"
    assert answer.metrics.reused_tokens == 0
    assert plain.generate(QUESTION, TEXTS, max_new_tokens=6).metrics.gate == ""


def test_every_way_to_ask_is_gated(plain: Engine, gated: Engine) -> None:
    stream = gated.stream(QUESTION, TEXTS, max_new_tokens=4)
    assert "".join(stream) == stream.text
    assert stream.metrics.gate == BELOW
    batch = gated.generate_batch([(QUESTION, TEXTS), ("x", [])], max_new_tokens=4)
    assert [one.metrics.gate for one in batch] == [BELOW, ""]
    full = plain.generate_batch(
        [(QUESTION, TEXTS), ("x", [])], policy=FullRecompute(), max_new_tokens=4
    )
    assert [one.token_ids for one in batch] == [one.token_ids for one in full]
    expected = plain.logits(QUESTION, TEXTS, policy=FullRecompute())
    assert torch.equal(gated.logits(QUESTION, TEXTS), expected)
    assert not torch.allclose(plain.logits(QUESTION, TEXTS), expected, atol=1e-4)


def test_the_gate_can_refuse_instead(low: Verdict) -> None:
    engine = make_engine(gate=Gate(low, below="error"))
    for ask in (
        lambda: engine.generate(QUESTION, TEXTS),
        lambda: engine.generate_batch([("x", []), (QUESTION, TEXTS)]),
        lambda: engine.stream(QUESTION, TEXTS),
    ):
        with pytest.raises(InvalidInputError, match=r"kept 83\.1 % .* below 95 %; use FullRecomp"):
            ask()
    # Without chunks there is nothing to lose.
    assert engine.generate("Hello?", max_new_tokens=2).metrics.gate == ""
    assert engine.complete("Hello", max_new_tokens=2).metrics.gate == ""
    assert engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=2).text


def test_the_threshold_is_held_against_what_is_sure(plain: Engine) -> None:
    verdict = make_verdict(plain.identity, {REUSE: 0.96})  # surely 0.94
    said = "score, but 200 questions prove only 94.0 %, below 95 %"
    assert said in reason(make_engine(gate=verdict))
    assert reason(make_engine(gate=Gate(verdict, threshold=0.94 - 1e-9))) == ""
    asked_less = dataclasses.replace(verdict, threshold=0.9)
    answer = make_engine(gate=asked_less).generate(QUESTION, TEXTS, max_new_tokens=2)
    assert (answer.metrics.gate, answer.metrics.policy) == ("", REUSE), "the verdict's own counts"


def reason(engine: Engine, policy: Any = None) -> str:
    return engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=2).metrics.gate


def test_what_the_verdict_does_not_cover_is_below(plain: Engine) -> None:
    engine = make_engine(gate=make_verdict(plain.identity, {repr(LegoLink(8)): 1.0}))
    assert reason(engine, LegoLink(8)) == ""
    for policy in (Reuse(), LegoLink(16), Reuse(positions="composite")):
        said = f"does not cover {policy!r}; run `kvcache-rag verify` with it"
        assert said in reason(engine, policy)


def test_what_equals_full_prefill_always_passes(plain: Engine, tmp_path: Path) -> None:
    empty = make_verdict(plain.identity, {})
    engine = make_engine(gate=Gate(empty, threshold=1, below="error"))
    for policy in (FullRecompute(), Combination(), CacheClip(ratio=1.0)):
        assert reason(engine, policy) == ""
    lossy = DiskStore(tmp_path, codec=Int8())
    engine = make_engine(store=MemoryStore(1 << 20), combinations=lossy, gate=empty)
    assert "does not cover Combination()" in reason(engine, Combination())


def test_it_decides_before_chunks_are_chosen(plain: Engine) -> None:
    """A full prefill reads all chunks, also in place of a policy that would read few."""
    policy = BestFew(1)
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 6}
    engine = make_engine(gate=make_verdict(plain.identity, {REUSE: 1.0}))
    answer = engine.generate(QUESTION, TEXTS, **options)
    full = plain.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=6)
    assert f"does not cover {policy!r}" in answer.metrics.gate
    assert answer.token_ids == full.token_ids
    assert answer.metrics.answered_from == (0, 1, 2)
    assert (answer.metrics.unused_chunks, answer.metrics.policy) == (0, repr(FullRecompute()))
    batch = engine.generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS[:1])], **options)
    assert [one.metrics.answered_from for one in batch] == [(0, 1, 2), (0,)]
    told = engine.explain(QUESTION, TEXTS, policy=policy)
    assert [span.kind for span in told.spans].count("chunk") == 3
    assert engine.needed(TEXTS, policy, question=QUESTION) == []
    long = ["".join(text for _ in range(6)) for text in TEXTS]
    assert engine.generate(QUESTION, long, overflow="refine", **options).metrics.rounds > 1
    # What it lets through chooses.
    let = make_engine(gate=make_verdict(plain.identity, {repr(policy): 1.0}))
    metrics = let.generate(QUESTION, TEXTS, **options).metrics
    assert (metrics.gate, metrics.answered_from, metrics.unused_chunks) == ("", (0,), 2)
    assert let.needed(TEXTS, policy, question=QUESTION) == let.keys(TEXTS[:1])
    assert let.generate(QUESTION, long, overflow="refine", **options).metrics.rounds == 1


class _Scores:
    """A scorer that knows no model."""

    def __init__(self, name: str) -> None:
        self.name = name

    def scores(self, question: str, chunks: Sequence[str]) -> list[Tensor]:
        return [torch.arange(len(text)).float() for text in chunks]


def test_an_auxiliary_model_has_to_be_the_one_of_the_verdict(plain: Engine) -> None:
    verdict = make_verdict(plain.identity, {repr(CacheClip()): 1.0}, auxiliary="small")
    engine = make_engine(gate=verdict, auxiliary=_Scores("small"))
    assert reason(engine, CacheClip()) == reason(engine, CacheClip(_Scores("small"))) == ""
    said = "with the auxiliary model small, not other"
    assert said in reason(engine, CacheClip(_Scores("other")))


@pytest.mark.parametrize(
    ("kept", "error", "said"),
    [
        (1.0, 0.5, "this model's caches do not stitch"),
        (1.0, math.nan, "this model's caches do not stitch"),
        (math.nan, 0.0, "no score"),
    ],
)
def test_what_is_broken_or_not_known_lets_nothing_through(
    plain: Engine, kept: float, error: float, said: str
) -> None:
    verdict = make_verdict(plain.identity, {REUSE: kept}, error=error)
    engine = make_engine(gate=Gate(verdict, threshold=0))
    metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics
    assert said in metrics.gate
    assert metrics.policy == "FullRecompute()"


def test_a_verdict_of_something_else_is_refused_with_what_differs(
    low: Verdict, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    changed, half = copy.deepcopy(make_model()), copy.deepcopy(make_model()).to(torch.bfloat16)
    with torch.no_grad():
        changed.lm_head.weight[5] += 1
    # The revision is a digest of the weights, so a dtype alone is another model, too.
    for model in (changed, half):
        with pytest.raises(FingerprintMismatchError, match=r"made for the model .*, not for "):
            Engine(model, tokenizer, template=TEMPLATE, gate=low)
    with pytest.raises(FingerprintMismatchError, match="chunks stored as native, not as int8"):
        make_engine(gate=low, store=DiskStore(tmp_path, codec=Int8()))
    changes = {
        "another instruction": {"system": "Look.\n"},
        "another form of chunks": {"chunk_start": "<e>"},
        "another form of chunks or questions": {"question": "Q: {question}"},
    }
    for said, change in changes.items():
        with pytest.raises(FingerprintMismatchError, match=f"{said}.*; run `kvcache-rag verify`"):
            make_engine(gate=low, template=dataclasses.replace(TEMPLATE, **change))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"threshold": one}, "between 0 and 1") for one in (1.5, math.nan, True)),
        ({"below": "warn"}, '"full" or "error"'),
        ({"verdict": 7}, "not a int"),
    ],
)
def test_settings_that_cannot_be_used(low: Verdict, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Gate(**{"verdict": low, **options})


def test_a_path_is_read_when_the_engine_is_made(low: Verdict, tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    for given in (path, str(path), Gate(path, threshold=0.5)):
        with pytest.raises(InvalidInputError, match=r"cannot be read .*`kvcache-rag verify`"):
            make_engine(gate=given)
    low.save(path)
    given = (path, str(path), Gate(path, threshold=0.5))
    assert [reason(make_engine(gate=one)) for one in given] == [BELOW, BELOW, ""]
