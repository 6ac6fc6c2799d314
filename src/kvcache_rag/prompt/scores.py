"""How well the chunks of a prompt match its question, as who retrieved them says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def ranking(scores: Sequence[float] | None, count: int) -> Sequence[float]:
    """The scores of `count` chunks; without any they fall, as the best stands first.

    Raises:
        InvalidInputError: If they are not one finite number each.
    """
    if scores is None:
        return range(0, -count, -1)
    if len(scores) != count:
        raise InvalidInputError(f"{len(scores)} scores for {count} chunks; give one each")
    for index, score in enumerate(scores):
        if not _is_finite(score):
            raise InvalidInputError(
                f"the score of chunk {index} is {score!r}; give a finite number, or no scores for "
                "chunks that stand best first"
            )
    return tuple(map(float, scores))


def whole_scores(scores: Iterable[Any]) -> tuple[float, ...] | None:
    """Scores if every chunk has one, a finite number; None if their order is what is known."""
    found = tuple(scores)
    return tuple(map(float, found)) if found and all(map(_is_finite, found)) else None


def _is_finite(score: Any) -> bool:
    try:
        return not isinstance(score, (bool, str)) and math.isfinite(score)
    except (TypeError, ValueError, OverflowError):
        return False
