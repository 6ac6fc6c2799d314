"""What Prometheus reads: right numbers, few labels, nothing secret."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from kvcache_rag.metrics import Answer, Metrics
from kvcache_rag_server import metrics
from kvcache_rag_server.backend import BackendRequest, Failed, Finished, Piece, Started
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.metrics import ServerTelemetry

if TYPE_CHECKING:
    from collections.abc import Mapping

CALLER = Caller("secret-tenant", "key-12345678")
WORK = BackendRequest(id="one", question="What is secret?", chunks=("a secret text",))
ANSWER = Answer(
    "a secret answer",
    Metrics(
        ttft=0.2,
        choose=0.03,
        recompute=0.05,
        prefix_tokens=5,
        reused_tokens=70,
        recomputed_tokens=7,
        fresh_tokens=9,
        prefilled_tokens=30,
        query_tokens=11,
        generated_tokens=3,
        hits={"memory": 2, "disk": 1},
        misses=1,
        auxiliary_misses=2,
        dropped_chunks=4,
        unused_chunks=6,
    ),
    finish_reason="length",
)
TIER = {"tier": "disk", "bytes": 9, "hits": 8, "bytes_read": 7, "evictions": 6, "put_failures": 5}
STATS = {
    "replicas": [
        {
            "replica": "a",
            "waiting": 2,
            "running": 1,
            "answered": 12,
            "prefetch": {"waiting": 6, "started": 4, "finished": 3, "last": "secret"},
            "tiers": [TIER, {**TIER, "tier": "memory", "bytes": None}],
        },
        {"replica": "b", "waiting": 0, "tiers": [TIER]},
    ]
}


class Backend:
    """Gives counters, fails to, or waits."""

    def __init__(self, stats: Any = None) -> None:
        self.found: Any = {} if stats is None else stats

    async def stats(self) -> Mapping[str, Any]:
        if isinstance(self.found, BaseException):
            raise self.found
        if callable(self.found):
            await self.found()
        found: Mapping[str, Any] = self.found
        return found

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"telemetry asked for {name}")


async def samples(counting: ServerTelemetry) -> dict[tuple[str, str], float]:
    """Values by name and labels ("name=value,…")."""
    body, _ = await counting.render("")
    return {
        (one.name, ",".join(f"{name}={value}" for name, value in sorted(one.labels.items()))): (
            one.value
        )
        for family in parse(body.decode())
        for one in family.samples
    }


async def test_an_answer_is_counted_where_it_belongs() -> None:
    counting = ServerTelemetry(Backend())
    started = Started(0.5, prefetched=True, batch=2)
    for event in (started, Piece("a secret "), Piece("answer"), Finished(ANSWER)):
        counting.observe("chat", CALLER, WORK, event)
    found = await samples(counting)
    expected: dict[tuple[str, str], float] = {
        ("queue_wait_seconds_sum", "route=chat"): 0.5,
        ("engine_ttft_seconds_sum", "route=chat"): 0.2,
        ("ttft_seconds_sum", "route=chat"): 0.7,  # as the client sees it, queue included
        ("ttft_seconds_count", "route=chat"): 1,
        ("ttft_seconds_bucket", "le=0.5,route=chat"): 0,
        ("ttft_seconds_bucket", "le=1.0,route=chat"): 1,
        ("answers_total", "finish_reason=length,key=key-12345678,route=chat"): 1,
        ("prefetched_requests_total", "route=chat"): 1,
        ("batched_requests_total", "route=chat"): 1,
        ("chunk_hits_total", "tier=memory"): 2,
        ("chunk_hits_total", "tier=disk"): 1,
        ("chunk_misses_total", ""): 1,
        ("auxiliary_misses_total", ""): 2,
        ("ttft_part_seconds_total", "part=choose"): 0.03,
        ("ttft_part_seconds_total", "part=recompute"): 0.05,
        ("chunks_dropped_total", ""): 4,
        ("chunks_unused_total", ""): 6,
    }
    tokens = {"prefix": 5, "reused": 70, "recomputed": 7, "fresh": 9, "prefilled": 30}
    for kind, number in {**tokens, "query": 11, "generated": 3}.items():
        expected["tokens_total", f"key=key-12345678,kind={kind}"] = number
    shown = {name: found.get((f"kvcache_rag_{name[0]}", name[1])) for name in expected}
    assert shown == pytest.approx(expected)


async def test_failures_and_clients_that_left_are_counted() -> None:
    counting = ServerTelemetry(Backend())
    counting.observe("chat", CALLER, WORK, Started(0.1))
    counting.observe("chat", CALLER, WORK, Failed(503, "overloaded", "too much"))
    counting.left("chat", CALLER, WORK)
    counting.left("completions", CALLER, WORK)
    found = await samples(counting)
    assert found["kvcache_rag_failed_requests_total", "route=chat,status=503"] == 1
    assert found["kvcache_rag_cancelled_requests_total", "route=chat"] == 1
    assert found["kvcache_rag_cancelled_requests_total", "route=completions"] == 1
    assert ("kvcache_rag_ttft_seconds_count", "route=chat") not in found
    assert not counting._waits


async def test_what_never_ends_does_not_fill_the_memory() -> None:
    counting = ServerTelemetry(Backend())
    for number in range(metrics._PENDING + 10):
        counting.observe("chat", CALLER, BackendRequest(id=str(number), question="q"), Started(0.0))
    assert len(counting._waits) == metrics._PENDING


async def test_the_backends_counters_are_shown_by_replica_and_tier() -> None:
    found = await samples(ServerTelemetry(Backend(STATS)))
    expected = {
        ("backend_up", ""): 1,
        ("replicas", ""): 2,
        ("waiting_requests", "replica=a"): 2,
        ("running_requests", "replica=a"): 1,
        ("waiting_requests", "replica=b"): 0,
        ("outcomes_total", "outcome=answered,replica=a"): 12,
        ("waiting_prefetches", "replica=a"): 6,
        ("prefetches_total", "event=started,replica=a"): 4,
        ("prefetches_total", "event=finished,replica=a"): 3,
        ("store_bytes", "replica=a,tier=disk"): 9,
        ("store_hits_total", "replica=a,tier=memory"): 8,
        ("store_bytes_read_total", "replica=b,tier=disk"): 7,
        ("store_evictions_total", "replica=b,tier=disk"): 6,
        ("store_put_failures_total", "replica=a,tier=disk"): 5,
    }
    assert {name: found.get((f"kvcache_rag_{name[0]}", name[1])) for name in expected} == expected
    assert ("kvcache_rag_running_requests", "replica=b") not in found
    assert ("kvcache_rag_prefetches_total", "event=waiting,replica=a") not in found
    assert ("kvcache_rag_store_bytes", "replica=a,tier=memory") not in found


async def never() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("broken", "is_up"),
    [(RuntimeError("secret"), 0), (never, 0), ({"replicas": "x"}, 1), ({"tiers": None}, 1)],
)
async def test_a_backend_that_is_down_or_silent_is_a_metric_and_no_failure(
    broken: Any, is_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "STATS_SECONDS", 0.01 if broken is never else 60.0)
    counting = ServerTelemetry(Backend(broken))
    counting.finished("/v1/models", "GET", 200, 0.1)
    found = await samples(counting)
    assert found["kvcache_rag_backend_up", ""] == is_up
    asked = "kvcache_rag_requests_total", "endpoint=/v1/models,method=GET,status=200"
    assert found[asked] == 1
    assert asked not in await samples(ServerTelemetry(Backend())), "another server's"


async def test_nothing_secret_and_few_labels_whatever_comes_in() -> None:
    tiers = {f"tier{number}": 1 for number in range(50)}
    counting = ServerTelemetry(
        Backend({"tiers": [{"tier": "a secret\npath", "hits": 1}], "prefetch": {"se cret": 1}})
    )
    answer = Answer("x", Metrics(hits=tiers))
    counting.observe("chat", CALLER, WORK, Finished(answer))
    counting.finished("other", "SECRET-METHOD", 405, 0.1)
    body, _ = await counting.render("")
    assert b"secret" not in body.lower()
    found = await samples(counting)
    hits = {labels: value for (name, labels), value in found.items() if "chunk_hits_total" in name}
    assert len(hits) == metrics._TIERS + 1
    assert hits["tier=other"] == 50 - metrics._TIERS


async def test_the_format_is_that_which_is_asked_for() -> None:
    counting = ServerTelemetry(Backend(STATS))
    counting.observe("chat", CALLER, WORK, Finished(ANSWER))
    body, kind = await counting.render("*/*")
    assert kind.startswith("text/plain; version=")
    names = {family.name for family in parse(body.decode())}
    body, kind = await counting.render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    assert {family.name for family in parse_openmetrics(body.decode())} <= names | {
        name.removesuffix("_total") for name in names
    }


# ---------------------------------------------------------------------- HTTP requests
async def asked(app: Any, method: str, path: str) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        pass

    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": []}
    await app({**scope, "query_string": b""}, receive, send)


async def test_requests_are_counted_by_the_path_of_their_route() -> None:
    app, counting = FastAPI(), ServerTelemetry(Backend())
    metrics.install(app, counting)

    @app.get("/v1/models/{name}")
    async def model(name: str) -> str:
        if name == "broken":
            raise RuntimeError
        return name

    for number in range(20):
        await asked(app, "GET", f"/v1/models/{number}")
        await asked(app, "GET", f"/secret/{number}")
    await asked(app, "POST", "/v1/models/1")
    with pytest.raises(RuntimeError):
        await asked(app, "GET", "/v1/models/broken")
    found = await samples(counting)
    route = "endpoint=/v1/models/{name},method"
    for labels, times in {
        f"{route}=GET,status=200": 20,
        "endpoint=other,method=GET,status=404": 20,
        f"{route}=POST,status=405": 1,
        f"{route}=GET,status=500": 1,
    }.items():
        assert found.pop(("kvcache_rag_requests_total", labels)) == times
    assert not [name for name, _ in found if name == "kvcache_rag_requests_total"]
    assert found["kvcache_rag_request_seconds_count", "endpoint=other"] == 20


async def test_an_answer_that_never_began_has_nginxs_number() -> None:
    async def gone(scope: Any, receive: Any, send: Any) -> None:
        return

    counting = ServerTelemetry(Backend())
    await asked(metrics.RequestMeter(gone, counting), "GET", "/x")
    found = await samples(counting)
    assert found["kvcache_rag_requests_total", "endpoint=other,method=GET,status=499"] == 1
