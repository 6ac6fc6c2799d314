"""The file of a chunk in its folder: published in one step, read with its own descriptor."""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from kvcache_rag.codecs import Codec, Native
from kvcache_rag.errors import CorruptChunkError, InvalidInputError
from kvcache_rag.stores.base import (
    ChunkStore,
    Counters,
    Hit,
    StoreStats,
    check_chunk,
    check_key,
    check_out,
)
from kvcache_rag.stores.device import wipe
from kvcache_rag.stores.disk import folders, namespaces
from kvcache_rag.stores.disk.eviction import LEAST_PAUSE, Limits, Quota, Sweeper
from kvcache_rag.stores.disk.file import (
    ALIGNMENT,
    FileSpec,
    LayerFile,
    check_header,
    empty_chunk,
    file_spec,
    is_layered,
    positional,
    read_file,
    write_file,
)
from kvcache_rag.stores.disk.folders import check_ttl, mark_used
from kvcache_rag.stores.disk.locks import hold_files
from kvcache_rag.stores.disk.manifest import Manifests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from typing import Any

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout


def load(
    root: str,
    key: ChunkKey,
    spec: FileSpec,
    codec: Codec,
    out: ChunkKV,
    check: Callable[[os.stat_result], None],
) -> os.stat_result:
    """Read the chunk of `key` into `out`; put its file aside when it is not that chunk.

    Args:
        root: The store's folder.
        key: Its address.
        spec: What its file must hold.
        codec: The codec it was written with.
        out: Memory of the chunk's layout and length; undefined after an error.
        check: Called with the status of the open file; raises `OSError` when it must not be read.

    Returns:
        Status of the file.

    Raises:
        CorruptChunkError: If there is something else; it was put aside.
        OSError: If there is no file, or it cannot be read.
    """
    descriptor, status = begin(root, key, check)
    try:
        with folders.quarantining(root, key, status):
            read_file(positional(descriptor), status.st_size, spec, codec, out)
    finally:
        os.close(descriptor)
    return status


def begin(
    root: str, key: ChunkKey, check: Callable[[os.stat_result], None]
) -> tuple[int, os.stat_result]:
    """Open the file of `key`; put aside what is no file.

    Args:
        root: The store's folder.
        key: Its address.
        check: Called with its status; raises `OSError` when it must not be read.

    Returns:
        Descriptor, which the caller closes, and status.

    Raises:
        CorruptChunkError: If there is something else; it was put aside.
        OSError: If there is no file, or it cannot be read.
    """
    path = folders.stem_path(root, key) + folders.SUFFIX
    folders.check_folder(root, os.path.dirname(path))
    try:
        descriptor = folders.open_itself(path, folders.READ)
    except OSError as error:
        if error.errno not in folders.NOT_A_FILE:
            raise
        folders.quarantine(root, key, os.lstat(path))
        raise CorruptChunkError(f"it is not a file: {error}") from None
    try:
        status = os.fstat(descriptor)
        check(status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def publish(
    path: str,
    chunk: ChunkKV,
    spec: FileSpec,
    codec: Codec,
    *,
    durable: bool,
    check: Callable[[], None],
) -> int:
    """Write the file of a chunk into an existing folder, under its name only when it is complete.

    Args:
        path: Its name.
        chunk: What to write.
        spec: What the file must hold.
        codec: How the tensors are encoded.
        durable: Whether it is on the medium when this returns.
        check: Called when the file is complete; raises `OSError` when it must not be published.

    Returns:
        Bytes of the file.

    Raises:
        OSError: If it cannot be written; also `SafetensorError`, as on a full disk.
        CorruptChunkError: If safetensors wrote another header than readers expect.
    """
    folder = os.path.dirname(path)
    temporary = f"{folder}/{folders.TEMPORARY}-{secrets.token_hex(16)}"
    try:
        write_file(temporary, chunk, spec, codec)
        size = _finish(temporary, spec, durable=durable)
        check()
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    if durable and hasattr(os, "O_DIRECTORY"):
        with folders.opened(folder, folders.FOLDER) as descriptor:
            os.fsync(descriptor)
    return size


def _finish(temporary: str, spec: FileSpec, *, durable: bool) -> int:
    with folders.opened(temporary, folders.WRITE) as descriptor:
        # What this version of safetensors wrote has to be what every reader expects.
        size = os.fstat(descriptor).st_size
        check_header(positional(descriptor), size, spec)
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)
        if durable:
            os.fsync(descriptor)
    return size


