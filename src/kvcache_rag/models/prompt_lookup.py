"""Guess an answer's next tokens: those that followed the same tokens in its prompt.

Answers from documents quote them, so the tokens behind the last place where the answer's own last
tokens stand are often the next ones (prompt lookup decoding, Saxena 2023).  The model looks at a
guess in one pass and keeps what it would have said itself, so a wrong one costs a little time and
changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Tokens of the answer that must stand in the prompt before what follows there is tried.
FEWEST: Final = 2

# Longer runs are as good as these; how good is counted for each length by itself.
LONGEST: Final = 6

# What a row more costs in a pass, in passes of one row, where nothing is known.
ROW_COST: Final = 0.06


class PromptLookup:
    """Guesses for one answer, as many as have paid so far.

    How many tokens are guessed follows from how many were right after runs of the same length, not
    from a clock: an answer is the same each time.
    """

    def __init__(self, prompt: Tensor, limit: int, row_cost: float = ROW_COST) -> None:
        """Guess from a prompt.

        Args:
            prompt: `(tokens,)` int64.
            limit: Most tokens of a guess.
            row_cost: What a row more costs in a pass, in passes of one row.
        """
        self._tokens = torch.cat([prompt.cpu(), prompt.new_zeros(1024, device="cpu")])
        self._length, self._limit, self._row_cost = len(prompt), limit, row_cost
        # Of runs of each length: guessed tokens that were right, and those that were looked at.
        self._right = dict.fromkeys(range(FEWEST, LONGEST + 1), 1.5)
        self._seen = dict.fromkeys(range(FEWEST, LONGEST + 1), 2.0)
        self._run = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the answer."""
        stop = self._length + len(tokens)
        if stop > len(self._tokens):
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)])
        self._tokens[self._length : stop] = torch.tensor(tokens)
        self._length = stop

    def guess(self, room: int) -> list[int]:
        """What may come next, at most `room` tokens; [] where nothing is worth a try."""
        known = self._tokens[: self._length]
        end, self._run = self._match(known)
        if not end:
            return []
        most = min(self._limit, room, self._length - end)
        right = self._right[self._run] / self._seen[self._run]
        best, length, expected, chance = 1.0, 0, 0.0, 1.0
        for count in range(1, most + 1):
            chance *= right
            expected += chance
            gain = (1 + expected) / (1 + count * self._row_cost)  # tokens per pass of one row
            if gain > best:
                best, length = gain, count
        return known[end : end + length].tolist()

    def record_outcome(self, guessed: int, right: int) -> None:
        """Take how many tokens of the last guess were right."""
        if guessed:
            self._right[self._run] += right
            self._seen[self._run] += min(right + 1, guessed)

    def _match(self, known: Tensor) -> tuple[int, int]:
        """Where the longest, then latest run ends that equals the last tokens, and its length.

        (0, 0) if none is as long as `FEWEST`.
        """
        length = len(known)
        if length <= FEWEST:
            return 0, 0
        last = known[-FEWEST:]
        found = known[: length - FEWEST] == last[0]  # (length - FEWEST,): where a run may begin
        for offset in range(1, FEWEST):
            found &= known[offset : length - FEWEST + offset] == last[offset]
        ends = (found.nonzero()[:, 0] + FEWEST).tolist()
        best = (0, 0)
        tail = known[-LONGEST - 1 :].tolist()
        for end in ends[-64:]:  # a common pair of tokens stands everywhere
            behind = known[max(0, end - LONGEST) : end].tolist()
            run = FEWEST
            while run < min(LONGEST, len(behind), len(tail)) and behind[-run - 1] == tail[-run - 1]:
                run += 1
            if run >= best[1]:
                best = (end, run)
        return best
