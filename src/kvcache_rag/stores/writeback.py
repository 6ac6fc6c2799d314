"""Writing to a slow store behind the caller's back.

`WriteBack` is the slow store with a queue in front: what was put is found at once and written a
little later, by one thread.  A crash loses copies that were not written yet, never correctness.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its hook at exit must be older than ours
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_rag.codecs import EncodedChunk
from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores.base import (
    ChunkStore,
    Counters,
    EncodedHit,
    Hit,
    StoreStats,
    check_chunk,
    check_key,
    check_out,
    size_in_memory,
)
from kvcache_rag.stores.memory import private_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from kvcache_rag.codecs import Codec, Room
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout
    from kvcache_rag.stores.epochs import EpochWatch

_MARK_BYTES = 1024  # what a queued claim or release counts as
_IDLE = 5.0  # seconds after which a thread without work ends; the next write starts another
_AT_EXIT = 10.0  # seconds that the end of the process waits for the queues


@dataclass(eq=False)
class _Write:
    """One thing to do, and what it is about."""

    key: ChunkKey
    epoch: int
    nbytes: int
    do: Callable[[], object]
    chunk: ChunkKV | None = None


class WriteBack(ChunkStore):
    """A store that is written by a thread of its own, in the order of the calls.

    When the queue is full, `put` writes through and so waits: the caller is slowed down to what the
    store can take, and nothing is dropped.  Claims and releases are queued too.

    Attributes:
        store: The slow store.
        queue_bytes: Limit on the chunks that wait, in bytes.
    """

    def __init__(self, watch: EpochWatch, queue_bytes: int) -> None:
        """Start with an empty queue before the watched store; its thread starts when needed."""
        self.store = watch.store
        self.queue_bytes = queue_bytes
        self.tier = self.store.tier
        self.excludes_processes = self.store.excludes_processes
        self._watch = watch
        self._counters = Counters(self.tier)
        self._forget()
        _ALL.add(self)

    def _forget(self) -> None:
        """Begin anew; in a forked child the thread and its locks do not exist any more."""
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[_Write] = deque()
        self._current: _Write | None = None
        self._nbytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def codec(self) -> Codec:
        return self.store.codec

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Give back what waits for the key, or what the slow store has."""
        begin = time.perf_counter()
        check_key(key)
        if out is not None:
            check_out(key, layout, out)
        chunk = self._queued(key)
        if chunk is None:
            return self.store.get(key, layout, out)
        self._as_asked(key, chunk, layout)
        if out is not None:
            out.copy_from(chunk)
            out.tokens.copy_(chunk.tokens)
        self._counters.hit(self.tier, size_in_memory(chunk), time.perf_counter() - begin)
        return Hit(chunk if out is None else out, self.tier)

    @property
    def gives_encoded(self) -> bool:
        return self.store.gives_encoded

    def encoded(self, key: ChunkKey, layout: ChunkLayout, room: Room | None = None) -> EncodedHit:
        """What waits for the key, as it will be written, or what the slow store has."""
        begin = time.perf_counter()
        chunk = self._queued(check_key(key))
        if chunk is None:
            return self.store.encoded(key, layout, room)
        encoded = EncodedChunk.of(self.codec, self._as_asked(key, chunk, layout))
        self._counters.hit(self.tier, size_in_memory(encoded), time.perf_counter() - begin)
        return EncodedHit(encoded, self.tier)

    def _as_asked(self, key: ChunkKey, chunk: ChunkKV, layout: ChunkLayout) -> ChunkKV:
        if chunk.layout != layout:
            self._counters.add("corrupt")
            raise CorruptChunkError(f"chunk {key.digest} was kept in another layout; prefill it")
        return chunk

    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Queue a copy of the chunk, or write it at once when there is no room."""
        check_chunk(check_key(key), chunk)
        size = size_in_memory(chunk)
        with self._changed:
            self._drop(lambda write: write.chunk is not None and write.key == key)
            room = self._nbytes + size <= self.queue_bytes and not self._closed
            self._nbytes += size if room else 0  # the room is ours while the copy is made
        if not room:
            return self.store.put(key, chunk)
        try:
            epoch = self._watch.number(key.namespace)  # before: a deletion may come meanwhile
            copy = private_copy(chunk)
        except BaseException:
            with self._changed:
                self._nbytes -= size
            raise
        self._append(_Write(key, epoch, size, lambda: self.store.put(key, copy), copy))
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether the key waits or is held now."""
        return self._queued(check_key(key)) is not None or self.store.contains(key)

    def touch(self, key: ChunkKey) -> None:
        """Note the use in the slow store."""
        self.store.touch(key)

    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk in the queue and in the slow store."""
        check_key(key)
        waited = self._cancel(lambda write: write.chunk is not None and write.key == key)
        return self.store.delete(key) or bool(waited)

    def delete_namespace(self, namespace: str) -> int:
        """Drop a namespace in the queue and in the slow store.

        A write of it that is under way is waited for, and then dropped as well.
        """
        gone = self._cancel(lambda write: write.key.namespace == namespace)
        waited = sum(write.chunk is not None for write in gone)
        return self.store.delete_namespace(namespace) + waited

    def epoch(self, namespace: str) -> int:
        return self.store.epoch(namespace)

    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[None]:
        """The slow store's locks."""
        return self.store.locked(keys)

    def claim(self, key: ChunkKey, owner: str) -> None:
        """Queue the note that `owner` uses the key."""
        self._mark(key, lambda: self.store.claim(key, owner))

    def release(self, key: ChunkKey, owner: str) -> None:
        """Queue the note that `owner` no longer uses the key."""
        self._mark(key, lambda: self.store.release(key, owner))

    def describe(self, spec: str, namespace: str, description: Mapping[str, Any]) -> None:
        """Tell the slow store."""
        self.store.describe(spec, namespace, description)

    def sweep(self) -> int:
        """Write what waits, then sweep the slow store."""
        self.flush()
        return self.store.sweep()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits; False when that took longer than `timeout` seconds."""
        with self._changed:
            done = self._changed.wait_for(self._is_idle, timeout)
        return done and self.store.flush(timeout)

    def close(self) -> None:
        """Write what waits and stop the thread; later writes go straight through."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None)
        self.store.close()

    def stats(self) -> StoreStats:
        """What the queue itself answered and failed at; the slow store has counters of its own."""
        return self._counters.stats()

    def _queued(self, key: ChunkKey) -> ChunkKV | None:
        with self._changed:
            writes = [*self._waiting, *([self._current] if self._current else [])]
            chunks = (write.chunk for write in writes if write.key == key)
            return next((chunk for chunk in chunks if chunk is not None), None)

    def _mark(self, key: ChunkKey, do: Callable[[], None]) -> None:
        check_key(key)
        write = _Write(key, self._watch.number(key.namespace), _MARK_BYTES, do)
        with self._changed:
            room = self._nbytes + _MARK_BYTES <= self.queue_bytes and not self._closed
            self._nbytes += _MARK_BYTES if room else 0
        if room:
            self._append(write)
        else:
            self.flush()  # an owner's marks have an order
            do()

    def _append(self, write: _Write) -> None:
        """Queue a write whose room is taken already; without a thread for it, do it here."""
        with self._changed:
            self._waiting.append(write)
            self._changed.notify_all()
            if self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._work, name=f"kvcache-rag-{self.tier}", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # no more threads
                lacking = True
            else:
                lacking = False
        if lacking:
            self._work(lingers=False)

    def _drop(self, matches: Callable[[_Write], bool]) -> list[_Write]:
        """Forget what waits and matches; the lock is held."""
        gone = [write for write in self._waiting if matches(write)]
        if gone:
            self._waiting = deque(write for write in self._waiting if not matches(write))
            self._nbytes -= sum(write.nbytes for write in gone)
            self._changed.notify_all()
        return gone

    def _cancel(self, matches: Callable[[_Write], bool]) -> list[_Write]:
        """Forget what waits and matches, and wait for the end of such a write under way."""
        with self._changed:
            gone = self._drop(matches)
            self._changed.wait_for(lambda: self._current is None or not matches(self._current))
        return gone

    def _is_idle(self) -> bool:
        return not self._waiting and self._current is None

    def _work(self, *, lingers: bool = True) -> None:
        while True:
            with self._changed:
                idle = _IDLE if lingers else 0.0
                self._changed.wait_for(lambda: self._waiting or self._closed, idle)
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                write = self._current = self._waiting.popleft()
            try:
                self._do(write)
            except Exception as error:  # a thread that dies would stop all writes for good
                self._counters.failed(f"{type(error).__name__}: {error}")
            with self._changed:
                self._current = None
                self._nbytes -= write.nbytes
                self._changed.notify_all()

    def _do(self, write: _Write) -> None:
        if self.store.epoch(write.key.namespace) != write.epoch:
            return  # the namespace was deleted meanwhile, here or elsewhere
        if write.do() is False:  # which the store has logged
            self._counters.failed(self.store.stats().last_failure, is_news=False)


_ALL: weakref.WeakSet[WriteBack] = weakref.WeakSet()


def _in_child() -> None:
    for store in _ALL:
        store._forget()


def _at_exit() -> None:
    deadline = time.monotonic() + _AT_EXIT
    for store in list(_ALL):
        store.flush(max(0.0, deadline - time.monotonic()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
# `atexit` is too late: drivers need new threads, which the interpreter refuses by then.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
