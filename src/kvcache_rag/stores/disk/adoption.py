"""Signing what lies in a folder already, one file at a time, while others use it.

A file is copied with a MAC in its header and renamed into its place, so readers see the old one or
the new one; its times stay.  Whoever adopts a folder says that he trusts what it holds at this
moment: the checksum tells damage only.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import xxhash

from kvcache_rag.errors import CorruptChunkError, UntrustedChunkError
from kvcache_rag.kv.chunk import canonical_json
from kvcache_rag.stores.disk import folders
from kvcache_rag.stores.disk.file import (
    ALIGNMENT,
    FileFacts,
    facts_of,
    positional,
    read_through,
    regular,
    signed_head,
    verify_bytes,
    write_view,
)
from kvcache_rag.stores.signing import Mac

if TYPE_CHECKING:
    from kvcache_rag.stores.disk.folders import NamespaceFolder, StoredFile
    from kvcache_rag.stores.signing import Authenticator, SigningKey

_LONGEST = 100  # letters of a provenance that are kept: with the MAC it has at most 200


def sign(
    file: StoredFile, namespace: NamespaceFolder, key: SigningKey, old_key: SigningKey | None = None
) -> bool:
    """Sign the file of a chunk, unless the key signed it before.

    Args:
        file: The chunk.
        namespace: Where it lies.
        key: Signs it.
        old_key: What signed it until now; None to sign what is not signed only.

    Returns:
        Whether it was signed now.

    Raises:
        CorruptChunkError: If it is damaged.
        UntrustedChunkError: If it says to be of another key than the two, or is not of the one that
            it names.
        OSError: If it cannot be read or written, or is gone.
    """
    begun = folders.epoch(namespace.path)
    with regular(file.path) as descriptor:
        status = os.fstat(descriptor)
        read = positional(descriptor)
        facts = facts_of(read, status.st_size, file.digest)
        mac = Mac.in_provenance(facts.header.metadata["provenance"])
        if mac is not None and mac.key == key.id:
            verify_bytes(read, status.st_size, file.digest, key)
            return False
        before = None
        if mac is not None:
            if old_key is None or mac.key != old_key.id:
                raise UntrustedChunkError(f"it is signed by another key, {mac.key}")
            before = old_key.authenticator(mac, facts.header.head)
        temporary = folders.temporary_path(os.path.dirname(file.path))
        try:
            _copy_signed(descriptor, facts, temporary, key, before)
            folders.set_times(temporary, (status.st_atime_ns, status.st_mtime_ns))
            _check_there(file.path, status)
            folders.check_epoch(namespace.path, begun)
            os.replace(temporary, file.path)
        finally:
            folders.unlink(temporary)
    folders.sync_folder(os.path.dirname(file.path))
    return True


def _copy_signed(
    source: int, facts: FileFacts, path: str, key: SigningKey, before: Authenticator | None
) -> None:
    """Copy an open file in one pass: the bytes that are checked are those that are signed."""
    mac = key.new_mac()
    head = _head(facts, mac)
    now, hasher = key.authenticator(mac, head), xxhash.xxh3_128()
    with folders.opened(path, folders.NEW) as descriptor:
        write_view(descriptor, memoryview(head))

        def copied(piece: memoryview) -> None:
            hasher.update(piece)
            now.update(piece)
            if before is not None:
                before.update(piece)
            write_view(descriptor, piece)

        read_through(positional(source), facts.header.offset, facts.payload, copied)
        if hasher.hexdigest() != facts.header.checksum:
            raise CorruptChunkError("the checksum is wrong: the bytes were changed")
        if before is not None and not before.is_right():
            raise UntrustedChunkError("its MAC is wrong: somebody without the key changed it")
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_view(descriptor, memoryview(signed_head(head, mac, now)))
        os.fsync(descriptor)


def _head(facts: FileFacts, mac: Mac) -> bytes:
    """The header with the MAC in its provenance, padded to whole pages as before."""
    metadata = facts.header.metadata
    written = Mac.in_provenance(metadata["provenance"])
    provenance = metadata["provenance"].removesuffix(f" {written}")[:_LONGEST]
    values = {**metadata, "provenance": f"{provenance} {mac}", "pad": ""}
    bare = 8 + len(canonical_json({**facts.header.values, "__metadata__": values}))
    values["pad"] = " " * (-bare % ALIGNMENT)
    header = canonical_json({**facts.header.values, "__metadata__": values})
    return struct.pack("<Q", len(header)) + header


def _check_there(path: str, status: os.stat_result) -> None:
    """Refuse to bring back what was dropped, or to replace what was written, meanwhile."""
    now = os.lstat(path)
    if (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
        raise OSError("it was written anew meanwhile; sign the folder again")
