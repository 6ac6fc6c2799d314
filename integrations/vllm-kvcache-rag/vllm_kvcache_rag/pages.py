"""The worker's side: write chunks into pages, and read them back."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache_rag.errors import KVCacheRagError, UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout
from vllm_kvcache_rag.rotation import PARTS, EngineRotation, measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.stores import ChunkStore
    from vllm_kvcache_rag.keys import Piece
    from vllm_kvcache_rag.paged import PagedLayer
    from vllm_kvcache_rag.scheduling import Job

logger = logging.getLogger("vllm.kvcache_rag")

_LOADERS = 2


@dataclass(frozen=True)
class Loaded:
    """Requests whose loads have ended.

    Attributes:
        done: All of them.
        failed: Those of which something could not be loaded.
    """

    done: frozenset[str]
    failed: frozenset[str]


class PageWorker:
    """Loads, stores and measures the heads of one rank.

    Attributes:
        rotation: How keys move; None until `prove` has measured it.
    """

    def __init__(self, store: ChunkStore, rank: int, name: str, inv_freq: Tensor) -> None:
        """Take what is known before pages are.

        Args:
            store: Where chunks lie.
            rank: Number among the tensor-parallel ranks.
            name: Of the model, for messages.
            inv_freq: Its rotary frequencies, `(dim / 2,)`.
        """
        self._store, self._rank, self._name, self._inv_freq = store, rank, name, inv_freq
        self._layers: tuple[PagedLayer, ...] = ()
        self._loaders = ThreadPoolExecutor(_LOADERS, thread_name_prefix="kvcache-rag-load")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvcache-rag-store")
        self._running: dict[str, Future[None]] = {}
        self.rotation: EngineRotation | None = None

    def attach(self, layers: Sequence[PagedLayer]) -> None:
        """Pages were allocated."""
        self._layers = tuple(layers)

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
        self._running[job.request] = self._loaders.submit(self._load, job)

    @torch.inference_mode()
    def _load(self, job: Job) -> None:
        blocks = torch.tensor(job.blocks)
        for piece in job.pieces:
            if piece.stop > job.first:
                self._place(piece, max(job.first, piece.start), blocks)

    def _place(self, piece: Piece, first: int, blocks: Tensor) -> None:
        """Put the tokens of a piece from `first` on into pages."""
        chunk = self._store.get(piece.keys[self._rank], self.layout).chunk
        keys = chunk.keys(0)[:, :, first - piece.start :]  # (layers, kv_heads, tokens, width)
        values = chunk.values(0)[:, :, first - piece.start :]
        if piece.old != piece.start:
            if self.rotation is None:
                raise UnsupportedModelError(f"{self._name}: its rotation was not measured")
            keys = keys.clone()  # the store's own is shared
            skipped = first - piece.start
            self.rotation.move(keys, piece.old + skipped, piece.start + skipped)
        device = self._layers[0].cache.device
        slots = self._layers[0].slots(blocks, first, piece.stop).to(device)
        for layer, key, value in zip(self._layers, keys, values, strict=True):
            layer.write(_by_token(key, device), _by_token(value, device), slots)

    def loaded(self) -> Loaded:
        """Requests whose loads have ended since this was last asked."""
        done = {name: future for name, future in self._running.items() if future.done()}
        failed = set()
        for name, future in done.items():
            del self._running[name]
            error = future.exception()
            if error is not None:
                failed.add(name)
                known = isinstance(error, (KVCacheRagError, OSError))
                logger.warning(
                    "kvcache-rag: %s is computed whole: %s", name, error,
                    exc_info=None if known else error,
                )  # fmt: skip
        return Loaded(frozenset(done), frozenset(failed))

    # ------------------------------------------------------------------------------------- storing
    @torch.inference_mode()
    def save(self, job: Job) -> None:
        """Copy what a request has computed out of its pages, and store it."""
        for piece in job.pieces:
            key = piece.keys[self._rank]
            if not self._store.contains(key):
                chunk = self._read(job, piece)
                self._writer.submit(self._put, piece, chunk)

    def _put(self, piece: Piece, chunk: ChunkKV) -> None:
        if not self._store.put(piece.keys[self._rank], chunk):
            logger.warning("kvcache-rag: not stored: %s", self._store.stats().last_failure)

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
