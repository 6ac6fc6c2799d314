"""Chunks in the memory of this process; the least recently used is dropped first."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from cachetools import Cache, TTLCache

from kvcache_rag.codecs import EncodedChunk, Native
from kvcache_rag.errors import (
    CorruptChunkError,
    InvalidInputError,
    check_name,
    check_settings,
)
from kvcache_rag.forks import new_lock
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.stores.base import (
    EncodedHit,
    Hit,
    Tier,
    check_chunk,
    check_out,
    next_generation,
    size_in_memory,
)
from kvcache_rag.stores.device import Home, lane_to
from kvcache_rag.stores.locks import ThreadLocks
from kvcache_rag.stores.object_names import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from kvcache_rag.codecs import Codec, Room
    from kvcache_rag.kv.chunk import ChunkKey, ChunkLayout

    Chunks: TypeAlias = TTLCache[ChunkKey, ChunkKV | EncodedChunk]


def private_copy(chunk: ChunkKV, home: Home | None = None) -> ChunkKV:
    """A finished copy that shares nothing, in main memory by default, in and out of inference mode.

    Args:
        chunk: On any device.
        home: Where the copy is to lie.
    """
    home = home or Home()
    with torch.inference_mode(mode=False), torch.no_grad():
        tensors = home.empty(chunk.layout, chunk.tokens.shape[0])
        copy = ChunkKV(chunk.layout, chunk.tokens.cpu().clone(), chunk.start, tensors)
        lane = lane_to(home.device)
        touched = [tensor for group in (*copy.tensors, *chunk.tensors) for tensor in group]
        done = lane.send(lambda: copy.copy_from(chunk), touched)
        # Threads that use other streams see all of it, and so does who changes the chunk next.
        done.synchronize()
    return copy


def _dropped(chunks: Chunks, key: ChunkKey) -> bool:
    """Drop what is kept for a key, expired or not; returns whether anything was."""
    held = Cache.__contains__(chunks, key)
    with suppress(KeyError):  # which an expired one raises once it is dropped
        del chunks[key]
    return held


class MemoryStore(Tier):
    """Up to `max_bytes` of chunks in memory, shared by the threads of this process.

    The memory is main memory or a device's, whose chunks cross no bus and which can be the fastest
    tier, before main memory and disk.  An evicted chunk stays while it is in use, so memory may
    exceed the limit by the chunks in use.

    Attributes:
        max_bytes: Limit on keys, values and token ids, in bytes.
        ttl: Seconds that a chunk is kept after its `put`, used or not; None for no end.  Time in a
            slower tier is not counted: the times of tiers add up.
        home: Which memory; PyTorch rounds pinned tensors up to powers of two.
        tier: Name under which hits are counted: "memory", or "device" for a device's.
        codec: Form in which chunks are kept: `Native`, or the form of the slower tiers.  `Int8`
            takes half the size, and attention on a CPU reads it directly.
    """

    _DAMAGED = "chunk {} was kept in another form"
    _ABSENT = "chunk {} is not in memory"

    excludes_processes = False

    def __init__(
        self,
        max_bytes: int = 1 << 30,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        ttl: float | None = None,
        tier: str | None = None,
        codec: Codec | str | None = None,
    ) -> None:
        """Open an empty store; with `max_bytes` 0 it keeps nothing.

        Args:
            max_bytes: Limit in bytes.
            device: Whose memory: "cpu" for main memory, or the model's device, such as "cuda".
            pinned: Whether main memory is pinned, so that a CUDA device fetches chunks while the
                CPU works on.
            ttl: Seconds for which a chunk is kept.
            tier: Another name than "memory" or "device".
            codec: `Int8()` or "int8" in front of a store of that codec; None for `Native()`.

        Raises:
            InvalidInputError: If `ttl` is not above zero, there is no such memory, or it cannot
                keep chunks in the codec's form.
        """
        check_settings(MemoryStore.__init__, locals(), infinite=("ttl",))
        self.max_bytes = max_bytes
        self.home = Home.checked(device, pinned=pinned)
        kind = self.home.device.type
        super().__init__(tier or ("memory" if kind == "cpu" else "device"), codec, ttl)
        is_plain = kind == "cpu" and not pinned
        if not (isinstance(self._codec, Native) or (self._codec.is_attended and is_plain)):
            raise InvalidInputError(
                f"memory of {self.home.device}{', pinned,' if pinned else ''} keeps no chunks in "
                f"the form of {self._codec!r}; give Native(), or Int8() for plain main memory"
            )
        # The timer holds on to the time alone: one that held on to the store would keep the chunks
        # of a dropped store until the cycle collector runs.
        self._lock, now = new_lock(), [0.0]
        self._now = now
        self._chunks: Chunks = TTLCache(
            max_bytes, ttl or math.inf, timer=lambda: now[0], getsizeof=size_in_memory
        )
        self._generations: Counter[str] = Counter()
        self._stripes = ThreadLocks()

    def __repr__(self) -> str:
        """The call that made it."""
        form = f", codec={self._codec!r}" if self.gives_encoded else ""
        return (
            f"MemoryStore({self.max_bytes}, device={str(self.home.device)!r}, "
            f"pinned={self.home.pinned}, ttl={self.ttl}, tier={self.tier!r}{form})"
        )

    @contextmanager
    def _alone(self) -> Iterator[Chunks]:
        """The chunks for this thread alone, at one moment: none expires meanwhile."""
        with self._lock:
            self._now[0] = time.monotonic()
            yield self._chunks

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Return the kept chunk itself, or decode it into `out` if kept in a codec's form."""
        if out is not None:
            check_out(check_key(key), layout, out)

        def read() -> tuple[ChunkKV, int]:
            kept = self._kept(key, layout)
            if isinstance(kept, ChunkKV):
                return kept, size_in_memory(kept)
            if out is None:
                return kept.decoded(), size_in_memory(kept)
            kept.decode(out)
            return out, size_in_memory(kept)

        return Hit(self._counted(key, read), self.tier)

    def encoded(self, key: ChunkKey, layout: ChunkLayout, room: Room | None = None) -> EncodedHit:
        """Return the kept chunk itself."""
        if not self.gives_encoded:
            return super().encoded(key, layout, room)

        def read() -> tuple[Any, int]:
            kept = self._kept(key, layout)
            return kept, size_in_memory(kept)

        return EncodedHit(self._counted(key, read), self.tier)

    def _kept(self, key: ChunkKey, layout: ChunkLayout) -> ChunkKV | EncodedChunk:
        """What is kept for a key, which now is the last used."""
        check_key(key)
        with self._alone() as chunks:
            chunk = chunks.get(key)
            if chunk is None:
                raise FileNotFoundError("it was never put, or has gone")
            if chunk.layout != layout:
                del chunks[key]
                raise CorruptChunkError("its layout is not that asked for")
        return chunk

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        """Keep a private copy in the store's memory, unless the chunk alone exceeds the limit."""
        check_key(key)
        check_chunk(key, chunk)
        if self.gives_encoded:
            size = self._codec.nbytes(chunk.layout, key.tokens) + chunk.tokens.nbytes
            return self._keep(key, lambda: EncodedChunk.of(self._codec, chunk), size, generation)
        size = size_in_memory(chunk)
        return self._keep(key, lambda: private_copy(chunk, self.home), size, generation)

    def keep(self, key: ChunkKey, chunk: EncodedChunk, generation: int | None = None) -> bool:
        """Like `put`, but keep an encoded chunk of this store's codec itself; never write to it."""
        check_key(key)
        return self._keep(key, lambda: chunk, size_in_memory(chunk), generation)

    def _keep(
        self,
        key: ChunkKey,
        make: Callable[[], ChunkKV | EncodedChunk],
        size: int,
        generation: int | None,
    ) -> bool:
        if size > self.max_bytes:
            reason = f"a chunk of {size} bytes exceeds max_bytes={self.max_bytes}"
            self._counters.failed(reason, is_news=self.max_bytes > 0)
            return False
        if generation is None:
            generation = self.generation(key.namespace)
        try:
            kept = make()
        except (CorruptChunkError, RuntimeError) as error:  # PyTorch's, of memory that is full
            self._counters.failed(str(error).partition("\n")[0])
            return False
        with self._alone() as chunks:
            if self._generations[key.namespace] > generation:
                self._counters.failed("the namespace was deleted meanwhile")
                return False
            self._drop_expired()
            chunks.pop(key, None)
            before = len(chunks)
            chunks[key] = kept
            evicted = before + 1 - len(chunks)
        self._counters.kept(self.tier, size)
        self._counters.evicted(evicted)
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether the key is held now; does not count as use."""
        check_key(key)
        with self._alone() as chunks:
            return key in chunks

    def touch(self, key: ChunkKey) -> None:
        """Make the key the most recently used."""
        check_key(key)
        with self._alone() as chunks:
            chunks.get(key)

    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk at once."""
        check_key(key)
        with self._alone() as chunks:
            return _dropped(chunks, key)

    def delete_namespace(self, namespace: str, generation: int | None = None) -> int:
        """Drop every chunk of a namespace; callers that use one keep it meanwhile."""
        check_name("namespace", namespace)
        with self._alone() as chunks:
            last = self._generations[namespace]
            self._generations[namespace] = generation or next_generation(last)
            # The cache's own iteration leaves out what has expired, which is deleted as well.
            gone = [key for key in Cache.__iter__(chunks) if key.namespace == namespace]
            for key in gone:
                _dropped(chunks, key)
        self._counters.deleted(len(gone))
        return len(gone)

    def generation(self, namespace: str) -> int:
        with self._lock:
            return self._generations[namespace]

    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[object]:
        """Exclude other threads of this process."""
        return self._stripes.hold([check_key(key).digest[:2] for key in keys])

    def sweep(self) -> int:
        """Drop old chunks, as every `put` does; `put` also keeps the limit."""
        with self._alone():
            return self._drop_expired()

    def _drop_expired(self) -> int:
        # The cache's own length leaves out what has expired, and drops it uncounted.
        held = Cache.__len__(self._chunks)
        self._chunks.expire()
        dropped = held - Cache.__len__(self._chunks)
        self._counters.evicted(dropped)
        return dropped

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and token ids that are kept now."""
        with self._alone() as chunks:
            self._drop_expired()
            return int(chunks.currsize)
