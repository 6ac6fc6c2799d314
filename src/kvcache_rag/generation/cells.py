"""The contexts of a batch of prompts in a model that has cells of its own (llama.cpp).

Chunks stay where the store keeps them and are written into the cells one by one, so that a prompt
takes memory once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.generation.context import Context, ContextRow, Filler
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.models.generate import beams
from kvcache_rag.policies.signals import RowSignals
from kvcache_rag.recompute import chosen_tokens
from kvcache_rag.stitching.stitch import StitchedRow, moves_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.generation.context import Prompt
    from kvcache_rag.models.llamacpp.cells import CellsCache
    from kvcache_rag.models.llamacpp.model import LlamaCppModel

_WHY = "llama.cpp has contexts in cells of its own"


@dataclass(frozen=True, eq=False)
class CellsContext(Context):
    """What stands before the queries of one batch of prompts, in the model's cells.

    Attributes:
        cells: Holds the contexts, each in a sequence of its own.
    """

    cells: CellsCache | None = None

    def cache(self, missing: Sequence[int]) -> Any:
        if self.cells is None:
            return None
        sizes = [row.shape.tokens for row in self.rows]
        width = max(sizes)
        held = [width - count for count in missing]
        self.cells.is_at(width - max(missing), held, [width - size for size in sizes])
        return self.cells


class CellsFiller(Filler):
    """Brings the contexts of prompts for one engine."""

    model: LlamaCppModel

    def _fill(self, prompts: Sequence[Prompt]) -> Context:
        rows = [self._held(prompt) for prompt in prompts]
        request = prompts[0].request
        cells = self.model.begin(
            [row.shape.tokens for row in rows],
            room=request.max_new_tokens,
            beams=beams(request.options),
        )
        brought = [
            self._brought(prompt, row, sequence)
            for prompt, row, sequence in zip(prompts, rows, cells.sequences, strict=True)
        ]
        return CellsContext(self.model, brought, "copied", _WHY, cells)

    def choose(self, prompt: Prompt) -> ContextRow:
        return self._held(prompt)

    def _held(self, prompt: Prompt) -> ContextRow:
        """Find the context of a prompt where it lies, and choose tokens."""
        policy, loader = prompt.policy, self.loader.of(prompt.chunks)
        self._refuse(prompt)
        scores = self._scoring(policy, prompt.request.question, prompt.chunks)
        scheme, adjacent = policy.positions, policy.adjacent_query
        loaded = loader.hold(prompt.chunks, scheme, {}, adjacent=adjacent)
        ids, shape = self._joined(prompt, loaded)
        row = ContextRow(ids, shape, loaded, policy)
        if policy.is_reuse or not shape.context_tokens:
            return row
        started = time.perf_counter()
        nowhere = KVBuffer.allocate(self.model.measured.chunk_layout, 1, 0, self.model.device)
        signals = RowSignals(StitchedRow(self.model, nowhere, ids, shape), scores)
        selected = chosen_tokens(policy, shape, signals)  # (context_tokens,) bool
        return replace(
            row,
            selected=selected if bool(selected.any()) else None,
            choosing=time.perf_counter() - started,
            scorer_misses=0 if scores is None else scores.misses,
            heard_query=signals.heard_query,
        )

    def _refuse(self, prompt: Prompt) -> None:
        """Raise `UnsupportedModelError` for what llama.cpp cannot do."""
        policy = prompt.policy
        if policy.chooses_tokens and not policy.needs_scorer and not policy.is_reuse:
            self.model.ensure_recomputable()
        if policy.scaling is not None:
            raise UnsupportedModelError(
                f"{policy!r} weighs chunks inside attention, which llama.cpp lets nobody do; use "
                'BestLast(), LegoLink(n), Reuse() or FullRecompute(), or backend="transformers"'
            )
        if policy.positions == "composite" and len(prompt.chunks) > 1:
            raise UnsupportedModelError(
                "llama.cpp has a prompt's next token stand right behind its last one, which "
                'composite positions do not; use positions="reordered", or backend="transformers"'
            )

    def _brought(self, prompt: Prompt, row: ContextRow, sequence: int) -> ContextRow:
        """Write a context into its sequence, and compute what was chosen again."""
        loader, segments = self.loader.of(prompt.chunks), row.loaded.segments
        started = time.perf_counter()
        layout = self.model.measured
        moves = moves_of(layout, segments, loader.prefiller.position, self.model.device)
        recomputing = 0.0
        for segment, move in zip(segments, moves, strict=True):
            again = None
            if row.selected is not None:
                again = row.selected[segment.column : segment.stop]
            begun = time.perf_counter()
            self.model.bring(sequence, segment, move, again)
            if again is not None and bool(again.any()):
                recomputing += time.perf_counter() - begun
        seconds = time.perf_counter() - started
        loaded = replace(row.loaded, stitch=seconds - recomputing, segments=())
        recomputed = 0 if row.selected is None else int(row.selected.sum())
        return replace(
            row,
            loaded=loaded,
            selected=None,  # the query is still to be computed
            recomputing=recomputing,
            recomputed_tokens=recomputed,
        )
