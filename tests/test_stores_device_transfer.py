"""Chunks that cross to a device late are what they would be if copied at once."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from kvcache_rag.codecs import Codec, Int4, Int8, Native
from kvcache_rag.errors import CorruptChunkError, InvalidInputError
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout
from kvcache_rag.stores import DiskStore, MemoryStore, TieredStore
from kvcache_rag.stores import device as transfer
from kvcache_rag.stores.device import Backlog, Done, lane_to
from tests import test_stores
from tests.chunks import LAYOUT, LAYOUTS, empty_chunk, flat, key_of, make_chunk, same, window
from tests.contracts_codecs import finite_chunk
from tests.lanes import Elsewhere, LateLane

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKey

TOKENS = (70, 5, 64)
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is such memory here")
CODECS: dict[str, Codec] = {"native": Elsewhere(), "int8": Int8(), "int4": Int4()}


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> LateLane:
    late = LateLane()
    monkeypatch.setattr(transfer, "lane_to", lambda device: late)
    return late


def filled(
    path: Path, codec: Codec, layout: ChunkLayout
) -> tuple[DiskStore, list[ChunkKey], list[ChunkKV]]:
    """A store of a few chunks: it, their keys, and what the plain path gives back."""
    store = DiskStore(path, durable=False, codec=codec)
    keys = []
    for seed, tokens in enumerate(TOKENS):
        chunk = finite_chunk(seed, tokens=tokens, layout=layout)
        keys.append(key_of(chunk))
        assert store.put(keys[-1], chunk)
    return store, keys, [store.get(key, layout).chunk for key in keys]


def places(layout: ChunkLayout) -> tuple[ChunkKV, list[ChunkKV]]:
    """A buffer, and the place of each chunk in it."""
    large = empty_chunk(2 + sum(TOKENS) + 3, layout)
    begins = [2 + sum(TOKENS[:index]) for index in range(len(TOKENS))]
    return large, [window(large, *one) for one in zip(begins, TOKENS, strict=True)]


def flip_last(path: Path) -> None:
    """Damage the last byte of a file."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))


def is_written(large: ChunkKV) -> bool:
    return any(bool(tensor.view(torch.uint8).any()) for tensor in flat(large))


# Law: what crosses late equals what the plain path gives, for every codec and layout.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_late_equals_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, layout: str
) -> None:
    store, keys, expected = filled(tmp_path, CODECS[codec], LAYOUTS[layout])
    late = LateLane()
    late.follows = False
    monkeypatch.setattr(transfer, "lane_to", lambda device: late)
    large, outs = places(LAYOUTS[layout])
    for key, out in zip(keys, outs, strict=True):
        store.get(key, LAYOUTS[layout], out)
    assert late.done == 0
    assert not is_written(large), "too early"
    late.run_until(len(keys))
    assert all(same(out, chunk) for out, chunk in zip(outs, expected, strict=True))
    for tensor in flat(large):
        assert not tensor[..., :2, :].any()
        assert not tensor[..., -3:, :].any()


@pytest.mark.parametrize("codec", CODECS)
def test_get_waits_by_order_alone(tmp_path: Path, lane: LateLane, codec: str) -> None:
    store, keys, expected = filled(tmp_path, CODECS[codec], LAYOUT)
    _, outs = places(LAYOUT)
    for key, out, chunk in zip(keys, outs, expected, strict=True):
        assert same(store.get(key, LAYOUT, out).chunk, chunk)
    assert lane.done == len(lane.sent) > 0


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_small_form_crosses(tmp_path: Path, lane: LateLane, codec: str) -> None:
    store, keys, _ = filled(tmp_path, CODECS[codec], LAYOUT)
    lane.fetched.clear()
    _, outs = places(LAYOUT)
    store.get(keys[0], LAYOUT, outs[0])
    (crossed,) = lane.fetched
    stored = CODECS[codec].expected(LAYOUT, TOKENS[0]).values()
    least = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in stored)
    assert crossed.dtype == torch.uint8
    assert least <= crossed.nbytes < least + 512 * (len(stored) + 1) + 4 * TOKENS[0]


def test_little_is_on_the_way_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, keys, expected = filled(tmp_path, Elsewhere(), LAYOUT)
    late = LateLane(limit=2 * expected[0].nbytes)
    late.follows = False
    monkeypatch.setattr(transfer, "lane_to", lambda device: late)
    outs = [empty_chunk(TOKENS[0]) for _ in range(6)]
    for out in outs:
        store.get(keys[0], LAYOUT, out)
    assert 0 < late.done < 6, "room is made by waiting for the oldest only"
    late.run_until(6)
    assert all(same(out, expected[0]) for out in outs)


