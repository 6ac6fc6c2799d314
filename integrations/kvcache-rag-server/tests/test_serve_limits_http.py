"""Limits, tenants and hostile bodies as a client meets them, over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import (
    DEADLINE,
    Scripted,
    chat,
    client,
    says_nothing,
    scripted,
    settings,
    tiny_backend,
)

from kvcache_rag.generation.stream import in_thread
from kvcache_rag_server.app import build_app
from kvcache_rag_server.auth import new_key
from kvcache_rag_server.bodies import DEEPEST, Bodies
from kvcache_rag_server.middleware import Shell
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import httpx
    from fastapi import FastAPI

    from kvcache_rag_server.backend import BackendRequest

CHAT = "/v1/chat/completions"
SOON = 3.0  # seconds of computing: more than any refusal takes


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys"
    return {name: new_key(path, name) for name in ("acme", "globex", "@metrics")}


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(reply: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = reply.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = found["error"]
    return error


# ---------------------------------------------------------------------- tenants
async def test_the_namespace_comes_from_the_key_and_from_nothing_else(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    app, backend = scripted(api_keys=tmp_path / "keys")
    async with client(app) as http:
        reply = await http.post(
            f"{CHAT}?namespace=globex",
            json=chat(user="globex", metadata={"namespace": "globex"}),
            headers={
                **bearing(keys["acme"]),
                "x-namespace": "globex",
                "openai-organization": "globex",
                "openai-project": "globex",
                "x-api-key": keys["globex"],
                "api-key": keys["globex"],
                "cookie": f"authorization=Bearer {keys['globex']}",
            },
        )
        asked = {**chat(), "namespace": "globex"}
        refused = await http.post(CHAT, json=asked, headers=bearing(keys["acme"]))
    assert reply.status_code == 200
    assert [work.namespace for work in backend.works] == ["acme"]
    assert refused.status_code == 400
    assert "no field namespace" in error_of(refused)["message"]


async def test_without_a_key_nothing_is_answered_and_probes_still_are(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    app, backend = scripted(api_keys=tmp_path / "keys")
    async with client(app) as http:
        for sent in ({}, bearing("wrong"), bearing(keys["@metrics"])):
            reply = await http.post(CHAT, json=chat(), headers=sent)
            assert reply.status_code == (403 if keys["@metrics"] in str(sent) else 401)
            assert error_of(reply)["code"] in ("invalid_api_key", "wrong_api_key")
        assert (await http.get("/v1/models")).headers["www-authenticate"] == "Bearer"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        for path in ("/metrics%0A", "/metrics/", "/v1/models%0A", "/v1//models"):
            assert (await http.get(path)).status_code == 401
        for sent, status in (("", 401), (keys["acme"], 403), (keys["@metrics"], 200)):
            assert (await http.get("/metrics", headers=bearing(sent))).status_code == status
    assert not backend.works


async def test_two_keys_with_the_same_document_do_not_share_it(
    tmp_path: Path, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    given = settings(api_keys=tmp_path / "keys")
    body = chat("Who keeps it?", documents=["Marta keeps the lighthouse."], max_tokens=2)

    async def ask(app: FastAPI) -> list[int]:
        seen = []
        async with client(app) as http:
            for name in ("acme", "acme", "globex", "globex", "acme"):
                reply = await http.post(CHAT, json=body, headers=bearing(keys[name]))
                assert reply.status_code == 200, reply.text
                seen.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            metrics = await http.get("/metrics", headers=bearing(keys["@metrics"]))
        for secret in (*keys.values(), *keys):
            assert secret not in metrics.text
        assert 'kvcache_rag_answers_total{finish_reason="' in metrics.text
        return seen

    def served() -> list[int]:
        with tiny_backend(tmp_path / "kv") as backend:
            return asyncio.run(ask(build_app(backend, given)))

    first, again, other, other_again, last = await asyncio.to_thread(served)
    assert (first, other) == (0, 0)
    # The last prompt of the tenant that is answered stays in memory, too; no other tenant's does.
    assert again == other_again > last > 0
    assert not [key for key in keys.values() if key in caplog.text]


# ---------------------------------------------------------------------- limits
async def test_each_limit_is_named_over_http() -> None:
    limits = RequestLimits(
        max_documents=2, max_document_bytes=50, max_answer_tokens=9, max_prompt_tokens=20
    )
    app, backend = scripted(limits=limits)
    tried = [
        (chat(documents=["a", "b", "c"]), 413, "documents of 2", "documents"),
        (chat(documents=["a" * 51]), 413, "document_bytes of 50", "documents"),
        (chat(max_tokens=10), 400, "answer_tokens of 9", "max_tokens"),
        (chat("q" * 21, max_tokens=9), 400, "prompt_tokens of 20", None),
    ]
    async with client(app) as http:
        for body, status, said, param in tried:
            reply = await http.post(CHAT, json=body)
            error = error_of(reply)
            assert (reply.status_code, error["param"]) == (status, param)
            assert said in error["message"]
    assert not backend.works


async def test_too_many_at_a_time_are_told_when_to_come_back(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    app, backend = scripted(
        says_nothing, limits=RequestLimits(max_concurrency=1), api_keys=tmp_path / "keys"
    )
    async with client(app) as http:
        acme, globex = bearing(keys["acme"]), bearing(keys["globex"])
        held = asyncio.create_task(http.post(CHAT, json=chat(), headers=acme))
        assert await asyncio.to_thread(backend.has_begun.wait, DEADLINE)
        reply = await http.post(CHAT, json=chat(), headers=acme)
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        assert "1 requests of this namespace" in error_of(reply)["message"]
        backend.has_begun.clear()
        other = asyncio.create_task(http.post(CHAT, json=chat(), headers=globex))
        assert await asyncio.to_thread(backend.has_begun.wait, DEADLINE)
        for one in (held, other):
            one.cancel()
        await asyncio.gather(held, other, return_exceptions=True)


async def test_a_place_is_held_while_a_body_is_still_on_its_way() -> None:
    app, backend = scripted(limits=RequestLimits(max_concurrency=1))
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        begun.set()
        await go_on.wait()
        yield json.dumps(chat())[1:].encode()

    async with client(app) as http:
        first = asyncio.create_task(
            http.post(CHAT, content=slow(), headers={"content-type": "application/json"})
        )
        await asyncio.wait_for(begun.wait(), DEADLINE)
        assert (await http.post(CHAT, json=chat())).status_code == 429
        assert (await http.get("/health")).status_code == 200
        assert not backend.works
        go_on.set()
        assert (await first).status_code == 200
        assert (await http.post(CHAT, json=chat())).status_code == 200


async def test_a_body_that_does_not_come_is_given_up_and_its_place_is_free() -> None:
    app, backend = scripted(limits=RequestLimits(max_concurrency=1, max_body_seconds=1))

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def endless() -> AsyncIterator[bytes]:
        while True:  # something comes all the time
            yield b" "
            await asyncio.sleep(0)

    json_ = {"content-type": "application/json"}
    async with client(app) as http:
        for slow in (never, endless):
            post = http.post(CHAT, content=slow(), headers=json_)
            reply = await asyncio.wait_for(post, DEADLINE)
            assert reply.status_code == 408
            error = error_of(reply)
            assert "limit body_seconds" in error["message"]
            assert error["code"] == "request_timeout"
            assert reply.headers["connection"] == "close"  # what is still sent is not read
            assert not backend.works
            assert (await http.post(CHAT, json=chat())).status_code == 200
            backend.works.clear()


async def test_once_a_body_is_there_an_answer_may_take_its_time() -> None:
    """Whoever listens for the client's end afterwards listens without a deadline."""
    loop, left, sent = asyncio.get_running_loop(), asyncio.Event(), []
    messages = iter([{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        message = next(messages)
        if message["type"] == "http.disconnect":
            loop.call_later(0.1, left.set)
            await left.wait()
        return message

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def listens(scope: Any, receive: Any, send: Any) -> None:
        for expected in ("http.request", "http.disconnect"):
            assert (await receive())["type"] == expected
        await send({"type": "http.response.start", "status": 200, "headers": []})

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    await Shell(listens, 9, 0.01, Bodies(99))(scope, receive, send)
    assert left.is_set()
    assert sent == ["http.response.start"]


async def test_what_has_no_body_needs_no_place() -> None:
    app, backend = scripted(says_nothing, limits=RequestLimits(max_concurrency=1))
    async with client(app) as http:
        held = asyncio.create_task(http.post(CHAT, json=chat()))
        assert await asyncio.to_thread(backend.has_begun.wait, DEADLINE)
        assert (await http.post(CHAT, json=chat())).status_code == 429
        for path in ("/v1/models", "/v1/models/tiny"):
            assert (await http.get(path)).status_code == 200
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def test_a_place_is_held_until_the_tokens_are_counted_whoever_left() -> None:
    limits = RequestLimits(max_concurrency=1, max_prompt_tokens=100)
    backend = Counting()
    app = build_app(backend, settings(limits=limits))
    async with client(app) as http:
        left = asyncio.create_task(http.post(CHAT, json=chat()))
        assert await asyncio.to_thread(backend.has_begun.wait, DEADLINE)
        left.cancel()
        # The thread that counts goes on, so nobody gets its place.
        for _ in range(100):
            await asyncio.sleep(0)
        assert (await http.post(CHAT, json=chat())).status_code == 429
        assert not left.done()
        backend.go_on.set()
        await asyncio.wait_for(asyncio.gather(left, return_exceptions=True), DEADLINE)
        assert left.cancelled()
        assert (await http.post(CHAT, json=chat())).status_code == 200
    assert len(backend.works) == 1


class Counting(Scripted):
    """Counts tokens in a thread, once it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    async def count(self, work: BackendRequest) -> int:
        return await in_thread(self._count, work)

    def _count(self, work: BackendRequest) -> int:
        self.has_begun.set()
        if not self.go_on.wait(DEADLINE):
            raise TimeoutError
        return len(work.question)


async def test_a_body_is_counted_while_it_is_read_whatever_its_length_says() -> None:
    app, backend = scripted(limits=RequestLimits(max_body_bytes=1000))
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100_000):
            read += 100
            yield b" " * 100

    async with client(app) as http:
        whole = await http.post(CHAT, content=b" " * 1001)
        without_length = await http.post(CHAT, content=endless())
        assert read <= 1200
        lying = await http.post(CHAT, content=endless(), headers={"content-length": "10"})
        far = await http.post(CHAT, content=b"{}", headers={"content-length": "9" * 5000})
        odd = await http.post(CHAT, content=b" " * 1001, headers={b"content-length": b"\xb2"})
    for reply in (whole, without_length, lying, far, odd):
        assert reply.status_code == 413
        assert "1000 bytes" in error_of(reply)["message"]
    assert not backend.works


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


async def test_what_is_just_small_enough_is_answered() -> None:
    app, backend = scripted()
    inner = json.loads(nested(DEEPEST - 1))
    texts = [f"document {at}" for at in range(64)]
    turns = [{"role": ("user", "assistant")[at % 2], "content": "?"} for at in range(3901)]
    async with client(app) as http:
        for body in (chat(metadata={"a": inner}), {**chat(documents=texts), "messages": turns}):
            assert (await http.post(CHAT, json=body)).status_code == 200
        refused = await http.post(CHAT, json=chat(metadata={"a": [inner]}))
    assert f"{DEEPEST} levels" in error_of(refused)["message"]
    assert len(backend.works) == 2


BOMBS: dict[str, Callable[[], str]] = {
    "deep": lambda: nested(4_000_000),
    "deep, not closed": lambda: "[" * 8_000_000,
    "deep objects": lambda: '{"a":' * 1_000_000,
    "long number": lambda: json.dumps(chat())[:-1] + f', "max_tokens": {"9" * 2_000_000}}}',
    "many fields": lambda: json.dumps({f"f{at}": at for at in range(200_000)}),
    "many messages": lambda: json.dumps({**chat(), "messages": [{}] * 500_000}),
    "many documents": lambda: json.dumps(chat(documents=["a"] * 1_000_000)),
    "many parts": lambda: json.dumps(
        {**chat(), "messages": [{"role": "user", "content": [{"type": "text"}] * 200_000}]}
    ),
}
JSON, OTHERS = "application/json", ("text/plain", "multipart/form-data")


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, JSON) for name in BOMBS), *(("deep", kind) for kind in OTHERS)]
)
async def test_hostile_bodies_are_refused_soon(name: str, kind: str) -> None:
    """Those that take longest; what all of them are answered: test_serve_hostile."""
    body = BOMBS[name]().encode()
    app, _ = scripted()
    started = time.process_time()  # as long as it takes, nobody else is answered
    async with client(app) as http:
        reply = await http.post(CHAT, content=body, headers={"content-type": kind})
        # Nothing of it is left behind that would hold up the next one.
        assert (await http.get("/v1/models")).status_code == 200
    assert time.process_time() - started < SOON
    assert reply.status_code in (400, 413), reply.text[:500]
    assert len(error_of(reply)["message"]) < 1000
    assert "Traceback" not in reply.text


# ---------------------------------------------------------------------- pages of others
async def test_a_page_of_another_origin_gets_nowhere() -> None:
    app, backend = scripted()
    simple = {"content-type": "text/plain"}
    async with client(app) as http:
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"host": "evil.example:8000"},
            {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
        ):
            for path in (CHAT, "/v1/models", "/metrics", "/health", "/"):
                reply = await http.request(
                    "GET" if path != CHAT else "POST",
                    path,
                    content=json.dumps(chat()) if path == CHAT else None,
                    headers={**simple, **headers},
                )
                assert reply.status_code == 403
                assert "access-control-allow-origin" not in reply.headers
                assert error_of(reply)["code"] in ("host_not_allowed", "origin_not_allowed")
        same = await http.post(CHAT, json=chat(), headers={"origin": "http://localhost"})
        assert same.status_code == 200
    assert len(backend.works) == 1
    assert backend.works[0].question == "Where is it?"


async def test_every_route_that_reads_a_body_checks_it() -> None:
    app, _ = scripted()
    paths = [path for path, methods in app.openapi()["paths"].items() if "post" in methods]
    assert len(paths) == 4
    async with client(app) as http:
        for path in paths:
            reply = await http.post(path, json={"a": json.loads(nested(DEEPEST + 1))})
            assert f"{DEEPEST} levels" in error_of(reply)["message"], path
