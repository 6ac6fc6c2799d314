"""The folders of a store on disk: where a chunk lies, what lies around, and what has to go.

    root/<namespace digest>/epoch                        touched when the namespace is deleted
    root/<namespace digest>/sweep.lock
    root/<namespace digest>/.deleted-*                   of a deletion that was interrupted
    root/<namespace digest>/locks/<00..ff>.lock
    root/<namespace digest>/quarantine/<time>-<digest>
    root/<namespace digest>/<spec[:16]>/<digest[:2]>/<digest>.safetensors
                                                     <digest>.owner-<id>  <digest>.released-<id>
                                                     .tmp*

Only names of these forms are ever touched; nothing else in the root is ours.  Below the root no
link is followed: a link or a file in place of a folder is refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores import entries
from kvcache_rag.stores.checks import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.chunk import ChunkKey
    from kvcache_rag.stores.entries import Deadlines

SUFFIX = ".safetensors"
TEMPORARY = entries.TEMPORARY
DELETED = ".deleted-"
MAX_QUARANTINED = 4  # per namespace

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_CHUNKS = (re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{2}"))

_ALWAYS = 0
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_BINARY"):
    _ALWAYS |= getattr(os, _flag, 0)

# O_NONBLOCK: a pipe in place of a file must not stop the reader.
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
WRITE = os.O_RDWR
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)

# What opening or reading a link, a socket or a folder says.
NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A descriptor of what is at `path` itself: no link is followed."""
    descriptor = open_itself(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_itself(path: str, flags: int) -> int:
    """A descriptor of what is at `path` itself, which the caller closes."""
    return os.open(path, flags | _ALWAYS, 0o600)


def namespace_digest(namespace: str) -> str:
    """Name of the folder of a namespace."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:32]


def namespace_folder(root: str, namespace: str) -> str:
    """Folder of a namespace."""
    return f"{root}/{namespace_digest(namespace)}"


def spec_path(root: str, namespace: str, spec: str) -> str:
    """Folder of the chunks of one spec."""
    return f"{namespace_folder(root, namespace)}/{spec[:16]}"


def stem_path(root: str, key: ChunkKey) -> str:
    """Path of the key's files without their suffix; of digests only, whatever the key holds.

    Raises:
        InvalidInputError: If the key's digest or spec is not 64 hexadecimal digits.
    """
    check_key(key)
    return f"{spec_path(root, key.namespace, key.spec)}/{key.digest[:2]}/{key.digest}"


def lock_path(root: str, key: ChunkKey) -> str:
    """Lock file of the key's stripe; 256 per namespace."""
    check_key(key)
    return f"{namespace_folder(root, key.namespace)}/locks/{key.digest[:2]}.lock"


def check_folder(root: str, path: str) -> None:
    """Make sure that `path` and everything between it and `root` are folders, not links to some.

    Raises:
        OSError: If one is missing or something else.
    """
    if path == root:
        return
    check_folder(root, os.path.dirname(path))
    _check_one(path)


def make_folder(root: str, path: str) -> None:
    """Make `path` and what is missing between it and `root`, for this user only.

    Raises:
        OSError: If it cannot be made, or a link or a file is in its place.
    """
    if path == root:
        if not os.path.isdir(path):
            os.makedirs(path, 0o700, exist_ok=True)
        return
    make_folder(root, os.path.dirname(path))
    try:
        _check_one(path)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _check_one(path)


def _check_one(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        reason = "a link or a file is where a folder of the store belongs; remove it"
        raise NotADirectoryError(errno.ENOTDIR, reason, path)


def quarantine(root: str, key: ChunkKey, found: os.stat_result) -> None:
    """Put the key's file aside, unless another one took its place since `found`; best effort.

    A link or a folder in its place is moved as such.  The newest few stay to be looked at.
    """
    path = stem_path(root, key) + SUFFIX
    folder = f"{namespace_folder(root, key.namespace)}/quarantine"
    with suppress(OSError):
        now = os.lstat(path)
        if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
            return
        make_folder(root, folder)
        os.replace(path, f"{folder}/{time.time_ns():020d}-{key.digest}")
        for name in sorted(os.listdir(folder))[:-MAX_QUARANTINED]:
            entries.remove(f"{folder}/{name}", [])


@contextmanager
def quarantining(root: str, key: ChunkKey, found: os.stat_result) -> Iterator[None]:
    """Put the key's file aside when what reads it finds that it is damaged, or no file at all."""
    try:
        yield
    except CorruptChunkError:
        quarantine(root, key, found)
        raise
    except OSError as error:
        if error.errno not in NOT_A_FILE:  # a folder can be opened, not read
            raise
        quarantine(root, key, found)
        raise CorruptChunkError(f"it is not a file: {error}") from None


def namespaces(root: str) -> list[str]:
    """Folders of all namespaces."""
    return list(entries.folders(root, (_NAMESPACE,)))


@dataclass(frozen=True)
class Swept:
    """What a sweep did.

    Attributes:
        dropped: How many chunks went.
        kept: Last use, bytes and path of those that stay.
    """

    dropped: int
    kept: list[tuple[float, int, str]]

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that stay."""
        return sum(size for _, size, _ in self.kept)


def sweep(folder: str, when: Deadlines, *, limit: int | None, room: int) -> Swept:
    """Drop what has to go in one namespace; readers that have a file open keep what they read.

    Args:
        folder: The namespace's folder.
        when: What is too old.
        limit: Bytes of chunks that may stay; when there are more, the least recently used go.
        room: How far below the limit to go then, in bytes.
    """
    dropped = 0
    kept: list[tuple[float, int, str]] = []
    for place in entries.folders(folder, _CHUNKS):
        for entry in entries.scan(place, when).values():
            released = entry.is_released(when.released)
            gone = not entry.path
            if entry.path and (released or when.is_expired(entry.written)):
                gone = entries.unlink(entry.path)
                dropped += gone
            elif entry.path:
                kept.append((entry.used, entry.size, entry.path))
            # Last: without a tombstone a chunk that is still there would never go.
            for _, path in entry.tombstones if released and gone else ():
                entries.unlink(path)
    _clear(folder, when)
    swept = Swept(dropped, kept)
    return swept if limit is None else evict(swept, limit, room)


def evict(swept: Swept, limit: int, room: int) -> Swept:
    """Drop the least recently used of `swept.kept` when they are above `limit` bytes together.

    Args:
        swept: What is there.
        limit: Bytes that may stay.
        room: How far below the limit to go then, in bytes.
    """
    nbytes = swept.nbytes
    if nbytes <= limit:
        return swept
    dropped, gone = swept.dropped, 0
    ordered = sorted(swept.kept)
    for _, size, path in ordered:
        if nbytes <= limit - room:
            break
        # Gone either way: another process may have been faster.
        dropped += entries.unlink(path)
        nbytes -= size
        gone += 1
    return Swept(dropped, ordered[gone:])


def _clear(folder: str, when: Deadlines) -> None:
    """Drop unfinished manifests, what an interrupted deletion left, and what was aside too long."""
    for place in entries.folders(folder, _CHUNKS[:1]):
        entries.scan(place, when)
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(DELETED):
                entries.remove(f"{folder}/{name}", [])
    aside = f"{folder}/quarantine"
    with suppress(OSError):
        _check_one(aside)
        for name in os.listdir(aside):
            if when.is_expired(os.lstat(f"{aside}/{name}").st_mtime):
                entries.remove(f"{aside}/{name}", [])
