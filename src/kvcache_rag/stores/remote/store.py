"""Chunks on a remote that many machines share: object storage, or a mounted folder.

fsspec moves the bytes and nothing else; what they are is checked here, as on disk.
"""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError

from kvcache_rag.codecs.named import codec_of
from kvcache_rag.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    InvalidInputError,
    check_name,
    check_settings,
)
from kvcache_rag.stores.base import (
    ChunkStore,
    Counters,
    EncodedHit,
    Hit,
    StoreStats,
    check_chunk,
    check_key,
    check_out,
)
from kvcache_rag.stores.device import wipe
from kvcache_rag.stores.disk.file import (
    ALIGNMENT,
    MAX_HEADER,
    FileSpec,
    check_header,
    empty_chunk,
    file_spec,
    in_memory,
    named_mac,
    read_encoded,
    read_file,
    write_file,
)
from kvcache_rag.stores.locks import ThreadLocks
from kvcache_rag.stores.remote import objects
from kvcache_rag.stores.remote.transport import Transport
from kvcache_rag.stores.signing import SigningKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from kvcache_rag.codecs import Codec, Room
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout
    from kvcache_rag.stores.disk.file import ReadV
    from kvcache_rag.stores.signing import KeySource


T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_RECHECK = 5.0  # seconds for which the generation of a namespace is believed

_LONG = 600.0  # seconds for what lists everything and is not part of a question


