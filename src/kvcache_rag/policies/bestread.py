"""Answer from the chunks after which the model itself finds the question likeliest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from kvcache_rag.policies.base import PlainReuse, Plan
from kvcache_rag.policies.bestfew import MOST, few_of
from kvcache_rag.policies.checks import checked_count
from kvcache_rag.policies.policy_registry import PolicySyntax
from kvcache_rag.policies.relevance import standardised

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcache_rag.policies.relevance import Numbers, Retrieved


NEAR: Final = 4.0
"""How far below the best one a chunk is left out, if no pair was read: like `bestfew.NEAR`, for
twice as many measures."""
PAIRED: Final = 3
"""How many chunks after the best one are each read together with it."""
ADDS: Final = 2.5
"""Nats that the best pair adds to the best chunk alone if a question needs several."""
MISLEADS: Final = 10.0
"""Nats above which the other chunk of the pair is about the question and the best one is not."""
UNSCORED: Final = 2.0
"""How much reading weighs beside the question's words alone; beside scores and words, 1."""


@dataclass(frozen=True)
class BestRead(PlainReuse):
    """Read the question after every chunk, and answer from those that make it likeliest.

    The likelihood of a question after a document ranks documents without any retriever (UPR, Sachan
    et al. 2022, arXiv 2204.07496, section 2.2).  A chunk alone is exact from its cache, so reading
    costs the question's tokens per chunk.  The answer uses chunks as `BestFew` does: the best as
    stored, the others computed after it.

    How many depends on what a second chunk adds: the question is read after the best one stitched
    with each of the next three.  If the best of these pairs makes it likelier by at least `ADDS`
    but less than `MISLEADS` nats, three chunks are used, else one (docs/quality.md says how that
    was chosen).

    Attributes:
        count: How many; None for one or three, as above.  If reading pairs would cost too much,
            None is the best one and those near it, three at most.
    """

    name: ClassVar[str] = "bestread"
    _forms = (PolicySyntax("bestread[:COUNT]", lambda words: BestRead(*words.numbers(int))),)
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            checked_count("count", self.count)

    def wants(self, retrieved: Retrieved) -> tuple[Numbers, ...]:
        """Each chunk alone, the likely best first, and none; then pairs."""
        if not len(retrieved):
            return ()
        every: list[Numbers] = [(one,) for one in self._ranked(retrieved)]
        every[2:2] = [()]  # behind the two that can be compared
        alone = _unread(every, retrieved)
        if alone or self.count is not None:
            return alone
        return _unread(self._pairs(retrieved), retrieved)

    def plan(self, retrieved: Retrieved) -> Plan:
        """The best first, where it was prefilled; the others of the few are computed after it."""
        count = self.count or self._counted(retrieved)
        return few_of(self._ranked(retrieved), self.relevance(retrieved), NEAR, count)

    def _counted(self, retrieved: Retrieved) -> int | None:
        """How many the question needs; None if no pair was read."""
        pairs = [retrieved.read.get(one) for one in self._pairs(retrieved)]
        alone = retrieved.read.get(self._ranked(retrieved)[:1])
        added = [pair - alone for pair in pairs if pair is not None and alone is not None]
        if not added:
            return None
        return MOST if ADDS <= max(added) < MISLEADS else 1

    def _pairs(self, retrieved: Retrieved) -> tuple[Numbers, ...]:
        """The best one with each of the next."""
        ranked = self._ranked(retrieved)
        return tuple((*ranked[:1], other) for other in ranked[1 : 1 + PAIRED])

    def _ranked(self, retrieved: Retrieved) -> Numbers:
        """Numbers of the chunks, best first, whatever order they were given in."""
        relevance = self.relevance(retrieved)
        return tuple(
            sorted(range(len(retrieved)), key=lambda one: (-relevance[one], retrieved.texts[one]))
        )

    def relevance(self, retrieved: Retrieved) -> list[float]:
        """By the retriever's scores, words and reading, each in standard deviations."""
        alone = [retrieved.read.get((number,)) for number in range(len(retrieved))]
        return with_reading(retrieved.without_order, alone, is_scored=retrieved.scores is not None)


def _unread(contexts: Iterable[Numbers], retrieved: Retrieved) -> tuple[Numbers, ...]:
    return tuple(one for one in contexts if one not in retrieved.read)


def with_reading(
    known: Sequence[float], read: Sequence[float | None], *, is_scored: bool
) -> list[float]:
    """How well chunks match once they were read.

    Args:
        known: How well each matched before (`Retrieved.without_order`).
        read: Likelihood of the question after each; None for one that was not read.
        is_scored: Whether `known` includes a retriever's scores.
    """
    said = [one for one in read if one is not None]
    if not said:
        return [*known]
    lowest = min(said)  # of what was not read
    found = standardised([lowest if one is None else one for one in read])
    weight = 1.0 if is_scored else UNSCORED
    return [before + weight * one for before, one in zip(known, found, strict=True)]
