"""The folders of a store on disk: where a chunk lies, what lies around, and what has to go.

    root/sweep.lock
    root/<namespace digest>/locks/<00..ff>.lock
    root/<namespace digest>/quarantine/<time>-<digest>
    root/<namespace digest>/<spec[:16]>/<digest[:2]>/<digest>.safetensors
                                                     <digest>.owner-<id>  <digest>.released-<id>
                                                     .tmp*

Only names of these forms are ever touched; nothing else in the root is ours.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache_rag.stores.checks import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.chunk import ChunkKey

SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
MAX_QUARANTINED = 4  # per namespace

_FOLDERS = (re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{2}"))
_FILE = re.compile(r"([0-9a-f]{64})\.(safetensors|owner|released)(?:-[0-9a-f]{16})?")


_ALWAYS = 0
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"):
    _ALWAYS |= getattr(os, _flag, 0)

# O_NONBLOCK: a pipe in place of a file must not stop the reader.
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
WRITE = os.O_RDWR
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)

# What opening or reading a link, a socket or a folder says.
NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)

USED_AGAIN = 60.0  # seconds: a file that was marked within them is not marked again


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A descriptor of what is at `path` itself: no link is followed."""
    descriptor = os.open(path, flags | _ALWAYS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def mark_used(path: str, status: os.stat_result) -> None:
    """Let a file count as used now; best effort.

    In a read-only folder nothing is marked, and nothing is evicted either.
    """
    if time.time() - status.st_mtime > USED_AGAIN:
        with suppress(OSError):
            os.utime(path)


def namespace_path(root: str, key: ChunkKey) -> str:
    """Folder of the key's namespace."""
    return f"{root}/{hashlib.sha256(key.namespace.encode()).hexdigest()[:32]}"


def stem_path(root: str, key: ChunkKey) -> str:
    """Path of the key's files without their suffix; of digests only, whatever the key holds.

    Raises:
        InvalidInputError: If the key's digest or spec is not 64 hexadecimal digits.
    """
    check_key(key)
    return f"{namespace_path(root, key)}/{key.spec[:16]}/{key.digest[:2]}/{key.digest}"


def lock_path(root: str, key: ChunkKey) -> str:
    """Lock file of the key's stripe; 256 per namespace."""
    check_key(key)
    return f"{namespace_path(root, key)}/locks/{key.digest[:2]}.lock"


def make_folder(root: str, path: str) -> None:
    """Make `path` and what is missing between it and `root`, for this user only.

    Raises:
        OSError: If it cannot be made.
    """
    if os.path.isdir(path):
        return
    if path != root:
        make_folder(root, os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    else:
        os.makedirs(path, 0o700, exist_ok=True)


def quarantine(root: str, key: ChunkKey, found: os.stat_result) -> None:
    """Put the key's file aside, unless another one took its place since `found`; best effort.

    A link or a folder in its place is moved as such.  The newest few stay to be looked at.
    """
    path = stem_path(root, key) + SUFFIX
    folder = f"{namespace_path(root, key)}/quarantine"
    with suppress(OSError):
        now = os.lstat(path)
        if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
            return
        make_folder(root, folder)
        os.replace(path, f"{folder}/{time.time_ns():020d}-{key.digest}")
        for name in sorted(os.listdir(folder))[:-MAX_QUARANTINED]:
            _unlink(f"{folder}/{name}")


@dataclass
class _Entry:
    """What lies around one digest in one folder."""

    path: str = ""
    mtime: float = 0.0
    size: int = 0
    claimed: bool = False
    tombstones: list[tuple[float, str]] = field(default_factory=list)

    def is_released(self, latest: float) -> bool:
        """Whether the last owner let go at `latest` or before."""
        return (
            not self.claimed
            and bool(self.tombstones)
            and all(mtime <= latest for mtime, _ in self.tombstones)
        )


@dataclass(frozen=True)
class Swept:
    """What a sweep did: chunks dropped, and bytes of chunks that are left."""

    dropped: int
    nbytes: int


def sweep(root: str, *, limit: int | None, room: int, released: float, temporary: float) -> Swept:
    """Drop what has to go; readers that have a file open keep what they read.

    Args:
        root: The store's folder.
        limit: Bytes of chunks that may stay; when there are more, the least recently used go.
        room: How far below the limit to go then, in bytes.
        released: Chunks go when their last owner let go at this time or before, in seconds since
            the epoch.
        temporary: Unfinished files go when they were last written at this time or before.
    """
    dropped = 0
    kept: list[tuple[float, int, str]] = []
    for folder in _folders(root, _FOLDERS):
        for entry in _entries(folder, temporary).values():
            if entry.is_released(released):
                dropped += bool(entry.path) and _unlink(entry.path)
                for _, path in entry.tombstones:
                    _unlink(path)
            elif entry.path:
                kept.append((entry.mtime, entry.size, entry.path))
    nbytes = sum(size for _, size, _ in kept)
    if limit is not None and nbytes > limit:
        for _, size, path in sorted(kept):
            if nbytes <= limit - room:
                break
            dropped += _unlink(path)
            nbytes -= size
    return Swept(dropped, nbytes)


def _folders(path: str, levels: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    if not levels:
        yield path
        return
    with suppress(OSError), os.scandir(path) as found:
        for entry in found:
            if levels[0].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield from _folders(entry.path, levels[1:])


def _entries(folder: str, temporary: float) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    with suppress(OSError), os.scandir(folder) as found:
        for item in found:
            with suppress(OSError):
                _note(item, entries, temporary)
    return entries


def _note(item: os.DirEntry[str], entries: dict[str, _Entry], temporary: float) -> None:
    status = item.stat(follow_symlinks=False)
    if item.name.startswith(TEMPORARY):
        if status.st_mtime <= temporary:
            _unlink(item.path)
        return
    match = _FILE.fullmatch(item.name)
    if match is None:
        return
    entry = entries.setdefault(match[1], _Entry())
    if match[2] == "owner":
        entry.claimed = True
    elif match[2] == "released":
        entry.tombstones.append((status.st_mtime, item.path))
    else:
        entry.path, entry.mtime, entry.size = item.path, status.st_mtime, status.st_size


def _unlink(path: str) -> bool:
    with suppress(OSError):
        os.unlink(path)
        return True
    return False
