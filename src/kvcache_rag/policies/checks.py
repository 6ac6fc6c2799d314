"""Checks of a policy that need no tensor: its numbers and names, and why it cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.relevance import Retrieved

if TYPE_CHECKING:
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.models.language import Abilities
    from kvcache_rag.policies.base import ReusePolicy

_MANY: Final = Retrieved("", ("",) * 100)


def why_not(policy: ReusePolicy, abilities: Abilities, chunks: int | None = None) -> str:
    """Why a policy cannot run on a model, in one sentence; "" if it can.

    Args:
        policy: The policy.
        abilities: The model's.
        chunks: How many it brings; None for as many as it brings of many.
    """
    if chunks is None:
        chunks = 1 if policy.joint else len(policy.plan(_MANY).brought)
    if policy.is_full or not chunks:
        return ""
    if abilities.cannot_capture:
        return f"{abilities.cannot_capture}; use FullRecompute()"
    if abilities.cannot_move and chunks > 1:
        return (
            f"{abilities.cannot_move}; use Combination(), which computes a prompt's chunks "
            "together, or FullRecompute()"
        )
    if abilities.cannot_weigh and policy.scaling is not None:
        return abilities.cannot_weigh
    if chunks == 1:  # it stays where it was computed, and is as in a full prefill
        return ""
    if abilities.cannot_overlap and policy.positions != "reordered":
        return (
            f"{abilities.cannot_overlap}, so chunks cannot overlap in position as {policy!r} "
            'wants them; use Reuse(), or positions="reordered" in a policy that takes it'
        )
    if not policy.reads:
        return ""
    observes = policy.reads != ("relevance",)
    return (abilities.cannot_observe if observes else "") or abilities.cannot_choose


def checked_ratio(
    ratio: float, name: str = "ratio", none: str = "nothing is computed again"
) -> float:
    """A part of the chunk tokens, or of what is named instead; `none` is what 0 means.

    Raises:
        InvalidInputError: Unless it is a number from 0 to 1.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise InvalidInputError(f"{name} must be a number from 0 ({none}) to 1, not {ratio!r}")
    return float(ratio)


def checked_positions(positions: PositionScheme) -> None:
    """Raise `InvalidInputError` unless it is the name of a position scheme."""
    if positions not in ("reordered", "composite"):
        raise InvalidInputError(f'positions must be "reordered" or "composite", not {positions!r}')


def checked_count(name: str, value: int, least: int = 1) -> None:
    """Raise `InvalidInputError` unless `value` is a whole number from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(f"{name} must be a whole number from {least} up, not {value!r}")
