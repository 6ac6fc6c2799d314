"""Chunks on disk, one safetensors file each, shared by every process that opens the folder.

The file system is the truth: there is no index, and nothing in memory but counters.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from kvcache_rag.codecs.named import codec_of
from kvcache_rag.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    InvalidInputError,
    check_name,
    check_settings,
)
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
)
from kvcache_rag.stores.device import wipe
from kvcache_rag.stores.disk import folders
from kvcache_rag.stores.disk.eviction import (
    DiskLimits,
    Quota,
    Sweeper,
    check_quota,
    delete_namespace,
)
from kvcache_rag.stores.disk.file import (
    FileSpec,
    LayerFile,
    check_header,
    empty_chunk,
    file_facts,
    file_spec,
    is_layered,
    positional,
    read_encoded,
    read_file,
    spec_bytes,
    write_file,
)
from kvcache_rag.stores.locks import hold_files
from kvcache_rag.stores.signing import SigningKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from typing import Any

    from kvcache_rag.codecs import Codec, Room
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout
    from kvcache_rag.stores.disk.file import ReadV
    from kvcache_rag.stores.signing import KeySource

_LOG = logging.getLogger(__name__)

_SIZES = 4096  # how many sizes of files are remembered


_ENDLESS = ("ttl", "temp_age")


class DiskStore(ChunkStore):
    """Chunks as files under `root`; any number of threads and processes may use it at once.

    A chunk is published by renaming a finished file, read with its own descriptor, checked byte for
    byte and never modified in place.  Locks exclude the processes of one machine; two machines on a
    shared folder may compute a chunk once each, and both are right.

    Opened for one namespace it serves the keys of that namespace only, and opens, lists, looks at
    and locks nothing outside that namespace's own folder.

    Attributes:
        root: The folder; it is made when missing.
        namespace: The only namespace served, None for all.
        max_bytes: Limit on the files of all namespaces, or of the one served; None for none.  If
            all who write have it, the files never exceed it by more than a chunk per writer.
        quota: Limit on the files of each namespace: one number for all, or a number by namespace.
        ttl: Seconds from the writing of a chunk to its end, used or not; None for no end.  All
            that use a folder must be opened with a `ttl`, or none.
        durable: Whether a chunk is on the medium when `put` returns.  False saves about four fifths
            of the time; a power cut then costs chunks, never their correctness.
        temp_age: Age in seconds from which unfinished files count as left over.
        tier: Name under which hits are counted.
        codec: Form of the chunks; given as such as `Int8()` or "int8", None for `Native()`.
        signing_key: What files are signed by and have to be signed by; None without one.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        namespace: str | None = None,
        max_bytes: int | None = None,
        quota: Quota = None,
        ttl: float | None = None,
        durable: bool = True,
        codec: Codec | str | None = None,
        temp_age: float = 3600.0,
        tier: str = "disk",
        signing_key: KeySource = None,
    ) -> None:
        """Open a folder; one that cannot be written serves what it holds.

        Without `signing_key` that of the environment (`KVCACHE_RAG_SIGNING_KEY`) holds, if there is
        one.

        Raises:
            InvalidInputError: If `root` is a file or below one, `ttl` is not above zero, the key
                cannot be used, or a setting is of another type.
            MissingExtraError: If there is a key and `cryptography` is not installed.
        """
        check_settings(DiskStore.__init__, locals(), infinite=_ENDLESS)
        check_quota(quota)
        if namespace is not None:
            check_name("namespace", namespace)
        self.root = Path(os.path.abspath(root))
        self.namespace = namespace
        self.max_bytes = max_bytes
        self.quota = quota
        self.ttl = check_ttl(ttl)
        self.durable = durable
        self.temp_age = temp_age
        self.tier = tier
        self.signing_key = SigningKey.of(signing_key)
        self._codec = codec_of(codec)
        self._root = str(self.root)
        self._counters = Counters(tier)
        self._limits = DiskLimits(namespace, max_bytes, quota, ttl, temp_age)
        self._is_limited = max_bytes is not None or quota is not None
        self._sweeper = Sweeper(self._root, self._limits)
        self._sizes: dict[tuple[ChunkLayout, int, int], int] = {}  # of files
        self._manifests = folders.Manifests()
        self._due_lock = threading.Lock()
        # When old chunks are looked for again: by namespace, and at first.
        self._dues: dict[str, float] = {}
        self._due = time.monotonic() + SWEEP_PAUSE
        try:
            folders.make_folder(self._root, self._root)
        except (FileExistsError, NotADirectoryError):
            raise InvalidInputError(f"{self.root} is not a folder; name another one") from None
        except OSError as error:
            self._counters.note(str(error))
        _LOG.info("%s: opened %s, codec %s", tier, self._root, self._codec.name)

    def __repr__(self) -> str:
        """The call that made it."""
        signing = "" if self.signing_key is None else f", signing_key={self.signing_key!r}"
        return (
            f"DiskStore({self._root!r}, namespace={self.namespace!r}, "
            f"max_bytes={self.max_bytes}, quota={self.quota!r}, ttl={self.ttl}, "
            f"durable={self.durable}, codec={self._codec!r}, temp_age={self.temp_age}, "
            f" tier={self.tier!r}{signing})"
        )

    @property
    def codec(self) -> Codec:
        """The form in which this store writes chunks."""
        return self._codec

    def path(self, key: ChunkKey) -> Path:
        """Where the file of `key` is or would be."""
        return Path(self._stem(key) + folders.SUFFIX)

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Read a chunk, into `out` without a copy when that lies in main memory."""
        started = time.perf_counter()
        stem = self._stem(key)
        spec = file_spec(key, layout, self._codec)
        if out is None:
            out = empty_chunk(key, layout)
        else:
            check_out(key, layout, out)
        with self._reading(key, stem, started) as (read, size):
            read_file(read, size, spec, self._codec, out, self.signing_key)
        return Hit(out, self.tier)

    @property
    def gives_encoded(self) -> bool:
        return self._codec.is_attended

    def encoded(self, key: ChunkKey, layout: ChunkLayout, room: Room | None = None) -> EncodedHit:
        """Read a chunk as it is."""
        started = time.perf_counter()
        with self._reading(key, self._stem(key), started) as (read, size):
            chunk = read_encoded(read, size, key, layout, self._codec, self.signing_key, room)
        return EncodedHit(chunk, self.tier)

    @contextmanager
    def _reading(self, key: ChunkKey, stem: str, started: float) -> Iterator[tuple[ReadV, int]]:
        """The open file of a chunk and its size, for one reading, which is counted."""
        with self._counted(key):
            descriptor, status = self._open(stem)
            try:
                with folders.quarantining(stem, status):
                    yield positional(descriptor), status.st_size
            finally:
                os.close(descriptor)
        self._found(stem, status, time.perf_counter() - started)

    def reader(self, key: ChunkKey, layout: ChunkLayout) -> LayerFile | None:
        """The open file, if it is in the order of the layers: no decoding, one shape."""
        started = time.perf_counter()
        stem = self._stem(key)
        spec = file_spec(key, layout, self._codec)
        if not is_layered(layout, self._codec):
            return None
        with self._counted(key):
            descriptor, status = self._open(stem)
            opening = time.perf_counter() - started

            @contextmanager
            def guard() -> Iterator[None]:
                with self._counted(key), folders.quarantining(stem, status):
                    yield

            with folders.quarantining(stem, status):
                return LayerFile(
                    descriptor,
                    status.st_size,
                    spec,
                    self.tier,
                    guard,
                    lambda seconds: self._found(stem, status, opening + seconds),
                    self.signing_key,
                )

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        """Write a chunk and publish it in one step, unless its namespace is deleted meanwhile."""
        stem = self._stem(key)
        check_chunk(key, chunk)
        spec = file_spec(key, chunk.layout, self._codec)
        if generation is None:
            generation = self.generation(key.namespace)
        try:
            if self._is_limited and not self._has_room(key, chunk, spec):
                return False
            size = self._write(stem, chunk, spec, generation)
        except (OSError, SafetensorError, ChunkNotFoundError) as error:
            self._counters.failed(f"{type(error).__name__}: {error}")
            return False
        self._counters.kept(self.tier, size)
        if self.ttl is not None:
            self._sweep_when_due(key.namespace)
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether there is a file for the key that is not too old.

        It is opened only where there is a signing key: what does not name that key is not held.
        """
        try:
            path = self._checked(key) + folders.SUFFIX
            status = os.lstat(path)
            self._check_age(status)
            if self.signing_key is not None:
                file_facts(path, key.digest, self.signing_key)
        except (OSError, ChunkNotFoundError):
            return False
        return stat.S_ISREG(status.st_mode)

    def touch(self, key: ChunkKey) -> None:
        """Mark the file as used now, unless it was within the last minute."""
        with suppress(OSError):
            path = self._checked(key) + folders.SUFFIX
            folders.mark_used(path, os.lstat(path), dated=self.ttl is not None)

    def delete(self, key: ChunkKey) -> bool:
        """Unlink the file; False when there is none or it cannot be removed."""
        with suppress(OSError):
            os.unlink(self._checked(key) + folders.SUFFIX)
            return True
        return False

    def delete_namespace(self, namespace: str, generation: int | None = None) -> int:
        """Remove the folder of a namespace but for the number of its generation.

        Chunks that are being written meanwhile are not kept.  Who has a file open reads on.

        Raises:
            InvalidInputError: If the store serves another namespace.
            OSError: If something could not be removed.
        """
        folder = self._folder(namespace)
        folders.make_folder(self._root, folder)
        last = generation or next_generation(folders.generation(folder))
        dropped = delete_namespace(folder, last, durable=self.durable)
        self._counters.deleted(dropped)
        wipe()
        return dropped

    def generation(self, namespace: str) -> int:
        return folders.generation(self._folder(namespace))

    def describe(self, spec: str, namespace: str, description: Mapping[str, Any]) -> None:
        """Note what `spec` stands for; it is written beside the first chunk that is put."""
        self._check_namespace(namespace)
        self._manifests.note(folders.spec_path(self._root, namespace, spec), description)

    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[None]:
        """Hold the lock files of the keys' stripes, 256 per namespace."""
        keys = list(keys)
        for key in keys:
            self._check_namespace(key.namespace)
        paths = {folders.lock_path(self._root, key) for key in keys}
        return hold_files(paths, partial(folders.make_folder, self._root))

    def sweep(self) -> int:
        """Drop what is too old, unfinished or above a limit; one at a time each."""
        dropped = self._sweeper.sweep()
        self._counters.evicted(dropped)
        return dropped

    def stats(self) -> StoreStats:
        """Counters of this store in this process."""
        return self._counters.stats()

    def _check_namespace(self, namespace: str) -> None:
        if self.namespace is not None and namespace != self.namespace:
            raise InvalidInputError(
                f"the store serves the namespace {self.namespace!r}, not {namespace!r}; open "
                "another one for that"
            )

    def _folder(self, namespace: str) -> str:
        self._check_namespace(namespace)
        return folders.namespace_folder(self._root, namespace)

    def _stem(self, key: ChunkKey) -> str:
        self._check_namespace(key.namespace)
        return folders.stem_path(self._root, key)

    def _checked(self, key: ChunkKey) -> str:
        """The stem, where its folder exists and no link is on the way; `OSError` else."""
        stem = self._stem(key)
        folders.check_folder(self._root, os.path.dirname(stem))
        return stem

    def _open(self, stem: str) -> tuple[int, os.stat_result]:
        """Open a chunk's file; quarantine what is no file.

        Returns:
            Descriptor, which the caller closes, and status.

        Raises:
            CorruptChunkError: If there is something else; it is in quarantine.
            OSError: If there is no file, it is too old, or it cannot be read.
        """
        path = stem + folders.SUFFIX
        try:
            folders.check_folder(self._root, os.path.dirname(path))
            descriptor, status = folders.open_file(path, folders.READ)
        except folders.NotAFileError as error:
            with folders.quarantining(stem, os.lstat(path)):
                raise CorruptChunkError(f"it is not a file: {error}") from None
        try:
            self._check_age(status)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, status

    def _check_age(self, status: os.stat_result) -> None:
        if self.ttl is not None and status.st_mtime <= time.time() - self.ttl:
            raise FileNotFoundError(f"it was written more than {self.ttl} seconds ago")

    def _counted(self, key: ChunkKey) -> AbstractContextManager[None]:
        return self._counters.reading(
            f"the file of chunk {key.digest} was put aside", f"chunk {key.digest} is not on disk"
        )

    def _found(self, stem: str, status: os.stat_result, seconds: float) -> None:
        folders.mark_used(stem + folders.SUFFIX, status, dated=self.ttl is not None)
        self._counters.hit(self.tier, status.st_size, seconds)

    def _has_room(self, key: ChunkKey, chunk: ChunkKV, spec: FileSpec) -> bool:
        """Make room for a file; if there is none, that is counted."""
        limit = self._limits.largest(key.namespace)
        if limit is None:
            return True
        shape = (chunk.layout, key.tokens, key.start)
        size = self._sizes.get(shape)
        if size is None:
            if len(self._sizes) >= _SIZES:
                self._sizes.clear()
            size = self._sizes[shape] = spec_bytes(spec, self.signing_key)
        if size > limit:
            name = "max_bytes" if limit == self.max_bytes else "quota"
            self._counters.failed(f"a file of {size} bytes exceeds {name}={limit}")
            return False
        is_room, dropped = self._sweeper.room(key.namespace, size)
        self._counters.evicted(dropped)
        if not is_room:
            self._counters.declined("another process was making room; the chunk was used")
        return is_room

    def _write(self, stem: str, chunk: ChunkKV, spec: FileSpec, generation: int) -> int:
        """Write the file of a chunk, under its name only when it is complete; its bytes.

        Raises:
            OSError: If it cannot be written; also `SafetensorError`, as on a full disk.
            CorruptChunkError: If safetensors wrote another header than readers expect.
        """
        folder = os.path.dirname(stem)
        namespace = os.path.dirname(os.path.dirname(folder))
        folders.make_folder(self._root, folder)
        temporary = folders.temporary_path(folder)
        try:
            write_file(temporary, chunk, spec, self._codec, self.signing_key)
            size = self._finish(temporary, spec)
            folders.check_generation(namespace, generation)
            os.replace(temporary, stem + folders.SUFFIX)
        finally:
            folders.unlink(temporary)
        if self.durable:
            folders.sync_folder(folder)
        self._manifests.publish(os.path.dirname(folder))
        return size

    def _finish(self, temporary: str, spec: FileSpec) -> int:
        with folders.opened(temporary, folders.WRITE) as descriptor:
            # What this version of safetensors wrote has to be what every reader expects.
            size = os.fstat(descriptor).st_size
            check_header(positional(descriptor), size, spec)
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o600)
            if self.durable:
                os.fsync(descriptor)
        return size

    def _sweep_when_due(self, namespace: str) -> None:
        """Sweep the namespace in the background, once per pause."""
        with self._due_lock:
            now = time.monotonic()
            if now < self._dues.get(namespace, self._due):
                return
            self._dues[namespace] = now + SWEEP_PAUSE

        def sweep() -> None:
            self._counters.evicted(self._sweeper.sweep_one(namespace))

        with suppress(RuntimeError):  # no more threads: another time
            threading.Thread(target=sweep, name="kvcache-rag-sweep", daemon=True).start()
