"""The playground's files, what its routes answer, and the command that opens it."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import webbrowser
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import access
import httpx
import pytest
from serve_fakes import DEADLINE, Scripted, chat, client, scripted, settings, tiny_backend
from serve_process import posted, started

from kvcache_rag import Engine, InvalidInputError, LegoLink, cli
from kvcache_rag.generation.explain import TokenState
from kvcache_rag.policies import POLICY_NAMES, policy_by_name
from kvcache_rag.prompt.template import Message
from kvcache_rag_server import startup
from kvcache_rag_server.app import build_app
from kvcache_rag_server.commands import serve
from kvcache_rag_server.keys import new_key
from kvcache_rag_server.playground import PAGE, Explanation, assets
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcache_rag_server.backend import BackendRequest
    from kvcache_rag_server.local import LocalBackend
    from kvcache_rag_server.settings import ServerSettings

EXPLAIN, CHAT = "/v1/explain", "/v1/chat/completions"
FILES = assets()
TEXTS = {name: asset.content.decode() for name, asset in FILES.items()}
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
DOCUMENTS = ["Drenko was founded by Osha Grell.", "The Mobrit is made by Drenko."]


# ---------------------------------------------------------------------- files
async def get(path: str, **headers: str) -> httpx.Response:
    app, _ = scripted()
    async with client(app) as http:
        return await http.get(path, headers=headers)


def place(name: str) -> str:
    return "/" if name == PAGE else f"/playground/{name}"


@pytest.mark.parametrize("name", sorted(FILES))
async def test_every_file_is_served_once_as_what_it_is_and_under_a_strict_policy(name: str) -> None:
    reply = await get(place(name))
    assert reply.status_code == 200
    assert reply.content == FILES[name].content
    assert reply.headers["content-type"].split(";")[0] == TYPES[name.rpartition(".")[2]]
    rules = dict(
        rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; ")
    )
    assert rules["default-src"] == "'none'"
    assert {rules[f"{what}-src"] for what in ("script", "style", "img", "connect")} == {"'self'"}
    assert {rules[what] for what in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["cache-control"] == "no-cache"
    tag = reply.headers["etag"]
    for known, status in ((tag, 304), (f'"x", W/{tag}', 304), ("*", 304), ('"x"', 200)):
        again = await get(place(name), **{"if-none-match": known})
        assert (again.status_code, again.headers["etag"]) == (status, tag)
        assert again.content == (b"" if status == 304 else reply.content)


def test_the_files_need_each_other_and_nothing_else() -> None:
    needed = {PAGE}
    for name, text in TEXTS.items():
        for found in re.findall(r'(?:src|href)="([^"]+)"|from "\./([^"]+)"', text):
            target = next(filter(None, found))
            if target != "/openapi.json":
                needed.add(target.removeprefix("/playground/"))
        outside = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//cdn|url\(|@import|\bimport\(", outside), name
    assert needed == set(FILES)


def test_nothing_is_ever_written_as_markup() -> None:
    for name, text in TEXTS.items():
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval", text)
    inline = r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)"
    assert not re.search(inline, TEXTS[PAGE]), "the policy would forbid it"
    assert "localStorage" not in "".join(TEXTS.values())


@pytest.mark.parametrize(
    "path",
    [
        "nothing.js",
        "index.html",
        "..%2Fplayground.py",
        "..%2F..%2FREADME.md",
        "%2Fetc%2Fpasswd",
        "",
    ],
)
async def test_nothing_else_is_served(path: str) -> None:
    reply = await get(f"/playground/{path}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_url"


async def test_a_file_that_is_not_there_is_named() -> None:
    error = (await get("/playground/nothing.js")).json()["error"]
    assert error["message"] == "there is no /playground/nothing.js here"


async def test_the_page_is_told_what_it_has_to_know(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    new_key(keys, "a")
    limits = RequestLimits()
    plain = {
        "needs_key": False,
        "reader": True,
        "auxiliary": False,
        "documents": limits.max_documents,
        "file_bytes": limits.max_body_bytes,
        "policy": "reuse",
        "warnings": {"composite": "It costs."},
    }
    assert (await get("/playground/config")).json() == plain
    other = settings(
        api_keys=keys,
        model="other",
        limits=RequestLimits(max_documents=3, max_body_bytes=1000),
        auxiliary="small",
        policy="bestlast:0.4",
    )
    async with client(build_app(Scripted(), other)) as http:
        told = (await http.get("/playground/config")).json()
    changed = {"needs_key": True, "reader": False, "auxiliary": True, "documents": 3}
    changed |= {"file_bytes": 1000, "policy": "bestlast:0.4"}
    assert told == plain | changed


def test_the_dial_has_policies_of_the_server_alone() -> None:
    named = re.findall(r'\{ id: "(\w+)"', TEXTS["dial.js"])
    assert set(named) <= set(POLICY_NAMES)
    sliders = dict(re.findall(r'id: "(\w+)".* slider: (\w+), start: \d+ \}', TEXTS["dial.js"]))
    parts = dict(re.findall(r"const (\w+) = \{ .* parts: (\d+),", TEXTS["dial.js"]))
    for name, slider in sliders.items():
        for amount in (2, 64):
            policy = policy_by_name(f"{name}:{amount / int(parts[slider]):g}")
            assert policy.name == name


# ---------------------------------------------------------------------- /v1/explain
class Noted(Scripted):
    """Notes what is to be explained."""

    explained: BackendRequest | None = None
    error: Exception | None = None

    async def explain(self, work: BackendRequest) -> dict[str, Any]:
        self.explained = work
        if self.error is not None:
            raise self.error
        return {"spans": [], "answered_from": range(len(work.chunks))[::-1]}


async def post(
    body: Any, backend: Scripted | LocalBackend, key: str = "", path: str = EXPLAIN, **changes: Any
) -> httpx.Response:
    app = build_app(backend, settings(**changes))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client(app) as http:
        return await http.post(path, json=body, headers=headers)


async def test_it_explains_what_a_chat_would_ask() -> None:
    backend = Noted()
    body = chat(
        "Where?",
        documents=["one", {"text": "two"}, "one", "three"],
        kvcache={"policy": "legolink:3"},
    )
    body["messages"][:0] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert (await post(body, backend)).json() == {"spans": [], "answered_from": [3, 1, 0]}
    work = backend.explained
    assert work is not None
    assert (work.question, work.chunks, work.policy) == (
        "Where?",
        ("one", "two", "three"),
        LegoLink(3),
    )
    assert work.history == (Message("user", "a"), Message("assistant", "b"))
    assert work.namespace == ""


async def test_keys_namespaces_and_limits_hold_here_too(tmp_path: Path) -> None:
    keys, backend, body = tmp_path / "keys.json", Noted(), chat(documents=["one", "two"])
    key = new_key(keys, "mine")
    assert (await post(body, backend, api_keys=keys)).status_code == 401
    assert backend.explained is None
    assert (await post(body, backend, key, api_keys=keys)).status_code == 200
    assert backend.explained.namespace == "mine"
    assert (await post(body, backend, limits=RequestLimits(max_documents=1))).status_code == 413


async def test_mistakes_are_told_and_faults_are_not() -> None:
    backend = Noted()
    backend.error = InvalidInputError("chunk 1 is empty; leave it out")
    reply = await post(chat(documents=["one"]), backend)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, str(backend.error))
    backend.error = RuntimeError("secret")
    reply = await post(chat(documents=["one"]), backend)
    assert reply.status_code == 500
    assert "secret" not in reply.text
    for body, param in (
        (chat(documents=["one"], kvcache={"policy": "blend"}), "kvcache.policy"),
        (chat("Where?"), "documents"),
    ):
        reply = await post(body, unasked := Noted())
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert unasked.explained is None


@pytest.fixture(scope="module")
def reader() -> Iterator[LocalBackend]:
    with tiny_backend() as backend:
        yield backend


async def test_the_reader_is_explained_as_its_engine_does(reader: LocalBackend) -> None:
    question = "Who founded Drenko?"
    access.engines(reader).base.delete_namespace()  # another test may have asked for the same
    body = chat(question, documents=DOCUMENTS, kvcache={"policy": "legolink:4"})
    cold, warm = [(await post(body, reader)).json() for _ in range(2)]
    assert (cold["reused_tokens"], warm["prefilled_tokens"]) == (0, 0)
    expected = Engine.from_pretrained("tiny")
    expected.add(DOCUMENTS)
    found = expected.explain(question, DOCUMENTS, policy=LegoLink(4)).to_dict()
    assert min(warm["choose"], found["choose"]) > 0
    assert warm == json.loads(json.dumps({**found, "choose": warm["choose"]}))
    assert Explanation.model_validate(warm, strict=True).model_dump(mode="json") == warm
    answered = (await post(body, reader, path=CHAT)).json()
    assert answered["kvcache"]["recomputed_tokens"] == warm["recomputed_tokens"] == 4
    assert answered["choices"][0]["message"]["content"] == "Osha Grell"


# ---------------------------------------------------------------------- where answers differ
COMPARE = "/v1/playground/compare"


async def test_answers_are_compared_for_those_who_may_ask(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = {"authorization": f"Bearer {new_key(keys, 'a')}"}
    said = {"full": "It costs 412 euros.", "stitched": "It costs 77 euros"}
    async with client(build_app(Scripted(), settings(api_keys=keys))) as http:
        assert (await http.post(COMPARE, json=said)).status_code == 401
        found = (await http.post(COMPARE, json=said, headers=key)).json()
        same = {"full": "The Sarn.", "stitched": "sarn"}
        assert (await http.post(COMPARE, json=same, headers=key)).json()["same"]
        for wrong in ({"full": "a" * 4001, "stitched": ""}, {"full": "a"}, {**same, "more": 1}):
            assert (await http.post(COMPARE, json=wrong, headers=key)).status_code == 400
    half, _ = await posted({"full": "\ud800", "stitched": ""}, COMPARE)
    assert half.status_code == 400
    assert not found["same"]
    expected = {"full": ["It costs ", "412", " euros."], "stitched": ["It costs ", "77", " euros"]}
    for side, parts in expected.items():
        told = [{"text": text, "differs": at == 1} for at, text in enumerate(parts)]
        assert found[side] == told


# ---------------------------------------------------------------------- the command
@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """What would be served, on no port of this machine; it is announced at once."""
    found: list[ServerSettings] = []

    @contextmanager
    def listening(host: str, port: int) -> Iterator[tuple[str, int]]:
        yield host, port

    def run(
        settings: ServerSettings, listener: tuple[str, int], announce: Callable[[str, str], None]
    ) -> None:
        assert listener == (settings.host, settings.port)
        found.append(settings)
        announce("serving it", "http://127.0.0.1:9/")

    monkeypatch.setattr(serve, "listening", listening)
    monkeypatch.setattr(startup, "run", run)
    return found


@pytest.mark.parametrize("opens", [True, False])
def test_a_browser_is_opened_unless_none_is_wanted(
    opens: bool,
    served: list[ServerSettings],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    visits: list[str] = []
    visited = threading.Event()

    def visit(url: str) -> bool:
        visits.append(url)
        visited.set()
        return opens

    monkeypatch.setattr(webbrowser, "open", visit)
    assert cli.main(["playground", "tiny", "--no-browser"]) == 0
    before = {*threading.enumerate()}
    assert cli.main(["playground", "tiny", "--port", "9", "--policy", "reuse"]) == 0
    assert visited.wait(DEADLINE)
    for thread in {*threading.enumerate()} - before:
        thread.join(DEADLINE)
    assert visits == ["http://127.0.0.1:9/"]
    told = capfd.readouterr()
    assert told.out == "kvcache-rag: serving it; look at http://127.0.0.1:9/\n" * 2
    assert ("no browser could be opened; go to http://127.0.0.1:9/" in told.err) != opens
    given = served[-1]
    assert (given.model, given.host, given.port, given.policy) == ("tiny", "127.0.0.1", 9, "reuse")


def test_a_model_is_named_by_the_line_or_by_the_file(
    served: list[ServerSettings], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, example in (
        (["playground", "--no-browser"], "kvcache-rag playground tiny"),
        (["serve"], "kvcache-rag serve tiny --kv-dir kv"),
    ):
        assert cli.main(words) == 2
        told = capfd.readouterr().err
        assert told.startswith("kvcache-rag: error: say which model. ")
        assert told.rpartition("\n\n")[2].strip() == example
    file = tmp_path / "server.yaml"
    file.write_text("model: smollm2\nport: 0\n")
    assert cli.main(["serve", "tiny"]) == 0
    assert cli.main(["serve", "tiny", "--config", str(file)]) == 0
    assert [(one.model, one.port) for one in served] == [("tiny", 8000), ("tiny", 0)]


def test_it_serves_no_other_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["playground", "--host", "0.0.0.0"]) == 2
    assert "--host" in capfd.readouterr().err


def test_the_command_serves_the_page_and_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    os.mkfifo(opened)  # whoever reads it waits until the browser is told where to go
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    command = ("-m", "kvcache_rag.cli", "playground")
    with started("tiny", "--port", "0", command=command) as (process, line, log):
        assert line.startswith("kvcache-rag: serving tiny at http://127.0.0.1:")
        page = opened.read_text().strip()
        assert line.endswith(f"; look at {page}\n")
        reply = httpx.get(page, timeout=DEADLINE)
        assert b"playground" in reply.content
        assert "content-security-policy" in reply.headers
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE)
        complaints = log.read_text()
    assert process.returncode in (0, 130)
    assert "Traceback" not in complaints


def test_the_page_knows_every_state_of_a_token() -> None:
    script = TEXTS["prompt.js"].partition("const SPANS")[0]
    for state in get_args(TokenState):
        assert f"  {state}: {{ label:" in script
        assert f"\n.{state} {{" in TEXTS["style.css"]
