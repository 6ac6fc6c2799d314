"""Host memory that stored bytes pass through, allocated once and lent again and again.

Pinned memory, which a device reads by itself while the processor goes on, is slow to allocate: page
by page it is locked by the kernel.  Fresh plain memory costs a page fault for every 4 KiB.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

ALIGNMENT = 512  # every loan begins at such a multiple: any dtype can be viewed there
SLAB = 64 << 20  # a power of two, to which PyTorch rounds pinned memory anyway


class Event(Protocol):
    """Work of a device that ends at some time, as `torch.cuda.Event` does."""

    def query(self) -> bool:
        """Whether it has ended."""

    def synchronize(self) -> None:
        """Wait for its end."""


def plain_memory(nbytes: int) -> Tensor:
    """Bytes that are pageable."""
    return torch.empty(nbytes, dtype=torch.uint8)


def pinned_memory(nbytes: int) -> Tensor:
    """Bytes that a CUDA device reads by itself; pageable where the system locks no more."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # slower, and right all the same
        return plain_memory(nbytes)


@dataclass(eq=False)
class Loan:
    """Bytes that are lent.

    Attributes:
        memory: `(nbytes,)` uint8.
    """

    memory: Tensor
    _until: Event | None = None

    def keep_until(self, event: Event) -> None:
        """Let the memory be lent again only when `event` has happened, which still reads it."""
        self._until = event


@dataclass(eq=False)
class _Slab:
    memory: Tensor
    taken: list[tuple[int, int]] = field(default_factory=list)  # ascending, apart
    used: int = 0  # bytes behind the first that were ever lent

    def take(self, size: int) -> int | None:
        """Where the first gap of `size` bytes begins, which is taken now; None without one."""
        begin = 0
        for index, (start, stop) in enumerate([*self.taken, (len(self.memory), 0)]):
            if start - begin >= size:
                self.taken.insert(index, (begin, begin + size))
                self.used = max(self.used, begin + size)
                return begin
            begin = stop
        return None

    def wipe(self) -> None:
        """Zero what is not lent."""
        begin = 0
        for start, stop in [*self.taken, (self.used, 0)]:
            self.memory[begin : max(begin, start)].zero_()
            begin = stop


@dataclass(frozen=True, eq=False)
class _Place:
    slab: _Slab
    start: int
    stop: int


class Arena:
    """Memory in slabs that are never given back, up to a limit; any thread may borrow.

    Who finds no room waits for others to give theirs back, so a thread borrows once at a time.
    What could never fit is lent from plain memory of its own.

    Attributes:
        limit: Bytes of all slabs together at most.
    """

    def __init__(self, limit: int, allocate: Callable[[int], Tensor] = plain_memory) -> None:
        """Hold nothing yet.

        Args:
            limit: Bytes of all slabs together at most.
            allocate: Makes a slab of so many bytes, `(nbytes,)` uint8 on the CPU.
        """
        self.limit = limit
        self._allocate = allocate
        self._changed = threading.Condition()
        self._slabs: list[_Slab] = []
        # Given back, oldest first, while a device still reads from it.
        self._leaving: deque[tuple[Event, _Place]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs."""
        return sum(len(slab.memory) for slab in self._slabs)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Loan]:
        """Lend `nbytes`, uninitialised, until the end of the block or what it was kept for."""
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        place = self._borrow(size)
        if place is None:
            yield Loan(plain_memory(nbytes))
            return
        loan = Loan(place.slab.memory[place.start : place.start + nbytes])
        try:
            yield loan
        finally:
            with self._changed:
                if loan._until is None:
                    self._free(place)
                else:
                    self._leaving.append((loan._until, place))
                    self._changed.notify_all()

    def wipe(self) -> None:
        """Forget what was in memory that is not lent now; waits for what a device still reads."""
        with self._changed:
            leaving = [*self._leaving]
        for event, _ in leaving:
            event.synchronize()
        with self._changed:
            self._collect()
            for slab in self._slabs:
                slab.wipe()

    def _borrow(self, size: int) -> _Place | None:
        while True:
            with self._changed:
                self._collect()
                place = self._find(size)
                if place is not None or not self._could_fit(size):
                    return place
                if not self._leaving:
                    self._changed.wait()
                    continue
                event, oldest = self._leaving.popleft()
            try:
                event.synchronize()
            finally:
                with self._changed:
                    self._free(oldest)

    def _collect(self) -> None:
        while self._leaving and self._leaving[0][0].query():
            self._free(self._leaving.popleft()[1])

    def _find(self, size: int) -> _Place | None:
        for slab in self._slabs:
            start = slab.take(size)
            if start is not None:
                return _Place(slab, start, start + size)
        fresh = min(max(SLAB, size), self.limit - self.nbytes)
        if fresh < size:
            return None
        with torch.inference_mode(mode=False):  # to be used in and out of it
            memory = self._allocate(fresh)
        self._slabs.append(_Slab(memory, [(0, size)], size))
        return _Place(self._slabs[-1], 0, size)

    def _could_fit(self, size: int) -> bool:
        return any(len(slab.memory) >= size for slab in self._slabs)

    def _free(self, place: _Place) -> None:
        place.slab.taken.remove((place.start, place.stop))
        self._changed.notify_all()
