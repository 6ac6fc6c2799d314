"""Memory for the keys and values of prompts, from which the next ones go on.

A prompt that begins like one of the last ones starts behind what they have in common: the same
question again, another one over the same chunks, a chat's next turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
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
    """A buffer, and what of a prompt is in it.

    Attributes:
        buffer: The memory.
        beginning: What the prompt depends on; None if no other one may go on from it.
        ids: Those whose keys and values lie in the first row, from 0 on.
        is_whole: Whether a prompt goes on from all of them or none, as states are those behind the
            last one.
    """

    buffer: KVBuffer
    beginning: Beginning | None = None
    ids: tuple[int, ...] = ()
    is_whole: bool = False

    def alike(self, ids: Sequence[int]) -> int:
        """How many first tokens of a prompt are there; its last one is computed in any case."""
        known = alike(self.ids, ids)
        return 0 if self.is_whole and known < len(self.ids) else known


def alike(known: Sequence[int], ids: Sequence[int]) -> int:
    """How many first ids of a prompt are known, but for its last one, which is computed anew."""
    pairs = zip(known, ids[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


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
        self._kept: list[KeptPrompt] = []  # the one that was used last at the end
        self._codes: Tensor | None = None  # (nbytes,) uint8

    @property
    def kept(self) -> KVBuffer | None:
        """The buffer of the last prompt, if there is one."""
        return self._kept[-1].buffer if self._kept else None

    def room(self, rows: int, capacity: int) -> KVBuffer:
        """A buffer of at least `capacity` tokens per row, with anything in it."""
        rounded = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        layout = self._model.measured.chunk_layout
        while self._kept and self._is_full(rows * layout.nbytes(rounded)):
            oldest = self._kept.pop(0)  # released before a new one is made
            if oldest.buffer.rows >= rows and oldest.buffer.capacity >= capacity:
                return self._used(KeptPrompt(oldest.buffer)).narrowed(rows)
            del oldest
        made = KVBuffer.allocate(layout, rows, rounded, self._model.device)
        return self._used(KeptPrompt(made))

    def _is_full(self, nbytes: int) -> bool:
        if not self.limit:
            return True  # one buffer
        held = sum(
            one.buffer.rows * one.buffer.layout.nbytes(one.buffer.capacity) for one in self._kept
        )
        return held + nbytes > self.limit

    def _used(self, kept: KeptPrompt) -> KVBuffer:
        self._kept.append(kept)
        return kept.buffer

    def leave(self, beginning: Beginning, ids: Sequence[int]) -> None:
        """Let other prompts go on from what lies in the first row of the last buffer.

        Args:
            beginning: What its keys and values depend on.
            ids: Whose these are, from 0 on.
        """
        if self.limit != 0 and self._kept:
            is_whole = self._model.abilities.continues == "at its end"
            self._kept[-1] = KeptPrompt(self._kept[-1].buffer, beginning, tuple(ids), is_whole)

    def left(self, beginning: Beginning) -> list[KeptPrompt]:
        """The prompts that depend on the same, the last one first."""
        return [one for one in reversed(self._kept) if one.beginning == beginning]

    def going_on(self, kept: KeptPrompt, tokens: int, capacity: int) -> KVBuffer:
        """A buffer of one row of at least `capacity` tokens, with the first `tokens` of a prompt.

        The prompt's own, unless that is too small, or much of the prompt would be lost and there
        is memory for both.
        """
        lost = len(kept.ids) - tokens
        is_kept = bool(self.limit) and lost > tokens // _LOST
        if kept.buffer.capacity >= capacity and not is_kept:
            self._kept.remove(kept)
            return self._used(KeptPrompt(kept.buffer)).narrowed(1)
        self._kept.remove(kept)
        self._kept.append(kept)  # not the first to go
        buffer = self.room(1, capacity)
        if buffer is not kept.buffer:
            buffer.copy_first(kept.buffer.narrowed(1), tokens)
        return buffer

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
        self._kept, self._codes = [], None
        self._model.forget()
