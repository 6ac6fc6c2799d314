"""The objects of a store on a remote: writing them whole, generations, sweeping.

They lie under the same relative paths as the files of a `DiskStore`, and one more per namespace
that was ever deleted, outside its folder: `<namespace digest>.epoch`, a number in decimal digits.
Every function takes a file system of fsspec and raises whatever that raises.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from kvcache_rag.stores.base import next_generation
from kvcache_rag.stores.disk import folders

if TYPE_CHECKING:
    from kvcache_rag.kv.chunk import ChunkKey


_DIGITS = 20

_LEFT_OVER = 3600.0  # seconds after which an unfinished file is of a killed writer

_STRIPE = re.compile(r"[0-9a-f]{32}/[0-9a-f]{16}/[0-9a-f]{2}")

_UNFINISHED = re.compile(r"\.tmp-[0-9a-f]{32}|[0-9a-f]{64}\.(owner|released)-[0-9a-f]{16}")


@dataclass(frozen=True)
class Objects:
    """Where the objects of a store are and how they are written.

    Attributes:
        root: Path of the store on its file system.
        renames: Whether a file must be renamed into place to appear whole.
    """

    root: str
    renames: bool

    def path(self, key: ChunkKey) -> str:
        """Where the chunk of `key` is or would be."""
        return folders.stem_path(self.root, key) + folders.SUFFIX

    def publish(self, fs: Any, path: str, data: bytes) -> None:
        """Write an object that others see whole or not at all."""
        if not self.renames:
            fs.pipe_file(path, data)
            return
        folder = path.rpartition("/")[0]
        temporary = folders.temporary_path(folder)
        fs.makedirs(folder, exist_ok=True)
        try:
            fs.pipe_file(temporary, data)
            fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                fs.rm_file(temporary)
            raise

    def upload(self, fs: Any, key: ChunkKey, data: bytes, begun: int) -> bool:
        """Publish a chunk, and take it back when its namespace was deleted since `begun`.

        This runs to its end even when nobody waits for it any more, so a late upload does not
        bring a deleted namespace back.
        """
        self.publish(fs, self.path(key), data)
        if self.generation(fs, key.namespace) <= begun:
            return True
        remove(fs, self.path(key))
        return False

    def generation(self, fs: Any, namespace: str) -> int:
        """About when the namespace was last deleted; 0 for never."""
        try:
            data = fetched(fs, self._generation_path(namespace), _DIGITS)
        except FileNotFoundError:
            return 0
        return int(data) if data.isdigit() else 0

    def delete_namespace(self, fs: Any, namespace: str, generation: int | None) -> int:
        """Remove all objects of a namespace; the number of chunks among them.

        Raises:
            OSError: If some are left.
        """
        folder = folders.namespace_folder(self.root, namespace)
        last = generation or next_generation(self.generation(fs, namespace))
        self._set(fs, namespace, last - 1)  # uploads that are under way take their object back
        chunks: set[str] = set()
        for _ in range(3):  # what another process wrote meanwhile goes too
            paths = listed(fs, folder)
            if not paths:
                break
            chunks |= {path for path in paths if path.endswith(folders.SUFFIX)}
            with suppress(FileNotFoundError):
                fs.rm(folder, recursive=True)
        else:
            if listed(fs, folder):
                raise OSError(f"objects of the namespace are left in {folder}; delete it again")
        self._set(fs, namespace, last)  # copies that were made meanwhile are stale
        return len(chunks)

    def sweep(self, fs: Any) -> None:
        """Remove what killed writers, and versions with owners of chunks, left behind."""
        for path in listed(fs, self.root):
            place, _, name = path.removeprefix(f"{self.root}/").rpartition("/")
            if (not place or _STRIPE.fullmatch(place)) and _UNFINISHED.fullmatch(name):
                written = _modified(fs, path)
                if written is not None and written <= time.time() - _LEFT_OVER:
                    remove(fs, path)

    def _set(self, fs: Any, namespace: str, number: int) -> None:
        self.publish(fs, self._generation_path(namespace), str(number).encode())

    def _generation_path(self, namespace: str) -> str:
        return folders.namespace_folder(self.root, namespace) + ".epoch"


def fetched(fs: Any, path: str, end: int) -> bytes:
    """The first `end` bytes of an object, or all of a shorter one.

    Raises:
        OSError: If the driver answers with anything but bytes; also what it raises itself.
    """
    data = fs.cat_file(path, start=0, end=end)
    if not isinstance(data, bytes | bytearray | memoryview):
        # `bytes` of a number would be as many zeros.
        raise OSError(f"the driver's cat_file returned {type(data).__name__}, not bytes")
    return bytes(data)


def holds(fs: Any, path: str) -> bool:
    """Whether there is an object; unlike `fs.exists` an error is no answer."""
    try:
        info = fs.info(path)
    except FileNotFoundError:
        return False
    return bool(info["type"] == "file")


def remove(fs: Any, path: str) -> bool:
    """Remove an object; False when there was none, as far as the remote says."""
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return False
    return True


def listed(fs: Any, folder: str) -> list[str]:
    """Paths of all objects below a folder."""
    try:
        return [str(path) for path in fs.find(folder)]
    except FileNotFoundError:
        return []


def _modified(fs: Any, path: str) -> float | None:
    """When an object was written, in seconds since the epoch; None when it cannot be known."""
    try:
        moment = fs.modified(path)
    except FileNotFoundError:
        return None
    if not isinstance(moment, datetime):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
