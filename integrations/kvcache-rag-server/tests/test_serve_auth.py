"""Keys and their namespaces; what is refused before a body is read."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import stat
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from serve_fakes import DEADLINE, answer, chat, client, data_of, scripted
from starlette.datastructures import Headers

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_server import auth, keys, middleware
from kvcache_rag_server.backend import BackendRequest, Event, Finished, Piece, Started
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.errors import headers as error_headers
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.limits import Places
from kvcache_rag_server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable
    from pathlib import Path

CHAT = "/v1/chat/completions"
KEY = "a-key-in-clear-0123456789"
OTHER = "another-key-in-clear-0123"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    path.write_text(
        f"# key namespace name\n{KEY} acme acme-web  # in clear\n\nsha256:{digest} globex\n"
    )
    path.chmod(0o600)
    return path


def settings(**values: Any) -> ServerSettings:
    return ServerSettings(model="tiny", **values)


# ---------------------------------------------------------------------- the file
def test_a_line_gives_its_key_a_namespace_and_a_name(file: Path) -> None:
    found = keys.ApiKeys.load(file)
    assert found.caller(KEY) == Caller("acme", "acme-web")
    name = f"key-{hashlib.sha256(OTHER.encode()).hexdigest()[:8]}"
    assert found.caller(OTHER) == Caller("globex", name)
    for wrong in ("", "a", KEY[:-1], KEY + "x", "sha256:" + "0" * 64, "\ud800", "é" * 20):
        assert found.caller(wrong) is None


def test_a_digest_is_no_key(file: Path) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    found = keys.ApiKeys.load(file)
    assert found.caller(digest) is None
    assert found.caller(f"sha256:{digest}") is None


def test_every_known_key_is_compared_by_digest_in_constant_time(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def compared(known: bytes, given: bytes) -> bool:
        seen.append((known, given))
        return compare(known, given)

    found = keys.ApiKeys.load(file)
    monkeypatch.setattr(keys.hmac, "compare_digest", compared)
    found.caller(KEY)
    # The first line matches and the second is compared all the same; only digests are.
    assert len(seen) == 2
    assert {len(one) for pair in seen for one in pair} == {32}


def test_keys_are_in_no_repr_and_in_no_log(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    found = keys.ApiKeys.load(file)
    found.caller(KEY)
    authenticator = auth.ByKey(found)
    with pytest.raises(ApiError) as raised:
        authenticator.caller("Bearer wrong-" + KEY)
    shown = repr(found) + repr(found.known[0]) + caplog.text + str(raised.value)
    assert KEY not in shown
    assert hashlib.sha256(KEY.encode()).hexdigest() not in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no key"),
        ("# nothing\n", "no key"),
        (f"{KEY}\n", "line 1: write a key, its namespace"),
        (f"\n{KEY} a b c\n", "line 2"),
        ("short acme\n", "can be guessed"),
        (f"{KEY} ../acme\n", "namespace '../acme'"),
        (f"{KEY} {'a' * 64}\n", "1 to 63"),
        (f"{KEY} @admin\n", "namespace '@admin'"),
        (f"{KEY} acme näme\n", "name 'näme'"),
        ("sha256:abc acme\n", "64 hexadecimal"),
        (f"acme-of-long-name {KEY}+/=\n", "namespace 'a-ke...'"),
        (f"{OTHER} acme {KEY}+/=\n", "name 'a-ke...'"),
        (f"{KEY} acme\n{KEY} globex\n", "line 2: this key stands there already"),
        (f"{KEY} acme web\n{OTHER} globex web\n", "line 2: the name 'web' is that of a key of"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidInputError, match=re.escape(said)) as raised:
        keys.ApiKeys.load(path)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("word", ["SHA256:", "Sha256:", "sha256:"])
@pytest.mark.parametrize("digits", ["A" * 64, "0" * 63, "0" * 65])
def test_what_looks_like_a_digest_is_never_a_key_in_clear(
    tmp_path: Path, word: str, digits: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{word}{digits} acme\n")
    with pytest.raises(InvalidInputError, match="64 hexadecimal digits"):
        keys.ApiKeys.load(path)


@pytest.mark.parametrize("end", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_comment_ends_with_its_line_only(tmp_path: Path, end: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(f"{KEY} acme\n# old: {end}{OTHER} globex\n".encode())
    path.chmod(0o600)
    found = keys.ApiKeys.load(path)
    assert found.caller(KEY) == Caller("acme", found.known[0].caller.key_id)
    assert found.caller(OTHER) is None


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(f"\ufeff{KEY} acme web\r\n{OTHER} acme web\r\n".encode())
    path.chmod(0o600)
    found = keys.ApiKeys.load(path)
    assert found.caller(KEY) == found.caller(OTHER) == Caller("acme", "web")


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--new-key NAMESPACE"):
        keys.ApiKeys.load(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        keys.ApiKeys.load(tmp_path / "bytes")


def test_a_file_that_others_may_read_is_reported(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys.ApiKeys.load(file)
    assert not caplog.records
    file.chmod(0o640)
    keys.ApiKeys.load(file)
    assert "chmod 600" in caplog.text


def test_new_keys_are_written_as_digests_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = auth.new_key(path, "acme")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().rstrip("\n"))  # an editor that leaves no newline
    second = auth.new_key(path, keys.METRICS_NAMESPACE)
    assert first != second
    assert len(first) > 40
    text = path.read_text()
    assert first not in text
    assert second not in text
    found = keys.ApiKeys.load(path)
    assert getattr(found.caller(first), "namespace", None) == "acme"
    assert getattr(found.caller(second), "namespace", None) == "@metrics"
    with pytest.raises(InvalidInputError, match="--new-key: the namespace ''"):
        auth.new_key(path, "")
    with pytest.raises(InvalidInputError, match="cannot write API keys"):
        auth.new_key(tmp_path, "acme")
    assert path.read_text() == text


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o622, 0o601])
def test_no_key_is_added_to_a_file_that_others_may_read_or_write(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n")
    path.chmod(mode)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        auth.new_key(path, "acme")
    assert path.read_text() == "# ours\n"
    path.chmod(0o600)
    key = auth.new_key(path, "acme")
    assert getattr(keys.ApiKeys.load(path).caller(key), "namespace", None) == "acme"


@pytest.mark.parametrize("is_there", [True, False])
def test_no_key_is_added_through_a_link(tmp_path: Path, is_there: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "keys"
    if is_there:
        target.touch(0o600)
    link.symlink_to(target)
    with pytest.raises(InvalidInputError, match="is a link"):
        auth.new_key(link, "acme")
    assert target.exists() == is_there
    assert not is_there or not target.read_text()


def test_no_key_is_added_to_what_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "keys"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(InvalidInputError, match="no ordinary file"):
        auth.new_key(pipe, "acme")


# ---------------------------------------------------------------------- read again
class Talker:
    """A script that says words until it is told to end."""

    def __init__(self) -> None:
        self.begun, self.is_over = asyncio.Event(), asyncio.Event()

    async def __call__(self, work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        yield Piece("y")
        self.begun.set()
        await self.is_over.wait()
        yield Piece("es")
        yield Finished(answer())


@asynccontextmanager
async def talking(
    file: Path, key: str, *, stream: bool = True
) -> AsyncIterator[tuple[Any, Any, asyncio.Task[Any], Talker]]:
    """A server of these keys, a client, and the request of one key's owner that is answered."""
    talker = Talker()
    app, _ = scripted(talker, api_keys=file)
    async with client(app) as http:
        asked = http.post(CHAT, json=chat(stream=stream), headers=bearer(key))
        running = asyncio.create_task(asked)
        await asyncio.wait_for(talker.begun.wait(), DEADLINE)
        yield app.state.context.keys, http, running, talker


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def without(file: Path, key: str) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if key not in line) + "\n")