class RemoteStore(ChunkStore):
    """Chunks under a URL; put it behind a `DiskStore` with `TieredStore`.

    A failing remote never fails a question.  Whatever a driver raises, and an answer that does not
    come within `timeout`, is a miss; after three failures in a row, or one that ran out of time,
    the remote is skipped for `pause` seconds, then tried by one call.  Locks exclude the threads of
    this process only, there is no limit on the bytes kept, and `sweep` runs when it is called.

    Attributes:
        url: Where, without credentials.
        timeout: Seconds that one call may take; a `put` makes two, a `get` of a damaged object
            three, all others one.
        retries: How often a failed call is made again within that time.
        pause: Seconds for which a failing remote is skipped.
        max_object_bytes: Larger chunks are neither written nor read.
        tier: Name under which hits are counted.
        signing_key: What objects are signed by and have to be signed by; None without one.
    """

    excludes_processes = False

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
        """Name a remote; it is not called yet.

        Args:
            url: `s3://bucket/folder`, `gs://`, `az://`, `file:///folder`, or another of fsspec's.
            codec: The form of the chunks, such as `Int8()` or "int8"; None for `Native()`.
            storage_options: Arguments of the driver: credentials, `endpoint_url`, ...  They appear
                in no message.
            timeout: See the attributes, also for the others.
            retries: See there.
            pause: See there.
            max_object_bytes: See there.
            tier: See there.
            signing_key: A key, its bytes or its file; None for that of the environment
                (`KVCACHE_RAG_SIGNING_KEY`), or none.

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
        self._objects = objects.Objects(self._transport.root, self._transport.renames)
        self.url = self._transport.url
        self.timeout = timeout
        self.retries = retries
        self.pause = pause
        self.max_object_bytes = max_object_bytes
        self.tier = tier
        self.signing_key = SigningKey.of(signing_key)
        self._codec = codec_of(codec)
        self._option_names = sorted(options)
        self._counters = Counters(tier)
        self._stripes = ThreadLocks()
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

    @property
    def codec(self) -> Codec:
        """The form in which this store writes chunks."""
        return self._codec

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Fetch a chunk, check it byte for byte and decode it."""
        begin = time.perf_counter()
        spec = file_spec(check_key(key), layout, self._codec)
        if out is None:
            out = empty_chunk(key, layout)
        else:
            check_out(key, layout, out)
        with self._reading(key):
            _, size = self._read(
                key,
                spec,
                lambda read, size: read_file(read, size, spec, self._codec, out, self.signing_key),
            )
        self._counters.hit(self.tier, size, time.perf_counter() - begin)
        return Hit(out, self.tier)

    @property
    def gives_encoded(self) -> bool:
        return self._codec.is_attended

    def encoded(self, key: ChunkKey, layout: ChunkLayout, room: Room | None = None) -> EncodedHit:
        """Fetch a chunk and check it byte for byte."""
        begin = time.perf_counter()
        spec = file_spec(check_key(key), layout, self._codec)
        with self._reading(key):
            chunk, size = self._read(
                key,
                spec,
                lambda read, size: read_encoded(
                    read, size, key, layout, self._codec, self.signing_key, room
                ),
            )
        self._counters.hit(self.tier, size, time.perf_counter() - begin)
        return EncodedHit(chunk, self.tier)

    def _reading(self, key: ChunkKey) -> AbstractContextManager[None]:
        return self._counters.reading(
            f"the object of chunk {key.digest} is damaged",
            f"chunk {key.digest} cannot be had from the remote",
        )

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        """Write the file into a temporary folder of this machine and upload it."""
        check_chunk(check_key(key), chunk)
        spec = file_spec(key, chunk.layout, self._codec)
        least = spec.payload + ALIGNMENT
        if least > self.max_object_bytes:
            self._counters.failed(
                f"an object of {least} bytes exceeds max_object_bytes={self.max_object_bytes}"
            )
            return False
        if self._transport.breaker.is_open():
            self._counters.failed(f"{self.url} failed and is skipped for {self.pause:g} s")
            return False
        try:
            if generation is None:
                generation = self._run(partial(self._objects.generation, namespace=key.namespace))
            data = self._encoded(chunk, spec)
            kept = self._run(partial(self._objects.upload, key=key, data=data, begun=generation))
        except (OSError, SafetensorError, ChunkNotFoundError) as error:
            self._counters.failed(f"{type(error).__name__}: {error}")
            return False
        if kept:
            self._counters.kept(self.tier, len(data))
        else:
            self._counters.failed("the namespace was deleted during the upload")
        return kept

    def contains(self, key: ChunkKey) -> bool:
        """Whether there is an object for the key; False when the remote does not say."""
        path = self._objects.path(key)
        signing = self.signing_key
        if signing is None:
            return self._tried(lambda fs: objects.holds(fs, path), False)
        with suppress(OSError, ChunkNotFoundError):
            self._check_named(key, signing)
            return True
        return False

    def delete(self, key: ChunkKey) -> bool:
        """Remove the object; False when there is none or it cannot be removed."""
        path = self._objects.path(key)
        return self._tried(lambda fs: objects.holds(fs, path) and objects.remove(fs, path), False)

    def delete_namespace(self, namespace: str, generation: int | None = None) -> int:
        """Remove every object of the namespace, even when the remote is being skipped.

        In a bucket that keeps old versions of objects, those stay until its own rules drop them.

        Raises:
            OSError: If something is left, or the remote does not answer.
        """
        check_name("namespace", namespace)
        call = partial(self._objects.delete_namespace, namespace=namespace, generation=generation)
        dropped = self._run(call, timeout=_LONG)
        self._generations.pop(namespace, None)
        self._counters.deleted(dropped)
        wipe()
        return dropped

    def generation(self, namespace: str) -> int:
        """A small object of the remote, looked at every five seconds at most."""
        looked, last = self._generations.get(namespace, (-_RECHECK, 0))
        if time.monotonic() - looked < _RECHECK:
            return last
        number = self._tried(partial(self._objects.generation, namespace=namespace), last)
        self._generations[namespace] = (time.monotonic(), number)
        return number

    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[None]:
        """Exclude other threads of this process; an object store has no locks."""
        return self._stripes.hold([check_key(key).digest[:2] for key in keys])

    def sweep(self) -> int:
        """Remove unfinished files; lists every object, so call it rarely."""
        self._tried(self._objects.sweep, None, timeout=_LONG)
        return 0

    def stats(self) -> StoreStats:
        """Counters of this store in this process."""
        return self._counters.stats()

    def _run(self, call: Callable[[Any], T], timeout: float | None = None) -> T:
        """What the remote says; every failure is counted and remembered, and raised."""
        try:
            return self._transport.run(call, timeout=timeout)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._counters.unreachable(str(error))
            raise

    def _tried(self, call: Callable[[Any], T], otherwise: T, timeout: float | None = None) -> T:
        try:
            return self._run(call, timeout)
        except OSError:
            return otherwise

    def _read(
        self, key: ChunkKey, spec: FileSpec, read: Callable[[ReadV, int], T]
    ) -> tuple[T, int]:
        """What a reading of the object's bytes gives, and how many they are."""
        if spec.payload + ALIGNMENT > self.max_object_bytes:
            raise FileNotFoundError(f"it exceeds max_object_bytes={self.max_object_bytes}")
        data = self._fetch(key, _most(spec))
        try:
            return read(in_memory(data), len(data)), len(data)
        except CorruptChunkError:
            # Damaged on the way or in the bucket?  Only what comes twice alike is removed.
            again = self._fetch(key, _most(spec))
            if again == data:
                path = self._objects.path(key)
                self._tried(lambda fs: objects.remove(fs, path), False)
                raise
            return read(in_memory(again), len(again)), len(again)

    def _check_named(self, key: ChunkKey, signing: SigningKey) -> None:
        """Refuse an object whose header does not name the signing key."""
        head = self._fetch(key, MAX_HEADER + 8)
        named_mac(in_memory(head), len(head), signing)

    def _fetch(self, key: ChunkKey, end: int) -> bytes:
        """The first bytes of an object, up to `end`."""
        path = self._objects.path(key)
        return self._run(partial(objects.fetched, path=path, end=end))

    def _encoded(self, chunk: ChunkKV, spec: FileSpec) -> bytes:
        with tempfile.TemporaryDirectory(prefix="kvcache-rag-") as folder:
            path = f"{folder}/chunk"
            write_file(path, chunk, spec, self._codec, self.signing_key)
            with open(path, "rb") as file:
                data = file.read()
        check_header(in_memory(data), len(data), spec)
        return data


def _most(spec: FileSpec) -> int:
    # One byte more than an object may have: a larger one is never loaded as a whole.
    return spec.payload + MAX_HEADER + 9
