"""The paired check: every policy against full prefill, on the same questions of one model."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small import make_model, make_tokenizer
from transformers import LlamaForCausalLM
from verdicts import REUSE

from kvcache_rag import (
    CacheBlend,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.codecs import Int4
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.verdict import PolicyScore
from kvcache_rag_lab.evaluation.verification import (
    Outcome,
    Verification,
    check_numerics,
    notes,
    recommended,
)
from kvcache_rag_lab.scoring.ask import questions_digest
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = PromptTemplate(system="Read.\n", chunk_start="<d>", chunk_end="</d>")
TEXTS = ("the cat sat on a mat", "a dog ran home late", "birds fly south in autumn")
FULL = repr(FullRecompute())


def make_engine(model: Any = None, **options: Any) -> Engine:
    settings = {"template": TEMPLATE, "context_window": 400, **options}
    return Engine(model or make_model(), make_tokenizer(), **settings)


def make_questions(count: int, *answers: str) -> list[Question]:
    asked = ("Who sat?", "Where is it?", "What flew?", "Why?")
    return [
        Question(f"q{i}", f"{asked[i % 4]} {i}", TEXTS[: 2 + i % 2], answers) for i in range(count)
    ]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def test_divergences_are_those_of_two_plain_forward_passes(engine: Engine) -> None:
    """Measured by hand from logits: full prefill's answer, read token by token under a policy."""
    (question,) = make_questions(1)
    verdict = Verification([question], max_new_tokens=5).verdict(engine, [Reuse()])
    chunks = list(question.chunks)
    answer = engine.generate(
        question.question, chunks, policy=FullRecompute(), max_new_tokens=5
    ).token_ids
    ids = engine.tokenize(question.question, chunks)
    with torch.no_grad():
        plain = engine.model(torch.tensor([[*ids.all, *answer[:-1]]])).logits[0, -len(answer) :]
    assert plain.argmax(-1).tolist() == list(answer), "greedy, so the plain pass agrees"
    steps = []
    for step in range(len(answer)):  # one query at a time, each longer by one token
        logits = engine.logits(question.question, chunks, policy=Reuse(), answer_ids=answer[:step])
        steps.append(logits[-1])
    expected, found = plain.double().log_softmax(-1), torch.stack(steps).double().log_softmax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1)
    (row,) = verdict.policies
    assert row.first_divergence == pytest.approx(float(divergence[0]), rel=1e-3)
    assert row.answer_divergence == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert row.first_divergence > 1e-6, "a random model tells stitched chunks from full prefill"
    agree = (expected.argmax(-1) == found.argmax(-1)).double().mean()
    assert row.top1 == pytest.approx(float(agree))


def test_rows_say_what_each_policy_did(engine: Engine) -> None:
    asked = make_questions(6)
    policies = [Reuse(), LegoLink(4), CacheBlend(1.0), Combination(), Reuse(), FullRecompute()]
    verdict = Verification(asked, max_new_tokens=4, source="x").verdict(engine, policies)
    once = [REUSE, repr(LegoLink(4)), repr(Combination())]
    assert [row.policy for row in verdict.policies] == once, "and nothing that is full prefill"
    reuse, link, joint = verdict.policies
    full = verdict.full
    assert (full.policy, full.agreement, full.top1, full.recomputed) == (FULL, 1, 1, 1)
    assert full.first_divergence == full.answer_divergence == 0
    assert (reuse.recomputed, joint.recomputed) == (0, 0)
    assert 0 < link.recomputed < 0.5
    assert joint.answer_divergence < 1e-9 < reuse.answer_divergence
    assert joint.agreement == joint.top1 == joint.kept == 1
    assert all(row.ttft > 0 and row.ttft_ratio > 0 for row in (full, *verdict.policies))
    assert (verdict.measure, verdict.questions, verdict.source) == ("agreement_f1", 6, "x")
    assert verdict.source_digest == questions_digest(asked)
    assert all(math.isnan(row.exact_match) for row in verdict.policies), "there are no answers"
    assert verdict.identity == engine.identity
    assert [check.passed for check in verdict.checks] == [True] * 4
    for words in ("weak", "no answers"):
        assert any(words in note for note in verdict.notes)


