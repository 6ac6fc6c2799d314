"""What the times of a file say about a chunk: when it was used, when it was written.

The mtime is the last use.  A store with a `ttl` has to know when a chunk was written; it leaves the
mtime at that, and notes the use in the atime, which is what the two names mean.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache_rag.errors import CorruptChunkError, InvalidInputError
from kvcache_rag.stores.base import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag.kv.chunk import ChunkKey


USED_AGAIN = 60.0  # seconds: a file that was marked within them is not marked again

_FOLLOW = os.utime not in os.supports_follow_symlinks  # where it cannot be avoided


def set_times(path: str, times: tuple[int, int] | None = None) -> None:
    """Set the times of what is at `path` itself, to now or to (atime, mtime) in nanoseconds.

    Raises:
        OSError: If it cannot be done.
    """
    if times is None:
        os.utime(path, follow_symlinks=_FOLLOW)
    else:
        os.utime(path, ns=times, follow_symlinks=_FOLLOW)


def check_ttl(ttl: float | None) -> float | None:
    """Return the life time.

    Raises:
        InvalidInputError: If it is not above zero.
    """
    if ttl is not None and not ttl > 0:
        raise InvalidInputError(f"ttl is a number of seconds above 0, not {ttl}; None for no end")
    return ttl


def last_use(status: os.stat_result, *, dated: bool) -> float:
    """When a chunk was used last, in seconds since the epoch.

    Args:
        status: Of its file.
        dated: Whether the mtime is the time of writing.
    """
    return max(status.st_atime, status.st_mtime) if dated else status.st_mtime


def mark_used(path: str, status: os.stat_result, *, dated: bool) -> None:
    """Let a file count as used now, unless it did within the last minute; best effort.

    In a read-only folder nothing is marked, and nothing is evicted either.

    Args:
        path: The file.
        status: Its status; what is no file is left alone.
        dated: Whether the mtime is the time of writing and stays.
    """
    if not stat.S_ISREG(status.st_mode):
        return
    if abs(time.time() - last_use(status, dated=dated)) > USED_AGAIN:
        with suppress(OSError):
            set_times(path, (time.time_ns(), status.st_mtime_ns) if dated else None)


# What lies around a digest in a folder of chunks, and dropping it.
#
# A name that is not one of ours is left alone, and no link is followed.


TEMPORARY = ".tmp"

_FILE = re.compile(r"([0-9a-f]{64})\.(safetensors(?!-)|(?:owner|released)(?=-))(?:-[0-9a-f]{16})?")


@dataclass(frozen=True)
class Deadlines:
    """What is too old for a sweep; all times in seconds since the epoch.

    Attributes:
        released: Chunks go whose last owner let go then or before.
        temporary: Unfinished files go that were last written then or before.
        written: Chunks go that were written then or before; None for none.
        future: A file dated later than this is of a clock that was wrong.  It counts as of now,
            and is dated so, for else it would never become old.
    """

    released: float
    temporary: float
    written: float | None
    future: float

    def is_expired(self, written: float) -> bool:
        """Whether a chunk written then has to go."""
        return self.written is not None and written <= self.written


@dataclass
class Entry:
    """What lies around one digest in one folder.

    Attributes:
        path: The chunk's file, "" when there is none.
        written: Its mtime.
        used: When it was used last.
        size: Its bytes.
        claimed: Whether an owner uses it.
        tombstones: Time and path of every release.
    """

    path: str = ""
    written: float = 0.0
    used: float = 0.0
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


def folders(path: str, levels: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    """Folders below `path` whose names, level by level, are of the given forms."""
    if not levels:
        yield path
        return
    with suppress(OSError), os.scandir(path) as found:
        for entry in found:
            if levels[0].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield from folders(entry.path, levels[1:])


def scan(folder: str, when: Deadlines) -> dict[str, Entry]:
    """What lies around each digest in a folder; unfinished files that are too old are dropped."""
    entries: dict[str, Entry] = {}
    with suppress(OSError), os.scandir(folder) as found:
        for item in found:
            with suppress(OSError):
                _note(item, entries, when)
    return entries


def _note(item: os.DirEntry[str], entries: dict[str, Entry], when: Deadlines) -> None:
    match = _FILE.fullmatch(item.name)
    unfinished = item.name.startswith(TEMPORARY)
    if match is None and not unfinished:
        return
    status = item.stat(follow_symlinks=False)
    if status.st_mtime > when.future:
        set_times(item.path)
        status = os.lstat(item.path)
    if match is None:
        if status.st_mtime <= when.temporary:
            unlink(item.path)
        return
    entry = entries.setdefault(match[1], Entry())
    if match[2] == "owner":
        entry.claimed = True
    elif match[2] == "released":
        entry.tombstones.append((status.st_mtime, item.path))
    else:
        used = min(last_use(status, dated=when.written is not None), when.future)
        entry.path, entry.size = item.path, status.st_size
        entry.written, entry.used = status.st_mtime, used


def unlink(path: str) -> bool:
    """Remove a file; False when there is none or it cannot be removed."""
    with suppress(OSError):
        os.unlink(path)
        return True
    return False


def remove(path: str, failures: list[OSError]) -> int:
    """Remove a file, a link or a folder with all it holds; a link is not followed.

    Args:
        path: What to remove; it may be gone already.
        failures: What could not be removed is noted here; the rest goes.

    Returns:
        How many files of chunks were removed.
    """
    removed = 0
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            removed = sum(remove(f"{path}/{name}", failures) for name in os.listdir(path))
            os.rmdir(path)
        else:
            os.unlink(path)
            removed = int(_is_chunk(path))
    except FileNotFoundError:
        return removed
    except OSError as error:
        failures.append(error)
    return removed


def _is_chunk(path: str) -> bool:
    match = _FILE.fullmatch(os.path.basename(path))
    return match is not None and match[2] == "safetensors"


# The folders of a store on disk: where a chunk lies, what lies around, and what has to go.
#
#     root/<namespace digest>/epoch                        touched when the namespace is deleted
#     root/<namespace digest>/sweep.lock
#     root/<namespace digest>/.deleted-*                   of a deletion that was interrupted
#     root/<namespace digest>/locks/<00..ff>.lock
#     root/<namespace digest>/quarantine/<time>-<digest>
#     root/<namespace digest>/<spec[:16]>/<digest[:2]>/<digest>.safetensors
#                                                      <digest>.owner-<id>  <digest>.released-<id>
#                                                      .tmp*
#
# Only names of these forms are ever touched; nothing else in the root is ours. Below the root no
# link is followed: a link or a file in place of a folder is refused.


SUFFIX = ".safetensors"

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
            remove(f"{folder}/{name}", [])


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
    return list(folders(root, (_NAMESPACE,)))


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
    for place in folders(folder, _CHUNKS):
        for entry in scan(place, when).values():
            released = entry.is_released(when.released)
            gone = not entry.path
            if entry.path and (released or when.is_expired(entry.written)):
                gone = unlink(entry.path)
                dropped += gone
            elif entry.path:
                kept.append((entry.used, entry.size, entry.path))
            # Last: without a tombstone a chunk that is still there would never go.
            for _, path in entry.tombstones if released and gone else ():
                unlink(path)
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
        dropped += unlink(path)
        nbytes -= size
        gone += 1
    return Swept(dropped, ordered[gone:])


def _clear(folder: str, when: Deadlines) -> None:
    """Drop unfinished manifests, what an interrupted deletion left, and what was aside too long."""
    for place in folders(folder, _CHUNKS[:1]):
        scan(place, when)
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(DELETED):
                remove(f"{folder}/{name}", [])
    aside = f"{folder}/quarantine"
    with suppress(OSError):
        _check_one(aside)
        for name in os.listdir(aside):
            if when.is_expired(os.lstat(f"{aside}/{name}").st_mtime):
                remove(f"{aside}/{name}", [])


# Who uses a chunk on disk: empty marker files beside it.
#
# `<digest>.owner-<id>` says that an owner uses the chunk, `<digest>.released-<id>` that it stopped
# at the marker's mtime; `<id>` is a digest of the owner's name. One rename turns one into the
# other, so an owner never has both for good.


def claim(stem: str, owner: str, check: Callable[[], None]) -> None:
    """Mark the chunk at path `stem` (without suffix) as used by `owner`; its folder must exist.

    Args:
        stem: Path of the chunk.
        owner: Who uses it.
        check: Called before the mark is published; raises when it must not be any more.

    Raises:
        OSError: If the marker cannot be made.
    """
    mark = identity(owner)
    temporary = f"{os.path.dirname(stem)}/{TEMPORARY}-{secrets.token_hex(16)}"
    # Renamed, not opened: a link in the place of the mark is replaced and not followed.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        check()
        os.replace(temporary, f"{stem}.owner-{mark}")
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    # The claim is made before the release is undone, so a sweep in between sees a claim.
    with suppress(FileNotFoundError):
        os.unlink(f"{stem}.released-{mark}")


def release(stem: str, owner: str) -> None:
    """Turn the owner's mark into a tombstone of this moment.

    Raises:
        OSError: If it cannot be done; `FileNotFoundError` if the owner has no mark.
    """
    release_mark(stem, identity(owner))


def release_mark(stem: str, mark: str) -> None:
    """Turn the mark of an owner, known by `identity`, into a tombstone of this moment.

    Raises:
        OSError: If it cannot be done; `FileNotFoundError` if the owner has no mark.
    """
    # Before the rename, so that no sweep sees a tombstone as old as the claim.
    set_times(f"{stem}.owner-{mark}")
    os.replace(f"{stem}.owner-{mark}", f"{stem}.released-{mark}")


def identity(owner: str) -> str:
    """The 16 hexadecimal digits by which an owner is known on disk."""
    return hashlib.sha256(owner.encode()).hexdigest()[:16]