class CountedEvent:
    """Work that ends when it is waited for."""

    def __init__(self, ended: list[int], number: int) -> None:
        self.ended, self.number = ended, number

    def synchronize(self) -> None:
        self.ended.append(self.number)


def test_a_backlog_holds_its_limit_and_the_oldest_ends_first() -> None:
    ended: list[int] = []
    backlog = Backlog(limit=30)
    for number in range(6):
        backlog.add(CountedEvent(ended, number), 10)
        assert ended == [*range(number - 2)]
    backlog.add(CountedEvent(ended, 6), 100)
    assert ended == [*range(7)]
    backlog.add(CountedEvent(ended, 7), 30)
    assert ended == [*range(7)], "what has ended counts no more"
    backlog.wait()
    backlog.wait()
    assert ended == [*range(8)]


def test_what_is_waited_for_counts_until_it_has_ended() -> None:
    backlog = Backlog(limit=0)
    order: list[str] = []

    class Slow:
        def synchronize(self) -> None:
            if not order:
                order.append("begun")
                backlog.wait()  # as another thread does meanwhile
                order.append("ended for both")
            else:
                order.append("waited for by the other")

    backlog.add(Slow(), 1)
    assert order == ["begun", "waited for by the other", "ended for both"]


def test_finished_work_is_no_backlog() -> None:
    class Finished(Done):
        def synchronize(self) -> None:
            raise AssertionError("it was waited for")

    Backlog().add(Finished(), 1 << 40)


def test_memory_that_is_lent_again_changes_no_chunk(tmp_path: Path, lane: LateLane) -> None:
    store, keys, expected = filled(tmp_path, Int8(), LAYOUT)
    for _ in range(2):  # of each read, the memory is what the one before had
        for key, chunk in zip(keys, expected, strict=True):
            assert same(store.get(key, LAYOUT).chunk, chunk)
    assert len(lane.free) == len(keys)


# Damage.


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_unverified_crosses(tmp_path: Path, lane: LateLane, codec: str) -> None:
    store, keys, _ = filled(tmp_path, CODECS[codec], LAYOUT)
    before = len(lane.sent)
    path = store.path(keys[0])
    flip_last(path)
    out = empty_chunk(TOKENS[0])
    with pytest.raises(CorruptChunkError):
        store.get(keys[0], LAYOUT, out)
    assert len(lane.sent) == before
    assert not path.exists()


