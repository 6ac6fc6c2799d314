"""Several policies at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.base import AttentionScaling, ReusePolicy, Scorer

if TYPE_CHECKING:
    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitch import StitchedPrompt

_T = TypeVar("_T")

MOST_PARTS = 64
"""Of a union: each one chooses tokens for every question."""


@dataclass(frozen=True, init=False, repr=False)
class Union(ReusePolicy):
    """Compute again what any of its policies chooses: `LegoLink(4) | CacheBlend(0.1)`.

    Each policy chooses as if it were alone, so that the numbers of tokens add up except where the
    choices overlap.

    Attributes:
        policies: Its parts; a union among them is taken apart, and equal ones count once.

    Raises:
        InvalidInputError: If there is none, or more than `MOST_PARTS`, or they exclude each other:
            different `positions`, auxiliary models or attention scaling, chunks computed together,
            or chunks that overlap the query's place (`Ape`) and tokens to be computed again.
    """

    name: ClassVar[str] = "union"
    policies: tuple[ReusePolicy, ...]

    def __init__(self, *policies: ReusePolicy) -> None:
        """Join `policies`."""
        flat: list[ReusePolicy] = []
        for policy in policies:
            if not isinstance(policy, ReusePolicy):
                raise InvalidInputError(
                    f"a union joins policies such as LegoLink(), not {policy!r}"
                )
            parts = policy.policies if isinstance(policy, Union) else (policy,)
            flat += [part for part in parts if part not in flat]
            if len(flat) > MOST_PARTS:
                raise InvalidInputError(f"a union joins at most {MOST_PARTS} different policies")
        if not flat:
            raise InvalidInputError("a union needs at least one policy, such as LegoLink()")
        object.__setattr__(self, "policies", tuple(flat))
        _refuse_conflicts(flat)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"

    @property
    def _moving(self) -> tuple[ReusePolicy, ...]:
        """Those whose wishes about places count: all, or those that compute everything."""
        full = tuple(policy for policy in self.policies if policy.is_full)
        return full or self.policies

    @property
    def positions(self) -> PositionScheme:  # type: ignore[override]  # follows its parts
        """Those of its parts."""
        return self._moving[0].positions

    @property
    def joint(self) -> bool:  # type: ignore[override]  # follows its parts
        """Whether its only part computes chunks together."""
        return self._moving[0].joint

    @property
    def adjacent_query(self) -> bool:  # type: ignore[override]  # follows its parts
        """That of its parts."""
        return any(policy.adjacent_query for policy in self._moving)

    @property
    def needs_scorer(self) -> bool:  # type: ignore[override]  # follows its parts
        """Whether a part reads scores."""
        return any(policy.needs_scorer for policy in self._moving)

    @property
    def auxiliary(self) -> Scorer | None:  # type: ignore[override]  # follows its parts
        """The scorer of its parts."""
        return _only([policy.auxiliary for policy in self.policies])

    @property
    def scaling(self) -> AttentionScaling | None:  # type: ignore[override]  # follows its parts
        """That of its parts."""
        return _only([policy.scaling for policy in self._moving])

    @property
    def is_full(self) -> bool:
        """Whether one of its parts computes everything."""
        return any(policy.is_full for policy in self.policies)

    @property
    def is_reuse(self) -> bool:
        """Whether none of its parts computes anything again."""
        return all(policy.is_reuse for policy in self.policies)

    def signal_tokens(self, signals: Signals) -> int:
        """Those of the costliest part (deviations at two layers share most of their work)."""
        return max(policy.signal_tokens(signals) for policy in self.policies)

    def resolved(self, prompt: StitchedPrompt, signals: Signals) -> ReusePolicy:
        """The union of its parts as they are for this prompt."""
        return Union(*(policy.resolved(prompt, signals) for policy in self.policies))

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """What any of its parts chooses."""
        selected = torch.zeros(prompt.context_tokens, dtype=torch.bool)
        for policy in self.policies:
            if not policy.is_reuse:
                selected = selected | policy.select(prompt, signals)
        return selected


def _only(values: list[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)


def _refuse_conflicts(policies: list[ReusePolicy]) -> None:
    if len(policies) == 1 or any(policy.is_full for policy in policies):
        return
    if any(policy.joint for policy in policies):
        raise InvalidInputError(
            f"{_named(policies)} cannot be joined: chunks that were computed together have nothing "
            "to be computed again; use Combination() alone"
        )
    if any(policy.adjacent_query for policy in policies) and not all(
        policy.is_reuse for policy in policies
    ):
        raise InvalidInputError(
            f"{_named(policies)} cannot be joined: where chunks overlap and the query stands right "
            "behind them, tokens computed again have no place of their own; use one of them"
        )
    for hook, what in (
        ("positions", "positions of the chunks"),
        ("scaling", "scaling of the attention"),
        ("adjacent_query", "place of the query"),
    ):
        wishes = {getattr(policy, hook) for policy in policies}
        if len(wishes) > 1:
            raise InvalidInputError(
                f"{_named(policies)} cannot be joined: they want a different {what}; "
                + ("give all the same positions" if hook == "positions" else "use one of them")
            )
    scorers = [policy.auxiliary for policy in policies if policy.auxiliary is not None]
    if any(scorer is not scorers[0] for scorer in scorers):
        raise InvalidInputError(
            f"{_named(policies)} cannot be joined: they have different auxiliary models; give all "
            "the same"
        )


def _named(policies: list[ReusePolicy]) -> str:
    return " and ".join(map(repr, policies))
