"""What a model without its adapter answers where all documents see each other (distillation).

All questions of a context are answered at once behind it, each seeing the context and itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.models.cache import growing_cache
from kvcache_rag_lab.finetune.sources import TargetSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag_lab.finetune.sources import Encoded

SPOKEN: Final = 24
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Lesson:
    """Samples with the teacher's answers.

    Attributes:
        samples: The same, but for their answers.
        logits: `(learned, vocabulary)` float32: its distributions of the tokens of all answers, one
            answer behind the other.
    """

    samples: tuple[Encoded, ...]
    logits: Tensor


@dataclass(frozen=True)
class Teacher:
    """A model while its adapter is out of force.

    Attributes:
        adapter: The model.
        untouched: Gives what the adapter is out of force in.
    """

    adapter: TransformersModel
    untouched: Callable[[], AbstractContextManager[Any]]

    def lesson(self, samples: Sequence[Encoded]) -> Lesson:
        """Its greedy answers to the questions of some samples; each ends as theirs do."""
        with torch.no_grad(), self.untouched():
            told = [self._answered(sample) for sample in samples]
        return Lesson(
            tuple(sample for sample, _ in told), torch.cat([logits for _, logits in told])
        )

    def _answered(self, sample: Encoded) -> tuple[Encoded, Tensor]:
        spans, context = sample.spans, torch.tensor(sample.joined.prefix)
        tokens, count = len(context), len(spans)
        cache = growing_cache(self.adapter.measured.kinds)
        if tokens:
            self.adapter.graded(context[None], cache, torch.arange(tokens), keep=1)
        sizes = torch.tensor([len(span.prompt) for span in spans])
        ids = torch.tensor([token for span in spans for token in span.prompt])
        owner = torch.arange(count).repeat_interleave(sizes)
        places = tokens + torch.cat([torch.arange(int(size)) for size in sizes])
        last = sizes.cumsum(0) - 1
        # Of everything in the cache: whose it is (-1 the context's), and where it stands.
        owners, columns = torch.full((tokens,), -1), torch.arange(tokens)
        said: list[Tensor] = []
        steps: list[Tensor] = []
        for _ in range(SPOKEN):
            owners, columns = torch.cat([owners, owner]), torch.cat([columns, places])
            own = (owners[None] == owner[:, None]) & (columns[None] <= places[:, None])
            mask = self.adapter.mask_argument(own | (owners[None] < 0), places, columns)
            logits = self.adapter.graded(ids[None], cache, places, mask=mask, keep=last)[0]
            steps.append(logits.float())
            said.append(logits.argmax(-1).cpu())
            # Behind the end of an answer nobody looks.
            ids, owner, last = said[-1], torch.arange(count), torch.arange(count)
            places = tokens + sizes + len(said) - 1
            if all(self._length(said, sample, row) <= len(said) for row in range(count)):
                break
        lengths = [min(len(said), self._length(said, sample, row)) for row in range(count)]
        answers = torch.stack(said, 1)  # (questions, steps)
        heard = tuple(
            TargetSpan(span.prompt, tuple(answers[row, : lengths[row]].tolist()))
            for row, span in enumerate(spans)
        )
        by_answer = torch.stack(steps, 1)  # (questions, steps, vocabulary)
        rows = [by_answer[row, :length] for row, length in enumerate(lengths)]
        return replace(sample, spans=heard), torch.cat(rows)

    def _length(self, said: Sequence[Tensor], sample: Encoded, row: int) -> int:
        """Tokens of an answer with the one that ends it; one more than there are if none does."""
        end = sample.spans[row].target[-1]
        return next((n for n, step in enumerate(said, 1) if int(step[row]) == end), len(said) + 1)
