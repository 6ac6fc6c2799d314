"""`kvcache-rag doctor`: what it finds, and that it says when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvcache_rag import cli
from kvcache_rag.commands import doctor, self_check
from kvcache_rag.commands.self_check import TOLERANCE, StitchedAnswer, stitched_answer

GOOD = StitchedAnswer("Who?", "Ann", "Ann", 100, 0.01, 1e-6)
# What nothing but an extra or another distribution brings, and transformers does not look for.
OPTIONAL = (
    *("chromadb", "cryptography", "datasets", "fastapi", "gguf", "jieba", "justhtml"),
    *("kvcache_rag_cpu", "langchain_core", "llama_cpp", "llama_index", "llguidance"),
    *("mammoth", "matplotlib", "prometheus_client", "pypdf", "ray", "s3fs"),
    *("sentence_transformers", "triton", "uvicorn", "vllm"),
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No model is asked; the stores that it would have been asked from."""
    asked: list[Any] = []
    monkeypatch.setattr(
        self_check, "stitched_answer", lambda store=None: asked.append(store) or GOOD
    )
    return asked


def examine(*words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert cli.main(["doctor", "--json", *words]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ---------------------------------------------------------------------- one answer
def test_the_reader_answers_rightly_from_stitched_chunks_and_another_order_is_no_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = stitched_answer()
    assert answer.problem == ""
    assert answer.answer == answer.expected != ""
    assert answer.reused_tokens > 100
    assert 0 <= answer.difference <= TOLERANCE
    assert answer.ttft > 0
    real = self_check.block_mask
    monkeypatch.setattr(
        self_check, "block_mask", lambda prefix, chunks, query: real(prefix, chunks[::-1], query)
    )
    assert "stitched logits differ from the plain forward pass" in stitched_answer().problem


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"answer": "Bo"}, "the stitched answer is 'Bo', 'Ann' is due"),
        ({"difference": 0.5}, "stitched logits differ from the plain forward pass by 5.0e-01"),
        ({"difference": float("nan")}, "stitched logits differ"),
        ({"reused_tokens": 0}, "no token of the chunks was reused"),
        (OSError("libcudart.so: cannot open"), "no stitched answer: OSError: libcudart.so: cannot"),
    ],
    ids=["answer", "logits", "nan", "nothing-reused", "broken-library"],
)
def test_an_answer_that_fails_is_a_problem(
    changed: Any, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(_: Any = None) -> StitchedAnswer:
        if isinstance(changed, Exception):
            raise changed
        return replace(GOOD, **changed)

    monkeypatch.setattr(self_check, "stitched_answer", answer)
    assert cli.main(["doctor"]) == 1
    *_, title, problem = capsys.readouterr().out.splitlines()
    assert title == "1 problem:"
    assert problem.strip().startswith(says)


# ---------------------------------------------------------------------- the command
def test_all_is_well_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--kv-dir", str(tmp_path / "kv")]) == 0
    text = capsys.readouterr().out
    for said in (
        f"Python {sys.version.split()[0]}",
        *(f"{name:25}{metadata.version(name)}" for name in ("kvcache-rag", "torch")),
        f"{tmp_path / 'kv'} is not there yet; can be written, ",
        "kvcache-rag[server]",
        "stitched answer: ",
    ):
        assert said in text
    assert text.endswith("\nall is well\n")
    assert "\x1b" not in text
    assert list(tmp_path.iterdir()) == []


def test_the_answer_comes_from_the_folder_that_is_looked_at(
    quick: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = examine("--kv-dir", str(tmp_path), capsys=capsys)
    (store,) = quick
    assert Path(store.root).parent == tmp_path
    folder = found["kv_dir"]
    assert (folder["path"], folder["exists"], folder["problem"]) == (str(tmp_path), True, "")
    assert folder["free"] > 0
    assert (found["problems"], found["stitched"]["problem"]) == ([], "")
    assert found["devices"][0]["device"] == "cpu"
    assert {one["name"] for one in found["extras"]} >= {"kvcache-rag[s3]", "kvcache-rag[documents]"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "Not a directory"),
        ("file/kv", "Not a directory"),
        ("locked/kv", "Permission denied"),
    ],
)
def test_a_folder_that_takes_no_files_is_a_problem(
    quick: list[Any],
    name: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    real = doctor.tempfile.TemporaryDirectory

    def make(*, prefix: str, dir: Path) -> Any:
        if dir.name == "locked":  # root may write anywhere
            raise PermissionError(13, "Permission denied", str(dir))
        return real(prefix=prefix, dir=dir)

    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", make)
    found = examine("--kv-dir", str(tmp_path / name), capsys=capsys, code=1)
    assert found["problems"] == [f"{tmp_path / name} cannot be written: {reason}"]
    assert quick == [None], "the answer is tried all the same"


# ---------------------------------------------------------------------- what is installed
@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions that are pretended; None for what is not there."""
    pretended: dict[str, str | None] = {}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: pretended.get(name, real(name)))
    return pretended


@pytest.mark.usefixtures("quick")
def test_what_is_missing_says_what_it_would_add_and_how(
    installed: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    # `documents` asks for an extra of pypdf, and `ray` for one of ours.
    installed.update({"opentelemetry-api": None, "ray": None, "cryptography": "1.0"})
    installed["langchain-kvcache-rag"] = None
    found = examine(capsys=capsys)
    extras = {one["name"]: one["missing"] for one in found["extras"]}
    (old,) = extras.pop("llama-index-kvcache-rag[documents]")
    assert old.startswith("cryptography>=")
    assert old.endswith("(there is 1.0)")
    expected = {
        "kvcache-rag[otel]": ["opentelemetry-api"],
        "kvcache-rag[ray]": ["ray"],
        "kvcache-rag[gguf]": [],
        "langchain-kvcache-rag": ["langchain-kvcache-rag"],
    }
    assert {name: extras[name] for name in expected} == expected
    assert found["problems"] == [], "nobody needs every extra"
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert "OpenTelemetry spans of answers: pip install 'kvcache-rag[otel]'" in text
    assert "LangChain: pip install 'langchain-kvcache-rag'" in text


@pytest.mark.usefixtures("quick")
def test_what_a_distribution_needs_and_has_not_is_a_problem(
    installed: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed.update({"transformers": "4.0", "xxhash": None})
    problems = examine(capsys=capsys, code=1)["problems"]
    assert "kvcache-rag needs xxhash: pip install kvcache-rag" in problems
    assert any("kvcache-rag needs transformers<6,>=5.6 (there is 4.0)" in one for one in problems)


def test_it_needs_nothing_but_the_core() -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {OPTIONAL}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from kvcache_rag import cli\n"
        "sys.exit(cli.main(['doctor', '--json']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == []
