"""Chunks in the memory of this process, least recently used first out."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import torch
from cachetools import LRUCache

from kvcache_rag.codecs import Codec, EncodedChunk, Native
from kvcache_rag.codecs.named import codec_of
from kvcache_rag.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    InvalidInputError,
    check_name,
    check_settings,
)
from kvcache_rag.forks import Reopened, new_lock
from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout
from kvcache_rag.stores.base import (
    SWEEP_PAUSE,
    ChunkStore,
    Counters,
    EncodedHit,
    Hit,
    StoreStats,
    check_chunk,
    check_out,
    check_ttl,
    next_generation,
    size_in_memory,
)
from kvcache_rag.stores.device import Home, lane_to
from kvcache_rag.stores.locks import ThreadLocks
from kvcache_rag.stores.names import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from kvcache_rag.codecs import Room


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


class _Chunks(LRUCache[ChunkKey, "ChunkKV | EncodedChunk"]):
    """Chunks, and when each was put, on the clock that never goes back."""

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize, getsizeof=size_in_memory)
        self.put_at: dict[ChunkKey, float] = {}

    def __delitem__(self, key: ChunkKey) -> None:
        super().__delitem__(key)
        self.put_at.pop(key, None)


class MemoryStore(Reopened, ChunkStore):
    """Up to `max_bytes` of chunks in memory, shared by the threads of this process.

    That is main memory, or a device's, where chunks are used without crossing a bus; in front of a
    store in main memory and one on disk it is the fastest tier.  A chunk that was evicted lives on
    while somebody uses it, so memory may exceed the limit by the chunks in use.

    Attributes:
        max_bytes: Limit on keys, values and token ids, in bytes.
        ttl: Seconds from a chunk's `put` to its end, used or not; None for no end.  What a slower
            tier had before is not counted: the times of tiers add up.
        home: Which memory; PyTorch rounds pinned tensors up to powers of two.
        tier: Name under which hits are counted: "memory", or "device" for a device's.
        codec: Form in which chunks are kept: `Native`, or that of the tiers behind this one, with
            `Int8` of half the size; on a CPU a question attends to them as they lie.
    """

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
            pinned: Whether main memory is pinned, so that a CUDA device fetches chunks from it
                while the processor goes on.
            ttl: Seconds for which a chunk is kept.
            tier: Another name than "memory" or "device".
            codec: `Int8()` or "int8" in front of a store of that codec; None for `Native()`.

        Raises:
            InvalidInputError: If `ttl` is not above zero, or there is no such memory, or it keeps
                no chunks in the form of the codec.
        """
        check_settings(MemoryStore.__init__, locals(), infinite=("ttl",))
        self.max_bytes = max_bytes
        self.home = Home.checked(device, pinned=pinned)
        self._codec = codec_of(codec)
        is_plain = self.home.device.type == "cpu" and not pinned
        if not (isinstance(self._codec, Native) or (self._codec.is_attended and is_plain)):
            raise InvalidInputError(
                f"memory of {self.home.device}{', pinned,' if pinned else ''} keeps no chunks in "
                f"the form of {self._codec!r}; give Native(), or Int8() for plain main memory"
            )
        self.ttl = check_ttl(ttl)
        self.tier = tier or ("memory" if self.home.device.type == "cpu" else "device")
        self._lock = new_lock()
        self._chunks = _Chunks(max_bytes)
        self._generations: Counter[str] = Counter()
        self._counters = Counters(self.tier)
        self._stripes = ThreadLocks()
        self._due = time.monotonic() + SWEEP_PAUSE

    def __repr__(self) -> str:
        """The call that made it."""
        form = f", codec={self._codec!r}" if self.gives_encoded else ""
        return (
            f"MemoryStore({self.max_bytes}, device={str(self.home.device)!r}, "
            f"pinned={self.home.pinned}, ttl={self.ttl}, tier={self.tier!r}{form})"
        )

    @property
    def codec(self) -> Codec:
        """The form in which chunks are kept."""
        return self._codec

    @property
    def gives_encoded(self) -> bool:
        return self._codec.is_attended

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Give back the kept chunk itself; what is kept in a codec's form is decoded into `out`."""
        begin = time.perf_counter()
        if out is not None:
            check_out(check_key(key), layout, out)
        chunk = self._kept(key, layout)
        if isinstance(chunk, EncodedChunk):
            if out is None:
                out = chunk.decoded()
            else:
                chunk.decode(out)
        else:
            out = chunk
        self._counters.hit(self.tier, size_in_memory(chunk), time.perf_counter() - begin)
        return Hit(out, self.tier)

    def encoded(self, key: ChunkKey, layout: ChunkLayout, room: Room | None = None) -> EncodedHit:
        """Give back the kept chunk itself."""
        begin = time.perf_counter()
        chunk = self._kept(key, layout)
        if not isinstance(chunk, EncodedChunk):
            return super().encoded(key, layout, room)
        self._counters.hit(self.tier, size_in_memory(chunk), time.perf_counter() - begin)
        return EncodedHit(chunk, self.tier)

    def _kept(self, key: ChunkKey, layout: ChunkLayout) -> ChunkKV | EncodedChunk:
        """What is kept for a key, which now is the last used; failures are counted."""
        check_key(key)
        with self._lock:
            chunk = None if self._is_expired(key) else self._chunks.get(key)
            if chunk is not None and chunk.layout != layout:
                del self._chunks[key]
        if chunk is None:
            self._counters.add("misses")
            raise ChunkNotFoundError(f"chunk {key.digest} is not in memory; prefill it")
        if chunk.layout != layout:
            self._counters.add("corrupt")
            raise CorruptChunkError(f"chunk {key.digest} was kept in another layout; prefill it")
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
        """Keep a chunk itself, of this store's codec, which nobody writes to; as `put` does."""
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
        except CorruptChunkError as error:  # values that the codec cannot store
            self._counters.failed(str(error))
            return False
        except RuntimeError as error:  # so PyTorch says that there is no memory left
            self._counters.failed(str(error).partition("\n")[0])
            return False
        with self._lock:
            if self._generations[key.namespace] > generation:
                self._counters.failed("the namespace was deleted meanwhile")
                return False
            self._chunks.pop(key, None)
            before = len(self._chunks)
            self._chunks[key] = kept
            self._chunks.put_at[key] = time.monotonic()
            evicted = before + 1 - len(self._chunks)
        self._counters.kept(self.tier, size)
        self._counters.evicted(evicted)
        if self.ttl is not None:
            self._sweep_when_due()
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether the key is held now; does not count as use."""
        check_key(key)
        with self._lock:
            return key in self._chunks and not self._is_expired(key)

    def touch(self, key: ChunkKey) -> None:
        """Make the key the most recently used."""
        check_key(key)
        with self._lock:
            self._chunks.get(key)

    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk at once."""
        check_key(key)
        with self._lock:
            return self._chunks.pop(key, None) is not None

    def delete_namespace(self, namespace: str, generation: int | None = None) -> int:
        """Forget every chunk of a namespace; who uses a chunk keeps it meanwhile."""
        check_name("namespace", namespace)
        with self._lock:
            last = self._generations[namespace]
            self._generations[namespace] = generation or next_generation(last)
            gone = [key for key in self._chunks if key.namespace == namespace]
            for key in gone:
                del self._chunks[key]
        self._counters.deleted(len(gone))
        return len(gone)

    def generation(self, namespace: str) -> int:
        with self._lock:
            return self._generations[namespace]

    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[object]:
        """Exclude other threads of this process."""
        return self._stripes.hold([check_key(key).digest[:2] for key in keys])

    def sweep(self) -> int:
        """Drop old chunks; the limit is kept by `put`."""
        with self._lock:
            over = [key for key in self._chunks if self._is_expired(key)]
            for key in over:
                del self._chunks[key]
        self._counters.evicted(len(over))
        return len(over)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and token ids that are kept now."""
        with self._lock:
            return int(self._chunks.currsize)

    def stats(self) -> StoreStats:
        """Counters of this store."""
        return self._counters.stats()

    def _sweep_when_due(self) -> None:
        """Sweep, once per pause: nobody else drops what is too old."""
        now = time.monotonic()
        with self._lock:
            if now < self._due:
                return
            self._due = now + SWEEP_PAUSE
        self.sweep()

    def _is_expired(self, key: ChunkKey) -> bool:
        put_at = self._chunks.put_at.get(key)
        return self.ttl is not None and put_at is not None and put_at <= time.monotonic() - self.ttl
