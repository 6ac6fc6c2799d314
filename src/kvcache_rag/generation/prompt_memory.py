"""Memory for the keys and values of recent prompts, from which later ones continue.

A prompt that begins like one of the last ones starts behind what they have in common: the same
question again, another one over the same chunks, a chat's next turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kvcache_rag.kv.buffer import KVBuffer

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from kvcache_rag.codecs import Room
    from kvcache_rag.models.language import LanguageModel

# Room for generated tokens is rounded up, so that a buffer can serve the next question too.
CAPACITY_STEP: Final = 256
CODES_STEP: Final = 4 << 20  # the same, in bytes of chunks in the form of a codec
ALIGNMENT: Final = 64  # bytes between tensors
# Of a prompt that another one goes on from, no more than this part of what they share is lost.
_LOST: Final = 4

Beginning: TypeAlias = "Hashable"
"""What the keys and values at the beginning of a prompt depend on beside its ids."""


@dataclass(frozen=True, eq=False)
class KeptPrompt:
    """A prompt that lies in a row of a buffer, and that another one may go on from.

    Attributes:
        buffer: The row from the prompt's first token on, as views: a buffer of one prompt.
        memory: The buffer of all rows.
        beginning: What the prompt depends on.
        ids: Those whose keys and values lie there.
        is_whole: Whether a prompt goes on from all of them or none, as states are those behind the
            last one.
    """

    buffer: KVBuffer
    memory: KVBuffer
    beginning: Beginning
    ids: tuple[int, ...]
    is_whole: bool = False

    def alike(self, ids: Sequence[int]) -> int:
        """How many first tokens of a prompt are there; its last one is computed in any case."""
        known = alike(self.ids, ids)
        return 0 if self.is_whole and known < len(self.ids) else known


def alike(known: Sequence[int], ids: Sequence[int]) -> int:
    """How many first ids of a prompt are known, but for its last one, which is computed anew."""
    pairs = zip(known, ids[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class Continuation:
    """Where a prompt goes on from.

    Attributes:
        kept: The other prompt.
        tokens: How many first tokens both have in common.
    """

    kept: KeptPrompt
    tokens: int


@dataclass(frozen=True)
class FinishedRow:
    """What a row of a buffer holds when its prompt has been answered.

    Attributes:
        beginning: What its keys and values depend on; None if no other prompt may go on from them.
        ids: Whose these are.
        column: Where in the row they begin.
    """

    beginning: Beginning | None
    ids: tuple[int, ...]
    column: int = 0


@dataclass(eq=False)
class _HeldBuffer:
    """A buffer, and the prompts in its rows."""

    buffer: KVBuffer
    prompts: list[KeptPrompt] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.buffer.rows * self.buffer.layout.nbytes(self.buffer.capacity)


class PromptMemory:
    """The last prompts of a model's tenants.  Not thread-safe: whoever uses it holds the model.

    What a prompt depends on names its tenant and the weights, so none goes on from another's.

    Attributes:
        limit: Bytes of all buffers, beside one that is larger by itself; None for one buffer.
    """

    def __init__(self, model: LanguageModel, limit: int | None = None) -> None:
        """Keep nothing yet.

        Args:
            model: Whose layout the buffers have.
            limit: Bytes; 0 lets no prompt go on from another one, and keeps one buffer, too.
        """
        self._model, self.limit = model, limit
        self._held: list[_HeldBuffer] = []  # the one that was used last at the end
        self._codes: Tensor | None = None  # (nbytes,) uint8

    @property
    def kept(self) -> KVBuffer | None:
        """The buffer of the last prompts, if there is one."""
        return self._held[-1].buffer if self._held else None

    def room(self, rows: int, capacity: int) -> KVBuffer:
        """A buffer of at least `capacity` tokens per row, with anything in it."""
        rounded = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        layout = self._model.measured.chunk_layout
        while self._held and self._is_full(rows * layout.nbytes(rounded)):
            oldest = self._held.pop(0).buffer  # released before a new one is made
            if oldest.rows >= rows and oldest.capacity >= capacity:
                self._held.append(_HeldBuffer(oldest))
                return oldest.narrowed(rows)
            del oldest
        made = KVBuffer.allocate(layout, rows, rounded, self._model.device)
        self._held.append(_HeldBuffer(made))
        return made

    def _is_full(self, nbytes: int) -> bool:
        if not self.limit:
            return True  # one buffer
        return sum(one.nbytes for one in self._held) + nbytes > self.limit

    def leave(self, buffer: KVBuffer, rows: Sequence[FinishedRow]) -> None:
        """Let other prompts go on from what lies in the buffer that was given last.

        Args:
            buffer: As it was given.
            rows: Of each of its rows.
        """
        if self.limit == 0 or not self._held:
            return
        held, is_whole = self._held[-1], self._model.abilities.continues == "at its end"
        held.prompts += [
            KeptPrompt(
                buffer.single(number, row.column), held.buffer, row.beginning, row.ids, is_whole
            )
            for number, row in enumerate(rows)
            if row.beginning is not None
        ]

    def left(self, beginning: Beginning) -> list[KeptPrompt]:
        """The prompts that depend on the same, the last ones first."""
        every = chain.from_iterable(held.prompts for held in reversed(self._held))
        return [one for one in every if one.beginning == beginning]

    def continue_from(
        self, begun: Sequence[Continuation | None], columns: Sequence[int], room: int
    ) -> KVBuffer:
        """A buffer in which prompts stand side by side, each as far as another one had it.

        One alone stays where the other one is, unless there is no room, or much of that would be
        lost and there is memory for both.

        Args:
            begun: Where each goes on from; None for one that begins anew.
            columns: Where each begins in its row.
            room: Tokens per row.
        """
        sources = [one for one in begun if one is not None]
        # The first to go are those that none of them goes on from.
        used = [one.kept.memory for one in sources]
        self._held.sort(key=lambda held: any(held.buffer is one for one in used))
        if len(begun) == len(sources) == 1 and self._stays(sources[0], room):
            kept = sources[0].kept
            self._held[-1].prompts.remove(kept)
            return kept.buffer
        buffer = self.room(len(begun), room)
        read = [one and _readable(one, self._held[-1].buffer) for one in begun]
        for row, (one, column) in enumerate(zip(read, columns, strict=True)):
            if one is not None:
                buffer.single(row, column).copy_first(one.kept.buffer, one.tokens)
        return buffer

    def _stays(self, begun: Continuation, room: int) -> bool:
        lost = len(begun.kept.ids) - begun.tokens
        is_kept = bool(self.limit) and lost > begun.tokens // _LOST
        return begun.kept.buffer.capacity >= room and not is_kept

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
            begin, used = used, used + -(-count // ALIGNMENT) * ALIGNMENT
            if used > len(memory):
                return torch.empty(count, dtype=torch.uint8)
            return memory[begin : begin + count]

        return room

    def forget(self) -> None:
        """Release everything."""
        self._held, self._codes = [], None
        self._model.forget()


def _readable(begun: Continuation, written: KVBuffer) -> Continuation:
    """The same, from a copy if it lies in a buffer that is written to before it is read."""
    if begun.kept.memory is not written:
        return begun
    copy = replace(begun.kept, buffer=begun.kept.buffer.cloned(begun.tokens))
    return replace(begun, kept=copy)
