"""What an evaluation shows: quality with intervals, difference from full prefill, and cost.

One group per task, model and number of documents; in it one row per policy and codec, all over the
same questions.  A group whose full prefill is right in fewer than 60 % is shown and not scored: a
model that cannot do a task tells policies apart by chance only.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.evaluation.statistics import (
    LEAST_DIFFERING,
    Comparison,
    Interval,
    mean_interval,
    median_interval,
    paired_bootstrap,
    paired_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.evaluation.records import Record, Records

FLOOR: Final = 0.6


@dataclass(frozen=True)
class Row:
    """One policy over chunks in one form.

    Attributes:
        policy: Its label.
        codec: Name of the codec, "" for memory.
        n: Questions.
        quality: Mean of the task's headline metric.
        scores: Means of all metrics.
        difference: Quality minus that of full prefill; None for full prefill, or without it.
        kept: Quality as a share of that of full prefill.
        recomputed_share: Tokens computed again, as a share of the documents' (1: full prefill).
        reused_share: Smallest share of a question's chunk tokens that came from the store; what is
            missing was computed on the spot.
        ttft: Median seconds to the first token of single questions; None if none was timed.
        recompute: Median seconds of these spent on choosing and computing tokens again.
        changed: Share of answers that are not those of the same policy over the first codec; None
            for the first codec.
        divergence: Mean divergence of the first token in nats, and the largest; see `Record`.
    """

    policy: str
    codec: str
    n: int
    quality: Interval
    scores: dict[str, Interval]
    difference: Comparison | None
    kept: Interval | None
    recomputed_share: float
    reused_share: float
    ttft: Interval | None
    recompute: float | None
    changed: Interval | None
    divergence: tuple[float, float] | None


@dataclass(frozen=True)
class Group:
    """One task on one model with one number of documents.

    Attributes:
        task: Its name.
        metric: Its headline metric.
        model: Label of the model.
        k: Documents per question, None for all.
        n: Questions that every row answered.
        scored: Whether full prefill reaches the floor; None if it was not asked.
        rows: In the order of the cells.
    """

    task: str
    metric: str
    model: str
    k: int | None
    n: int
    scored: bool | None
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Task, model and number of documents."""
        return f"{self.task}, {self.model}" + (f", k = {self.k}" if self.k is not None else "")


_Way = tuple[str, str]  # label of the policy, codec


def summarise(records: Records, *, floor: float = FLOOR, seed: int = 0) -> list[Group]:
    """Groups of an evaluation, over the questions that all cells of a group answered.

    Args:
        records: From `evaluate`.
        floor: Quality of full prefill below which a group is not scored.
        seed: Of the bootstrap.
    """
    gathered: dict[tuple[str, str, int | None], dict[_Way, dict[str, Record]]] = {}
    for record in records.rows:
        place = record.place
        ways = gathered.setdefault((place.task, place.model, place.k), {})
        ways.setdefault((place.policy, place.codec), {})[place.question] = record
    return [_group(key, ways, records, floor, seed) for key, ways in gathered.items()]


def _group(
    key: tuple[str, str, int | None],
    ways: dict[_Way, dict[str, Record]],
    records: Records,
    floor: float,
    seed: int,
) -> Group:
    task, model, k = key
    common = set.intersection(*(set(found) for found in ways.values()))
    first = next(iter(ways.values()))
    answered = {
        way: [found[question] for question in first if question in common]
        for way, found in ways.items()
    }
    metric = records.metrics[task]
    full = next(
        (found for (label, _), found in answered.items() if label == records.baseline), None
    )
    rows = tuple(
        _row(way, found, full if way[0] != records.baseline else None, answered, metric, seed)
        for way, found in answered.items()
        if found
    )
    reached = None if not full else statistics.fmean(_scores(full, metric)) >= floor
    return Group(task, metric, model, k, len(common), reached, rows)


def _row(
    way: _Way,
    found: Sequence[Record],
    full: Sequence[Record] | None,
    answered: dict[_Way, list[Record]],
    metric: str,
    seed: int,
) -> Row:
    policy, codec = way
    clusters = [record.cluster for record in found]
    mine = _scores(found, metric)
    difference = kept = None
    if full is not None:
        difference, kept = _against(mine, _scores(full, metric), clusters, seed)
    means = {
        name: mean_interval(_scores(found, name), clusters, seed=seed) for name in found[0].scores
    }
    compared = next(other for other in answered if other[0] == policy)
    changed = [
        float(one.answer != other.answer)
        for one, other in zip(found, answered[compared], strict=True)
    ]
    times = [record.times for record in found if record.times is not None]
    divergences = [one.divergence for one in found if one.divergence is not None]
    documents = sum(record.chunk_tokens for record in found)
    return Row(
        policy=policy,
        codec=codec,
        n=len(found),
        quality=means[metric],
        scores=means,
        difference=difference,
        kept=kept,
        recomputed_share=sum(record.recomputed_tokens for record in found) / max(1, documents),
        reused_share=min(record.reused_tokens / max(1, record.chunk_tokens) for record in found),
        ttft=median_interval([one["ttft"] for one in times], seed=seed) if times else None,
        recompute=statistics.median(one["recompute"] for one in times) if times else None,
        changed=None if compared == way else mean_interval(changed, clusters, seed=seed),
        divergence=(statistics.fmean(divergences), max(divergences)) if divergences else None,
    )


def _against(
    mine: Sequence[float], theirs: Sequence[float], clusters: Sequence[str], seed: int
) -> tuple[Comparison, Interval]:
    """Difference from full prefill and share of it; few differences widen both alike."""
    found = paired_bootstrap(mine, theirs, clusters, seed=seed)
    kept = paired_ratio(mine, theirs, clusters, seed=seed)
    mean = statistics.fmean(theirs)
    if found.differing < LEAST_DIFFERING and mean > 0:
        low, high = 1 + found.low / mean, min(1 + found.high / mean, 1 / mean)
        kept = replace(kept, low=min(kept.low, max(0.0, low)), high=max(kept.high, high))
    return found, kept


def _scores(found: Sequence[Record], metric: str) -> list[float]:
    return [record.scores[metric] for record in found]


def to_json(groups: Sequence[Group], records: Records) -> dict[str, Any]:
    """Plain values: policies as they can be pasted back, and the groups with every interval."""
    plain = _plain(list(groups))
    return {"policies": dict(records.policies), "baseline": records.baseline, "groups": plain}


def _plain(value: Any) -> Any:
    if isinstance(value, Comparison):
        return {**asdict(value), "ranked": value.ranked}
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
