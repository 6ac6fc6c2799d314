"""Memory of chunks, this machine's and devices', and the way between them.

Where a chunk is kept (`Home`); host memory that stored bytes pass through (`Arena`); copying to a
device beside the computing on it (`Lane`, the only CUDA-specific code of the stores); whole chunks
along a lane (`staged`, `deliver`, `moved`).
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.forks import in_child, new_condition, new_lock
from kvcache_rag.kv.chunk import ChunkKV

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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


# ---------------------------------------------------------------- memory that bytes pass through
# Allocated once and lent again and again.  Pinned memory, which a device reads by itself while the
# processor goes on, is slow to allocate: page by page it is locked by the kernel.  Fresh plain
# memory costs a page fault for every 4 KiB.

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
        self._changed = new_condition()
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
        # (nbytes,) uint8, a view of the slab; the place itself is whole multiples of ALIGNMENT.
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


# ---------------------------------------------------------------------- lanes
# A `Lane` leads to one device.  Work that is sent along it runs in order, after what the device was
# told before and beside what it is told afterwards, until somebody `follow`s.

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
        return True

    def synchronize(self) -> None:
        """Nothing is waited for."""


class DirectLane:
    """Does at once what it is told: the plain path, for every device without streams of ours."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arena = Arena(_PLAIN)

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
    """Forget what passed through the host memory of all lanes."""
    with _lock:
        lanes = [*_lanes.values()]
    for lane in lanes:
        lane.arena.wipe()


@in_child
def _begin_anew() -> None:
    # What their arenas have lent is with threads that do not exist here.
    _lanes.clear()


# ---------------------------------------------------------------------- whole chunks
# Bytes of a file are read into reusable host memory, pinned where a CUDA device reads from it. Once
# they are verified they cross as they are (int8 as int8) along the lane to the device, and are
# decoded there. What is written is ready for whatever the current stream is told afterwards; the
# caller goes on meanwhile, with the next chunk for example.


@dataclass(frozen=True, eq=False)
class Staged:
    """Stored tensors of one chunk on their way.

    Attributes:
        tensors: Host memory to read them into, dense, by name.
    """

    tensors: dict[str, Tensor]
    _specs: Mapping[str, TensorSpec]
    _loan: Loan
    _lane: Lane

    def decode(self, codec: Codec, out: ChunkKV) -> None:
        """Send what was read, and decode it where `out` lies; only for what was verified."""

        def work() -> None:
            # All parts in one copy: a call costs as much as some hundred KiB.
            codec.decode(_carved(self._lane.fetch(self._loan.memory), self._specs), out)

        event = self._lane.send(work, _flat(out))
        self._loan.keep_until(event)
        self._lane.follow(event)


@contextmanager
def staged(specs: Mapping[str, TensorSpec], out: ChunkKV) -> Iterator[Staged]:
    """Host memory for the stored tensors of a chunk that goes to the device of `out`.

    Args:
        specs: Dtype and shape by name.
        out: Where the chunk goes.
    """
    lane = lane_to(device_of(out))
    nbytes = sum(_room(spec) for spec in specs.values())
    with lane.arena.lend(nbytes) as loan:
        yield Staged(_carved(loan.memory, specs), specs, loan, lane)


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
