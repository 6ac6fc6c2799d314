"""The contexts of a batch of prompts in a model with its own cells (llama.cpp).

Chunks are read one by one and written into the cells, so that a prompt takes its memory once.
Missing ones are computed first, in the same cells.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.generation.context import Context, ContextBuilder, ContextRow
from kvcache_rag.generation.prompt_memory import alike
from kvcache_rag.generation.request import OtherLengthsError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.models.deferred.segments import Segment
from kvcache_rag.models.generate import beams, uses_beams
from kvcache_rag.policies.signals import RowSignals
from kvcache_rag.recompute import chosen_tokens
from kvcache_rag.stitching.loader import LoadedContext
from kvcache_rag.stitching.stitch import StitchedPrompt, StitchedRow, key_rotations
from kvcache_rag_llamacpp.sequence_cache import FIRST, SequenceCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.generation.context import Prompt
    from kvcache_rag.generation.prompt_memory import Beginning
    from kvcache_rag.generation.request import Request
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.metrics import Miss
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.stitching.loader import ContextLoader, Shared
    from kvcache_rag_llamacpp.binding import LlamaCpp
    from kvcache_rag_llamacpp.model import LlamaCppModel

_WHY = "llama.cpp has contexts in cells of its own"


@dataclass(frozen=True, eq=False)
class SequenceContext(Context):
    """What stands before the queries of one batch of prompts, in the model's cells.

    Attributes:
        cells: Holds the contexts, each in a sequence of its own.
        kept: Takes what of the only one the next prompt may begin with.
        beginning: What that depends on; None if the next one may not.
    """

    cells: SequenceCache | None = None
    kept: KeptSequence | None = None
    beginning: Beginning | None = None

    def leave(self, answers: Sequence[Sequence[int]], cache: Any, *, is_cut: bool) -> None:
        if self.kept is not None and self.beginning is not None and answers[0]:
            # What a cut pass computed beyond is dropped by whoever goes on.
            ids = (*self.rows[0].ids.tolist(), *answers[0][:-1])
            self.kept.leave(self.beginning, ids)

    def cache(self, missing: Sequence[int]) -> Any:
        if self.cells is None:
            return None
        sizes = [row.shape.tokens for row in self.rows]
        width = max(sizes)
        held = [width - count for count in missing]
        if self.rows[0].continued > held[0]:  # a prompt alone, of which more is computed anew
            self.cells.llama.remove(self.cells.sequences[0], held[0], -1)
        self.cells.set_lengths(width - max(missing), held, [width - size for size in sizes])
        return self.cells


class KeptSequence:
    """The last prompt in a model's cells, as long as nothing else was computed there."""

    def __init__(self, llama: LlamaCpp) -> None:
        """Of the prompts that run in these cells."""
        self._llama = llama
        self._begun = -1
        self._beginning: Beginning | None = None
        self._ids: tuple[int, ...] = ()

    def leave(self, beginning: Beginning, ids: tuple[int, ...]) -> None:
        """Let the next prompt go on from the first sequence.

        Args:
            beginning: What its keys and values depend on.
            ids: Whose these are, from 0 on.
        """
        self._begun, self._beginning, self._ids = self._llama.begun, beginning, ids

    def left(self, beginning: Beginning) -> tuple[int, ...]:
        """Ids of the prompt that is there; none if it depends on something else."""
        is_there = self._begun == self._llama.begun and self._beginning == beginning
        return self._ids if is_there else ()

    def continue_from(self, known: int, capacity: int) -> SequenceCache | None:
        """The cells with the first `known` tokens; None if they have no room for so many."""
        if self._llama.cells < capacity:
            return None
        self._beginning = None  # until that prompt has ended
        self._llama.remove(FIRST, known, -1)
        return SequenceCache(self._llama, [FIRST])


@dataclass(eq=False)
class _Plan:
    """A prompt, what is chosen of it, and what of it had to be computed first.

    Attributes:
        prompt: As it was asked for.
        row: Its lengths as they are known, and what is chosen.
        missed: What was not cached, by its key.
        seconds: For computing that.
    """

    prompt: Prompt
    row: ContextRow
    missed: dict[ChunkKey, Miss] = field(default_factory=dict)
    seconds: float = 0.0


