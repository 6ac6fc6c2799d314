"""Chunks of vector stores that are no Chroma collections: claimed, released and collected."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate, TieredStore, cli
from kvcache_rag.integration import IngestedText, TextPrefiller
from kvcache_rag.stores import RemoteStore

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag import ChunkStore

TEXTS = {"a": "alpha is here", "b": "beta is there", "c": "gamma is nowhere"}
TEMPLATE = PromptTemplate(system="Read.\n")


class Place:
    """A folder of chunks, and an engine that fills it."""

    def __init__(self, folder: Path) -> None:
        self.kv = folder / "kv"
        self.store = DiskStore(self.kv, durable=False, release_grace=0.0)
        self.engine = self.engine_over(self.store)

    def engine_over(self, store: ChunkStore, template: PromptTemplate = TEMPLATE) -> Engine:
        return Engine(make_model(), make_tokenizer(), store=store, template=template)

    def named(self, name: str) -> TextPrefiller:
        return TextPrefiller(self.engine, name)

    def held(self, engine: Engine | None = None) -> str:
        """Which of the texts are stored after a sweep."""
        engine = engine or self.engine
        engine.store.sweep()
        keys = zip(TEXTS, engine.keys([*TEXTS.values()]), strict=True)
        return "".join(letter for letter, key in keys if engine.store.contains(key))

    def run(self, *words: str) -> int:
        return cli.main(["store", "gc", str(self.kv), *words])

    def unused_for(self, letter: str, days: float) -> None:
        (key,) = self.engine.keys([TEXTS[letter]])
        before = time.time() - days * 86400
        os.utime(self.store.path(key), (before, before))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def write(prefiller: TextPrefiller, letters: str, document: str = "") -> None:
    rows = [IngestedText(f"row {letter}", TEXTS[letter], document) for letter in letters]
    prefiller.claim(rows, prefiller.prefill(rows))


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    return captured.err


def test_gc_releases_what_no_row_of_the_store_uses(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place.named("docs"), "ab")
    place.engine.add([TEXTS["c"]], owner="docs")  # as when the row was never written
    assert place.run("--name", "docs", "--grace", "0") == 0
    out = capsys.readouterr().out
    assert "store docs: 2 chunks in use" in out
    assert "1 chunk (" in out
    assert "nothing was changed" in out
    assert place.held() == "abc"
    assert place.run("--name", "docs", "--grace", "0", "--yes") == 0
    assert place.held() == "ab"
    assert place.run("--name", "docs", "--grace", "0", "--yes") == 0
    assert place.held() == "ab"


def test_gc_leaves_young_claims_alone(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    write(place.named("docs"), "a")
    place.engine.add([TEXTS["c"]], owner="docs")
    assert place.run("--name", "docs", "--yes") == 0
    assert "1 claimed too recently" in capsys.readouterr().out
    assert place.held() == "ac"


def test_no_other_store_loses_a_chunk(place: Place) -> None:
    first, second = place.named("first"), place.named("second")
    write(first, "ab")
    write(second, "b")
    first.clear()
    assert place.held() == "b"
    write(first, "a")
    place.engine.add([TEXTS["b"]], owner="first")
    assert place.run("--name", "first", "--grace", "0", "--yes") == 0
    assert place.held() == "ab"
    assert place.run("--owner", "first", "--grace", "0", "--yes") == 0
    assert place.held() == "b"


def test_a_store_that_is_gone_is_released_as_a_whole(place: Place) -> None:
    write(place.named("docs"), "ab")
    assert place.run("--owner", "docs", "--grace", "0", "--yes") == 0
    assert place.held() == ""
    write(place.named("docs"), "c")
    assert place.run("--name", "docs", "--grace", "0", "--yes") == 0
    assert place.held() == "c", "and nothing is left of what it was"


def test_what_no_question_used_for_long_is_released(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place.named("docs"), "abc")
    write(place.named("other"), "b")
    place.unused_for("a", 8)
    place.unused_for("b", 8)
    place.unused_for("c", 6)
    words = ("--name", "docs", "--unused-for", "7", "--grace", "0")
    assert place.run(*words) == 0
    out = capsys.readouterr().out
    assert "store docs: 1 chunk in use" in out
    assert "2 chunks (" in out
    assert place.run(*words, "--yes") == 0
    assert place.held() == "bc", "the other store wants one of them"
    place.named("docs").drop(ids=["row a"])
    write(place.named("docs"), "a")
    assert place.run("--name", "docs", "--grace", "0", "--yes") == 0
    assert place.held() == "abc"


def test_gc_says_what_it_cannot_do(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    write(place.named("docs"), "a")
    assert place.run("--name", "dosc") == 2
    assert "no vector store was prefilled under the name 'dosc'" in refused(capsys)
    assert place.run("--unused-for", "7", "--owner", "docs") == 2
    assert "--name" in refused(capsys)
    for days in ("0", "-1", "nan"):
        assert place.run("--name", "docs", "--unused-for", days) == 2
        assert "above 0" in refused(capsys)
    (record,) = place.kv.glob("*/records/*")
    record.write_bytes(b"no database" * 99)
    assert place.run("--name", "docs", "--grace", "0", "--yes") == 2
    assert "cannot be read" in refused(capsys)
    assert place.held() == "a"


def test_the_remote_tier_is_released_too(place: Place, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    remote = RemoteStore(url, release_grace=0.0)
    place.engine = place.engine_over(TieredStore(place.store, remote))
    write(place.named("docs"), "a")
    (key,) = place.engine.add([TEXTS["b"]], owner="docs")
    assert remote.contains(key)
    words = ("--remote", url, "--name", "docs", "--grace", "0", "--yes")
    assert place.run(*words) == 0
    assert not remote.contains(key)
    assert place.held() == "a"


def test_two_models_of_one_store_keep_their_chunks(place: Place) -> None:
    other = place.engine_over(place.store, PromptTemplate(system="Another instruction.\n"))
    write(place.named("docs"), "ab")
    write(TextPrefiller(other, "docs"), "ab")
    assert place.run("--name", "docs", "--grace", "0", "--yes") == 0
    assert (place.held(), place.held(other)) == ("ab", "ab")
    place.named("docs").drop(ids=["row a"])
    assert (place.held(), place.held(other)) == ("b", "b"), "a row that is gone, is for both"


def test_a_document_takes_its_rows_with_it(place: Place) -> None:
    write(place.named("docs"), "ab", document="one")
    write(place.named("docs"), "c", document="two")
    place.named("docs").drop(documents=["one", ""])
    assert place.held() == "c"


def test_a_row_that_became_blank_releases_its_chunk(place: Place) -> None:
    docs = place.named("docs")
    write(docs, "ab")
    blank = [IngestedText("row a", " ")]
    docs.claim(blank, docs.prefill(blank))
    assert place.held() == "b"


def test_in_memory_the_process_knows_its_rows(place: Place) -> None:
    place.engine = place.engine_over(MemoryStore(release_grace=0.0))
    write(place.named("docs"), "ab")
    place.named("docs").drop(ids=["row b"])
    assert place.held() == "a"


def test_tenants_do_not_release_each_others_chunks(place: Place) -> None:
    other = place.engine.in_namespace("tenant")
    write(place.named("docs"), "a")
    write(TextPrefiller(other, "docs"), "a")
    TextPrefiller(other, "docs").clear()
    assert (place.held(), place.held(other)) == ("a", "")


def test_what_cannot_be_recorded_is_not_claimed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    write(place.named("docs"), "a")
    (record,) = place.kv.glob("*/records/*")
    record.write_bytes(b"no database" * 99)
    write(place.named("docs"), "b")
    assert "are not claimed" in caplog.text
    assert place.held() == "ab"
    assert len([*place.kv.rglob("*.owner-*")]) == 1
    place.named("docs").clear()
    assert "are not released" in caplog.text
    assert place.held() == "ab"