async def test_a_key_that_was_revoked_is_401_and_its_streams_end(file: Path) -> None:
    async with talking(file, KEY) as (reloader, http, running, _):
        without(file, KEY)
        assert (await http.get("/v1/models", headers=bearer(KEY))).status_code == 200
        await reloader.reload()
        assert (await http.get("/v1/models", headers=bearer(KEY))).status_code == 401
        assert (await http.get("/v1/models", headers=bearer(OTHER))).status_code == 200
        *before, error, done = data_of((await asyncio.wait_for(running, DEADLINE)).text)
    assert before[-1]["choices"][0]["delta"] == {"content": "y"}
    assert (error["error"]["code"], done) == ("invalid_api_key", "[DONE]")


async def test_a_whole_answer_of_a_revoked_key_is_401(file: Path) -> None:
    async with talking(file, KEY, stream=False) as (reloader, _, running, _):
        without(file, KEY)
        await reloader.reload()
        reply = await asyncio.wait_for(running, DEADLINE)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")


async def test_streams_of_other_keys_go_on(file: Path) -> None:
    async with talking(file, OTHER) as (reloader, http, running, talker):
        without(file, KEY)
        file.write_text(file.read_text() + "a-third-key-in-clear-01 initech\n")
        await reloader.reload()
        third = bearer("a-third-key-in-clear-01")
        assert (await http.get("/v1/models", headers=third)).status_code == 200
        talker.is_over.set()
        assert data_of((await running).text)[-1] == "[DONE]"
        assert "error" not in (await running).text


