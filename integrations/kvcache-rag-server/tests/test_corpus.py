"""Corpora, workers and whole builds in this process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from corpus_traps import TEMPLATE, saved_model, write_lines
from small import make_model, make_tokenizer
from zoo import build, byte_tokenizer

from kvcache_rag import BestFew, DiskStore, Engine
from kvcache_rag.codecs import by_name
from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.models.adapters import note_training
from kvcache_rag.stores.folder import Folder
from kvcache_rag_server.corpus.run import Build, InProcess, Tally, batches, tidy
from kvcache_rag_server.corpus.texts import Item, JsonLines, Reading, Text
from kvcache_rag_server.corpus.worker import BatchReport, BuildSettings, Failure, Worker

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["alpha is here", "beta is there", "gamma is nowhere", "delta is a river's mouth"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model: str, tmp_path: Path) -> BuildSettings:
    return BuildSettings(model=model, kv_dir=str(tmp_path / "kv"))


def serving(settings: BuildSettings) -> Engine:
    """An engine made apart from the builder, over the same store."""
    codec = by_name(settings.kv_codec or "native")
    return Engine.from_pretrained(
        settings.model,
        store=DiskStore(settings.place, codec=codec),
        namespace=settings.namespace,
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
def read(path: Path, content: bytes | str) -> tuple[list[Text], Reading]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    reading = Reading(JsonLines(str(path)))
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
    reading = Reading(JsonLines(str(path)))
    assert [(text.index, text.text) for text in reading.texts()] == [(0, "a"), (1, "b"), (2, "c")]
    assert (reading.texts_found, reading.repeated, reading.empty) == (3, 3, 2)


def test_a_corpus_is_read_as_it_is_asked_for() -> None:
    asked: list[int] = []

    class Endless:
        def items(self) -> Any:
            number = 0
            while True:
                asked.append(number)
                yield Item(f"item {number}", f"text {number}")
                number += 1

    groups = batches(Reading(Endless()).texts(), 3)
    assert [text.index for text in next(groups)] == [0, 1, 2]
    assert [text.index for text in next(groups)] == [3, 4, 5]
    assert len(asked) == 6


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
    reading = Reading(JsonLines("x"), texts_found=2, problems=[("line 1", "bad")])
    other = Reading(JsonLines("x"))
    other.take(json.loads(json.dumps(reading.counts())))
    assert other == reading


# ---------------------------------------------------------------------- builds
@pytest.mark.parametrize("codec", ["native", "int8"])
def test_what_was_built_is_a_hit_where_it_is_used(
    settings: BuildSettings, tmp_path: Path, codec: str
) -> None:
    settings = BuildSettings(
        model=settings.model, kv_dir=settings.kv_dir, kv_codec=codec, namespace="tenant"
    )
    build = built(settings, write_lines(tmp_path / "c.jsonl", TEXTS))
    assert (build.tally.prefilled, build.tally.there, build.is_whole) == (4, 0, True)
    engine = serving(settings)
    assert build.tally.spec == engine.spec
    keys = engine.keys(TEXTS)
    assert all(map(engine.store.contains, keys))
    files = {path.stem for path in (tmp_path / "kv").rglob("*.safetensors")}
    assert {key.digest for key in keys} < files
    assert len(files) == 5, "the prefix is the fifth"
    assert build.tally.tokens == build.tally.prefilled_tokens == sum(key.tokens for key in keys)
    assert build.tally.nbytes == sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))
    answer = engine.generate("Where?", TEXTS, max_new_tokens=2)
    assert answer.metrics.misses == 0
    assert answer.metrics.prefilled_tokens == 0
    other = BuildSettings(model=settings.model, kv_dir=settings.kv_dir, kv_codec=codec)
    assert not any(map(serving(other).store.contains, serving(other).keys(TEXTS)))


def test_a_template_decides_the_keys(settings: BuildSettings, tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", TEXTS)
    own = BuildSettings(model=settings.model, kv_dir=settings.kv_dir, system_prompt="Be brief.\n")
    assert built(settings, corpus).tally.spec != built(own, corpus).tally.spec
    engine = Engine(
        make_model(),
        make_tokenizer(),
        template=own.prompt_template(TEMPLATE),
        store=DiskStore(settings.place),
    )
    assert engine.template.system == "Be brief.\n"
    assert engine.template.chunk_start == TEMPLATE.chunk_start


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


def test_a_text_that_is_too_long_is_named_and_the_rest_is_built(
    settings: BuildSettings, tmp_path: Path
) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", [TEXTS[0], "long " * 2000, TEXTS[1]])
    build = built(settings, corpus)
    assert (build.tally.prefilled, build.tally.failed, build.is_whole) == (2, 1, False)
    (failure,) = build.tally.failures
    assert failure.name == "line 2"
    assert failure.reason.startswith("has 10002 tokens")


def test_a_text_that_cannot_be_computed_harms_no_other(
    settings: BuildSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Engine.add

    def fragile(self: Engine, texts: Any, **options: Any) -> Any:
        if TEXTS[1] in texts:
            raise RuntimeError("CUDA error: an\nillegal address")
        return add(self, texts, **options)

    monkeypatch.setattr(Engine, "add", fragile)
    build = built(settings, write_lines(tmp_path / "c.jsonl", TEXTS))
    assert (build.tally.prefilled, build.tally.failed) == (3, 1)
    reason = "cannot be prefilled: RuntimeError: CUDA error: an illegal address"
    assert build.tally.failures == [Failure(1, "line 2", reason)]


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
    settings: BuildSettings, tmp_path: Path, refusing: list[str]
) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", TEXTS)
    refusing[:] = [key.digest for key in serving(settings).keys(TEXTS[:1])]
    for prefilled in (3, 0):  # the second time all others are there: it may be a passing fault
        build = built(settings, corpus, batch=1)
        assert (build.tally.prefilled, build.tally.failed) == (prefilled, 1)
        assert "No space left" in build.tally.failures[0].reason
    refusing.clear()
    assert built(settings, corpus).tally.prefilled == 1


def test_a_chunk_that_is_declined_is_named(
    settings: BuildSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", TEXTS)
    put, (declined,) = DiskStore.put, serving(settings).keys(TEXTS[:1])

    def crowded(self: DiskStore, key: Any, chunk: Any, generation: Any = None) -> bool:
        if key != declined:
            return put(self, key, chunk, generation)
        self._counters.declined("another process was making room")
        return False

    monkeypatch.setattr(DiskStore, "put", crowded)
    build = built(settings, corpus)
    assert (build.tally.prefilled, build.tally.failed) == (3, 1)
    assert "making room" in build.tally.failures[0].reason


def test_a_full_store_ends_the_build(
    settings: BuildSettings, tmp_path: Path, refusing: list[str]
) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", TEXTS)
    for batch, named in ((4, 4), (1, 3)):
        build = Build(settings, JsonLines(corpus), InProcess(), batch=batch)
        with pytest.raises(InvalidInputError, match=r"nothing can be stored in .*No space left"):
            build.run()
        assert build.tally.failed == named
    refusing.clear()
    assert built(settings, corpus).tally.prefilled == 4


def test_an_interrupted_build_goes_on(
    settings: BuildSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", TEXTS)
    build = Worker.build

    def stopped(self: Worker, texts: Any, *rest: Any) -> BatchReport:
        if texts[0].index == 2:
            raise KeyboardInterrupt
        return build(self, texts, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "build", stopped)
        first = Build(settings, JsonLines(corpus), InProcess(), batch=1)
        with pytest.raises(KeyboardInterrupt):
            first.run()
    assert first.tally.prefilled == 2
    assert built(settings, corpus).tally.prefilled == 2


def test_torsos_of_killed_workers_go_and_nothing_else(
    settings: BuildSettings, tmp_path: Path
) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", TEXTS)
    spec = built(settings, corpus).tally.spec
    files = set((tmp_path / "kv").rglob("*"))
    some = next(path for path in files if path.suffix == ".safetensors")
    torso = some.parent / f".tmp-{'0' * 32}"
    torso.write_bytes(b"half")
    other = some.parent.parent / f".tmp-{'1' * 32}"
    other.write_bytes(b"of a manifest")
    assert tidy(DiskStore(settings.place), spec, "another tenant") == 0
    assert built(settings, corpus).tidied == 1
    left = {one for one in (tmp_path / "kv").rglob("*") if one.is_file() and one.suffix != ".lock"}
    assert left == {other, *(one for one in files if one.is_file() and one.suffix != ".lock")}


def test_a_store_that_cannot_be_written_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="is not a folder"):
        BuildSettings(model="tiny", kv_dir=str(tmp_path / "file")).check_store()
    with pytest.raises(InvalidInputError, match=r"the store /proc/1/kv cannot be written"):
        BuildSettings(model="tiny", kv_dir="/proc/1/kv").check_store()


def test_an_empty_corpus_is_said(settings: BuildSettings, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no text in the corpus"):
        built(settings, write_lines(tmp_path / "c.jsonl", ["", " "]))
