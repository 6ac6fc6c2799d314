"""Laws that every implementation keeps; a test file names its class and inherits them.

`StoreContract` needs a way to open a store and two raw accessors that bypass the code under test.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError, KVCacheRagError
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout
from tests.chunks import LAYOUT, LAYOUTS, bits, empty_chunk, flat, key_of, make_chunk, same, window

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.stores import ChunkStore

__all__ = ["LAYOUT", "LAYOUTS", "StoreContract", "bits", "empty_chunk", "flat", "key_of"]
__all__ += ["make_chunk", "same", "window"]


def read_into(store: ChunkStore, key: ChunkKey, layout: ChunkLayout, out: ChunkKV) -> None:
    """Read a chunk into memory, or copy it there from where the store keeps it."""
    chunk = store.get(key, layout, out).chunk
    if chunk is not out:
        assert same(store.get(key, layout).chunk, chunk), "what is kept is given as it is"
        out.copy_from(chunk)
        out.tokens.copy_(chunk.tokens)


def put(store: ChunkStore, chunk: ChunkKV, namespace: str = "") -> tuple[ChunkKey, ChunkKV]:
    """Put a chunk; its key, and itself."""
    key = key_of(chunk, namespace=namespace)
    assert store.put(key, chunk)
    return key, chunk


def assert_missing(store: ChunkStore, key: ChunkKey) -> None:
    for out in (None, empty_chunk(16)):
        with pytest.raises(ChunkNotFoundError):
            store.get(key, LAYOUT, out)
    assert not store.contains(key)
    assert store.locate(key) is None


class StoreContract:
    """What every `ChunkStore` guarantees."""

    def open(self, path: Path, *, max_bytes: int | None = None) -> ChunkStore:
        """A store over `path`, with a limit."""
        raise NotImplementedError

    def age(self, store: ChunkStore, seconds: float) -> None:
        """Let everything have happened that much earlier, where a store has times."""

    def held(self, store: ChunkStore) -> set[str]:
        """Digests of the chunks that are really there."""
        raise NotImplementedError

    def stored(self, chunk: ChunkKV) -> int:
        """Bytes of a chunk in the form in which it is kept."""
        return chunk.nbytes + chunk.tokens.nbytes

    def size(self, chunk: ChunkKV) -> int:
        """Bytes of the file of a chunk."""
        return 4096 + self.stored(chunk)

    @pytest.fixture
    def store(self, tmp_path: Path) -> ChunkStore:
        return self.open(tmp_path / "store")

    # Law: a store gives back what was put.

    @pytest.mark.parametrize("name", LAYOUTS)
    @pytest.mark.parametrize("tokens", [0, 1, 16])
    def test_gives_back_what_was_put(self, store: ChunkStore, name: str, tokens: int) -> None:
        key, chunk = put(store, make_chunk(1, tokens=tokens, layout=LAYOUTS[name]))
        assert same(store.get(key, chunk.layout).chunk, chunk)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_fills_strided_memory_and_nothing_around_it(self, store: ChunkStore, name: str) -> None:
        layout = LAYOUTS[name]
        large = make_chunk(9, tokens=17, layout=layout)
        expected = [tensor.clone() for tensor in flat(large)]
        for seed, place in enumerate((1, 6, 11)):
            key, chunk = put(store, make_chunk(seed, tokens=5, layout=layout))
            out = window(large, place, 5)
            read_into(store, key, layout, out)
            assert same(out, chunk)
            for tensor, part in zip(expected, flat(out), strict=True):
                tensor.narrow(-2, place, 5).copy_(part)
        assert [bits(t) for t in flat(large)] == [bits(t) for t in expected]

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_takes_strided_tensors(self, store: ChunkStore, name: str) -> None:
        key, chunk = put(store, window(make_chunk(2, tokens=20, layout=LAYOUTS[name]), 3, 8))
        assert same(store.get(key, chunk.layout).chunk, chunk)

    def test_takes_tensors_that_share_memory(self, store: ChunkStore) -> None:
        layout = ChunkLayout((GroupLayout((0,), (1, 4), (1, 8)),), torch.float32)
        memory = torch.arange(60.0)
        keys, values = memory[:20].view(1, 1, 5, 4), memory[20:].view(1, 1, 5, 8)
        tokens = torch.arange(5, dtype=torch.int32)
        key, chunk = put(store, ChunkKV(layout, tokens, 0, ((keys, values),)))
        assert same(store.get(key, layout).chunk, chunk)

    def test_fills_memory_with_gaps_between_elements(self, store: ChunkStore) -> None:
        key, chunk = put(store, make_chunk(3))
        spread = torch.zeros(3, 2, 2, 16, 16, dtype=torch.bfloat16)[..., ::2]
        out = ChunkKV(LAYOUT, torch.zeros(32, dtype=torch.int32)[::2], 3, ((spread,),))
        read_into(store, key, LAYOUT, out)
        assert same(out, chunk)

    def test_keeps_its_own_copy(self, store: ChunkStore) -> None:
        key, chunk = put(store, make_chunk(4))
        for tensor in flat(chunk):
            tensor.zero_()
        assert same(store.get(key, LAYOUT).chunk, make_chunk(4))

    def test_a_chunk_put_and_got_in_inference_mode_can_be_used_outside(
        self, store: ChunkStore
    ) -> None:
        with torch.inference_mode():
            key, chunk = put(store, make_chunk(5))
            inside = store.get(key, LAYOUT).chunk
        outside = empty_chunk(16)
        read_into(store, key, LAYOUT, outside)
        assert same(outside, chunk)
        assert not any(tensor.is_inference() for tensor in flat(inside))

    def test_a_second_put_replaces_the_first(self, store: ChunkStore) -> None:
        key, first = put(store, make_chunk(1))
        second = make_chunk(2)
        second.tokens.copy_(first.tokens)
        store.put(key, second)
        assert same(store.get(key, LAYOUT).chunk, second)
        assert self.held(store) == {key.digest}

    # Law: same key if and only if same tokens, spec, prefix and namespace.

    def test_a_key_is_there_until_it_is_deleted(self, store: ChunkStore) -> None:
        chunk = make_chunk()
        key = key_of(chunk)
        assert_missing(store, key)
        assert not store.delete(key)
        put(store, chunk)
        assert store.contains(key)
        assert store.delete(key)
        assert_missing(store, key)
        assert not self.held(store)

    @pytest.mark.parametrize("field", ["namespace", "spec", "digest"])
    def test_another_namespace_or_spec_is_a_miss(self, store: ChunkStore, field: str) -> None:
        key, _ = put(store, make_chunk())
        other = "tenant" if field == "namespace" else "0" * 64
        assert_missing(store, dataclasses.replace(key, **{field: other}))
        assert store.contains(key)

    def test_another_layout_is_a_miss_and_never_another_tensor(self, store: ChunkStore) -> None:
        key, _ = put(store, make_chunk())
        with pytest.raises(ChunkNotFoundError):
            store.get(key, LAYOUTS["fused-float16"])

    def test_namespaces_are_apart(self, store: ChunkStore) -> None:
        chunk = make_chunk()
        mine, theirs = (put(store, chunk, name)[0] for name in ("a", "../b\0"))
        assert store.delete(mine)
        assert not store.contains(mine)
        assert same(store.get(theirs, LAYOUT).chunk, chunk)

    # Refusals.

    @pytest.mark.parametrize("field", ["digest", "spec"])
    @pytest.mark.parametrize(
        "value", ["", "0" * 63, "0" * 65, "A" * 64, "../" + "0" * 61, "0" * 64 + "\n", "g" * 64]
    )
    def test_refuses_what_is_no_digest(self, store: ChunkStore, field: str, value: str) -> None:
        chunk = make_chunk()
        key = dataclasses.replace(key_of(chunk), **{field: value})
        for call in (
            lambda: store.get(key, LAYOUT),
            lambda: store.put(key, chunk),
            lambda: store.contains(key),
            lambda: store.delete(key),
            lambda: store.locked([key]).__enter__(),
        ):
            with pytest.raises(InvalidInputError):
                call()
        assert not self.held(store)

    def test_refuses_a_chunk_that_its_key_does_not_describe(self, store: ChunkStore) -> None:
        chunk = make_chunk()
        key = key_of(chunk)
        for other, thing in (
            (dataclasses.replace(key, tokens=15), chunk),
            (dataclasses.replace(key, start=0), chunk),
            (key, dataclasses.replace(chunk, tokens=chunk.tokens.long())),
            (key, dataclasses.replace(chunk, layout=LAYOUTS["fused-float16"])),
            (key, dataclasses.replace(chunk, tensors=make_chunk(tokens=15).tensors)),
        ):
            with pytest.raises(InvalidInputError):
                store.put(other, thing)

    def test_refuses_an_out_that_does_not_fit(self, store: ChunkStore) -> None:
        key, _ = put(store, make_chunk())
        for wrong in ({"tokens": 15}, {"start": 0}, {"layout": LAYOUTS["fused-float16"]}):
            with pytest.raises(InvalidInputError):
                store.get(key, LAYOUT, make_chunk(**wrong))  # type: ignore[arg-type]  # of a kind
        assert store.contains(key)

    # Limit.

    def test_the_least_recently_used_go_first(self, tmp_path: Path) -> None:
        chunks = [make_chunk(seed) for seed in range(80)]
        store = self.open(tmp_path / "limited", max_bytes=8 * self.size(chunks[0]))
        self.fill(store, chunks[:8])
        assert len(self.held(store)) == 8
        self.fill(store, chunks[8:])
        store.sweep()
        left = self.held(store)
        assert left == {key_of(chunk).digest for chunk in chunks[-len(left) :]}
        assert store.stats().evictions >= 80 - len(left)

    def test_recent_use_saves_a_chunk(self, tmp_path: Path) -> None:
        chunks = [make_chunk(seed, tokens=512) for seed in range(10)]
        store = self.open(tmp_path / "limited", max_bytes=10 * self.size(chunks[0]))
        self.fill(store, chunks)
        self.age(store, 100)
        store.get(key_of(chunks[0]), LAYOUT)
        new = make_chunk(10, tokens=512)
        self.fill(store, [new])
        store.sweep()
        left = self.held(store)
        assert {key_of(chunks[0]).digest, key_of(new).digest} <= left
        assert key_of(chunks[1]).digest not in left

    def test_a_chunk_above_the_limit_is_not_kept(self, tmp_path: Path) -> None:
        chunk = make_chunk()
        store = self.open(tmp_path / "limited", max_bytes=self.stored(chunk) - 1)
        assert not store.put(key_of(chunk), chunk)
        assert not self.held(store)
        stats = store.stats()
        assert (stats.puts, stats.put_failures) == (0, 1)
        assert "max_bytes" in stats.last_failure

    def fill(self, store: ChunkStore, chunks: list[ChunkKV]) -> None:
        """Put chunks, a second apart."""
        for chunk in chunks:
            self.age(store, 1)
            assert store.put(key_of(chunk), chunk)

    # Threads.

    def test_a_missing_chunk_is_computed_once(self, store: ChunkStore) -> None:
        chunks = [make_chunk(seed) for seed in range(3)]
        keys = [key_of(chunk) for chunk in chunks]
        computed: list[int] = []
        ready = threading.Barrier(6)

        def ask(worker: int) -> None:
            ready.wait()
            order = [0, 1, 2] if worker % 2 else [2, 1, 0]
            with store.locked([keys[index] for index in order]):
                for index in order:
                    if not store.contains(keys[index]):
                        computed.append(index)
                        time.sleep(0.01)
                        store.put(keys[index], chunks[index])
                    assert same(store.get(keys[index], LAYOUT).chunk, chunks[index])

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(6)))
        assert sorted(computed) == [0, 1, 2]

    def test_locks_of_other_keys_do_not_wait(self, store: ChunkStore) -> None:
        first, second = (dataclasses.replace(key_of(make_chunk()), digest=d * 64) for d in "01")

        def other() -> None:
            with store.locked([second]):
                pass

        with ThreadPoolExecutor(1) as pool, store.locked([first, first]), store.locked([]):
            pool.submit(other).result(timeout=10)

    def test_nesting_is_refused_instead_of_waiting_for_ever(self, store: ChunkStore) -> None:
        key = key_of(make_chunk())
        nested = pytest.raises(KVCacheRagError, match="nested")
        with nested, store.locked([key]), store.locked([key]):
            pass
        with store.locked([key]):  # an error frees it
            pass

    def test_threads_that_read_write_and_drop_see_whole_chunks(self, store: ChunkStore) -> None:
        chunks = [make_chunk(seed) for seed in range(4)]
        keys = [key_of(chunk) for chunk in chunks]
        found: list[bool] = []

        def work(worker: int) -> None:
            for step in range(30):
                index = (step + worker) % 4
                if worker == 0:
                    store.delete(keys[index])
                elif worker == 1:
                    store.put(keys[index], chunks[index])
                else:
                    out = empty_chunk(16)
                    try:
                        hit = store.get(keys[index], LAYOUT, out)
                    except ChunkNotFoundError:
                        continue
                    found.append(same(hit.chunk, chunks[index]))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert all(found)
        assert store.stats().corrupt == 0

    # Namespaces.

    def test_a_deleted_namespace_is_gone_and_may_be_used_again(self, store: ChunkStore) -> None:
        chunks = [make_chunk(seed) for seed in range(3)]
        mine = [put(store, chunk, "a")[0] for chunk in chunks]
        other, _ = put(store, chunks[0], "b")
        assert store.delete_namespace("a") == 3
        assert self.held(store) == {other.digest}
        for key in mine:
            assert_missing(store, key)
        assert store.delete_namespace("a") == 0
        put(store, chunks[1], "a")
        assert same(store.get(mine[1], LAYOUT).chunk, chunks[1])
        assert same(store.get(other, LAYOUT).chunk, chunks[0])

    def test_what_was_begun_before_a_deletion_does_not_come_back(self, store: ChunkStore) -> None:
        chunk = make_chunk()
        key = key_of(chunk, namespace="a")
        begun = store.generation("a")
        store.delete_namespace("a")
        assert not store.put(key, chunk, begun)
        assert not self.held(store)
        assert not store.contains(key)
        assert store.put(key, chunk, store.generation("a"))
        assert same(store.get(key, LAYOUT).chunk, chunk)

    def test_the_generation_grows_with_every_deletion(self, store: ChunkStore) -> None:
        put(store, make_chunk(), "a")
        numbers = [store.generation("a")]
        for _ in range(3):
            store.delete_namespace("a")
            numbers.append(store.generation("a"))
        assert numbers == sorted(set(numbers))
        assert store.generation("b") == 0
        later = store.generation("a") + 10**9  # of another tier
        store.delete_namespace("a", later)
        assert store.generation("a") == later

    # Statistics.

    def test_bytes_and_seconds_are_counted_per_tier(self, store: ChunkStore) -> None:
        key, chunk = put(store, make_chunk())
        stats = store.stats()
        least = self.stored(chunk)
        assert stats.bytes_written
        assert all(count >= least for count in stats.bytes_written.values())
        assert stats.bytes_read.keys() == stats.seconds.keys() == set()
        hit = store.get(key, LAYOUT)
        stats = store.stats()
        assert hit.tier == store.locate(key)
        assert stats.bytes_read.keys() == stats.seconds.keys() == {hit.tier}
        assert least <= stats.bytes_read[hit.tier] <= least + 4096
        assert stats.bytes_read[hit.tier] in stats.bytes_written.values()
        assert stats.seconds[hit.tier] > 0

    def test_everything_is_counted(self, store: ChunkStore) -> None:
        chunk = make_chunk()
        with pytest.raises(ChunkNotFoundError):
            store.get(key_of(chunk), LAYOUT)
        key, _ = put(store, chunk)
        tiers = [store.get(key, LAYOUT).tier for _ in range(2)]
        dropped = store.sweep()
        stats = store.stats()
        assert stats.hits == {tier: tiers.count(tier) for tier in tiers}
        assert (stats.misses, stats.corrupt, stats.puts) == (1, 0, 1)
        assert (stats.put_failures, stats.last_failure) == (0, "")
        assert stats.evictions == dropped
