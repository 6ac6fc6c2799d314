"""Limits, tenants and hostile bodies as a client meets them, over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import (
    DEADLINE,
    Scripted,
    chat,
    client,
    says_nothing,
    says_yes,
    scripted,
    settings,
    tiny_backend,
)
from serve_process import CHAT, posted

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.generation.stream import in_thread
from kvcache_rag_server.app import build_app
from kvcache_rag_server.auth import new_key
from kvcache_rag_server.bodies import DEEPEST
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.limits import Places
from kvcache_rag_server.settings import RequestLimits, ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import httpx
    from fastapi import FastAPI

    from kvcache_rag_server.backend import BackendRequest, Event

JSON = {"content-type": "application/json"}


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
    return dict(found["error"])


ACME, GLOBEX = Caller("acme", "acme-web"), Caller("globex", "globex-web")


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
        for path in ("/health", "/ready", "/", "/playground/app.js"):
            assert (await http.get(path)).status_code == 200
        for path in ("/metrics%0A", "/metrics/", "/v1/models%0A", "/v1//models"):
            assert (await http.get(path)).status_code == 401
        for sent, status in (("", 401), (keys["acme"], 403), (keys["@metrics"], 200)):
            assert (await http.get("/metrics", headers=bearing(sent))).status_code == status
    assert not backend.works


async def test_two_keys_with_the_same_document_do_not_share_it(
    tmp_path: Path, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = chat("Who keeps it?", documents=["Marta keeps the lighthouse."], max_tokens=2)

    async def ask(app: FastAPI) -> list[int]:
        seen = []
        async with client(app) as http:
            for name in ("acme", "acme", "globex", "globex", "acme"):
                reply = await http.post(CHAT, json=body, headers=bearing(keys[name]))
                seen.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            metrics = await http.get("/metrics", headers=bearing(keys["@metrics"]))
        assert 'kvcache_rag_answers_total{finish_reason="' in metrics.text
        assert not [secret for secret in (*keys.values(), *keys) if secret in metrics.text]
        return seen

    def served() -> list[int]:
        with tiny_backend(tmp_path / "kv") as backend:
            return asyncio.run(ask(build_app(backend, settings(api_keys=tmp_path / "keys"))))

    first, again, other, other_again, last = await asyncio.to_thread(served)
    assert (first, other) == (0, 0)
    # The last prompt of the tenant that is answered stays in memory, too; no other tenant's does.
    assert again == other_again > last > 0
    assert not [key for key in keys.values() if key in caplog.text]


# ---------------------------------------------------------------------- limits
@pytest.mark.parametrize(
    ("limits", "fits", "too_much", "status", "said", "param"),
    [
        (
            {"max_documents": 2},
            chat(documents=["a", "b"]),
            chat(documents=["a", "b", "c"]),
            413,
            "3 documents are more than the limit documents of 2",
            "documents",
        ),
        (
            {"max_document_bytes": 8},
            chat(documents=["abcdefgh", "éééé"]),
            chat(documents=["abcdefgh", "ééééé"]),
            413,
            "10 bytes in documents[1] are more than the limit document_bytes of 8",
            "documents",
        ),
        (
            {"max_answer_tokens": 5},
            chat(max_tokens=5),
            chat(max_tokens=6),
            400,
            "6 tokens of the answer are more than the limit answer_tokens of 5",
            "max_tokens",
        ),
        (
            {"max_prompt_tokens": 5},
            chat("q" * 5),
            chat("q" * 6),
            400,
            "6 tokens of the prompt are more than the limit prompt_tokens of 5",
            None,
        ),
    ],
    ids=["documents", "bytes of a document", "tokens of an answer", "tokens of a prompt"],
)
async def test_up_to_a_limit_it_is_answered_and_beyond_it_is_named(
    limits: dict[str, int], fits: Any, too_much: Any, status: int, said: str, param: str | None
) -> None:
    app, backend = scripted(limits=RequestLimits(**limits))
    async with client(app) as http:
        assert (await http.post(CHAT, json=fits)).status_code == 200
        reply = await http.post(CHAT, json=too_much)
    error = error_of(reply)
    assert (reply.status_code, error["param"]) == (status, param)
    assert said in error["message"]
    assert len(backend.works) == 1


@pytest.mark.parametrize(
    ("limits", "held", "refused", "said"),
    [
        ({"max_concurrency": 2}, [ACME, GLOBEX, ACME], ACME, "2 requests of this namespace"),
        (
            {"max_concurrency": 2},
            [ACME, Caller("acme", "acme-jobs")],
            Caller("acme", "acme-third"),
            "2 requests of this namespace are being answered, the limit concurrency",
        ),
        (
            {"max_concurrency": 2, "max_total_concurrency": 3},
            [ACME, ACME, GLOBEX],
            GLOBEX,
            "3 requests of this server are being answered, the limit total_concurrency",
        ),
    ],
    ids=["of a namespace", "of all its keys", "of the server"],
)
def test_there_are_so_many_places_and_each_is_free_again(
    limits: dict[str, int], held: list[Caller], refused: Caller, said: str
) -> None:
    places = Places(RequestLimits(**limits))
    with ExitStack() as stack:
        for caller in held:
            stack.enter_context(places.place(caller))
        with pytest.raises(ApiError, match=said) as raised, places.place(refused):
            raise AssertionError("it was let in")
        failed = raised.value.failed
        assert (failed.status, failed.code) == (429, "rate_limit_exceeded")
        assert places.taken == len(held)
    with pytest.raises(ZeroDivisionError), places.place(refused):
        raise ZeroDivisionError
    assert not places._taken, "an entry of a namespace that called is kept"


def test_a_place_that_is_free_again_is_one_place() -> None:
    places = Places(RequestLimits(max_concurrency=2))
    with places.place(ACME):
        with places.place(ACME):
            pass
        with places.place(ACME), pytest.raises(ApiError, match="2 requests"), places.place(ACME):
            raise AssertionError("it was let in")


async def test_a_tenant_at_its_limit_leaves_others_their_places(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    limits = RequestLimits(max_concurrency=1)
    app, backend = scripted(says_nothing, limits=limits, api_keys=tmp_path / "keys")
    tasks = []
    async with client(app) as http:
        for name in ("acme", "globex"):
            post = http.post(CHAT, json=chat(), headers=bearing(keys[name]))
            tasks.append(asyncio.create_task(post))
            assert await asyncio.to_thread(backend.has_begun.wait, DEADLINE)
            backend.has_begun.clear()
            refused = await http.post(CHAT, json=chat(), headers=bearing(keys[name]))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "1 requests of this namespace" in error_of(refused)["message"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert [work.namespace for work in backend.works] == ["acme", "globex"]


def test_one_namespace_cannot_fill_the_server() -> None:
    limits = RequestLimits()
    assert limits.max_total_concurrency >= 4 * limits.max_concurrency
    assert limits.max_total_concurrency > ServerSettings(model="tiny").max_waiting


@pytest.mark.parametrize("name", list(RequestLimits.model_fields))
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=name):
        RequestLimits(**{name: 0})


async def test_a_place_is_held_while_a_body_is_still_on_its_way() -> None:
    app, backend = scripted(limits=RequestLimits(max_concurrency=1))
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        begun.set()
        await go_on.wait()
        yield json.dumps(chat())[1:].encode()

    async with client(app) as http:
        first = asyncio.create_task(http.post(CHAT, content=slow(), headers=JSON))
        await asyncio.wait_for(begun.wait(), DEADLINE)
        refused = await http.post(CHAT, json=chat())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "1 requests of this namespace" in error_of(refused)["message"]
        for path in ("/v1/models", "/v1/models/tiny", "/health"):  # what has no body needs none
            assert (await http.get(path)).status_code == 200
        assert not backend.works
        go_on.set()
        assert (await first).status_code == 200
        assert (await http.post(CHAT, json=chat())).status_code == 200


async def never() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.Event().wait()


async def endless() -> AsyncIterator[bytes]:
    while True:  # something comes all the time
        yield b" "
        await asyncio.sleep(0)


@pytest.mark.parametrize("slow", [never, endless])
async def test_a_body_that_does_not_come_is_given_up_and_its_place_is_free(slow: Any) -> None:
    app, backend = scripted(limits=RequestLimits(max_concurrency=1, max_body_seconds=1))
    async with client(app) as http:
        post = http.post(CHAT, content=slow(), headers=JSON)
        reply = await asyncio.wait_for(post, DEADLINE)
        assert reply.status_code == 408
        error = error_of(reply)
        assert "limit body_seconds" in error["message"]
        assert error["code"] == "request_timeout"
        assert reply.headers["connection"] == "close"  # what is still sent is not read
        assert not backend.works
        assert (await http.post(CHAT, json=chat())).status_code == 200


async def test_once_a_body_is_there_an_answer_may_take_its_time() -> None:
    """Whoever listens for the client's end afterwards listens without a deadline."""

    async def slow(work: BackendRequest) -> AsyncIterator[Event]:
        await asyncio.sleep(1.2)
        async for event in says_yes(work):
            yield event

    reply, _ = await posted(chat(), script=slow, limits=RequestLimits(max_body_seconds=1))
    assert reply.status_code == 200


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

    async def long() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100_000):
            read += 100
            yield b" " * 100

    async with client(app) as http:
        for content, headers in (
            (b" " * 1001, {}),
            (long(), {}),
            (long(), {b"content-length": b"10"}),
            (b"{}", {b"content-length": b"9" * 5000}),
            (b" " * 1001, {b"content-length": b"\xb2"}),
        ):
            reply = await http.post(CHAT, content=content, headers=headers)
            assert reply.status_code == 413
            assert "1000 bytes" in error_of(reply)["message"]
            assert read <= 2400
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


# ---------------------------------------------------------------------- pages of others
async def test_a_page_of_another_origin_gets_nowhere() -> None:
    app, backend = scripted()
    async with client(app) as http:
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"host": "evil.example:8000"},
            {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
        ):
            simple = {"content-type": "text/plain", **headers}
            replies = [await http.post(CHAT, content=json.dumps(chat()), headers=simple)]
            paths = ("/v1/models", "/metrics", "/health", "/")
            replies += [await http.get(path, headers=headers) for path in paths]
            for reply in replies:
                assert reply.status_code == 403
                assert "access-control-allow-origin" not in reply.headers
                assert error_of(reply)["code"] in ("host_not_allowed", "origin_not_allowed")
        assert not backend.works
        same = await http.post(CHAT, json=chat(), headers={"origin": "http://localhost"})
    assert same.status_code == 200


async def test_every_route_that_reads_a_body_checks_it() -> None:
    app, _ = scripted()
    paths = [path for path, methods in app.openapi()["paths"].items() if "post" in methods]
    assert len(paths) == 5
    async with client(app) as http:
        for path in paths:
            reply = await http.post(path, json={"a": json.loads(nested(DEEPEST + 1))})
            assert f"{DEEPEST} levels" in error_of(reply)["message"], path