class SequenceContextBuilder(ContextBuilder):
    """Brings the contexts of prompts for one engine."""

    model: LlamaCppModel

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept = None if self.memory.limit == 0 else KeptSequence(self.model.llama)

    def computed(self, rows: Sequence[ContextRow], request: Request, documents: int = 0) -> Context:
        plain, row, kept = super().computed(rows, request), rows[0], self._kept
        if kept is None or len(rows) > 1 or uses_beams(request.options):
            return plain
        room, beginning = request.max_new_tokens, self._computed_beginning(documents)
        ids = row.ids.tolist()
        known = alike(kept.left(beginning), ids)
        cells = kept.continue_from(known, len(ids) + room) if known else None
        if cells is None:
            known, cells = 0, self.model.begin([len(ids)], room=room)
        rows = [replace(row, continued=known)]
        return SequenceContext(self.model, rows, cells=cells, kept=kept, beginning=beginning)

    def _continued(self, prompt: Prompt, beginning: Beginning) -> SequenceContext | None:
        """A prompt that goes on from the last one; None if it begins otherwise."""
        kept = self._kept
        ids = kept.left(beginning) if kept is not None else ()
        if kept is None or not ids:
            return None
        whole = (*ids[: self._context_tokens(prompt)], *prompt.query)
        known = alike(ids, whole)
        row = self._continued_row(prompt, ids, known)
        if row is None:
            return None
        cells = kept.continue_from(known, len(whole) + prompt.request.max_new_tokens)
        if cells is None:
            return None
        return SequenceContext(self.model, [row], "copied", _WHY, cells, kept, beginning)

    def _build(self, prompts: Sequence[Prompt]) -> Context:
        # The cells keep what is in their first sequence.
        beginning = self._beginning(prompts[0]) if len(prompts) == 1 else None
        context = None if beginning is None else self._continued(prompts[0], beginning)
        if context is not None:
            return context
        filled = self._newly_filled(prompts)
        if filled.rows[0].loaded.misses and not self._stores_as_computed(prompts[0]):
            beginning = None  # what was computed now is rounded when it is brought
        return replace(filled, kept=self._kept, beginning=beginning)

    def _newly_filled(self, prompts: Sequence[Prompt]) -> SequenceContext:
        plans = [self._planned(prompt) for prompt in prompts]
        computed: Shared = {}
        for plan in plans:
            self._compute(plan, computed)
        while True:
            context = self._brought(plans, computed)
            if context is not None:
                return context

    def choose(self, prompt: Prompt) -> ContextRow:
        plan = self._planned(prompt)
        self._compute(plan, {})
        return plan.row

    # ------------------------------------------------------------------ what is chosen

    def _planned(self, prompt: Prompt) -> _Plan:
        policy, loader = prompt.policy, self.loader.for_chunks(prompt.chunks)
        prefix = loader.prefiller.prefix_ids
        sizes = [chunk.key.tokens for chunk in prompt.chunks]
        shape = StitchedPrompt.from_sizes(len(prefix), sizes, len(prompt.query))
        row = ContextRow(torch.empty(0), shape, LoadedContext(()), policy)
        if policy.is_reuse or not shape.context_tokens:
            return _Plan(prompt, row)
        known = [loader.known(chunk) for chunk in prompt.chunks]
        prompt = replace(prompt, chunks=tuple(known))
        scores = self._scoring(policy, prompt.request.question, known)
        ids = [*prefix, *(token for chunk in known for token in chunk.ids), *prompt.query]
        row = replace(
            row,
            ids=torch.tensor(ids),  # (tokens,) int64
            shape=StitchedPrompt.from_sizes(len(prefix), list(map(len, known)), len(prompt.query)),
        )
        started = time.perf_counter()
        nowhere = KVBuffer.allocate(self.model.measured.chunk_layout, 1, 0, self.model.device)
        signals = RowSignals(StitchedRow(self.model, nowhere, row.ids, row.shape), scores)
        selected = chosen_tokens(policy, row.shape, signals)  # (context_tokens,) bool
        row = replace(
            row,
            selected=selected if bool(selected.any()) else None,
            choosing=time.perf_counter() - started,
            scorer_misses=0 if scores is None else scores.misses,
            heard_query=signals.heard_query,
        )
        return _Plan(prompt, row)

    # ------------------------------------------------------------------ what is computed first

    def _compute(self, plan: _Plan, computed: Shared) -> None:
        """Compute and store what is in no tier of the store."""
        loader, started = self.loader.for_chunks(plan.prompt.chunks), time.perf_counter()
        loader.prefiller.prefix()
        store = loader.prefiller.store
        absent = [
            chunk
            for chunk in plan.prompt.chunks
            if chunk.key not in computed and store.locate(chunk.key) is None
        ]
        if absent:
            self._held(plan, loader, absent, computed)
        plan.seconds += time.perf_counter() - started

    def _held(
        self,
        plan: _Plan,
        loader: ContextLoader,
        chunks: Sequence[ContextChunk],
        computed: Shared,
    ) -> Shared:
        """Chunks by their keys, and where each came from; what is computed now is kept."""
        found: Shared = {}
        loaded = loader.hold(chunks, "reordered", found)
        keys = {chunk.place: chunk.key for chunk in chunks}
        for miss in loaded.missed:
            key = keys[miss.chunk]
            plan.missed[key], computed[key] = miss, found[key]
        return found

    # ------------------------------------------------------------------ what is brought

    def _brought(self, plans: Sequence[_Plan], computed: Shared) -> SequenceContext | None:
        """All contexts in cells; None if a chunk could not be read after all, and was computed."""
        request = plans[0].prompt.request
        cells = self.model.begin(
            [plan.row.shape.tokens for plan in plans],
            room=request.max_new_tokens,
            beams=beams(request.options),
        )
        rows: list[ContextRow] = []
        alike: dict[tuple[ContextChunk, ...], tuple[int, ContextRow]] = {}
        for plan, sequence in zip(plans, cells.sequences, strict=True):
            source = alike.get(plan.prompt.chunks)
            row: ContextRow | None
            if source is not None:
                row = self._copied(source, plan.prompt, sequence)
            else:
                row = self._row(plan, cells, sequence, computed)
            if row is None:
                return None
            rows.append(row)
            if row.can_be_copied:
                alike[plan.prompt.chunks] = sequence, row
        return SequenceContext(self.model, rows, "copied", _WHY, cells)

    def _row(
        self, plan: _Plan, cells: SequenceCache, sequence: int, computed: Shared
    ) -> ContextRow | None:
        """One context in its sequence."""
        loader, started = self.loader.for_chunks(plan.prompt.chunks), time.perf_counter()
        row, hits, ids = plan.row, Counter[str](), [*loader.prefiller.prefix_ids]
        prefix = loader.prefiller.prefix()
        if prefix is not None:
            self._bring(loader, Segment(prefix, 0, 0), sequence, None)
        load = recomputing = 0.0
        for chunk in plan.prompt.chunks:
            begun, place = time.perf_counter(), len(ids)
            found = computed
            if chunk.key not in found:
                found = self._held(plan, loader, [chunk], computed)
            if not cells.is_current:
                return None
            member, tier = found[chunk.key]
            load += time.perf_counter() - begun
            if chunk.key not in plan.missed:
                hits[tier] += 1
            ids += member.tokens.tolist()
            if len(ids) > row.shape.context_tokens:
                raise OtherLengthsError
            again = None if row.selected is None else row.selected[place : len(ids)]
            recomputing += self._bring(loader, Segment(member, place, place), sequence, again)
        seconds = time.perf_counter() - started
        prefilled = sum(key.tokens for key in plan.missed)
        loaded = LoadedContext(
            ids=tuple(ids),
            load=plan.seconds + load,
            stitch=seconds - load - recomputing,
            hits=dict(hits),
            reused_tokens=len(ids) - len(loader.prefiller.prefix_ids) - prefilled,
            prefilled_tokens=prefilled,
            missed=tuple(plan.missed.values()),
            begun=started - plan.seconds,
        )
        whole, shape = self._joined(plan.prompt, loaded)
        return replace(
            row,
            ids=whole,
            shape=shape,
            loaded=loaded,
            selected=None,  # the query is still to be computed
            recomputing=recomputing,
            recomputed_tokens=0 if row.selected is None else int(row.selected.sum()),
        )

    def _bring(
        self, loader: ContextLoader, segment: Segment, sequence: int, again: Tensor | None
    ) -> float:
        """Append a chunk to a sequence; seconds, if some of it is computed again."""
        begun, layout = time.perf_counter(), self.model.measured
        (move,) = key_rotations(layout, [segment], loader.prefiller.position, self.model.device)
        is_again = again is not None and bool(again.any())
        self.model.append_chunk(sequence, segment, move, again if is_again else None)
        return time.perf_counter() - begun if is_again else 0.0

    def _copied(self, source: tuple[int, ContextRow], prompt: Prompt, sequence: int) -> ContextRow:
        """The context of another row, in the same cells."""
        other, row = source
        self.model.llama.copy(other, sequence)
        ids, shape = self._joined(prompt, row.loaded)
        loaded = replace(row.loaded, load=0.0, stitch=0.0)
        return replace(row, ids=ids, shape=shape, loaded=loaded, recomputing=0.0, is_copy=True)
