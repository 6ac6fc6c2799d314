"""Counters that the backend keeps by itself, as Prometheus reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.#:-]{0,63}")
_STORE: Final = {
    "hits": "Chunks that a tier gave back",
    "misses": "Chunks that a tier was asked for and did not hold",
    "seconds": "Seconds that giving them back took",
    "bytes_read": "Bytes that a tier gave back",
    "bytes_written": "Bytes written to a tier",
    "puts": "Chunks written to a tier",
    "evictions": "Chunks dropped to stay under a tier's limit, or released",
    "corrupt": "Files put aside because they were damaged",
    "put_failures": "Chunks that a tier could not keep",
    "failures": "Operations of a remote tier that failed",
}
_QUEUE: Final = {
    "waiting": "Requests that wait for the model",
    "running": "Requests that the model answers",
}
_OUTCOMES: Final = ("answered", "failed", "cancelled", "refused")
_GAUGE: Final = "waiting"  # among the counters of prefetches
# Of prefetches there are as many counters as a backend has; more than these would be a mistake.
_EVENTS: Final = 16


class BackendCollector(Collector):
    """Shows the last `Backend.stats()`; what is not in it is not shown."""

    def __init__(self, prefix: str) -> None:
        """Name metrics `prefix`_..."""
        self._prefix = prefix
        self._stats: Mapping[str, Any] | None = None

    def show(self, stats: Mapping[str, Any] | None) -> None:
        """Show these counters from now on; None says that the backend does not answer."""
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """Metrics of the queue, the prefetches and every tier, by replica."""
        stats = self._stats
        replicas = _replicas(stats)
        up = GaugeMetricFamily(f"{self._prefix}_backend_up", "Whether the backend gives counters")
        up.add_metric([], float(stats is not None))
        yield up
        gauge = GaugeMetricFamily(f"{self._prefix}_replicas", "Processes that answer")
        # What only computes ahead has no queue.
        gauge.add_metric([], sum(_is_number(one.get("waiting")) for one in replicas))
        yield gauge
        yield from self._queues(replicas)
        yield from self._prefetches(replicas)
        yield from self._tiers(replicas)

    def _queues(self, replicas: list[Mapping[str, Any]]) -> Iterator[Metric]:
        for name, text in _QUEUE.items():
            family = GaugeMetricFamily(f"{self._prefix}_{name}_requests", text, labels=["replica"])
            for one in replicas:
                if _is_number(one.get(name)):
                    family.add_metric([_label(one.get("replica"))], one[name])
            yield family
        outcomes = CounterMetricFamily(
            f"{self._prefix}_outcomes",
            "How requests of a replica ended",
            labels=["replica", "outcome"],
        )
        for one in replicas:
            for name in _OUTCOMES:
                if _is_number(one.get(name)):
                    outcomes.add_metric([_label(one.get("replica")), name], one[name])
        yield outcomes

    def _prefetches(self, replicas: list[Mapping[str, Any]]) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{self._prefix}_prefetches", "Prefetches while queued", labels=["replica", "event"]
        )
        waiting = GaugeMetricFamily(
            f"{self._prefix}_waiting_prefetches", "Prefetches not begun", labels=["replica"]
        )
        for one in replicas:
            replica, events = _label(one.get("replica")), one.get("prefetch") or {}
            counts = {name: value for name, value in events.items() if _is_number(value)}
            if _GAUGE in counts:
                waiting.add_metric([replica], counts.pop(_GAUGE))
            for name in sorted(counts)[:_EVENTS]:
                family.add_metric([replica, _label(name)], counts[name])
        yield family
        yield waiting

    def _tiers(self, replicas: list[Mapping[str, Any]]) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            f"{self._prefix}_store_bytes", "Bytes that a tier holds", labels=["replica", "tier"]
        )
        families = {
            name: CounterMetricFamily(
                f"{self._prefix}_store_{name}", text, labels=["replica", "tier"]
            )
            for name, text in _STORE.items()
        }
        for one in replicas:
            for tier in one.get("tiers") or ():
                labels = [_label(one.get("replica")), _label(tier.get("tier"))]
                if _is_number(tier.get("bytes")):
                    held.add_metric(labels, tier["bytes"])
                for name, family in families.items():
                    if _is_number(tier.get(name)):
                        family.add_metric(labels, tier[name])
        yield held
        yield from families.values()


def _replicas(stats: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if stats is None:
        return []
    found = stats.get("replicas")
    return list(found) if isinstance(found, list) else [stats]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _label(value: Any) -> str:
    text = str(value if value is not None else "")
    return text if not text or _LABEL.fullmatch(text) else "other"
