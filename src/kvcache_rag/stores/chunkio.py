"""The file of a chunk in its folder: published in one step, read with its own descriptor."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores import directory
from kvcache_rag.stores.chunkfile import FileSpec, check_header, read_file, write_file
from kvcache_rag.stores.scatter import positional

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.chunk import ChunkKey, ChunkKV
    from kvcache_rag.codecs import Codec


def load(
    root: str,
    key: ChunkKey,
    spec: FileSpec,
    codec: Codec,
    out: ChunkKV,
    check: Callable[[os.stat_result], None],
) -> os.stat_result:
    """Read the chunk of `key` into `out`; put its file aside when it is not that chunk.

    Args:
        root: The store's folder.
        key: Its address.
        spec: What its file must hold.
        codec: The codec it was written with.
        out: Memory of the chunk's layout and length; undefined after an error.
        check: Called with the status of the open file; raises `OSError` when it must not be read.

    Returns:
        Status of the file.

    Raises:
        CorruptChunkError: If there is something else; it was put aside.
        OSError: If there is no file, or it cannot be read.
    """
    descriptor, status = begin(root, key, check)
    try:
        with directory.quarantining(root, key, status):
            read_file(positional(descriptor), status.st_size, spec, codec, out)
    finally:
        os.close(descriptor)
    return status


def begin(
    root: str, key: ChunkKey, check: Callable[[os.stat_result], None]
) -> tuple[int, os.stat_result]:
    """Open the file of `key`; put aside what is no file.

    Args:
        root: The store's folder.
        key: Its address.
        check: Called with its status; raises `OSError` when it must not be read.

    Returns:
        Descriptor, which the caller closes, and status.

    Raises:
        CorruptChunkError: If there is something else; it was put aside.
        OSError: If there is no file, or it cannot be read.
    """
    path = directory.stem_path(root, key) + directory.SUFFIX
    directory.check_folder(root, os.path.dirname(path))
    try:
        descriptor = directory.open_itself(path, directory.READ)
    except OSError as error:
        if error.errno not in directory.NOT_A_FILE:
            raise
        directory.quarantine(root, key, os.lstat(path))
        raise CorruptChunkError(f"it is not a file: {error}") from None
    try:
        status = os.fstat(descriptor)
        check(status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def publish(
    path: str,
    chunk: ChunkKV,
    spec: FileSpec,
    codec: Codec,
    *,
    durable: bool,
    check: Callable[[], None],
) -> int:
    """Write the file of a chunk into an existing folder, under its name only when it is complete.

    Args:
        path: Its name.
        chunk: What to write.
        spec: What the file must hold.
        codec: How the tensors are encoded.
        durable: Whether it is on the medium when this returns.
        check: Called when the file is complete; raises `OSError` when it must not be published.

    Returns:
        Bytes of the file.

    Raises:
        OSError: If it cannot be written; also `SafetensorError`, as on a full disk.
        CorruptChunkError: If safetensors wrote another header than readers expect.
    """
    folder = os.path.dirname(path)
    temporary = f"{folder}/{directory.TEMPORARY}-{secrets.token_hex(16)}"
    try:
        write_file(temporary, chunk, spec, codec)
        size = _finish(temporary, spec, durable=durable)
        check()
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    if durable and hasattr(os, "O_DIRECTORY"):
        with directory.opened(folder, directory.FOLDER) as descriptor:
            os.fsync(descriptor)
    return size


def _finish(temporary: str, spec: FileSpec, *, durable: bool) -> int:
    with directory.opened(temporary, directory.WRITE) as descriptor:
        # What this version of safetensors wrote has to be what every reader expects.
        size = os.fstat(descriptor).st_size
        check_header(positional(descriptor), size, spec)
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)
        if durable:
            os.fsync(descriptor)
    return size
