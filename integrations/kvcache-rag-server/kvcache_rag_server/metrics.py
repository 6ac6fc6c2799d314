"""What Prometheus reads at `/metrics`: the server's own counters, and those of its backend.

Every server has a registry of its own, and every label has few values: routes as they are declared,
names of keys, tiers, kinds.  No key, no namespace and no text gets there.
"""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from cachetools import LRUCache
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvcache_rag_server.auth import BEARER
from kvcache_rag_server.backend import Backend, BackendRequest, Event, Failed, Finished, Started
from kvcache_rag_server.errors import CLIENT_LEFT
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.lifecycle import AppContext
from kvcache_rag_server.responses import error_responses

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from kvcache_rag.metrics import Metrics

_LOG = logging.getLogger(__name__)

PREFIX: Final = "kvcache_rag"

STATS_SECONDS: Final = 5.0
"""How long a scrape waits for the counters of the backend."""

_FORMATS: Final = {
    kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")
}

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_TOKENS: Final = ("prefix", "reused", "recomputed", "fresh", "prefilled", "query", "generated")

_PARTS: Final = ("load", "stitch", "choose", "recompute", "prefill")

_PENDING: Final = 4096

_TIERS: Final = 8

_TIER = re.compile(r"[a-z][a-z0-9_-]{0,31}")

_METHODS: Final = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.#:-]{0,63}")

_STORE: Final = {
    "hits": "Chunks that a tier gave back",
    "misses": "Chunks that a tier was asked for and did not hold",
    "seconds": "Seconds that giving them back took",
    "bytes_read": "Bytes that a tier gave back",
    "bytes_written": "Bytes written to a tier",
    "puts": "Chunks written to a tier",
    "evictions": "Chunks dropped to stay under a tier's limit, or too old",
    "corrupt": "Files put aside because they were damaged",
    "untrusted": "Files left alone because the signing key did not sign them",
    "put_failures": "Chunks that a tier could not keep",
    "declined": "Chunks not kept because a tier's limit left no room in time",
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
        gauge.add_metric([], len(replicas))
        yield gauge
        yield from self._queues(replicas)
        yield from self._prefetches(replicas)
        yield from self._tiers(replicas)

    def _queues(self, replicas: list[Mapping[str, Any]]) -> Iterator[Metric]:
        for name, text in _QUEUE.items():
            family = GaugeMetricFamily(f"{self._prefix}_{name}_requests", text, labels=["replica"])
            for replica in replicas:
                if _is_number(replica.get(name)):
                    family.add_metric([_label(replica.get("replica"))], replica[name])
            yield family
        outcomes = CounterMetricFamily(
            f"{self._prefix}_outcomes",
            "How requests of a replica ended",
            labels=["replica", "outcome"],
        )
        for replica in replicas:
            for name in _OUTCOMES:
                if _is_number(replica.get(name)):
                    outcomes.add_metric([_label(replica.get("replica")), name], replica[name])
        yield outcomes

    def _prefetches(self, replicas: list[Mapping[str, Any]]) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{self._prefix}_prefetches", "Prefetches while queued", labels=["replica", "event"]
        )
        waiting = GaugeMetricFamily(
            f"{self._prefix}_waiting_prefetches", "Prefetches not begun", labels=["replica"]
        )
        for counters in replicas:
            replica, events = _label(counters.get("replica")), counters.get("prefetch") or {}
            counts = {name: value for name, value in events.items() if _is_number(value)}
            if _GAUGE in counts:
                waiting.add_metric([replica], counts.pop(_GAUGE))
            for name in sorted(counts)[:_EVENTS]:
                family.add_metric([replica, _label(name)], counts[name])
        yield family
        yield waiting

    def _tiers(self, replicas: list[Mapping[str, Any]]) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            f"{self._prefix}_store_bytes", "Bytes that a tier holds", labels=["replica", "tier"]
        )
        families = {
            name: CounterMetricFamily(
                f"{self._prefix}_store_{name}", text, labels=["replica", "tier"]
            )
            for name, text in _STORE.items()
        }
        for replica in replicas:
            for tier in replica.get("tiers") or ():
                labels = [_label(replica.get("replica")), _label(tier.get("tier"))]
                if _is_number(tier.get("bytes")):
                    gauge.add_metric(labels, tier["bytes"])
                for name, family in families.items():
                    if _is_number(tier.get(name)):
                        family.add_metric(labels, tier[name])
        yield gauge
        yield from families.values()