async def test_a_key_that_becomes_another_tenants_ends_what_the_first_one_asked(
    file: Path,
) -> None:
    async with talking(file, KEY) as (reloader, http, running, _):
        file.write_text(file.read_text().replace(f"{KEY} acme", f"{KEY} initech"))
        await reloader.reload()
        assert (await http.get("/v1/models", headers=bearer(KEY))).status_code == 200
        error, done = data_of((await asyncio.wait_for(running, DEADLINE)).text)[-2:]
    assert (error["error"]["code"], done) == ("invalid_api_key", "[DONE]")


@pytest.mark.parametrize("damage", ["gone", "folder", "empty", "nonsense", "binary"])
async def test_a_file_that_cannot_be_read_keeps_the_keys(
    file: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with talking(file, KEY) as (reloader, http, running, talker):
        file.unlink()
        if damage == "folder":
            file.mkdir()
        elif damage != "gone":
            file.write_bytes({"empty": b"", "nonsense": b"short x\n", "binary": b"\xff"}[damage])
        await reloader.reload()
        assert "stay as they were" in caplog.text
        assert KEY not in caplog.text
        assert (await http.get("/v1/models", headers=bearer(KEY))).status_code == 200
        talker.is_over.set()
        assert "error" not in (await running).text


async def test_a_server_without_keys_has_none_to_read_again() -> None:
    app, _ = scripted()
    assert app.state.context.keys is None


# ---------------------------------------------------------------------- the header
def test_the_header_says_who_calls(file: Path) -> None:
    authenticator = auth.authenticator(settings(api_keys=file))
    assert authenticator.caller(f"Bearer {KEY}") == Caller("acme", "acme-web")
    assert authenticator.caller(f"bearer   {KEY} ").namespace == "acme"


@pytest.mark.parametrize("header", ["", KEY, "Bearer", "Bearer ", "Basic " + KEY, "Bearer wrong"])
def test_without_a_known_key_it_is_401(file: Path, header: str) -> None:
    authenticator = auth.authenticator(settings(api_keys=file))
    for refusing in (authenticator.caller, authenticator.check_metrics):
        with pytest.raises(ApiError) as raised:
            refusing(header)
        assert (raised.value.failed.status, raised.value.failed.code) == (401, "invalid_api_key")
        assert error_headers(raised.value.failed)["www-authenticate"] == "Bearer"


def test_without_keys_everybody_is_one_anonymous_caller() -> None:
    authenticator = auth.authenticator(settings())
    assert authenticator.caller("") == authenticator.caller("Bearer x") == Caller()
    authenticator.check_metrics("")


def test_metrics_have_keys_of_their_own(file: Path) -> None:
    key = auth.new_key(file, "@metrics")
    authenticator = auth.authenticator(settings(api_keys=file))
    authenticator.check_metrics(f"Bearer {key}")
    for refusing, sent in ((authenticator.check_metrics, KEY), (authenticator.caller, key)):
        with pytest.raises(ApiError) as raised:
            refusing(f"Bearer {sent}")
        assert (raised.value.failed.status, raised.value.failed.code) == (403, "wrong_api_key")


# ---------------------------------------------------------------------- host and origin
def headers(*pairs: tuple[str, str]) -> Headers:
    return Headers(raw=[(name.encode(), value.encode("latin-1")) for name, value in pairs])


def passes(rule: middleware.HostRule, host: str, origin: str | None = None) -> bool:
    pairs = [("host", host), *([("origin", origin)] if origin is not None else [])]
    try:
        rule.check(headers(*pairs))
    except ApiError as error:
        return error.failed.status != 403
    return True


LOOPBACK = ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "127.0.0.9", "[::1]:80"]
FOREIGN = ["", "evil.example", "localhost.evil.example:8000", "192.168.1.4:8000", "[", "[::2]", "%"]


