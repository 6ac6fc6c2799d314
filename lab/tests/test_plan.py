"""`kvcache-rag plan` counts what would be stored, and `benchmarks/sizes.py` what it would weigh."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from documents import pdf
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, PromptTemplate, cli
from kvcache_rag.codecs import by_name
from kvcache_rag.commands import listing
from kvcache_rag_server.commands.corpora import cut

if TYPE_CHECKING:
    from types import ModuleType

TEMPLATE = PromptTemplate(system="Read.\n", chunk_start="[", chunk_end="]")
LINES = [f"line {number} says that {number} is a number.\n" for number in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Texts, and the small model wherever one is loaded."""

    def load(*_: Any, **__: Any) -> Any:
        return make_model(), make_tokenizer(), TEMPLATE

    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    (texts / ".hidden").mkdir()
    (texts / "a.txt").write_text("".join(LINES))
    (texts / "deep" / "b.md").write_text("".join(LINES[:10]))
    (texts / "empty.txt").write_text(" \n")
    (texts / "data.csv").write_text("1,2")
    (texts / ".hidden" / "c.txt").write_text("hidden")
    return str(texts)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["plan", *words, "--model", "x", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def pieces(size: int, overlap: int) -> list[str]:
    texts = ("".join(LINES), "".join(LINES[:10]))
    return [piece for text in texts for piece in cut(text, make_tokenizer(), size, overlap)]


def test_foretells_chunks_tokens_and_bytes(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, folder, "--chunk-size", "100", "--overlap", "0", "--sample", "0")
    texts = pieces(100, 0)
    assert found["files"] == 2
    assert found["chunks"] + found["repeated"] == len(texts)
    assert found["repeated"] > 0, "both files begin alike"
    assert found["measured"] is None
    for codec in ("native", "int8", "int4"):
        store = DiskStore(tmp_path / codec, codec=by_name(codec), durable=False)
        engine = Engine(make_model(), make_tokenizer(), store=store, template=TEMPLATE)
        keys = set(engine.add(texts))
        assert found["chunks"] == len(keys)
        assert found["tokens"] == sum(key.tokens for key in keys)
        assert found["longest"] == max(key.tokens for key in keys) == 102
        on_disk = sum(store.path(key).stat().st_size for key in keys)
        assert found["bytes"][f"disk {codec}"] == on_disk
        in_memory = sum(engine.nbytes(key) + 4 * key.tokens for key in keys)
        assert found["bytes"]["memory"] == in_memory


def test_the_time_is_measured_on_a_few_chunks(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, folder, "--chunk-size", "100", "--overlap", "10", "--sample", "3")
    measured = found["measured"]
    assert measured["chunks"] == 3
    assert 0 < measured["tokens"] <= 3 * found["longest"]
    speed = measured["tokens"] / measured["seconds"]
    assert found["seconds"] == pytest.approx(found["tokens_to_prefill"] / speed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"], "nothing is stored"


@pytest.mark.parametrize("count", [1, 1000])
def test_any_number_of_chunks_can_be_timed(
    folder: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, folder, "--chunk-size", "400", "--sample", str(count))
    assert found["measured"]["chunks"] == min(count, found["chunks"])


@pytest.mark.parametrize("codec", ["native", "int4"])
def test_what_a_store_holds_is_not_planned_again(
    folder: str, tmp_path: Path, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = DiskStore(tmp_path / "kv", codec=by_name(codec), durable=False)
    engine = Engine(make_model(), make_tokenizer(), store=store, template=TEMPLATE)
    texts = pieces(100, 0)
    held = set(engine.add(texts[:5]))
    words = [folder, "--chunk-size", "100", "--overlap", "0", "--kv", str(tmp_path / "kv")]
    files = sorted(tmp_path.rglob("*"))
    found = planned(capsys, *words, "--codec", codec)
    assert found["stored"] == len(held)
    assert found["tokens_to_prefill"] == found["tokens"] - sum(key.tokens for key in held)
    engine.add(texts[5:9])
    assert planned(capsys, *words, "--codec", "int8", "--sample", "0")["stored"] == 0
    assert not set(files) - set(tmp_path.rglob("*"))
    engine.add(texts)
    found = planned(capsys, *words, "--codec", codec)
    assert (found["tokens_to_prefill"], found["seconds"], found["measured"]) == (0, 0.0, None)


def test_it_is_told_to_people(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", folder, "--model", "x", "--codec", "int8", "--sample", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 files, " in out
    (chosen,) = (line for line in out.splitlines() if line.endswith("chosen"))
    assert chosen.startswith("disk int8")
    assert "tokens/s, measured on 2 chunks" in out


def test_what_ingest_reads_is_planned_and_what_it_leaves_out_is_said(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(folder, "c.pdf").write_bytes(pdf(["The harbour master is called Sabine."]))
    Path(folder, "latin.txt").write_bytes(b"caf\xe9")
    assert cli.main(["plan", folder, "--model", "x", "--sample", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 files, ")
    assert out.splitlines()[-4:] == [
        "left out 3 files:",
        "  empty.txt: there is no text in it",
        "  latin.txt: it is not UTF-8 text; save it as UTF-8",
        "  data.csv: only .docx, .htm, .html, .md, .pdf, .txt files are read",
    ]
    told = planned(capsys, folder, "--sample", "0")
    assert (told["files"], sorted(told["left_out"])) == (3, ["data.csv", "empty.txt", "latin.txt"])


def test_pieces_overlap_and_lose_nothing() -> None:
    text = "".join(LINES)
    assert "".join(cut(text, make_tokenizer(), 64, 0)) == text
    parts = list(cut(text, make_tokenizer(), 64, 16))
    assert all(one[-16:] == other[:16] for one, other in pairwise(parts))
    assert "".join([parts[0], *(part[16:] for part in parts[1:])]) == text
    assert list(cut("short", make_tokenizer(), 64, 16)) == ["short"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{nowhere}"], "there is no folder"),
        pytest.param(
            ["{empty}"],
            "there is no file with text (.docx, .htm, .html, .md, .pdf, .txt) in ",
            id="words1-there is no .md or .txt file with text",
        ),
        (["{texts}", "--overlap", "256"], "--overlap must be at least 0 and less"),
        (["{texts}", "--overlap", "-1"], "--overlap must be at least 0 and less"),
        (["{texts}", "--sample", "-1"], "--sample must be at least 0"),
        (["{texts}", "--kv", "{nowhere}"], "there is no store"),
        (["{texts}", "--chunk-size", "5000"], "tokens"),
        (["{binary}"], "is not UTF-8 text"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    folder: str, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("empty", "binary"):
        (tmp_path / name).mkdir()
    (tmp_path / "binary" / "a.txt").write_bytes(b"\xff\xfe\xfa")
    Path(folder, "long.txt").write_text("x" * 9000)
    names = {name: str(tmp_path / name) for name in ("nowhere", "empty", "texts", "binary")}
    assert cli.main(["plan", *(word.format(**names) for word in words), "--model", "x"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "nowhere").exists()


# ---------------------------------------------------------------------- benchmarks/sizes.py
@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    path = Path(__file__).parents[2] / "lab" / "benchmarks" / "sizes.py"
    spec = importlib.util.spec_from_file_location("benchmark_sizes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_sizes_are_those_of_written_files(
    sizes: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sizes.main(["--tokens", "70", "--json", str(tmp_path / "sizes.json")]) == 0
    assert "checked" in capsys.readouterr().out
    rows = json.loads((tmp_path / "sizes.json").read_text())
    assert len(rows) == 12
    for row in rows:
        if row["model"] == "tiny":
            codec = by_name(row["codec"])
            assert sizes.written_bytes(sizes.SHAPES["tiny"], codec, 70) == row["file_bytes"]


def test_the_ratios_of_the_codecs_are_as_promised(sizes: ModuleType) -> None:
    rows = {(row["model"], row["codec"]): row for row in sizes.sizes(512)}
    assert rows["Qwen2.5-0.5B", "native"]["tensor_bytes"] == 6291456
    native = rows["Qwen2.5-0.5B", "native"]["file_bytes"]
    assert native / rows["Qwen2.5-0.5B", "int8"]["file_bytes"] >= 1.93
    assert native / rows["Qwen2.5-0.5B", "int4"]["file_bytes"] >= 3.5
    assert rows["Qwen2-7B", "native"]["tensor_bytes"] == 28 << 20


def test_a_wrong_size_is_told(
    sizes: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "written_bytes", lambda *_: 1)
    assert sizes.main(["--tokens", "8"]) == 1
    assert "native has 1, not " in capsys.readouterr().out


# ---------------------------------------------------------------------- numbers for people
@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_has_two_units(seconds: float, written: str) -> None:
    assert listing.duration(seconds) == written


def test_sizes_and_times_are_written_for_people() -> None:
    sizes = (0, 999, 1000, 1_500_000, 10**12, 10**15)
    written = ["0 bytes", "999 bytes", "1.0 kB", "1.5 MB", "1.0 TB", "1000.0 TB"]
    assert [listing.size(one) for one in sizes] == written
    assert listing.moment(86_400) == "1970-01-02 00:00"
    assert listing.moment(0) == "never"
    assert (
        listing.model_name({"model": "org/name", "revision": "abcdef0123"}) == "org/name@abcdef01"
    )