def _replicas(stats: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if stats is None:
        return []
    replicas = stats.get("replicas")
    return list(replicas) if isinstance(replicas, list) else [stats]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _label(value: Any) -> str:
    text = str(value if value is not None else "")
    return text if not text or _LABEL.fullmatch(text) else "other"


class ServerTelemetry:
    """Counters and histograms of one server.

    Attributes:
        registry: Where Prometheus finds them.
    """

    def __init__(self, backend: Backend) -> None:
        """Start at zero; `backend` is asked for its own counters with every scrape."""
        self.registry = CollectorRegistry()
        self._backend = backend
        self._stats = BackendCollector(PREFIX)
        self.registry.register(self._stats)
        # Seconds in the queue, by work: the client's first token comes that much later.
        self._waits: LRUCache[str, float] = LRUCache(_PENDING)
        self._tiers: set[str] = set()
        self._declare()

    def _declare(self) -> None:
        self._requests = self._counter("requests", "HTTP requests", "endpoint", "method", "status")
        self._request_seconds = self._histogram(
            "request_seconds", "From a request to the last byte of its answer", "endpoint"
        )
        self._ttft = self._histogram(
            "ttft_seconds", "From a request's arrival in the queue to its first token", "route"
        )
        self._engine_ttft = self._histogram(
            "engine_ttft_seconds",
            "From the model's start with a request to its first token",
            "route",
        )
        self._wait = self._histogram(
            "queue_wait_seconds", "From a request's arrival to the model's start with it", "route"
        )
        self._answers = self._counter("answers", "Whole answers", "route", "key", "finish_reason")
        self._cancelled = self._counter(
            "cancelled_requests", "Requests whose client went away before the answer", "route"
        )
        self._failed = self._counter(
            "failed_requests", "Requests that the backend could not answer", "route", "status"
        )
        self._prefetched = self._counter(
            "prefetched_requests",
            "Requests whose chunks were made ready while they waited",
            "route",
        )
        self._batched = self._counter(
            "batched_requests", "Requests that were answered together with others", "route"
        )
        self._tokens = self._counter(
            "tokens",
            "Tokens of prompts and answers: reused, recomputed, fresh (computed with the query) or "
            "prefilled chunk tokens, the shared prefix, the query, and generated ones",
            "kind",
            "key",
        )
        self._parts = self._counter(
            "ttft_part_seconds",
            "Seconds until first tokens, by what they were spent on",
            "part",
        )
        self._hits = self._counter("chunk_hits", "Chunks of answers found in a tier", "tier")
        self._misses = self._counter("chunk_misses", "Chunks of answers that were in no tier")
        self._auxiliary_misses = self._counter(
            "auxiliary_misses", "Chunks that the auxiliary model prefilled when it scored them"
        )
        self._dropped = self._counter(
            "chunks_dropped", "Chunks left out because the prompt would not have fitted"
        )
        self._unused = self._counter(
            "chunks_unused", "Chunks left out because a policy answered from better ones"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, labels, registry=self.registry, buckets=_SECONDS)

    # ------------------------------------------------------------------ events
    def observe(self, route: str, caller: Caller, work: BackendRequest, event: Event) -> None:
        """Count an event on its way to the client.

        Args:
            route: "chat" or "completions".
            caller: Who asked.
            work: What.
            event: `Started`, `Piece`, `Finished` or `Failed`.
        """
        if isinstance(event, Started):
            self._waits[work.id] = event.queue_wait
            self._wait.labels(route).observe(event.queue_wait)
            self._prefetched.labels(route).inc(event.prefetched)
            self._batched.labels(route).inc(event.batch > 1)
        elif isinstance(event, Finished):
            answer = event.answer
            waited = self._waits.pop(work.id, 0.0)
            self._ttft.labels(route).observe(waited + answer.metrics.ttft)
            self._engine_ttft.labels(route).observe(answer.metrics.ttft)
            self._answers.labels(route, caller.key_id, answer.finish_reason).inc()
            self._count(answer.metrics, caller)
        elif isinstance(event, Failed):
            self._waits.pop(work.id, None)
            self._failed.labels(route, event.status).inc()

    def left(self, route: str, caller: Caller, work: BackendRequest) -> None:
        """Count a client that went away before its answer was complete."""
        del caller
        self._waits.pop(work.id, None)
        self._cancelled.labels(route).inc()

    def _count(self, metrics: "Metrics", caller: Caller) -> None:
        for kind in _TOKENS:
            count = getattr(metrics, f"{kind}_tokens")
            self._tokens.labels(kind, caller.key_id).inc(count)
        for tier, count in metrics.hits.items():
            self._hits.labels(self._tier(tier)).inc(count)
        self._misses.inc(metrics.misses)
        self._auxiliary_misses.inc(metrics.auxiliary_misses)
        for part in _PARTS:
            self._parts.labels(part).inc(getattr(metrics, part))
        self._dropped.inc(metrics.dropped_chunks)
        self._unused.inc(metrics.unused_chunks)

    def _tier(self, name: str) -> str:
        """A tier's name as a label; beyond the first few, and for odd ones, "other"."""
        if name not in self._tiers:
            if len(self._tiers) >= _TIERS or not _TIER.fullmatch(name):
                return "other"
            self._tiers.add(name)
        return name

    def finished(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request.

        Args:
            endpoint: Path of its route, such as "/v1/models"; "other" where there is none.
            method: Of HTTP.
            status: Of the answer; 499 if the client left before there was one.
            seconds: From the request to the last byte of the answer.
        """
        known = method if method in _METHODS else "other"
        self._requests.labels(endpoint, known, status).inc()
        self._request_seconds.labels(endpoint).observe(seconds)

    # ------------------------------------------------------------------ reading
    async def render(self, accept: str) -> tuple[bytes, str]:
        """Everything in Prometheus' text format, and its content type.

        Args:
            accept: The `Accept` header; "application/openmetrics-text" for that format.
        """
        try:
            stats = await asyncio.wait_for(self._backend.stats(), STATS_SECONDS)
        except Exception as error:  # a backend that is down is a metric, not a failed scrape
            _LOG.warning("the backend's counters cannot be read: %r", error)
            stats = None
        self._stats.show(stats)
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class RequestMeter:
    """ASGI middleware that counts every HTTP request and how long it took."""

    def __init__(self, app: "ASGIApp", telemetry: ServerTelemetry) -> None:
        """Count what `app` answers."""
        self._app, self._telemetry = app, telemetry

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer a request and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), CLIENT_LEFT.status

        async def sending(message: "Message") -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            status = 500 if status == CLIENT_LEFT.status else status  # starlette will answer so
            raise
        finally:
            # The route is known only now; paths that have none may be anything.
            endpoint = getattr(scope.get("route"), "path", "other")
            took = time.perf_counter() - started
            self._telemetry.finished(endpoint, scope["method"], status, took)


def install(app: FastAPI, telemetry: ServerTelemetry) -> None:
    """Count every request of `app`; to be called after all other middleware was added."""
    app.add_middleware(RequestMeter, telemetry=telemetry)


def router(context: AppContext) -> APIRouter:
    """`GET /metrics`."""
    routes = APIRouter()
    telemetry = context.telemetry
    # The guard looks at the key; here it is declared for the OpenAPI schema.
    needed = [Depends(BEARER)] if context.settings.api_keys else []

    @routes.get(
        "/metrics",
        tags=["operation"],
        summary="For Prometheus",
        dependencies=needed,
        response_class=Response,
        responses={200: {"content": _FORMATS}, **error_responses(401, 403, 500)},
        operation_id="metrics",
    )
    async def metrics(request: Request) -> Response:
        """Counters, gauges and histograms in Prometheus' text format, or OpenMetrics by `Accept`.

        With API keys it needs one of the namespace `@metrics`; the guard sees to that.
        """
        body, content_type = await telemetry.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return routes
