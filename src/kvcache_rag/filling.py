"""Fill a row of a buffer with a prompt's context: load, stitch, choose tokens, compute them again.

What a policy asks for is done here, for single answers and batches alike.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.alignment import text_of
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.weighing import weighed_chunks
from kvcache_rag.recompute import chosen_tokens, recompute
from kvcache_rag.signals import ChunkScores, RowSignals
from kvcache_rag.stitch import StitchedPrompt, StitchedRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvcache_rag.context import ContextChunk, ContextLoader, LoadedContext
    from kvcache_rag.kvbuffer import KVBuffer
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.request import Request


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
        wrapper = (template.chunk_start, template.chunk_end)
        texts = [
            text_of(self.tokenizer, self.loader.ids(chunk), *wrapper)
            if chunk.text is None  # known by its key alone
            else chunk.text
            for chunk in chunks
        ]
        return ChunkScores.start(scorer, question, texts, wrapper, self.tokenizer)


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
