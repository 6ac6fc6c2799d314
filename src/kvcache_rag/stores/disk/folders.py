"""The folder of a store on disk: what lies where, what each name means, and one walk over it.

    root/sweep.lock  root/used                           for a limit on all namespaces
    root/<namespace digest>/generation                   a number that grows when it is deleted
    root/<namespace digest>/sweep.lock  root/<namespace digest>/used
    root/<namespace digest>/.deleted-*                   of a deletion that was interrupted
    root/<namespace digest>/locks/<00..ff>.lock
    root/<namespace digest>/quarantine/<time>-<digest>
    root/<namespace digest>/<spec[:16]>/spec.json        for people: which model
    root/<namespace digest>/<spec[:16]>/<digest[:2]>/<digest>.safetensors
                                                     .tmp*

What 0.1.0 left beside chunks (`<digest>.owner-<id>`, `.released-<id>`) counts as unfinished.  Only
names of these forms are ever touched; nothing else in the root is ours.  Below the root no link is
followed: a link or a file in place of a folder is refused.
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
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import CorruptChunkError, check_name
from kvcache_rag.kv.chunk import digest
from kvcache_rag.stores.base import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvcache_rag.kv.chunk import ChunkKey


SUFFIX = ".safetensors"

TEMPORARY = ".tmp"

DELETED = ".deleted-"

QUARANTINE = "quarantine"

GENERATION = "generation"

USED = "used"

MANIFEST = "spec.json"

MAX_QUARANTINED = 4  # per namespace

MAX_MANIFEST = 64 << 10  # bytes

_NAMESPACE = re.compile(r"[0-9a-f]{32}")

# Names in a store's own folder, those of remotes too.
_OF_A_STORE = re.compile(rf"{_NAMESPACE.pattern}(\.epoch)?|sweep\.lock|used|\.tmp.*")

_SPEC = re.compile(r"[0-9a-f]{16}")

_STRIPE = re.compile(r"[0-9a-f]{2}")

_CHUNK = re.compile(r"[0-9a-f]{64}\.safetensors")

_UNFINISHED = re.compile(r"\.tmp.*|[0-9a-f]{64}\.(owner|released)-[0-9a-f]{16}", re.DOTALL)


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


def is_chunk(name: str) -> bool:
    """Whether a file of that name is a chunk's."""
    return _CHUNK.fullmatch(name) is not None


def sweep_lock(folder: str) -> str:
    """Lock file of whoever drops chunks: of a namespace, or of the root for all of them."""
    return f"{folder}/sweep.lock"


# ---------------------------------------------------------------------- opening and making
# Every file below a store's folder is opened here, or looked at by `check_file` before a library
# opens it.

_ALWAYS = 0

# O_NONBLOCK: a pipe that was put in place of a file a moment ago must not stop us.
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
    _ALWAYS |= getattr(os, _flag, 0)

READ = os.O_RDONLY

WRITE = os.O_RDWR

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

    Raises:
        OSError: If one is missing or something else.
    """
    if path == root:
        return
    check_folder(root, os.path.dirname(path))
    _check_one(path)


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
        _check_one(path)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _check_one(path)


def _check_one(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        reason = "a link or a file is where a folder of the store belongs; remove it"
        raise NotADirectoryError(errno.ENOTDIR, reason, path)


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
            removed = int(is_chunk(os.path.basename(path)))
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


@dataclass(frozen=True)
class StoredFile:
    """The file of a chunk.

    Attributes:
        stem: Path without suffix.
        nbytes: Its size.
        written: Its mtime, in seconds since the epoch.
        used: When it was last used; without `dated`, and in a store that keeps chunks for a time
            only (`ttl`), when it was written.
    """

    stem: str
    nbytes: int
    written: float
    used: float

    @property
    def digest(self) -> str:
        return os.path.basename(self.stem)

    @property
    def path(self) -> str:
        """Where it is."""
        return self.stem + SUFFIX


@dataclass(frozen=True)
class Leftover:
    """A file that no reader will open: unfinished, quarantined, or left by an older version.

    Attributes:
        path: Where it is.
        nbytes: Its size.
        written: When it was last written, in seconds since the epoch.
    """

    path: str
    nbytes: int
    written: float


@dataclass(frozen=True)
class Stripe:
    """What lies in one folder of chunks.

    Attributes:
        files: Those of chunks.
        unfinished: Files that were never finished.
    """

    files: list[StoredFile]
    unfinished: list[Leftover]

    @classmethod
    def at(cls, folder: str, *, dated: bool) -> Stripe:
        """Look at a folder; `dated` as for `last_use`."""
        files, unfinished = [], []
        for item in _scan(folder):
            with suppress(OSError):
                if is_chunk(item.name):
                    status = item.stat(follow_symlinks=False)
                    stem, used = item.path.removesuffix(SUFFIX), last_use(status, dated=dated)
                    files.append(StoredFile(stem, status.st_size, status.st_mtime, used))
                elif _UNFINISHED.fullmatch(item.name):
                    unfinished += _leftover(item)
        return cls(files, unfinished)


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


# ---------------------------------------------------------------------- generations
# The file `generation` holds a number in decimal digits.  How that keeps a deleted namespace from
# coming back is told at `eviction.delete_namespace`.


def generation(folder: str) -> int:
    """The number of a namespace's folder, at first 0."""
    try:
        with opened(f"{folder}/{GENERATION}", READ) as descriptor:
            return int(os.read(descriptor, 20))
    except (OSError, ValueError):
        return 0


def set_generation(folder: str, number: int, *, durable: bool) -> None:
    """Write the number, on the medium if `durable`; it never becomes a smaller one.

    What is in its place without being a file of its own goes.

    Raises:
        OSError: If the folder cannot be written.
    """
    path = f"{folder}/{GENERATION}"
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        # A file of two names is somebody else's, too.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            remove(path, [])
    number = max(number, generation(folder))
    with opened(path, WRITE | os.O_CREAT) as descriptor:
        os.write(descriptor, b"%020d" % number)  # of one length, so none is ever half there
        if durable:
            os.fsync(descriptor)


def check_generation(folder: str, begun: int) -> None:
    """Refuse what was begun before a deletion.

    Raises:
        OSError: If the namespace was deleted since its generation was `begun`.
    """
    if generation(folder) > begun:
        raise OSError("the namespace was deleted meanwhile; what was made before is not kept")


def deleted_path(folder: str) -> str:
    """A name in a namespace's folder for what a deletion takes away."""
    return f"{folder}/{DELETED}{secrets.token_hex(16)}"


# ---------------------------------------------------------------------- bytes in use
# The file `used` counts the bytes below a folder that has a limit, for whoever holds its
# `sweep_lock`, so that a folder is walked only when the count says that it is full.


def read_used(folder: str) -> int | None:
    """The count; None if there is none."""
    try:
        with opened(f"{folder}/{USED}", READ) as descriptor:
            return int(os.read(descriptor, 20))
    except (OSError, ValueError):
        return None


def write_used(folder: str, nbytes: int) -> None:
    """Set the count; without one the folder is walked the next time."""
    with suppress(OSError), opened(f"{folder}/{USED}", WRITE | os.O_CREAT) as descriptor:
        os.write(descriptor, b"%020d" % max(nbytes, 0))