def test_a_server_on_loopback_answers_to_the_names_of_this_machine() -> None:
    rule = middleware.HostRule.of(settings())
    assert all(passes(rule, host) for host in LOOPBACK)
    assert not any(passes(rule, host) for host in FOREIGN)
    for several in ([], [("host", "localhost"), ("host", "localhost")]):
        with pytest.raises(ApiError):
            rule.check(headers(*several))


def test_allowed_names_come_in_addition() -> None:
    rule = middleware.HostRule.of(settings(allowed_hosts=("KV.example",)))
    assert passes(rule, "kv.example:443")
    assert passes(rule, "localhost")
    assert not passes(rule, "evil.example")
    assert passes(middleware.HostRule.of(settings(allowed_hosts=("*",))), "evil.example")


def test_beyond_loopback_a_rebound_name_needs_a_key_or_is_refused(file: Path) -> None:
    anonymous = middleware.HostRule.of(settings(host="0.0.0.0", allow_anonymous=True))
    assert passes(anonymous, "10.0.0.7:8000")
    assert passes(anonymous, "localhost")
    assert not passes(anonymous, "evil.example")
    keyed = settings(host="0.0.0.0", api_keys=file)
    assert passes(middleware.HostRule.of(keyed), "kv.example")
    named = keyed.model_copy(update={"allowed_hosts": ("kv.example",)})
    assert not passes(middleware.HostRule.of(named), "evil.example")


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("localhost:8000", "http://localhost:8000", True),
        ("localhost:8000", "HTTP://LOCALHOST:8000", True),
        ("localhost", "http://localhost", True),
        ("localhost", "https://localhost", True),  # TLS ends in a proxy in front
        ("[::1]:8000", "http://[::1]:8000", True),
        ("localhost:8000", "http://localhost:3000", False),
        ("localhost:8000", "http://localhost", False),
        ("localhost:8000", "http://127.0.0.1:8000", False),
        ("localhost:8000", "https://evil.example", False),
        ("localhost:8000", "http://localhost:8000.evil.example", False),
        ("localhost:8000", "null", False),
        ("localhost:8000", "", False),
        ("localhost:8000", "http://localhost:x", False),
        ("localhost:8000", "https://app.example", True),
    ],
)
def test_pages_of_other_origins_are_refused(host: str, origin: str, expected: bool) -> None:
    rule = middleware.HostRule.of(settings(allowed_origins=("https://app.example/",)))
    assert passes(rule, host, origin) is expected


