"""How good a model is on held-out data, before and after training, and what a run changed.

`measure` asks a network under training, whose stitched computation is one pass with gradients (no
engine, no store).  It predicts each token after the right ones, so it knows the loss as well.
Intervals and tallies are those of every evaluation (`scoring.statistics`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from kvcache_rag.progress import table
from kvcache_rag_lab.finetune.learner import divergences
from kvcache_rag_lab.finetune.packing import IGNORED
from kvcache_rag_lab.scoring.statistics import Share, mean_change

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag_lab.finetune.learner import Learner
    from kvcache_rag_lab.finetune.sources import Encoded


_TITLES = {
    "plain": "plain text, full attention",
    "free": "questions without chunks",
    "full": "document questions, full prefill",
    "block": "document questions, stitched",
}


@dataclass(frozen=True)
class Measure:
    """Result of one held-out set.

    Attributes:
        losses: Mean cross-entropy of each text or answer, in nats per token.
        exact: Whether each answer is right, token by token, greedily (empty for texts).
    """

    losses: tuple[float, ...]
    exact: tuple[bool, ...] = ()

    @property
    def loss(self) -> float:
        """Mean over texts or answers."""
        return sum(self.losses) / max(1, len(self.losses))

    @property
    def exact_match(self) -> float | None:
        """Share of right answers, None for texts."""
        return Share.from_outcomes(self.exact).value if self.exact else None


@dataclass(frozen=True)
class Change:
    """A paired difference, after minus before, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Change:
        """The change between values of the same texts or questions."""
        change = mean_change(before, after)
        return cls(change.value, change.low, change.high)


def measure(learner: Learner, samples: Sequence[Encoded], *, texts: bool = False) -> Measure:
    """Loss of each span of the samples, and whether it is predicted to the last token.

    Of distillation it is the divergence from the teacher, and whether each token is the teacher's.

    Args:
        learner: The model.
        samples: As ids.
        texts: Whether these are texts, of which nothing is right or wrong.
    """
    losses: list[float] = []
    exact: list[bool] = []
    with learner.measuring():
        for group in batched(samples, learner.config.batch_tokens):
            teacher = None
            if not texts and learner.config.objective == "distillation":
                lesson = learner.lesson(group)
                group, teacher = [*lesson.samples], lesson.logits  # its answers
            batch = learner.batch(group)
            learned = batch.labels != IGNORED
            logits = learner.logits(batch)[learned.to(learner.adapter.device)]
            segments, labels = batch.segments[learned], batch.labels[learned].to(logits.device)
            rows = learned.nonzero()[:, 0]  # (learned,)
            if teacher is None:
                each = functional.cross_entropy(logits, labels, reduction="none")
            else:
                each = divergences(logits, teacher)
            hit = logits.argmax(-1) == labels
            for row, sample in enumerate(group):
                for index in range(len(sample.spans)):
                    own = (rows == row) & (segments == index)
                    losses.append(float(each[own].mean()))
                    exact.append(bool(hit[own].all()))
    return Measure(tuple(losses), () if texts else tuple(exact))


def batched(samples: Sequence[Encoded], limit: int) -> list[list[Encoded]]:
    """Samples in groups of at most `limit` padded tokens, at least one each, in order."""
    groups: list[list[Encoded]] = []
    longest = 0
    for sample in samples:
        grown = max(longest, sample.row_tokens)
        if groups and grown * (len(groups[-1]) + 1) <= limit:
            groups[-1].append(sample)
            longest = grown
        else:
            groups.append([sample])
            longest = sample.row_tokens
    return groups


