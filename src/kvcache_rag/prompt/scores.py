"""How well the chunks of a prompt match its question, according to the retriever."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError, check_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def ranking(scores: Sequence[float] | None, count: int) -> Sequence[float]:
    """Scores of `count` chunks; without any, falling ones, because the best is first.

    Raises:
        InvalidInputError: If there is not one finite number per chunk.
    """
    if scores is None:
        return range(0, -count, -1)
    scores = check_list("scores", scores, "numbers")
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
    """Scores if every chunk has a finite number; None if only their order is known."""
    found = tuple(scores)
    return tuple(map(float, found)) if found and all(map(_is_finite, found)) else None


def scores_by_step(steps: Iterable[Sequence[tuple[str, Any]]]) -> dict[str, float] | None:
    """Scores of texts that a conversation found step by step, by one tool call each.

    Texts of later steps are better, because a score only says how well a text matches the query of
    its own step.  Within a step scores count if every text has one; else the first is the best.  A
    text that was found again counts where it is best.

    Args:
        steps: Texts that each step found, with their scores, earliest step first.

    Returns:
        Scores by text, in the order first found; None if that order is all that is known.
    """
    found = [step for step in steps if step]
    own = [whole_scores(score for _, score in step) for step in found]
    if own in ([], [None]):
        return None
    places: dict[str, tuple[int, float]] = {}
    for number, (step, scores) in enumerate(zip(found, own, strict=True)):
        for (text, _), score in zip(step, scores or ranking(None, len(step)), strict=True):
            places[text] = max(places.get(text, (number, score)), (number, score))
    if len(found) == 1:
        return {text: score for text, (_, score) in places.items()}
    ranks = {place: float(rank) for rank, place in enumerate(sorted({*places.values()}))}
    return {text: ranks[place] for text, place in places.items()}


def _is_finite(score: Any) -> bool:
    try:
        return not isinstance(score, (bool, str)) and math.isfinite(score)
    except (TypeError, ValueError, OverflowError):
        return False
