"""Scores of the quality study, question by question, and their paired differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcache_rag.scoring.statistics import Comparison, paired_bootstrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.scoring.ask import Record

FULL: Final = "full prefill"


class Scores:
    """Headline scores per task, model and policy, question by question."""

    def __init__(self, rows: Sequence[Record]) -> None:
        self._found: dict[tuple[str, str, str], dict[str, tuple[float, str]]] = {}
        for row in rows:
            place = row.place
            score = next(iter(row.scores.values()))
            ways = self._found.setdefault((place.task, place.model, place.policy), {})
            ways[place.question] = (score, row.cluster)

    def mean(self, tasks: Sequence[str], model: str, policy: str) -> float:
        """Mean score over the questions of some tasks."""
        found = [score for task in tasks for score, _ in self._found[task, model, policy].values()]
        return sum(found) / len(found)

    def compare(
        self, tasks: Sequence[str], one: tuple[str, str], other: tuple[str, str]
    ) -> Comparison:
        """Paired difference of two (model, policy) over the questions of some tasks."""
        keys = [((task, *one), (task, *other)) for task in tasks]
        pairs = [
            (*first, self._found[against][question][0])
            for of, against in keys
            for question, first in self._found[of].items()
        ]
        mine, clusters, theirs = zip(*pairs, strict=True)
        return paired_bootstrap(mine, theirs, clusters)

    def best_full(self, *tasks: str) -> str:
        """The better of before and control with full prefill, of those that were asked."""
        known = {model for task, model, policy in self._found if (task, policy) == (tasks[0], FULL)}
        models = sorted({"before", "control"} & known)
        return max(models, key=lambda model: self.mean(tasks, model, FULL))
