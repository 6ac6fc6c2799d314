"""The contexts of a batch of prompts: copied into one buffer, attended to in place, or computed.

What a policy asks for is done here: load, stitch, choose tokens, compute them again.  Who runs the
model sees a `Context` and never asks which it is.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, InvalidInputError
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.models.attention.scaled import weighed_chunks
from kvcache_rag.models.cache import buffer_cache
from kvcache_rag.models.deferred.cache import HeldSegments, deferred_cache
from kvcache_rag.models.deferred.int8 import Int8Segments, PlacedChunk, int8_refusal
from kvcache_rag.models.deferred.segments import SegmentTable
from kvcache_rag.models.deferred.support import deferral_refusal, deferred_rotation, segment_seconds
from kvcache_rag.models.generate import uses_beams
from kvcache_rag.policies import Reuse
from kvcache_rag.policies.signals import ChunkScores, RowSignals
from kvcache_rag.prompt.offsets import chunk_text
from kvcache_rag.recompute import chosen_tokens, recompute
from kvcache_rag.stitching.costs import Timings
from kvcache_rag.stitching.overlap import used
from kvcache_rag.stitching.stitch import StitchedPrompt, StitchedRow, first_positions
from kvcache_rag.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvcache_rag.codecs import EncodedChunk, Room
    from kvcache_rag.generation.request import Request
    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.metrics import Metrics
    from kvcache_rag.models.cache import Loading
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.stitching.loader import (
        ContextLoader,
        LoadedContext,
        SharedChunks,
        SharedEncoded,
    )
    from kvcache_rag.stores import ChunkStore

# Room for generated tokens is rounded up, so that a buffer can serve the next question too.
CAPACITY_STEP = 256
CODES_STEP = 4 << 20  # the same, in bytes of chunks in the form of a codec
_ALIGNMENT, _TENSORS = 64, 64  # bytes between tensors; tensors of a chunk at most

RotationMode = Literal["auto", "copied", "deferred"]
"""`copied`: keys are copied and rotated; `deferred`: the query is rotated instead; `auto`: what is
sooner by what was measured, copying until something was."""

# Answers whose copying is looked back at, and how large a context must be to be worth a thought:
# below, copying takes a few milliseconds, and what was measured is mostly other work.
COPIES = 7

SMALLEST = 32 << 20

# What a loaded context adds to `Metrics` by the same names.
_COSTS = (
    *("stitch", "reused_tokens", "prefilled_tokens"),
    *("hits", "misses", "missed", "declined"),
)


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
        loaded: What finding the chunks gave and cost.
        policy: What selected for this prompt.
    """

    ids: Tensor
    shape: StitchedPrompt
    loaded: LoadedContext
    policy: ReusePolicy

    @property
    def missing(self) -> int:
        """Last tokens of the prompt that generating has to compute: the query."""
        return self.shape.tokens - self.shape.context_tokens

    @property
    def steps(self) -> dict[str, float]:
        """Seconds of what was done for it from `loaded.begun` on, one behind the other."""
        return {"load": self.loaded.load, "stitch": self.loaded.stitch}

    @property
    def costs(self) -> dict[str, Any]:
        """What it adds to `Metrics`."""
        loaded = self.loaded
        waited = 0.0 if loaded.ahead is None else loaded.ahead.waited
        costs = {name: getattr(loaded, name) for name in _COSTS}
        return {**costs, "load": loaded.load + waited, "policy": repr(self.policy)}


@dataclass(frozen=True, eq=False)
class CopiedRow(ContextRow):
    """A prompt whose context lies in a buffer.

    Attributes:
        stitched: Where it lies.
        selected: `(context_tokens,)` bool, tokens to be computed again; None for none.
        choosing: Seconds for choosing them.
        recomputing: Seconds for computing them again, 0 before that.
        recomputed_tokens: How many were; 0 before that.
        scorer_misses: Chunks that a scorer had to prefill first.
        heard_query: Whether the choice was made by what the query asks (`RowSignals.heard_query`).
        is_copy: Whether all that was done for another row of the batch.
    """

    stitched: StitchedRow
    selected: Tensor | None = None
    choosing: float = 0.0
    recomputing: float = 0.0
    recomputed_tokens: int = 0
    scorer_misses: int = 0
    heard_query: bool = False
    is_copy: bool = False

    @property
    def missing(self) -> int:
        """The query; its last token, once tokens were computed again and the query with them."""
        is_query = self.selected is None or self.is_copy
        return self.shape.tokens - self.shape.context_tokens if is_query else 1

    @property
    def steps(self) -> dict[str, float]:
        """With choosing tokens and computing them again."""
        return {**super().steps, "choose": self.choosing, "recompute": self.recomputing}

    @property
    def costs(self) -> dict[str, Any]:
        """What it adds to `Metrics`."""
        return {
            **super().costs,
            "choose": self.choosing,
            "recompute": self.recomputing,
            "recomputed_tokens": self.recomputed_tokens,
            "auxiliary_misses": self.scorer_misses,
        }

    @property
    def can_be_copied(self) -> bool:
        """Whether a row with the same chunks would hold the same, at the same cost."""
        loaded = self.loaded
        return not (
            self.heard_query or self.policy.needs_scorer or loaded.misses or loaded.declined
        )