# How `DiskStore` reads chunks: whole or layer by layer, always checked, always counted.


@dataclass(frozen=True, eq=False)
class FileReading:
    """Reads the files of one folder.

    Attributes:
        root: The folder.
        codec: The codec of its files.
        counters: Where every reading is counted.
        tier: Name under which hits are counted.
        ttl: Seconds from the writing of a chunk to its end, None for no end.
    """

    root: str
    codec: Codec
    counters: Counters
    tier: str
    ttl: float | None

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None) -> Hit:
        """As `ChunkStore.get`."""
        started = time.perf_counter()
        spec = file_spec(check_key(key), layout, self.codec)
        if out is None:
            out = empty_chunk(key, layout)
        else:
            check_out(key, layout, out)
        with self._counted(key):
            status = load(self.root, key, spec, self.codec, out, self.check_age)
        self._found(key, status, time.perf_counter() - started)
        return Hit(out, self.tier)

    def reader(self, key: ChunkKey, layout: ChunkLayout) -> LayerFile | None:
        """As `ChunkStore.reader`."""
        started = time.perf_counter()
        spec = file_spec(check_key(key), layout, self.codec)
        if not is_layered(layout, self.codec):
            return None
        with self._counted(key):
            descriptor, status = begin(self.root, key, self.check_age)
            opening = time.perf_counter() - started

            @contextmanager
            def guard() -> Iterator[None]:
                with self._counted(key), folders.quarantining(self.root, key, status):
                    yield

            with folders.quarantining(self.root, key, status):
                return LayerFile(
                    descriptor,
                    status.st_size,
                    spec,
                    self.tier,
                    guard,
                    lambda seconds: self._found(key, status, opening + seconds),
                )

    def check_age(self, status: os.stat_result) -> None:
        """Raise `FileNotFoundError` for a file that is too old."""
        if self.ttl is not None and status.st_mtime <= time.time() - self.ttl:
            raise FileNotFoundError(f"it was written more than {self.ttl} seconds ago")

    def _counted(self, key: ChunkKey) -> AbstractContextManager[None]:
        return self.counters.reading(
            f"the file of chunk {key.digest} was put aside", f"chunk {key.digest} is not on disk"
        )

    def _found(self, key: ChunkKey, status: os.stat_result, seconds: float) -> None:
        path = folders.stem_path(self.root, key) + folders.SUFFIX
        mark_used(path, status, dated=self.ttl is not None)
        self.counters.hit(self.tier, status.st_size, seconds)


