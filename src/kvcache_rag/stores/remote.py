"""Chunks on a remote that many machines share: object storage, or a mounted folder.

fsspec only moves the bytes; they are checked here, as on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache_rag.errors import InvalidInputError, check_settings
from kvcache_rag.stores.bytes import GENERATION, ByteStore, Entry
from kvcache_rag.stores.filesystem import temporary_path
from kvcache_rag.stores.locks import ThreadLocks
from kvcache_rag.stores.object_names import SUFFIX
from kvcache_rag.stores.stored import StoredChunks
from kvcache_rag.stores.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag.codecs import Codec
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.stores.bytes import Blob, Buffer
    from kvcache_rag.stores.file import FileSpec
    from kvcache_rag.stores.signing import KeySource


T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_RECHECK = 5.0  # seconds for which the generation of a namespace is believed

_LONG = 600.0  # seconds for what lists or deletes everything and is not part of a question

_PASSES = 3  # of a deletion, for what another process writes meanwhile

# How drivers call the time of writing.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


class Objects(ByteStore):
    """Objects below the root of a transport, under the relative paths of a `Folder`'s files."""

    def __init__(self, transport: Transport, failed: Callable[[str], None]) -> None:
        """Call nothing yet; `failed` is told of every failure."""
        self._transport, self._failed = transport, failed
        self._locks = ThreadLocks()
        self._thread = threading.local()  # `fs` in a call that is under way, `timeout` otherwise

    def path(self, name: str) -> str:
        """Where the object of a name is or would be."""
        return f"{self._transport.root}/{name}"

    def get(self, name: str, most: int | None = None) -> bytes | None:
        return self._run(lambda fs: _fetched(fs, self.path(name), most))

    def put(
        self,
        name: str,
        pieces: Sequence[Buffer],
        allowed: Callable[[], bool] | None = None,
    ) -> bool:
        """Write an object, and take it back when it is not allowed by then.

        This runs to its end even when nobody waits for it any more, so a late one does not bring
        back what was deleted.
        """
        data = b"".join(pieces)

        def upload(fs: Any) -> bool:
            self._thread.fs = fs
            try:
                self._publish(fs, self.path(name), data)
                if allowed is None or allowed():
                    return True
                _remove(fs, self.path(name))
                return False
            finally:
                self._thread.fs = None

        return self._run(upload)

    def _publish(self, fs: Any, path: str, data: bytes) -> None:
        """Write an object that others see whole or not at all."""
        if not self._transport.renames:
            fs.pipe_file(path, data)
            return
        folder = path.rpartition("/")[0]
        temporary = temporary_path(folder)
        fs.makedirs(folder, exist_ok=True)
        try:
            fs.pipe_file(temporary, data)
            fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                fs.rm_file(temporary)
            raise

    def delete(self, names: Iterable[str], *, damaged: Blob | None = None) -> int:
        del damaged
        return sum(
            self._run(partial(self._cleared, prefix=name), _LONG)
            if name.endswith("/")
            else self._run(partial(_removed, path=self.path(name)))
            for name in names
        )

    def _cleared(self, fs: Any, prefix: str) -> int:
        folder = self.path(prefix.rstrip("/"))
        chunks: set[str] = set()
        for _ in range(_PASSES):
            there = self._left(fs, folder)
            if not there:
                return len(chunks)
            chunks |= {path for path in there if path.endswith(SUFFIX)}
            for child in {path.removeprefix(f"{folder}/").partition("/")[0] for path in there}:
                with suppress(FileNotFoundError):
                    fs.rm(f"{folder}/{child}", recursive=True)
        if self._left(fs, folder):
            raise OSError(f"objects are left in {folder}; delete it again")
        return len(chunks)

    def _left(self, fs: Any, folder: str) -> list[str]:
        return [path for path in _found(fs, folder) if path != f"{folder}/{GENERATION}"]

    def list(self, prefix: str) -> list[Entry]:
        if prefix and not prefix.endswith("/"):
            return self._run(partial(_info, path=self.path(prefix), name=prefix))
        return self._run(partial(_entries, root=self.path(""), prefix=prefix), _LONG)

    def lock(self, name: str, patience: float | None = None) -> AbstractContextManager[bool]:
        """Exclude other threads of this process; an object store has no locks."""
        return self._locks.hold([name], patience)

    @contextmanager
    def insisting(self) -> Iterator[None]:
        """Let this thread's calls be made although the remote is being skipped, and take longer."""
        self._thread.timeout = _LONG
        try:
            yield
        finally:
            self._thread.timeout = None

    def _run(self, call: Callable[[Any], T], timeout: float | None = None) -> T:
        """What the remote says; every failure is told, and raised."""
        inner = getattr(self._thread, "fs", None)
        if inner is not None:
            return call(inner)
        try:
            return self._transport.run(
                call, timeout=timeout or getattr(self._thread, "timeout", None)
            )
        except OSError as error:
            self._failed(str(error))
            raise


