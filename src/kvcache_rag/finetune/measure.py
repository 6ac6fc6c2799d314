"""How good a model is on what was kept out of training, before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

from kvcache_rag.finetune.packing import IGNORED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.finetune.learner import Learner
    from kvcache_rag.finetune.samples import Encoded

_Z = 1.96  # of a two-sided 95 % interval


@dataclass(frozen=True)
class Measure:
    """Result of one held-out set.

    Attributes:
        losses: Mean cross-entropy of each text or answer, in nats per token; for "selection" the
            divergence of attention from its target.
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
        return sum(self.exact) / len(self.exact) if self.exact else None


@dataclass(frozen=True)
class Change:
    """A paired difference, after minus before, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Change:
        """Of values of the same texts or questions (normal approximation)."""
        pairs = [new - old for old, new in zip(before, after, strict=True)]
        count = len(pairs)
        mean = sum(pairs) / max(1, count)
        if count < 2:
            return cls(mean, -math.inf, math.inf)
        variance = sum((one - mean) ** 2 for one in pairs) / (count - 1)
        half = _Z * math.sqrt(variance / count)
        return cls(mean, mean - half, mean + half)


def measure(learner: Learner, samples: Sequence[Encoded], *, texts: bool = False) -> Measure:
    """Loss of each span of the samples, and whether it is predicted to the last token.

    Args:
        learner: The model.
        samples: As ids.
        texts: Whether these are texts, of which nothing is right or wrong.
    """
    losses: list[float] = []
    exact: list[bool] = []
    with learner.measuring():
        for group in batched(samples, learner.config.batch_tokens):
            batch = learner.batch(group)
            logits = learner.logits(batch)
            labels = batch.labels.to(logits.device)
            shape = labels.shape
            each = functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
            ).view(shape)
            hit = logits.argmax(-1) == labels
            for row, sample in enumerate(group):
                for index in range(len(sample.spans)):
                    own = batch.segments[row].to(logits.device) == index
                    losses.append(float(each[row][own].mean()))
                    exact.append(bool(hit[row][own].all()))
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
