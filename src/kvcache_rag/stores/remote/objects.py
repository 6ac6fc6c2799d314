"""The objects of a store on a remote: writing them whole, markers, epochs, sweeping.

They lie under the same relative paths as the files of a `DiskStore`, and one more per namespace
that was ever deleted, outside its folder: `<namespace digest>.epoch`, a number in decimal digits.
Every function takes a file system of fsspec and raises whatever that raises.
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from kvcache_rag.stores.disk import folders

if TYPE_CHECKING:
    from kvcache_rag.kv.chunk import ChunkKey


_EPOCH_DIGITS = 20

_LEFT_OVER = 3600.0  # seconds after which an unfinished file is of a killed writer

_OURS = re.compile(
    r"(?P<stem>[0-9a-f]{32}/[0-9a-f]{16}/[0-9a-f]{2}/(?P<digest>[0-9a-f]{64}))"
    r"\.(?P<kind>safetensors(?!-)|(?:owner|released)(?=-))(?:-[0-9a-f]{16})?"
)

_UNFINISHED = re.compile(r"(?:[0-9a-f]{32}/[0-9a-f]{16}/[0-9a-f]{2}/)?\.tmp-[0-9a-f]{32}")


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

    def marker(self, key: ChunkKey, kind: str, identity: str) -> str:
        """Where an owner's marker is or would be; `kind` is `owner` or `released`."""
        return f"{folders.stem_path(self.root, key)}.{kind}-{identity}"

    def publish(self, fs: Any, path: str, data: bytes) -> None:
        """Write an object that others see whole or not at all."""
        if not self.renames:
            fs.pipe_file(path, data)
            return
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/.tmp-{secrets.token_hex(16)}"
        fs.makedirs(folder, exist_ok=True)
        try:
            fs.pipe_file(temporary, data)
            fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                fs.rm_file(temporary)
            raise

    def upload(self, fs: Any, key: ChunkKey, data: bytes, epoch: int) -> bool:
        """Publish a chunk, and take it back when its namespace is no longer of `epoch` then.

        This runs to its end even when nobody waits for it any more, so a late upload does not
        bring a deleted namespace back.
        """
        self.publish(fs, self.path(key), data)
        if self.epoch(fs, key.namespace) == epoch:
            return True
        remove(fs, self.path(key))
        return False

    def claim(self, fs: Any, key: ChunkKey, identity: str) -> None:
        """Mark the chunk as used; made before the release is undone, as a sweep may run now."""
        self.publish(fs, self.marker(key, "owner", identity), b"")
        remove(fs, self.marker(key, "released", identity))

    def release(self, fs: Any, key: ChunkKey, identity: str) -> None:
        """Turn an owner's mark into a tombstone of this moment; nothing where there is no mark."""
        mark = self.marker(key, "owner", identity)
        if holds(fs, mark):
            self.publish(fs, self.marker(key, "released", identity), b"")
            remove(fs, mark)

    def epoch(self, fs: Any, namespace: str) -> int:
        """How often, or when last, the namespace was deleted; 0 for never."""
        try:
            data = fs.cat_file(self._epoch_path(namespace), start=0, end=_EPOCH_DIGITS)
        except FileNotFoundError:
            return 0
        return int(data) if data.isdigit() else 0

    def delete_namespace(self, fs: Any, namespace: str) -> int:
        """Remove all objects of a namespace; the number of chunks among them.

        Raises:
            OSError: If some are left.
        """
        folder = folders.namespace_folder(self.root, namespace)
        self._grow(fs, namespace)  # uploads that are under way take their object back
        chunks: set[str] = set()
        for _ in range(3):  # what another process wrote meanwhile goes too
            found = listed(fs, folder)
            if not found:
                break
            chunks |= {path for path in found if path.endswith(folders.SUFFIX)}
            with suppress(FileNotFoundError):
                fs.rm(folder, recursive=True)
        else:
            if listed(fs, folder):
                raise OSError(f"objects of the namespace are left in {folder}; delete it again")
        self._grow(fs, namespace)  # copies that were made meanwhile are stale
        return len(chunks)

    def sweep(self, fs: Any, released: float) -> int:
        """Drop chunks whose last owner let go at `released` or before, and unfinished files.

        Returns:
            How many chunks were dropped.
        """
        dropped = 0
        entries = self._entries(fs)
        for entry in entries.values():
            if entry.claimed or not entry.tombstones:
                continue
            times = [_modified(fs, path) for path in entry.tombstones]
            if all(moment is not None and moment <= released for moment in times):
                dropped += bool(entry.chunk) and remove(fs, entry.chunk)
                for path in entry.tombstones:
                    remove(fs, path)
        return dropped

    def _entries(self, fs: Any) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for path in listed(fs, self.root):
            name = path.removeprefix(f"{self.root}/")
            match = _OURS.fullmatch(name)
            if match:
                entries.setdefault(match["stem"], _Entry()).note(match["kind"], path)
            elif _UNFINISHED.fullmatch(name):
                written = _modified(fs, path)
                if written is not None and written <= time.time() - _LEFT_OVER:
                    remove(fs, path)
        return entries

    def _grow(self, fs: Any, namespace: str) -> None:
        number = max(self.epoch(fs, namespace) + 1, time.time_ns())
        self.publish(fs, self._epoch_path(namespace), str(number).encode())

    def _epoch_path(self, namespace: str) -> str:
        return folders.namespace_folder(self.root, namespace) + ".epoch"


@dataclass
class _Entry:
    """What lies around one digest."""

    chunk: str = ""
    claimed: bool = False
    tombstones: list[str] = field(default_factory=list)

    def note(self, kind: str, path: str) -> None:
        if kind == "owner":
            self.claimed = True
        elif kind == "released":
            self.tombstones.append(path)
        else:
            self.chunk = path


def holds(fs: Any, path: str) -> bool:
    """Whether there is an object; unlike `fs.exists` an error is no answer."""
    try:
        found = fs.info(path)
    except FileNotFoundError:
        return False
    return bool(found["type"] == "file")


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
