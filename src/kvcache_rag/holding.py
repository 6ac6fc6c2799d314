"""Hold the chunks of a prompt where they lie, instead of copying them into one buffer.

Deferred rotation (LazyAttention, arXiv 2606.04302): one copy of a chunk serves any prompt at any
position.  What is missing is prefilled, stored and held at once.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvcache_rag.context import LoadedContext
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.filling import FilledRow, costs_of, weighing
from kvcache_rag.models.deferred_cache import HeldSegments, deferred_cache
from kvcache_rag.models.deferring import deferred_rotation
from kvcache_rag.models.segments import SegmentTable
from kvcache_rag.prefill import PendingChunk, batches
from kvcache_rag.stitch import StitchedPrompt
from kvcache_rag.stores.transfer import moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvcache_rag.chunk import ChunkKey, ChunkKV
    from kvcache_rag.context import ContextChunk, ContextLoader
    from kvcache_rag.filling import Prompt
    from kvcache_rag.kvbuffer import KVBuffer
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.policies import ReusePolicy

Known: TypeAlias = "dict[ChunkKey, tuple[ChunkKV, str]]"
"""Chunks that rows of one batch share, and the tier that each came from."""


@dataclass(frozen=True, eq=False)
class HeldRow:
    """A prompt whose context lies in chunks of the store.

    Attributes:
        ids: `(tokens,)` int64 of the whole prompt, on the CPU.
        shape: The prompt's spans.
        loaded: What finding the chunks cost.
        policy: What was asked for.
        parts: Prefix (if any) and chunks, and how far the keys of each have to move.
    """

    ids: Tensor
    shape: StitchedPrompt
    loaded: LoadedContext
    policy: ReusePolicy
    parts: tuple[tuple[ChunkKV, int], ...]

    @property
    def missing(self) -> int:
        """Last tokens of the prompt that generating has to compute: the query."""
        return self.shape.tokens - self.shape.context_tokens

    @property
    def costs(self) -> dict[str, Any]:
        """What it adds to `Metrics`."""
        return {**costs_of(self.loaded), "policy": repr(self.policy), "rotation": "deferred"}


Row: TypeAlias = FilledRow | HeldRow
"""A prompt whose context is there."""


@dataclass(frozen=True, eq=False)
class Holder:
    """Finds the chunks of prompts, and computes those that are missing.

    Attributes:
        loader: Knows store, prefix, model and costs; those of combinations have their own.
    """

    loader: ContextLoader

    def hold(self, prompt: Prompt, chunks: Sequence[ContextChunk], known: Known) -> HeldRow:
        """Find the chunks of a prompt.

        Args:
            prompt: The prompt.
            chunks: Its chunks, or what became of them.
            known: Of other rows of the batch; those of this one are added.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
        """
        joint = any(chunk.is_joint for chunk in chunks)
        loader = self.loader.combinations if joint else None
        found = _Finding(loader or self.loader, known)
        started = time.perf_counter()
        prefix = found.loader.prefiller.prefix()
        loaded = found.load(chunks, started)
        policy, device = prompt.request.policy, found.loader.prefiller.model.device
        members = [] if prefix is None else [moved(prefix, device)]
        members += [known[chunk.key][0] for chunk in chunks]
        prefix_tokens = len(loaded.ids) - sum(map(len, chunks))
        shape = StitchedPrompt.of(prefix_tokens, [len(one) for one in chunks], len(prompt.query))
        gap = 0
        if policy.adjacent_query and policy.positions == "composite":  # as in `stitch`
            highest = max((one.start + len(one) for one in members), default=0)
            gap = shape.context_tokens - highest
        parts, place = [], 0
        for one in members:
            far = gap if policy.positions == "composite" else place - one.start
            parts.append((one, far))
            place += len(one)
        ids = torch.tensor([*loaded.ids, *prompt.query])
        return HeldRow(ids, shape, loaded, policy, tuple(parts))


@dataclass(frozen=True, eq=False)
class _Finding:
    """Brings chunks of one loader."""

    loader: ContextLoader
    known: Known

    def load(self, chunks: Sequence[ContextChunk], started: float) -> LoadedContext:
        prefiller = self.loader.prefiller
        fresh = [one for one in dict.fromkeys(chunks) if one.key not in self.known]
        reasons = {one: why for one in fresh if (why := self.loader.reason(one))}
        missing = [one for one in fresh if one not in reasons and not self._fetch(one)]
        try:
            computed = self._compute(missing, prefiller.fill_batch)
            for key, chunk in self._compute([*reasons], self._without_storing).items():
                tier = next(tier for one, (tier, _) in reasons.items() if one.key == key)
                prefiller.store.promote(key, chunk, tier)
        finally:
            prefiller.model.narrow()
        prefilled = {one.key: len(one) for one in (*reasons, *missing)}
        hits = Counter(self.known[one.key][1] for one in chunks if one.key not in prefilled)
        ids = [*prefiller.prefix_ids]
        for one in chunks:
            ids += self.known[one.key][0].tokens.tolist()
        return LoadedContext(
            ids=tuple(ids),
            load=time.perf_counter() - started,
            stitch=0.0,
            hits=dict(hits),
            misses=len(computed),
            reused_tokens=sum(map(len, chunks)) - sum(prefilled.values()),
            prefilled_tokens=sum(prefilled.values()),
            declined=dict(Counter(why for _, why in reasons.values())),
        )

    def _fetch(self, chunk: ContextChunk) -> bool:
        """Take a chunk as the store gives it, shared with others; False for a miss."""
        prefiller, costs = self.loader.prefiller, self.loader.costs
        layout, started = prefiller.model.measured.chunk_layout, costs.clock()
        try:
            hit = prefiller.store.get(chunk.key, layout)
        except ChunkNotFoundError:
            return False
        costs.loaded(hit.tier, hit.chunk.nbytes, costs.clock() - started)
        # The key is the hash of these ids, so this holds even for a file that lies about itself.
        if prefiller.key(hit.chunk.tokens.tolist()) != chunk.key:
            prefiller.store.delete(chunk.key)
            return False
        self.known[chunk.key] = moved(hit.chunk, prefiller.model.device), hit.tier
        return True

    def _compute(
        self,
        missing: Sequence[ContextChunk],
        fill: Callable[[Sequence[PendingChunk]], dict[ChunkKey, ChunkKV]],
    ) -> dict[ChunkKey, ChunkKV]:
        prefiller, costs = self.loader.prefiller, self.loader.costs
        pending = [PendingChunk(one.key, self._known_ids(one)) for one in missing]
        computed: dict[ChunkKey, ChunkKV] = {}
        for batch in batches(pending, len(prefiller.prefix_ids)):
            started = costs.clock()
            found = fill(batch)
            computed.update(found)
            tokens = sum(len(one.ids) for one in batch if one.key in found)
            costs.passed(tokens, costs.clock() - started)
        for chunk, one in zip(missing, pending, strict=True):
            if one.key not in computed and not self._fetch(chunk):
                # Another process stored it; it is gone again.
                computed[one.key] = prefiller.compute([one.ids])[0]
            if one.key in computed:
                tier = prefiller.store.locate(one.key) or prefiller.store.tier
                device = prefiller.model.device
                self.known[one.key] = moved(computed[one.key], device), tier
        return computed

    def _without_storing(self, batch: Sequence[PendingChunk]) -> dict[ChunkKey, ChunkKV]:
        costs, started = self.loader.costs, self.loader.costs.clock()
        chunks = self.loader.prefiller.compute([one.ids for one in batch])
        costs.prefilled([len(one.ids) for one in batch], costs.clock() - started)
        return {one.key: chunk for one, chunk in zip(batch, chunks, strict=True)}

    def _known_ids(self, chunk: ContextChunk) -> tuple[int, ...]:
        ids = chunk.ids
        if ids is None:
            ids = self.loader.renderer.chunk_ids(chunk.text) if chunk.text is not None else ()
        if self.loader.prefiller.key(ids) != chunk.key:
            raise ChunkNotFoundError(
                f"chunk {chunk.key.digest[:12]} is not in the store any more; pass its text "
                "instead of its key"
            )
        return ids


def held_cache(model: TransformersModel, rows: Sequence[HeldRow], buffer: KVBuffer) -> Any:
    """A transformers cache of one left-padded batch (see `SegmentTable`).

    Args:
        model: The model.
        rows: Of the batch.
        buffer: Memory for as many tokens as the longest query has, and the answer.
    """
    width = max(row.shape.tokens for row in rows)
    longest = max(row.missing for row in rows)
    table = []
    for row in rows:
        column, members = width - row.shape.tokens, []
        for chunk, far in row.parts:
            members.append((chunk, column, far))
            column += len(chunk)
        table.append(members)
    keep = [longest - row.missing for row in rows]
    segments = SegmentTable.of(model.measured, table, width - longest, keep)
    return deferred_cache(HeldSegments.of(segments), model.measured.kinds, buffer)


def attending(
    model: TransformersModel, policy: ReusePolicy, rows: Sequence[Row | None]
) -> AbstractContextManager[None]:
    """What the query's forward passes run in: `deferred_rotation` over held rows, else `weighing`.

    Args:
        model: The model.
        policy: What all rows ask for.
        rows: Of one batch, all held or none, None for those that are prefilled plainly.

    Raises:
        UnsupportedModelError: On entering, if the policy weighs chunks and the model cannot.
    """
    filled = [row for row in rows if not isinstance(row, HeldRow)]
    return weighing(model, policy, filled) if filled else deferred_rotation(model)