def test_a_chunk_that_was_read_leaves_no_bytes_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys, expected = filled(tmp_path, Int8(), LAYOUT)
    lane, lent = lane_to(torch.device("cpu")), [torch.empty(0)]
    memory = lane.memory

    def kept(nbytes: int) -> torch.Tensor:
        lent.append(memory(nbytes).fill_(1))
        return lent[-1]

    monkeypatch.setattr(lane, "memory", kept)
    assert same(store.get(keys[0], LAYOUT).chunk, expected[0])
    assert lent[-1].nbytes
    assert not lent[-1].any()
    # Nor does one that is damaged, that cannot be decoded, or that went to another device.
    flip_last(store.path(keys[1]))
    with pytest.raises(CorruptChunkError):
        store.get(keys[1], LAYOUT)
    assert len(lent) == 3
    assert not lent[-1].any()
    with monkeypatch.context() as patch:
        patch.setattr(Int8, "decode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.get(keys[2], LAYOUT)
    assert len(lent) == 4
    assert not lent[-1].any()
    monkeypatch.setattr(lane, "fetch", torch.Tensor.clone)
    assert same(store.get(keys[2], LAYOUT).chunk, expected[2])
    assert len(lent) == 5
    assert not lent[-1].any()


# Memory of other kinds.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_delivers_late(lane: LateLane, layout: str) -> None:
    store, chunk = MemoryStore(), make_chunk(tokens=9, layout=LAYOUTS[layout])
    key = key_of(chunk)
    store.put(key, chunk)
    lane.follows = False
    large = empty_chunk(20, LAYOUTS[layout])
    out = window(large, 4, 9)
    kept = store.get(key, LAYOUTS[layout], out).chunk
    transfer.deliver([kept], [out])
    out.tokens.copy_(kept.tokens)
    del kept
    store.delete(key)  # evicted before it crossed
    assert not is_written(large), "too early"
    lane.run_until(1)
    assert same(out, chunk)


def test_a_chunk_moves_only_when_it_lies_elsewhere() -> None:
    with torch.inference_mode():
        chunk = make_chunk()
        assert transfer.moved(chunk, torch.device("cpu")) is chunk
        there = transfer.moved(chunk, torch.device("meta"))
    assert transfer.device_of(there) == torch.device("meta")
    assert torch.equal(there.tokens, chunk.tokens)
    assert (there.layout, there.start) == (chunk.layout, chunk.start)
    assert not any(tensor.is_inference() for tensor in flat(there))


@pytest.mark.parametrize("codec", [Native(), Int8(), Int4()])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codecs_decode_where_the_tensors_are(codec: Codec, layout: str) -> None:
    meta = torch.device("meta")
    stored = {
        name: torch.empty(shape, dtype=dtype, device=meta)
        for name, (dtype, shape) in codec.expected(LAYOUTS[layout], 70).items()
    }
    large = ChunkKV(
        LAYOUTS[layout], torch.zeros(90, dtype=torch.int32), 0, LAYOUTS[layout].empty(90, meta)
    )
    codec.decode(stored, window(large, 3, 70))


def test_a_device_tier_stands_in_front(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, durable=False)
    device, host = MemoryStore(device="meta"), MemoryStore(device="cpu")
    store, chunk = TieredStore(device, host, disk), make_chunk()
    key = key_of(chunk)
    disk.put(key, chunk)
    assert [store.tier for store in (device, host)] == ["device", "memory"]
    assert store.get(key, LAYOUT, empty_chunk(16)).tier == "disk"
    hit = store.get(key, LAYOUT)
    assert hit.tier == "device"
    assert transfer.device_of(hit.chunk) == torch.device("meta")
    assert torch.equal(hit.chunk.tokens, chunk.tokens), "ids stay on the processor"
    assert device.delete(key)
    assert same(store.get(key, LAYOUT).chunk, chunk)
    assert store.delete_namespace("") == 1
    assert not any(one.contains(key) for one in (device, host, disk))
    assert device.generation("") > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "nonsense"}, "there is no memory of the device 'nonsense'"),
        pytest.param({"pinned": True}, r"use MemoryStore\(\) without pinned", marks=WITHOUT_GPU),
        pytest.param({"device": "cuda"}, r"use MemoryStore\(\) without device", marks=WITHOUT_GPU),
    ],
)
def test_memory_that_is_not_there_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        MemoryStore(**options)


def test_a_store_says_where_and_how_it_keeps_chunks() -> None:
    assert "device='meta', pinned=False" in repr(MemoryStore(5, device="meta"))
    assert MemoryStore(5, device="meta", tier="hbm").tier == "hbm"
    assert repr(MemoryStore(5, codec=Int8())).endswith("tier='memory', codec=Int8())")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each tensor was to be pinned, which here it cannot be."""
    found: list[bool] = []

    def allocate(
        shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pinned: bool
    ) -> torch.Tensor:
        found.append(pinned)
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(transfer, "allocate", allocate)
    return found


@pytest.mark.usefixtures("asked", "lane")
class TestPinnedMemoryStore(test_stores.TestMemoryStore):
    """The contract over pinned memory, from which chunks cross late."""

    def open(self, path: Path, *, max_bytes: int | None = None) -> MemoryStore:
        del path
        limit = 1 << 30 if max_bytes is None else max_bytes
        return MemoryStore(limit, device="cpu", pinned=True)


def test_pinned_chunks_are_pinned(asked: list[bool]) -> None:
    store, chunk = MemoryStore(pinned=True), make_chunk(layout=LAYOUTS["apart-bfloat16"])
    store.put(key_of(chunk), chunk)
    assert asked == [True, True, True]  # the first looks whether there is any
    assert same(store.get(key_of(chunk), chunk.layout).chunk, chunk)
    assert store.tier == "memory"


def test_a_device_without_memory_left_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store, chunk = MemoryStore(), make_chunk()

    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(transfer, "allocate", full)
    assert not store.put(key_of(chunk), chunk)
    assert store.stats().last_failure == "CUDA out of memory."
    assert store.stats().put_failures == 1


def test_a_system_that_gives_no_pages_of_its_own_keeps_chunks_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOMEM, "too many mappings")

    monkeypatch.setattr(transfer.mmap, "mmap", refuse)
    monkeypatch.setattr(transfer, "_OWN_PAGES", 1)
    store, chunk = MemoryStore(), make_chunk()
    assert store.put(key_of(chunk), chunk)
    assert same(store.get(key_of(chunk), LAYOUT).chunk, chunk)
