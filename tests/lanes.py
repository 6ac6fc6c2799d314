"""A lane that does its work late, for tests of what must not be used too early."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

import torch

from kvcache_rag.codecs import Native
from kvcache_rag.stores.device import Backlog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.kv.chunk import ChunkKV


class Elsewhere(Native):
    """`Native` for memory that bytes cannot be read into, as a device's."""

    name: ClassVar[str] = "native"

    def in_place(self, out: ChunkKV) -> None:
        del out


class LateEvent:
    """The end of one piece of work of a `LateLane`."""

    def __init__(self, lane: LateLane, number: int) -> None:
        self.lane, self.number = lane, number

    def synchronize(self) -> None:
        self.lane.run_until(self.number)


class LateLane:
    """Keeps work until somebody follows or waits for it, as a device may."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self.backlog = Backlog(limit)
        self.sent: list[Callable[[], None]] = []
        self.done = 0
        self.fetched: list[torch.Tensor] = []
        self.follows = True
        self.free: list[torch.Tensor] = []
        self._lock = threading.RLock()

    def memory(self, nbytes: int) -> torch.Tensor:
        """What was forgotten is lent again, with something else in it."""
        with self._lock:
            for index, memory in enumerate(self.free):
                if memory.nbytes == nbytes:
                    return self.free.pop(index)
        return torch.empty(nbytes, dtype=torch.uint8)

    def forget(self, memory: torch.Tensor) -> None:
        with self._lock:
            assert all(memory is not one for one in self.free), "forgotten twice"
            self.free.append(memory.fill_(0xA5))

    def send(self, work: Callable[[], None], touched: Sequence[torch.Tensor]) -> LateEvent:
        assert all(isinstance(tensor, torch.Tensor) for tensor in touched)
        with self._lock:
            self.sent.append(work)
            return LateEvent(self, len(self.sent))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous(), "only dense memory crosses in one go"
        self.fetched.append(tensor)
        return tensor.clone()

    def follow(self, event: LateEvent) -> None:
        if self.follows:
            event.synchronize()

    def run_until(self, number: int) -> None:
        with self._lock:
            while self.done < number:
                self.sent[self.done]()
                self.done += 1
