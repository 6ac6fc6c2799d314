"""The contexts of a batch of prompts in one buffer, or read in place from the store."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.generation.context import Context, ContextBuilder, ContextRow
from kvcache_rag.generation.prompt_memory import ALIGNMENT, Continuation, FinishedRow
from kvcache_rag.models.attention.scaled import weighed_chunks
from kvcache_rag.models.cache import buffer_cache, keep_states, remember
from kvcache_rag.models.deferred.int8 import int8_refusal
from kvcache_rag.models.deferred.support import (
    deferral_refusal,
    deferred_rotation,
    segments_cache,
)
from kvcache_rag.models.generate import uses_beams
from kvcache_rag.policies.signals import RowSignals
from kvcache_rag.recompute import chosen_tokens, compute, recompute
from kvcache_rag.stitching.states import compose
from kvcache_rag.stitching.stitch import StitchedRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag.generation.context import Prompt
    from kvcache_rag.generation.prompt_memory import Beginning, PromptMemory
    from kvcache_rag.generation.request import Request
    from kvcache_rag.kv.buffer import KVBuffer
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.stitching.loader import Shared

_DEFERRED: Final = "deferred"  # the beginning of what is computed behind chunks that lie elsewhere

_TENSORS: Final = 64  # of a chunk at most


@dataclass(frozen=True, eq=False)
class BufferContext(Context):
    """A context that is copied to a buffer, or in front of one.

    Attributes:
        buffer: Memory for keys and values.
        memory: Where that is from.
        beginnings: What the next prompt may begin with, per row; None if it may not.
    """

    buffer: KVBuffer | None = None
    memory: PromptMemory | None = None
    beginnings: Sequence[Beginning | None] = ()

    def leave(self, answers: Sequence[Sequence[int]], cache: Any, *, is_cut: bool) -> None:
        if self.memory is None or self.buffer is None or not any(self.beginnings):
            return
        ids = [
            (*row.ids.tolist(), *answer[:-1])  # the last token is not computed any more
            for row, answer in zip(self.rows, answers, strict=True)
        ]
        if self.model.abilities.continues == "at its end":  # one row
            held = cache.get_seq_length()
            if is_cut or held > len(ids[0]):  # states of half a pass, or behind what was not said
                return
            ids = [ids[0][:held]]
            keep_states(cache, self.buffer)
        # In front of what the buffer holds are chunks that lie elsewhere.
        first = self.rows[0].shape.context_tokens if self.rotation == "deferred" else 0
        width = max(row.shape.tokens for row in self.rows)
        self.memory.leave(
            self.buffer,
            [
                # Without a token of an answer, its prompt may have been cancelled half computed.
                FinishedRow(beginning if answer else None, known[first:], width - row.shape.tokens)
                for beginning, answer, known, row in zip(
                    self.beginnings, answers, ids, self.rows, strict=True
                )
            ],
        )

    def cache(self, missing: Sequence[int]) -> Any:
        if self.buffer is None:
            return None
        layout, longest = self.model.measured, max(missing)
        width = max(row.shape.tokens for row in self.rows)
        # The input's columns of rows with fewer missing tokens begin inside what they hold.
        keep = [longest - count for count in missing]
        if self.rotation != "deferred":
            held = torch.tensor(keep, device=self.model.device) if any(keep) else None
            return buffer_cache(self.buffer, layout.kinds, width - longest, held)
        rows = [
            [
                replace(segment, column=width - row.shape.tokens + segment.column)
                for segment in row.loaded.segments
            ]
            for row in self.rows
        ]
        known = self.rows[0].continued
        cache = segments_cache(layout, rows, width - longest - known, keep, self.buffer, known)
        if known:
            remember(cache, self.buffer.layer_states())
            return cache
        for number, row in enumerate(rows):
            if row:
                states = self.buffer.single(number, 0).states
                compose(layout.states, [segment.chunk for segment in row], states)
                remember(cache, self.buffer.layer_states())
        return cache

    def attended(self) -> AbstractContextManager[object]:
        if self.rotation == "deferred":
            return deferred_rotation(self.model)
        scaling = self.rows[0].policy.scaling if self.buffer is not None else None
        if scaling is None or not any(row.shape.chunks for row in self.rows):
            return nullcontext()
        columns = self._chunk_columns()
        return weighed_chunks(self.model, scaling.temperature, scaling.scale, columns)

    def _chunk_columns(self) -> list[tuple[int, int]]:
        """Per row the columns of the left-padded batch that hold chunks, half-open."""
        shapes = [row.shape for row in self.rows]
        width = max(shape.tokens for shape in shapes)
        paddings = [width - shape.tokens for shape in shapes]
        return [
            (padding + shape.spans[0].stop, padding + shape.context_tokens)
            for padding, shape in zip(paddings, shapes, strict=True)
        ]


class BufferContextBuilder(ContextBuilder):
    """Brings contexts into a buffer; with `rotation="deferred"` it tries the model out at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.rotation == "deferred":
            deferral_refusal(self.model)

    def _build(self, prompts: Sequence[Prompt]) -> Context:
        why = self._why_copied(prompts)
        if not why:
            try:
                return self._deferred(prompts)
            except CorruptChunkError as error:  # values that the codec cannot store
                if not self._reads_codes(prompts):
                    raise
                why = str(error)
        return self._copied(prompts, why)

    def computed(self, rows: Sequence[ContextRow], request: Request, documents: int = 0) -> Context:
        limit = self.model.measured.limit
        width = max(len(row.ids) for row in rows)
        tokens = width + request.max_new_tokens
        # Beyond its limit a model may compute the same beginning of a longer prompt otherwise; and
        # without attention, it answers greedily alone from a cache of ours.
        keeps = self.model.abilities.batch and self.memory.limit != 0
        if (
            (len(rows) > 1 and not keeps)
            or uses_beams(request.options)
            or (limit and tokens > limit)
            or not self.model.measured.groups
        ):
            return super().computed(rows, request, documents)
        beginning = self._computed_beginning(documents)
        begun = [self._continuation(beginning, row.ids.tolist()) for row in rows]
        buffer = self.memory.continue_from(begun, [width - len(row.ids) for row in rows], tokens)
        rows = [
            replace(row, continued=one.tokens if one else 0)
            for row, one in zip(rows, begun, strict=True)
        ]
        beginnings = [beginning] * len(rows)
        return BufferContext(
            self.model, rows, buffer=buffer, memory=self.memory, beginnings=beginnings
        )

    # ------------------------------------------------------------------ copied or deferred?

    def _why_copied(self, prompts: Sequence[Prompt]) -> str:
        """Why the chunks of a batch have to be copied, or ""."""
        if self.rotation == "copied":
            return 'the engine was made with rotation="copied"'
        request = prompts[0].request
        if len(prompts) > 1 and not self.model.abilities.batch:
            return "queries of a batch run through recurrent layers one by one"
        if request.policy.scaling is not None:
            return f"{request.policy!r} weighs chunks against the rest"
        if not all(prompt.policy.is_reuse for prompt in prompts):
            return f"{request.policy!r} computes tokens again"
        if uses_beams(request.options):
            return "beam search repeats and reorders rows"
        if self._reads_codes(prompts):
            return self._why_decoded(prompts)
        codecs = [self.loader.for_chunks(prompt.chunks).prefiller.store.codec for prompt in prompts]
        if any(codec.raw_keys for codec in codecs):
            return (
                f"codec {codecs[0].name} keeps every key at position 0, and one angle turns one "
                "distance"
            )
        if self.rotation == "auto":
            return 'rotation="auto" copies what is not in 8 bits'
        return deferral_refusal(self.model)

    def _reads_codes(self, prompts: Sequence[Prompt]) -> bool:
        """Whether the chunks of a batch lie in a form that attention may read as it is."""
        prefillers = [self.loader.for_chunks(prompt.chunks).prefiller for prompt in prompts]
        return all(one.position == "raw" and one.store.codec.is_attended for one in prefillers)

    def _why_decoded(self, prompts: Sequence[Prompt]) -> str:
        """Why chunks that attention may read as they are, are decoded all the same, or ""."""
        stores = [self.loader.for_chunks(prompt.chunks).prefiller.store for prompt in prompts]
        if not all(store.gives_encoded for store in stores):
            return (
                f"a tier of the store keeps chunks decoded; give it codec={stores[0].codec!r}, too"
            )
        if not all(prompt.chunks for prompt in prompts):
            return "there is nothing to be decoded"
        return int8_refusal(self.model) or deferral_refusal(self.model)

    # ------------------------------------------------------------------ where they lie

    def _deferred(self, prompts: Sequence[Prompt]) -> Context:
        shared: Shared = {}
        codes = None
        if self._reads_codes(prompts):
            codes = self.memory.codes(self._stored_bytes(prompts))
        rows = []
        for prompt in prompts:
            policy, loader = prompt.policy, self.loader.for_chunks(prompt.chunks)
            scheme, adjacent = policy.positions, policy.adjacent_query
            loaded = loader.hold(prompt.chunks, scheme, shared, adjacent=adjacent, codes=codes)
            rows.append(ContextRow(*self._joined(prompt, loaded), loaded, policy))
        # Memory for queries and answers alone.
        capacity = max(row.missing for row in rows) + prompts[0].request.max_new_tokens
        beginning = self._beginning(prompts[0]) if len(prompts) == 1 else None
        if beginning is None:
            room = self.memory.room(len(rows), capacity)
            return BufferContext(self.model, rows, "deferred", buffer=room)
        behind: Beginning | None = (_DEFERRED, beginning)
        begun = self._continuation(behind, prompts[0].query)
        buffer = self.memory.continue_from([begun], [0], capacity)
        if rows[0].loaded.misses and not self._stores_as_computed(prompts[0]):
            behind = None  # what was computed now is rounded when it is loaded
        rows = [replace(rows[0], continued=begun.tokens if begun else 0)]
        return BufferContext(
            self.model, rows, "deferred", buffer=buffer, memory=self.memory, beginnings=[behind]
        )

    def _continuation(self, beginning: Beginning, ids: Sequence[int]) -> Continuation | None:
        """Where a prompt goes on from; None if it begins anew."""
        left = [Continuation(one, one.alike(ids)) for one in self.memory.left(beginning)]
        best = max(left, key=attrgetter("tokens"), default=None)
        return best if best and best.tokens else None

    def _stored_bytes(self, prompts: Sequence[Prompt]) -> int:
        """Bytes of all distinct chunks of a batch in the form of their store's codec."""
        layout = self.loader.prefiller.layout
        chunks = {chunk.key: prompt for prompt in prompts for chunk in prompt.chunks}
        return sum(
            self.loader.for_chunks(prompt.chunks).prefiller.store.codec.nbytes(layout, key.tokens)
            + _TENSORS * ALIGNMENT
            for key, prompt in chunks.items()
        )

    # ------------------------------------------------------------------ copied

    def _copied(self, prompts: Sequence[Prompt], why: str) -> Context:
        request, sizes = prompts[0].request, list(map(self._tokens, prompts))
        width = max(sizes)
        columns = [width - size for size in sizes]  # behind the row's left padding
        # Of a batch whose rows run through states one by one, no state is that of a prompt's end.
        is_left = len(prompts) == 1 or self.model.abilities.batch
        beginnings = [self._beginning(prompt) if is_left else None for prompt in prompts]
        begun = list(map(self._continued, prompts, beginnings))
        buffer = self.memory.continue_from(
            [one and one[1] for one in begun], columns, width + request.max_new_tokens
        )
        rows: list[ContextRow] = []
        known: dict[tuple[ContextChunk, ...], ContextRow] = {}
        for number, (prompt, column, one) in enumerate(zip(prompts, columns, begun, strict=True)):
            place, source = buffer.single(number, column), known.get(prompt.chunks)
            if one is not None:
                row = one[0]
                row = replace(row, stitched=StitchedRow(self.model, place, row.ids, row.shape))
            elif source is not None:
                row = self._copy(source, place, prompt)
            else:
                row = self._recomputed(self._chosen(prompt, place))
            rows.append(row)
            if row.can_be_copied:
                known.setdefault(prompt.chunks, row)
        if not is_left:
            rows = [self._advanced(row) if row.missing > 1 else row for row in rows]
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            if row.loaded.misses and not self._stores_as_computed(prompt):
                beginnings[number] = None  # what was computed now is rounded when it is loaded
        return BufferContext(self.model, rows, "copied", why, buffer, self.memory, beginnings)

    def _continued(
        self, prompt: Prompt, beginning: Beginning | None
    ) -> tuple[ContextRow, Continuation] | None:
        """A prompt that goes on from one of the last ones; None if it begins otherwise."""
        left = [] if beginning is None else self.memory.left(beginning)
        if not left:
            return None
        context = self._context_tokens(prompt)
        ids = (*left[0].ids[:context], *prompt.query)  # the contexts of all are the same
        begun = self._continuation(beginning, ids)
        row = begun and self._continued_row(prompt, begun.kept.ids, begun.tokens)
        return (row, begun) if row and begun else None

    def choose(self, prompt: Prompt) -> ContextRow:
        room = self._tokens(prompt) + prompt.request.max_new_tokens
        return self._chosen(prompt, self.memory.room(1, room))

    def _tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt that have a place in its buffer."""
        return self._context_tokens(prompt) + len(prompt.query)

    def _stitched(self, prompt: Prompt, place: KVBuffer) -> ContextRow:
        """Load and stitch a context into a buffer of one row."""
        policy, loader = prompt.policy, self.loader.for_chunks(prompt.chunks)
        scheme, adjacent = policy.positions, policy.adjacent_query
        loaded = loader.load(place, prompt.chunks, scheme, adjacent=adjacent)
        ids, shape = self._joined(prompt, loaded)
        stitched = StitchedRow(self.model, place, ids, shape, loaded.segments)
        return ContextRow(ids, shape, loaded, policy, stitched)

    def _chosen(self, prompt: Prompt, place: KVBuffer) -> ContextRow:
        """A stitched context, and which of its tokens are to be computed again."""
        policy = prompt.policy
        # In a thread beside the loading.
        scores = self._scoring(policy, prompt.request.question, prompt.chunks)
        row = self._stitched(prompt, place)
        if policy.is_reuse or row.stitched is None or not row.shape.context_tokens:
            return row
        started = time.perf_counter()
        signals = RowSignals(row.stitched, scores, prompt.request.answer_tokens)
        selected = chosen_tokens(policy, row.shape, signals)  # (context_tokens,) bool
        return replace(
            row,
            selected=selected if bool(selected.any()) else None,
            choosing=time.perf_counter() - started,
            scorer_misses=0 if scores is None else scores.misses,
            heard_query=signals.heard_query,
        )

    def _recomputed(self, row: ContextRow) -> ContextRow:
        """Compute what was chosen and the query but its last token; nothing if none was chosen."""
        if row.selected is None or row.stitched is None:
            return row
        started = time.perf_counter()
        recompute(row.stitched, row.selected)
        self.model.wait()
        seconds = time.perf_counter() - started
        return replace(row, recomputing=seconds, recomputed_tokens=int(row.selected.sum()))

    def _advanced(self, row: ContextRow) -> ContextRow:
        """Compute the query but its last token; a batch's padding must not run through a state."""
        if row.stitched is None:
            return row
        started = time.perf_counter()
        compute(row.stitched, row.shape.context_tokens, row.shape.tokens - 1)
        self.model.wait()
        return replace(row, recomputing=time.perf_counter() - started, is_advanced=True)

    def _copy(self, source: ContextRow, place: KVBuffer, prompt: Prompt) -> ContextRow:
        """Fill a row with what another one holds whose chunks are the same.

        Context never sees a query, so it is the same whatever is asked, unless the query said what
        is computed again (`ContextRow.can_be_copied`).
        """
        if source.stitched is not None:
            place.copy_first(source.stitched.buffer, source.shape.context_tokens)
        ids, shape = self._joined(prompt, source.loaded)
        return replace(
            source,
            ids=ids,
            shape=shape,
            loaded=replace(source.loaded, load=0.0, stitch=0.0),
            stitched=StitchedRow(self.model, place, ids, shape),
            choosing=0.0,
            recomputing=0.0,
            is_copy=True,
            continued=0,  # what the other one went on from is behind its context
        )
