"""The record of which rows of a vector store use which chunks."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from kvcache_rag import DiskStore, InvalidInputError, MemoryStore, TieredStore
from kvcache_rag.integration.record import OwnerRecord, Use, known_record
from kvcache_rag.stores.disk.folders import identity, namespace_folder

if TYPE_CHECKING:
    from pathlib import Path

SPEC, OTHER = "1" * 64, "2" * 64


def use(letter: str, spec: str = SPEC) -> Use:
    return Use(letter * 64, spec, 7)


def in_folder(folder: Path, name: str = "docs") -> OwnerRecord:
    return OwnerRecord.beside(TieredStore(MemoryStore(), DiskStore(folder)), "", name)


@pytest.fixture(params=["folder", "memory"])
def record(request: pytest.FixtureRequest, tmp_path: Path) -> OwnerRecord:
    if request.param == "folder":
        return in_folder(tmp_path)
    return OwnerRecord.beside(MemoryStore(), "", "docs")


def test_a_chunk_is_unused_when_its_last_row_is_gone(record: OwnerRecord) -> None:
    assert record.put({"1": ("", use("a")), "2": ("", use("a")), "3": ("", use("b"))}) == []
    assert record.drop(ids=["1"]) == []
    assert record.chunks() == {"a" * 64, "b" * 64}
    assert record.drop(ids=["2", "unknown"]) == [use("a")]
    assert record.using(["a" * 64, "b" * 64]) == {"b" * 64}
    assert record.drop(ids=["2"]) == []


def test_a_row_that_is_replaced_lets_go_of_what_it_used(record: OwnerRecord) -> None:
    record.put({"1": ("", use("a"))})
    assert record.put({"1": ("", use("a"))}) == []
    assert record.put({"1": ("", use("b"))}) == [use("a")]
    assert record.chunks() == {"b" * 64}


def test_two_rows_can_exchange_their_chunks(record: OwnerRecord) -> None:
    record.put({"1": ("", use("a")), "2": ("", use("b"))})
    assert record.put({"1": ("", use("b")), "2": ("", use("a"))}) == []


def test_rows_are_dropped_by_their_document(record: OwnerRecord) -> None:
    rows = {"1": ("one", use("a")), "2": ("one", use("b")), "3": ("two", use("b"))}
    record.put({**rows, "4": ("", use("c"))})
    assert record.drop(documents=["one"]) == [use("a")]
    assert record.drop(documents=["", "unknown"]) == []
    assert record.chunks() == {"b" * 64, "c" * 64}


def test_models_keep_their_chunks_apart_and_a_row_drops_both(record: OwnerRecord) -> None:
    record.put({"1": ("", use("a"))})
    assert record.put({"1": ("", use("b", OTHER))}) == []
    assert {*record.drop(ids=["1"])} == {use("a"), use("b", OTHER)}


def test_clearing_gives_all_that_was_used(record: OwnerRecord) -> None:
    record.put({"1": ("", use("a")), "2": ("", use("a")), "3": ("", use("b"))})
    assert {*record.clear()} == {use("a"), use("b")}
    assert record.chunks() == set()


def test_chunks_are_forgotten_with_all_their_rows(record: OwnerRecord) -> None:
    record.put({"1": ("", use("a")), "2": ("", use("a")), "3": ("", use("b"))})
    record.forget(["a" * 64])
    assert record.chunks() == {"b" * 64}


def test_a_failed_write_changes_nothing(record: OwnerRecord) -> None:
    record.put({"1": ("", use("a"))})
    with pytest.raises(sqlite3.Error):
        record.put({"1": ("", use("b")), "2": ("", Use("c", SPEC, object()))})  # type: ignore[arg-type]
    assert record.chunks() == {"a" * 64}


def test_it_lies_beside_the_chunks_for_its_user_only(tmp_path: Path) -> None:
    in_folder(tmp_path).put({"secret": ("private.pdf", use("a"))})
    (file,) = tmp_path.glob("*/records/*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    content = file.read_bytes()
    assert b"secret" not in content
    assert b"private" not in content
    assert in_folder(tmp_path).chunks() == {"a" * 64}
    assert in_folder(tmp_path, "other").chunks() == set()


def test_it_goes_with_its_namespace(tmp_path: Path) -> None:
    record, store = in_folder(tmp_path), DiskStore(tmp_path)
    record.put({"1": ("", use("a"))})
    store.delete_namespace("")
    assert not [*tmp_path.glob("*/records/*")]
    assert record.chunks() == set()
    record.put({"1": ("", use("b"))})
    assert record.chunks() == {"b" * 64}


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    record, outside = in_folder(tmp_path / "kv"), tmp_path / "outside"
    record.put({})
    os.unlink(str(record.path))
    outside.write_bytes(b"")
    os.symlink(outside, str(record.path))
    with pytest.raises(OSError, match="something else than a file"):
        record.put({"1": ("", use("a"))})
    assert outside.read_bytes() == b""


def test_a_damaged_record_is_told_of(tmp_path: Path) -> None:
    record, folder = in_folder(tmp_path), namespace_folder(str(tmp_path), "")
    assert known_record(folder, identity("docs")) is None
    record.put({"1": ("", use("a"))})
    assert known_record(folder, identity("docs")) is not None
    with open(str(record.path), "wb") as file:
        file.write(b"no database" * 100)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        known_record(folder, identity("docs"))


def test_in_memory_it_is_one_per_store_namespace_and_name() -> None:
    store = MemoryStore()
    OwnerRecord.beside(store, "", "docs").put({"1": ("", use("a"))})
    assert OwnerRecord.beside(store, "", "docs").chunks() == {"a" * 64}
    others = [(MemoryStore(), "", "docs"), (store, "tenant", "docs"), (store, "", "other")]
    assert all(not OwnerRecord.beside(*one).chunks() for one in others)


def test_writers_at_the_same_time_lose_nothing(record: OwnerRecord) -> None:
    def write(letter: str) -> None:
        for number in range(8):
            record.put({f"{letter}{number}": ("", Use(f"{letter}{number}", SPEC, 1))})

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(record.chunks()) == 32
