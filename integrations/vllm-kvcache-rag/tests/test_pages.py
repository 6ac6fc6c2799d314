"""Laws of a worker's loads: what failed is said, and nothing comes into pages behind that."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache_rag import MemoryStore
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
from vllm_kvcache_rag import pages
from vllm_kvcache_rag.keys import Piece, pieces_of, specs
from vllm_kvcache_rag.pages import PageWorker
from vllm_kvcache_rag.scheduling import Job
from vllm_kvcache_rag.transfer.params import TransferParams

BLOCK, HEADS, WIDTH, PAGES = 4, 2, 8, 12
SPECS = specs({"engine": "test"}, "native", 1)
IDS = list(range(20))


def update(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
    for part, given in zip(cache.split(WIDTH, dim=-1), (key, value), strict=True):
        part.transpose(1, 2)[slots // BLOCK, slots % BLOCK] = given


def layer(heads: int = HEADS, write: Any = update) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache=torch.zeros(PAGES, heads, BLOCK, 2 * WIDTH),
        num_kv_heads=heads,
        head_size=WIDTH,
        impl=SimpleNamespace(do_kv_cache_update=write),
    )


class Hanging(MemoryStore):
    """Gives a chunk once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers, self.asked = threading.Event(), 0
        self.hangs = True

    def get(self, key: ChunkKey, *arguments: Any) -> Any:
        self.asked += 1
        if self.hangs:
            assert self.answers.wait(20)
        return super().get(key, *arguments)


def worker(store: MemoryStore, *layers: SimpleNamespace, timeout: float = 30) -> PageWorker:
    made = PageWorker(store, 0, "M", torch.ones(WIDTH // 2), timeout)
    made.attach(layers or (layer(), layer()), BLOCK, PAGES)
    return made


def pieces() -> tuple[Piece, ...]:
    return pieces_of(TransferParams(0, (10,)), IDS, "", SPECS)


def fill(made: PageWorker, store: MemoryStore) -> ChunkKV:
    """Store ten tokens."""
    (piece,) = pieces()
    held = made.layout.empty(10)
    for part in held:
        for tensor in part:
            tensor.copy_(torch.randn(tensor.shape))
    chunk = ChunkKV(made.layout, torch.tensor(piece.ids, dtype=torch.int32), 0, held)
    assert store.put(piece.keys[0], chunk)
    return chunk


def ended(made: PageWorker, *names: str) -> set[str]:
    """Which of some loads failed, once all have ended."""
    done: set[str] = set()
    failed: set[str] = set()
    stop = time.monotonic() + 20
    while not {*names} <= done:
        assert time.monotonic() < stop
        found = made.loaded()
        done |= found.done
        failed |= found.failed
        assert found.failed <= found.done, "a failure is never told without its request"
        time.sleep(0.01)
    return failed


def test_what_is_loaded_is_what_was_stored() -> None:
    store = MemoryStore()
    one, other = layer(), layer()
    made = worker(store, one, other)
    chunk = fill(made, store)
    made.start(Job("r", (7, 3, 9), 0, pieces()))
    assert not ended(made, "r")
    for number, kept in enumerate((one, other)):
        tokens = kept.kv_cache[[7, 3, 9]].transpose(1, 2).flatten(0, 1)[:10]  # (tokens, heads, 2 w)
        assert torch.equal(tokens[..., :WIDTH].transpose(0, 1), chunk.keys(0)[number])
        assert torch.equal(tokens[..., WIDTH:].transpose(0, 1), chunk.values(0)[number])


def test_a_store_that_is_far_behind_gets_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.goes_on = threading.Event()

        def put(self, *arguments: Any) -> bool:
            assert self.goes_on.wait(20)
            return super().put(*arguments)

    store = Slow()
    made = worker(store)
    monkeypatch.setattr(pages, "_WAITING", 1)
    many = [pieces_of(TransferParams(0, (10,)), [at, *IDS[1:]], "", SPECS) for at in range(3)]
    for each in many[:2]:
        made.save(Job("r", (7, 3, 9), 0, each))
    assert "not stored: the store is 1 bytes behind" in caplog.text
    store.goes_on.set()
    until = time.monotonic() + 20
    while not store.contains(many[0][0].keys[0]) or made._waiting:
        assert time.monotonic() < until
        time.sleep(0.01)
    made.save(Job("r", (7, 3, 9), 0, many[2]))
    made.close()
    assert [store.contains(each[0].keys[0]) for each in many] == [True, False, True]


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("a bug"), TimeoutError("late")])
def test_a_store_that_raises_is_a_load_that_failed(error: Exception, caplog: Any) -> None:
    class Raising(MemoryStore):
        def get(self, *arguments: Any) -> Any:
            raise error

    store = Raising()
    made = worker(store)
    fill(made, store)
    made.start(Job("r", (7, 3, 9), 0, pieces()))
    assert ended(made, "r") == {"r"}
    assert f"r is computed whole: {error}" in caplog.text


def test_a_load_that_hangs_is_given_up_and_writes_nothing_later(caplog: Any) -> None:
    store, kept = Hanging(), layer()
    made = worker(store, kept, timeout=0.2)
    fill(made, store)
    began = time.monotonic()
    made.start(Job("r", (7, 3, 9), 0, pieces()))
    assert not made.loaded().done
    assert ended(made, "r") == {"r"}
    assert 0.2 < time.monotonic() - began < 10
    assert "r is computed whole: its chunks were not there in 0.2 s" in caplog.text
    kept.kv_cache.fill_(3.0)  # the pages are another request's now
    store.answers.set()
    made.close()  # waits for the thread
    assert store.asked == 1
    assert (kept.kv_cache == 3.0).all()


def test_while_all_threads_hang_others_do_not_wait() -> None:
    store = Hanging()
    made = worker(store, timeout=0.3)
    fill(made, store)
    for name in ("a", "b"):
        made.start(Job(name, (7, 3, 9), 0, pieces()))
    assert ended(made, "a", "b") == {"a", "b"}
    began = time.monotonic()
    made.start(Job("c", (1, 2, 4), 0, pieces()))
    assert ended(made, "c") == {"c"}
    assert time.monotonic() - began < 0.3
    store.answers.set()
    store.hangs = False
    stop = time.monotonic() + 20
    while True:  # the threads are back
        made.start(Job("d", (1, 2, 4), 0, pieces()))
        if not ended(made, "d"):
            break
        assert time.monotonic() < stop
    made.close()


def test_what_is_being_written_is_not_given_up() -> None:
    """The pages of a request that failed are given to others at once."""
    inside, leave, measured = threading.Event(), threading.Event(), threading.Event()

    def slowly(*given: Any) -> None:
        if measured.is_set():
            inside.set()
            assert leave.wait(20)
        update(*given)

    store, kept = MemoryStore(), layer(write=slowly)
    made = worker(store, kept, timeout=0.05)
    measured.set()
    chunk = fill(made, store)
    made.start(Job("r", (7, 3, 9), 0, pieces()))
    assert inside.wait(20)
    time.sleep(0.1)
    assert not made.loaded().done
    leave.set()
    assert not ended(made, "r")
    tokens = kept.kv_cache[[7, 3, 9]].transpose(1, 2).flatten(0, 1)[:10]
    assert torch.equal(tokens[..., :WIDTH].transpose(0, 1), chunk.keys(0)[0])


def test_layers_of_several_shapes_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"M: its layers .* \(2 x 8 .*, 4 x 8 .*\); serve"
    ):
        worker(MemoryStore(), layer(), layer(heads=4))