# ---------------------------------------------------------------------- the guard
class Inner:
    """Counts what comes through, and says where a body would have been read."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inner"})


async def asked(
    app: Any, path: str, sent: Iterable[tuple[str, str]] = (), kind: str = "http"
) -> tuple[int, dict[str, str], Any]:
    """Send a request whose body must not be read."""
    out: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        out.append(message)

    pairs = [(b"host", b"localhost"), *((name.encode(), one.encode()) for name, one in sent)]
    scope = {"type": kind, "method": "POST", "path": path, "headers": pairs, "query_string": b""}
    await app(scope, receive, send)
    if kind != "http":
        return out[0]["code"], {}, None
    head = {name.decode(): value.decode() for name, value in out[0]["headers"]}
    body = b"".join(one.get("body", b"") for one in out[1:])
    return out[0]["status"], head, body


def guarded(inner: Inner, given: ServerSettings) -> middleware.Guard:
    rule, by = middleware.HostRule.of(given), auth.authenticator(given)
    return middleware.Guard(inner, rule, by, Places(given))


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models", "/v1", "/v10", "/metrics", "/metrics\n"]
)
async def test_strangers_are_refused_before_a_byte_of_the_body(file: Path, path: str) -> None:
    inner, given = Inner(), settings(api_keys=file)
    app = guarded(inner, given)
    status, head, body = await asked(app, path)
    assert (status, head["www-authenticate"], inner.seen) == (401, "Bearer", [])
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "authentication_error"


async def test_the_guard_lets_through_what_may(file: Path) -> None:
    inner, given = Inner(), settings(api_keys=file)
    app = guarded(inner, given)
    key = ("authorization", f"Bearer {KEY}")
    metrics = ("authorization", f"Bearer {auth.new_key(file, '@metrics')}")
    app_now = guarded(inner, given)
    assert (await asked(app, "/v1/models", [key]))[0] == 200
    assert (await asked(app_now, "/metrics", [metrics]))[0] == 200
    for path in ("/health", "/ready", "/", "/v", "/playground/index.html"):
        assert (await asked(app, path))[0] == 200
    assert (await asked(app_now, "/metrics", [key]))[0] == 403
    assert (await asked(app_now, "/v1/models", [metrics]))[0] == 403
    assert (await asked(app, "/health", [("origin", "https://evil.example")]))[0] == 403
    assert (await asked(app, "/socket", kind="websocket"))[0] == 1008
    assert len(inner.seen) == 7


async def test_allowed_origins_get_cors_and_others_nothing(file: Path) -> None:
    app = FastAPI()
    given = settings(api_keys=file, allowed_origins=("https://app.example",))
    middleware.install(app, given, auth.authenticator(given))

    @app.get("/v1/models")
    async def models() -> dict[str, str]:
        return {}

    preflight = [("access-control-request-method", "POST")]
    for origin, status in (("https://app.example", 200), ("https://evil.example", 400)):
        out: list[Any] = []

        async def send(message: Any, out: list[Any] = out) -> None:
            out.append(message)

        pairs = [(b"host", b"localhost"), (b"origin", origin.encode())]
        pairs += [(name.encode(), value.encode()) for name, value in preflight]
        scope = {
            "type": "http",
            "method": "OPTIONS",
            "path": "/v1/models",
            "headers": pairs,
            "query_string": b"",
        }
        await app(scope, None, send)  # type: ignore[arg-type]  # nothing is received
        head = {name.decode(): value.decode() for name, value in out[0]["headers"]}
        assert out[0]["status"] == status
        assert head.get("access-control-allow-origin") == (origin if status == 200 else None)
        assert "access-control-allow-credentials" not in head


async def test_without_allowed_origins_no_cors_header_is_sent(file: Path) -> None:
    app = FastAPI()
    middleware.install(app, settings(), auth.authenticator(settings()))

    @app.post("/v1/models")
    async def models() -> dict[str, str]:
        return {}

    status, head, _ = await asked(app, "/v1/models", [("origin", "https://evil.example")])
    assert status == 403
    assert not [name for name in head if name.startswith("access-control")]