def test_scores_are_those_of_the_task(engine: Engine) -> None:
    right = {"q0": 1.0, "q1": 0.0, "q2": 1.0, "q3": 1.0}
    calls = []

    def score(answer: str, question: Question) -> dict[str, float]:
        calls.append(question.id)
        return {"f1": right[question.id], "exact_match": 0.25}

    check = Verification(make_questions(4, "yes"), score, "f1", max_new_tokens=2, threshold=0.5)
    verdict = check.verdict(engine, [Reuse()])
    (row,) = verdict.policies
    assert (row.score, row.f1, row.exact_match, row.kept) == (0.75, 0.75, 0.25, 1.0)
    assert sorted(set(calls)) == sorted(right)
    assert verdict.threshold == 0.5
    # Nothing was lost, but 4 questions prove little: Wilson's upper bound of 0 in 4 is 49 %.
    assert row.kept_low == pytest.approx(1 - 0.4899 / 0.75, abs=1e-3)
    assert row.kept_high == 1.0


def test_questions_that_do_not_fit_are_left_out_and_counted(engine: Engine) -> None:
    fits = make_questions(2)
    long = [replace(one, id=f"long {one.id}", chunks=("x" * 500,)) for one in fits]
    verdict = Verification([long[0], *fits], max_new_tokens=2).verdict(engine, [Reuse()])
    assert verdict.questions == 2
    assert any(note.startswith("1 question was left out") for note in verdict.notes)
    with pytest.raises(InvalidInputError, match=r"no question fits: .*split it"):
        Verification(long, max_new_tokens=2).verdict(engine, [Reuse()])


def test_what_cannot_be_verified_says_so(engine: Engine) -> None:
    (asked,) = make_questions(1)
    for questions, policy in (([], Reuse()), ([asked], FullRecompute())):
        with pytest.raises(InvalidInputError, match="nothing to verify"):
            Verification(questions).verdict(engine, [policy])
    verdict = Verification([asked], max_new_tokens=2).verdict(engine, [LegoLink(2)])
    with pytest.raises(InvalidInputError, match="has a gate; make it without"):
        Verification([asked]).verdict(make_engine(gate=verdict), [Reuse()])


class Forgetful(LlamaForCausalLM):
    """A model with a cache like any other's, of which it reads nothing once it is long."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        held = options.get(CACHE_NAME)
        if held is not None and held.get_seq_length() > 30:  # the probe's caches are shorter
            changes = {CACHE_NAME: None, "attention_mask": None, "use_cache": False}
            options = {**options, **changes}
            found = super().forward(input_ids, position_ids=position_ids, **options)
            found[CACHE_NAME] = held
            return found
        return super().forward(input_ids, position_ids=position_ids, **options)


class Misplaced(LlamaForCausalLM):
    """A model that takes positions and then halves those of long prompts in the query."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        held = options.get(CACHE_NAME)
        if held is not None and held.get_seq_length() > 30 and position_ids is not None:
            position_ids = position_ids // 2
        return super().forward(input_ids, position_ids=position_ids, **options)


@pytest.mark.parametrize("kind", [Forgetful, Misplaced])
def test_a_model_whose_caches_do_not_stitch_is_caught(kind: type[LlamaForCausalLM]) -> None:
    broken = kind(make_model().config).eval()
    broken.load_state_dict(make_model().state_dict())
    engine = make_engine(broken)
    checks = check_numerics(engine, "Who sat?", TEXTS)
    assert [check.passed for check in checks] == [True, False, False, False]
    check = Verification(
        make_questions(3, "x"), lambda *_: {"f1": 1.0}, "f1", max_new_tokens=2, threshold=0.1
    )
    verdict = check.verdict(engine, [Reuse()])
    assert verdict.policies[0].kept == 1.0, "answers alone would not show it here"
    assert verdict.recommended == FULL
    gated = make_engine(broken, gate=verdict)
    assert "do not stitch" in gated.generate("Who?", TEXTS, max_new_tokens=2).metrics.gate


def test_numerics_of_a_lossy_codec_are_checked_without_loss(tmp_path: Path) -> None:
    engine = make_engine(store=DiskStore(tmp_path, codec=Int4()))
    checks = check_numerics(engine, "Who sat?", TEXTS)
    assert all(check.passed for check in checks)
    assert max(check.error for check in checks) < 1e-4
    (single,) = {check.passed for check in check_numerics(engine, "Who sat?", TEXTS[:1])}
    assert single


def test_numerics_of_half_precision_are_within_what_rounding_explains() -> None:
    engine = make_engine(make_model().__class__(make_model().config).to(torch.bfloat16).eval())
    checks = check_numerics(engine, "Who sat?", TEXTS)
    assert all(check.passed and check.tolerance == 0.2 for check in checks)


def _row(name: str, kept_low: float, ratio: float, score: float = 0.9) -> PolicyScore:
    return PolicyScore(name, score=score, kept=1.0, kept_low=kept_low, ttft_ratio=ratio)


