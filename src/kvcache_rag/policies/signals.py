"""What a policy may ask about a loaded and stitched prompt, computed only on request."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache_rag.errors import InvalidInputError, refuse
from kvcache_rag.models.cache import HaltedError, buffer_cache, tapped_cache
from kvcache_rag.prompt.offsets import chunk_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prompt.template import PromptTemplate
    from kvcache_rag.stitching.stitch import StitchedRow


@dataclass(frozen=True, eq=False)
class ChunkScores:
    """Scores of a prompt's chunks that a scorer works out meanwhile, in a thread of its own.

    Attributes:
        texts: The chunks as they were scored.
        template: Says how they are wrapped in the prompt.
        tokenizer: Of the model that answers.
        future: Scores of the characters of `texts`.
    """

    texts: tuple[str, ...]
    template: PromptTemplate
    tokenizer: Any
    future: Future[Sequence[Tensor]]

    @classmethod
    def start(
        cls,
        scorer: Scorer,
        question: str,
        texts: Sequence[str],
        template: PromptTemplate,
        tokenizer: Any,
    ) -> ChunkScores:
        """Let a scorer begin; it must not wait for the engine that waits for it."""
        future: Future[Sequence[Tensor]] = Future()

        def work() -> None:
            try:
                future.set_result(scorer.scores(question, texts))
            except BaseException as error:  # raised where the scores are read
                future.set_exception(error)

        threading.Thread(target=work, name="kvcache-rag-scorer", daemon=True).start()
        return cls(tuple(texts), template, tokenizer, future)

    @property
    def misses(self) -> int:
        """Chunks that the scorer had to prefill first, once it is done; 0 if it does not say."""
        if not self.future.done() or self.future.exception() is not None:
            return 0
        return int(getattr(self.future.result(), "misses", 0))

    def tokens(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Wait for the scores, and hand them on to the tokens of each chunk.

        Args:
            ids: Per chunk `(tokens,)`, wrapper included.

        Returns:
            Per chunk `(tokens,)` float32.

        Raises:
            InvalidInputError: If the scorer did not give one score per character of each chunk.
        """
        scores = list(self.future.result())
        if len(scores) != len(self.texts):
            raise InvalidInputError(
                f"{len(scores)} scores for {len(self.texts)} chunks; a Scorer gives one tensor each"
            )
        return [
            chunk_scores(self.tokenizer, self.template, text, chunk.tolist(), characters)
            for chunk, text, characters in zip(ids, self.texts, scores, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class RowSignals:
    """Signals of one stitched prompt.

    Attributes:
        row: The prompt.
        scores: What a scorer works out; None without one.
        answer_tokens: Tokens at the end of the query that are an answer being read, which whoever
            answers does not know.
    """

    row: StitchedRow
    scores: ChunkScores | None = None
    answer_tokens: int = 0
    _relevance: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _deviations: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    _attention: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def deviation(self, layer: int) -> Tensor:
        """How far stitched values are from those of a full prefill at one layer.

        All context tokens run at their true positions through the layers below on the plain causal
        path, and the pass ends before the attention of the layer itself; the prompt's buffer is
        only read.  Where the values hold rotary columns (MLA keeps them there), the other slot is
        compared, so that the positions of a chunk are never taken for a deviation.

        Args:
            layer: 0-based.

        Returns:
            `(context_tokens,)` float32 on the CPU: squared L2 distance over heads and width.

        Raises:
            InvalidInputError: If there is no such layer, or it keeps no values of its own.
        """
        if layer not in self._deviations:
            with torch.inference_mode():
                self._deviations[layer] = self._deviation(layer)
        return self._deviations[layer]

    def _deviation(self, layer: int) -> Tensor:
        model, context = self.row.model, self.row.shape.context_tokens
        slots = self.row.buffer.slots()
        refuse(model.abilities.cannot_observe)  # whoever does not say what it reads
        if layer not in slots:
            raise InvalidInputError(
                f"layer {layer} keeps no values of its own; compare at one of {min(slots)} to "
                f"{max(slots)} that does"
            )
        cache, tapped = tapped_cache(model.measured.kinds, layer)
        with suppress(HaltedError):
            model.forward(self.row.ids[None, :context], cache, torch.arange(context), keep=1)
        if tapped.found is None:
            raise InvalidInputError(f"layer {layer} was never reached; choose another check layer")
        slot = model.measured.unrotated_slot(layer)
        # (heads, context_tokens, width): as stitched, and as a full prefill has them
        stitched, fresh = slots[layer][slot][0, :, :context], tapped.found[slot][0]
        return (fresh.float() - stitched.float()).pow(2).sum((0, 2)).cpu()  # (context_tokens,)

    def relevance(self) -> Tensor:
        """Scores of the context tokens by the policy's scorer, aligned by character offsets.

        Returns:
            `(context_tokens,)` float32 on the CPU; the prefix has the lowest score.

        Raises:
            InvalidInputError: If there is no scorer, or it gave something else than scores.
        """
        if not self._relevance:
            self._relevance.append(self._aligned())
        return self._relevance[0]

    def _aligned(self) -> Tensor:
        if self.scores is None:
            raise InvalidInputError(
                'the policy reads scores and does not say so; set its reads = ("relevance",)'
            )
        shape = self.row.shape
        ids = [self.row.ids[chunk.start : chunk.stop] for chunk in shape.chunks]
        scores = self.scores.tokens(ids)
        lowest = min(float(tokens.min()) for tokens in scores)
        relevance = torch.full((shape.context_tokens,), lowest)  # so that the prefix comes last
        for chunk, tokens in zip(shape.chunks, scores, strict=True):
            relevance[chunk.start : chunk.stop] = tokens
        return relevance

    def attention(self) -> Tensor:
        """How much the query attends to each context token, running once over the stitched context.

        The query stands at its true place and sees what it would see if nothing were computed
        again.  Of the prompt's buffer only the places of the query are written, which whoever
        answers writes once more.

        Returns:
            `(context_tokens,)` float32 on the CPU: attention weights after softmax, summed over
            layers, heads and the query's tokens; columns that a window or mask hides count 0.

        Raises:
            UnsupportedModelError: If the model gives no weights, or takes no mask or positions.
        """
        if not self._attention:
            with torch.inference_mode():
                self._attention.append(self._attended())
        return self._attention[0]

    def _attended(self) -> Tensor:
        from kvcache_rag.models.attention.observed import observed_attention

        model, shape = self.row.model, self.row.shape
        refuse(model.abilities.cannot_observe)
        context, tokens = shape.context_tokens, shape.tokens - self.answer_tokens
        places = torch.arange(context, tokens)  # (query without an answer,)
        cache = buffer_cache(self.row.buffer, model.measured.kinds, context)
        mask = model.causal_mask(places, tokens)
        with observed_attention(model, tokens) as columns:
            model.forward(self.row.ids[None, places], cache, places, mask=mask)
        return columns[:context].cpu()

    @property
    def heard_query(self) -> bool:
        """Whether anything was asked that another query would have answered otherwise."""
        return bool(self._attention or self._relevance)
