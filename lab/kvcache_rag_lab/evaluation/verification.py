"""A paired check of policies against full prefill on your own questions, for a `Verdict`.

Every policy answers the same questions over the same documents, and reads full prefill's answer
token by token to say how likely it finds each (`Verification`).  From the scores follows which
policy to use and what to mind (`recommended`, `notes`).

Before quality means anything, plain numerics have to agree (`check_numerics`): a model whose cache
is accepted but whose own code ignores it (an attention mask or positions of its own making) answers
without having read the chunks.  Three comparisons of logits find it.
"""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from kvcache_rag.codecs import Native
from kvcache_rag.engine import unwarned
from kvcache_rag.errors import ContextTooLongError, InvalidInputError, RemoteServerError
from kvcache_rag.generation.gate import policy_key, scorer_name
from kvcache_rag.integration.references import is_remote
from kvcache_rag.kv.mask import block_mask
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.policies import FullRecompute, Reuse, ReusePolicy
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.progress import plural, progress_bar
from kvcache_rag.prompt.words import normalised
from kvcache_rag.verdict import (
    LEAST_FULL_SCORE,
    THRESHOLD,
    WEAK_BELOW,
    NumericsCheck,
    PolicyScore,
    Verdict,
)
from kvcache_rag_lab.scoring.ask import (
    Workplace,
    Workplaces,
    cluster_of,
    divergences,
    log_probabilities,
    questions_digest,
    rotated,
)
from kvcache_rag_lab.scoring.metrics import f1, f1_chinese
from kvcache_rag_lab.scoring.statistics import (
    least_kept,
    most_provable,
    paired_ratio,
    trials_to_keep,
    trials_without_loss,
)

if TYPE_CHECKING:
    from kvcache_rag.engine import Engine
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.metrics import Answer
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.verdict import AuxiliaryAgreement
    from kvcache_rag_lab.scoring.question import Question

AGREEMENT: Final = "agreement_f1"
"""The measure where questions have no answers: word F1 of the answer and full prefill's."""

# What an answer must score to be one that can be lost: less is a few common words, which a policy
# that reads nothing keeps, too.  Summaries have no right or wrong; there the mean score counts.
RIGHT: Final = 0.5

GRADED: Final = frozenset({"rouge_l", "rouge_l_chinese"})

# Costs that differ by less are the same, and the better score decides.
EQUAL_COST: Final = 1.2

# How often a server is asked until its chunks are there, and seconds between.
_TRIES: Final = 20
_PAUSE: Final = 0.25

Scoring = Callable[[str, "Question"], Mapping[str, float]]
"""Metrics of an answer, each between 0 and 1."""


@dataclass(frozen=True)
class Outcome:
    """How one policy did on one question; divergences in nats, `ttft` in seconds.

    Attributes:
        metrics: What the task measures, and `agreement_f1`.
        agrees: Whether the answer is full prefill's to the letter.
        same: Whether it is but for case, punctuation and articles.
        first: Divergence from full prefill at the answer's first token.
        mean: Mean divergence over the tokens of full prefill's answer.
        top1: Share of these tokens at which both rank the same first.
        recomputed: Share of context tokens that the policy computed again; 1 for full prefill.
        ttft: Seconds to the first token.
    """

    metrics: Mapping[str, float]
    agrees: bool
    same: bool
    first: float
    mean: float
    top1: float
    recomputed: float
    ttft: float


class Subject(Protocol):
    """What is asked, and what of it besides answers can be looked at."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to bear in mind."""

    def prepare(self, question: Question, policies: Iterable[ReusePolicy]) -> None:
        """Have stored what the policies need for a question."""

    def answer(
        self, question: Question, policy: ReusePolicy, truth: Answer | None
    ) -> tuple[Answer, Tensor | None]:
        """An answer, and what is expected at each token of full prefill's answer.

        Returns:
            The answer, and logarithms of probabilities `(tokens, vocabulary)` float64; None where
            nobody can tell them.
        """

    def checks(self, question: Question) -> tuple[NumericsCheck, ...]:
        """Whether plain numerics agree, as far as they can be looked at."""


