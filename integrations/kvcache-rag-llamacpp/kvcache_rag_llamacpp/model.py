"""A model that llama.cpp runs: read chunks from its cells, write prompts into them.

A prompt of several chunks is one sequence, which sees all of its cells at positions up to its own.
A chunk is computed in another one, after the prefix, and read from there.  For stitching it is
written as a state whose keys are rotated to their place (`state.py`), and joins the prompt's
sequence, which copies no keys. llama.cpp's own moving of keys is not used: it rotates those of all
cells at every question, and scales them again each time if RoPE has a magnitude.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.models.deferred.segments import Segment
from kvcache_rag.models.language import Abilities, LanguageModel, lock_of
from kvcache_rag.models.probe import LayerCache, ProbeSubject, measure_layout
from kvcache_rag.models.rotation import KeyRotation, LayerKind
from kvcache_rag_llamacpp.binding import (
    CACHE_TYPES,
    CELL_STEP,
    LlamaCppError,
    installed_version,
)
from kvcache_rag_llamacpp.rope import frequency_sets
from kvcache_rag_llamacpp.sequence_cache import FIRST, PREFIX, WORK, SequenceCache
from kvcache_rag_llamacpp.state import read_state_format

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag.kv.chunk import GroupLayout
    from kvcache_rag.models.rotation import ModelLayout
    from kvcache_rag_llamacpp.causal import LlamaCppForCausalLM
    from kvcache_rag_llamacpp.contexts import SequenceContextBuilder
    from kvcache_rag_llamacpp.state import SequenceState, StateFormat

# As `prompt_lookup.ROW_COST`, on a processor: 0.28 to 0.33 of SmolLM2 in Q4_1, 0.12 to 0.29 of a
# Qwen2.5 of 0.5B in Q4_K_M.
_ROW_COST: Final = 0.3
# Tokens of the self-test: first id and number of a prefix, two chunks and a question; and by how
# much ids are higher in each of its prompts.
_TEST = ((5, 3), (40, 7), (70, 9), (100, 4))
_SHIFTS: Final = (0, 11, 23)
# How far off a chunk that was brought may be from one that was computed there: the root of the mean
# square, of the logits' standard deviation, in the middle one of the prompts. Quantised weights,
# whose products round the inputs to 8 bits, give 0.03 to 0.1 (SmolLM2 in Q4_1, a Qwen2.5 of 0.5B in
# Q4_K_M, on AVX2), and keys that stayed where they were, or went too far, 0.2 to 2.
_ALLOWED: Final = 0.15
# A first prompt that is nearer says enough.
_NEAR: Final = 0.1


class LlamaCppModel(LanguageModel):
    """A GGUF file that llama.cpp runs, as the rest of the package uses it."""

    takes_positions = True

    def __init__(self, model: LlamaCppForCausalLM, *, window: int | None = None) -> None:
        """Measure the model with a few passes of 12 tokens, and try what will be done with it.

        Args:
            model: The loaded file.
            window: Longest prompt plus answer that is wanted; None for the model's own.
        """
        self.model, self.config = model, model.config
        self.llama = model.llama
        self.device = torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, self.llama.options.cache_type)
        self._form: StateFormat | None = None
        self._where: list[list[_LayerRun]] = []  # the layers of each group lie in states
        # Another engine of the model may be answering.
        with lock_of(model), torch.inference_mode():
            self._settle_length(window)
            self._weights = _Weights(model)
            self.llama.empty()
            try:
                self._refuse()
                self.layout = self._measure()
                self._where = [
                    _layer_runs(group.layout, self._known_form) for group in self.layout.groups
                ]
                self._try_out(self.layout)
            except UnsupportedModelError as error:
                self.layout, self.refusal = None, str(error)
            except LlamaCppError as error:
                self.layout, self.refusal = None, f"{self.llama.architecture}: {error}"

    def _settle_length(self, window: int | None) -> None:
        """With longrope, have contexts on one side of the length where frequencies change.

        Raises:
            InvalidInputError: If another engine of this model wants the other side.
        """
        llama = self.llama
        if "rope_factors_long" not in self.model.rope_factors:
            return
        original = int(llama.number("rope.scaling.original_context_length") or llama.trained_length)
        is_long = (window or 0) > original
        # llama.cpp makes contexts of whole steps.
        least, most = (original + 1, 0) if is_long else (0, original // CELL_STEP * CELL_STEP)
        if llama.is_settled and (llama.options.least, llama.options.most) != (least, most):
            raise InvalidInputError(
                f"this model has other frequencies beyond {original} tokens, and another engine of "
                "it was made for the other side of that; load the file once more"
            )
        llama.options, llama.is_settled = replace(llama.options, least=least, most=most), True

    def _refuse(self) -> None:
        """Raise `UnsupportedModelError` for what llama.cpp would take in silence, and get wrong."""
        llama = self.llama
        if llama.is_recurrent:
            raise UnsupportedModelError(
                f"{llama.architecture}: some layers are recurrent, and llama.cpp gives a prompt "
                'the state of its last chunk alone; backend="transformers" stitches such models'
            )
        if llama.has_other_positions:
            raise UnsupportedModelError(
                f"{llama.architecture}: a token's position is several numbers (M-RoPE), which no "
                "rotation of ours moves"
            )

    def _measure(self) -> ModelLayout:
        llama, name = self.llama, self.llama.architecture

        def capture(ids: Tensor, start: int) -> list[LayerCache]:
            state = self._alone(ids[0].tolist(), start)
            return [
                (keys[None], values[None])
                for group in range(len(state.parts))
                for keys, values in zip(
                    state.keys(group).unbind(0), state.values(group).unbind(0), strict=True
                )
            ]

        llama.ensure(llama.options.least or 1)
        first = self._computed(list(range(5, 8)), 0)
        form = self._form = read_state_format(
            first, self._heads, self.dtype, CACHE_TYPES[llama.options.cache_type]
        )
        windows = [llama.window or None] if len(form.groups) == 1 else [None, llama.window]
        kinds = tuple(
            LayerKind(window)
            for group, window in zip(form.groups, windows, strict=True)
            for _ in group.layers
        )
        head = form.groups[0].key_shape[1]
        is_long = bool(llama.options.least)
        subject = ProbeSubject(
            name=name,
            capture=capture,
            behind=capture,  # what places count is its position, wherever its cell lies
            kinds=kinds,
            frequencies=frequency_sets(llama, head, self.model.rope_factors, is_long=is_long),
            dtype=self.dtype,
            vocabulary=llama.vocabulary,
            limit=min([10**9, *self._windows]),
            takes_positions=True,
        )
        return measure_layout(subject)

    @property
    def _heads(self) -> list[list[int]]:
        """Per cache the widths that a head may have."""
        number, lib, model = self.llama.number, self.llama.lib, self.llama.model
        whole = lib.llama_model_n_embd(model) // max(1, lib.llama_model_n_head(model))
        own = int(number("attention.key_length") or whole)
        return [[own], [int(number("attention.key_length_swa") or own), own]]

    # ---------------------------------------------------------------- passes of our own

    def _computed(self, ids: Sequence[int], start: int) -> bytearray:
        """The state of tokens that are computed by themselves."""
        llama = self.llama
        llama.ensure(len(ids))
        llama.remove(WORK)
        self._run(ids, start, WORK)
        state = llama.state(WORK)
        llama.remove(WORK)
        return state

    def _alone(self, ids: Sequence[int], start: int) -> SequenceState:
        return self._known_form.read(self._computed(ids, start))

    def _run(self, ids: Sequence[int], start: int, sequence: int) -> None:
        """Compute tokens at `start` and behind, which end a sequence, without logits."""
        n = len(ids)
        self.llama.decode(ids, range(start, start + n), [sequence] * n, [False] * n)

    @property
    def _known_form(self) -> StateFormat:
        if self._form is None:
            raise UnsupportedModelError(self.refusal)
        return self._form

    def _try_out(self, layout: ModelLayout) -> None:
        """Try on a small prompt what will be done: a state rebuilt, a chunk brought elsewhere.

        Raises:
            UnsupportedModelError: If this llama.cpp keeps states in another way than is known, or
                chunks that are brought are not what it computes in their places.
        """
        name, form = self.llama.architecture, self._known_form
        written = self._computed(self._test_ids(0)[2], 0)
        if _rebuilt(form, form.read(written)) != written:
            raise UnsupportedModelError(
                f"{name}: llama.cpp {installed_version()} writes states in a form that is not "
                "known here; install a version that is (docs/models.md), or use "
                'backend="transformers"'
            )
        if layout.immovable:
            return
        off = self._off(layout, _SHIFTS[0])
        if not off < _NEAR:
            off = median([off, *(self._off(layout, shift) for shift in _SHIFTS[1:])])
        self.llama.empty()
        if not off < _ALLOWED:
            raise UnsupportedModelError(
                f"{name}: a chunk that is brought to another place is not what llama.cpp computes "
                f"there (by {off:.2g} standard deviations), so its chunks cannot be stitched"
            )

    def _test_ids(self, shift: int) -> list[list[int]]:
        most = self.llama.vocabulary
        return [[(token + shift) % most for token in range(one, one + n)] for one, n in _TEST]

    def _off(self, layout: ModelLayout, shift: int) -> float:
        """How far off the logits of a prompt are whose last chunk was brought."""
        prefix, other, chunk, asked = self._test_ids(shift)
        head = self.prefill(None, [prefix])[0]
        members = [head, *self.prefill(head, [other, chunk])]
        stop, found = sum(map(len, members)), []
        for is_brought in (True, False):
            cache = self.begin([stop + len(asked)])
            place = 0
            for member in members:
                segment = Segment(member, place, place)
                if is_brought or member is not members[-1]:
                    self.append_chunk(FIRST, segment, _move(layout, segment))
                else:
                    self._compute_there(FIRST, prefix, chunk, place)
                place = segment.stop
            cache.set_lengths(stop, [stop], [0])
            ids = torch.tensor([[*asked]])
            found.append(self.forward(ids, cache, torch.arange(stop, stop + len(asked))))
        return float((found[0] - found[1]).square().mean().sqrt() / found[1].std())

    def _compute_there(
        self, sequence: int, prefix: Sequence[int], chunk: Sequence[int], place: int
    ) -> None:
        """Compute a chunk in its place, behind a prefix of its own that nobody else sees."""
        start = place - len(prefix)
        self._run([*prefix, *chunk], start, WORK)
        self.llama.copy(WORK, sequence, place, -1)
        self.llama.remove(WORK)

    def logits_in_place(
        self, prefix: Sequence[int], chunks: Sequence[Sequence[int]], query: Sequence[int]
    ) -> Tensor:
        """What llama.cpp makes of a stitched prompt by itself, each chunk computed where it stands.

        Args:
            prefix: Ids before the chunks, one at least.
            chunks: Ids of each, which sees the prefix and no other chunk.
            query: Ids behind them.

        Returns:
            `(query, vocabulary)` float32.
        """
        sizes = [len(prefix), *map(len, chunks)]
        cache = self.begin([sum(sizes) + len(query)], room=sizes[0])  # a prefix of its own each
        self._run(prefix, 0, FIRST)
        place = sizes[0]
        for chunk in chunks:
            self._compute_there(FIRST, prefix, chunk, place)
            place += len(chunk)
        cache.set_lengths(place, [place], [0])
        positions = torch.arange(place, place + len(query))
        return self.forward(torch.tensor([[*query]]), cache, positions)[0]

    # ---------------------------------------------------------------- chunks

    def prefill(
        self, prefix: ChunkKV | None, chunks: Sequence[Sequence[int]], *, halts: bool = True
    ) -> list[ChunkKV]:
        with self.by_itself():
            return self._prefill(prefix, chunks)

    def _prefill(self, prefix: ChunkKV | None, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
        llama, start = self.llama, 0 if prefix is None else len(prefix)
        self.ensure_embedded(torch.tensor([max(map(max, chunks))]))
        # The prefix, and the longest chunk; what lies there of a prompt is needed no more.
        llama.ensure(start + max(map(len, chunks)))
        llama.empty()
        if prefix is not None and start:
            llama.set_state(PREFIX, self._written(Segment(prefix, 0, 0), None))
        return [self._prefilled(start, [*chunk]) for chunk in chunks]

    def _prefilled(self, start: int, ids: list[int]) -> ChunkKV:
        """Compute a chunk behind what the sequence of the prefix holds."""
        llama, n = self.llama, len(ids)
        layout = self.measured.chunk_layout
        tokens = torch.tensor(ids, dtype=torch.int32)  # (tokens,)
        chunk = ChunkKV(layout, tokens, start, layout.empty(n))
        # A state has no more than a window of the layers that have one, and what they no longer
        # see may be overwritten, though not by what is computed together.
        window = self._state_window or n
        together = max(window, llama.together) if self._state_window else n
        llama.copy(PREFIX, WORK)
        for first in range(0, n, together):
            stop = min(first + together, n)
            self._run(ids[first:stop], start + first, WORK)
            for place in range(first, stop, window):
                self._read(chunk, place, min(place + window, stop))
        llama.remove(WORK)
        return chunk

    @property
    def _state_window(self) -> int:
        """Tokens of a sequence of which a state has all; 0 for any number."""
        return self.llama.window if len(self._known_form.groups) > 1 else 0

    def _read(self, chunk: ChunkKV, first: int, stop: int) -> None:
        """Fill in tokens of a chunk from where it is computed."""
        llama = self.llama
        llama.copy(WORK, FIRST, chunk.start + first, chunk.start + stop)
        state = self._known_form.read(llama.state(FIRST))
        llama.remove(FIRST)
        wanted = [*range(chunk.start + first, chunk.start + stop)]
        for group, runs in enumerate(self._where):
            for run in runs:
                positions = state.positions(run.cache)  # in order of its cells
                order = sorted(range(len(positions)), key=positions.__getitem__)
                if [positions[place] for place in order] != wanted:
                    raise LlamaCppError("llama.cpp gave other cells of a chunk than were computed")
                found = run.of_state(state)
                for slot, numbers in (
                    (chunk.keys(group), found.keys(0)),
                    (chunk.values(group), found.values(0)),
                ):
                    # [layers, heads, tokens, width]
                    is_sorted = order == [*range(len(order))]
                    slot[run.layers, :, first:stop] = numbers if is_sorted else numbers[:, :, order]

    def _written(
        self, segment: Segment, move: KeyRotation | None, start: int = 0, stop: int | None = None
    ) -> bytearray:
        """Tokens `start..stop` of a chunk as a state whose keys stand where these stand."""
        chunk: Any = segment.chunk
        stop = len(chunk) if stop is None else stop
        first = segment.position
        state = self._known_form.write(range(first + start, first + stop))
        if stop - start < len(chunk):
            chunk = _narrowed(chunk, start, stop)
            move = move and move.narrow(start, stop)
        for group, runs in enumerate(self._where):
            keys, values = chunk.keys(group), chunk.values(group)
            own = (
                KeyRotation(((None, None),)) if move is None else KeyRotation((move.slots[group],))
            )
            for run in runs:
                own.copy_rotated(run.of_state(state), _Layers(keys[run.layers], values[run.layers]))
        return state.data

    # ---------------------------------------------------------------- prompts

    def begin(self, tokens: Sequence[int], *, room: int = 0, beams: int = 1) -> SequenceCache:
        """An empty cache of new rows; what earlier rows held is gone.

        Args:
            tokens: Of each row, without those that it will generate.
            room: Tokens that each will generate at most.
            beams: How many times each will be repeated.

        Raises:
            InvalidInputError: If there can be no such context.
        """
        if why := self.why_apart(tokens, room=room, beams=beams):
            raise InvalidInputError(f"{why}; ask for less at once")
        llama, rows = self.llama, len(tokens)
        llama.ensure(_cells(tokens, room, beams), _sequences(rows, beams))
        llama.empty()
        return SequenceCache(llama, range(FIRST, FIRST + rows))

    def append_chunk(
        self,
        sequence: int,
        segment: Segment,
        move: KeyRotation | None,
        again: Tensor | None = None,
    ) -> None:
        """Append a chunk to a prompt's sequence.

        Args:
            sequence: The prompt's.
            segment: The chunk and its place.
            move: From where its keys stand to that place; None where they stand there.
            again: `(tokens,)` bool, tokens that are computed again, in order of their places: each
                sees what stands before it.  None for none.
        """
        llama, first = self.llama, segment.position
        whole = [(0, len(segment), False)]
        for start, stop, is_again in whole if again is None else _runs(again):
            if is_again:
                ids = segment.chunk.tokens[start:stop].tolist()
                self._run(ids, first + start, sequence)
            else:
                llama.set_state(WORK, self._written(segment, move, start, stop))
                llama.copy(WORK, sequence)
        llama.remove(WORK)

    def new_cache(self, mask: Tensor, *, room: int, beams: int = 1) -> SequenceCache:
        tokens = mask.sum(1)  # (rows,)
        cache = self.begin(tokens.tolist(), room=room, beams=beams)
        padding = (mask.shape[1] - tokens).tolist()
        cache.set_lengths(0, padding, padding)
        return cache

    def forward(
        self, ids: Tensor, cache: Any, positions: Tensor, *, mask: Any = None, keep: int = 0
    ) -> Tensor:
        if mask is not None:
            raise UnsupportedModelError("llama.cpp takes no mask of its own for each token")
        if cache is None:
            cache = self.begin([ids.shape[1]] * ids.shape[0])
        logits: Tensor = self.model(ids, cache, keep).logits
        return logits

    @contextmanager
    def interruptible(self, cancelled: threading.Event | None) -> Iterator[None]:
        if cancelled is None:
            yield
            return
        self.llama.stop_when(cancelled.is_set)
        try:
            yield
        finally:
            self.llama.stop_when(None)

    @property
    def question_adapter(self) -> str:
        return self.model.adapter_digest if self.model.is_adapter_for_questions else ""

    @contextmanager
    def on_question(self) -> Iterator[None]:
        with self._acting(acts=True):
            yield

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        with self._acting(acts=False):
            yield

    def _acting(self, *, acts: bool) -> AbstractContextManager[None]:
        # An adapter that acts on everything stays in force.
        return self.llama.acting(acts=acts) if self.question_adapter else nullcontext()

    def forget(self) -> None:
        self.llama.empty(wipe=True)
        self.llama.close_context()

    # ---------------------------------------------------------------- what it is

    @property
    def weights(self) -> _Weights:
        return self._weights

    def spec(self) -> dict[str, Any]:
        return {
            "model": self.weights.identity,
            "compute_dtype": "llama.cpp",  # that of each product is its own affair
            **self.measured.spec(),
        }

    @property
    def _windows(self) -> list[int]:
        most = self.llama.options.most
        return [self.llama.trained_length, *([most] if most else [])]

    def why_apart(self, tokens: Sequence[int], *, room: int, beams: int) -> str:
        llama = self.llama
        cells, sequences = _cells(tokens, room, beams), _sequences(len(tokens), beams)
        if (most := llama.options.most) and cells > most:
            return (
                f"{cells} tokens are wanted in one batch, and beyond {most} longrope has other "
                "frequencies, which an engine with a larger context_window has at every length"
            )
        if sequences > (most := llama.most_sequences):
            return f"{sequences} sequences are wanted in one batch, and llama.cpp has {most}"
        return ""

    @property
    def row_cost(self) -> float:
        return _ROW_COST

    def ensure_embedded(self, ids: Tensor) -> None:
        highest = int(ids.max()) if ids.numel() else 0
        if highest >= self.llama.vocabulary:
            raise InvalidInputError(
                f"token {highest} is beyond the model's {self.llama.vocabulary} embeddings; use "
                "the tokenizer of the file as it is"
            )

    def contexts(self) -> type[SequenceContextBuilder]:
        """See `LanguageModel.contexts`."""
        from kvcache_rag_llamacpp.contexts import SequenceContextBuilder  # it loads much

        return SequenceContextBuilder

    @property
    def abilities(self) -> Abilities:
        instead = 'Reuse(), Combination() or FullRecompute(), or backend="transformers"'
        return replace(
            super().abilities,
            cannot_overlap="llama.cpp has a prompt's next token stand right behind its last one",
            cannot_copy="a model in llama.cpp cannot be copied",
            cannot_observe=f"{self.config.model_type}: llama.cpp gives neither attention nor keys "
            "of single layers to choose tokens by; use BestFew(), BestLast(), LegoLink(n), "
            f"CacheClip(), {instead}",
            cannot_weigh="llama.cpp lets nobody weigh chunks inside attention; use BestFew(), "
            f"BestLast(), LegoLink(n), {instead}",
            recompute="runs",
            memory="own",
        )


@dataclass(frozen=True)
class _LayerRun:
    """Layers of one group of a layout that lie one behind the other in a cache of llama.cpp's.

    Attributes:
        layers: Of the group.
        cache: Number of the cache.
        rows: Of its layers.
    """

    layers: slice
    cache: int
    rows: slice

    def of_state(self, state: SequenceState) -> _Layers:
        """Their keys and values in a state, views."""
        return _Layers(state.keys(self.cache)[self.rows], state.values(self.cache)[self.rows])


@dataclass(frozen=True, eq=False)
class _Layers:
    """Keys and values of some layers, `[layers, heads, tokens, width]` each."""

    k: Tensor
    v: Tensor

    def keys(self, group: int) -> Tensor:
        return self.k

    def values(self, group: int) -> Tensor:
        return self.v


def _layer_runs(group: GroupLayout, form: StateFormat) -> list[_LayerRun]:
    """Where the layers of a group lie in states: caches are not divided by rotation."""
    runs: list[_LayerRun] = []
    for place, layer in enumerate(group.layers):
        cache = next(one for one, held in enumerate(form.groups) if layer in held.layers)
        row = layer - form.groups[cache].layers[0]
        last = runs[-1] if runs else None
        if last is not None and (last.cache, last.rows.stop) == (cache, row):
            runs[-1] = _LayerRun(
                slice(last.layers.start, place + 1), cache, slice(last.rows.start, row + 1)
            )
        else:
            runs.append(_LayerRun(slice(place, place + 1), cache, slice(row, row + 1)))
    return runs


class _Weights:
    """What names the weights of a file in llama.cpp: they do not change."""

    def __init__(self, model: LlamaCppForCausalLM) -> None:
        llama = model.llama
        in_chunks = "" if model.is_adapter_for_questions else model.adapter_digest
        self.identity: dict[str, Any] = {
            "type": llama.architecture,
            "gguf": model.file_digest,
            "llama.cpp": installed_version(),
            "cache": llama.options.cache_type,
            "flash": llama.options.flash,
            "long": bool(llama.options.least),
            **({"adapter": in_chunks} if in_chunks else {}),
        }

    def are_unchanged(self) -> bool:
        return True

    def follow(self) -> dict[str, Any]:
        return self.identity

    def written(self) -> None:
        """Nothing writes them."""


def _cells(tokens: Sequence[int], room: int, beams: int) -> int:
    return sum(tokens) + len(tokens) * beams * room


def _sequences(rows: int, beams: int) -> int:
    # Whoever reorders beams needs as many again.
    return FIRST + rows * (2 * beams if beams > 1 else 1)


def _move(layout: ModelLayout, segment: Segment) -> KeyRotation | None:
    """How keys that stand where they were computed get to their place."""
    if not segment.distance:
        return None
    old = segment.chunk.start + torch.arange(len(segment))
    return KeyRotation.from_positions(layout, old, old + segment.distance, torch.device("cpu"))


def _narrowed(chunk: ChunkKV, start: int, stop: int) -> ChunkKV:
    """Tokens `start..stop` of a chunk, views."""
    tensors = tuple(tuple(one[..., start:stop, :] for one in group) for group in chunk.tensors)
    return replace(
        chunk, tokens=chunk.tokens[start:stop], start=chunk.start + start, tensors=tensors
    )


def _runs(chosen: Tensor) -> Iterator[tuple[int, int, bool]]:
    """Runs `start..stop` of tokens that are alike."""
    values, start = chosen.tolist(), 0
    for stop in range(1, len(values) + 1):
        if stop == len(values) or values[stop] != values[start]:
            yield start, stop, values[start]
            start = stop


def _rebuilt(form: StateFormat, state: SequenceState) -> bytearray:
    """A state written anew from what was read of another one."""
    again = form.write(state.positions(0), WORK)
    for group in range(len(state.parts)):
        again.keys(group).copy_(state.keys(group))
        again.values(group).copy_(state.values(group))
    return again.data
