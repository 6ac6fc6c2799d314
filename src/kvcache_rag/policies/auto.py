"""Compute again as much as fits into a given time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.base import AttentionScaling, ReusePolicy, Scorer, Union
from kvcache_rag.policies.cacheblend import CacheBlend
from kvcache_rag.policies.fixed import Reuse
from kvcache_rag.policies.named import Form

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.policies.named import Words
    from kvcache_rag.stitching.stitch import StitchedPrompt

# Ratios that are tried are whole parts of 1 by this number.
STEPS = 100


@dataclass(frozen=True, repr=False)
class Auto(ReusePolicy):
    """The ratio of another policy that fits a time budget, by measured rates; see `auto`.

    Attributes:
        budget: Seconds for choosing tokens and computing them again, per question.
        policy: Chooses them, at the ratio that fits.
    """

    name: ClassVar[str] = "auto"
    _forms = (Form("auto:SECONDS[,POLICY]", lambda words: _written(words)),)
    budget: float
    policy: ReusePolicy

    def __post_init__(self) -> None:
        budget = self.budget
        is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        if not is_number or not math.isfinite(budget) or budget < 0:
            raise InvalidInputError(f"budget must be seconds from 0 up, not {budget!r}")
        if not isinstance(self.policy, ReusePolicy) or not _dials(self.policy):
            raise InvalidInputError(
                "auto() turns the ratio of a policy that has one, such as CacheBlend() or "
                f"CacheClip(), not {self.policy!r}"
            )

    def __repr__(self) -> str:
        return f"auto(budget={self.budget!r}, policy={self.policy!r})"

    @property
    def positions(self) -> PositionScheme:  # type: ignore[override]  # follows its policy
        """That of its policy."""
        return self.policy.positions

    @property
    def needs_scorer(self) -> bool:  # type: ignore[override]  # follows its policy
        """That of its policy."""
        return not self.is_reuse and at_ratio(self.policy, 0.5).needs_scorer

    @property
    def auxiliary(self) -> Scorer | None:  # type: ignore[override]  # follows its policy
        """That of its policy."""
        return self.policy.auxiliary

    @property
    def scaling(self) -> AttentionScaling | None:  # type: ignore[override]  # follows its policy
        """That of its policy."""
        return self.policy.scaling

    @property
    def is_reuse(self) -> bool:
        """Without a budget."""
        return self.budget == 0

    def resolved(self, prompt: StitchedPrompt, signals: Signals) -> ReusePolicy:
        """Its policy at the ratio that fits, from 0 to 1.

        At 1 everything is computed again, which needs no choice and so no signal.  Otherwise the
        time that the policy's signals take is part of the budget: foreseen, so that no signal is
        computed that leaves no time to use it, and measured, once it is there.
        """
        from kvcache_rag.policies.selection import candidates  # loads torch

        started = perf_counter()
        allowed = int(candidates(prompt).sum())
        fitting = signals.affordable(self.budget)
        if fitting >= allowed:
            return at_ratio(self.policy, 1.0)
        if fitting <= at_ratio(self.policy, 0.5).signal_tokens(signals):
            return Reuse(self.positions)
        self._largest(prompt, signals, fitting)  # reads the signals, which are kept
        seconds = self.budget - (perf_counter() - started)
        return self._largest(prompt, signals, signals.affordable(max(seconds, 0.0)))

    def _largest(self, prompt: StitchedPrompt, signals: Signals, fitting: int) -> ReusePolicy:
        """The policy at the largest ratio at which it chooses at most `fitting` tokens."""
        if fitting <= 0:  # not a ratio whose groups all happen to be too thin
            return Reuse(self.positions)
        best, above = -1, STEPS
        while above - best > 1:
            middle = (best + above) // 2
            chosen = at_ratio(self.policy, middle / STEPS).select(prompt, signals)
            best, above = (middle, above) if int(chosen.sum()) <= fitting else (best, middle)
        # Not even at 0: a union has parts without a ratio.
        return Reuse(self.positions) if best < 0 else at_ratio(self.policy, best / STEPS)

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """What its policy chooses at the ratio that fits."""
        from kvcache_rag.policies.selection import candidates  # loads torch

        policy = self.resolved(prompt, signals)
        return candidates(prompt) if policy.is_full else policy.select(prompt, signals)


def auto(budget: float, policy: ReusePolicy | None = None) -> Auto:
    """A policy that computes again as much as fits into `budget` seconds per question.

    The rates of this machine are measured on the questions answered so far (on a short pass before
    the first).  `Metrics.policy` names the ratio that was used.

    Args:
        budget: Seconds for choosing tokens and computing them again, beside what the question
            costs anyway.
        policy: Whose ratio is turned; None for `CacheBlend()`.

    Raises:
        InvalidInputError: If the budget is no time, or the policy has no ratio.
    """
    return Auto(budget, CacheBlend() if policy is None else policy)


def _written(words: Words) -> Auto:
    """By the budget and, behind it, the name of a policy."""
    if not words.values:
        raise InvalidInputError(f"auto needs a time budget: {words.form.usage}")
    seconds, rest = words.number(0, float), ",".join(words.values[1:])
    return auto(seconds, words.policy(rest) if rest else None)


def at_ratio(policy: ReusePolicy, ratio: float) -> ReusePolicy:
    """A policy at another ratio; in a union, of every part that has one."""
    if isinstance(policy, Union):
        return Union(*(at_ratio(part, ratio) for part in policy.policies))
    changed: Any = policy
    return replace(changed, ratio=ratio) if _dials(policy) else policy


def with_auxiliary(policy: ReusePolicy, auxiliary: Scorer) -> ReusePolicy:
    """A policy that brings a scorer of its own, with another one; in a union, in every part."""
    if policy.auxiliary is None:
        return policy
    if isinstance(policy, Union):
        return Union(*(with_auxiliary(part, auxiliary) for part in policy.policies))
    if isinstance(policy, Auto):
        return Auto(policy.budget, with_auxiliary(policy.policy, auxiliary))
    return replace(policy, auxiliary=auxiliary) if _has(policy, "auxiliary") else policy


def _dials(policy: Any) -> bool:
    if isinstance(policy, Union):
        return any(map(_dials, policy.policies))
    return _has(policy, "ratio")


def _has(policy: Any, name: str) -> TypeGuard[Any]:
    return is_dataclass(policy) and any(field.name == name for field in fields(policy))
