"""Fill a row of a buffer with a prompt's context: load, stitch, choose tokens, compute them again.

What a policy asks for is done here, for single answers and batches alike.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError
from kvcache_rag.kv.mask import first_positions
from kvcache_rag.models.attention.scaled import weighed_chunks
from kvcache_rag.models.deferred.cache import HeldSegments, deferred_cache
from kvcache_rag.models.deferred.segments import SegmentTable
from kvcache_rag.models.deferred.support import deferred_rotation
from kvcache_rag.policies.signals import ChunkScores, RowSignals
from kvcache_rag.prefill import PendingChunk, batches
from kvcache_rag.prompt.offsets import chunk_text
from kvcache_rag.recompute import chosen_tokens, recompute
from kvcache_rag.stitching.loader import LoadedContext
from kvcache_rag.stitching.stitch import StitchedPrompt, StitchedRow
from kvcache_rag.stores.device import moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvcache_rag.generation.request import Request
    from kvcache_rag.kv.buffer import KVBuffer
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.stitching.loader import ContextChunk, ContextLoader


@dataclass(frozen=True)
class Prompt:
    """Chunks and query of one prompt, and how to answer it.

    Attributes:
        chunks: In prompt order.
        query: Ids of the query.
        request: What the caller asked for.
    """

    chunks: tuple[ContextChunk, ...]
    query: tuple[int, ...]
    request: Request


@dataclass(frozen=True, eq=False)
class FilledRow:
    """A row whose context lies in its buffer.

    Attributes:
        row: The prompt.
        loaded: What loading and stitching cost.
        policy: What selected for this prompt.
        selected: `(context_tokens,)` bool, tokens to be computed again; None for none.
        choosing: Seconds for choosing them.
        recomputing: Seconds for computing them again, 0 before that.
        is_copy: Whether all that was done for another row of the batch.
        not_deferred: Why keys were copied instead of attended to where they lie.
    """

    row: StitchedRow
    loaded: LoadedContext
    policy: ReusePolicy
    selected: Tensor | None = None
    choosing: float = 0.0
    recomputing: float = 0.0
    is_copy: bool = False
    not_deferred: str = ""

    @property
    def recomputed_tokens(self) -> int:
        """How many tokens are computed again."""
        return 0 if self.selected is None else int(self.selected.sum())

    @property
    def missing(self) -> int:
        """Last tokens of the prompt that generating has to compute, once the row is recomputed."""
        shape = self.row.shape
        is_query = self.selected is None or self.is_copy
        return shape.tokens - shape.context_tokens if is_query else 1

    @property
    def costs(self) -> dict[str, Any]:
        """What it adds to `Metrics`."""
        return {
            **costs_of(self.loaded),
            "policy": repr(self.policy),
            "recompute": self.choosing + self.recomputing,
            "recomputed_tokens": self.recomputed_tokens,
            "rotation": "copied",
            "not_deferred": self.not_deferred,
        }

    @property
    def can_be_copied(self) -> bool:
        """Whether a row with the same chunks would hold the same, at the same cost."""
        loaded = self.loaded
        return not (self.policy.needs_scorer or loaded.misses or loaded.declined)


@dataclass(frozen=True, eq=False)
class RowFiller:
    """Fills rows for one engine.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        loader: Loads and stitches.
        auxiliary: Scores chunks for policies that bring no scorer of their own.
    """

    model: TransformersModel
    tokenizer: Any
    loader: ContextLoader
    auxiliary: Scorer | None = None

    def fill(
        self,
        buffer: KVBuffer,
        row: int,
        offset: int,
        prompt: Prompt,
        chunks: Sequence[ContextChunk],
        *,
        ahead: bool = False,
    ) -> FilledRow:
        """Load and stitch a prompt's context, and choose what has to be computed again.

        Args:
            buffer: With the model's layout.
            row: Which row.
            offset: Place of the first token in it.
            prompt: The prompt.
            chunks: Its chunks, or what became of them.
            ahead: Whether a context that is not computed again may still be on its way when this
                returns (`FilledRow.loaded.ahead`).

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
            UnsupportedModelError: If chunks would have to move and the model's keys cannot.
            InvalidInputError: If the policy needs a scorer and there is none, or selects nonsense.
        """
        policy = prompt.request.policy
        scores = self._scoring(policy, prompt.request.question, chunks)
        loaded = self.loader.load(
            buffer,
            row,
            offset,
            chunks,
            policy.positions,
            policy.adjacent_query,
            ahead=ahead and policy.is_reuse,
        )
        prefix = len(loaded.ids) - sum(map(len, chunks))
        shape = StitchedPrompt.of(prefix, [len(one) for one in chunks], len(prompt.query))
        ids = torch.tensor([*loaded.ids, *prompt.query])
        stitched = StitchedRow(self.model, buffer.single(row, offset), ids, shape)
        if policy.is_reuse or not shape.context_tokens:
            return FilledRow(stitched, loaded, policy)
        started = time.perf_counter()
        signals = RowSignals(stitched, self.loader.costs, scores)
        policy = policy.resolved(shape, signals)
        selected = chosen_tokens(policy, shape, signals)
        choosing = time.perf_counter() - started
        kept = selected if bool(selected.any()) else None
        return FilledRow(stitched, loaded, policy, kept, choosing)

    def recompute(self, filled: FilledRow) -> FilledRow:
        """Compute what was chosen and the query but its last token; nothing if none was chosen."""
        if filled.selected is None:
            return filled
        started = time.perf_counter()
        recompute(filled.row, filled.selected)
        self.model.wait()
        seconds = time.perf_counter() - started
        query = filled.row.shape.tokens - filled.row.shape.context_tokens - 1
        self.loader.costs.recomputed(filled.recomputed_tokens + query, seconds)
        return replace(filled, recomputing=seconds)

    def copy(
        self, source: FilledRow, buffer: KVBuffer, row: int, offset: int, prompt: Prompt
    ) -> FilledRow:
        """Fill a row with what another one holds whose chunks are the same.

        Context never sees a query, so it is the same whatever is asked.
        """
        context = source.row.shape.context_tokens
        target = buffer.single(row, offset)
        target.copy_first(source.row.buffer, context)
        chunks = [len(span) for span in source.row.shape.chunks]
        shape = StitchedPrompt.of(context - sum(chunks), chunks, len(prompt.query))
        ids = torch.cat((source.row.ids[:context], torch.tensor(prompt.query, dtype=torch.long)))
        loaded = replace(source.loaded, load=0.0, stitch=0.0)
        return replace(
            source,
            row=StitchedRow(self.model, target, ids, shape),
            loaded=loaded,
            choosing=0.0,
            recomputing=0.0,
            is_copy=True,
        )

    def _scoring(
        self, policy: ReusePolicy, question: str, chunks: Sequence[ContextChunk]
    ) -> ChunkScores | None:
        if not policy.needs_scorer or not chunks:
            return None
        scorer = policy.auxiliary or self.auxiliary
        if scorer is None:
            raise InvalidInputError(
                f"{policy} needs an auxiliary model to choose tokens; give one to the policy or to "
                "Engine(auxiliary=...)"
            )
        template = self.loader.renderer.template
        texts = [
            chunk_text(self.tokenizer, template, self.loader.ids(chunk))
            if chunk.text is None  # known by its key alone
            else chunk.text
            for chunk in chunks
        ]
        return ChunkScores.start(scorer, question, texts, template, self.tokenizer)


def costs_of(loaded: LoadedContext) -> dict[str, Any]:
    """What bringing a context adds to `Metrics`."""
    counts = ("reused_tokens", "prefilled_tokens", "hits", "misses", "declined")
    names = ("load", "stitch", *counts)
    waited = 0.0 if loaded.ahead is None else loaded.ahead.waited
    return {**{name: getattr(loaded, name) for name in names}, "load": loaded.load + waited}


def weighing(
    model: TransformersModel, policy: ReusePolicy, rows: Sequence[FilledRow | None]
) -> AbstractContextManager[None]:
    """What the query's forward passes run in: plain attention, unless the policy weighs chunks.

    Args:
        model: The model.
        policy: What all rows ask for.
        rows: Of one left-padded batch, None for those that are prefilled plainly.

    Raises:
        UnsupportedModelError: On entering, if the model's attention is code of its own.
    """
    shapes = [one.row.shape for one in rows if one is not None]
    if policy.scaling is None or not any(shape.chunks for shape in shapes):
        return nullcontext()
    width = max(shape.tokens for shape in shapes)
    columns = []
    for shape in shapes:
        padding, prefix = width - shape.tokens, shape.spans[0]
        columns.append((padding + prefix.stop, padding + shape.context_tokens))
    return weighed_chunks(model, policy.scaling.temperature, policy.scaling.scale, columns)


# Hold the chunks of a prompt where they lie, instead of copying them into one buffer.
#
# Deferred rotation (LazyAttention, arXiv 2606.04302): one copy of a chunk serves any prompt at any
# position. What is missing is prefilled, stored and held at once.


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
        sizes = [len(chunk) for chunk in chunks]
        shape = StitchedPrompt.of(len(loaded.ids) - sum(sizes), sizes, len(prompt.query))
        firsts = first_positions(
            [(one.start, len(one)) for one in members],
            policy.positions,
            adjacent=policy.adjacent_query,
        )
        parts = [(one, first - one.start) for one, first in zip(members, firsts, strict=True)]
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
