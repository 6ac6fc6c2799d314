"""The folder of a store on disk: what lies where, what each name means, and one walk over it.

    root/sweep.lock                                      for a limit on all namespaces
    root/<namespace digest>/epoch                        touched when the namespace is deleted
    root/<namespace digest>/sweep.lock
    root/<namespace digest>/.deleted-*                   of a deletion that was interrupted
    root/<namespace digest>/locks/<00..ff>.lock
    root/<namespace digest>/quarantine/<time>-<digest>
    root/<namespace digest>/<spec[:16]>/spec.json        for people: which model
    root/<namespace digest>/<spec[:16]>/<digest[:2]>/<digest>.safetensors
                                                     <digest>.owner-<id>  <digest>.released-<id>
                                                     .tmp*

Only names of these forms are ever touched; nothing else in the root is ours.  Below the root no
link is followed: a link or a file in place of a folder is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache_rag.errors import CorruptChunkError, check_name
from kvcache_rag.kv.chunk import digest
from kvcache_rag.stores import notices
from kvcache_rag.stores.base import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvcache_rag.kv.chunk import ChunkKey


SUFFIX = ".safetensors"

TEMPORARY = ".tmp"

DELETED = ".deleted-"

QUARANTINE = "quarantine"

EPOCH = "epoch"

MANIFEST = "spec.json"

MAX_QUARANTINED = 4  # per namespace

MAX_MANIFEST = 64 << 10  # bytes

_NAMESPACE = re.compile(r"[0-9a-f]{32}")

# Names in a store's own folder, those of remotes too.
_OF_A_STORE = re.compile(rf"{_NAMESPACE.pattern}(\.epoch)?|sweep\.lock|\.tmp.*")

_SPEC = re.compile(r"[0-9a-f]{16}")

_STRIPE = re.compile(r"[0-9a-f]{2}")

_OWNER = re.compile(r"[0-9a-f]{16}")

_FILE = re.compile(
    r"(?P<digest>[0-9a-f]{64})\.(?:safetensors|(?P<mark>owner|released)-(?P<owner>[0-9a-f]{16}))"
)


# ---------------------------------------------------------------------- paths
def namespace_digest(namespace: str) -> str:
    """Name of the folder of a namespace.

    Raises:
        InvalidInputError: If it is no text.
    """
    try:
        return hashlib.sha256(namespace.encode()).hexdigest()[:32]
    except (AttributeError, TypeError, UnicodeEncodeError):
        return namespace_digest(check_name("namespace", namespace))  # which raises


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


def sweep_lock(folder: str) -> str:
    """Lock file of whoever drops chunks: of a namespace, or of the root for all of them."""
    return f"{folder}/sweep.lock"


def identity(owner: str) -> str:
    """The 16 hexadecimal digits by which an owner is known on disk.

    Raises:
        InvalidInputError: If it is no text.
    """
    return hashlib.sha256(check_name("owner", owner).encode()).hexdigest()[:16]


def owner_mark(owner: str) -> str:
    """The same, of an owner's name or of such digits themselves, as people copy them."""
    return owner if _OWNER.fullmatch(owner) else identity(owner)


class FileName(NamedTuple):
    """What the name of a file in a folder of chunks means.

    Attributes:
        digest: The chunk it belongs to.
        mark: "owner" or "released" for the mark of an owner, "" for the chunk itself.
        owner: Whose mark it is, "" for the chunk itself.
    """

    digest: str
    mark: str
    owner: str

    @classmethod
    def parsed(cls, name: str) -> FileName | None:
        """None if it is not one of ours."""
        match = _FILE.fullmatch(name)
        return None if match is None else cls(*match.groups(""))


# ---------------------------------------------------------------------- opening and making
# Every file below a store's folder is opened here, or looked at by `check_file` before a library
# opens it.

_ALWAYS = 0

# O_NONBLOCK: a pipe that was put in place of a file a moment ago must not stop us.
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
    _ALWAYS |= getattr(os, _flag, 0)

READ = os.O_RDONLY

