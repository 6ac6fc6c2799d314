"""Chunks on disk, one safetensors file each, shared by every process that opens the folder."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError, check_settings, expanded
from kvcache_rag.stores import filesystem
from kvcache_rag.stores.folder import Folder
from kvcache_rag.stores.runs import close
from kvcache_rag.stores.stored import StoredChunks

if TYPE_CHECKING:
    from kvcache_rag.codecs import Codec
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.stores.limits import Quota
    from kvcache_rag.stores.signing import KeySource

_LOG = logging.getLogger(__name__)

_ENDLESS = ("ttl", "temp_age")


class DiskStore(StoredChunks):
    """Chunks as files under `root`; any number of threads and processes may use it at once.

    A chunk is published by renaming a finished file, read with its own descriptor, checked byte for
    byte and never modified in place.  Locks exclude the processes of one machine; two machines on a
    shared folder may each compute the same chunk, which does no harm.

    A store opened for one namespace serves only its keys, and opens, lists and locks nothing
    outside that namespace's folder.

    Attributes:
        root: The folder; it is created if missing.
        durable: Whether a chunk is on the medium when `put` returns.  False saves about four fifths
            of the time; a power cut may then lose chunks, but never corrupts answers.
    """

    _DAMAGED = "the file of chunk {} was put aside"
    _ABSENT = "chunk {} is not on disk"

    place: Folder

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        namespace: str | None = None,
        max_bytes: int | None = None,
        quota: Quota = None,
        ttl: float | None = None,
        durable: bool = True,
        codec: Codec | str | None = None,
        temp_age: float = 3600.0,
        tier: str = "disk",
        signing_key: KeySource = None,
    ) -> None:
        """Open a folder; if it is not writable, it serves what it holds.

        Raises:
            InvalidInputError: If `root` is a file or below one, or as for `StoredChunks`.
            MissingExtraError: If there is a key and `cryptography` is not installed.
        """
        check_settings(DiskStore.__init__, locals(), infinite=_ENDLESS)
        self.root = Path(os.path.abspath(expanded(root)))
        self.durable = durable
        super().__init__(
            Folder(str(self.root), durable=durable, dated=ttl is not None),
            codec=codec,
            namespace=namespace,
            max_bytes=max_bytes,
            quota=quota,
            ttl=ttl,
            temp_age=temp_age,
            tier=tier,
            signing_key=signing_key,
        )
        try:
            filesystem.make_folder(str(self.root), str(self.root))
        except (FileExistsError, NotADirectoryError):
            raise InvalidInputError(f"{self.root} is not a folder; name another one") from None
        except OSError as error:
            self._counters.unwritable(str(error))
        _LOG.info("%s: opened %s, codec %s", tier, self.root, self._codec.name)

    def __repr__(self) -> str:
        """The call that made it."""
        signing = "" if self.signing_key is None else f", signing_key={self.signing_key!r}"
        return (
            f"DiskStore({str(self.root)!r}, namespace={self.namespace!r}, "
            f"max_bytes={self.max_bytes}, quota={self.quota!r}, ttl={self.ttl}, "
            f"durable={self.durable}, codec={self._codec!r}, temp_age={self.temp_age}, "
            f"tier={self.tier!r}{signing})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        opener, (kind, arguments, options) = super().__reduce__()
        root = str(self.root)  # whoever opens it may work in another folder
        if arguments:
            return opener, (kind, (root, *arguments[1:]), options)
        return opener, (kind, (), {**options, "root": root})

    def path(self, key: ChunkKey) -> Path:
        """Path of the file of `key`, whether it exists or not."""
        return Path(self.place.path(self._name(key)))

    def touch(self, key: ChunkKey) -> None:
        """Mark the file as used now, unless it was within the last minute."""
        with suppress(OSError, ChunkNotFoundError):
            blob = self.place.get(self._name(key), 0)
            if blob is not None:
                close(blob)
