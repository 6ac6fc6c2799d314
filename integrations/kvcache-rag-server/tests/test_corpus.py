"""Corpora, workers and whole builds in this process."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from corpus_traps import saved_model, write_lines
from zoo import build, byte_tokenizer

from kvcache_rag import BestFew, DiskStore, Engine
from kvcache_rag.codecs import by_name
from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.models.adapters import note_training
from kvcache_rag.stores.folder import Folder
from kvcache_rag_server.corpus.run import Build, InProcess, Tally, batches, tidy
from kvcache_rag_server.corpus.texts import CorpusReader, Item, JsonLines, Text
from kvcache_rag_server.corpus.worker import BatchReport, BuildSettings, Failure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXTS = ["alpha is here", "beta is there", "gamma is nowhere", "delta is a river's mouth"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model: str, tmp_path: Path) -> BuildSettings:
    return BuildSettings(model=model, kv_dir=str(tmp_path / "kv"))


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_lines(tmp_path / "c.jsonl", TEXTS)


def serving(settings: BuildSettings) -> Engine:
    """An engine made apart from the builder, over the same store."""
    codec = by_name(settings.kv_codec or "native")
    return Engine.from_pretrained(
        settings.model, store=DiskStore(settings.place, codec=codec), namespace=settings.namespace
    )


def built(settings: BuildSettings, corpus: str, **options: Any) -> Build:
    build = Build(settings, JsonLines(corpus), InProcess(), **options)
    build.run()
    return build


def test_what_no_question_would_find_is_not_built(tmp_path: Path) -> None:
    """Keys that cannot move are of use to the default policy, unless it is plain reuse."""
    model = build("gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    settings = BuildSettings(model=str(tmp_path / "gpt2"), kv_dir=str(tmp_path / "kv"))
    note_training(model.config, blocks=True)
    model.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match=r"learned .* would be of no use"):
        settings.open()
    note_training(model.config, blocks=False)
    model.save_pretrained(tmp_path / "gpt2")
    engine = settings.open()
    assert engine.policy == BestFew()
    keys = engine.add(TEXTS)
    metrics = serving(settings).generate("who?", TEXTS, max_new_tokens=1).metrics
    assert metrics.hits == {"disk": 1}
    assert metrics.reused_tokens == keys[metrics.answered_from[0]].tokens


# ---------------------------------------------------------------------- corpora
def read(path: Path, content: bytes | str) -> tuple[list[Text], CorpusReader]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    reading = CorpusReader(JsonLines(str(path)))
    return list(reading.texts()), reading


def test_all_forms_of_lines_and_documents_are_read(tmp_path: Path) -> None:
    lines = [
        {"text": "one"},
        {"id": "b", "title": "Two", "text": "two"},
        {"question": "?", "documents": ["three", {"id": 4, "title": "Four", "text": "four"}]},
        {"id": "e", "data": "five"},
        {"documents": [{"id": "f", "data": {"title": "Six", "snippet": "six", "year": 6}}]},
    ]
    content = "\ufeff" + "\n\n".join(map(json.dumps, lines)) + "\r\n"
    texts, reading = read(tmp_path / "c.jsonl", content)
    assert [text.text for text in texts] == [
        *("one", "two", "three", "four", "five"),
        "snippet: six\ntitle: Six\nyear: 6",
    ]
    names = ["line 1", "line 3 (b)", "line 5, document 1", "line 5, document 2 (4)"]
    names += ["line 7 (e)", "line 9, document 1 (f)"]
    assert [text.name for text in texts] == names
    assert [text.index for text in texts] == [0, 1, 2, 3, 4, 5]
    assert reading.is_complete
    assert not reading.unreadable


def test_what_cannot_be_read_is_named_by_its_line(tmp_path: Path) -> None:
    bad = [
        b"{not json",
        b"[" * 100_000,
        b'{"text": 5}',
        b'{"title": "no text"}',
        b'"a text alone"',
        b'{"documents": "one"}',
        b'{"documents": ["good", 7]}',
        b'{"text": "\xff"}',
        b'{"text": "half \\ud83d of a pair"}',
        b'{"data": 5}',
        b'{"data": {"a": "half \\ud83d of a pair"}}',
    ]
    texts, reading = read(tmp_path / "c.jsonl", b"\n".join([*bad, b'{"text": "last"}']))
    assert [text.text for text in texts] == ["good", "last"]
    assert reading.unreadable == len(bad)
    found = dict(reading.problems)
    places = ["1", "2", "3", "4", "5", "6", "7, document 2", "8", "9", "10", "11"]
    assert list(found) == [f"line {place}" for place in places]
    assert all(reason and "\n" not in reason for reason in found.values())


def test_equal_and_empty_texts_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_lines(path, ["a", "b", " \n", "a", "", "b", "b", "c"])
    reading = CorpusReader(JsonLines(str(path)))
    assert [(text.index, text.text) for text in reading.texts()] == [(0, "a"), (1, "b"), (2, "c")]
    assert (reading.texts_found, reading.repeated, reading.empty) == (3, 3, 2)


def test_a_corpus_is_read_as_it_is_asked_for() -> None:
    numbers = count()

    class Endless:
        def items(self) -> Iterator[Item]:
            return (Item(f"item {number}", f"text {number}") for number in numbers)

    groups = batches(CorpusReader(Endless()).texts(), 3)
    for first in (0, 3):
        assert [text.index for text in next(groups)] == [first, first + 1, first + 2]
    assert next(numbers) == 6


def test_a_corpus_that_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"the corpus .*gone cannot be read"):
        list(JsonLines(str(tmp_path / "gone")).items())


def test_reports_survive_json() -> None:
    report = BatchReport((1, 2), 1, 0, 9, 5, 100, (Failure(2, "line 2", "too long"),), "ab", "")
    assert BatchReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    tally = Tally()
    tally.add(report)
    tally.add(report)
    assert (tally.done, tally.prefilled, tally.failed, tally.nbytes) == (4, 2, 2, 200)
    reading = CorpusReader(JsonLines("x"), texts_found=2, problems=[("line 1", "bad")])
    other = CorpusReader(JsonLines("x"))
    other.take(json.loads(json.dumps(reading.counts())))
    assert other == reading


# ---------------------------------------------------------------------- builds
@pytest.mark.parametrize("codec", ["native", "int8"])
def test_what_was_built_is_a_hit_where_it_is_used(
    settings: BuildSettings, corpus: str, tmp_path: Path, codec: str
) -> None:
    settings = settings.model_copy(update={"kv_codec": codec, "namespace": "tenant"})
    tally = built(settings, corpus).tally
    assert (tally.prefilled, tally.there) == (4, 0)
    engine = serving(settings)
    assert tally.spec == engine.spec
    keys = engine.keys(TEXTS)
    assert all(map(engine.store.contains, keys))
    files = {path.stem: path.stat().st_size for path in tmp_path.rglob("*.safetensors")}
    assert {key.digest for key in keys} < files.keys()
    assert len(files) == 5, "the prefix is the fifth"
    assert tally.tokens == tally.prefilled_tokens == sum(key.tokens for key in keys)
    assert tally.nbytes == sum(files.values())
    metrics = engine.generate("Where?", TEXTS, max_new_tokens=2).metrics
    assert (metrics.misses, metrics.prefilled_tokens) == (0, 0)
    other = serving(settings.model_copy(update={"namespace": ""}))
    assert not any(map(other.store.contains, other.keys(TEXTS)))


def test_a_corpus_that_grew_costs_what_it_grew_by(settings: BuildSettings, tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    built(settings, write_lines(corpus, TEXTS[:2]))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    grown = built(settings, write_lines(corpus, [*TEXTS, TEXTS[0]]), batch=3)
    assert (grown.tally.prefilled, grown.tally.there, grown.reading.repeated) == (2, 2, 1)
    again = built(settings, str(corpus))
    assert (again.tally.prefilled, again.tally.there, again.tally.nbytes) == (0, 4, 0)
    assert again.tally.prefilled_tokens == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_text_that_cannot_be_computed_is_named_and_harms_no_other(
    settings: BuildSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Engine.add

    def fragile(self: Engine, texts: Any, **options: Any) -> Any:
        if TEXTS[1] in texts:
            raise RuntimeError("CUDA error: an\nillegal address")
        return add(self, texts, **options)

    monkeypatch.setattr(Engine, "add", fragile)
    tally = built(settings, write_lines(tmp_path / "c.jsonl", [*TEXTS, "long " * 2000])).tally
    assert (tally.prefilled, tally.failed) == (3, 2)
    broken, long = sorted(tally.failures, key=lambda one: one.index)
    reason = "cannot be prefilled: RuntimeError: CUDA error: an illegal address"
    assert broken == Failure(1, "line 2", reason)
    assert long.name == "line 5"
    assert long.reason.startswith("has 10002 tokens")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that the store cannot write; "" stands for all of them."""
    put, refused = Folder.put, [""]

    def full(self: Folder, name: str, *rest: Any) -> bool:
        if any(digest in name for digest in refused):
            raise OSError(28, "No space left on device")
        return put(self, name, *rest)

    monkeypatch.setattr(Folder, "put", full)
    return refused


