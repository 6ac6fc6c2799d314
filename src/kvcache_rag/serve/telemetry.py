"""What Prometheus reads at `/metrics`.

Every server has a registry of its own, and every label has few values: routes as they are declared,
names of keys, tiers, kinds.  No key, no namespace and no text gets there.
"""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.
import asyncio
import logging
import re
import time
from collections import Counter as Counts
from typing import TYPE_CHECKING, Any, Final

from cachetools import LRUCache
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

from kvcache_rag.serve.auth import BEARER
from kvcache_rag.serve.backend_metrics import BackendCollector
from kvcache_rag.serve.context import AppContext, Caller
from kvcache_rag.serve.exchange import CLIENT_LEFT
from kvcache_rag.serve.replies import error_responses
from kvcache_rag.serve.work import Backend, Event, Failed, Finished, Started, Work

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
_TOKENS: Final = ("prefix", "reused", "recomputed", "prefilled", "query", "generated")
_PENDING: Final = 4096
_TIERS: Final = 8
_TIER = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_METHODS: Final = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})


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
            "Tokens of prompts and answers: reused, recomputed or prefilled chunk tokens, the "
            "shared prefix, the query, and generated ones",
            "kind",
            "key",
        )
        self._hits = self._counter("chunk_hits", "Chunks of answers found in a tier", "tier")
        self._misses = self._counter("chunk_misses", "Chunks of answers that were in no tier")
        self._declined = self._counter(
            "chunks_declined", "Chunks that were stored and computed all the same", "tier", "reason"
        )
        self._dropped = self._counter(
            "chunks_dropped", "Chunks left out because the prompt would not have fitted"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, labels, registry=self.registry, buckets=_SECONDS)

    # ------------------------------------------------------------------ events
    def observe(self, route: str, caller: Caller, work: Work, event: Event) -> None:
        """Count an event on its way to the client.

        Args:
            route: "chat", "completions", "rag".
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

    def left(self, route: str, caller: Caller, work: Work) -> None:
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
        self._dropped.inc(metrics.dropped_chunks)
        for why, count in _by_reason(metrics.declined).items():
            self._declined.labels(self._tier(why[0]), why[1]).inc(count)

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


def _by_reason(declined: Any) -> Counts[tuple[str, str]]:
    """Counts by tier and kind of reason: the texts have times in them, no two are the same."""
    found: Counts[tuple[str, str]] = Counts()
    for text, count in declined.items():
        tier, colon, why = text.partition(":")
        reason = "prefill_is_sooner" if colon and "> prefill" in why else "other"
        found[tier if colon else "other", reason] += count
    return found


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
        started, status = time.perf_counter(), CLIENT_LEFT

        async def sending(message: "Message") -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            status = 500 if status == CLIENT_LEFT else status  # starlette will answer so
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
