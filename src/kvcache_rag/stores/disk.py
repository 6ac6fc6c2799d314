"""Chunks on disk, one safetensors file each, shared by every process that opens the folder.

The file system is the truth: there is no index, and nothing in memory but counters.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from kvcache_rag.chunk import ChunkKV
from kvcache_rag.codecs import Codec, Native
from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.stores import directory, ownership
from kvcache_rag.stores.base import ChunkStore, Hit, StoreStats
from kvcache_rag.stores.checks import check_chunk, check_key, check_out
from kvcache_rag.stores.chunkfile import (
    ALIGNMENT,
    FileSpec,
    check_header,
    file_spec,
    read_file,
    write_file,
)
from kvcache_rag.stores.counters import Counters
from kvcache_rag.stores.locks import hold_files, try_file
from kvcache_rag.stores.scatter import positional

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvcache_rag.chunk import ChunkKey, ChunkLayout

_LEAST_PAUSE = 60.0  # seconds between two sweeps for released chunks
_ROOM = 10  # `put` sweeps when a tenth of the limit was written, and then frees a tenth


class DiskStore(ChunkStore):
    """Chunks as files under `root`; any number of threads and processes may use it at once.

    A chunk is published by renaming a finished file, read with its own descriptor, checked byte for
    byte and never modified in place.  Locks exclude the processes of one machine; two machines on a
    shared folder may compute a chunk once each, and both are right.

    Attributes:
        root: The folder; it is made when missing.
        max_bytes: Limit on the files of all namespaces, None for none.  Kept by `put` within a
            tenth per process, and by `sweep`.
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
        max_bytes: int | None = None,
        durable: bool = True,
        codec: Codec | None = None,
        release_grace: float = 600.0,
        temp_age: float = 3600.0,
        tier: str = "disk",
    ) -> None:
        """Open a folder; one that cannot be written serves what it holds.

        Raises:
            InvalidInputError: If `root` is a file or lies below one.
        """
        self.root = Path(os.path.abspath(root))
        self.max_bytes = max_bytes
        self.durable = durable
        self.release_grace = release_grace
        self.temp_age = temp_age
        self.tier = tier
        self._codec = codec or Native()
        self._root = str(self.root)
        self._counters = Counters()
        self._room_lock = threading.Lock()
        self._due = time.monotonic() + _LEAST_PAUSE  # when released chunks are looked for again
        self._room = 0  # bytes that `put` may write before it looks at the whole folder again
        try:
            directory.make_folder(self._root, self._root)
        except (FileExistsError, NotADirectoryError):
            raise InvalidInputError(f"{self.root} is not a folder; name another one") from None
        except OSError as error:
            self._counters.note(str(error))

    def __repr__(self) -> str:
        """The call that made it."""
        return (
            f"DiskStore({self._root!r}, max_bytes={self.max_bytes}, durable={self.durable}, "
            f"codec={self._codec!r}, release_grace={self.release_grace}, "
            f"temp_age={self.temp_age}, tier={self.tier!r})"
        )

    @property
    def codec(self) -> Codec:
        """The form in which this store writes chunks."""
        return self._codec

    def path(self, key: ChunkKey) -> Path:
        """Where the file of `key` is or would be."""
        return Path(self._path(key))

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Read a chunk, into `out` without a copy when that lies in main memory."""
        spec = file_spec(check_key(key), layout, self._codec)
        if out is None:
            out = _empty(key, layout)
        else:
            check_out(key, layout, out)
        try:
            self._read(key, spec, out)
        except CorruptChunkError as error:
            self._counters.add("corrupt")
            raise CorruptChunkError(
                f"the file of chunk {key.digest} was put aside, prefill it: {error}"
            ) from None
        except OSError as error:
            self._counters.add("misses")
            raise ChunkNotFoundError(
                f"chunk {key.digest} is not on disk, prefill it: {error}"
            ) from None
        self._counters.hit(self.tier)
        return Hit(out, self.tier)

    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Write a chunk and publish it in one step."""
        check_chunk(check_key(key), chunk)
        spec = file_spec(key, chunk.layout, self._codec)
        least = spec.payload + ALIGNMENT
        if self.max_bytes is not None and least > self.max_bytes:
            self._counters.failed(f"a file of {least} bytes exceeds max_bytes={self.max_bytes}")
            return False
        try:
            size = self._write(key, chunk, spec)
        except (OSError, SafetensorError, CorruptChunkError) as error:
            self._counters.failed(f"{type(error).__name__}: {error}")
            return False
        self._counters.add("puts")
        self._keep_limit(size)
        return True

    def contains(self, key: ChunkKey) -> bool:
        """Whether there is a file for the key; it is not opened."""
        with suppress(OSError):
            return stat.S_ISREG(os.lstat(self._path(key)).st_mode)
        return False

    def touch(self, key: ChunkKey) -> None:
        """Mark the file as used now, unless it was within the last minute."""
        path = self._path(key)
        with suppress(OSError):
            directory.mark_used(path, os.lstat(path))

    def delete(self, key: ChunkKey) -> bool:
        """Unlink the file; False when there is none or it cannot be removed."""
        with suppress(OSError):
            os.unlink(self._path(key))
            return True
        return False

    @contextmanager
    def locked(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Hold the lock files of the keys' stripes, 256 per namespace."""
        paths = {directory.lock_path(self._root, key) for key in keys}
        with suppress(OSError):
            for path in paths:
                directory.make_folder(self._root, os.path.dirname(path))
        with hold_files(paths):
            yield

    def claim(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` uses the key; best effort."""
        stem = directory.stem_path(self._root, key)
        with suppress(OSError):
            directory.make_folder(self._root, os.path.dirname(stem))
            ownership.claim(stem, owner)
        self._sweep_when_due()

    def release(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` no longer uses the key; best effort."""
        stem = directory.stem_path(self._root, key)
        with suppress(OSError):
            ownership.release(stem, owner)
        self._sweep_when_due()

    def sweep(self) -> int:
        """Drop released chunks, unfinished files and what is above the limit; one at a time."""
        return self._sweep(room=0)

    def stats(self) -> StoreStats:
        """Counters of this store in this process."""
        return self._counters.stats()

    def _path(self, key: ChunkKey) -> str:
        return directory.stem_path(self._root, key) + directory.SUFFIX

    def _read(self, key: ChunkKey, spec: FileSpec, out: ChunkKV) -> None:
        path = self._path(key)
        try:
            with directory.opened(path, directory.READ) as descriptor:
                self._read_open(descriptor, key, spec, out)
        except OSError as error:
            if error.errno not in directory.NOT_A_FILE:
                raise
            directory.quarantine(self._root, key, os.lstat(path))
            raise CorruptChunkError(f"it is not a file: {error}") from None

    def _read_open(self, descriptor: int, key: ChunkKey, spec: FileSpec, out: ChunkKV) -> None:
        status = os.fstat(descriptor)
        try:
            read_file(positional(descriptor), status.st_size, spec, self._codec, out)
        except CorruptChunkError:
            directory.quarantine(self._root, key, status)
            raise
        directory.mark_used(self._path(key), status)

    def _write(self, key: ChunkKey, chunk: ChunkKV, spec: FileSpec) -> int:
        path = self._path(key)
        folder = os.path.dirname(path)
        directory.make_folder(self._root, folder)
        temporary = f"{folder}/{directory.TEMPORARY}-{secrets.token_hex(16)}"
        try:
            write_file(temporary, chunk, spec, self._codec)
            size = self._finish(temporary, spec)
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                os.unlink(temporary)
        if self.durable and hasattr(os, "O_DIRECTORY"):
            with directory.opened(folder, directory.FOLDER) as descriptor:
                os.fsync(descriptor)
        return size

    def _finish(self, temporary: str, spec: FileSpec) -> int:
        with directory.opened(temporary, directory.WRITE) as descriptor:
            # What this version of safetensors wrote has to be what every reader expects.
            size = os.fstat(descriptor).st_size
            check_header(positional(descriptor), size, spec)
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o600)
            if self.durable:
                os.fsync(descriptor)
        return size

    def _keep_limit(self, written: int) -> None:
        if self.max_bytes is None:
            return
        with self._room_lock:
            self._room -= written
            if self._room >= 0:
                return
        self._sweep(room=self.max_bytes // _ROOM)

    def _sweep_when_due(self) -> None:
        """Drop what was released long enough ago, in the background, once per grace time."""
        with self._room_lock:
            now = time.monotonic()
            if now < self._due:
                return
            self._due = now + max(self.release_grace, _LEAST_PAUSE)
        threading.Thread(target=self.sweep, name="kvcache-rag-sweep", daemon=True).start()

    def _sweep(self, room: int) -> int:
        now = time.time()
        with try_file(f"{self._root}/sweep.lock") as ours:
            if not ours:
                return 0
            swept = directory.sweep(
                self._root,
                limit=self.max_bytes,
                room=room,
                released=now - self.release_grace,
                temporary=now - self.temp_age,
            )
        if self.max_bytes is not None:
            with self._room_lock:
                self._room = min(self.max_bytes - swept.nbytes, self.max_bytes // _ROOM)
        self._counters.add("evictions", swept.dropped)
        return swept.dropped


def _empty(key: ChunkKey, layout: ChunkLayout) -> ChunkKV:
    # Outside inference mode, so that the chunk can be used in and out of it.
    with torch.inference_mode(mode=False):
        tokens = torch.empty(key.tokens, dtype=torch.int32)
        return ChunkKV(layout, tokens, key.start, layout.empty(key.tokens))
