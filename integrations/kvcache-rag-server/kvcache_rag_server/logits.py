"""What OpenAI's requests change in logits, and what they want told of them."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_server.backend import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class Penalties:
    """Lowers the logits of tokens that the answer has already, and adds a bias to some.

    OpenAI's formula: `logit - frequency * count - presence * (count > 0) + bias`, where only the
    answer's own tokens count.  For one call of the model.
    """

    def __init__(self, frequency: float, presence: float, bias: Mapping[int, float]) -> None:
        """Nothing is said yet.

        Args:
            frequency: Of each time that a token was said.
            presence: Of a token that was said at all.
            bias: Added to logits, by token ids.
        """
        self._frequency, self._presence = frequency, presence
        self._ids, self._values = list(bias), list(bias.values())
        self._prompt: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits `(1, vocabulary)`.

        Raises:
            InvalidInputError: If a token of the bias is none of the vocabulary.
        """
        if self._prompt is None:
            self._prompt = input_ids.shape[1]
            outside = [one for one in self._ids if one >= scores.shape[1]]
            if outside:
                raise InvalidInputError(
                    f"logit_bias names the token {outside[0]}, and the model has tokens from 0 to "
                    f"{scores.shape[1] - 1}"
                )
        said, counts = torch.unique(input_ids[0, self._prompt :], return_counts=True)
        changed = scores.clone()
        changed[0, said] -= (self._frequency * counts + self._presence).to(changed.dtype)
        if self._ids:
            values = torch.tensor(self._values, dtype=changed.dtype, device=changed.device)
            changed[0, self._ids] += values
        return changed


class LogprobRecorder:
    """Keeps the log probabilities of an answer's tokens; the first of the logits processors.

    Tokens are known one call later, the last one by the answer.  For one call of the model.
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        """Nothing is said yet.

        Args:
            tokenizer: Of the model.
            most: How many of the likeliest tokens are kept at each place.
        """
        self._tokenizer, self._most = tokenizer, most
        self._row: Tensor | None = None
        self._told: list[TokenLogprob] = []
        self._taken = 0
        # A space at the beginning of a text may be lost.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)
        self._before = len(tokenizer.decode(self._anchor))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leaves `(1, vocabulary)` as they are."""
        self._note(input_ids[0, -1:].tolist())
        self._row = scores[0].float().log_softmax(-1)
        return scores

    def _note(self, ids: Sequence[int]) -> None:
        """The token that was chosen at the place that waits for it."""
        if self._row is None or not ids:
            return
        row, self._row = self._row, None
        best = row.topk(min(self._most, len(row)))
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self._told.append(
            TokenLogprob(
                self._text(ids[0]),
                _finite(float(row[ids[0]])),
                tuple((self._text(one), _finite(value)) for one, value in top),
            )
        )

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode(
            [*self._anchor, token], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text[self._before :]

    def new(self) -> tuple[TokenLogprob, ...]:
        """Those of the tokens that became known since the last call of this."""
        fresh = self._told[self._taken :]
        self._taken = len(self._told)
        return tuple(fresh)

    def rest(self, ids: Sequence[int], text: str) -> tuple[TokenLogprob, ...]:
        """Those that `new` has not told when the answer is over.

        Args:
            ids: All tokens of the answer.
            text: Of the answer; tokens that are no part of it are left out, such as those of a
                string at which it ends.
        """
        self._note(ids[-1:])
        fresh, begins = [], sum(len(one.text) for one in self._told[: self._taken])
        for one in self.new():
            if begins < len(text):
                fresh.append(one)
            begins += len(one.text)
        return tuple(fresh)


def _finite(logprob: float) -> float:
    """What JSON can have; OpenAI tells -9999 of what cannot come."""
    return logprob if isfinite(logprob) else -9999.0