def _fetched(fs: Any, path: str, most: int | None) -> bytes | None:
    """The first bytes of an object, or all of a shorter one; None without one."""
    try:
        data = fs.cat_file(path, start=0, end=most)
    except FileNotFoundError:
        return None
    if not isinstance(data, bytes | bytearray | memoryview):
        # `bytes` of a number would be as many zeros.
        raise OSError(f"the driver's cat_file returned {type(data).__name__}, not bytes")
    return bytes(data)


def _remove(fs: Any, path: str) -> None:
    with suppress(FileNotFoundError):
        fs.rm_file(path)


def _removed(fs: Any, path: str) -> int:
    """Remove an object; whether it was a chunk's, as far as the remote says."""
    if not _info(fs, path, path):
        return 0
    _remove(fs, path)
    return int(path.endswith(SUFFIX))


def _info(fs: Any, path: str, name: str) -> list[Entry]:
    """What is known of one object; unlike `fs.exists` an error is no answer."""
    try:
        info = fs.info(path)
    except FileNotFoundError:
        return []
    return [_entry(name, info)] if info["type"] == "file" else []


def _found(fs: Any, folder: str) -> dict[str, Any]:
    """What is known of all objects below a folder, by path."""
    try:
        return dict(fs.find(folder, detail=True))
    except FileNotFoundError:
        return {}


def _entries(fs: Any, root: str, prefix: str) -> list[Entry]:
    found = _found(fs, (root + prefix).rstrip("/"))
    return sorted(
        (_entry(str(path).removeprefix(root), info) for path, info in found.items()),
        key=lambda entry: entry.name,
    )


