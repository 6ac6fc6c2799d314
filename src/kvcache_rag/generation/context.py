"""The contexts of a batch of prompts: copied into one buffer, attended to in place, or computed.

What a policy asks for is done here: load, stitch, choose tokens, compute them again.  Who runs the
model sees a `Context` and never asks where it lies.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.models.attention.scaled import weighed_chunks
from kvcache_rag.models.cache import buffer_cache, remember
from kvcache_rag.models.deferred.int8 import int8_refusal
from kvcache_rag.models.deferred.support import (
    deferral_refusal,
    deferred_rotation,
    segments_cache,
)
from kvcache_rag.models.generate import uses_beams
from kvcache_rag.policies import Reuse
from kvcache_rag.policies.signals import ChunkScores, RowSignals
from kvcache_rag.prompt.offsets import chunk_text
from kvcache_rag.recompute import chosen_tokens, compute, recompute
from kvcache_rag.stitching.states import compose
from kvcache_rag.stitching.stitch import StitchedPrompt, StitchedRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvcache_rag.codecs import Room
    from kvcache_rag.generation.request import Request
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.stitching.loader import ContextLoader, LoadedContext, Shared

# Room for generated tokens is rounded up, so that a buffer can serve the next question too.
CAPACITY_STEP = 256
CODES_STEP = 4 << 20  # the same, in bytes of chunks in the form of a codec
_ALIGNMENT, _TENSORS = 64, 64  # bytes between tensors; tensors of a chunk at most

RotationMode = Literal["auto", "copied", "deferred"]
"""`copied`: keys are copied and rotated; `deferred`: chunks stay where they lie, and the query is
rotated instead; `auto`: `deferred` for chunks that attention reads in 8 bits, else `copied`."""

Rotation = Literal["", "copied", "deferred"]
"""What became of a context; "" for none, as of a full prefill."""


@dataclass(frozen=True)
class Prompt:
    """Chunks and query of one prompt, and how to answer it.

    Attributes:
        chunks: Those whose keys and values are brought, in prompt order.
        query: Ids of what is computed behind them: chunks that the policy wants computed there,
            then history and question.
        request: What the caller asked for.
        fresh: The chunks at the beginning of the query.
    """

    chunks: tuple[ContextChunk, ...]
    query: tuple[int, ...]
    request: Request
    fresh: tuple[ContextChunk, ...] = ()

    @property
    def fresh_tokens(self) -> int:
        """Tokens of the chunks in the query."""
        return sum(map(len, self.fresh))

    @property
    def policy(self) -> ReusePolicy:
        """What becomes of the chunks that are brought."""
        asked = self.request.policy
        return Reuse(asked.positions) if asked.computes_chunks else asked


@dataclass(frozen=True, eq=False)
class ContextRow:
    """One prompt of a batch, and what bringing its context cost.

    Attributes:
        ids: `(tokens,)` int64 of the whole prompt, on the CPU.
        shape: The prompt's spans; in a full prefill all of it is the query.
        loaded: What finding the chunks gave and cost, and where they lie if they stay there.
        policy: What selected for this prompt.
        stitched: Where its context was copied to; None where it was not.
        selected: `(context_tokens,)` bool, tokens to be computed again; None for none.
        choosing: Seconds for choosing them.
        recomputing: Seconds for computing them again, 0 before that.
        recomputed_tokens: How many were; 0 before that.
        scorer_misses: Chunks that a scorer had to prefill first.
        heard_query: Whether the choice was made by what the query asks (`RowSignals.heard_query`).
        is_copy: Whether all that was done for another row of the batch.
        is_advanced: Whether the query but its last token was computed by itself.
    """

    ids: Tensor
    shape: StitchedPrompt
    loaded: LoadedContext
    policy: ReusePolicy
    stitched: StitchedRow | None = None
    selected: Tensor | None = None
    choosing: float = 0.0
    recomputing: float = 0.0
    recomputed_tokens: int = 0
    scorer_misses: int = 0
    heard_query: bool = False
    is_copy: bool = False
    is_advanced: bool = False

    @property
    def missing(self) -> int:
        """Last tokens of the prompt that generating has to compute.

        The query; its last token, once tokens were computed again and the query with them.
        """
        in_order = self.stitched is not None and self.stitched.model.recurrent is not None
        is_computed = self.selected is not None and not self.is_copy and not in_order
        is_query = not self.is_advanced and not is_computed
        return self.shape.tokens - self.shape.context_tokens if is_query else 1

    @property
    def steps(self) -> dict[str, float]:
        """Seconds of what was done for it from `loaded.begun` on, one behind the other."""
        return {
            "load": self.loaded.load,
            "stitch": self.loaded.stitch,
            "choose": self.choosing,
            "recompute": self.recomputing,
        }

    @property
    def costs(self) -> dict[str, Any]:
        """What it adds to `Metrics`."""
        loaded = self.loaded
        return {
            **self.steps,
            "reused_tokens": loaded.reused_tokens,
            "prefilled_tokens": loaded.prefilled_tokens,
            "hits": loaded.hits,
            "misses": loaded.misses,
            "missed": loaded.missed,
            "recomputed_tokens": self.recomputed_tokens,
            "auxiliary_misses": self.scorer_misses,
            "policy": repr(self.policy),
        }

    @property
    def can_be_copied(self) -> bool:
        """Whether a row with the same chunks would hold the same, at the same cost."""
        return not (self.heard_query or self.policy.needs_scorer or self.loaded.misses)


@dataclass(frozen=True, eq=False)
class Context:
    """What stands before the queries of one batch of prompts.

    A row's context ends where its query begins, so index = position + padding everywhere and
    windows stay right.

    Attributes:
        model: The model.
        rows: One per prompt.
        rotation: Where the contexts lie: `copied` side by side in the buffer, left-padded;
            `deferred` where the store keeps them (LazyAttention, arXiv 2606.04302: one copy of a
            chunk serves any prompt at any position), and the buffer is for what follows; "" for
            none, as prompts are computed as they are.
        buffer: Memory for keys and values; None for no context.
        not_deferred: Why keys were copied instead of attended to where they lie.
    """

    model: LanguageModel
    rows: Sequence[ContextRow]
    rotation: Rotation = ""
    buffer: KVBuffer | None = None
    not_deferred: str = ""

    def cache(self, missing: Sequence[int]) -> Any:
        """A transformers cache of one left-padded batch; None where everything is computed.

        Args:
            missing: Last tokens of each prompt that the forward pass will compute.
        """
        if self.buffer is None:
            return None
        layout, longest = self.model.measured, max(missing)
        width = max(row.shape.tokens for row in self.rows)
        # The input's columns of rows with fewer missing tokens begin inside what they hold.
        keep = [longest - count for count in missing]
        if self.rotation == "copied":
            held = torch.tensor(keep, device=self.model.device) if any(keep) else None
            return buffer_cache(self.buffer, layout.kinds, width - longest, held)
        rows = [
            [
                replace(segment, column=width - row.shape.tokens + segment.column)
                for segment in row.loaded.segments
            ]
            for row in self.rows
        ]
        cache = segments_cache(layout, rows, width - longest, keep, self.buffer)
        for number, row in enumerate(rows):
            if row:
                states = self.buffer.single(number, 0).states
                compose(layout.states, [segment.chunk for segment in row], states)
                remember(cache, self.buffer.layer_states())
        return cache

    def attended(self) -> AbstractContextManager[object]:
        """What forward passes run in, with the attention that they need in force.

        Raises:
            UnsupportedModelError: On entering, if the policy weighs chunks and the model cannot.
        """
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

    def costs(self, row: int) -> dict[str, Any]:
        """What the context of one prompt adds to its `Metrics`."""
        return {
            **self.rows[row].costs,
            "rotation": self.rotation,
            "not_deferred": self.not_deferred,
        }


class PromptBuffer:
    """Memory for prompts: that of the last ones serves the next, if it is large enough.

    Attributes:
        kept: What is there, or None.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.kept: KVBuffer | None = None
        self._codes: Tensor | None = None  # (nbytes,) uint8

    def room(self, rows: int, capacity: int) -> KVBuffer:
        """A buffer of at least `capacity` tokens per row, with anything in it."""
        kept = self.kept
        if kept is None or kept.rows < rows or kept.capacity < capacity:
            self.kept = None  # release the old one before the new one is made
            rounded = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
            layout = self._model.measured.chunk_layout
            kept = self.kept = KVBuffer.allocate(layout, rows, rounded, self._model.device)
        return kept.narrowed(rows)

    def codes(self, nbytes: int) -> Room:
        """Memory for chunks in the form of a codec, `nbytes` for all of them, with anything in it.

        Fresh memory costs more page faults than reading a file into it.
        """
        if self._codes is None or len(self._codes) < nbytes:
            self._codes = None
            with torch.inference_mode(mode=False):
                self._codes = torch.empty(-(-nbytes // CODES_STEP) * CODES_STEP, dtype=torch.uint8)
        memory, used = self._codes, 0

        def room(count: int) -> Tensor:
            nonlocal used
            begin, used = used, used + -(-count // _ALIGNMENT) * _ALIGNMENT
            if used > len(memory):
                return torch.empty(count, dtype=torch.uint8)
            return memory[begin : begin + count]

        return room

    def forget(self) -> None:
        self.kept = self._codes = None
        self._model.forget()


def checked_mode(mode: RotationMode) -> RotationMode:
    """The mode; raises `InvalidInputError` if it is none."""
    if mode not in ("auto", "copied", "deferred"):
        raise InvalidInputError(f'rotation must be "auto", "copied" or "deferred", not {mode!r}')
    return mode


class ContextFiller:
    """Brings the contexts of prompts for one engine.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        loader: Loads and stitches.
        buffer: Memory for prompts.
        auxiliary: Scores chunks for policies that bring no scorer of their own.
        rotation: What the caller wants.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Any,
        loader: ContextLoader,
        buffer: PromptBuffer,
        auxiliary: Scorer | None,
        rotation: RotationMode,
    ) -> None:
        """Fill `buffer`; with `rotation="deferred"` the model is tried out now, not by a question.

        Raises:
            InvalidInputError: If `rotation` is none of the three.
        """
        self.model, self.tokenizer, self.loader = model, tokenizer, loader
        self.buffer, self.auxiliary = buffer, auxiliary
        self.rotation = checked_mode(rotation)
        if rotation == "deferred":
            deferral_refusal(model)

    def ensure_possible(self, prompt: Prompt) -> None:
        """Raise `UnsupportedModelError` if chunks cannot be used as a prompt's policy wants."""

    def fill(self, prompts: Sequence[Prompt]) -> Context:
        """Bring the contexts of a batch, of one or more prompts whose requests are alike.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
            UnsupportedModelError: If chunks would have to move and the model's keys cannot.
            InvalidInputError: If the policy needs a scorer and there is none, or selects nonsense.
        """
        try:
            return self._fill(prompts)
        except ChunkNotFoundError:
            # A reference has gone, or was not what it said: its text is what counts.
            return self._fill(
                [
                    replace(prompt, chunks=tuple(map(self.loader.from_text, prompt.chunks)))
                    for prompt in prompts
                ]
            )

    def _fill(self, prompts: Sequence[Prompt]) -> Context:
        why = self._why_copied(prompts)
        if not why:
            try:
                return self._deferred(prompts)
            except CorruptChunkError as error:  # values that the codec cannot store
                if not self._reads_codes(prompts):
                    raise
                why = str(error)
        return self._copied(prompts, why)

    # ------------------------------------------------------------------ copied or deferred?

    def _why_copied(self, prompts: Sequence[Prompt]) -> str:
        """Why the chunks of a batch have to be copied, or ""."""
        if self.rotation == "copied":
            return 'the engine was made with rotation="copied"'
        request = prompts[0].request
        if len(prompts) > 1 and self.model.recurrent is not None:
            return "queries of a batch run through recurrent layers one by one"
        if request.policy.scaling is not None:
            return f"{request.policy!r} weighs chunks against the rest"
        if not all(prompt.policy.is_reuse for prompt in prompts):
            return f"{request.policy!r} computes tokens again"
        if uses_beams(request.options):
            return "beam search repeats and reorders rows"
        if self._reads_codes(prompts):
            return self._why_decoded(prompts)
        codecs = [self.loader.of(prompt.chunks).prefiller.store.codec for prompt in prompts]
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
        prefillers = [self.loader.of(prompt.chunks).prefiller for prompt in prompts]
        return all(one.position == "raw" and one.store.codec.is_attended for one in prefillers)

    def _why_decoded(self, prompts: Sequence[Prompt]) -> str:
        """Why chunks that attention may read as they are, are decoded all the same, or ""."""
        stores = [self.loader.of(prompt.chunks).prefiller.store for prompt in prompts]
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
            codes = self.buffer.codes(self._stored_bytes(prompts))
        rows = []
        for prompt in prompts:
            policy, loader = prompt.policy, self.loader.of(prompt.chunks)
            scheme, adjacent = policy.positions, policy.adjacent_query
            loaded = loader.hold(prompt.chunks, scheme, shared, adjacent=adjacent, codes=codes)
            rows.append(ContextRow(*self._joined(prompt, loaded), loaded, policy))
        # Memory for queries and answers alone.
        capacity = max(row.missing for row in rows) + prompts[0].request.max_new_tokens
        return Context(self.model, rows, "deferred", self.buffer.room(len(rows), capacity))

    def _stored_bytes(self, prompts: Sequence[Prompt]) -> int:
        """Bytes of all distinct chunks of a batch in the form of their store's codec."""
        layout = self.loader.prefiller.layout
        chunks = {chunk.key: prompt for prompt in prompts for chunk in prompt.chunks}
        return sum(
            self.loader.of(prompt.chunks).prefiller.store.codec.nbytes(layout, key.tokens)
            + _TENSORS * _ALIGNMENT
            for key, prompt in chunks.items()
        )

    # ------------------------------------------------------------------ copied

    def _copied(self, prompts: Sequence[Prompt], why: str) -> Context:
        request, sizes = prompts[0].request, list(map(self._tokens, prompts))
        width = max(sizes)
        buffer = self.buffer.room(len(prompts), width + request.max_new_tokens)
        rows: list[ContextRow] = []
        known: dict[tuple[ContextChunk, ...], ContextRow] = {}
        for number, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
            place = buffer.single(number, width - size)  # behind the row's left padding
            source = known.get(prompt.chunks)
            if source is not None:
                rows.append(self._copy(source, place, prompt))
                continue
            row = self._recomputed(self._chosen(prompt, place))
            rows.append(row)
            if row.can_be_copied:
                known[prompt.chunks] = row
        if len(rows) > 1 and self.model.recurrent is not None:
            rows = [self._advanced(row) if row.missing > 1 else row for row in rows]
        return Context(self.model, rows, "copied", buffer, why)

    def choose(self, prompt: Prompt) -> ContextRow:
        """Load and stitch the context of a prompt and choose tokens; none is computed again."""
        room = self._tokens(prompt) + prompt.request.max_new_tokens
        return self._chosen(prompt, self.buffer.room(1, room))

    def _tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt that have a place in its buffer."""
        prefiller = self.loader.prefiller
        chunks = sum(chunk.key.tokens for chunk in prompt.chunks)
        return len(prefiller.prefix_ids) + chunks + len(prompt.query)

    def _chosen(self, prompt: Prompt, place: KVBuffer) -> ContextRow:
        """Load and stitch a context into a buffer of one row, and choose tokens."""
        policy, loader = prompt.policy, self.loader.of(prompt.chunks)
        if policy.chooses_tokens and not policy.is_reuse and self.model.recurrent is not None:
            self.model.ensure_recomputable()
        scores = self._scoring(policy, prompt.request.question, prompt.chunks)
        scheme, adjacent = policy.positions, policy.adjacent_query
        loaded = loader.load(place, prompt.chunks, scheme, adjacent=adjacent)
        ids, shape = self._joined(prompt, loaded)
        stitched = StitchedRow(self.model, place, ids, shape, loaded.segments)
        row = ContextRow(ids, shape, loaded, policy, stitched)
        if policy.is_reuse or not shape.context_tokens:
            return row
        started = time.perf_counter()
        signals = RowSignals(stitched, scores, prompt.request.answer_tokens)
        selected = chosen_tokens(policy, shape, signals)  # (context_tokens,) bool
        return replace(
            row,
            selected=selected if bool(selected.any()) else None,
            choosing=time.perf_counter() - started,
            scorer_misses=0 if scores is None else scores.misses,
            heard_query=signals.heard_query,
        )

    def _joined(self, prompt: Prompt, loaded: LoadedContext) -> tuple[Tensor, StitchedPrompt]:
        chunks = [chunk.key.tokens for chunk in prompt.chunks]
        shape = StitchedPrompt.of(len(loaded.ids) - sum(chunks), chunks, len(prompt.query))
        return torch.tensor([*loaded.ids, *prompt.query]), shape  # (tokens,) int64

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