WRITE = os.O_RDWR

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class NotAFileError(OSError):
    """A link, a pipe, a socket, a device or a folder is where a file of the store belongs."""

    def __init__(self, path: str) -> None:
        """Say where it is, and that it was not opened."""
        reason = "something else than a file is where one of the store belongs; remove it"
        super().__init__(errno.EINVAL, reason, path)


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A descriptor of the file that is at `path` itself, as `open_file` gives it."""
    descriptor = open_file(path, flags)[0]
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(path: str, flags: int) -> tuple[int, os.stat_result]:
    """Open the file that is at `path` itself.

    It is looked at before, because opening alone can start a device or wake who waits at a pipe,
    and after, because it may have been replaced in between.

    Returns:
        Descriptor, which the caller closes, and status.

    Raises:
        NotAFileError: If it is no file.
        OSError: If it cannot be opened.
    """
    if not flags & os.O_EXCL:
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise NotAFileError(path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
    descriptor = os.open(path, flags | _ALWAYS, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise NotAFileError(path)
    return descriptor, status


def check_file(path: str) -> None:
    """Make sure that there is a file or nothing at `path`.

    Raises:
        NotAFileError: If there is something else.
        OSError: If it cannot be looked at.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise NotAFileError(path)


def sync_folder(path: str) -> None:
    """Have the names in a folder on the medium, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _ALWAYS)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def temporary_path(folder: str) -> str:
    """A name in `folder` for what is not finished."""
    return f"{folder}/{TEMPORARY}-{secrets.token_hex(16)}"


def check_folder(root: str, path: str) -> None:
    """Make sure that `path` and everything between it and `root` are folders, not links to some.

    It is said once if others may open one.

    Raises:
        OSError: If one is missing or something else.
    """
    if path == root:
        return
    check_folder(root, os.path.dirname(path))
    if os.lstat(path).st_mode & _SHOWS_PRIVATE != stat.S_IFDIR:
        _check_one(root, path)


def why_unwritable(path: str | os.PathLike[str]) -> str:
    """Why no file can be made in a folder; "" if one can."""
    try:
        with tempfile.TemporaryFile(dir=os.path.abspath(path)):  # permissions alone do not say it
            return ""
    except OSError as error:
        return error.strerror or str(error)


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
        if os.lstat(path).st_mode & _SHOWS_PRIVATE != stat.S_IFDIR:
            _check_one(root, path)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _check_one(root, path)


_SHOWS_PRIVATE = 0o170066  # what is it, and may others read or write it


def _check_one(root: str, path: str) -> None:
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        reason = "a link or a file is where a folder of the store belongs; remove it"
        raise NotADirectoryError(errno.ENOTDIR, reason, path)
    notices.check_open(root, path, mode)


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
            name = FileName.parsed(os.path.basename(path))
            removed = int(name is not None and not name.mark)
    except FileNotFoundError:
        return removed
    except OSError as error:
        failures.append(error)
    return removed


# ---------------------------------------------------------------------- times
# The mtime of a chunk's file is its last use.  A store with a `ttl` has to know when a chunk was
# written; it leaves the mtime at that, and notes the use in the atime, which is what the two names
# mean.

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


# ---------------------------------------------------------------------- the walk
# Streamed: one of the 256 folders of a spec is held at a time.  What vanishes while it is looked at
# was not there.


@dataclass
class StoredFile:
    """All that belongs to one digest: a chunk's file, marks of its owners, or marks alone.

    Attributes:
        stem: Path without suffix.
        is_held: Whether there is a file at all; owners may claim a chunk before it is there.
        nbytes: Size of the file.
        written: Its mtime, in seconds since the epoch.
        used: When it was last used; without `dated`, and in a store that keeps chunks for a time
            only (`ttl`), when it was written.
        owners: Ids of those who claim it, with the time of the mark.
        released: Ids of those who released it, with the time when they did.
    """

    stem: str
    is_held: bool = False
    nbytes: int = 0
    written: float = 0.0
    used: float = 0.0
    owners: dict[str, float] = field(default_factory=dict)
    released: dict[str, float] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return os.path.basename(self.stem)

    @property
    def path(self) -> str:
        """Where its file is or would be."""
        return self.stem + SUFFIX

    def note(self, name: FileName, status: os.stat_result, *, dated: bool) -> None:
        """Take in one file; `dated` says that an mtime is the time of writing, not of the use."""
        if name.mark:
            marks = self.owners if name.mark == "owner" else self.released
            marks[name.owner] = status.st_mtime
        else:
            self.is_held, self.nbytes = True, status.st_size
            self.written, self.used = status.st_mtime, last_use(status, dated=dated)

    def is_released(self, latest: float) -> bool:
        """Whether the last owner released it at `latest` or before."""
        moments = self.released.values()
        return not self.owners and bool(moments) and all(moment <= latest for moment in moments)

    def release(self, owner: str) -> bool:
        """Turn the claim of an owner, known by `identity`, into a tombstone of this moment.

        Returns:
            False if there is no claim any more, or one that was made since this was listed.

        Raises:
            OSError: If the folder cannot be written.
        """
        try:
            if os.lstat(claim_path(self.stem, owner)).st_mtime != self.owners.get(owner):
                return False
            release(self.stem, owner)
        except FileNotFoundError:
            return False
        return True

    def restore(self, owner: str) -> None:
        """Undo `release`.

        Raises:
            OSError: If the folder cannot be written.
        """
        with suppress(FileNotFoundError):
            os.replace(tombstone_path(self.stem, owner), claim_path(self.stem, owner))


@dataclass(frozen=True)
class Leftover:
    """A file that no reader will open: unfinished, quarantined or of an interrupted deletion.

    Attributes:
        path: Where it is.
        nbytes: Its size.
        written: When it was last written, in seconds since the epoch.
    """

    path: str
    nbytes: int
    written: float

    def remove(self) -> bool:
        """Remove it; False if it is gone already.

        Raises:
            OSError: If it cannot be removed.
        """
        with suppress(FileNotFoundError):
            os.unlink(self.path)
            return True
        return False


@dataclass(frozen=True)
class Stripe:
    """What lies in one folder of chunks.

    Attributes:
        files: One per digest.
        unfinished: Files that were never finished.
    """

    files: list[StoredFile]
    unfinished: list[Leftover]

    @classmethod
    def at(cls, folder: str, *, dated: bool) -> Stripe:
        """Look at a folder; `dated` as for `StoredFile.note`."""
        files: dict[str, StoredFile] = {}
        unfinished = []
        for item in _scan(folder):
            with suppress(OSError):
                if item.name.startswith(TEMPORARY):
                    unfinished += _leftover(item)
                elif name := FileName.parsed(item.name):
                    status = item.stat(follow_symlinks=False)
                    file = files.setdefault(name.digest, StoredFile(f"{folder}/{name.digest}"))
                    file.note(name, status, dated=dated)
        return cls([*files.values()], unfinished)


@dataclass(frozen=True)
class SpecFolder:
    """The chunks of one model, dtype, codec and prefix.

    Attributes:
        name: First 16 digits of the spec's digest.
        path: The folder.
    """

    name: str
    path: str

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What `spec.json` says; empty without one."""
        return read_manifest(self.path)

    def stripes(self, *, dated: bool = False) -> Iterator[Stripe]:
        """Its folders of chunks, and before them what is unfinished beside them: manifests."""
        yield Stripe([], Stripe.at(self.path, dated=dated).unfinished)
        for entry in _subfolders(self.path, _STRIPE):
            yield Stripe.at(entry.path, dated=dated)

    def chunks(self) -> Iterator[StoredFile]:
        for stripe in self.stripes():
            yield from stripe.files

    def unfinished(self) -> Iterator[Leftover]:
        """Files that were never finished."""
        for stripe in self.stripes():
            yield from stripe.unfinished


