"""The playground's files, what its routes answer, and the command that opens it."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import webbrowser
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import access
import httpx
import pytest
from serve_fakes import DEADLINE, Scripted, chat, client, scripted, settings, tiny_backend

from kvcache_rag import Engine, InvalidInputError, LegoLink, cli
from kvcache_rag.generation.explain import TokenState
from kvcache_rag.policies import POLICY_NAMES, policy_by_name
from kvcache_rag.prompt.template import Message
from kvcache_rag_server import startup
from kvcache_rag_server.app import build_app
from kvcache_rag_server.commands import playground, serve
from kvcache_rag_server.keys import new_key
from kvcache_rag_server.playground import PAGE, Explanation, assets
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcache_rag_server.backend import BackendRequest
    from kvcache_rag_server.local import LocalBackend
    from kvcache_rag_server.settings import ServerSettings

EXPLAIN = "/v1/explain"
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
async def test_every_file_is_served_as_what_it_is_and_under_a_strict_policy(name: str) -> None:
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


@pytest.mark.parametrize("name", sorted(FILES))
async def test_what_a_browser_has_is_not_sent_again(name: str) -> None:
    first = await get(place(name))
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"x", W/{first.headers["etag"]}', "*"):
        again = await get(place(name), **{"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    assert (await get(place(name), **{"if-none-match": '"x"'})).status_code == 200


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
        "..%2Fpages.py",
        "..%2F..%2Fserve%2Fapp.py",
        "%2Fetc%2Fpasswd",
        "",
    ],
)
async def test_nothing_else_is_served(path: str) -> None:
    reply = await get(f"/playground/{path}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_url"


async def test_the_page_is_told_what_it_has_to_know(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    new_key(keys, "a")
    plain = (await get("/playground/config")).json()
    limits = RequestLimits()
    assert plain == {
        "needs_key": False,
        "reader": True,
        "auxiliary": False,
        "documents": limits.max_documents,
        "file_bytes": limits.max_body_bytes,
        "policy": "reuse",
        "warnings": {"composite": "It costs."},
    }
    limits = RequestLimits(max_documents=3, max_body_bytes=1000)
    made: dict[str, Any] = {"api_keys": keys, "model": "other", "limits": limits}
    made |= {"auxiliary": "small", "policy": "bestlast:0.4"}
    app = build_app(Scripted(), settings(**made))
    async with client(app) as http:
        told = await http.get("/playground/config")
    assert told.json() == {
        "needs_key": True,
        "reader": False,
        "auxiliary": True,
        "documents": 3,
        "file_bytes": 1000,
        "policy": "bestlast:0.4",
        "warnings": {"composite": "It costs."},
    }


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
    body: Any, backend: Scripted | LocalBackend, key: str = "", **changes: Any
) -> httpx.Response:
    app = build_app(backend, settings(**changes))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with client(app) as http:
        return await http.post(EXPLAIN, json=body, headers=headers)


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


async def test_only_documents_can_be_explained() -> None:
    reply = await post(chat("Where?"), backend := Noted())
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "documents"
    assert backend.explained is None


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
    reply = await post(chat(documents=["one"], kvcache={"policy": "blend"}), Noted())
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "kvcache.policy")


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
    async with client(build_app(reader, settings())) as http:
        answered = (await http.post("/v1/chat/completions", json=body)).json()
    assert answered["kvcache"]["recomputed_tokens"] == warm["recomputed_tokens"] == 4
    assert answered["choices"][0]["message"]["content"] == "Osha Grell"


async def test_the_best_chunk_is_explained_where_it_is_computed(reader: LocalBackend) -> None:
    question = "Who founded Drenko?"
    documents = [{"text": text, "score": at} for at, text in enumerate(DOCUMENTS)]
    body = chat(question, documents=documents, kvcache={"policy": "bestlast"})
    async with client(build_app(reader, settings())) as http:
        answered = (await http.post("/v1/chat/completions", json=body)).json()
    told = (await post(body, reader)).json()
    assert told["fresh_tokens"] == answered["kvcache"]["fresh_tokens"] > 0
    first, last = (span for span in told["spans"] if span["kind"] == "chunk")
    said = "".join(token["text"] for token in told["tokens"][last["start"] : last["stop"]])
    assert DOCUMENTS[1] in said
    states = [token["state"] for token in told["tokens"]]
    assert set(states[first["start"] : first["stop"]]) == {"reused"}
    assert set(states[last["start"] :]) == {"computed"}
    assert last["stop"] - last["start"] == told["fresh_tokens"]


async def test_documents_that_are_not_needed_are_told(reader: LocalBackend) -> None:
    documents = [*DOCUMENTS[::-1], "", DOCUMENTS[1], "Lispan lies on the river Sarn."]
    body = chat("Who founded Drenko?", documents=documents, kvcache={"policy": "bestfew:1"})
    told = (await post(body, reader)).json()
    async with client(build_app(reader, settings())) as http:
        answered = (await http.post("/v1/chat/completions", json=body)).json()
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        streamed = (await http.post("/v1/chat/completions", json=sent)).text
    frames = [json.loads(one[6:]) for one in streamed.split("\n\n") if one.startswith("data: {")]
    assert (told["answered_from"], told["unused_chunks"]) == ([1], 2), "as the client numbers them"
    for found in (answered, frames[-2]):
        cost = found["kvcache"]
        assert (cost["answered_from"], cost["unused_chunks"]) == ([1], 2)
        assert cost["dropped_chunks"] == 0
    prompt = "".join(token["text"] for token in told["tokens"])
    assert [one in prompt for one in DOCUMENTS] == [True, False]
    for found in (answered, frames[-1]):
        assert found["usage"]["prompt_tokens"] == len(told["tokens"]), "of the prompt answered"


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
        half = await http.post(
            COMPARE,
            content=rb'{"full": "\ud800", "stitched": ""}',
            headers={**key, "content-type": "application/json"},
        )
        assert half.status_code == 400
    assert found == {
        "same": False,
        "full": [
            {"text": "It costs ", "differs": False},
            {"text": "412", "differs": True},
            {"text": " euros.", "differs": False},
        ],
        "stitched": [
            {"text": "It costs ", "differs": False},
            {"text": "77", "differs": True},
            {"text": " euros", "differs": False},
        ],
    }


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

    for command in (playground, serve):
        monkeypatch.setattr(command, "listening", listening)
    monkeypatch.setattr(startup, "run", run)
    return found


@pytest.mark.parametrize("opens", [True, False])
def test_a_browser_is_opened(
    opens: bool,
    served: list[ServerSettings],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    visits: list[str] = []
    threads: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        threads.append(thread)
        real(thread)

    def visit(url: str) -> bool:
        visits.append(url)
        return opens

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(webbrowser, "open", visit)
    assert cli.main(["playground", "tiny", "--port", "9", "--policy", "reuse"]) == 0
    threads[-1].join(DEADLINE)
    assert visits == ["http://127.0.0.1:9/"]
    told = capfd.readouterr()
    assert told.out == "kvcache-rag: serving it; look at http://127.0.0.1:9/\n"
    assert ("no browser could be opened; go to http://127.0.0.1:9/" in told.err) != opens
    (settings,) = served
    assert (settings.model, settings.host, settings.port) == ("tiny", "127.0.0.1", 9)
    assert settings.policy == "reuse"


def test_no_browser_is_opened_where_none_is_wanted(
    served: list[ServerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert cli.main(["playground", "tiny", "--no-browser"]) == 0
    assert served[0].model == "tiny"


@pytest.mark.parametrize(
    ("words", "example"),
    [
        (["playground"], "kvcache-rag playground tiny"),
        (["playground", "--no-browser", "--port", "9"], "kvcache-rag playground tiny"),
        (["serve"], "kvcache-rag serve tiny --kv-dir kv"),
        (["serve", "--kv-dir", "kv"], "kvcache-rag serve tiny --kv-dir kv"),
    ],
)
def test_without_a_model_it_says_which_there_are(
    served: list[ServerSettings],
    words: list[str],
    example: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert cli.main(words) == 2
    told = capfd.readouterr()
    assert told.out == ""
    paragraph, _, last = told.err.partition("\n\n")
    assert last.strip() == example
    assert max(map(len, paragraph.splitlines())) <= 70
    text = " ".join(paragraph.split())
    assert text.startswith("kvcache-rag: error: say which model. ")
    for kind in ("Hugging Face hub", "the folder of a model", "GGUF", '"smollm2"', '"tiny"'):
        assert kind in text
    assert served == []


def test_a_model_is_named_by_the_line_or_by_the_file(
    served: list[ServerSettings], tmp_path: Path
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: smollm2\nport: 0\n")
    assert cli.main(["serve", "tiny"]) == 0
    assert cli.main(["serve", "tiny", "--config", str(file)]) == 0
    assert [(one.model, one.port) for one in served] == [("tiny", 8000), ("tiny", 0)]


def test_it_serves_no_other_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["playground", "--host", "0.0.0.0"]) == 2
    assert "--host" in capfd.readouterr().err


def test_the_command_serves_the_page_and_opens_it(tmp_path: Path) -> None:
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    os.mkfifo(opened)  # whoever reads it waits until the browser is told where to go
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, "-m", "kvcache_rag.cli", "playground", "tiny", "--port", "0"]
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("kvcache-rag: serving tiny at http://127.0.0.1:")
            page = opened.read_text().strip()
            assert line.endswith(f"; look at {page}\n")
            reply = httpx.get(page, timeout=DEADLINE)
            assert b"playground" in reply.content
            assert "content-security-policy" in reply.headers
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) in (0, 130)
        finally:
            process.kill()
            assert "Traceback" not in process.stderr.read()


def test_the_page_knows_every_state_of_a_token() -> None:
    script = TEXTS["prompt.js"].partition("const SPANS")[0]
    for state in get_args(TokenState):
        assert f"  {state}: {{ label:" in script
        assert f"\n.{state} {{" in TEXTS["style.css"]
