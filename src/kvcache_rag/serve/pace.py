"""How fast requests are answered, and what follows for those that wait."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvcache_rag.serve.batch_rule import BatchRule
from kvcache_rag.serve.serving import kind_of

if TYPE_CHECKING:
    from kvcache_rag.serve.serving import Served
    from kvcache_rag.serve.work import Work

# How much the last answer counts in the mean time of an answer, and that time before any.
WEIGHT, FIRST_GUESS = 0.2, 1.0
LONGEST_RETRY = 60.0


class Pace:
    """Times of answers.  Not thread-safe: the scheduler holds a lock around it.

    Attributes:
        most: Largest batch.
        taken: Requests whose turn has come since the start.
    """

    def __init__(self, most: int) -> None:
        """Know nothing yet."""
        self._rule = BatchRule(most)
        self.most = self._rule.most
        self.taken = 0
        self._batches: Counter[int] = Counter()
        self._service: float | None = None

    def size(self, work: Work, alike: int, behind: int) -> int:
        """How many requests to answer together now; see `BatchRule.size`."""
        return self._rule.size(kind_of(work), alike, behind)

    def note(self, work: Work, size: int, served: Served) -> None:
        """Note what answering `size` requests like `work` took."""
        if served.is_too_large:
            self._rule.failed(kind_of(work), size)
        if served.count:
            each = served.seconds / served.count
            before = each if self._service is None else self._service
            self._service = before + WEIGHT * (each - before)
        if served.generating is not None:
            self._batches[size] += 1
            self._rule.measured(kind_of(work), size, served.generating)

    def turn_in(self, place: int, taken: int) -> float:
        """Seconds until the turn of a request, as far as can be told; from any thread.

        Args:
            place: How many stood before it when it came.
            taken: What `taken` was then.
        """
        if self._service is None:
            return float("inf")
        return (max(0, place - (self.taken - taken)) + 0.5) * self._service

    def retry_after(self, waiting: int) -> float:
        """Seconds in which those that wait will have been answered, as far as can be told."""
        each = FIRST_GUESS if self._service is None else self._service
        return min(max(waiting, 1) * each, LONGEST_RETRY)

    def stats(self) -> dict[str, Any]:
        """`service_seconds` and `batches`; see `Backend.stats`."""
        sizes = {str(size): count for size, count in sorted(self._batches.items())}
        return {"service_seconds": self._service, "batches": sizes}
