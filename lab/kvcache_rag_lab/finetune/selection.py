"""Teach a small model to attend, in its last layer, to what matters for the question.

CacheClip (arXiv 2510.10129, section 3.2) chooses the tokens to compute again by the last-layer
attention of a fine-tuned auxiliary model, mean over heads and query tokens, over stitched chunks.
The loss here is the divergence KL(target | that attention), both divided by their sum over the
chunk tokens.  The target is the main model's own attention under full prefill (a teacher), carried
over by character offsets, or, without a teacher, the documents marked as relevant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.kv.mask import chunk_columns
from kvcache_rag.models.attention.last_layer import QueryAttention
from kvcache_rag.prompt.alignment import shared_out
from kvcache_rag.prompt.offsets import chunk_offsets
from kvcache_rag_lab.finetune.forward import MaskedForward
from kvcache_rag_lab.finetune.report import Measure, batched
from kvcache_rag_lab.finetune.sources import Encoded, Encoder, QASample, TargetSpan

if TYPE_CHECKING:
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag_lab.finetune.learner import Learner
    from kvcache_rag_lab.finetune.packing import MaskedBatch
    from kvcache_rag_lab.finetune.sources import PlainSample

Characters = Sequence[Tensor]
"""Per document `(characters,)` float64: how much each matters."""
Target = Callable[[QASample], Sequence[Characters | None]]
"""For each question of a sample its characters, None if nothing is known."""


class AttentionView:
    """A learner whose last-layer attention is seen, with gradients if they are on."""

    def __init__(self, learner: Learner) -> None:
        """Make a view of the model; behind LoRA, whose layers it must contain.

        Raises:
            UnsupportedModelError: If the model's attention cannot be seen.
        """
        attention = QueryAttention(learner.adapter)
        self._modules = attention.attentions
        view = cast("TransformersModel", attention.model)  # of the learner's kind
        self.learner = replace(learner, adapter=view)
        self._forward = MaskedForward(view, learner.config.positions, learner.compute_dtype)

    def weights(self, batch: MaskedBatch) -> Tensor:
        """Attention weights of one forward pass, mean of the heads.

        Returns:
            `(rows, tokens, tokens)` float32.
        """
        kept: list[Tensor] = []
        shape = (batch.ids.shape[1],) * 2

        def keep(_: Any, __: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else ()
            kept.extend(
                part.float().mean(1)
                for part in parts
                if isinstance(part, Tensor) and part.ndim == 4 and part.shape[-2:] == shape
            )

        hooks = [module.register_forward_hook(keep) for module in self._modules]
        try:
            with self.learner.rounding():
                self._forward.run(batch)
        finally:
            for hook in hooks:
                hook.remove()
        if not kept:
            raise UnsupportedModelError(
                "the last layer of this model gives no attention weights; choose another one"
            )
        return kept[-1]

    def question_weights(self, samples: Sequence[Encoded]) -> list[list[Tensor]]:
        """Per sample and question `(chunk_tokens,)`: attention to them, mean of its tokens."""
        batch = self._forward.batch(samples)
        weights = self.weights(batch)
        total = batch.ids.shape[1]
        means = []
        for row, sample in enumerate(samples):
            start = total - sum(len(span.prompt) + len(span.target) for span in sample.spans)
            columns = torch.tensor(_read_columns(sample)) + total - sample.row_tokens
            own = []
            for span in sample.spans:
                rows = weights[row, start : start + len(span.prompt)]
                own.append(rows[:, columns.to(rows.device)].mean(0))
                start += len(span.prompt) + len(span.target)
            means.append(own)
        return means


@dataclass(frozen=True)
class SelectionEncoder:
    """Samples with the target of each question.

    Attributes:
        encoder: Gives the ids.
        tokenizer: Of the model that learns.
        target: Says which characters matter.
    """

    encoder: Encoder
    tokenizer: Any
    target: Target

    def qa(self, sample: QASample) -> Encoded | None:
        """Ids and targets of the questions about which something is known; None if of none."""
        plain = self.encoder.qa(sample)
        spans = []
        for span, characters in zip(plain.spans, self.target(sample), strict=True):
            if characters is None:
                continue
            weights = _token_weights(self, plain, sample.documents, characters)
            if sum(weights) > 0:
                spans.append(TargetSpan(span.prompt, (), weights))
        return Encoded(plain.prefix, plain.chunks, tuple(spans)) if spans else None

    def plain(self, sample: PlainSample, longest: int) -> Encoded | None:
        """As the other encoder does."""
        return self.encoder.plain(sample, longest)


def relevant_characters(sample: QASample) -> list[Characters | None]:
    """Every character of the documents marked as relevant, nothing of the others."""
    return [
        [
            torch.full((len(text),), float(index in asked.relevant), dtype=torch.float64)
            for index, text in enumerate(sample.documents)
        ]
        if asked.relevant
        else None
        for asked in sample.questions
    ]


@dataclass(frozen=True)
class Teacher:
    """What the main model attends to when it reads everything, as characters."""

    watched: AttentionView
    encoder: Encoder

    def __call__(self, sample: QASample) -> list[Characters | None]:
        """One forward pass over the whole context, all questions packed."""
        learner, ids = self.watched.learner, self.encoder.qa(sample)
        bare = Encoded(
            ids.prefix, ids.chunks, tuple(TargetSpan(span.prompt, ()) for span in ids.spans)
        )
        window = learner.adapter.window(None)
        if bare.prompt_tokens > window:
            raise InvalidInputError(
                f"a context has {bare.prompt_tokens} tokens for the teacher, whose window is "
                f"{window}; choose another teacher or shorter contexts"
            )
        with learner.measuring():
            weights = self.watched.question_weights([bare.joined])[0]
        template = self.encoder.renderer.template
        spans = [
            chunk_offsets(learner.tokenizer, template, text, own)
            for text, own in zip(sample.documents, ids.chunks, strict=True)
        ]
        sizes = [len(chunk) for chunk in ids.chunks]
        return [
            [
                shared_out(offsets, part, len(text))
                for offsets, part, text in zip(
                    spans,
                    torch.split(attention[len(ids.prefix) :].cpu(), sizes),
                    sample.documents,
                    strict=True,
                )
            ]
            for attention in weights
        ]


def selection_loss(watched: AttentionView, samples: Sequence[Encoded]) -> Tensor:
    """Mean divergence over the questions of the samples, a scalar with gradients."""
    return torch.stack([loss for loss, _ in _divergences(watched, samples)]).mean()


def measure_selection(watched: AttentionView, samples: Sequence[Encoded]) -> Measure:
    """Divergence per question, and whether the chunk that matters most is looked at most."""
    losses, hits = [], []
    with watched.learner.measuring():
        for group in batched(samples, watched.learner.config.batch_tokens):
            for loss, right in _divergences(watched, group):
                losses.append(float(loss))
                hits.append(right)
    return Measure(tuple(losses), tuple(hits))


def _divergences(watched: AttentionView, samples: Sequence[Encoded]) -> list[tuple[Tensor, bool]]:
    results = []
    for sample, questions in zip(samples, watched.question_weights(samples), strict=True):
        sizes = [len(chunk) for chunk in sample.chunks]
        for span, weights in zip(sample.spans, questions, strict=True):
            target = torch.tensor(span.weights, dtype=torch.float32, device=weights.device)
            target = target / target.sum()
            # Attention may round to 0 where the target does not.
            tiny = torch.finfo(torch.float32).tiny
            clamped = weights.clamp(min=tiny)
            logarithm = clamped.log() - clamped.sum().log()
            loss = (torch.xlogy(target, target) - target * logarithm).sum()
            wanted, seen = (_fullest(values.detach(), sizes) for values in (target, weights))
            results.append((loss, wanted == seen))
    return results


def _fullest(weights: Tensor, sizes: list[int]) -> int:
    """The chunk with the largest sum."""
    return int(torch.stack([part.sum() for part in torch.split(weights, sizes)]).argmax())


def _read_columns(sample: Encoded) -> list[int]:
    """Columns of the row that a question is meant to look at: those of the chunks.

    A sample without chunks is read under full attention: all of its context.
    """
    prefix = len(sample.prefix)
    if not sample.chunks:
        return list(range(prefix))
    return chunk_columns(prefix, [len(chunk) for chunk in sample.chunks])


def _token_weights(
    encoder: SelectionEncoder, ids: Encoded, documents: Sequence[str], characters: Characters
) -> tuple[float, ...]:
    """What the characters of each token weigh together."""
    totals: list[float] = []
    template = encoder.encoder.renderer.template
    for text, chunk, weights in zip(documents, ids.chunks, characters, strict=True):
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), weights.cumsum(0)]).tolist()
        offsets = chunk_offsets(encoder.tokenizer, template, text, chunk)
        totals += [sums[stop] - sums[start] for start, stop in offsets]
    return tuple(totals)