@dataclass(frozen=True)
class NamespaceFolder:
    """The chunks of one tenant.

    Attributes:
        name: First 32 digits of the digest of the tenant's name.
        path: The folder.
    """

    name: str
    path: str

    def specs(self) -> Iterator[SpecFolder]:
        """Its specs, by name."""
        for entry in _subfolders(self.path, _SPEC):
            yield SpecFolder(entry.name, entry.path)

    def quarantined(self) -> Iterator[Leftover]:
        """Files that are in quarantine because they were not what they should be."""
        for item in _scan(f"{self.path}/{QUARANTINE}"):
            yield from _leftover(item)

    def quarantine_times(self) -> list[tuple[str, float]]:
        """All that is in quarantine, a folder as such, and when it was written."""
        times = []
        for item in _scan(f"{self.path}/{QUARANTINE}"):
            with suppress(OSError):
                times.append((item.path, item.stat(follow_symlinks=False).st_mtime))
        return times

    def deletions(self) -> list[str]:
        """What an interrupted deletion of the namespace renamed away; the next sweep drops it."""
        return [item.path for item in _scan(self.path) if item.name.startswith(DELETED)]

    def deleted(self) -> Iterator[Leftover]:
        """The files in `deletions`."""
        for path in self.deletions():
            yield from _below(path)


