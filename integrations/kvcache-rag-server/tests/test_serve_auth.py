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
from serve_fakes import DEADLINE, chat, client, data_of, scripted, settings
from serve_process import CHAT, Paced
from starlette.datastructures import Headers

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_server import auth, keys, middleware
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.errors import headers as error_headers
from kvcache_rag_server.keys import ApiKeys, Caller
from kvcache_rag_server.limits import Places

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEY = "a-key-in-clear-0123456789"
OTHER = "another-key-in-clear-0123"


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def written(folder: Path, content: str) -> Path:
    path = folder / "keys"
    path.write_bytes(content.encode())
    path.chmod(0o600)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = f"{KEY} acme acme-web  # in clear\n\nsha256:{digest_of(OTHER)} globex\n"
    return written(tmp_path, f"# key namespace name\n{lines}")


# ---------------------------------------------------------------------- the file
def test_a_line_gives_its_key_a_namespace_and_a_name(file: Path) -> None:
    found = ApiKeys.load(file)
    assert found.caller(KEY) == Caller("acme", "acme-web")
    assert found.caller(OTHER) == Caller("globex", f"key-{digest_of(OTHER)[:8]}")
    for wrong in ("", "a", KEY[:-1], KEY + "x", "sha256:" + "0" * 64, "\ud800", "é" * 20):
        assert found.caller(wrong) is None
    for digest in (digest_of(OTHER), f"sha256:{digest_of(OTHER)}"):
        assert found.caller(digest) is None, "a digest is no key"