def _entry(name: str, info: Mapping[str, Any]) -> Entry:
    moment = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(moment, datetime):
        moment = (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    # What has no time is never old.
    written = float(moment) if isinstance(moment, int | float) else time.time()
    return Entry(name, int(info.get("size") or 0), written, written)


class RemoteStore(StoredChunks):
    """Chunks under a URL; put a `DiskStore` in front of it with `TieredStore`.

    A failing remote never fails a question.  Any error of the driver, or no reply within `timeout`,
    is a miss.  After three failures in a row, or one timeout, the remote is skipped for `pause`
    seconds, then tried with one call.  Locks only exclude threads of this process, the bytes kept
    have no limit, and `sweep` only runs when called.

    Attributes:
        url: The URL without credentials.
        timeout: Seconds that one call may take; a `put` makes two, a `get` of a damaged object
            three, all others one.
        retries: How often a failed call is repeated within that time.
        pause: Seconds for which a failing remote is skipped.
        max_object_bytes: Larger chunks are neither written nor read.
    """

    _DAMAGED = "the object of chunk {} is damaged"
    _ABSENT = "chunk {} cannot be had from the remote"

    place: Objects

    def __init__(
        self,
        url: str,
        *,
        codec: Codec | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        retries: int = 1,
        pause: float = 30.0,
        max_object_bytes: int = 1 << 30,
        tier: str = "remote",
        signing_key: KeySource = None,
    ) -> None:
        """Set up a remote; it is not called yet.

        Args:
            url: `s3://bucket/folder`, `gs://`, `az://`, `file:///folder`, or another that fsspec
                knows.
            codec: The form of the chunks, such as `Int8()` or "int8"; None for `Native()`.
            storage_options: Arguments of the driver: credentials, `endpoint_url`, ...  They appear
                in no message.
            timeout: See the attributes.
            retries: See the attributes.
            pause: See the attributes.
            max_object_bytes: See the attributes.
            tier: Name under which hits are counted.
            signing_key: A key, its bytes or its file; None for the environment's
                (`KVCACHE_RAG_SIGNING_KEY`), if set.

        Raises:
            InvalidInputError: If the URL, a number or the key cannot be used.
            MissingExtraError: If the driver is not installed, or there is a key and `cryptography`
                is not.
        """
        check_settings(RemoteStore.__init__, locals(), infinite=("pause",))
        if timeout <= 0 or retries < 0 or pause < 0:
            raise InvalidInputError("timeout must be above 0, retries and pause not below it")
        options = dict(storage_options or {})
        self._transport = Transport(url, options, timeout=timeout, retries=retries, pause=pause)
        objects = Objects(self._transport, lambda why: self._counters.unreachable(why))
        super().__init__(objects, codec=codec, tier=tier, signing_key=signing_key)
        self.url = self._transport.url
        self.timeout = timeout
        self.retries = retries
        self.pause = pause
        self.max_object_bytes = max_object_bytes
        self._option_names = sorted(options)
        # When the generation of a namespace was looked at, and which it was.
        self._generations: dict[str, tuple[float, int]] = {}
        _LOG.info("%s: opened %s, codec %s", tier, self.url, self._codec.name)

    def __repr__(self) -> str:
        """The call that made it, with stars for what may be secret."""
        options = dict.fromkeys(self._option_names, "***")
        signing = "" if self.signing_key is None else f", signing_key={self.signing_key!r}"
        return (
            f"RemoteStore({self.url!r}, codec={self._codec!r}, "
            f"storage_options={options or None}, timeout={self.timeout}, retries={self.retries}, "
            f"pause={self.pause}, max_object_bytes={self.max_object_bytes}, "
            f"tier={self.tier!r}{signing})"
        )

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        """Upload a chunk, unless the remote is being skipped."""
        if self._transport.breaker.is_open():
            self._counters.failed(f"{self.url} failed and is skipped for {self.pause:g} s")
            return False
        return super().put(key, chunk, generation)

    def _has_room(self, namespace: str, size: int) -> bool:
        if size > self.max_object_bytes:
            self._counters.failed(
                f"an object of {size} bytes exceeds max_object_bytes={self.max_object_bytes}"
            )
            return False
        return super()._has_room(namespace, size)

    def _blob(self, name: str, spec: FileSpec) -> Blob:
        if spec.least > self.max_object_bytes:
            raise FileNotFoundError(f"it exceeds max_object_bytes={self.max_object_bytes}")
        return super()._blob(name, spec)

    def describe(self, spec: str, namespace: str, description: Mapping[str, Any]) -> None:
        """Do nothing: nobody looks in a bucket for that."""
        del spec, namespace, description

    def delete_namespace(self, namespace: str, generation: int | None = None) -> int:
        """Remove every object of the namespace, even while the remote is being skipped.

        A bucket that keeps old versions keeps these until its own rules drop them.
        """
        with self.place.insisting():
            try:
                return super().delete_namespace(namespace, generation)
            finally:
                self._generations.pop(namespace, None)

    def generation(self, namespace: str) -> int:
        """A small object on the remote, read at most every five seconds."""
        looked, last = self._generations.get(namespace, (-_RECHECK, 0))
        if time.monotonic() - looked < _RECHECK:
            return last
        with suppress(OSError):
            last = self._generation(namespace)
        self._generations[namespace] = (time.monotonic(), last)
        return last