@dataclass(frozen=True)
class EngineSubject:
    """An engine of this process.

    Attributes:
        engine: The model.
        max_new_tokens: Of an answer.
        notes: None.
    """

    engine: Engine
    max_new_tokens: int
    notes: tuple[str, ...] = ()

    def prepare(self, question: Question, policies: Iterable[ReusePolicy]) -> None:
        place = Workplace(self.engine, self.engine)
        place.prepare(question.chunks)
        for policy in policies:
            place.prepare_joint(policy, [question])

    def answer(
        self, question: Question, policy: ReusePolicy, truth: Answer | None
    ) -> tuple[Answer, Tensor | None]:
        answer = self.engine.generate(
            question.question, question.chunks, policy=policy, max_new_tokens=self.max_new_tokens
        )
        if answer.metrics.gate:
            raise InvalidInputError("the engine to verify has a gate; make it without gate=")
        read = (truth or answer).token_ids[:-1]
        return answer, log_probabilities(self.engine, question, policy, read)

    def checks(self, question: Question) -> tuple[NumericsCheck, ...]:
        return check_numerics(self.engine, question.question, question.chunks)


@dataclass(frozen=True)
class ServerSubject:
    """A server, which tells nothing but its answers.

    Attributes:
        engine: Asks it.
        max_new_tokens: Of an answer.
        notes: What is not known for that.
    """

    engine: Engine
    max_new_tokens: int
    notes: tuple[str, ...] = (
        "A server was asked: answers are compared, probabilities and numerics are not.",
    )

    def prepare(self, question: Question, policies: Iterable[ReusePolicy]) -> None:
        self.engine.add(question.chunks)

    def answer(
        self, question: Question, policy: ReusePolicy, truth: Answer | None
    ) -> tuple[Answer, Tensor | None]:
        for _ in range(_TRIES):
            answer = self.engine.generate(
                question.question, question.chunks, policy=policy,
                max_new_tokens=self.max_new_tokens,
            )  # fmt: skip
            if answer.metrics.gate:
                raise InvalidInputError("the server to verify has a gate; start it without --gate")
            if policy.is_full or not answer.metrics.misses:
                return answer, None
            time.sleep(_PAUSE)  # chunks may be written behind the answer that computes them
        raise RemoteServerError(
            "the server keeps no chunks, so nothing of it can be verified; its log says why"
        )

    def checks(self, question: Question) -> tuple[NumericsCheck, ...]:
        return ()


