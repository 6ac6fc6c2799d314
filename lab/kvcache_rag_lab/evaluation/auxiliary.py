"""How well an auxiliary model's attention matches the main model's (CacheClip, arXiv 2510.10129).

CacheClip rests on small models attending to much the same text as large ones.  Whether this holds
for two models at hand is measured on questions and chunks, before any answer is compared: on one
question by `attention_agreement`, on many, with intervals, by `auxiliary_agreement`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.generation.gate import scorer_name
from kvcache_rag.models.attention.last_layer import QueryAttention
from kvcache_rag.models.cache import growing_cache
from kvcache_rag.progress import progress_bar
from kvcache_rag.prompt.alignment import highest, shared_out
from kvcache_rag.prompt.offsets import chunk_offsets
from kvcache_rag.verdict import AuxiliaryAgreement
from kvcache_rag_lab.scoring.statistics import mean_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.auxiliary import Auxiliary, ChunkAttention
    from kvcache_rag.engine import Engine
    from kvcache_rag.prompt.tokens import Offsets
    from kvcache_rag_lab.scoring.question import Question


SHARE = 0.2
"""Part of the chunk tokens that are called the top (CacheClip's ratio)."""

# Part of the auxiliary's weight that is dealt out evenly, so that the divergence stays finite.
_SMOOTHING = 1e-6


@dataclass(frozen=True)
class AttentionAgreement:
    """Agreement of two models on one question.

    Attributes:
        kl: Kullback-Leibler divergence of the auxiliary's attention from the main model's, in nats;
            0 where they are equal.
        first_layer_kl: The same of the main model's own first layer, which who chooses by early
            layers goes by.
        jaccard: Common part of the tokens that each ranks highest, over their union; 1 where they
            choose the same, about `share / (2 - share)` by chance.
        tokens: Tokens of the main model that were compared.
    """

    kl: float
    first_layer_kl: float
    jaccard: float
    tokens: int


def attention_agreement(
    engine: Engine, auxiliary: Auxiliary, question: str, chunks: Sequence[str], share: float = SHARE
) -> AttentionAgreement:
    """Compare what two models attend to, both in the last layer, mean of heads and query tokens.

    The main model reads everything at once (full prefill), the auxiliary model stitches cached
    chunks.  Compared are the main model's tokens that hold a letter of a chunk; the auxiliary's
    weights come to them by characters.  For the divergence each token of the auxiliary divides its
    weight among its characters, so that nothing counts twice; the ranking is the one that
    `CacheClip` chooses by.  Both are made to add up to 1 over the tokens compared.

    The paper's reason for an auxiliary model (section 3.2) is that its last layer is nearer to the
    main model's last layer than that model's first layers are, by which others choose; so the
    divergence of the first layer is measured too, in the same full prefill over the same tokens.

    Args:
        engine: The main model.
        auxiliary: The auxiliary model.
        question: Not empty.
        chunks: Texts, at least one.
        share: Part of the tokens in the sets of `jaccard`.

    Raises:
        InvalidInputError: If there is nothing to compare, or `share` is not from 0 to 1.
        UnsupportedModelError: If the main model's attention cannot be seen.
        ContextTooLongError: If the question is too long for the auxiliary model.
    """
    if not 0 < share <= 1:
        raise InvalidInputError(f"share must be above 0 and at most 1, not {share!r}")
    other = carried(engine, auxiliary, question, chunks)
    ids = engine.tokenize(question, chunks)
    weights = _main_weights(engine, ids.prefix, ids.chunks, ids.query)
    first_layer, main = (layer[other.is_read].double() for layer in weights)
    return AttentionAgreement(
        kl=attention_divergence(main, other.weights),
        first_layer_kl=attention_divergence(main, first_layer),
        jaccard=top_jaccard(main, other.ranks, share),
        tokens=len(main),
    )


@dataclass(frozen=True, eq=False)
class CarriedAttention:
    """An auxiliary's attention on the main model's tokens that hold a letter of a chunk.

    Attributes:
        is_read: `(chunk tokens,)` bool, which tokens these are.
        weights: `(tokens read,)` float64; each token of the auxiliary divides its own among its
            characters, so that nothing counts twice.
        ranks: `(tokens read,)` float32, what `CacheClip` chooses by.
    """

    is_read: Tensor
    weights: Tensor
    ranks: Tensor


def carried(
    engine: Engine, auxiliary: Auxiliary, question: str, chunks: Sequence[str]
) -> CarriedAttention:
    """What an auxiliary attends to, by tokens of the main model, whatever tokenizers they have.

    Raises:
        InvalidInputError: If no chunk has a letter.
        ContextTooLongError: If the question is too long for the auxiliary model.
    """
    ids = engine.tokenize(question, chunks)
    places = [
        chunk_offsets(engine.tokenizer, engine.template, text, own)
        for text, own in zip(chunks, ids.chunks, strict=True)
    ]
    is_read = torch.tensor(
        [
            bool(text[start:stop].strip())
            for text, offsets in zip(chunks, places, strict=True)
            for start, stop in offsets
        ],
        dtype=torch.bool,
    )
    if not is_read.any():
        raise InvalidInputError("there is no chunk with text to compare attention over")
    pairs = list(zip(auxiliary.attention(question, chunks), places, strict=True))
    weights = torch.cat([_dealt(attention, offsets) for attention, offsets in pairs])
    ranks = torch.cat(
        [highest(offsets, attention.character_scores) for attention, offsets in pairs]
    )
    return CarriedAttention(is_read, weights[is_read], ranks[is_read])


def _main_weights(
    engine: Engine, prefix: Sequence[int], chunks: Sequence[Sequence[int]], query: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """What the query attends to under full prefill, in the first layer and in the last.

    Returns:
        `(chunk tokens,)` float32 each.
    """
    context = [*prefix, *(token for chunk in chunks for token in chunk)]
    with engine._lock, torch.inference_mode():
        attention, model = QueryAttention(engine._adapter, with_first=True), engine._adapter
        cache = growing_cache(model.measured.kinds)
        model.forward(torch.tensor([context]), cache, torch.arange(len(context)), keep=1)
        both = attention.both(torch.tensor(query), cache, len(context))
    first, last = (layer.mean(0)[len(prefix) : len(context)].clone() for layer in both)
    return first, last


def _dealt(found: ChunkAttention, offsets: Offsets) -> Tensor:
    """The auxiliary's weights on tokens of the main model, `(tokens,)` float64."""
    characters = shared_out(found.offsets, found.weights, len(found.text))
    over = torch.zeros(len(found.text), dtype=torch.float64)
    for start, stop in offsets:  # several tokens may hold bytes of one character
        over[start:stop] += 1
    each = characters / over.clamp_min(1)
    return torch.stack([each[start:stop].sum() for start, stop in offsets])


def attention_divergence(main: Tensor, other: Tensor) -> float:
    """Kullback-Leibler divergence of `other` from `main`, `(tokens,)` weights each, in nats."""
    expected = main / main.sum()
    total = other.sum()
    even = torch.full_like(expected, 1 / len(expected))
    shares = other / total if total > 0 else even
    smooth = (1 - _SMOOTHING) * shares + _SMOOTHING * even
    seen = expected > 0
    return float((expected[seen] * (expected[seen] / smooth[seen]).log()).sum())


def top_jaccard(main: Tensor, other: Tensor, share: float = SHARE) -> float:
    """Common part of the tokens that each of two scores ranks highest, over their union."""
    count = max(1, round(share * len(main)))
    first, second = _best(main, count), _best(other, count)
    return len(first & second) / len(first | second)


def _best(weights: Tensor, count: int) -> set[int]:
    return set(torch.sort(weights, descending=True, stable=True).indices[:count].tolist())


def auxiliary_agreement(
    engine: Engine,
    auxiliary: Auxiliary,
    questions: Sequence[Question],
    *,
    seed: int = 0,
    show_progress: bool = False,
) -> AuxiliaryAgreement:
    """Compare what both models attend to, on every question that fits.

    Args:
        engine: The main model.
        auxiliary: The small one.
        questions: With their documents; those over the same documents are drawn together for the
            intervals.
        seed: Of the intervals.
        show_progress: Whether to show a bar.

    Raises:
        InvalidInputError: If no question fits.
    """
    compared, clusters = [], []
    with progress_bar(len(questions), "attention", "question", show=show_progress) as bar:
        for question in questions:
            bar.update(1)
            try:
                result = attention_agreement(engine, auxiliary, question.question, question.chunks)
            except ContextTooLongError:
                continue
            compared.append(result)
            clusters.append(question.chunks)
    if not compared:
        raise InvalidInputError("no question fits the context window; use shorter documents")
    divergence = mean_interval([agreement.kl for agreement in compared], clusters, seed=seed)
    first_layer = mean_interval(
        [agreement.first_layer_kl for agreement in compared], clusters, seed=seed
    )
    jaccard = mean_interval([agreement.jaccard for agreement in compared], clusters, seed=seed)
    chance = [
        random_jaccard(agreement.tokens, max(1, round(SHARE * agreement.tokens)))
        for agreement in compared
    ]
    return AuxiliaryAgreement(
        name=scorer_name(auxiliary),
        divergence=divergence.value,
        divergence_low=divergence.low,
        divergence_high=divergence.high,
        jaccard=jaccard.value,
        jaccard_low=jaccard.low,
        jaccard_high=jaccard.high,
        random_jaccard=sum(chance) / len(chance),
        first_layer_divergence=first_layer.value,
        first_layer_divergence_low=first_layer.low,
        first_layer_divergence_high=first_layer.high,
    )


def random_jaccard(tokens: int, chosen: int) -> float:
    """Expected Jaccard index of two random choices of `chosen` out of `tokens` (hypergeometric)."""

    def ways(total: int, some: int) -> float:
        return math.lgamma(total + 1) - math.lgamma(some + 1) - math.lgamma(total - some + 1)

    rest = tokens - chosen
    return sum(
        common
        / (2 * chosen - common)
        * math.exp(ways(chosen, common) + ways(rest, chosen - common) - ways(tokens, chosen))
        for common in range(max(1, chosen - rest), chosen + 1)
    )
