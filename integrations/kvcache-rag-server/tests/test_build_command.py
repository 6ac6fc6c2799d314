"""`kvcache-rag build`: files, folders, collections, object storage, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from corpus_traps import saved_model, write_lines
from documents import pdf
from small import make_tokenizer
from store_place import Place, write

from kvcache_rag import DiskStore, Engine, cli
from kvcache_rag.integration import Rows
from kvcache_rag.stores import RemoteStore
from kvcache_rag_server.commands.corpora import cut
from kvcache_rag_server.corpus.worker import Worker
from tests.s3 import BUCKET, SECRET, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.stores import ChunkStore

TEXTS = ["alpha is here", "beta is there", "gamma is nowhere", "delta is a river's mouth"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_lines(tmp_path / "c.jsonl", TEXTS)


def missing(model: str, store: ChunkStore | str | Path, texts: list[str] = TEXTS) -> list[str]:
    """Which texts an engine that knows nothing of the build does not find."""
    opened = DiskStore(store) if isinstance(store, (str, Path)) else store
    engine = Engine.from_pretrained(model, store=opened)
    held = zip(engine.keys(texts), texts, strict=True)
    return [text for key, text in held if not engine.store.contains(key)]


def test_builds_then_says_that_there_is_nothing_to_do(
    model: str, corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, summary = tmp_path / "kv", tmp_path / "summary.json"
    words = ["build", model, corpus, "--kv-dir", str(store), "--report", str(summary)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 chunks: 4 prefilled, 0 already there\n")
    assert "tokens/s" in out
    found = json.loads(summary.read_text())
    expected: dict[str, Any] = {
        "engine": "threads", "workers": 1, "is_complete": True, "prefilled": 4, "there": 0,
        "failed": 0, "unreadable": 0, "failures": [], "problems": [],
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["bytes"] == sum(path.stat().st_size for path in store.rglob("*.safetensors"))
    assert found["tokens"] == found["prefilled_tokens"] > 0
    assert missing(model, store) == []
    assert cli.main(words) == 0
    assert "4 chunks: 0 prefilled, 4 already there\nlooked up in" in capsys.readouterr().out
    assert json.loads(summary.read_text())["prefilled_tokens"] == 0


def test_what_is_not_in_the_store_is_named_and_told_by_the_code(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "c.jsonl"
    write_lines(corpus, [*TEXTS, "long " * 2000])
    corpus.write_text(corpus.read_text() + "{broken\n" * 30)
    assert cli.main(["build", model, str(corpus), "--kv-dir", str(tmp_path / "kv")]) == 1
    out = capsys.readouterr().out
    assert "31 texts not in the store:\n  line 5: has 10002 tokens" in out
    assert "  line 6: it is not JSON" in out
    assert out.rstrip().endswith("and 11 more")


def test_a_folder_of_texts_is_cut_by_tokens_and_what_cannot_be_read_is_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, store = tmp_path / "texts", str(tmp_path / "kv")
    (folder / "deep").mkdir(parents=True)
    long = " ".join(f"word{number}" for number in range(60))
    (folder / "a.md").write_text(long)
    (folder / "deep" / "b.txt").write_text("short")
    (folder / "b.pdf").write_bytes(pdf(["beta"]))
    (folder / "c.txt").write_bytes(b"caf\xe9")
    (folder / "d.png").write_bytes(b"")
    words = ["build", model, str(folder), "--kv-dir", store]
    assert cli.main([*words, "--chunk-size", "100", "--chunk-overlap", "10"]) == 1
    told = capsys.readouterr().out
    assert "1 text not in the store:\n  c.txt: it is not UTF-8 text; save it as UTF-8\n" in told
    pieces = list(cut(long, make_tokenizer(), 100, 10))
    assert len(pieces) > 3
    assert missing(model, store, [*pieces, "short", "beta"]) == []
    assert missing(model, store, [long]) == [long]


def test_rows_of_a_collection_are_built_as_they_read_in_prompts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Place(tmp_path / "place")
    write(place.docs, TEXTS)
    plain = place.client.create_collection("plain", embedding_function=None)
    plain.add(ids=["a"], documents=["of nobody"], embeddings=[[0.5, 0.5]])
    store = str(tmp_path / "kv")
    words = ["build", model, "--kv-dir", store, "--chroma", str(place.chroma)]
    assert cli.main([*words, "--collection", "docs"]) == 0
    assert cli.main([*words, "--collection", "plain", "--text", "document"]) == 0
    assert missing(model, store, [*TEXTS, "of nobody"]) == []
    assert cli.main([*words, "--collection", "docs", "--text", "poem"]) == 2
    assert "there is no form of texts 'poem'" in capsys.readouterr().err
    assert cli.main([*words, "--collection", "gone"]) == 2
    assert "there is no collection 'gone', only docs, plain" in capsys.readouterr().err
    assert [row.metadata.get("kv_key") for row in Rows(plain).get()] == [None], "rows are read only"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def test_processes_fill_a_bucket(
    model: str,
    corpus: str,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    words = ["build", model, corpus, "--kv-dir", f"s3://{BUCKET}/kv"]
    assert cli.main([*words, "--engine", "processes"]) == 0
    assert "4 prefilled, 0 already there" in capsys.readouterr().out
    kept = [name for name in server.objects if name.startswith("kv/")]
    assert sum(name.endswith(".safetensors") for name in kept) == 5
    assert missing(model, RemoteStore(f"s3://{BUCKET}/kv", timeout=60)) == []
    assert cli.main(words) == 0
    assert "0 prefilled, 4 already there" in capsys.readouterr().out
    with server.refusing():
        assert cli.main(words) == 2
    assert "the store cannot be reached: s3://" in capsys.readouterr().err


def test_an_interrupted_build_says_how_far_it_came(
    model: str,
    corpus: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build = Worker.build

    def stopped(self: Worker, texts: Any, *rest: Any) -> Any:
        if texts[0].index == 3:
            raise KeyboardInterrupt
        return build(self, texts, *rest)

    monkeypatch.setattr(Worker, "build", stopped)
    summary = tmp_path / "o.json"
    words = ["build", model, corpus, "--kv-dir", str(tmp_path / "kv"), "--batch", "1"]
    assert cli.main([*words, "--report", str(summary)]) == 130
    *_, counts, farewell = capsys.readouterr().err.splitlines()
    assert counts == "until then: 3 prefilled, 0 already there"
    kept = f"chunks that are in {tmp_path / 'kv'} are kept, the same command goes on from there"
    assert farewell == f"kvcache-rag: stopped; {kept}"
    found = json.loads(summary.read_text())
    assert (found["is_complete"], found["prefilled"]) == (False, 3)


BAD = [
    ([], "say what to build: CORPUS, or --chroma"),
    (["{corpus}", "--chroma", "x", "--collection", "y"], "say what to build"),
    (["--chroma", "x"], "--chroma and --collection belong together"),
    (["--chroma", "x", "--collection", "y"], "there is no Chroma database in"),
    (["{corpus}", "--workers", "2", "--engine", "threads"], "say --engine processes"),
    (["{corpus}", "--batch", "0"], "--batch must be at least 1"),
    (["{corpus}", "--chunk-size", "10", "--chunk-overlap", "10"], "--chunk-overlap must be"),
    (["{corpus}", "--gpus", "1"], "are for --engine ray"),
    (["{corpus}", "--engine", "ray", "--gpus", "nan"], "--gpus must be at least 0"),
    (["{corpus}", "--kv-dir", "{corpus}"], "is not a folder; name another one"),
    (["{corpus}", "--kv-dir", "/proc/1/kv"], "the store /proc/1/kv cannot be written"),
    (["{corpus}", "--kv-dir", "nonsense://x"], "fsspec knows no protocol 'nonsense'"),
    (["{corpus}", "--template", "{folder}"], "there is no prompt_template.json in"),
    (["{corpus}", "--report", "{folder}/gone/o.json"], "cannot be a file"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_arguments_are_one_sentence_before_a_model_is_loaded(
    corpus: str,
    tmp_path: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "empty"
    folder.mkdir()
    given = [word.format(corpus=corpus, folder=folder) for word in words]
    store = [] if "--kv-dir" in given else ["--kv-dir", str(tmp_path / "kv")]
    assert cli.main(["build", "tiny", *given, *store]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_ray_that_is_not_installed(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    words = ["build", "tiny", corpus, "--kv-dir", str(tmp_path / "kv"), "--engine", "ray"]
    assert cli.main(words) == 2
    assert "pip install 'kvcache-rag[ray]'" in capsys.readouterr().err