@dataclass(frozen=True)
class Verification:
    """What is checked, and how strictly.

    Attributes:
        questions: Each with its documents.
        score: Metrics of an answer; None for questions without answers.
        measure: Which of them decides.
        source: Name of the questions, noted in the verdict.
        max_new_tokens: Of an answer.
        threshold: Share of full prefill's score that a policy has to keep.
        seed: Of the bootstrap.
    """

    questions: Sequence[Question]
    score: Scoring | None = None
    measure: str = AGREEMENT
    source: str = ""
    max_new_tokens: int = 32
    threshold: float = THRESHOLD
    seed: int = 0

    def verdict(
        self,
        engine: Engine,
        policies: Sequence[ReusePolicy],
        *,
        auxiliary: AuxiliaryAgreement | None = None,
        scorer: str = "",
        show_progress: bool = False,
    ) -> Verdict:
        """Ask every question of every policy.

        Args:
            engine: The model, or what asks a server (`remote_engine`); without a gate.
            policies: What is compared with `FullRecompute()`.
            auxiliary: Goes into the verdict.
            scorer: Name of the engine's own auxiliary model, for policies that use it.
            show_progress: Whether to show a bar.

        Raises:
            InvalidInputError: If there is nothing to ask, or nothing fits the context window.
            UnsupportedModelError: If a policy moves chunks and the model's keys cannot move.
        """
        compared = {
            policy_key(candidate): candidate for candidate in policies if not candidate.is_full
        }
        if not self.questions or not compared:
            raise InvalidInputError(
                "there is nothing to verify; give at least one question and one policy that reuses"
            )
        subject: Subject = ServerSubject(engine, self.max_new_tokens)
        if not is_remote(engine):
            subject = EngineSubject(unwarned(engine), self.max_new_tokens)
        asked, outcomes = self._ask(subject, compared, show_progress)
        checks = subject.checks(asked[0])
        full = self._row(repr(FullRecompute()), "", outcomes[""], outcomes[""], asked)
        rows = tuple(
            self._row(
                name,
                (scorer_name(policy.auxiliary) or scorer) if "relevance" in policy.reads else "",
                outcomes[name],
                outcomes[""],
                asked,
            )
            for name, policy in compared.items()
        )
        sound = all(check.passed for check in checks)
        verdict = Verdict(
            identity=engine.identity,
            created=datetime.date.today().isoformat(),
            source=self.source,
            source_digest=questions_digest(self.questions),
            questions=len(asked),
            measure=self.measure,
            threshold=self.threshold,
            full=full,
            policies=rows,
            recommended=recommended(full, rows if sound else (), self.threshold),
            checks=checks,
            auxiliary=auxiliary,
            packages=_packages(),
        )
        told = notes(
            full,
            len(asked),
            len(self.questions),
            self.measure,
            is_blurred=verdict.is_blurred,
            choosing=[name for name, policy in compared.items() if _chooses(policy, asked[0])],
        )
        return replace(verdict, notes=(*told, *subject.notes))

    def _ask(
        self, subject: Subject, compared: Mapping[str, ReusePolicy], show: bool
    ) -> tuple[list[Question], dict[str, list[Outcome]]]:
        """Outcomes per policy, full prefill's under ""; interleaved, so that times compare."""
        results: dict[str, list[Outcome]] = {name: [] for name in ("", *compared)}
        asked: list[Question] = []
        warm = False
        with progress_bar(len(self.questions), "verify", "question", show=show) as bar:
            for question in self.questions:
                bar.update(1)
                order = rotated(list(compared), len(asked))
                try:
                    for _ in range(1 if warm else 2):  # first calls allocate
                        outcomes = self._outcomes(subject, compared, order, question)
                        warm = True
                except ContextTooLongError as error:
                    if question is self.questions[-1] and not asked:
                        raise InvalidInputError(f"no question fits: {error}") from error
                    continue
                asked.append(question)
                for name, outcome in outcomes.items():
                    results[name].append(outcome)
        return asked, results

    def _outcomes(
        self,
        subject: Subject,
        compared: Mapping[str, ReusePolicy],
        order: Sequence[str],
        question: Question,
    ) -> dict[str, Outcome]:
        subject.prepare(question, compared.values())
        truth, expected = subject.answer(question, FullRecompute(), None)
        outcomes = {"": self._outcome(question, truth, truth, expected, expected)}
        for name in order:
            answer, log_probs = subject.answer(question, compared[name], truth)
            outcomes[name] = self._outcome(question, answer, truth, log_probs, expected)
        return outcomes

    def _outcome(
        self,
        question: Question,
        answer: Answer,
        truth: Answer,
        found: Tensor | None,
        expected: Tensor | None,
    ) -> Outcome:
        text, theirs = answer.text.strip(), truth.text.strip()
        first = mean = top1 = math.nan
        if found is not None and expected is not None:
            apart = divergences(expected, found)
            first, mean = float(apart[0]), float(apart.mean())
            top1 = float((expected.argmax(-1) == found.argmax(-1)).double().mean())
        metrics = dict(self.score(text, question)) if self.score is not None else {}
        same = text == theirs
        is_chinese = self.measure == AGREEMENT and question.language == "zh"
        overlap = f1_chinese if is_chinese else f1  # the former needs a package
        metrics[AGREEMENT] = 1.0 if same else overlap(text, theirs)
        cost = answer.metrics
        context = cost.prompt_tokens - cost.query_tokens
        again = cost.recomputed_tokens + cost.fresh_tokens
        return Outcome(
            metrics=metrics,
            agrees=same,
            same=normalised(text) == normalised(theirs),
            first=first,
            mean=mean,
            top1=top1,
            recomputed=1.0 if answer is truth else again / max(1, context),
            ttft=cost.ttft,
        )

    def _row(
        self,
        policy: str,
        auxiliary: str,
        found: Sequence[Outcome],
        full: Sequence[Outcome],
        asked: Sequence[Question],
    ) -> PolicyScore:
        mine = [outcome.metrics[self.measure] for outcome in found]
        theirs = [outcome.metrics[self.measure] for outcome in full]
        clusters = [cluster_of(question) for question in asked]
        kept = paired_ratio(mine, theirs, clusters, seed=self.seed)
        low, needed = self._proved(mine, theirs, kept.low, clusters, is_full=found is full)
        ratios = [a.ttft / max(b.ttft, 1e-9) for a, b in zip(found, full, strict=True)]

        def mean(values: Sequence[float]) -> float:
            return statistics.fmean(values)

        def metric(name: str) -> float:
            known = all(name in outcome.metrics for outcome in found)
            return mean([outcome.metrics[name] for outcome in found]) if known else math.nan

        return PolicyScore(
            policy=policy,
            auxiliary=auxiliary,
            score=mean(mine),
            kept=kept.value,
            kept_low=low,
            kept_high=kept.high,
            exact_match=metric("exact_match"),
            f1=metric("f1"),
            agreement=mean([float(outcome.agrees) for outcome in found]),
            first_divergence=mean([outcome.first for outcome in found]),
            answer_divergence=mean([outcome.mean for outcome in found]),
            top1=mean([outcome.top1 for outcome in found]),
            recomputed=mean([outcome.recomputed for outcome in found]),
            ttft=statistics.median([outcome.ttft for outcome in found]),
            ttft_ratio=statistics.median(ratios),
            same_answer=mean([float(outcome.same) for outcome in found]),
            needed=needed,
            right=metric("containment"),
            wrong_document=metric("wrong_document"),
        )

    def _proved(
        self,
        mine: Sequence[float],
        theirs: Sequence[float],
        drawn: float,
        clusters: Sequence[str],
        *,
        is_full: bool,
    ) -> tuple[float, float]:
        """Share of full prefill's score that is proved, and questions that prove the threshold.

        Args:
            mine: Scores of a policy.
            theirs: Of full prefill.
            drawn: Lower end of the bootstrap's interval.
            clusters: Of the questions.
            is_full: Whether the policy is full prefill, which keeps all of it.
        """
        basis = self._basis(theirs)
        open_share = (1 - self.threshold) * basis
        without_loss = float(trials_without_loss(open_share)) if open_share > 0 else math.nan
        if is_full:
            return drawn, without_loss
        # min() with a nan depends on the order, and nothing is proved where full prefill scores 0.
        proved = (drawn, least_kept(mine, theirs), most_provable(basis, len(theirs)))
        low = math.nan if any(map(math.isnan, proved)) else min(proved)
        estimate = trials_to_keep(mine, theirs, self.threshold, clusters, seed=self.seed)
        return low, max(estimate, without_loss)

    def _basis(self, scores: Sequence[float]) -> float:
        """What can be lost of full prefill's scores: their mean, or the share that is right."""
        mean = statistics.fmean(scores)
        if self.measure in GRADED:
            return mean
        return min(mean, statistics.fmean(float(score >= RIGHT) for score in scores))


