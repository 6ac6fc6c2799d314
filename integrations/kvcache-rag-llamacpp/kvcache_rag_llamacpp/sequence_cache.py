"""A transformers cache whose tokens are in the cells of a llama.cpp context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import Cache

from kvcache_rag.errors import KVCacheRagError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag_llamacpp.binding import LlamaCpp

# Sequences of a context: the prefix of chunks; where a chunk is made or brought; prompts.
PREFIX, WORK, FIRST = 0, 1, 2


class SequenceCache(Cache):
    """The rows of one left-padded batch, each in a sequence of its own.

    A column is a place in a row, left padding included; a token's position is its column less that
    padding.

    Attributes:
        llama: Has the context.
        sequences: Per row its sequence.
        columns: Columns that all rows hold, or have as padding.
        held: Per row the columns that it holds; those beyond `columns` are skipped when they come.
        padding: Per row its first columns, which are none of it.
    """

    def __init__(self, llama: LlamaCpp, sequences: Sequence[int]) -> None:
        """An empty one over sequences that are empty, or hold what `set_lengths` says then."""
        super().__init__(layers=[])
        self.llama, self.sequences = llama, list(sequences)
        self.columns = 0
        self.held = [0] * len(self.sequences)
        self.padding = [0] * len(self.sequences)
        self._begun = llama.begun

    def set_lengths(self, columns: int, held: Sequence[int], padding: Sequence[int]) -> None:
        """Say what its sequences hold."""
        self.columns, self.held, self.padding = columns, list(held), list(padding)

    @property
    def is_current(self) -> bool:
        """Whether its sequences hold what it says; else the context was emptied meanwhile."""
        return self._begun == self.llama.begun

    def ensure_current(self) -> None:
        """Raise `KVCacheRagError` if another prompt has taken the context since."""
        if not self.is_current:
            raise KVCacheRagError(
                "this cache belongs to an earlier answer of the engine; let one answer end before "
                "the next one begins, or ask the engine itself"
            )

    def advance(self, columns: int) -> None:
        """A pass computed so many further columns."""
        self.columns += columns
        self.held = [max(held, self.columns) for held in self.held]

    # ---------------------------------------------------------------- as transformers asks it

    def get_seq_length(self, layer_idx: int = 0) -> int:  # the same in all layers
        """Columns held."""
        return self.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1, for no limit: the engine has seen to it."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """True: there is nothing to be made."""
        return True

    @property
    def is_compileable(self) -> bool:
        """False: its shapes grow."""
        return False

    def crop(self, max_length: int) -> None:
        """Drop columns from the end: all behind `max_length`, or so many if it is negative."""
        keep = max_length if max_length >= 0 else self.columns + max_length
        for sequence, padding in zip(self.sequences, self.padding, strict=True):
            self.llama.remove(sequence, keep - padding, -1)
        self.columns = keep
        self.held = [min(held, keep) for held in self.held]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row be several; they share what they hold."""
        self._become([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Let the rows be those of these numbers."""
        self._become(indices.tolist())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The same, of beams."""
        self._become(beam_idx.tolist())

    def _become(self, rows: list[int]) -> None:
        taken = {*self.sequences}
        spare = (one for one in range(FIRST, self.llama.sequences) if one not in taken)
        fresh: list[int] = []
        kept: set[int] = set()
        for row in rows:
            own = self.sequences[row]
            if own not in kept:  # stays where it is
                kept.add(own)
                fresh.append(own)
                continue
            target = next(spare)
            self.llama.copy(own, target)
            fresh.append(target)
        for gone in taken - kept:
            self.llama.remove(gone)
        for name in ("held", "padding"):
            before: list[Any] = getattr(self, name)
            setattr(self, name, [before[row] for row in rows])
        self.sequences = fresh
