"""The worker's side: write chunks into pages, and read them back."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.errors import KVCacheRagError, UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout
from vllm_kvcache_rag.paged import PagedLayer
from vllm_kvcache_rag.rotation import PARTS, EngineRotation, measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.stores import ChunkStore
    from vllm_kvcache_rag.keys import Piece
    from vllm_kvcache_rag.scheduling import Job

logger = logging.getLogger("vllm.kvcache_rag")

_LOADERS = 2

# Bytes of chunks that wait to be written; while a store is so far behind, no more are copied.
_WAITING = 1 << 30


@dataclass(frozen=True)
class Loaded:
    """Requests whose loads have ended.

    Attributes:
        done: All of them.
        failed: Those of which something could not be loaded.
    """

    done: frozenset[str]
    failed: frozenset[str]


@dataclass(eq=False)
class _Load:
    """What is loaded for one request.

    Attributes:
        job: What is wanted.
        until: When it is given up, in seconds of `time.monotonic`.
        writing: Held while a piece is put into pages.
        given_up: Its pages may be another request's: nothing is written any more.
        future: Its end.
    """

    job: Job
    until: float
    writing: threading.Lock = field(default_factory=threading.Lock)
    given_up: bool = False
    future: Future[None] = field(default_factory=Future)

    def is_over(self) -> bool:
        """Whether it has ended, or is given up now."""
        late = not self.future.done() and time.monotonic() > self.until
        if late and self.writing.acquire(blocking=False):
            self.given_up = True
            self.writing.release()
            self.future.cancel()
        return self.given_up or self.future.done()


class PageWorker:
    """Loads, stores and measures the heads of one rank.

    Attributes:
        rotation: How keys move; None until `prove` has measured it.
    """

    def __init__(
        self, store: ChunkStore, rank: int, name: str, inv_freq: Tensor, timeout: float
    ) -> None:
        """Take what is known before pages are.

        Args:
            store: Where chunks lie.
            rank: Number among the tensor-parallel ranks.
            name: Of the model, for messages.
            inv_freq: Its rotary frequencies, `(dim / 2,)`.
            timeout: Seconds behind which a load is given up.
        """
        self._timeout = timeout
        self._store, self._rank, self._name, self._inv_freq = store, rank, name, inv_freq
        self._layers: tuple[PagedLayer, ...] = ()
        self._loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kvcache-rag-load")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvcache-rag-store")
        self._waiting, self._counting = 0, threading.Lock()  # bytes
        self._running: dict[str, _Load] = {}
        self._hanging: list[Future[None]] = []
        self.rotation: EngineRotation | None = None

    @torch.inference_mode()
    def attach(self, layers: Sequence[Any], block: int, pages: int) -> None:
        """Pages were allocated, and nothing is computed with them yet.

        Args:
            layers: vLLM's, in order.
            block: Tokens of a page.
            pages: Their number.

        Raises:
            UnsupportedModelError: If what is written into one is not what is read (`PagedLayer`),
                or layers differ.
        """
        found = tuple(PagedLayer(layer, block, pages) for layer in layers)
        shapes = {(one.layer.num_kv_heads, one.layer.head_size, one.cache.dtype) for one in found}
        if len(shapes) != 1:
            said = ", ".join(sorted(f"{heads} x {width} {dtype}" for heads, width, dtype in shapes))
            raise UnsupportedModelError(
                f"kvcache-rag does not stitch chunks for {self._name}: its layers have K and V of "
                f"several shapes ({said}); serve it without the connector"
            )
        self._layers = found

    @property
    def layout(self) -> ChunkLayout:
        """Shapes of what this rank stores."""
        layer = self._layers[0].layer
        shape = (layer.num_kv_heads, layer.head_size)
        layers = tuple(range(len(self._layers)))
        return ChunkLayout((GroupLayout(layers, shape, shape),), self._layers[0].cache.dtype)

    # ------------------------------------------------------------------------------------- loading
    def start(self, job: Job) -> None:
        """Begin to load what a request reuses, beside the forward passes of others."""
        self._hanging = [future for future in self._hanging if not future.done()]
        # While no thread is left that could load it, it need not wait to be given up.
        seconds = self._timeout if len(self._hanging) < _LOADERS else 0.0
        load = self._running[job.request] = _Load(job, time.monotonic() + seconds)
        load.future = self._loaders.submit(self._load, load)

    @torch.inference_mode()
    def _load(self, load: _Load) -> None:
        blocks = torch.tensor(load.job.blocks)
        for piece in load.job.pieces:
            if piece.stop > load.job.first and not load.given_up:
                self._place(load, piece, blocks)

    def _place(self, load: _Load, piece: Piece, blocks: Tensor) -> None:
        """Put those tokens of a piece into pages that are not there already."""
        chunk = self._store.get(piece.keys[self._rank], self.layout).chunk
        first = max(load.job.first, piece.start)
        skipped = first - piece.start
        keys = chunk.keys(0)[:, :, skipped:]  # (layers, kv_heads, tokens, width)
        values = chunk.values(0)[:, :, skipped:]
        if piece.old != piece.start:
            if self.rotation is None:
                raise UnsupportedModelError(f"{self._name}: its rotation was not measured")
            keys = keys.clone()  # the store's own is shared
            self.rotation.move(keys, piece.old + skipped, piece.start + skipped)
        device = self._layers[0].cache.device
        slots = self._layers[0].slots(blocks, first, piece.stop).to(device)
        with load.writing:
            if load.given_up:
                return
            for layer, key, value in zip(self._layers, keys, values, strict=True):
                layer.write(_by_token(key, device), _by_token(value, device), slots)

    def loaded(self) -> Loaded:
        """Requests whose loads have ended, or were given up, since this was last asked."""
        over = [name for name, load in self._running.items() if load.is_over()]
        failed = {name for name in over if self._has_failed(name, self._running.pop(name))}
        return Loaded(frozenset(over), frozenset(failed))

    def _has_failed(self, name: str, load: _Load) -> bool:
        """Whether a load that is over failed, which is logged."""
        error: BaseException | None
        if load.given_up:
            self._hanging.append(load.future)
            error = TimeoutError(f"its chunks were not there in {self._timeout:g} s")
        else:
            error = load.future.exception()
        if error is None:
            return False
        known = isinstance(error, (KVCacheRagError, OSError))
        logger.warning(
            "kvcache-rag: %s is computed whole: %s", name, error,
            exc_info=None if known else error,
        )  # fmt: skip
        return True

    # ------------------------------------------------------------------------------------- storing
    @torch.inference_mode()
    def save(self, job: Job) -> None:
        """Copy what a request has computed out of its pages, and store it."""
        for piece in job.pieces:
            key = piece.keys[self._rank]
            if self._store.contains(key):
                continue
            if self._waiting >= _WAITING:
                logger.warning("kvcache-rag: not stored: the store is %d bytes behind", _WAITING)
                return
            chunk = self._read(job, piece)
            with self._counting:
                self._waiting += chunk.nbytes
            self._writer.submit(self._put, piece, chunk)

    def _put(self, piece: Piece, chunk: ChunkKV) -> None:
        try:
            if not self._store.put(piece.keys[self._rank], chunk):
                logger.warning("kvcache-rag: not stored: %s", self._store.stats().last_failure)
        finally:
            with self._counting:
                self._waiting -= chunk.nbytes

    def _read(self, job: Job, piece: Piece) -> ChunkKV:
        blocks = torch.tensor(job.blocks)
        pairs = [layer.read(blocks, piece.start, piece.stop) for layer in self._layers]
        # (layers, 2, kv_heads, tokens, width)
        whole = torch.stack([torch.stack(pair) for pair in pairs]).cpu()
        ids = torch.tensor(piece.ids, dtype=torch.int32)
        return ChunkKV(self.layout, ids, piece.old, ((whole,),))

    # ----------------------------------------------------------------------------------- measuring
    @torch.inference_mode()
    def prove(self, job: Job) -> str:
        """Measure the rotation, by a prompt of one token; what is wrong with it, or ""."""
        (piece,) = job.pieces
        if len({*piece.ids}) > 1 or len(piece.ids) < 2 * PARTS or piece.start:
            return "a law is asked with a prompt of one token, repeated, and no prefix"
        chunk = self._read(job, piece)
        try:
            self.rotation = measured(chunk.keys(0), chunk.values(0), self._inv_freq, self._name)
        except UnsupportedModelError as error:
            self.rotation = None
            return str(error)
        return ""

    def close(self) -> None:
        """End what runs."""
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)
        self._store.close()


def _by_token(part: Tensor, device: torch.device) -> Tensor:
    """`(kv_heads, tokens, width)` as pages take it, `(tokens, kv_heads, width)`."""
    return part.transpose(0, 1).contiguous().to(device)