def _packages() -> dict[str, str]:
    versions = {name: version(name) for name in ("kvcache-rag", "torch", "transformers")}
    return {**versions, "python": platform.python_version()}


def recommended(full: PolicyScore, rows: Sequence[PolicyScore], threshold: float) -> str:
    """The cheapest policy that surely keeps `threshold` of full prefill's score.

    Cost is the time to the first token against full prefill's; among policies that cost the same
    but for a fifth, the one with the best score.  Full prefill, if no policy passes or none that
    passes is sooner.
    """
    passing = [row for row in rows if row.kept_low >= threshold and row.ttft_ratio < 1]
    if not passing:
        return full.policy
    least = min(row.ttft_ratio for row in passing)
    equal = [row for row in passing if row.ttft_ratio <= EQUAL_COST * least]
    return max(equal, key=lambda row: (row.score, -row.answer_divergence)).policy


def _chooses(policy: ReusePolicy, question: Question) -> bool:
    """Whether a policy answers from some chunks alone."""
    return policy.plan(Retrieved(question.question, question.chunks)).others is not None


def notes(
    full: PolicyScore,
    asked: int,
    given: int,
    measure: str,
    *,
    is_blurred: bool = False,
    choosing: Sequence[str] = (),
) -> tuple[str, ...]:
    """What to bear in mind about a verdict, a sentence each.

    Args:
        full: Full prefill itself.
        asked: How many questions were asked.
        given: How many there were.
        measure: What decides.
        is_blurred: Whether the verdict says itself that full prefill scores too low.
        choosing: Policies that answer from some documents alone.
    """
    sentences = []
    if asked < WEAK_BELOW:
        sentences.append(
            f"This verdict is weak: {plural(asked, 'question')} cannot tell policies apart; "
            f"give at least {WEAK_BELOW}, better 200."
        )
    if asked < given:
        sentences.append(
            f"{plural(given - asked, 'question', 'was', 'were')} left out, not fitting the context "
            "window."
        )
    if full.score < LEAST_FULL_SCORE and not is_blurred:
        sentences.append(
            f"Full prefill itself scores {100 * full.score:.1f} %, so shares of its score say "
            "little about reading."
        )
    if measure == AGREEMENT:
        sentences.append(
            "Questions have no answers, some or all, so policies are measured against full "
            "prefill's answers, right or wrong."
        )
        if choosing:
            sentences.append(
                f"Agreement understates {' and '.join(choosing)}: documents that full prefill "
                "reads, right or wrong, are left out there; give answers to judge by what is right."
            )
    return tuple(sentences)


# Root mean square difference over the standard deviation of the logits.  What rounding makes of it
# on the families that are tested is 30 times less; a cache that is not read makes it about 1.
TOLERANCES: Final = {torch.float64: 1e-4, torch.float32: 3e-3, torch.float16: 0.05}

