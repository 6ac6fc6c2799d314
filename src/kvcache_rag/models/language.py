"""A causal language model as the rest of the package uses it, whatever runs it."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.forks import new_lock, new_rlock

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.models.rotation import ModelLayout
    from kvcache_rag.models.states import RecurrentLayers


_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_MAKING = new_lock()


def lock_of(model: Any) -> threading.RLock:
    """The lock of what runs: engines that share it take turns, also with what they switch in it."""
    with _MAKING:
        return _LOCKS.setdefault(model, new_rlock())


class StoppedError(Exception):
    """A pass ended as nobody wants it any more (`LanguageModel.interruptible`)."""


@dataclass(frozen=True)
class Abilities:
    """What a model can do beside a full prefill.

    What it cannot is said: why, and but for the first four what to do instead; "" if it can.

    Attributes:
        cannot_capture: Why no chunk of it can be kept.
        cannot_move: Why chunks stay where they were computed.
        cannot_overlap: Why chunks cannot overlap in position.
        cannot_copy: Why there is no second one with its weights.
        cannot_choose: Why single tokens of chunks cannot be computed again.
        cannot_observe: Why nobody sees what they would be chosen by inside the model.
        cannot_weigh: Why attention to chunks cannot be scaled.
        recompute: What of a chunk that was brought can be computed again: "tokens", at once with
            the query; "heads" alone, chunk by chunk and without it; "runs", while it is brought.
        batch: Whether several prompts run in one padded pass.
        continues: From where in one of the last prompts another one can go on.
        memory: Where contexts lie: in a buffer of ours, or in memory of the model's own, where
            chunks are computed, too.
    """

    cannot_capture: str = ""
    cannot_move: str = ""
    cannot_overlap: str = ""
    cannot_copy: str = ""
    cannot_choose: str = ""
    cannot_observe: str = ""
    cannot_weigh: str = ""
    recompute: Literal["tokens", "heads", "runs"] = "tokens"
    batch: bool = True
    continues: Literal["anywhere", "at its end"] = "anywhere"
    memory: Literal["ours", "own"] = "ours"

    @property
    def cannot_stitch(self) -> str:
        """Why several chunks cannot be put together; "" if they can."""
        return self.cannot_capture or self.cannot_move


class LanguageModel(ABC):
    """A model whose chunks can be computed apart, placed, and continued.

    Attributes:
        model: What runs it; takes the arguments of transformers' causal language models, and
            generates as they do.
        config: Of transformers' kind.
        layout: What was measured, or None when nothing can be captured.
        recurrent: Its recurrent layers; None without any.
        refusal: Why nothing can be captured, or "".
        device: Where inputs go.
        dtype: Of its keys and values.
        takes_positions: Whether its forward pass can be told positions.
    """

    model: Any
    config: Any
    layout: ModelLayout | None = None
    recurrent: RecurrentLayers | None = None
    refusal: str = ""
    device: torch.device
    dtype: torch.dtype
    takes_positions: bool
    # Whether a question is being answered by the thread that holds the model: the number of the
    # process, as a forked child has another model.
    _answering: int = 0

    # ---------------------------------------------------------------- what it computes

    @property
    @abstractmethod
    def weights(self) -> Any:
        """What names the weights: `identity`, `are_unchanged()`, `follow()`, `written()`."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Everything about the model that the tensors of a chunk depend on, as plain values."""

    @abstractmethod
    def prefill(
        self, prefix: ChunkKV | None, chunks: Sequence[Sequence[int]], *, halts: bool = True
    ) -> list[ChunkKV]:
        """Compute keys and values of chunks, each behind the prefix and seeing nothing else.

        Args:
            prefix: The prefix's own cache, standing at 0; None or empty for none.
            chunks: Ids of each chunk, not empty.
            halts: Whether the pass may end once all keys and values are there.

        Returns:
            One `ChunkKV` per chunk on the CPU, its keys standing behind the prefix.  There they may
            be views into the memory of the batch: stores make copies of their own.
        """

    @abstractmethod
    def forward(
        self, ids: Tensor, cache: Any, positions: Tensor, *, mask: Any = None, keep: int = 0
    ) -> Tensor:
        """One forward pass.

        Args:
            ids: `(rows, n)` int64.
            cache: Of the model's own kind, or None for a pass without one.
            positions: `(n,)` or `(rows, n)` int64.
            mask: As the model takes one; None for its own.
            keep: Logits of how many of the last tokens, 0 for all.

        Returns:
            Logits `(rows, keep or n, vocabulary)`.
        """

    def new_cache(self, mask: Tensor, *, room: int, beams: int = 1) -> Any:
        """An empty cache for a left-padded batch; None where transformers makes one itself.

        Args:
            mask: `(rows, n)`, 1 for real tokens.
            room: Tokens that will be generated at most.
            beams: How many times each row will be repeated.
        """
        return None

    def causal_mask(self, places: Tensor, tokens: int) -> Any:
        """What `forward` needs so that each row sees the keys at places up to its own.

        By the order of a pass alone, a row would see keys behind it.

        Args:
            places: `(n,)` of the rows.
            tokens: How many keys there are, at places 0, 1, 2, ...

        Raises:
            UnsupportedModelError: If the model takes no mask of its own for each row.
        """
        raise UnsupportedModelError(f"{self.config.model_type} takes no mask for each token")

    def contexts(self) -> type[Any] | None:
        """The `ContextBuilder` of memory of the model's own; None for our buffers."""
        return None

    def taken(self, cache: Any) -> Any:
        """A cache of ours as the model takes it."""
        return cache

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the model compute within what its chunks' names promise."""
        yield

    def ensure_idle(self) -> None:
        """Raise `InvalidInputError` in a callback of an answer; for whoever holds the model."""
        if self._answering == os.getpid():
            raise InvalidInputError(
                "this model is answering, and its callbacks (emit, logits_processor, "
                "stopping_criteria) cannot ask it; ask when the answer has ended, or another model"
            )

    def ensure_prefills(self) -> None:
        """The same where chunks are computed in the memory of the answer."""
        if self.abilities.memory == "own":
            self.ensure_idle()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer a question, for whoever holds the model.

        Raises:
            InvalidInputError: In a callback of another answer, whose context would be overwritten.
        """
        self.ensure_idle()
        self._answering = os.getpid()
        try:
            yield
        finally:
            self._answering = 0

    @contextmanager
    def interruptible(self, cancelled: threading.Event | None) -> Iterator[None]:
        """Let passes raise `StoppedError` when an event is set, where they can."""
        yield

    def wait(self) -> None:  # noqa: B027  # nothing to wait for
        """Wait until the device has done what it was told, so that a clock can be read."""

    def forget(self) -> None:  # noqa: B027  # nothing is kept
        """Keep nothing of any prompt."""

    def keep_heads(self, tokens: int) -> None:  # noqa: B027  # recurrent layers alone need it
        """From now on keep of chunks what computing so many first tokens again needs."""

    # ---------------------------------------------------------------- an adapter for questions

    @property
    def question_adapter(self) -> str:
        """What names its adapter that acts on question and answer alone; "" for none."""
        return ""

    @contextmanager
    def on_question(self) -> Iterator[None]:
        """Let that adapter act: what is computed now is a question about documents, or answers."""
        yield

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Let it act no more, whatever is being answered: what is computed now is no part of it."""
        yield

    # ---------------------------------------------------------------- how far it reads

    @property
    @abstractmethod
    def _windows(self) -> list[int]:
        """Context windows that it was made with."""

    def longest(self, wanted: int | None) -> int:
        """Longest prompt plus answer in tokens of a full prefill: the model's, or less if wanted.

        Raises:
            InvalidInputError: If `wanted` is not positive.
        """
        if wanted is not None and wanted < 1:
            raise InvalidInputError(f"context_window must be positive, not {wanted}")
        return min([*self._windows, *([wanted] if wanted else [])], default=10**9)

    def window(self, wanted: int | None) -> int:
        """The same of a prompt with cached chunks, which may end where frequencies change.

        Raises:
            InvalidInputError: If `wanted` is not positive.
        """
        limit = self.layout.limit if self.layout else None
        return min(self.longest(wanted), limit or 10**9)

    def why_apart(self, tokens: Sequence[int], *, room: int, beams: int) -> str:
        """Why rows cannot be in one batch; "" if they can.

        Args:
            tokens: Of each, without those that it will generate.
            room: Tokens that each will generate at most.
            beams: How many times each will be repeated.
        """
        return ""

    def why_no_longer(self, window: int, longest: int) -> str:
        """Why cached chunks have this context window, and a full prefill that: ends a sentence.

        "" where nobody need be told.
        """
        if self.layout is None or window != self.layout.limit:
            return ""
        full = ", which FullRecompute() has no need to heed" if longest > window else ""
        return f"; {self.layout.beyond}{full}"

    # ---------------------------------------------------------------- what it cannot do

    @property
    def measured(self) -> ModelLayout:
        """The layout.

        Raises:
            UnsupportedModelError: If the model keeps no keys and values per token (recurrent state
                and the like).
        """
        if self.layout is None:
            raise UnsupportedModelError(f"{self.refusal}; use FullRecompute()")
        return self.layout

    @property
    def abilities(self) -> Abilities:
        """What it can do, as it is now."""
        if self.layout is None:
            return Abilities(cannot_capture=self.refusal)
        return Abilities(cannot_move=self.layout.immovable, cannot_overlap=self._why_by_place)

    @property
    def _why_by_place(self) -> str:
        """Why tokens can stand nowhere but at their places; "" if they can."""
        if not self.measured.by_place:
            return ""
        biased = " (ALiBi)" if self.recurrent is None else ""
        return f"{self.config.model_type}: attention counts a token's place in the prompt{biased}"

    @property
    @abstractmethod
    def row_cost(self) -> float:
        """What a row more costs in a pass of few rows, in passes of one row (measured)."""

    @abstractmethod
    def ensure_embedded(self, ids: Tensor) -> None:
        """Raise `InvalidInputError` if the model has no embedding of one of these ids."""

    def ensure_attends_only(self, so: str) -> None:
        """Raise `UnsupportedModelError` if some layers are recurrent.

        Args:
            so: What follows from it and what to do instead, the second half of the sentence.
        """
        if self.recurrent is not None:
            name = self.config.model_type
            raise UnsupportedModelError(
                f"{name}: layer {self.recurrent.layers[0]} is recurrent, {so}"
            )

    def ensure_takes_positions(self, so: str) -> None:
        """Raise `UnsupportedModelError` if tokens can stand nowhere but at their places.

        Args:
            so: What follows from it and what to do instead, the second half of the sentence.
        """
        if self._why_by_place:
            raise UnsupportedModelError(f"{self._why_by_place}, so {so}")
