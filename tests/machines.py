"""Stores against plain dictionaries, driven by Hypothesis.

A tier's model is a dictionary in the order of use.  Every use is more than a minute after the one
before it, so that a store that notes uses once a minute notes them all.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.stores import ChunkStore, DiskStore, MemoryStore, TieredStore
from kvcache_rag.stores.remote import RemoteStore
from tests.contracts import LAYOUT, empty_chunk, flat, key_of, make_chunk, same

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV

TOKENS = 4
MINUTE = 61.0
NAMESPACES = ("", "tenant")
IDS = [make_chunk(seed, tokens=TOKENS).tokens for seed in range(3)]
NBYTES = make_chunk(tokens=TOKENS).nbytes + TOKENS * 4

numbers = st.integers(0, len(IDS) * len(NAMESPACES) - 1)


def content(number: int, version: int) -> ChunkKV:
    """The chunk of a key; its tensors differ by version."""
    return dataclasses.replace(make_chunk(version, tokens=TOKENS), tokens=IDS[number % len(IDS)])


def key(number: int) -> ChunkKey:
    """A key; numbers that are three apart have the same tokens in two namespaces."""
    return key_of(content(number, 0), namespace=NAMESPACES[number // len(IDS)])


class Model:
    """What a tier holds, least recently used first."""

    def __init__(self, name: str, capacity: int | None = None) -> None:
        self.name = name
        self.capacity = capacity
        self.held: dict[int, int] = {}

    def put(self, number: int, version: int) -> None:
        self.held.pop(number, None)
        self.held[number] = version
        if self.capacity is not None:
            self.evict(self.capacity)

    def use(self, number: int) -> None:
        if number in self.held:
            self.held[number] = self.held.pop(number)

    def evict(self, most: int) -> int:
        over = list(self.held)[: max(len(self.held) - most, 0)]
        for number in over:
            del self.held[number]
        return len(over)

    def forget(self, namespace: str) -> int:
        gone = {number for number in self.held if key(number).namespace == namespace}
        self.held = {n: version for n, version in self.held.items() if n not in gone}
        return len(gone)


class StoreMachine(RuleBasedStateMachine):
    """Everything that may happen to a store, against its model.

    A subclass names the tiers' models and opens the store; `evict` needs a disk.
    """

    models: Callable[[], list[Model]]
    open: Callable[[Path], ChunkStore]
    lasting: ClassVar[set[str]] = {"disk", "remote"}  # tiers that outlive the process

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now = 0.0
        self.version = 0

    @initialize(several=st.permutations(range(len(IDS) * len(NAMESPACES))))
    def start(self, several: list[int]) -> None:
        self.tiers = type(self).models()
        self.store = type(self).open(self.folder)
        self.hits: Counter[str] = Counter()
        self.misses = 0
        self.put(several)

    def teardown(self) -> None:
        self.count()
        self.store.close()
        shutil.rmtree(self.folder)

    def count(self) -> None:
        stats = self.store.stats()
        assert stats.hits == dict(self.hits)
        assert stats.misses == self.misses
        assert (stats.corrupt, stats.put_failures) == (0, 0)

    def expected(self, number: int) -> tuple[Model, int] | None:
        """The first tier that holds the key, and which version."""
        for tier in self.tiers:
            if number in tier.held:
                return tier, tier.held[number]
        return None

    @rule(several=st.lists(numbers, min_size=1, max_size=5))
    def put(self, several: list[int]) -> None:
        for number in several:
            self.pass_time(MINUTE)
            self.version += 1
            assert self.store.put(key(number), content(number, self.version))
            for tier in self.tiers:
                tier.put(number, self.version)

    @rule(several=st.lists(numbers, min_size=1, max_size=4), in_place=st.booleans())
    def get(self, several: list[int], in_place: bool) -> None:
        for number in several:
            self.pass_time(MINUTE)
            self.get_one(number, in_place)

    def get_one(self, number: int, in_place: bool) -> None:
        found = self.expected(number)
        out = empty_chunk(TOKENS) if in_place else None
        if found is None:
            with pytest.raises(ChunkNotFoundError) as caught:
                self.store.get(key(number), LAYOUT, out)
            assert type(caught.value) is ChunkNotFoundError
            self.misses += 1
            return
        holder, version = found
        hit = self.store.get(key(number), LAYOUT, out)
        assert hit.tier == holder.name
        assert same(hit.chunk, content(number, version))
        for tensor in flat(out) if out else []:
            tensor.zero_()  # what a faster tier keeps from now on is not the caller's memory
        self.hits[holder.name] += 1
        place = self.tiers.index(holder)
        for tier in self.tiers[:place]:
            tier.put(number, version)
        for tier in self.tiers[place:]:
            tier.use(number)

    @rule(number=numbers)
    def touch(self, number: int) -> None:
        self.pass_time(MINUTE)
        self.store.touch(key(number))
        for tier in self.tiers:
            tier.use(number)

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        held = [tier.held.pop(number, None) is not None for tier in self.tiers]
        assert self.store.delete(key(number)) is any(held)

    @rule(waited=st.sampled_from([0.0, 30.0, 2000.0]))
    def sweep(self, waited: float) -> None:
        self.pass_time(waited)
        assert self.store.sweep() == 0

    @rule(namespace=st.sampled_from(NAMESPACES), rarely=st.integers(0, 3))
    def delete_namespace(self, namespace: str, rarely: int) -> None:
        if rarely:
            return
        before = self.store.generation(namespace)
        dropped = self.store.delete_namespace(namespace)
        counts = [tier.forget(namespace) for tier in self.tiers]
        assert max(counts) <= dropped <= sum(counts), "a chunk in two tiers is one or two"
        assert self.store.generation(namespace) > before

    @precondition(lambda self: any(tier.name == "disk" for tier in self.tiers))
    @rule(used=st.lists(numbers, max_size=3), most=st.integers(1, 5))
    def evict(self, used: list[int], most: int) -> None:
        """As another process with a limit, right after some chunks were used."""
        for number in used:
            self.pass_time(MINUTE)
            self.get_one(number, in_place=False)
        (disk,) = (tier for tier in self.tiers if tier.name == "disk")
        size = 4096 + NBYTES
        other = open_disk(self.folder, max_bytes=most * size)
        assert other.sweep() == disk.evict(most)

    @rule()
    def restart(self) -> None:
        self.count()
        self.store.close()
        for index, tier in enumerate(type(self).models()):
            if tier.name not in self.lasting:
                self.tiers[index] = tier
        self.store = type(self).open(self.folder)
        self.hits.clear()
        self.misses = 0

    @rule(seconds=st.sampled_from([30.0, 700.0, 2000.0]))
    def pass_time(self, seconds: float) -> None:
        """Let everything have happened that much earlier."""
        self.now += seconds
        for path in self.folder.rglob("*"):
            status = path.lstat()
            shift = int(seconds * 1e9)
            times = (status.st_atime_ns - shift, status.st_mtime_ns - shift)
            os.utime(path, ns=times, follow_symlinks=False)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "store"):
            return
        count = len(IDS) * len(NAMESPACES)
        found = [self.expected(number) for number in range(count)]
        located = [self.store.locate(key(number)) for number in range(count)]
        assert located == [one and one[0].name for one in found]
        one = self.version % count
        assert self.store.contains(key(one)) is (found[one] is not None)


def open_disk(folder: Path, max_bytes: int | None = None) -> DiskStore:
    """A store on disk."""
    return DiskStore(folder / "disk", durable=False, max_bytes=max_bytes)


def open_memory(chunks: int) -> MemoryStore:
    """Memory for so many chunks."""
    return MemoryStore(chunks * NBYTES)


def open_remote(folder: Path) -> RemoteStore:
    """A shared folder as a remote."""
    return RemoteStore(f"file://{folder}/remote")


class MemoryMachine(StoreMachine):
    models = staticmethod(lambda: [Model("memory", 4)])
    open = staticmethod(lambda folder: open_memory(4))


class DiskMachine(StoreMachine):
    models = staticmethod(lambda: [Model("disk")])
    open = staticmethod(open_disk)


class RemoteMachine(StoreMachine):
    models = staticmethod(lambda: [Model("remote")])
    open = staticmethod(open_remote)


class TieredMachine(StoreMachine):
    models = staticmethod(lambda: [Model("memory", 3), Model("disk")])
    open = staticmethod(lambda folder: TieredStore(open_memory(3), open_disk(folder)))


class RemoteTieredMachine(StoreMachine):
    models = staticmethod(lambda: [Model("memory", 2), Model("disk"), Model("remote")])
    open = staticmethod(
        lambda folder: TieredStore(open_memory(2), open_disk(folder), open_remote(folder))
    )


MACHINES = (MemoryMachine, DiskMachine, TieredMachine, RemoteMachine, RemoteTieredMachine)
