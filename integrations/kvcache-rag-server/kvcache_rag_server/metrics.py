"""What Prometheus reads at `/metrics`: the server's own counters, and those of its backend.

Every server has a registry of its own, and every label has few values: routes as they are declared,
names of keys, tiers, kinds.  No key, no namespace and no text gets there.
"""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

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

# Text and labels by name.
_HISTOGRAMS: Final = {
    "request_seconds": ("From a request to the last byte of its answer", "endpoint"),
    "ttft_seconds": ("From a request's arrival in the queue to its first token", "route"),
    "engine_ttft_seconds": ("From the model's start with a request to its first token", "route"),
    "queue_wait_seconds": ("From a request's arrival to the model's start with it", "route"),
}
_COUNTERS: Final = {
    "requests": ("HTTP requests", "endpoint", "method", "status"),
    "answers": ("Whole answers", "route", "key", "finish_reason"),
    "cancelled_requests": ("Requests whose client went away before the answer", "route"),
    "failed_requests": ("Requests that the backend could not answer", "route", "status"),
    "prefetched_requests": ("Requests whose chunks were made ready while they waited", "route"),
    "batched_requests": ("Requests that were answered together with others", "route"),
    "recognised_requests": ("Requests whose documents were found in messages", "route", "form"),
    "tokens": (
        "Tokens of prompts and answers: reused, recomputed, fresh (computed with the query) or "
        "prefilled chunk tokens, the shared prefix, the query, and generated ones",
        "kind",
        "key",
    ),
    "ttft_part_seconds": ("Seconds until first tokens, by what they were spent on", "part"),
    "chunk_hits": ("Chunks of answers found in a tier", "tier"),
    "chunk_misses": ("Chunks of answers that were in no tier",),
    "auxiliary_misses": ("Chunks that the auxiliary model prefilled when it scored them",),
    "chunks_dropped": ("Chunks left out because the prompt would not have fitted",),
    "chunks_unused": ("Chunks left out because a policy answered from better ones",),
}


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
        replicas = _replicas(self._stats)
        gauge = partial(self._family, GaugeMetricFamily)
        counter = partial(self._family, CounterMetricFamily)
        up = float(self._stats is not None)
        yield gauge("backend_up", "Whether the backend gives counters", (), [((), up)])
        yield gauge("replicas", "Processes that answer", (), [((), len(replicas))])
        named = [(one.get("replica"), one) for one in replicas]
        for name, text in _QUEUE.items():
            waits = [((replica,), one.get(name)) for replica, one in named]
            yield gauge(f"{name}_requests", text, ("replica",), waits)
        yield counter(
            "outcomes",
            "How requests of a replica ended",
            ("replica", "outcome"),
            [((replica, name), one.get(name)) for replica, one in named for name in _OUTCOMES],
        )
        ahead = [(replica, one.get("prefetch") or {}) for replica, one in named]
        yield counter(
            "prefetches",
            "Prefetches while queued",
            ("replica", "event"),
            [((replica, name), one[name]) for replica, one in ahead for name in _events(one)],
        )
        yield gauge(
            "waiting_prefetches",
            "Prefetches not begun",
            ("replica",),
            [((replica,), one.get(_GAUGE)) for replica, one in ahead],
        )
        labels = ("replica", "tier")
        tiers = [
            ((replica, tier.get("tier")), tier)
            for replica, one in named
            for tier in one.get("tiers") or ()
        ]
        rows = [(values, tier.get("bytes")) for values, tier in tiers]
        yield gauge("store_bytes", "Bytes that a tier holds", labels, rows)
        for name, text in _STORE.items():
            rows = [(values, tier.get(name)) for values, tier in tiers]
            yield counter(f"store_{name}", text, labels, rows)

    def _family(
        self,
        kind: type[Metric],
        name: str,
        text: str,
        labels: Sequence[str],
        rows: Iterable[tuple[tuple[Any, ...], Any]],
    ) -> Metric:
        """A metric with those of `rows`, labels and number, that have a number."""
        family: Any = kind(f"{self._prefix}_{name}", text, labels=labels)  # type: ignore[call-arg]  # of both families
        for values, number in rows:
            if _is_number(number):
                family.add_metric([*map(_label, values)], number)
        return cast("Metric", family)


def _replicas(stats: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if stats is None:
        return []
    replicas = stats.get("replicas")
    return list(replicas) if isinstance(replicas, list) else [stats]


def _events(prefetches: Mapping[str, Any]) -> list[str]:
    counts = {name for name, value in prefetches.items() if _is_number(value)}
    return sorted(counts - {_GAUGE})[:_EVENTS]


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
        self._counters = {
            name: Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)
            for name, (text, *labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(
                f"{PREFIX}_{name}", text, labels, registry=self.registry, buckets=_SECONDS
            )
            for name, (text, *labels) in _HISTOGRAMS.items()
        }

    def _add(self, name: str, *labels: Any, by: float = 1) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def _took(self, name: str, label: str, seconds: float) -> None:
        self._histograms[name].labels(label).observe(seconds)

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
            self._took("queue_wait_seconds", route, event.queue_wait)
            self._add("prefetched_requests", route, by=event.prefetched)
            self._add("batched_requests", route, by=event.batch > 1)
        elif isinstance(event, Finished):
            answer = event.answer
            waited = self._waits.pop(work.id, 0.0)
            self._took("ttft_seconds", route, waited + answer.metrics.ttft)
            self._took("engine_ttft_seconds", route, answer.metrics.ttft)
            self._add("answers", route, caller.key_id, answer.finish_reason)
            self._count(answer.metrics, caller)
            for other in event.others:  # whose prompt was computed once
                said = other.answer.metrics.generated_tokens
                self._add("tokens", "generated", caller.key_id, by=said)
            if work.packed is not None:
                self._add("recognised_requests", route, work.packed.form)
        elif isinstance(event, Failed):
            self._waits.pop(work.id, None)
            self._add("failed_requests", route, event.status)

    def left(self, route: str, caller: Caller, work: BackendRequest) -> None:
        """Count a client that went away before its answer was complete."""
        del caller
        self._waits.pop(work.id, None)
        self._add("cancelled_requests", route)

    def _count(self, metrics: "Metrics", caller: Caller) -> None:
        for kind in _TOKENS:
            self._add("tokens", kind, caller.key_id, by=getattr(metrics, f"{kind}_tokens"))
        for tier, count in metrics.hits.items():
            self._add("chunk_hits", self._tier(tier), by=count)
        self._add("chunk_misses", by=metrics.misses)
        self._add("auxiliary_misses", by=metrics.auxiliary_misses)
        for part in _PARTS:
            self._add("ttft_part_seconds", part, by=getattr(metrics, part))
        self._add("chunks_dropped", by=metrics.dropped_chunks)
        self._add("chunks_unused", by=metrics.unused_chunks)

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
        self._add("requests", endpoint, known, status)
        self._took("request_seconds", endpoint, seconds)

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