# Chunks on disk, one safetensors file each, shared by every process that opens the folder.
#
# The file system is the truth: there is no index, and nothing in memory but counters.


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
        max_bytes: Limit on the files of all namespaces, or of the one served; None for none.  Kept
            by `put` within a tenth per process, and by `sweep`.
        quota: Limit on the files of each namespace: one number for all, or a number by namespace.
        ttl: Seconds from the writing of a chunk to its end, used or not; None for no end.  All
            that use a folder must be opened with a `ttl`, or none.
        durable: Whether a chunk is on the medium when `put` returns.  False saves about four fifths
            of the time; a power cut then costs chunks, never their correctness.
        release_grace: Seconds between the release of a chunk and its end.
        temp_age: Age in seconds from which unfinished files count as left over.
        tier: Name under which hits are counted.
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
        codec: Codec | None = None,
        release_grace: float = 600.0,
        temp_age: float = 3600.0,
        tier: str = "disk",
    ) -> None:
        """Open a folder; one that cannot be written serves what it holds.

        Raises:
            InvalidInputError: If `root` is a file or below one, or `ttl` is not above zero.
        """
        self.root = Path(os.path.abspath(root))
        self.namespace = namespace
        self.max_bytes = max_bytes
        self.quota = quota
        self.ttl = check_ttl(ttl)
        self.durable = durable
        self.release_grace = release_grace
        self.temp_age = temp_age
        self.tier = tier
        self._codec = codec or Native()
        self._root = str(self.root)
        self._counters = Counters()
        self._reading = FileReading(self._root, self._codec, self._counters, tier, self.ttl)
        self._limits = Limits(namespace, max_bytes, quota, ttl, release_grace, temp_age)
        self._sweeper = Sweeper(self._root, self._limits)
        self._epochs = namespaces.Epochs()
        self._manifests = Manifests()
        self._due_lock = threading.Lock()
        # When released and old chunks are looked for again: by namespace, and at first.
        self._dues: dict[str, float] = {}
        self._due = time.monotonic() + LEAST_PAUSE
        try:
            folders.make_folder(self._root, self._root)
        except (FileExistsError, NotADirectoryError):
            raise InvalidInputError(f"{self.root} is not a folder; name another one") from None
        except OSError as error:
            self._counters.note(str(error))

    def __repr__(self) -> str:
        """The call that made it."""
        return (
            f"DiskStore({self._root!r}, namespace={self.namespace!r}, "
            f"max_bytes={self.max_bytes}, quota={self.quota!r}, ttl={self.ttl}, "
            f"durable={self.durable}, codec={self._codec!r}, release_grace={self.release_grace}, "
            f"temp_age={self.temp_age}, tier={self.tier!r})"
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
        self._folder(check_key(key).namespace)
        return self._reading.get(key, layout, out)

    def reader(self, key: ChunkKey, layout: ChunkLayout) -> LayerFile | None:
        """The open file, if it is in the order of the layers: no decoding, one shape."""
        self._folder(check_key(key).namespace)
        return self._reading.reader(key, layout)

    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Write a chunk and publish it in one step, unless its namespace is deleted meanwhile.

        Under `locked`, "meanwhile" is since the lock was taken.
        """
        check_chunk(check_key(key), chunk)
        stem = self._stem(key)
        spec = file_spec(key, chunk.layout, self._codec)
        least, limit = spec.payload + ALIGNMENT, self._limits.largest(key.namespace)
        if limit is not None and least > limit:
            name = "max_bytes" if limit == self.max_bytes else "quota"
            self._counters.failed(f"a file of {least} bytes exceeds {name}={limit}")
            return False
        try:
            size = self._write(stem, key.namespace, chunk, spec)
        except (OSError, SafetensorError, CorruptChunkError) as error:
            self._counters.failed(f"{type(error).__name__}: {error}")
            return False
        self._counters.kept(self.tier, size)
        self._counters.add("evictions", self._sweeper.written(key.namespace, size))
        if self.ttl is not None:
            self._sweep_when_due(key.namespace)
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether there is a file for the key that is not too old; it is not opened."""
        with suppress(OSError):
            status = os.lstat(self._checked(key) + folders.SUFFIX)
            self._reading.check_age(status)
            return stat.S_ISREG(status.st_mode)
        return False

    def touch(self, key: ChunkKey) -> None:
        """Mark the file as used now, unless it was within the last minute."""
        with suppress(OSError):
            path = self._checked(key) + folders.SUFFIX
            mark_used(path, os.lstat(path), dated=self.ttl is not None)

    def delete(self, key: ChunkKey) -> bool:
        """Unlink the file; False when there is none or it cannot be removed."""
        with suppress(OSError):
            os.unlink(self._checked(key) + folders.SUFFIX)
            return True
        return False

    def delete_namespace(self, namespace: str) -> int:
        """Remove the folder of a namespace but for the file `epoch`, which holds nothing of it.

        Chunks that are being written meanwhile, and those that are being computed under `locked`,
        are not kept.  Who has a file open reads on.

        Raises:
            InvalidInputError: If the store serves another namespace.
            OSError: If something could not be removed.
        """
        folder = self._folder(namespace)
        folders.make_folder(self._root, folder)
        dropped = namespaces.delete(folder, durable=self.durable)
        wipe()
        return dropped

    def epoch(self, namespace: str) -> int:
        """Grows with every deletion of the namespace, by any process; at first 0."""
        return namespaces.epoch(self._folder(namespace))

    def describe(self, spec: str, namespace: str, description: Mapping[str, Any]) -> None:
        """Note what `spec` stands for; it is written beside the first chunk that is put."""
        self._folder(namespace)
        self._manifests.note(folders.spec_path(self._root, namespace, spec), description)

    @contextmanager
    def locked(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Hold the lock files of the keys' stripes, 256 per namespace."""
        keys = list(keys)
        places = [self._folder(key.namespace) for key in keys]
        paths = {folders.lock_path(self._root, key) for key in keys}
        prepare = partial(folders.make_folder, self._root)
        with hold_files(paths, prepare), self._epochs.hold(places):
            yield

    def claim(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` uses the key; best effort."""
        stem, folder = self._stem(key), self._folder(key.namespace)
        check = partial(namespaces.check_epoch, folder, self._epochs.of(folder))
        with suppress(OSError):
            folders.make_folder(self._root, os.path.dirname(stem))
            folders.claim(stem, owner, check)
        self._sweep_when_due(key.namespace)

    def release(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` no longer uses the key; best effort."""
        with suppress(OSError):
            folders.release(self._checked(key), owner)
        self._sweep_when_due(key.namespace)

    def sweep(self) -> int:
        """Drop what is released, too old, unfinished or above a limit; one at a time each."""
        dropped = self._sweeper.sweep()
        self._counters.add("evictions", dropped)
        return dropped

    def stats(self) -> StoreStats:
        """Counters of this store in this process."""
        return self._counters.stats()

    def _folder(self, namespace: str) -> str:
        if self.namespace is not None and namespace != self.namespace:
            raise InvalidInputError(
                f"the store serves the namespace {self.namespace!r}, not {namespace!r}; open "
                "another one for that"
            )
        return folders.namespace_folder(self._root, namespace)

    def _stem(self, key: ChunkKey) -> str:
        self._folder(key.namespace)
        return folders.stem_path(self._root, key)

    def _checked(self, key: ChunkKey) -> str:
        """The stem, where its folder exists and no link is on the way; `OSError` else."""
        stem = self._stem(key)
        folders.check_folder(self._root, os.path.dirname(stem))
        return stem

    def _write(self, stem: str, namespace: str, chunk: ChunkKV, spec: FileSpec) -> int:
        folder = self._folder(namespace)
        check = partial(namespaces.check_epoch, folder, self._epochs.of(folder))
        folders.make_folder(self._root, os.path.dirname(stem))
        path = stem + folders.SUFFIX
        size = publish(path, chunk, spec, self._codec, durable=self.durable, check=check)
        self._manifests.publish(os.path.dirname(os.path.dirname(stem)))
        return size

    def _sweep_when_due(self, namespace: str) -> None:
        """Sweep the namespace in the background, once per pause."""
        with self._due_lock:
            now = time.monotonic()
            if now < self._dues.get(namespace, self._due):
                return
            self._dues[namespace] = now + self._limits.pause()

        def sweep() -> None:
            self._counters.add("evictions", self._sweeper.sweep_one(namespace))

        with suppress(RuntimeError):  # no more threads: another time
            threading.Thread(target=sweep, name="kvcache-rag-sweep", daemon=True).start()