COARSE: Final = 0.2

# More chunks show nothing more and cost the square of their length.
MOST_CHUNKS: Final = 3


def check_numerics(
    engine: Engine, question: str, chunks: Sequence[str]
) -> tuple[NumericsCheck, ...]:
    """Compare logits of one question over its first chunks.

    `FullRecompute()` with the model's plain forward pass, one chunk that was cached with the same,
    and several cached chunks, reordered and composite, with one forward pass under the block mask
    (`mask.block_mask`), where no layer is recurrent; of llama.cpp, which takes no mask, reordered
    with chunks that it computes in their places.  Chunks are stored without loss for this.

    Args:
        engine: With the model; its store is used only if its codec is `Native`.
        question: Any.
        chunks: At least one.

    Raises:
        UnsupportedModelError: If the model keeps no keys and values.
    """
    is_exact = engine.store.codec.name == Native.name
    exact = engine if is_exact else Workplaces(engine, Path()).get("", "").reader  # in memory
    model: LanguageModel = exact._adapter
    tolerance = COARSE  # in llama.cpp products of quantised weights round their inputs to 8 bits
    if model.abilities.memory == "ours":
        model = TransformersModel(engine.model, packed_attention=False)
        tolerance = TOLERANCES.get(model.dtype, COARSE)
    some = list(chunks[:MOST_CHUNKS])

    def check(name: str, found: Tensor, reference: Tensor) -> NumericsCheck:
        return NumericsCheck(name, _error(found, reference), tolerance)

    full = exact.logits(question, some, policy=FullRecompute())
    single = exact.logits(question, some[:1], policy=Reuse())
    checks = [
        check(
            "full prefill and the model's own forward pass",
            *(full, _plain(exact, model, question, some)),
        ),
        check(
            "one cached chunk and a plain prefill",
            *(single, _plain(exact, model, question, some[:1])),
        ),
    ]
    is_masked = model.abilities.recompute != "heads"  # no mask keeps a state from going on
    if is_masked and not model.measured.immovable and not model.measured.by_place:
        several = some if len(some) > 1 else some * 2
        schemes: tuple[PositionScheme, ...] = ("reordered", "composite")
        for scheme in schemes[: 1 if model.abilities.cannot_overlap else None]:
            with suppress(ContextTooLongError):  # a single chunk need not fit twice
                reused = exact.logits(question, several, policy=Reuse(positions=scheme))
                name, wanted = _stitched(exact, model, question, several, scheme)
                checks.append(check(f"cached chunks ({scheme}) and {name}", reused, wanted))
    return tuple(checks)


def _plain(engine: Engine, model: LanguageModel, question: str, chunks: Sequence[str]) -> Tensor:
    """Logits of the query by transformers or llama.cpp alone, with its own mask and positions."""
    ids = engine.tokenize(question, chunks)
    every = torch.tensor([ids.all])
    if model.abilities.memory == "own":
        return model.forward(every, None, torch.arange(len(ids.all)), keep=len(ids.query))[0]
    own: Any = engine.model
    device = own.get_input_embeddings().weight.device
    with torch.inference_mode():
        logits: Tensor = own(every.to(device), use_cache=False).logits
    return logits[0, -len(ids.query) :].float().cpu()


def _stitched(
    engine: Engine,
    model: Any,
    question: str,
    chunks: Sequence[str],
    scheme: PositionScheme,
) -> tuple[str, Tensor]:
    """What logits over cached chunks are compared with, and its name."""
    if model.abilities.memory == "own":
        ids = engine.tokenize(question, chunks)
        found = model.logits_in_place(ids.prefix, ids.chunks, ids.query)
        return "chunks computed in their places", found
    return "the block mask", _masked(engine, model, question, chunks, scheme)


def _masked(
    engine: Engine,
    model: Any,
    question: str,
    chunks: Sequence[str],
    scheme: PositionScheme,
) -> Tensor:
    ids = engine.tokenize(question, chunks)
    sequence = block_mask(ids.prefix, ids.chunks, ids.query, scheme)
    mask = model.mask_argument(sequence.allowed, sequence.indices)
    keep = sequence.query_tokens
    logits = model.forward(sequence.ids[None], None, sequence.positions, mask=mask, keep=keep)
    found: Tensor = logits[0].float().cpu()
    return found


def _error(found: Tensor, reference: Tensor) -> float:
    """Root mean square difference in standard deviations of the reference; NaN stays NaN."""
    return float((found - reference).pow(2).mean().sqrt() / reference.std().clamp_min(1e-12))
