"""Memory that is lent is nobody else's until what reads from it has ended."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_rag.stores import device as arena_module
from kvcache_rag.stores.device import ALIGNMENT, Arena, pinned_memory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kvcache_rag.stores.device import Loan


class Signal:
    """An event that a test lets happen."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        assert self.happened.wait(10)


def address(memory: torch.Tensor) -> range:
    return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)


def overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Arena:
    """Two slabs of 4 KiB."""
    monkeypatch.setattr(arena_module, "SLAB", 4096)
    return Arena(8192)


def test_it_never_grows_above_its_limit(small: Arena) -> None:
    with small.lend(4096), small.lend(4096):
        assert small.nbytes == 8192
    with small.lend(4097) as loan:
        assert loan.memory.shape == (4097,)
        inside = [address(slab.memory) for slab in small._slabs]
        assert not any(overlap(address(loan.memory), one) for one in inside)
    assert small.nbytes == 8192
    with Arena(100).lend(5000) as loan:
        assert loan.memory.shape == (5000,)


def test_memory_stays_lent_until_the_event(small: Arena) -> None:
    signals = [Signal(), Signal()]
    first = []
    for signal in signals:
        with small.lend(4096) as loan:
            loan.keep_until(signal)
            first.append(address(loan.memory))
    assert not overlap(*first)
    found: list[range] = []

    def borrow() -> None:
        with small.lend(4096) as loan:
            found.append(address(loan.memory))

    thread = threading.Thread(target=borrow)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert not found
    signals[0].happened.set()
    thread.join(10)
    assert found == [first[0]], "the oldest is waited for, and its memory is lent"
    with small.lend(4096) as loan:
        assert address(loan.memory) == first[0], "what has happened needs no waiting"


def test_an_error_gives_the_memory_back(small: Arena) -> None:
    for _ in range(5):
        with pytest.raises(ValueError, match="x"), small.lend(8000):
            raise ValueError("x")
        with pytest.raises(ValueError, match="x"), small.lend(4096):
            raise ValueError("x")
    with small.lend(4096), small.lend(4096):
        assert small.nbytes == 8192


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 3)), max_size=30), st.randoms())
def test_no_two_loans_share_a_byte(steps: list[tuple[int, int]], chance: random.Random) -> None:
    arena = Arena(1 << 20)
    held: list[tuple[AbstractContextManager[Loan], range]] = []
    for size, drops in steps:
        manager = arena.lend(size)
        loan = manager.__enter__()
        if size:
            assert not any(overlap(address(loan.memory), place) for _, place in held)
            assert (loan.memory.data_ptr() - arena._slabs[0].memory.data_ptr()) % ALIGNMENT == 0
        held.append((manager, address(loan.memory)))
        for _ in range(min(drops, len(held))):
            held.pop(chance.randrange(len(held)))[0].__exit__(None, None, None)
    for manager, _ in held:
        manager.__exit__(None, None, None)
    assert not any(slab.taken for slab in arena._slabs)


def test_threads_never_share_memory(small: Arena) -> None:
    def work(seed: int) -> bool:
        chance = random.Random(seed)
        good = True
        for step in range(200):
            with small.lend(chance.choice([10, 1000, 4096, 5000])) as loan:
                value = (seed * 200 + step) % 251
                loan.memory.fill_(value)
                good = good and bool((loan.memory == value).all())
                if chance.random() < 0.5:
                    signal = Signal()
                    loan.keep_until(signal)
                    threading.Timer(0.001, signal.happened.set).start()
        return good

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    assert small.nbytes <= 8192


def test_memory_lent_in_inference_mode_is_usable_outside() -> None:
    arena = Arena(1 << 20)
    with torch.inference_mode(), arena.lend(10) as loan:
        assert not loan.memory.is_inference()


def test_without_pinned_memory_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def refusing(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("cannot pin")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", refusing)
    assert pinned_memory(10).nbytes == 10
    assert asked == [True, False]


def test_wiping_forgets_what_is_not_lent(small: Arena) -> None:
    signal = Signal()
    with small.lend(4096) as leaving:
        leaving.memory.fill_(1)
        leaving.keep_until(signal)
    with small.lend(1024) as first, small.lend(512) as second, small.lend(2048) as third:
        for loan in (first, second, third):
            loan.memory.fill_(2)
    threading.Timer(0.05, signal.happened.set).start()
    with small.lend(1024) as held:
        held.memory.fill_(3)
        small.wipe()
        assert signal.query(), "it waits for what is still read"
        assert bool((held.memory == 3).all())
    assert [int(slab.memory[: slab.used].sum()) for slab in small._slabs] == [0, 3 * 1024]
    small.wipe()
    assert not any(bool(slab.memory[: slab.used].any()) for slab in small._slabs)