def namespaces(root: str | os.PathLike[str]) -> Iterator[NamespaceFolder]:
    """The namespaces of a store's folder, by name; none if there is no such folder."""
    for entry in _subfolders(os.path.realpath(root), _NAMESPACE):
        yield NamespaceFolder(entry.name, entry.path)


def is_store(root: str) -> bool:
    """Whether a folder is empty, or something in it is of a store."""
    names = os.listdir(root)
    return not names or any(map(_OF_A_STORE.fullmatch, names))


def _scan(path: str) -> Iterator[os.DirEntry[str]]:
    # A link in place of the folder would lead out of the store.
    with suppress(OSError):
        if os.path.islink(path):
            return
        with os.scandir(path) as entries:
            yield from entries


def _subfolders(path: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    subfolders = []
    for item in _scan(path):
        with suppress(OSError):
            if name.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
                subfolders.append(item)
    return sorted(subfolders, key=lambda item: item.name)


def _leftover(item: os.DirEntry[str]) -> list[Leftover]:
    """A file that is left over; nothing for a folder or what vanished."""
    with suppress(OSError):
        if not item.is_dir(follow_symlinks=False):
            status = item.stat(follow_symlinks=False)
            return [Leftover(item.path, status.st_size, status.st_mtime)]
    return []


def _below(path: str) -> Iterator[Leftover]:
    for item in _scan(path):
        with suppress(OSError):
            if item.is_dir(follow_symlinks=False):
                yield from _below(item.path)
            else:
                yield from _leftover(item)


# ---------------------------------------------------------------------- owners
# Who uses a chunk: empty files beside it.  One says that an owner uses the chunk, the other that it
# stopped at the mark's mtime.  One rename turns one into the other, so an owner never has both for
# good.


def claim_path(stem: str, owner: str) -> str:
    """The mark of an owner, known by `identity`, that it uses a chunk."""
    return f"{stem}.owner-{owner}"


def tombstone_path(stem: str, owner: str) -> str:
    """The mark of an owner that it no longer uses a chunk."""
    return f"{stem}.released-{owner}"


def claim(stem: str, owner: str, check: Callable[[], None]) -> None:
    """Mark the chunk at path `stem` (without suffix) as used; its folder must exist.

    Args:
        stem: Path of the chunk.
        owner: Who uses it, known by `identity`.
        check: Called before the mark is published; raises when it must not be any more.

    Raises:
        OSError: If the mark cannot be made.
    """
    temporary = temporary_path(os.path.dirname(stem))
    # Renamed, not opened: a link in the place of the mark is replaced and not followed.
    os.close(open_file(temporary, NEW)[0])
    try:
        check()
        os.replace(temporary, claim_path(stem, owner))
    except OSError:
        unlink(temporary)
        raise
    # The claim is made before the release is undone, so a sweep in between sees a claim.
    with suppress(FileNotFoundError):
        os.unlink(tombstone_path(stem, owner))


def release(stem: str, owner: str) -> None:
    """Turn the mark of an owner, known by `identity`, into a tombstone of this moment.

    Raises:
        OSError: If it cannot be done; `FileNotFoundError` if the owner has no mark.
    """
    path = claim_path(stem, owner)
    set_times(path)  # before the rename, so that no sweep sees a tombstone as old as the claim
    os.replace(path, tombstone_path(stem, owner))


# ---------------------------------------------------------------------- quarantine
def quarantine(stem: str, found: os.stat_result | None = None) -> None:
    """Move the file of a chunk into its namespace's quarantine, of which the newest few stay.

    A link or a folder in its place is moved as such.

    Args:
        stem: Path of the chunk.
        found: Its status when it was found damaged: another one in its place stays.

    Raises:
        OSError: If the folder cannot be written.
    """
    path, (folder, name) = stem + SUFFIX, os.path.split(stem)
    namespace = os.path.dirname(os.path.dirname(folder))
    aside = f"{namespace}/{QUARANTINE}"
    with suppress(FileNotFoundError):
        now = os.lstat(path)
        if found is not None and (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
            return
        make_folder(os.path.dirname(namespace), aside)
        os.replace(path, f"{aside}/{time.time_ns():020d}-{name}")
        for old in sorted(os.listdir(aside))[:-MAX_QUARANTINED]:
            remove(f"{aside}/{old}", [])


@contextmanager
def quarantining(stem: str, found: os.stat_result) -> Iterator[None]:
    """Quarantine a chunk's file when what reads it finds that it is damaged."""
    try:
        yield
    except CorruptChunkError:
        with suppress(OSError):
            quarantine(stem, found)
        raise


# ---------------------------------------------------------------------- manifests
# The name of a spec's folder is a digest, which tells a machine everything and a person nothing.
# `spec.json` names model, revision, codec and shapes; texts and names of tenants are not in it.  No
# reader of chunks looks at it, and a store without it works as well.


class Manifests:
    """The manifests that this process may have to write, by folder."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, Any]] = {}

    def note(self, folder: str, description: Mapping[str, Any]) -> None:
        """Remember what the chunks of `folder` depend on; nothing is written."""
        self._known[folder] = description

    def publish(self, folder: str) -> None:
        """Write the manifest of an existing folder unless it is there or unknown; best effort."""
        description = self._known.get(folder)
        if description is None or os.path.lexists(f"{folder}/{MANIFEST}"):
            return
        temporary = temporary_path(folder)
        with suppress(OSError, TypeError, ValueError):  # the last two: it is no JSON
            try:
                with os.fdopen(open_file(temporary, NEW)[0], "w", encoding="ascii") as file:
                    values = {**description, "created": int(time.time())}
                    json.dump(values, file, indent=1, sort_keys=True)
                    file.write("\n")
                os.replace(temporary, f"{folder}/{MANIFEST}")
            finally:
                unlink(temporary)


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a folder of chunks; empty if there is none or it cannot be read."""
    try:
        with opened(f"{folder}/{MANIFEST}", READ) as descriptor:
            manifest = json.loads(os.read(descriptor, MAX_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def manifest_of(spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What of a spec a person wants to know.

    Args:
        spec: The dictionary that `spec_digest` is taken of, as `Prefiller.of` makes it.
        name: What the model was loaded as; of a folder only the last two parts are kept, since
            where it lies on one machine is nobody's business on another.
    """
    model = spec.get("model", {})
    prefix = spec.get("prefix", [])
    folder = "/".join(name.replace("\\", "/").split("/")[-2:])
    kept = ("codec", "compute_dtype", "stored_dtype", "format")
    return {
        **{field: spec[field] for field in kept if field in spec},
        "model": model.get("id") or folder or model.get("type"),
        "revision": model.get("revision") or model.get("weights"),
        "type": model.get("type"),
        "quantization": model.get("quantization"),
        "groups": [
            {
                "layers": len(group["layers"]),
                "key_shape": group["key_shape"],
                "value_shape": group["value_shape"],
            }
            for group in spec.get("groups", [])
        ],
        "prefix_tokens": len(prefix),
        "prefix_digest": digest("kvcache-rag-prefix", json.dumps(prefix).encode())[:16],
    }


# ---------------------------------------------------------------------- epochs
# The file `epoch` is touched by every deletion of the namespace; its time and length are the epoch.
# How that keeps a deleted namespace from coming back is told at `eviction.delete_namespace`.


def grow_epoch(folder: str, *, durable: bool) -> None:
    """Let the epoch of a namespace's folder grow, and be on the medium if `durable`.

    What is in its place without being a file of its own goes with the rest of the namespace.

    Raises:
        OSError: If the folder cannot be written.
    """
    path = f"{folder}/{EPOCH}"
    later = max(epoch(folder) + 1, time.time_ns())
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        # A file of two names is somebody else's, too.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.rename(path, deleted_path(folder))
    with opened(path, APPEND) as descriptor:
        os.write(descriptor, b".")
        set_times(path, (later, later))
        if durable:
            os.fsync(descriptor)


def deleted_path(folder: str) -> str:
    """A name in a namespace's folder for what a deletion takes away."""
    return f"{folder}/{DELETED}{secrets.token_hex(16)}"


def epoch(folder: str) -> int:
    """A number that grows with every deletion of the namespace of this folder, at first 0.

    It is about the time of the last deletion in nanoseconds, so that folders can be compared.
    """
    with suppress(OSError):
        status = os.lstat(f"{folder}/{EPOCH}")
        if stat.S_ISREG(status.st_mode):
            # Some file systems keep whole seconds: the length grows at any rate.
            return status.st_mtime_ns + status.st_size
    return 0


def check_epoch(folder: str, expected: int) -> None:
    """Refuse what was begun before a deletion.

    Raises:
        OSError: If the namespace was deleted since its epoch was `expected`.
    """
    if epoch(folder) != expected:
        raise OSError("the namespace was deleted meanwhile; what was made before is not kept")
