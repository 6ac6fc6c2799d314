"""Whether an auxiliary model sees what the main model sees (evidence for CacheClip)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.evaluation.agreement import attention_agreement
from kvcache_rag.evaluation.statistics import mean_interval
from kvcache_rag.gate import scorer_name
from kvcache_rag.progress import progress_bar
from kvcache_rag.verdict import AuxiliaryAgreement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.auxiliary import Auxiliary
    from kvcache_rag.engine import Engine
    from kvcache_rag.evaluation.question import Question

SHARE = 0.2
"""Part of the chunk tokens that are called the top (CacheClip's ratio)."""


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
                found = attention_agreement(
                    engine, auxiliary, question.question, question.chunks, share=SHARE
                )
            except ContextTooLongError:
                continue
            compared.append(found)
            clusters.append(question.chunks)
    if not compared:
        raise InvalidInputError("no question fits the context window; use shorter documents")
    divergence = mean_interval([one.kl for one in compared], clusters, seed=seed)
    jaccard = mean_interval([one.jaccard for one in compared], clusters, seed=seed)
    chance = [random_jaccard(one.tokens, max(1, round(SHARE * one.tokens))) for one in compared]
    return AuxiliaryAgreement(
        name=scorer_name(auxiliary),
        divergence=divergence.value,
        divergence_low=divergence.low,
        divergence_high=divergence.high,
        jaccard=jaccard.value,
        jaccard_low=jaccard.low,
        jaccard_high=jaccard.high,
        random_jaccard=sum(chance) / len(chance),
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