def test_a_chunk_that_is_not_kept_is_named_and_the_rest_is_built(
    settings: BuildSettings, corpus: str, refusing: list[str]
) -> None:
    refusing[:] = [key.digest for key in serving(settings).keys(TEXTS[:1])]
    for prefilled in (3, 0):  # the second time all others are there: it may be a passing fault
        tally = built(settings, corpus, batch=1).tally
        assert (tally.prefilled, tally.failed) == (prefilled, 1)
        assert "No space left" in tally.failures[0].reason
    refusing.clear()
    assert built(settings, corpus).tally.prefilled == 1


def test_a_chunk_that_is_declined_is_named(
    settings: BuildSettings, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, (declined,) = DiskStore.put, serving(settings).keys(TEXTS[:1])

    def crowded(self: DiskStore, key: Any, chunk: Any, generation: Any = None) -> bool:
        if key != declined:
            return put(self, key, chunk, generation)
        self._counters.declined("another process was making room")
        return False

    monkeypatch.setattr(DiskStore, "put", crowded)
    tally = built(settings, corpus).tally
    assert (tally.prefilled, tally.failed) == (3, 1)
    assert "making room" in tally.failures[0].reason


@pytest.mark.parametrize(("batch", "named"), [(4, 4), (1, 3)])
def test_a_full_store_ends_the_build(
    settings: BuildSettings, corpus: str, refusing: list[str], batch: int, named: int
) -> None:
    build = Build(settings, JsonLines(corpus), InProcess(), batch=batch)
    with pytest.raises(InvalidInputError, match=r"nothing can be stored in .*No space left"):
        build.run()
    assert build.tally.failed == named
    refusing.clear()
    assert built(settings, corpus).tally.prefilled == 4


def test_torsos_of_killed_workers_go_and_nothing_else(
    settings: BuildSettings, corpus: str, tmp_path: Path
) -> None:
    def held() -> set[Path]:
        found = (tmp_path / "kv").rglob("*")
        return {path for path in found if path.is_file() and path.suffix != ".lock"}

    spec = built(settings, corpus).tally.spec
    files = held()
    folder = next(path for path in files if path.suffix == ".safetensors").parent
    (folder / f".tmp-{'0' * 32}").write_bytes(b"half")
    other = folder.parent / f".tmp-{'1' * 32}"
    other.write_bytes(b"of a manifest")
    assert tidy(DiskStore(settings.place), spec, "another tenant") == 0
    assert built(settings, corpus).tidied == 1
    assert held() == {other, *files}


def test_an_empty_corpus_is_said(settings: BuildSettings, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no text in the corpus"):
        built(settings, write_lines(tmp_path / "c.jsonl", ["", " "]))
