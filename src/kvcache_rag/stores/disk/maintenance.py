"""What lies in the folder of a `DiskStore`, without a model and without changing anything.

Everything is streamed: one of the 256 folders of a spec is held at a time.  No link is followed,
and what vanishes while it is looked at was not there.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import xxhash

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores.disk.file import ALIGNMENT, FORMAT, MAX_HEADER, positional, read_views
from kvcache_rag.stores.disk.folders import (
    DELETED,
    MAX_QUARANTINED,
    NOT_A_FILE,
    READ,
    SUFFIX,
    TEMPORARY,
    identity,
    make_folder,
    opened,
    release_mark,
)
from kvcache_rag.stores.disk.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.stores.disk.file import ReadV


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


# Changes to a store's folder that need no model: let go, take back, put aside, tidy up.
#
# They work on what `inventory` found, by digests and marks, since the names of tenants and owners
# cannot be read back from a folder. Each is one rename or one unlink, so a store in use goes on.


_OWNER_MARK = re.compile(r"[0-9a-f]{16}")


def owner_mark(owner: str) -> str:
    """The id by which files know an owner; an id itself stays as it is."""
    return owner if _OWNER_MARK.fullmatch(owner) else identity(owner)


def let_go(file: StoredFile, mark: str) -> bool:
    """Turn an owner's claim into a tombstone of this moment.

    Returns:
        False if there is no claim any more, or one that was made since `file` was listed.

    Raises:
        OSError: If the folder cannot be written.
    """
    try:
        if os.lstat(f"{file.stem}.owner-{mark}").st_mtime != file.owners.get(mark):
            return False
        release_mark(file.stem, mark)
    except FileNotFoundError:
        return False
    return True


def take_back(file: StoredFile, mark: str) -> None:
    """Undo `let_go`.

    Raises:
        OSError: If the folder cannot be written.
    """
    with suppress(FileNotFoundError):
        os.replace(f"{file.stem}.released-{mark}", f"{file.stem}.owner-{mark}")


def put_aside(
    namespace: NamespaceFolder, file: StoredFile, found: os.stat_result | None = None
) -> None:
    """Move a damaged file into the namespace's quarantine, of which the newest few stay.

    Args:
        namespace: Where it lies.
        file: The file.
        found: Its status when it was found damaged: another one in its place stays.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder = f"{namespace.path}/{QUARANTINE}"
    make_folder(os.path.dirname(namespace.path), folder)
    with suppress(FileNotFoundError):
        now = os.lstat(file.path)
        if found is not None and (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
            return
        os.replace(file.path, f"{folder}/{time.time_ns():020d}-{file.digest}")
    kept = sorted(namespace.quarantined(), key=lambda found: found.path)
    for old in kept[:-MAX_QUARANTINED]:
        discard(old)


def discard(found: Leftover) -> bool:
    """Remove a leftover; False if it is gone already."""
    with suppress(FileNotFoundError):
        os.unlink(found.path)
        return True
    return False


# Check the file of a chunk as far as that is possible without the model that made it.
#
# A reader knows every value of the header beforehand and compares all of it; here nothing is known
# but the file's name, so the header is checked against itself: the fields and limits of the format,
# tensors that lie densely and fill the file, and the checksum of the payload.


_BUFFER = 4 << 20

_FIELDS: Final = {
    "format": re.compile(re.escape(FORMAT)),
    "key": re.compile(r"[0-9a-f]{64}"),
    "codec": re.compile(r"[a-z0-9-]{1,64}"),
    "start": re.compile(r"0|[1-9][0-9]{0,9}"),
    "xxh3_128": re.compile(r"[0-9a-f]{32}"),
    "provenance": re.compile(r"[ -~]{1,200}"),
    "pad": re.compile(r" *"),
}

_WIDTHS: Final = {
    **dict.fromkeys(("I64", "F64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8"), 1),
}


@dataclass(frozen=True)
class FileFacts:
    """What the header of a chunk's file says.

    Attributes:
        codec: Name of the codec.
        tokens: Number of tokens.
        payload: Bytes behind the header.
        checksum: xxh3_128 of the payload.
        offset: Where the payload begins.
    """

    codec: str
    tokens: int
    payload: int
    checksum: str
    offset: int


def file_facts(path: str, digest: str) -> FileFacts:
    """Read and check the header of a chunk's file; the payload is not read.

    Args:
        path: The file; a link is not followed.
        digest: The chunk that it must be, 64 hexadecimal digits.

    Raises:
        CorruptChunkError: If it is not such a file.
        OSError: If it cannot be read, or is gone.
    """
    return _checked(path, digest, with_payload=False)


def verify_file(path: str, digest: str) -> FileFacts:
    """Check a chunk's file as a whole: header, size and checksum.

    Raises:
        CorruptChunkError: If something is wrong.
        OSError: If it cannot be read, or is gone.
    """
    return _checked(path, digest, with_payload=True)


def _checked(path: str, digest: str, *, with_payload: bool) -> FileFacts:
    try:
        with opened(path, READ) as descriptor:
            read, size = positional(descriptor), os.fstat(descriptor).st_size
            facts = _facts(read, size, digest)
            if with_payload and _checksum(read, facts) != facts.checksum:
                raise CorruptChunkError("the checksum is wrong: the bytes were changed")
            return facts
    except OSError as error:
        if error.errno not in NOT_A_FILE:
            raise
        raise CorruptChunkError(f"it is not a file: {error.strerror}") from None


def _facts(read: ReadV, size: int, digest: str) -> FileFacts:
    head = _bytes(read, 0, min(size, 8))
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 0 < length <= min(MAX_HEADER, size - 8) or (8 + length) % ALIGNMENT:
        raise CorruptChunkError(f"the file has {size} bytes and a header of {length}")
    try:
        header = json.loads(_bytes(read, 8, length).decode("ascii"))
    except (ValueError, RecursionError):
        raise CorruptChunkError("the header is not JSON") from None
    metadata = _metadata(header)
    if metadata["key"] != digest:
        raise CorruptChunkError(f"it is the file of another chunk, {metadata['key'][:12]}...")
    payload = _payload({name: one for name, one in header.items() if name != "__metadata__"})
    if 8 + length + payload != size:
        raise CorruptChunkError(
            f"the file has {size} bytes, its header says {8 + length + payload}"
        )
    tokens = header["tokens"]
    if tokens["dtype"] != "I32" or len(tokens["shape"]) != 1:
        raise CorruptChunkError("the token ids are not one row of int32")
    count = tokens["shape"][0]
    return FileFacts(metadata["codec"], count, payload, metadata["xxh3_128"], 8 + length)


def _metadata(header: Any) -> dict[str, str]:
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.keys() != _FIELDS.keys():
        raise CorruptChunkError("the header has not the metadata of this format")
    for name, form in _FIELDS.items():
        value = metadata[name]
        if not isinstance(value, str) or not form.fullmatch(value):
            raise CorruptChunkError(f"the header's {name} cannot be one")
    return metadata


def _payload(tensors: dict[str, Any]) -> int:
    """Bytes of all tensors, which must lie behind each other without gaps."""
    if "tokens" not in tensors or len(tensors) < 2:
        raise CorruptChunkError("the header lacks the token ids or every other tensor")
    end = 0
    for begin, stop, nbytes in sorted(_extent(name, one) for name, one in tensors.items()):
        if begin != end or stop - begin != nbytes:
            raise CorruptChunkError("the tensors overlap, leave gaps or have another size")
        end = stop
    return end


def _extent(name: str, tensor: Any) -> tuple[int, int, int]:
    fields = {"dtype", "shape", "data_offsets"}
    if isinstance(tensor, dict) and tensor.keys() == fields:
        shape, offsets = tensor["shape"], tensor["data_offsets"]
        width = _WIDTHS.get(tensor["dtype"]) if isinstance(tensor["dtype"], str) else None
        if width and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2:
            return offsets[0], offsets[1], math.prod(shape) * width
    raise CorruptChunkError(f"the header's tensor {name[:40]!r} cannot be one")


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )


def _checksum(read: ReadV, facts: FileFacts) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_BUFFER, facts.payload)))
    done = 0
    while done < facts.payload:
        part = buffer[: min(len(buffer), facts.payload - done)]
        read_views(read, facts.offset + done, [part], hasher.update)
        done += len(part)
    return hasher.hexdigest()


def _bytes(read: ReadV, offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    if count:
        read_views(read, offset, [memoryview(buffer)], lambda _: None)
    return bytes(buffer)
