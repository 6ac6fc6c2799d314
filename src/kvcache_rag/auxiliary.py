"""A small second model that says which parts of the chunks matter for a question.

CacheClip (arXiv 2510.10129, section 3.2): the auxiliary model has its own cached chunks, stitched
like the main model's.  The question runs over them, and its attention in the last layer says which
tokens the main model computes again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache_rag.engine import Engine
from kvcache_rag.errors import ContextTooLongError, InvalidInputError, NamedArguments
from kvcache_rag.forks import new_lock
from kvcache_rag.generation.prompt_memory import PromptMemory
from kvcache_rag.models.adapters import NO_ADAPTER
from kvcache_rag.models.attention.last_layer import QueryAttention
from kvcache_rag.models.cache import buffer_cache
from kvcache_rag.prompt.alignment import spread
from kvcache_rag.prompt.offsets import chunk_offsets
from kvcache_rag.stitching.loader import ContextLoader

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Self

    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.metrics import Miss
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.prompt.tokens import Offsets
    from kvcache_rag.stores import ChunkStore

__all__ = ["Auxiliary"]


@dataclass(frozen=True)
class ChunkAttention:
    """What a question attends to in one chunk.

    Attributes:
        text: The chunk's text.
        offsets: Per token of the auxiliary model its characters in `text`; empty for tokens of the
            chunk's wrapper.
        weights: `(tokens,)` float32: attention of the last layer, mean over heads and query tokens.
        misses: Parts of the chunk that were not cached, and are now.
    """

    text: str
    offsets: Offsets
    weights: Tensor
    misses: int = 0

    @property
    def character_scores(self) -> Tensor:
        """`(characters,)` float32: each character has the weight of its token."""
        known = [(span, index) for index, span in enumerate(self.offsets) if span[0] < span[1]]
        weights = self.weights[[index for _, index in known]]
        return spread([span for span, _ in known], weights, len(self.text))


class CharacterScores(list["Tensor"]):
    """Per chunk `(characters,)` float32, and the misses they cost.

    Attributes:
        misses: Chunks of the auxiliary model that it had to prefill first.
    """

    def __init__(self, scores: Iterable[Tensor], misses: int) -> None:
        super().__init__(scores)
        self.misses = misses


@dataclass(frozen=True)
class _Piece:
    """A part of a chunk that fits the auxiliary model.

    Attributes:
        chunk: Number of the chunk.
        start: Its first character.
        text: Its text.
        planned: As the auxiliary engine knows it.
    """

    chunk: int
    start: int
    text: str
    planned: ContextChunk


class Auxiliary(NamedArguments):
    """Scores the characters of chunks by a small model's attention (a `policies.base.Scorer`).

    It may have its own tokenizer, template and store.  Chunks it does not hold are prefilled and
    stored when scored, or ahead by `prefill`.  Calls may come from any thread and run while the
    main model loads its chunks.

    What does not fit its context window is scored in parts: a chunk longer than half the window is
    cut, at a space if possible, and chunks that do not fit together take several passes of the
    question.  Weights of different passes can be compared because in each the question also attends
    to prefix and question.

    Attributes:
        engine: The auxiliary model's engine.
    """

    def __init__(self, engine: Engine) -> None:
        """Score with the model, template and store of `engine`.

        Args:
            engine: Its model's keys must be movable.  It may be the answering engine itself, which
                then shares its model and store, but not its lock.

        Raises:
            InvalidInputError: If it is no engine.
            UnsupportedModelError: If its chunks cannot be moved, or its attention cannot be read.
        """
        if not isinstance(engine, Engine):
            raise InvalidInputError(
                f"Auxiliary takes an Engine, not a {type(engine).__name__}; for a model's name use "
                "Auxiliary.from_pretrained(name)"
            )
        engine._adapter.measured.ensure_movable()
        self.engine = engine
        self._name = ""
        self._look_at_model()
        self._memory = PromptMemory(self._attention.model)
        self._lock = new_lock()
        # The other half is for the question.
        self._longest = (engine.context_window - len(engine._bound.capturing.prefix_ids)) // 2

    def _look_at_model(self) -> None:
        """View the model with the weights and adapters that it has now."""
        engine = self.engine
        self._attention = QueryAttention(engine._adapter)
        self._bound = bound = engine._bound
        prefiller = replace(bound.capturing, model=self._attention.model)
        self._loader = ContextLoader(prefiller, bound.renderer)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        store: ChunkStore | None = None,
        device: str | None = "cpu",
        **options: Any,
    ) -> Auxiliary:
        """Load an auxiliary model, such as "HuggingFaceTB/SmolLM2-135M-Instruct".

        Args:
            name: Hub id, folder, or "tiny".
            store: Where its chunks go, None for 1 GiB of memory; may be the main engine's.
            device: Where it runs; by default the CPU, while the main model loads.
            options: Further arguments of `Engine.from_pretrained`; to separate tenants, pass the
                main engine's `namespace`.

        Raises:
            InvalidInputError: If the model cannot be loaded.
            UnsupportedModelError: As for `Auxiliary`.
        """
        # An adapter that comes by itself is for answering; this model is only looked at.
        options = {"adapter": NO_ADAPTER, **options}
        auxiliary = cls(Engine.from_pretrained(name, store=store, device=device, **options))
        auxiliary._name = str(name)
        return auxiliary

    def __repr__(self) -> str:
        if self._name:
            return f"Auxiliary.from_pretrained({self._name!r})"
        return f"<Auxiliary {type(self.engine.model).__name__}>"

    def __copy__(self) -> Self:
        """The same: a model is not copied by accident."""
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise InvalidInputError(
            "an auxiliary model cannot be pickled; pickle CacheClip() without it and give it to "
            "Engine(auxiliary=...)"
        )

    def in_namespace(self, namespace: str) -> Auxiliary:
        """The same for another tenant, who cannot notice what the first one stored."""
        other = type(self)(self.engine.in_namespace(namespace))
        other._name, other._lock, other._memory = self._name, self._lock, self._memory
        return other

    def forget_buffer(self) -> None:
        """Release the memory of the chunks scored last."""
        with self._lock:
            self._memory.forget()

    def prefill(
        self,
        chunks: Sequence[str],
        *,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> list[ChunkKey]:
        """Prefill and store, at ingestion, what the auxiliary model does not hold yet.

        Args:
            chunks: Texts, as given to the main engine.
            show_progress: Whether to show a bar.
            cancelled: See `Engine.add`.

        Returns:
            Keys of the parts, in order; a chunk that fits half the context window is one part.

        Raises:
            concurrent.futures.CancelledError: See `Engine.add`.
        """
        texts = [piece.text for piece in self._pieces(chunks)]
        # Not `add`: the engine may be the very one whose chunks these are.
        return self.engine._add(texts, show_progress=show_progress, cancelled=cancelled)

    def scores(self, question: str, chunks: Sequence[str]) -> CharacterScores:
        """Attention of the question to every character of the chunks.

        Args:
            question: Text of the question.
            chunks: Texts in prompt order.

        Returns:
            Per chunk `(characters,)` float32 on the CPU, from 0 to 1.

        Raises:
            InvalidInputError: If the question is empty or a text is not valid Unicode.
            ContextTooLongError: If the question takes more than half of the context window.
        """
        found = self.attention(question, chunks)
        misses = sum(attention.misses for attention in found)
        return CharacterScores((attention.character_scores for attention in found), misses)

    def attention(self, question: str, chunks: Sequence[str]) -> list[ChunkAttention]:
        """Like `scores`, but per token of the auxiliary model."""
        if not isinstance(question, str) or not question.strip():
            raise InvalidInputError("the question is empty; ask something")
        # The main model may be this very one, whose answer waits for these scores.
        if self.engine._follow(wait=False) is not self._bound:
            with self._lock:
                self._look_at_model()
        renderer = self._loader.renderer
        query = renderer.query_ids(question)
        room = self.engine.context_window - len(renderer.prefix_ids) - len(query)
        pieces = self._pieces(chunks)
        if pieces and max(len(piece.planned) for piece in pieces) > room:
            raise ContextTooLongError(
                f"the question has {len(query)} tokens and the auxiliary model's context window of "
                f"{self.engine.context_window} has no room for the chunks behind it; shorten the "
                "question or use an auxiliary model with a longer context window"
            )
        offsets: list[Offsets] = [[] for _ in chunks]
        weights: list[list[Tensor]] = [[torch.empty(0)] for _ in chunks]
        misses = [0] * len(chunks)
        for together in _rounds(pieces, room):
            found, missed = self._run(together, query)
            for miss in missed:
                misses[miss.chunk] += 1
            for piece, values in zip(together, found, strict=True):
                ids = piece.planned.ids or ()
                spans = chunk_offsets(
                    renderer.encoder.tokenizer, renderer.template, piece.text, ids
                )
                offsets[piece.chunk] += [(a + piece.start, b + piece.start) for a, b in spans]
                weights[piece.chunk].append(values)
        return [
            ChunkAttention(text, spans, torch.cat(values), count)
            for text, spans, values, count in zip(chunks, offsets, weights, misses, strict=True)
        ]

    def _run(
        self, pieces: Sequence[_Piece], query: Sequence[int]
    ) -> tuple[list[Tensor], tuple[Miss, ...]]:
        """One pass of the question over all pieces.

        Returns:
            Weights of the tokens of each piece, and the pieces that had to be prefilled first.
        """
        model = self._attention.model
        prefix = len(self._loader.prefiller.prefix_ids)
        ends = [prefix]
        for piece in pieces:
            ends.append(ends[-1] + len(piece.planned))
        with self._lock, torch.inference_mode():
            buffer = self._memory.room(1, ends[-1] + len(query))
            planned = [piece.planned for piece in pieces]
            loaded = self._loader.load(buffer, planned, "reordered")
            cache = buffer_cache(buffer, model.measured.kinds, ends[-1])
            weights = self._attention.weights(torch.tensor(query), cache, ends[-1]).mean(0)
        # A copy: tensors of the inference mode are of no use outside of it.
        values = [weights[start:stop].clone() for start, stop in pairwise(ends)]
        return values, loaded.missed

    def _pieces(self, chunks: Sequence[str]) -> list[_Piece]:
        if isinstance(chunks, str):
            raise InvalidInputError("chunks must be a list of texts, not one text")
        for number, text in enumerate(chunks):
            if not isinstance(text, str):
                raise InvalidInputError(
                    f"chunk {number} is a {type(text).__name__}; an auxiliary model reads texts"
                )
        return [piece for number, text in enumerate(chunks) for piece in self._cut(text, number, 0)]

    def _cut(self, text: str, number: int, start: int) -> Iterator[_Piece]:
        """A chunk, or its halves if it is too long; parts that are only space have no piece."""
        if not text.strip():
            return
        planned = self._bound.request_builder.chunk(text, number)
        if len(planned) <= self._longest:
            yield _Piece(number, start, text, planned)
            return
        if len(text) < 2:
            raise ContextTooLongError(
                f"the auxiliary model's context window of {self.engine.context_window} tokens has "
                "no room for chunks behind its prefix; use one with a longer context window"
            )
        middle = _middle(text)
        yield from self._cut(text[:middle], number, start)
        yield from self._cut(text[middle:], number, start + middle)


def _middle(text: str) -> int:
    """Where to cut a text: behind the last space of its first half, else in the middle."""
    half = len(text) // 2
    spaces = [place for place in range(half // 2, half) if text[place].isspace()]
    return spaces[-1] + 1 if spaces else half


def _rounds(pieces: Sequence[_Piece], room: int) -> Iterator[list[_Piece]]:
    """Runs of pieces that fit together."""
    together: list[_Piece] = []
    for piece in pieces:
        if together and sum(len(member.planned) for member in together) + len(piece.planned) > room:
            yield together
            together = []
        together.append(piece)
    if together:
        yield together
