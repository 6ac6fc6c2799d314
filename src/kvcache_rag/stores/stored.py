"""Chunks as files in any place for bytes: what all such stores share.

The place (`stores.bytes`) knows names and bytes.  This module has the chunk's file (`stores.file`),
codec, checksum or signature, handling of damage, limits, deletion and counters.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache_rag.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    InvalidInputError,
    check_name,
)
from kvcache_rag.forks import new_lock
from kvcache_rag.stores import object_names
from kvcache_rag.stores.base import (
    EncodedHit,
    Hit,
    Tier,
    check_chunk,
    check_out,
    next_generation,
)
from kvcache_rag.stores.bytes import GENERATION
from kvcache_rag.stores.device import wipe
from kvcache_rag.stores.file import (
    MAX_HEADER,
    empty_chunk,
    file_pieces,
    file_spec,
    read_encoded,
    read_file,
    read_header,
)
from kvcache_rag.stores.limits import Limits, Quota, Sweeper, check_quota, number
from kvcache_rag.stores.runs import close, is_open_file, source
from kvcache_rag.stores.signing import SigningKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvcache_rag.codecs import Codec, Room
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout
    from kvcache_rag.stores.bytes import Blob, ByteStore, Entry
    from kvcache_rag.stores.file import FileSpec
    from kvcache_rag.stores.runs import ReadV
    from kvcache_rag.stores.signing import KeySource

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_TRIES = 100  # to write a number while others delete

SWEEP_PAUSE = 60.0  # seconds between two sweeps for what is too old


class StoredChunks(Tier):
    """A store of chunks over any place that keeps bytes by name.

    Attributes:
        place: Where the bytes are.
        namespace: The only namespace served, None for all.
        max_bytes: Limit on the files of all namespaces, or of the one served; None for none.  If
            all writers have it, the files exceed it by at most a chunk per writer.
        quota: Limit on the files of each namespace: one number for all, or a number by namespace.
        ttl: Seconds that a chunk is kept after writing, used or not; None for no end.  Either all
            stores of a place have a `ttl`, or none.
        temp_age: Age in seconds from which unfinished files count as left over.
        tier: Name under which hits are counted.
        signing_key: Key that signs files, and that must have signed files that are read; None for
            none.
    """

    _DAMAGED = "the file of chunk {} is damaged"
    _ABSENT = "chunk {} is not stored"

    def __init__(
        self,
        place: ByteStore,
        *,
        codec: Codec | str | None = None,
        namespace: str | None = None,
        max_bytes: int | None = None,
        quota: Quota = None,
        ttl: float | None = None,
        temp_age: float = 3600.0,
        tier: str = "stored",
        signing_key: KeySource = None,
    ) -> None:
        """Open the place without looking into it yet.

        Without `signing_key` the environment's (`KVCACHE_RAG_SIGNING_KEY`) is used, if set.

        Raises:
            InvalidInputError: If `ttl` is not above zero, the key cannot be used, or a setting is
                of another type.
            MissingExtraError: If there is a key and `cryptography` is not installed.
        """
        check_quota(quota)
        if namespace is not None:
            check_name("namespace", namespace)
        super().__init__(tier, codec, ttl)
        self.place = place
        self.namespace = namespace
        self.max_bytes = max_bytes
        self.quota = quota
        self.temp_age = temp_age
        self.signing_key = SigningKey.of(signing_key)
        if isinstance(signing_key, bytes):
            self._opened[1]["signing_key"] = self.signing_key  # which refuses to be sent
        self.excludes_processes = place.excludes_processes
        self._limits = Limits(namespace, max_bytes, quota, ttl, temp_age)
        self._sweeper = Sweeper(place, self._limits)
        self._described: dict[str, Mapping[str, Any]] = {}  # by the name of a spec
        self._held = threading.local()
        self._due_lock = new_lock()
        # When old chunks are looked for again: by namespace, and at first.
        self._dues: dict[str, float] = {}
        self._due = time.monotonic() + SWEEP_PAUSE

    # ------------------------------------------------------------------ reading
    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Read a chunk, into `out` without a copy if the place gives open files."""
        spec = file_spec(object_names.check_key(key), layout, self._codec)
        if out is not None:
            check_out(key, layout, out)

        def memory() -> ChunkKV:
            return empty_chunk(key, layout) if out is None else out

        def read(read: ReadV, size: int) -> ChunkKV:
            return read_file(read, size, spec, self._codec, memory, self.signing_key)

        return Hit(self._read(key, spec, read), self.tier)

    def encoded(self, key: ChunkKey, layout: ChunkLayout, room: Room | None = None) -> EncodedHit:
        """Read a chunk as it is."""
        spec = file_spec(object_names.check_key(key), layout, self._codec)

        def read(read: ReadV, size: int) -> Any:
            return read_encoded(read, size, key, layout, self._codec, self.signing_key, room)

        return EncodedHit(self._read(key, spec, read), self.tier)

    def _read(self, key: ChunkKey, spec: FileSpec, read: Callable[[ReadV, int], T]) -> T:
        """What a reading of a chunk's bytes gives."""
        name = self._name(key)

        def whole() -> tuple[T, int]:
            blob = self._blob(name, spec)
            try:
                return self._checked(name, blob, spec, read)
            finally:
                close(blob)

        return self._counted(key, whole)

    def _checked(
        self, name: str, blob: Blob, spec: FileSpec, read: Callable[[ReadV, int], T]
    ) -> tuple[T, int]:
        readv, size = source(blob)
        try:
            return read(readv, size), size
        except CorruptChunkError:
            # Of bytes that came from afar: damaged on the way or there?  What comes twice alike is
            # dropped, and another answer is believed.
            again = blob if is_open_file(blob) else self.place.get(name, spec.most)
            if again is None or again == blob:
                self._drop_damaged(name, blob)
                raise
            readv, size = source(again)
            return read(readv, size), size

    def _blob(self, name: str, spec: FileSpec) -> Blob:
        """What the place has for a name.

        Raises:
            CorruptChunkError: If that cannot be a file of a chunk; it is dropped.
            OSError: If there is nothing, it is too old, or it cannot be read.
        """
        if self.ttl is not None and self._is_old(self.place.list(name)):
            raise FileNotFoundError(f"it was written more than {self.ttl} seconds ago")
        try:
            blob = self.place.get(name, spec.most)
        except CorruptChunkError:
            self._drop_damaged(name, b"")
            raise
        if blob is None:
            raise FileNotFoundError("there is none")
        return blob

    def _drop_damaged(self, name: str, blob: Blob) -> None:
        with suppress(OSError):
            self.place.delete([name], damaged=blob)

    def contains(self, key: ChunkKey) -> bool:
        """Whether the key has a file that is not too old.

        With a signing key the file is opened: one that does not name that key is not held.
        """
        name = self._name(key)
        try:
            entries = list(self.place.list(name))
            return bool(entries) and not self._is_old(entries) and self._is_named(name)
        except (OSError, ChunkNotFoundError):
            return False

    def _is_old(self, entries: Iterable[Entry]) -> bool:
        return any(self._limits.is_expired(entry.written) for entry in entries)

    def _is_named(self, name: str) -> bool:
        """Whether a file says to be signed by the key, if there is one."""
        if self.signing_key is None:
            return True
        blob = self.place.get(name, MAX_HEADER + 8)
        if blob is None:
            return False
        try:
            read_header(*source(blob), self.signing_key)
        finally:
            close(blob)
        return True

    # ------------------------------------------------------------------ writing
    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        """Write a chunk, visible in one step, unless its namespace is deleted meanwhile."""
        name = self._name(key)
        check_chunk(key, chunk)
        spec = file_spec(key, chunk.layout, self._codec)
        try:
            # Asked anew, past what was heard of it before.
            begun = self._generation(key.namespace) if generation is None else generation
            pieces = file_pieces(chunk, spec, self._codec, self.signing_key)
            size = sum(map(len, pieces))
            if not self._has_room(key.namespace, size):
                return False
            kept = self.place.put(name, pieces, partial(self._is_current, key.namespace, begun))
        except (OSError, CorruptChunkError) as error:
            self._counters.failed(f"{type(error).__name__}: {error}")
            return False
        if not kept:
            self._counters.failed("the namespace was deleted meanwhile; it is not kept")
            return False
        self._counters.kept(self.tier, size)
        self._describe_once(object_names.spec_name(key.namespace, key.spec))
        if self.ttl is not None:
            self._sweep_when_due(key.namespace)
        return True

    def _has_room(self, namespace: str, size: int) -> bool:
        """Make room for a file; if there is none, that is counted."""
        too_large = self._limits.too_large(namespace, size)
        if too_large:
            self._counters.failed(too_large)
            return False
        is_room, dropped = self._sweeper.room(namespace, size)
        self._counters.evicted(dropped)
        if not is_room:
            self._counters.declined("another process was making room; the chunk was used")
        return is_room

    def describe(self, spec: str, namespace: str, description: Mapping[str, Any]) -> None:
        """Note what `spec` stands for; it is written with the first chunk that is put."""
        self._check_namespace(namespace)
        self._described[object_names.spec_name(namespace, spec)] = description

    def _describe_once(self, spec: str) -> None:
        description = self._described.get(spec)
        if description is None:
            return
        name = f"{spec}/{object_names.MANIFEST}"
        with suppress(OSError, TypeError, ValueError):  # the last two: it is no JSON
            if not list(self.place.list(name)):
                values = {**description, "created": int(time.time())}
                text = json.dumps(values, indent=1, sort_keys=True) + "\n"
                self.place.put(name, [text.encode("ascii")])

    def delete(self, key: ChunkKey) -> bool:
        """Drop a file; False if there is none or it cannot be removed."""
        with suppress(OSError):
            return self.place.delete([self._name(key)]) > 0
        return False

    # ------------------------------------------------------------------ namespaces
    def delete_namespace(self, namespace: str, generation: int | None = None) -> int:
        """Drop everything in a namespace except its generation number.

        A new generation begins before the deletion, so that chunks being written are not kept, and
        another after it, for readers in between.

        Raises:
            InvalidInputError: If the store serves another namespace.
            OSError: If something could not be dropped.
        """
        folder = f"{self._folder(namespace)}/"
        last = generation or next_generation(self._generation(namespace))
        dropped = 0
        try:
            self._begin(folder, last - 1)
        except OSError:
            # The medium may be full: make room and try again.
            dropped = self.place.delete([folder])
            self._begin(folder, last - 1)
        dropped += self.place.delete([folder])
        self._begin(folder, last)
        self._counters.deleted(dropped)
        wipe()
        return dropped

    def _begin(self, folder: str, generation: int) -> None:
        """Write a number, which never becomes a smaller one."""
        name = folder + GENERATION
        for left in reversed(range(_TRIES)):
            generation = max(generation, number(self.place, name) or 0)
            try:
                self.place.put(name, [b"%020d" % generation], lambda: True)
                return
            except FileNotFoundError:  # another deletion took it away unfinished
                if not left:
                    raise

    def generation(self, namespace: str) -> int:
        with suppress(OSError):
            return self._generation(namespace)
        return 0

    def _generation(self, namespace: str) -> int:
        return number(self.place, f"{self._folder(namespace)}/{GENERATION}") or 0

    def _is_current(self, namespace: str, begun: int) -> bool:
        return self._generation(namespace) <= begun

    def _check_namespace(self, namespace: str) -> None:
        if self.namespace is not None and namespace != self.namespace:
            raise InvalidInputError(
                f"the store serves the namespace {self.namespace!r}, not {namespace!r}; open "
                "another one for that"
            )

    def _folder(self, namespace: str) -> str:
        self._check_namespace(namespace)
        return object_names.namespace_digest(namespace)

    def _name(self, key: ChunkKey) -> str:
        self._check_namespace(key.namespace)
        return object_names.chunk_name(key)

    # ------------------------------------------------------------------ the rest
    @contextmanager
    def locked(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Hold the locks of the keys' stripes, 256 per namespace."""
        stripes = set()
        for key in keys:
            self._check_namespace(key.namespace)
            stripes.add(object_names.lock_name(key))
        held: set[str] = self._held.__dict__.setdefault("stripes", set())  # by this thread
        if held & stripes:
            raise InvalidInputError("locked() must not be nested: leave the first one before")
        with ExitStack() as stack:
            for stripe in sorted(stripes):  # in one order, so that nobody waits in a circle
                stack.enter_context(self.place.lock(stripe))
            held |= stripes
            try:
                yield
            finally:
                held -= stripes

    def sweep(self) -> int:
        """Drop what is too old, unfinished or above a limit; one sweep runs at a time."""
        dropped = 0
        with suppress(OSError):
            dropped = self._sweeper.sweep()
        self._counters.evicted(dropped)
        return dropped

    def _sweep_when_due(self, namespace: str) -> None:
        """Sweep the namespace in the background, once per pause."""
        with self._due_lock:
            now = time.monotonic()
            if now < self._dues.get(namespace, self._due):
                return
            self._dues[namespace] = now + SWEEP_PAUSE

        def sweep() -> None:
            with suppress(OSError):
                self._counters.evicted(self._sweeper.sweep(namespace))

        with suppress(RuntimeError):  # no more threads: another time
            threading.Thread(target=sweep, name="kvcache-rag-sweep", daemon=True).start()

    def close(self) -> None:
        """Close the place."""
        self.place.close()