def test_the_cheapest_policy_that_surely_keeps_enough_is_recommended() -> None:
    full = _row(FULL, 1.0, 1.0)
    cheap, dear = _row("cheap", 0.94, 0.3), _row("dear", 0.96, 0.6)
    assert recommended(full, [cheap, dear], 0.95) == "dear"
    assert recommended(full, [cheap, dear], 0.9) == "cheap"
    assert recommended(full, [cheap, dear], 0.97) == FULL
    assert recommended(full, [], 0.5) == FULL
    assert recommended(full, [_row("slow", 1.0, 1.1)], 0.9) == FULL, "nothing is gained"
    assert recommended(full, [_row("unknown", math.nan, 0.1)], 0.0) == FULL
    equal = [_row("first", 0.97, 0.30, 0.90), _row("better", 0.97, 0.33, 0.92)]
    assert recommended(full, equal, 0.95) == "better", "as cheap but for a fifth"


def outcome(score: float, measure: str = "f1", *, same: bool = True) -> Outcome:
    return Outcome({measure: score}, same, same, 0.0, 0.0, 1.0, 0.0, 0.1)


def rows_of(
    full: list[float], mine: list[float], *, keep: float, measure: str = "f1"
) -> tuple[PolicyScore, PolicyScore]:
    """What the check makes of such answers: full prefill's row and a policy's."""
    asked = [Question(f"q{i}", "?", (f"text {i}",), ("a",)) for i in range(len(full))]
    check = Verification(asked, measure=measure, threshold=keep)
    truth, found = ([outcome(score, measure) for score in scores] for scores in (full, mine))
    return check._row(FULL, "", truth, truth, asked), check._row(REUSE, "", found, truth, asked)


@pytest.mark.parametrize("keep", [0.9, 0.95])
@pytest.mark.parametrize("right", [9, 20, 36])
def test_the_formula_says_when_the_check_itself_decides(keep: float, right: int) -> None:
    """Full prefill is right in `right` of 40 and no answer is lost: more, until it passes."""
    formula = 3.8416 * (1 / ((1 - keep) * right / 40) - 1)
    edge = 40 * (math.ceil(formula) // 40)
    for questions in sorted({40, max(edge, 40), edge + 40, 960}):
        answers = [1.0] * (right * questions // 40)
        answers += [0.0] * (questions - len(answers))
        full, mine = rows_of(answers, answers, keep=keep)
        assert full.needed == math.ceil(formula) == mine.needed
        passes = recommended(full, [replace(mine, ttft_ratio=0.1)], keep) == REUSE
        assert passes == (questions >= full.needed)


def test_common_words_are_no_answers_that_could_be_kept() -> None:
    """F1 of 0.2 everywhere is right nowhere: neither kept nor lost, however many there are."""
    crumbs = [0.2] * 600
    full, mine = rows_of(crumbs, crumbs, keep=0.9)
    assert full.score == pytest.approx(0.2)
    assert math.isnan(full.needed)
    assert math.isnan(mine.kept_low)
    some = [1.0] * 30 + [0.15] * 570  # enough by their mean of 0.19, too few that are right
    full, mine = rows_of(some, [*some[:594], *[0.2] * 6], keep=0.9)
    assert full.needed == math.ceil(3.8416 * (1 / (0.1 * 0.05) - 1)) == 765
    assert mine.kept_low < 0.9 <= mine.kept
    graded = rows_of(crumbs, crumbs, keep=0.9, measure="rouge_l")
    assert graded[1].kept_low > 0.9, "a summary has no right or wrong"


@pytest.mark.parametrize(("theirs", "same"), [("a CAT sat", False), ("cat", True)])
def test_answers_are_the_same_but_for_case_and_articles(theirs: str, same: bool) -> None:
    counts = {"query_tokens": 1, "recomputed_tokens": 0, "fresh_tokens": 0}
    cost = SimpleNamespace(prompt_tokens=2, ttft=0.1, **counts)
    said = (SimpleNamespace(text=text, metrics=cost) for text in ("The cat.", theirs))
    logits = torch.zeros(1, 2, dtype=torch.float64).log_softmax(-1)
    (asked,) = make_questions(1)
    check: Any = Verification([asked])
    found = check._outcome(asked, *said, logits, logits)
    assert (found.agrees, found.same) == (False, same)


def test_notes_say_what_weakens_a_verdict() -> None:
    assert notes(_row(FULL, 1, 1, 0.9), 200, 200, "f1") == ()
    (low,) = notes(_row(FULL, 1, 1, 0.3), 200, 200, "f1")
    assert low.startswith("Full prefill itself scores 30.0 %")
    assert notes(_row(FULL, 1, 1, 0.3), 200, 200, "f1", is_blurred=True) == (), "said elsewhere"
