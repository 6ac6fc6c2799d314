"""Memory for chunks on this machine and its devices, and transfers between them.

Where a chunk is kept (`Home`); copying to a device beside the computing on it (`Lane`, the only
CUDA-specific code of the stores); whole chunks along a lane (`Staged`, `deliver`, `moved`).
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.forks import in_child, new_lock
from kvcache_rag.kv.chunk import ChunkKV

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from kvcache_rag.codecs import Codec, TensorSpec
    from kvcache_rag.kv.chunk import ChunkLayout


# ---------------------------------------------------------------- memory that chunks are kept in
_CPU = torch.device("cpu")

_OWN_PAGES = 1 << 20  # bytes of a tensor from which on it gets pages of its own


@dataclass(frozen=True)
class Home:
    """Memory of one kind, in which chunks are kept.

    Attributes:
        device: Whose memory.
        pinned: Whether a CUDA device can read it by itself, beside what the processor does.
    """

    device: torch.device = _CPU
    pinned: bool = False

    @classmethod
    def checked(cls, device: torch.device | str, *, pinned: bool = False) -> Home:
        """Memory that is there.

        Raises:
            InvalidInputError: If this machine does not have it.
        """
        try:
            exact_device = allocate((1,), torch.uint8, torch.device(device), pinned=pinned).device
        except (RuntimeError, AssertionError) as error:  # the latter from a PyTorch without CUDA
            what = "pinned memory" if pinned else f"memory of the device {str(device)!r}"
            reason = str(error).partition("\n")[0][:120]
            raise InvalidInputError(
                f"there is no {what} here ({reason}); use MemoryStore() without "
                f"{'pinned' if pinned else 'device'}"
            ) from None
        return cls(exact_device, pinned)

    def empty(self, layout: ChunkLayout, tokens: int) -> tuple[tuple[Tensor, ...], ...]:
        """Uninitialised tensors for a chunk, one tuple per group."""
        return tuple(
            tuple(allocate(shape, dtype, self.device, pinned=self.pinned) for dtype, shape in specs)
            for specs in layout.specs(tokens)
        )


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, pinned: bool
) -> Tensor:
    """Memory for a kept tensor, whatever it holds."""
    nbytes = math.prod(shape) * dtype.itemsize
    is_plain = device.type == "cpu" and not pinned
    if is_plain and nbytes >= _OWN_PAGES and hasattr(mmap, "MAP_PRIVATE"):
        # Pages of its own, which the system has back as soon as the chunk is dropped.  From the
        # heap, chunks that come and go leave holes that no other one fits into.
        with suppress(OSError):  # too many mappings, for example
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # The tensor holds on to the mapping, which goes with it.
            return torch.frombuffer(pages, dtype=dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


# ---------------------------------------------------------------------- lanes
# A `Lane` leads to one device.  Work that is sent along it runs in order, after what the device was
# told before and beside what it is told afterwards, until somebody `follow`s.

_ON_THE_WAY = 256 << 20  # bytes: reading goes on while as much waits for the bus


class Event(Protocol):
    """Work of a device that ends at some time, as `torch.cuda.Event` does."""

    def synchronize(self) -> None:
        """Wait for its end."""


class Backlog:
    """What a device still reads from host memory.

    At most `limit` bytes are sent and not finished, before PyTorch rounds them up to powers of two,
    and every thread that reads holds one chunk more.
    """

    def __init__(self, limit: int = _ON_THE_WAY) -> None:
        self.limit = limit
        self._lock = new_lock()
        self._sent: deque[tuple[Event, int]] = deque()
        self._nbytes = 0  # of what was sent

    def add(self, event: Event, nbytes: int) -> None:
        """Note what is read until `event`; waits for the oldest above the limit."""
        if isinstance(event, Done):
            return
        with self._lock:
            self._sent.append((event, nbytes))
            self._nbytes += nbytes
        self._wait(self.limit)

    def wait(self) -> None:
        """Wait for everything."""
        self._wait(0)

    def _wait(self, limit: int) -> None:
        while True:
            with self._lock:
                if self._nbytes <= limit:
                    return
                oldest = self._sent[0]
            event, nbytes = oldest
            event.synchronize()
            with self._lock:
                # It counts until it has ended; another thread may have waited for it, too.
                if self._sent and self._sent[0] is oldest:
                    self._sent.popleft()
                    self._nbytes -= nbytes


class Lane(Protocol):
    """A way to a device.

    Attributes:
        backlog: What was sent from memory that `memory` gave.
    """

    backlog: Backlog

    def memory(self, nbytes: int) -> Tensor:
        """Host memory `(nbytes,)` uint8, from which the device reads fastest; uninitialised."""

    def forget(self, memory: Tensor) -> None:
        """Leave no bytes in what `memory` gave and nothing reads from any more; others get it."""

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

    def synchronize(self) -> None:
        """Nothing is waited for."""


class DirectLane:
    """Does at once what it is told: the plain path, for every device without streams of ours."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backlog = Backlog()

    def memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def forget(self, memory: Tensor) -> None:
        """Overwrite it: `fetch` waited."""
        memory.zero_()

    def send(self, work: Callable[[], None], touched: Sequence[Tensor]) -> Event:
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
        self.backlog = Backlog()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # in torch

    def memory(self, nbytes: int) -> Tensor:
        """Pinned memory, pageable where the system locks no more.

        PyTorch lends it again, but never while a copy that `fetch` began still reads from it.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # slower, and right all the same
            return torch.empty(nbytes, dtype=torch.uint8)

    def forget(self, memory: Tensor) -> None:
        """Overwrite pageable memory; the device may still read pinned memory: see `wipe`."""
        if not memory.is_pinned():
            memory.zero_()

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

_lock = new_lock()


def lane_to(device: torch.device) -> Lane:
    """The lane to a device, one in this process."""
    if device == torch.device("cuda"):  # of several, the current one
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if device not in _lanes:
            _lanes[device] = CudaLane(device) if device.type == "cuda" else DirectLane(device)
        return _lanes[device]


def wipe() -> None:
    """Give back the pinned memory through which chunks passed, where PyTorch can."""
    with _lock:
        lanes = [lane for lane in _lanes.values() if isinstance(lane, CudaLane)]
    for lane in lanes:
        lane.backlog.wait()
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    empty = empty or getattr(torch._C, "_host_emptyCache", None)  # what older PyTorch has
    # With neither, pinned memory keeps the bytes of what crossed last until it is lent again, in
    # this process alone, or until this process ends.
    if lanes and empty is not None:
        empty()


@in_child
def _begin_anew() -> None:
    # What was sent along them is with threads and streams that do not exist here.
    _lanes.clear()


# ---------------------------------------------------------------------- whole chunks
# Bytes of a file are read into host memory, pinned where a CUDA device reads from it. Once they are
# verified they cross as they are (int8 as int8) along the lane to the device, and are
# decoded there. What is written is ready for whatever the current stream is told afterwards; the
# caller goes on meanwhile, with the next chunk for example.


ALIGNMENT = 512  # every tensor begins at such a multiple: any dtype can be viewed there


@dataclass(frozen=True, eq=False)
class Staged:
    """Stored tensors of one chunk on their way.

    Attributes:
        tensors: Host memory to read them into, dense, by name.
    """

    tensors: dict[str, Tensor]
    _memory: Tensor
    _specs: Mapping[str, TensorSpec]
    _lane: Lane

    @classmethod
    def to(cls, out: ChunkKV, specs: Mapping[str, TensorSpec]) -> Staged:
        """Host memory for stored tensors, by name, of a chunk that goes where `out` lies."""
        lane = lane_to(device_of(out))
        memory = lane.memory(sum(map(_room, specs.values())))
        return cls(_carved(memory, specs), memory, specs, lane)

    def forget(self) -> None:
        """Leave no bytes of what was read and is not decoded; the tensors are used no more."""
        self._lane.forget(self._memory)

    def decode(self, codec: Codec, out: ChunkKV) -> None:
        """Send what was read, and decode it where `out` lies; only for what was verified."""

        def work() -> None:
            # All parts in one copy: a call costs as much as some hundred KiB.
            try:
                there = self._lane.fetch(self._memory)
                codec.decode(_carved(there, self._specs), out)
            finally:
                self.forget()

        event = self._lane.send(work, _flat(out))
        self._lane.backlog.add(event, self._memory.nbytes)
        self._lane.follow(event)


def deliver(
    chunks: Sequence[ChunkKV],
    places: Sequence[ChunkKV],
    behind: Callable[[], None] | None = None,
) -> None:
    """Copy chunks that are kept in memory, this machine's or a device's, to places on one device.

    Args:
        chunks: Never written to; their tensors may be freed at once.  One that lies in its place
            is there.
        places: One or more, of the same layouts and lengths.
        behind: Done on the same lane behind the copies; writes to the places alone.
    """
    lane = lane_to(device_of(places[0]))

    def work() -> None:
        for chunk, place in zip(chunks, places, strict=True):
            if not lies_in(chunk, place):
                for target, source in zip(_flat(place), _flat(chunk), strict=True):
                    target.copy_(lane.fetch(source))
        if behind is not None:
            behind()

    lane.follow(lane.send(work, [part for one in (*places, *chunks) for part in _flat(one)]))


def moved(chunk: ChunkKV, device: torch.device) -> ChunkKV:
    """The chunk on a device: itself when it is there, else a copy, usable in and out of inference.

    Args:
        chunk: Never written to.
        device: Where it is needed.
    """
    if device_of(chunk) == device:
        return chunk
    with torch.inference_mode(mode=False), torch.no_grad():
        tensors = chunk.layout.empty(chunk.tokens.shape[0], device)
        copy = ChunkKV(chunk.layout, torch.empty_like(chunk.tokens), chunk.start, tensors)
        deliver([chunk], [copy])
        copy.tokens.copy_(chunk.tokens)
    return copy


def device_of(chunk: ChunkKV) -> torch.device:
    """Where the keys and values of a chunk lie."""
    return chunk.tensors[0][0].device


def lies_in(chunk: ChunkKV, place: ChunkKV) -> bool:
    """Whether a chunk was read into its place."""
    return chunk.tensors[0][0].data_ptr() == place.tensors[0][0].data_ptr()


def in_main_memory(chunk: ChunkKV) -> bool:
    """Whether bytes can be read straight into a chunk's memory."""
    return device_of(chunk).type == "cpu"


def _flat(chunk: ChunkKV) -> Sequence[Tensor]:
    return [tensor for group in chunk.tensors for tensor in group]


def _room(spec: TensorSpec) -> int:
    dtype, shape = spec
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _carved(memory: Tensor, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Tensors side by side in uint8 memory, as views."""
    tensors, begin = {}, 0
    for name, (dtype, shape) in specs.items():
        # Each begins at a multiple of ALIGNMENT (`_room`), as a view of a wider dtype needs.
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = memory[begin : begin + nbytes].view(dtype).view(shape)
        begin += _room((dtype, shape))
    return tensors
