"""Copying to a device beside the computing on it: the only CUDA-specific code of the stores.

A `Lane` leads to one device.  Work that is sent along it runs in order, after what the device was
told before and beside what it is told afterwards, until somebody `follow`s.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from kvcache_rag.stores.arena import Arena, Event, pinned_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_PLAIN = 64 << 20  # pageable memory for what has to be decoded
_PINNED = 256 << 20  # reading goes on while this much waits for the bus


class Lane(Protocol):
    """A way to a device.

    Attributes:
        arena: Host memory from which the device reads fastest.
    """

    arena: Arena

    def send(self, work: Callable[[], None], touched: Sequence[Tensor]) -> Event:
        """Do `work` after what the current stream was told so far, and beside what comes later.

        Args:
            work: Copies and computes; it may use what `fetch` gives.
            touched: The tensors of others that it reads and writes; they live until it has ended.

        Returns:
            Its end.
        """

    def fetch(self, tensor: Tensor) -> Tensor:
        """A contiguous host tensor on the device, in `work`; itself when it is there already."""

    def follow(self, event: Event) -> None:
        """Let what the current stream is told from now on happen after `event`."""


class Done:
    """What has happened already."""

    def query(self) -> bool:
        """Yes."""
        return True

    def synchronize(self) -> None:
        """Nothing is waited for."""


class DirectLane:
    """Does at once what it is told: the plain path, for every device without streams of ours."""

    def __init__(self, device: torch.device) -> None:
        """Lead to `device`."""
        self.device = device
        self.arena = Arena(_PLAIN)

    def send(self, work: Callable[[], None], touched: Sequence[Tensor]) -> Event:
        """Do it now."""
        del touched
        work()
        return Done()

    def fetch(self, tensor: Tensor) -> Tensor:
        """Copy, and wait for it."""
        return tensor.to(self.device)

    def follow(self, event: Event) -> None:
        """It has happened."""


class CudaLane:
    """A stream of its own and pinned memory, so that copying overlaps with computing."""

    def __init__(self, device: torch.device) -> None:
        """Lead to a CUDA device."""
        self.device = device
        self.arena = Arena(_PINNED, pinned_memory)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # in torch

    def send(self, work: Callable[[], None], touched: Sequence[Tensor]) -> Event:
        """Do it on the side stream."""
        # The memory may be new, or still read by what came before.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # in torch
            event.record(self._stream)
        for tensor in touched:
            if tensor.is_cuda:  # not to be allocated anew meanwhile
                tensor.record_stream(self._stream)
        return event

    def fetch(self, tensor: Tensor) -> Tensor:
        """Copy, without waiting if it is pinned; PyTorch keeps memory that it pinned until then."""
        return tensor.to(self.device, non_blocking=tensor.is_cpu and tensor.is_pinned())

    def follow(self, event: Event) -> None:
        """The current stream waits on the device, not the caller."""
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self.device).wait_event(event)


_lanes: dict[torch.device, Lane] = {}
_lock = threading.Lock()


def lane_to(device: torch.device) -> Lane:
    """The lane to a device, one in this process."""
    if device == torch.device("cuda"):  # of several, the current one
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if device not in _lanes:
            _lanes[device] = CudaLane(device) if device.type == "cuda" else DirectLane(device)
        return _lanes[device]


def wipe() -> None:
    """Forget what passed through the host memory of all lanes."""
    with _lock:
        lanes = [*_lanes.values()]
    for lane in lanes:
        lane.arena.wipe()


def _in_child() -> None:
    # Its locks may be held by threads that do not exist here.
    global _lock
    _lock = threading.Lock()
    _lanes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