@dataclass(frozen=True)
class Report:
    """Result of a run: numbers, a table (`table`) and sentences (`verdict`).

    Attributes:
        before: Held-out measures of the original model, by name: "full", "block", and unless only
            questions behind documents change, "plain", "free" (questions without chunks, TurboRAG's
            Table 4).
        after: The same of the saved model.
        steps: Optimiser steps.
        tokens: Tokens trained on, with copies of the prefix, without padding.
        seconds: Seconds of training.
        skipped: Samples left out because they are too long.
        data: Where the data came from, in words.
        settings: Settings of the run.
    """

    before: Mapping[str, Measure]
    after: Mapping[str, Measure]
    steps: int
    tokens: int
    seconds: float
    skipped: int
    data: str
    settings: Mapping[str, Any]

    def change(self, name: str) -> Change:
        """Paired difference of the loss, nats per token."""
        return Change.of(self.before[name].losses, self.after[name].losses)

    def exact_change(self, name: str) -> Change:
        """Paired difference of the share of right answers."""
        return Change.of(self.before[name].exact, self.after[name].exact)

    @property
    def verdict(self) -> tuple[str, ...]:
        """What the numbers say; a change counts if its 95 % interval leaves out 0."""
        if "plain" not in self.before:  # an adapter that acts behind documents alone
            return (self._gap(),)
        free = _points(self.exact_change("free"))
        return (
            _regression("The loss on plain text", self.change("plain"), "nats", -1),
            _regression("The share of right answers without chunks", free, "points"),
            self._gap(),
        )

    def _gap(self) -> str:
        """How far stitched chunks are behind full prefill, before and after."""
        parts = []
        for measures in (self.before, self.after):
            gap = _points(Change.of(measures["full"].exact, measures["block"].exact))
            sure = math.isfinite(gap.low)
            interval = f"{gap.low:+.1f} to {gap.high:+.1f}" if sure else "of one sample"
            parts.append(f"{gap.mean:+.1f} points ({interval})")
        return (
            f"Stitched chunks against full prefill of the same model: {parts[0]} before, "
            f"{parts[1]} after."
        )

    def table(self) -> str:
        """The measures as a table for the standard output."""
        rows = [["held out", "n", "loss before", "after", "right before", "after"]]
        for name, before in self.before.items():
            after = self.after[name]
            losses = [f"{measures.loss:.4f}" for measures in (before, after)]
            rights = [_percent(measures.exact_match) for measures in (before, after)]
            rows.append([_TITLES[name], str(len(before.losses)), *losses, *rights])
        return "\n".join(table(rows, right=frozenset(range(1, 6))))

    def to_json(self) -> dict[str, Any]:
        """Plain values for `report.json`."""
        return {
            "measures": {
                name: {
                    "what": _TITLES[name],
                    "n": len(before.losses),
                    "loss": [before.loss, self.after[name].loss],
                    "loss_change": _plain(self.change(name)),
                    "exact_match": [before.exact_match, self.after[name].exact_match],
                    "exact_match_change": _plain(self.exact_change(name)) if before.exact else None,
                }
                for name, before in self.before.items()
            },
            "verdict": list(self.verdict),
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
            "skipped": self.skipped,
            "data": self.data,
            "settings": dict(self.settings),
        }


def _plain(change: Change) -> dict[str, float | None]:
    """For JSON, which has no infinity: the interval of a single value is null."""
    return {name: value if math.isfinite(value) else None for name, value in vars(change).items()}


def _regression(what: str, change: Change, unit: str, better: int = 1) -> str:
    """Whether something became worse; `better` is the direction that is good."""
    if not math.isfinite(change.low):
        return f"{what} moved by {change.mean:+.3f} {unit}; one held-out sample proves nothing."
    low, high = sorted((better * change.low, better * change.high))
    if high < 0:
        word = "became worse"
    elif low > 0:
        word = "became better"
    else:
        word = "shows no regression"
    interval = f"95 %: {change.low:+.3f} to {change.high:+.3f}"
    return f"{what} {word}: {change.mean:+.3f} {unit} ({interval})."


def _points(change: Change) -> Change:
    return Change(100 * change.mean, 100 * change.low, 100 * change.high)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
