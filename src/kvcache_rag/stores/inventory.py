"""What lies in the folder of a `DiskStore`, without a model and without changing anything.

Everything is streamed: one of the 256 folders of a spec is held at a time.  No link is followed,
and what vanishes while it is looked at was not there.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcache_rag.stores.directory import DELETED, SUFFIX, TEMPORARY
from kvcache_rag.stores.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

QUARANTINE = "quarantine"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_SPEC = re.compile(r"[0-9a-f]{16}")
_FIRST = re.compile(r"[0-9a-f]{2}")
_MARK = re.compile(r"([0-9a-f]{64})\.(owner|released)-([0-9a-f]{16})")
_CHUNK = re.compile(r"([0-9a-f]{64})" + re.escape(SUFFIX))


@dataclass
class StoredFile:
    """What lies around one digest: a chunk's file, marks of its owners, or marks alone.

    Attributes:
        stem: Path without suffix.
        is_held: Whether there is a file at all; owners may claim a chunk before it is there.
        nbytes: Size of the file.
        used: When it was last used, in seconds since the epoch; when it was written, where a store
            keeps chunks for a time only (`ttl`).
        owners: Ids of those who claim it, with the time of the mark.
        released: Ids of those who let go, with the time when they did.
    """

    stem: str
    is_held: bool = False
    nbytes: int = 0
    used: float = 0.0
    owners: dict[str, float] = field(default_factory=dict)
    released: dict[str, float] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The chunk's digest."""
        return os.path.basename(self.stem)

    @property
    def path(self) -> str:
        """Where its file is or would be."""
        return self.stem + SUFFIX

    def is_released(self, latest: float) -> bool:
        """Whether the last owner let go at `latest` or before."""
        times = self.released.values()
        return not self.owners and bool(times) and all(time <= latest for time in times)


@dataclass(frozen=True)
class Leftover:
    """A file that no reader will open: unfinished, or put aside.

    Attributes:
        path: Where it is.
        nbytes: Its size.
        written: When it was last written, in seconds since the epoch.
    """

    path: str
    nbytes: int
    written: float


Entry: TypeAlias = StoredFile | Leftover


@dataclass(frozen=True)
class SpecFolder:
    """The chunks of one model, dtype, codec and prefix.

    Attributes:
        name: First 16 digits of the spec's digest.
        path: The folder.
        manifest: What `spec.json` says; empty without one.
    """

    name: str
    path: str
    manifest: dict[str, Any]

    def entries(self) -> Iterator[Entry]:
        """Chunks and unfinished files, in no particular order."""
        yield from _leftovers(self.path, prefix=TEMPORARY)
        for folder in _folders(self.path, _FIRST):
            yield from _entries(folder.path)

    def chunks(self) -> Iterator[StoredFile]:
        """Chunks and claims alone."""
        return (entry for entry in self.entries() if isinstance(entry, StoredFile))


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
        for found in _folders(self.path, _SPEC):
            yield SpecFolder(found.name, found.path, read_manifest(found.path))

    def quarantined(self) -> Iterator[Leftover]:
        """Files that were put aside because they were not what they should be."""
        return _leftovers(f"{self.path}/{QUARANTINE}")

    def deleted(self) -> Iterator[Leftover]:
        """Files of a deletion of the namespace that was interrupted; the next sweep drops them."""
        for item in _scan(self.path):
            if item.name.startswith(DELETED):
                yield from _below(item.path)


@dataclass
class Summary:
    """A spec's chunks in numbers.

    Attributes:
        chunks: Files of chunks.
        nbytes: Their size.
        used: When the last of them was used, 0.0 without any.
        owners: Chunks held per owner's id.
        unowned: Chunks without any claim or tombstone, which only the limit drops.
        released: Chunks whose last owner let go.
        missing: Claims of chunks that are not there.
        unfinished: Files that were never finished.
        unfinished_bytes: Their size.
        sample: One of the chunks, None without any.
    """

    chunks: int = 0
    nbytes: int = 0
    used: float = 0.0
    owners: Counter[str] = field(default_factory=Counter)
    unowned: int = 0
    released: int = 0
    missing: int = 0
    unfinished: int = 0
    unfinished_bytes: int = 0
    sample: StoredFile | None = None

    def add(self, entry: Entry) -> None:
        """Count one entry."""
        if isinstance(entry, Leftover):
            self.unfinished += 1
            self.unfinished_bytes += entry.nbytes
        elif not entry.is_held:
            self.missing += bool(entry.owners)
        else:
            self.chunks += 1
            self.nbytes += entry.nbytes
            self.used = max(self.used, entry.used)
            self.owners.update(entry.owners.keys())
            self.released += bool(entry.released) and not entry.owners
            self.unowned += not entry.released and not entry.owners
            self.sample = entry


def summarise(spec: SpecFolder) -> Summary:
    """Count a spec's entries."""
    found = Summary()
    for entry in spec.entries():
        found.add(entry)
    return found


def namespaces(root: str | os.PathLike[str]) -> Iterator[NamespaceFolder]:
    """The namespaces of a store's folder, by name; none if there is no such folder."""
    for found in _folders(os.path.realpath(root), _NAMESPACE):
        yield NamespaceFolder(found.name, found.path)


def _folders(path: str, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    found = []
    for entry in _scan(path):
        with suppress(OSError):
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found.append(entry)
    return sorted(found, key=lambda entry: entry.name)


def _scan(path: str) -> Iterator[os.DirEntry[str]]:
    # A link in place of the folder would lead out of the store.
    with suppress(OSError):
        if os.path.islink(path):
            return
        with os.scandir(path) as found:
            yield from found


def _leftovers(folder: str, prefix: str = "") -> Iterator[Leftover]:
    for item in _scan(folder):
        with suppress(OSError):
            status = item.stat(follow_symlinks=False)
            if item.name.startswith(prefix) and not item.is_dir(follow_symlinks=False):
                yield Leftover(item.path, status.st_size, status.st_mtime)


def _below(path: str) -> Iterator[Leftover]:
    yield from _leftovers(path)
    for item in _scan(path):
        with suppress(OSError):
            if item.is_dir(follow_symlinks=False):
                yield from _below(item.path)


def _entries(folder: str) -> Iterator[Entry]:
    files: dict[str, StoredFile] = {}
    for item in _scan(folder):
        with suppress(OSError):
            status = item.stat(follow_symlinks=False)
            if item.name.startswith(TEMPORARY):
                yield Leftover(item.path, status.st_size, status.st_mtime)
            elif chunk := _CHUNK.fullmatch(item.name):
                file = _at(files, folder, chunk[1])
                file.is_held, file.nbytes, file.used = True, status.st_size, status.st_mtime
            elif mark := _MARK.fullmatch(item.name):
                file = _at(files, folder, mark[1])
                marks = file.owners if mark[2] == "owner" else file.released
                marks[mark[3]] = status.st_mtime
    yield from files.values()


def _at(files: dict[str, StoredFile], folder: str, digest: str) -> StoredFile:
    return files.setdefault(digest, StoredFile(f"{folder}/{digest}"))