def test_every_known_key_is_compared_by_digest_in_constant_time(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def compared(known: bytes, given: bytes) -> bool:
        seen.append((known, given))
        return compare(known, given)

    found = ApiKeys.load(file)
    monkeypatch.setattr(keys.hmac, "compare_digest", compared)
    found.caller(KEY)
    # The first line matches and the second is compared all the same; only digests are.
    assert len(seen) == 2
    assert {len(one) for pair in seen for one in pair} == {32}


def test_keys_are_in_no_repr_and_in_no_log(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    found = ApiKeys.load(file)
    found.caller(KEY)
    with pytest.raises(ApiError) as raised:
        auth.ByKey(found).caller("Bearer wrong-" + KEY)
    shown = repr(found) + repr(found.known[0]) + caplog.text + str(raised.value)
    assert KEY not in shown
    assert digest_of(KEY) not in shown


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
        ("sha256:abc acme\n", "64 hexadecimal digits"),
        (f"SHA256:{'A' * 64} acme\n", "64 hexadecimal digits"),
        (f"Sha256:{'0' * 63} acme\n", "64 hexadecimal digits"),
        (f"sha256:{'0' * 65} acme\n", "64 hexadecimal digits"),
        (f"acme-of-long-name {KEY}+/=\n", "namespace 'a-ke...'"),
        (f"{OTHER} acme {KEY}+/=\n", "name 'a-ke...'"),
        (f"{KEY} acme\n{KEY} globex\n", "line 2: this key stands there already"),
        (f"{KEY} acme web\n{OTHER} globex web\n", "line 2: the name 'web' is that of a key of"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(said)) as raised:
        ApiKeys.load(written(tmp_path, text))
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("end", ["\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_a_comment_ends_with_its_line_only(tmp_path: Path, end: str) -> None:
    found = ApiKeys.load(written(tmp_path, f"{KEY} acme web\n# old: {end}{OTHER} globex\n"))
    assert (found.caller(KEY), found.caller(OTHER)) == (Caller("acme", "web"), None)


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_key(tmp_path: Path) -> None:
    found = ApiKeys.load(written(tmp_path, f"\ufeff{KEY} acme web\r\n{OTHER} acme web\r\n"))
    assert found.caller(KEY) == found.caller(OTHER) == Caller("acme", "web")


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--new-key NAMESPACE"):
        ApiKeys.load(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        ApiKeys.load(tmp_path / "bytes")


def test_a_file_that_others_may_read_is_reported(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ApiKeys.load(file)
    assert not caplog.records
    file.chmod(0o640)
    ApiKeys.load(file)
    assert "chmod 600" in caplog.text


def test_new_keys_are_written_as_digests_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = auth.new_key(path, "acme")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().rstrip("\n"))  # an editor that leaves no newline
    second = auth.new_key(path, keys.METRICS_NAMESPACE)
    text = path.read_text()
    for key, namespace in ((first, "acme"), (second, "@metrics")):
        assert len(key) > 40
        assert key not in text
        assert getattr(ApiKeys.load(path).caller(key), "namespace", None) == namespace
    with pytest.raises(InvalidInputError, match="--new-key: the namespace ''"):
        auth.new_key(path, "")
    with pytest.raises(InvalidInputError, match="cannot write API keys"):
        auth.new_key(tmp_path, "acme")
    assert path.read_text() == text


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o622, 0o601])
def test_no_key_is_added_to_a_file_that_others_may_read_or_write(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, "# ours\n")
    path.chmod(mode)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        auth.new_key(path, "acme")
    assert path.read_text() == "# ours\n"
    path.chmod(0o600)
    key = auth.new_key(path, "acme")
    assert ApiKeys.load(path).caller(key) is not None


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
@asynccontextmanager
async def answering(
    file: Path, key: str, *, stream: bool = True
) -> AsyncIterator[tuple[Any, Any, asyncio.Task[Any], Paced]]:
    """A server of these keys, a client, and the request of one key's owner that is answered."""
    pace = Paced()
    app, _ = scripted(pace, api_keys=file)
    async with client(app) as http:
        asked = http.post(CHAT, json=chat(stream=stream), headers=bearer(key))
        running = asyncio.create_task(asked)
        await asyncio.to_thread(pace.wait)
        yield app.state.context.keys, http, running, pace


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(http: Any, key: str) -> int:
    return int((await http.get("/v1/models", headers=bearer(key))).status_code)


def without(file: Path, key: str) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if key not in line) + "\n")


async def test_a_key_that_was_revoked_is_401_and_its_streams_end(file: Path) -> None:
    async with answering(file, KEY) as (reloader, http, running, _):
        without(file, KEY)
        assert await status(http, KEY) == 200
        await reloader.reload()
        assert [await status(http, key) for key in (KEY, OTHER)] == [401, 200]
        *before, error, done = data_of((await asyncio.wait_for(running, DEADLINE)).text)
    assert before[-1]["choices"][0]["delta"] == {"content": "y"}
    assert (error["error"]["code"], done) == ("invalid_api_key", "[DONE]")


async def test_a_whole_answer_of_a_revoked_key_is_401(file: Path) -> None:
    async with answering(file, KEY, stream=False) as (reloader, _, running, _):
        without(file, KEY)
        await reloader.reload()
        reply = await asyncio.wait_for(running, DEADLINE)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")


async def test_streams_of_other_keys_go_on(file: Path) -> None:
    async with answering(file, OTHER) as (reloader, http, running, pace):
        without(file, KEY)
        file.write_text(file.read_text() + "a-third-key-in-clear-01 initech\n")
        await reloader.reload()
        assert await status(http, "a-third-key-in-clear-01") == 200
        pace.go_on.set()
        assert data_of((await running).text)[-1] == "[DONE]"
        assert "error" not in (await running).text


async def test_a_key_that_becomes_another_tenants_ends_what_the_first_one_asked(file: Path) -> None:
    async with answering(file, KEY) as (reloader, http, running, _):
        file.write_text(file.read_text().replace(f"{KEY} acme", f"{KEY} initech"))
        await reloader.reload()
        assert await status(http, KEY) == 200
        error, done = data_of((await asyncio.wait_for(running, DEADLINE)).text)[-2:]
    assert (error["error"]["code"], done) == ("invalid_api_key", "[DONE]")


@pytest.mark.parametrize("damage", [None, "folder", b"", b"short x\n", b"\xff"])
async def test_a_file_that_cannot_be_read_keeps_the_keys(
    file: Path, damage: str | bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering(file, KEY) as (reloader, http, running, pace):
        file.unlink()
        if isinstance(damage, bytes):
            file.write_bytes(damage)
        elif damage:
            file.mkdir()
        await reloader.reload()
        assert "stay as they were" in caplog.text
        assert KEY not in caplog.text
        assert await status(http, KEY) == 200
        pace.go_on.set()
        assert "error" not in (await running).text


# ---------------------------------------------------------------------- the header
@pytest.mark.parametrize("header", ["", KEY, "Bearer", "Bearer ", "Basic " + KEY, "Bearer wrong"])
def test_without_a_known_key_it_is_401(file: Path, header: str) -> None:
    authenticator = auth.authenticator(settings(api_keys=file))
    assert authenticator.caller(f"bearer   {KEY} ") == Caller("acme", "acme-web")
    for refusing in (authenticator.caller, authenticator.check_metrics):
        with pytest.raises(ApiError) as raised:
            refusing(header)
        assert (raised.value.failed.status, raised.value.failed.code) == (401, "invalid_api_key")
        assert error_headers(raised.value.failed)["www-authenticate"] == "Bearer"


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
ANYWHERE: dict[str, Any] = {"host": "0.0.0.0", "allow_anonymous": True}
KEYED: dict[str, Any] = {"host": "0.0.0.0", "api_keys": "keys"}


@pytest.mark.parametrize(
    ("options", "answered", "refused"),
    [
        ({}, LOOPBACK, FOREIGN),
        ({"allowed_hosts": ("KV.example",)}, ["kv.example:443", "localhost"], ["evil.example"]),
        ({"allowed_hosts": ("*",)}, ["evil.example"], []),
        (ANYWHERE, ["10.0.0.7:8000", "localhost"], ["evil.example"]),
        (KEYED, ["kv.example"], []),
        ({**KEYED, "allowed_hosts": ("kv.example",)}, ["kv.example"], ["evil.example"]),
    ],
    ids=["loopback", "a name more", "any name", "anonymous", "keys", "keys and a name"],
)
def test_a_server_answers_to_its_own_names_and_to_those_that_were_allowed(
    options: dict[str, Any], answered: list[str], refused: list[str]
) -> None:
    rule = middleware.HostRule.from_settings(settings(**options))
    assert [host for host in answered if not passes(rule, host)] == []
    assert [host for host in refused if passes(rule, host)] == []
    for several in ([], [("host", "localhost"), ("host", "localhost")]):
        with pytest.raises(ApiError):
            rule.check(headers(*several))


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
    rule = middleware.HostRule.from_settings(settings(allowed_origins=("https://app.example/",)))
    assert passes(rule, host, origin) is expected


# ---------------------------------------------------------------------- the guard
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "http"),
        ("/v1/models", "http"),
        ("/v1", "http"),
        ("/v10", "http"),
        ("/metrics", "http"),
        ("/metrics\n", "http"),
        ("/socket", "websocket"),
    ],
)
async def test_strangers_are_refused_before_a_byte_of_the_body(
    file: Path, path: str, kind: str
) -> None:
    async def unused(*_: Any) -> Any:
        raise AssertionError("the body was read, or the request let through")

    out: list[Any] = []

    async def send(message: Any) -> None:
        out.append(message)

    given = settings(api_keys=file)
    guard = middleware.Guard(
        unused, middleware.HostRule.from_settings(given), auth.authenticator(given), Places(given)
    )
    headers = [(b"host", b"localhost")]
    scope = {"type": kind, "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await guard(scope, unused, send)
    if kind == "websocket":
        assert out[0]["code"] == 1008
        return
    assert (out[0]["status"], dict(out[0]["headers"])[b"www-authenticate"]) == (401, b"Bearer")
    error = json.loads(b"".join(one["body"] for one in out[1:]))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("origin", "status"), [("https://app.example", 200), ("https://evil.example", 400)]
)
async def test_allowed_origins_get_cors_and_others_nothing(
    file: Path, origin: str, status: int
) -> None:
    app, _ = scripted(api_keys=file, allowed_origins=("https://app.example",))
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    async with client(app) as http:
        reply = await http.options("/v1/models", headers=preflight)
    assert reply.status_code == status
    allowed = reply.headers.get("access-control-allow-origin")
    assert allowed == (origin if status == 200 else None)
    assert "access-control-allow-credentials" not in reply.headers