@dataclass(frozen=True, eq=False)
class InPlaceRow(ContextRow):
    """A prompt whose context lies in chunks of the store.

    Attributes:
        parts: Prefix (if any) and chunks, and how far the keys of each have to move.
    """

    parts: tuple[tuple[ChunkKV, int], ...]


@dataclass(frozen=True, eq=False)
class EncodedRow(ContextRow):
    """A prompt whose context lies in chunks in the form of the store's codec.

    Attributes:
        parts: Prefix (if any) and chunks, and the position of the first token of each.
    """

    parts: tuple[tuple[EncodedChunk, int], ...]


class Context(Protocol):
    """What stands before the queries of one batch of prompts, there or on its way."""

    @property
    def rows(self) -> Sequence[ContextRow]:
        """One per prompt."""

    def cache(self, missing: Sequence[int]) -> Any:
        """A transformers cache of one left-padded batch; None where everything is computed.

        Args:
            missing: Last tokens of each prompt that the forward pass will compute.
        """

    def attended(self) -> AbstractContextManager[None]:
        """What forward passes run in, with the attention that they need in force.

        What is still on its way is closed behind them.

        Raises:
            AheadError: If a pass ended because loading failed; it may be run again over another.
            UnsupportedModelError: On entering, if the policy weighs chunks and the model cannot.
        """

    @property
    def waited(self) -> float:
        """Seconds for which forward passes waited for what was on its way."""

    def costs(self, row: int) -> dict[str, Any]:
        """What the context of one prompt adds to its `Metrics`."""


@dataclass(frozen=True, eq=False)
class PlainContext:
    """None: the forward pass computes prompts as they are."""

    rows: Sequence[ContextRow]
    waited: float = 0.0

    def cache(self, missing: Sequence[int]) -> None:
        """Nothing is held."""

    def attended(self) -> AbstractContextManager[None]:
        """The model's own attention."""
        return nullcontext()

    def costs(self, row: int) -> dict[str, Any]:
        """All tokens are computed."""
        return self.rows[row].costs


