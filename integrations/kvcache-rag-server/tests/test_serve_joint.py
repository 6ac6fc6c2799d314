"""Combinations of a server: shared by its processes, kept over restarts, within its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve_works import answer_of, make_work

from kvcache_rag import Combination
from kvcache_rag.cli import main
from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.settings import ServerSettings
from kvcache_rag_server.startup import open_combinations, open_engine, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag import Engine

TEXTS = ("The red lamp stands in the hall.", "The blue lamp is broken.")


def opened(folder: Path) -> Engine:
    """An engine as one more process of the server has it."""
    return open_engine(ServerSettings(model="tiny", kv_dir=str(folder), device="cpu"))


async def test_what_one_server_computed_together_another_finds(tmp_path: Path) -> None:
    first, other = (LocalBackend(opened(tmp_path / "kv")) for _ in range(2))
    work = make_work(chunks=TEXTS, policy="combination", max_new_tokens=2)
    try:
        await answer_of(first, work)
        metrics = (await answer_of(other, work)).metrics
        assert (metrics.hits, metrics.misses) == ({"combinations-disk": 1}, 0)
        assert metrics.prefilled_tokens == 0
        (stats,) = (await other.stats())["replicas"]
        names = [tier["tier"] for tier in stats["tiers"]]
        assert names == ["memory", "disk", "combinations", "combinations-disk"]
    finally:
        await first.close()
        await other.close()


def test_commands_see_each_of_the_two_folders_alone(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "kv"
    engine = opened(folder)
    engine.add(TEXTS)
    engine.add_combination([TEXTS])
    for place, chunks in ((folder, 3), (folder / "combinations", 2)):  # and the prefix of each
        assert main(["store", "check", str(place)]) == 0
        assert f"{chunks} files" in capsys.readouterr().out
        assert main(["store", "ls", str(place)]) == 0
        assert capsys.readouterr().out.count("namespace ") == 1


def test_a_deleted_tenant_is_gone_from_both(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    engine = opened(folder)
    ask = {"policy": Combination(), "max_new_tokens": 1}

    def held() -> int:
        return len(list(folder.rglob("*.safetensors")))

    engine.generate("Where?", TEXTS, **ask)
    assert held()
    assert engine.delete_namespace()
    assert not held()
    engine.generate("Where?", TEXTS, **ask)
    assert opened(folder).generate("Where?", TEXTS, **ask).metrics.misses == 0, "it came back"
    # Past every engine: what is left goes before the next question.
    (key,) = engine.add_combination([TEXTS])
    DiskStore(folder).delete_namespace("")
    other = opened(folder)
    other.generate("Where?", TEXTS[::-1], **ask)
    assert not DiskStore(folder / "combinations").contains(key)
    (kept,) = other.add_combination([TEXTS])
    opened(folder).generate("Where?", TEXTS[::-1], **ask)
    assert DiskStore(folder / "combinations").contains(kept), "deleted once, not at every start"


def test_one_limit_holds_for_chunks_and_combinations_together(tmp_path: Path) -> None:
    settings = ServerSettings(
        model="tiny",
        kv_dir=str(tmp_path / "kv"),
        kv_max_bytes=1003,
        memory_bytes=103,
        kv_codec="int8",
    )
    found = open_store(settings), open_combinations(settings)
    for store in found:
        assert isinstance(store, TieredStore)
        assert store.codec.name == "int8-kc-vt"
    limits = [[tier.max_bytes for tier in store.tiers] for store in found]  # type: ignore[attr-defined]  # checked above
    assert limits == [[78, 753], [25, 250]]


def test_without_a_limit_or_a_folder_there_is_none() -> None:
    memory = open_combinations(ServerSettings(model="tiny", memory_bytes=40))
    assert isinstance(memory, MemoryStore)
    assert (memory.max_bytes, memory.tier) == (10, "combinations")
    remote = open_combinations(ServerSettings(model="tiny", kv_dir="memory://bucket/kv"))
    assert isinstance(remote, TieredStore)
    last = remote.tiers[1]
    assert isinstance(last, RemoteStore)
    assert (last.url, last.tier) == ("memory://bucket/kv/combinations", "combinations-remote")