@dataclass(frozen=True, eq=False)
class CopiedContext:
    """Contexts side by side in one buffer.

    A row's context ends where its query begins, so index = position + padding everywhere and
    windows stay right.

    Attributes:
        model: The model.
        rows: The prompts.
        buffer: Where their contexts lie, left-padded.
        policy: What all of them ask for.
        not_deferred: Why keys were copied instead of attended to where they lie.
        ahead: Brings what is not there yet; None when everything is.
    """

    model: TransformersModel
    rows: Sequence[CopiedRow]
    buffer: KVBuffer
    policy: ReusePolicy
    not_deferred: str
    ahead: Loading | None

    def cache(self, missing: Sequence[int]) -> Any:
        """Of the buffer, which may still be filled layer by layer."""
        width, longest = max(row.shape.tokens for row in self.rows), max(missing)
        keep = None
        if min(missing) < longest:
            # The input's columns of rows with fewer missing tokens begin inside what they hold.
            keep = torch.tensor([longest - count for count in missing], device=self.model.device)
        kinds = self.model.measured.kinds
        return buffer_cache(self.buffer, kinds, width - longest, keep, self.ahead)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Plain attention, unless the policy weighs chunks."""
        with ExitStack() as stack:
            if self.ahead is not None:
                stack.enter_context(used(self.ahead))
            if self.policy.scaling is not None and any(row.shape.chunks for row in self.rows):
                columns = self._chunk_columns()
                temperature, scale = self.policy.scaling.temperature, self.policy.scaling.scale
                stack.enter_context(weighed_chunks(self.model, temperature, scale, columns))
            yield

    def _chunk_columns(self) -> list[tuple[int, int]]:
        """Per row the columns of the left-padded batch that hold chunks, half-open."""
        shapes = [row.shape for row in self.rows]
        width = max(shape.tokens for shape in shapes)
        paddings = [width - shape.tokens for shape in shapes]
        return [
            (padding + shape.spans[0].stop, padding + shape.context_tokens)
            for padding, shape in zip(paddings, shapes, strict=True)
        ]

    @property
    def waited(self) -> float:
        """Seconds for which forward passes waited for layers."""
        return 0.0 if self.ahead is None else self.ahead.waited

    def costs(self, row: int) -> dict[str, Any]:
        """With the reason why it was copied."""
        costs = self.rows[row].costs
        return {**costs, "rotation": "copied", "not_deferred": self.not_deferred}


@dataclass(frozen=True, eq=False)
class InPlaceContext:
    """Contexts that lie where the store keeps them; only what follows needs memory.

    Deferred rotation (LazyAttention, arXiv 2606.04302): one copy of a chunk serves any prompt at
    any position.

    Attributes:
        model: The model.
        rows: The prompts.
        buffer: For as many tokens as the longest query has, and the answer.
    """

    model: TransformersModel
    rows: Sequence[InPlaceRow]
    buffer: KVBuffer
    waited: float = 0.0

    def cache(self, missing: Sequence[int]) -> Any:
        """Of segments and, behind them, the buffer (see `SegmentTable`)."""
        layout, (table, tail, keep) = self.model.measured, _columns(self.rows, missing)
        segments = SegmentTable.of(layout, table, tail, keep)
        return deferred_cache(HeldSegments.of(segments), layout.kinds, self.buffer)

    def attended(self) -> AbstractContextManager[None]:
        """The query is rotated instead of the keys."""
        return deferred_rotation(self.model)

    def costs(self, row: int) -> dict[str, Any]:
        """What finding the chunks cost."""
        return {**self.rows[row].costs, "rotation": "deferred"}


@dataclass(frozen=True, eq=False)
class EncodedContext:
    """Contexts in 8 bits that lie where the store keeps them, each chunk once.

    Attributes:
        model: The model.
        rows: The prompts.
        buffer: For as many tokens as the longest query has, and the answer.
    """

    model: TransformersModel
    rows: Sequence[EncodedRow]
    buffer: KVBuffer
    waited: float = 0.0

    def cache(self, missing: Sequence[int]) -> Any:
        """Of chunks and, behind them, the buffer (see `Int8Segments`)."""
        layout, (table, tail, keep) = self.model.measured, _columns(self.rows, missing)
        placed = [[PlacedChunk(*member) for member in members] for members in table]
        segments = Int8Segments.of(layout, placed, tail, keep)
        return deferred_cache(segments, layout.kinds, self.buffer)

    def attended(self) -> AbstractContextManager[None]:
        """Numbers of 8 bits are read instead of a copy."""
        return deferred_rotation(self.model)

    def costs(self, row: int) -> dict[str, Any]:
        """What finding the chunks cost."""
        return {**self.rows[row].costs, "rotation": "deferred"}


def _columns(
    rows: Sequence[InPlaceRow] | Sequence[EncodedRow], missing: Sequence[int]
) -> tuple[list[list[Any]], int, list[int]]:
    """Where the parts of each row stand in a left-padded batch.

    Returns:
        Per row `(chunk, column, number)` of each part, the number being the row's own; the first
        column of the buffer; and how many of its first columns each row holds already.
    """
    longest, width = max(missing), max(row.shape.tokens for row in rows)
    table = []
    for row in rows:
        column, members = width - row.shape.tokens, []  # behind the left padding
        for chunk, number in row.parts:
            members.append((chunk, column, number))
            column += len(chunk)
        table.append(members)
    return table, width - longest, [longest - count for count in missing]


class PromptBuffer:
    """Memory for prompts: that of the last ones serves the next, if it is large enough.

    Attributes:
        kept: What is there, or None.
    """

    def __init__(self, model: TransformersModel) -> None:
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


class Deferral:
    """Copy the chunks of a prompt and rotate their keys, or attend to them where they lie?

    Copying costs time per byte, once.  Attending in place costs a kernel's call per chunk, layer
    and token, which on a CPU is soon more.  Both are measured; what cannot be deferred says why.
    Not thread-safe: used by whoever holds the model.

    Attributes:
        mode: What the caller wants.
        loader: Knows model and stores.
    """

    def __init__(self, mode: RotationMode, loader: ContextLoader) -> None:
        """Know no rate yet; with `deferred` the model is tried out now, not by a question.

        Raises:
            InvalidInputError: If `mode` is none of the three.
        """
        self.mode, self.loader = checked_mode(mode), loader
        self._copies = Timings(COPIES)
        if mode == "deferred":
            deferral_refusal(loader.prefiller.model)

    def why_copied(self, prompts: Sequence[Prompt]) -> str:
        """Why the chunks of a batch have to be copied, or ""."""
        if self.mode == "copied":
            return 'the engine was made with rotation="copied"'
        request = prompts[0].request
        if request.policy.scaling is not None:
            return f"{request.policy!r} weighs chunks against the rest"
        if not all(prompt.policy.is_reuse for prompt in prompts):
            return f"{request.policy!r} computes tokens again"
        if uses_beams(request.options):
            return "beam search repeats and reorders rows"
        stores = [self.loader.of(prompt.chunks).prefiller.store for prompt in prompts]
        if self.reads_codes(prompts):
            return self._why_decoded(prompts, stores)
        if any(store.codec.raw_keys for store in stores):
            codec = stores[0].codec.name
            return f"codec {codec} keeps every key at position 0, and one angle turns one distance"
        sooner = self._why_sooner(prompts) if self.mode == "auto" else ""
        return sooner or deferral_refusal(self.loader.prefiller.model)

    def reads_codes(self, prompts: Sequence[Prompt]) -> bool:
        """Whether the chunks of a batch lie in a form that attention may read as it is."""
        prefillers = [self.loader.of(prompt.chunks).prefiller for prompt in prompts]
        return all(one.position == "raw" and one.store.codec.is_attended for one in prefillers)

    def _why_decoded(self, prompts: Sequence[Prompt], stores: Sequence[ChunkStore]) -> str:
        """Why chunks that attention may read as they are, are decoded all the same, or ""."""
        model = self.loader.prefiller.model
        if not all(store.gives_encoded for store in stores):
            return (
                f"a tier of the store keeps chunks decoded; give it codec={stores[0].codec!r}, too"
            )
        if not all(prompt.chunks for prompt in prompts):
            return "there is nothing to be decoded"
        return int8_refusal(model) or deferral_refusal(model)

    def answered(self, prompt: Prompt, metrics: Metrics) -> None:
        """Note what copying took for one prompt, if all of it lay in memory."""
        nbytes, seconds = self._nbytes(prompt), metrics.load + metrics.stitch
        tiers = {
            store.tier for store in _memory_tiers(self.loader.of(prompt.chunks).prefiller.store)
        }
        from_memory = {*metrics.hits} <= tiers and not metrics.prefilled_tokens
        if metrics.rotation == "copied" and from_memory and seconds and nbytes >= SMALLEST:
            self._copies.note(nbytes, seconds)

    def _nbytes(self, prompt: Prompt) -> int:
        prefiller = self.loader.prefiller
        tokens = len(prefiller.prefix_ids) + sum(chunk.key.tokens for chunk in prompt.chunks)
        return prefiller.model.measured.chunk_layout.nbytes(tokens)

    def _why_sooner(self, prompts: Sequence[Prompt]) -> str:
        """Why copying is sooner, or ""."""
        nbytes = sum(map(self._nbytes, prompts))
        megabytes = f"{nbytes / 1e6:.3g} MB"
        if nbytes < SMALLEST:
            return f"copying {megabytes} is a matter of milliseconds"
        for prompt in prompts:
            # Not `locate`, which would ask slower tiers too.
            tiers = _memory_tiers(self.loader.of(prompt.chunks).prefiller.store)
            if not all(any(tier.contains(chunk.key) for tier in tiers) for chunk in prompt.chunks):
                return "not all chunks lie in this process's memory; others are read into place"
        rate = self._copies.rate()
        if rate is None:
            return "no context of this size was copied yet, so nothing is known to compare with"
        model = self.loader.prefiller.model
        segments = sum(1 + len(prompt.chunks) for prompt in prompts)
        tokens = 1 + prompts[0].request.max_new_tokens
        calls = segment_seconds(model) * segments * len(model.measured.kinds) * tokens
        if not math.isfinite(calls):
            return deferral_refusal(model) or "no kernel knows the shapes of its attention"
        copying = rate * nbytes
        if copying > calls:
            return ""
        return (
            f"copying {megabytes} is sooner here: {copying:.2g} s against {calls:.2g} s more for "
            f"{tokens} tokens over {segments} chunks"
        )


def checked_mode(mode: RotationMode) -> RotationMode:
    """The mode; raises `InvalidInputError` if it is none."""
    if mode not in ("auto", "copied", "deferred"):
        raise InvalidInputError(f'rotation must be "auto", "copied" or "deferred", not {mode!r}')
    return mode


def _memory_tiers(store: ChunkStore) -> list[MemoryStore]:
    """The tiers that are memory of this process."""
    tiers = getattr(store, "tiers", (store,))
    return [tier for tier in tiers if isinstance(tier, MemoryStore)]


class ContextFiller:
    """Brings the contexts of prompts for one engine.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        loader: Loads and stitches.
        buffer: Memory for prompts.
        auxiliary: Scores chunks for policies that bring no scorer of their own.
        deferral: Decides whether chunks are copied.
    """

    def __init__(
        self,
        model: TransformersModel,
        tokenizer: Any,
        loader: ContextLoader,
        buffer: PromptBuffer,
        auxiliary: Scorer | None,
        rotation: RotationMode,
    ) -> None:
        """Fill `buffer`; with `rotation="deferred"` the model is tried out now."""
        self.model, self.tokenizer, self.loader = model, tokenizer, loader
        self.buffer, self.auxiliary = buffer, auxiliary
        self.deferral = Deferral(rotation, loader)

    def fill(self, prompts: Sequence[Prompt], *, ahead: bool = False) -> Context:
        """Bring the contexts of a batch whose requests are alike.

        Args:
            prompts: One or more.
            ahead: Whether the context of a single prompt may still be on its way when this returns.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
            UnsupportedModelError: If chunks would have to move and the model's keys cannot.
            InvalidInputError: If the policy needs a scorer and there is none, or selects nonsense.
        """
        try:
            return self._fill(prompts, ahead=ahead and len(prompts) == 1)
        except ChunkNotFoundError:
            # A reference has gone, or was not what it said: its text is what counts.
            written = [
                replace(prompt, chunks=tuple(map(self.loader.from_text, prompt.chunks)))
                for prompt in prompts
            ]
            return self._fill(written, ahead=False)

    def _fill(self, prompts: Sequence[Prompt], *, ahead: bool) -> Context:
        why = self.deferral.why_copied(prompts)
        if why:
            return self._copied(prompts, why, ahead=ahead)
        if not self.deferral.reads_codes(prompts):
            return self._in_place(prompts)
        try:
            return self._encoded(prompts)
        except CorruptChunkError as error:  # values that the codec cannot store
            return self._copied(prompts, str(error), ahead=ahead)

    def _copied(self, prompts: Sequence[Prompt], why: str, *, ahead: bool) -> CopiedContext:
        request, sizes = prompts[0].request, list(map(self._tokens, prompts))
        width = max(sizes)
        buffer = self.buffer.room(len(prompts), width + request.max_new_tokens)
        rows: list[CopiedRow] = []
        known: dict[tuple[ContextChunk, ...], CopiedRow] = {}
        for number, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
            place = buffer.single(number, width - size)  # behind the row's left padding
            source = known.get(prompt.chunks)
            if source is not None:
                rows.append(self._copy(source, place, prompt))
                continue
            row = self._recomputed(self._chosen(prompt, place, ahead=ahead))
            rows.append(row)
            if row.can_be_copied:
                known[prompt.chunks] = row
        # More than one are complete before they begin.
        arriving = rows[0].loaded.ahead
        return CopiedContext(self.model, rows, buffer, prompts[0].policy, why, arriving)

    def choose(self, prompt: Prompt) -> CopiedRow:
        """Load and stitch the context of a prompt and choose tokens; none is computed again."""
        buffer = self.buffer.room(1, self._tokens(prompt) + prompt.request.max_new_tokens)
        return self._chosen(prompt, buffer, ahead=False)

    def _tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt that have a place in its buffer."""
        prefiller = self.loader.prefiller
        chunks = sum(chunk.key.tokens for chunk in prompt.chunks)
        return len(prefiller.prefix_ids) + chunks + len(prompt.query)

    def _chosen(self, prompt: Prompt, place: KVBuffer, *, ahead: bool) -> CopiedRow:
        """Load and stitch a context into a buffer of one row, and choose tokens."""
        policy, loader = prompt.policy, self.loader.of(prompt.chunks)
        scores = self._scoring(policy, prompt.request.question, prompt.chunks)
        loaded = loader.load(
            place,
            prompt.chunks,
            policy.positions,
            policy.adjacent_query,
            ahead=ahead and policy.is_reuse,
        )
        ids, shape = self._joined(prompt, loaded)
        stitched = StitchedRow(self.model, place, ids, shape)
        if policy.is_reuse or not shape.context_tokens:
            return CopiedRow(ids, shape, loaded, policy, stitched)
        started = time.perf_counter()
        answer = prompt.request.answer_tokens
        signals = RowSignals(stitched, scores, answer)
        selected = chosen_tokens(policy, shape, signals)  # (context_tokens,) bool
        choosing = time.perf_counter() - started
        kept = selected if bool(selected.any()) else None
        misses = 0 if scores is None else scores.misses
        return CopiedRow(
            *(ids, shape, loaded, policy, stitched, kept, choosing),
            scorer_misses=misses,
            heard_query=signals.heard_query,
        )

    def _joined(self, prompt: Prompt, loaded: LoadedContext) -> tuple[Tensor, StitchedPrompt]:
        chunks = [chunk.key.tokens for chunk in prompt.chunks]
        shape = StitchedPrompt.of(len(loaded.ids) - sum(chunks), chunks, len(prompt.query))
        return torch.tensor([*loaded.ids, *prompt.query]), shape  # (tokens,) int64

    def _recomputed(self, row: CopiedRow) -> CopiedRow:
        """Compute what was chosen and the query but its last token; nothing if none was chosen."""
        if row.selected is None:
            return row
        started = time.perf_counter()
        recompute(row.stitched, row.selected)
        self.model.wait()
        seconds = time.perf_counter() - started
        return replace(row, recomputing=seconds, recomputed_tokens=int(row.selected.sum()))

    def _copy(self, source: CopiedRow, place: KVBuffer, prompt: Prompt) -> CopiedRow:
        """Fill a row with what another one holds whose chunks are the same.

        Context never sees a query, so it is the same whatever is asked, unless the query said what
        is computed again (`CopiedRow.can_be_copied`).
        """
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

    def _in_place(self, prompts: Sequence[Prompt]) -> InPlaceContext:
        shared: SharedChunks = {}
        rows = [self._held(prompt, shared) for prompt in prompts]
        return InPlaceContext(self.model, rows, self._room_behind(rows, prompts[0]))

    def _encoded(self, prompts: Sequence[Prompt]) -> EncodedContext:
        shared: SharedEncoded = {}
        rows = []
        room = self.buffer.codes(self._stored_bytes(prompts))
        for prompt in prompts:
            policy, loader = prompt.policy, self.loader.of(prompt.chunks)
            loaded, members = loader.hold_encoded(prompt.chunks, shared, room)
            ids, shape = self._joined(prompt, loaded)
            parts = zip(members, _first_positions(members, policy), strict=True)
            rows.append(EncodedRow(ids, shape, loaded, policy, tuple(parts)))
        return EncodedContext(self.model, rows, self._room_behind(rows, prompts[0]))

    def _stored_bytes(self, prompts: Sequence[Prompt]) -> int:
        """Bytes of all distinct chunks of a batch in the form of their store's codec."""
        layout = self.loader.prefiller.layout
        chunks = {chunk.key: prompt for prompt in prompts for chunk in prompt.chunks}
        return sum(
            self.loader.of(prompt.chunks).prefiller.store.codec.nbytes(layout, key.tokens)
            + _TENSORS * _ALIGNMENT
            for key, prompt in chunks.items()
        )

    def _room_behind(self, rows: Sequence[ContextRow], prompt: Prompt) -> KVBuffer:
        """Memory for queries and answers alone."""
        capacity = max(row.missing for row in rows) + prompt.request.max_new_tokens
        return self.buffer.room(len(rows), capacity)

    def _held(self, prompt: Prompt, shared: SharedChunks) -> InPlaceRow:
        policy, loader = prompt.policy, self.loader.of(prompt.chunks)
        loaded, members = loader.hold(prompt.chunks, shared)
        ids, shape = self._joined(prompt, loaded)
        new = _first_positions(members, policy)
        # One per part: all its keys move equally far.
        distances = [there - one.start for there, one in zip(new, members, strict=True)]
        return InPlaceRow(ids, shape, loaded, policy, tuple(zip(members, distances, strict=True)))


def _first_positions(
    members: Sequence[ChunkKV] | Sequence[EncodedChunk], policy: ReusePolicy
) -> list[int]:
    """At which position each part of a context begins, as the policy wants it."""
    extents = [(member.start, len(member)) for member in members]
    return first_positions(extents, policy.positions, adjacent=policy.adjacent_query)
