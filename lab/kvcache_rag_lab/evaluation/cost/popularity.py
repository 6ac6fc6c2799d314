"""Which chunks questions need: how often they recur, cache hit rates, how few serve most.

Questions that fall on chunks blindly are not spread evenly either: with five questions per chunk
some get none and some get ten.  So the same retrievals are drawn uniformly, many times
(`null_counts`), and skew is only what lies beyond these draws.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.integration.embedding import hash_vector
from kvcache_rag.progress import progress_bar
from kvcache_rag_lab.scoring.statistics import Interval, percentiles

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from numpy.typing import NDArray

T = TypeVar("T", bound="Hashable")

HOTTEST: Final = (1, 5, 10, 20)  # % of the chunks
GRID: Final = 101  # points of a curve, 0 to 100 % of the chunks
DRAWS: Final = 100


@dataclass(frozen=True)
class Hottest:
    """What the chunks that are asked for most serve.

    Attributes:
        percent: How many of all chunks these are.
        retrievals: Share of the retrievals that they serve: a cache of them hits no more.
        questions: Share of the questions all of whose chunks they are.
        null: `retrievals` where questions fall on chunks uniformly: median and 95 % of the draws.
    """

    percent: int
    retrievals: float
    questions: float
    null: Interval


@dataclass(frozen=True)
class Recurrence:
    """How often questions ask for chunks that were asked for before.

    Attributes:
        questions: How many were asked.
        retrieved: Chunks that they asked for, one by one.
        distinct: Different ones among these.
        recurring: Share of the retrievals whose chunk was asked for before: what a cache hits that
            keeps everything.
        hit_ratios: Share of hits of a cache that begins empty and evicts the least recently used
            chunk, by codec and by budget in GB, as "1" or "0.5".
        hottest: Of `HOTTEST` % of the chunks.
        curve: Share of the retrievals that the hottest 0, 1, ... 100 % of the chunks serve.
        null_curve: Medians of the draws.
    """

    questions: int
    retrieved: int
    distinct: int
    recurring: float
    hit_ratios: Mapping[str, Mapping[str, float]]
    hottest: tuple[Hottest, ...]
    curve: tuple[float, ...]
    null_curve: tuple[float, ...]

    @classmethod
    def from_retrieved(
        cls,
        found: Sequence[NDArray[np.int64]],
        sizes: Mapping[str, Sequence[int]],
        budgets: Sequence[float],
    ) -> Recurrence:
        """Count.

        Args:
            found: Per question, in the order in which they are asked, its chunks, best first.
            sizes: Bytes of every chunk, by codec.
            budgets: Of caches, in GB.

        Raises:
            InvalidInputError: If no question retrieved anything.
        """
        chunks = len(next(iter(sizes.values())))
        asked = [chunk for chunks_of in found for chunk in chunks_of.tolist()]
        if not asked:
            raise InvalidInputError("no question finds a chunk; check the queries and the corpus")
        counts = np.bincount(asked, minlength=chunks)
        null = curve_of(null_counts(chunks, np.array([len(one) for one in found]), DRAWS))
        distinct, curve = int((counts > 0).sum()), curve_of(counts)
        return cls(
            questions=len(found),
            retrieved=len(asked),
            distinct=distinct,
            recurring=1 - distinct / len(asked),
            hit_ratios={
                codec: {
                    f"{budget:g}": lru_hits(asked, 0, round(budget * 1e9), nbytes.__getitem__)
                    / len(asked)
                    for budget in budgets
                }
                for codec, nbytes in sizes.items()
            },
            hottest=tuple(_hottest(percent, found, counts, curve, null) for percent in HOTTEST),
            curve=tuple(curve.tolist()),
            null_curve=tuple(np.median(null, axis=0).tolist()),
        )


def _hottest(
    percent: int,
    found: Sequence[NDArray[np.int64]],
    counts: NDArray[np.int64],
    curve: NDArray[np.float64],
    null: NDArray[np.float64],
) -> Hottest:
    first = np.argsort(-counts, kind="stable")[: percent * len(counts) // 100]
    served = [bool(len(chunks)) and bool(np.isin(chunks, first).all()) for chunks in found]
    drawn = null[:, percent]
    return Hottest(
        percent,
        float(curve[percent]),
        float(np.mean(served)),
        Interval(float(np.median(drawn)), *percentiles(drawn), len(drawn)),
    )


def lru_hits(
    asked: Sequence[T], warm: int, budget: int, size: Callable[[T], int] = lambda _: 1
) -> int:
    """Hits of a cache that evicts what was not asked for for longest.

    Args:
        asked: In order.
        warm: So many first requests only fill the cache.
        budget: Sum of the sizes that fit; what exceeds it alone is never kept.
        size: Of each.
    """
    held: OrderedDict[T, int] = OrderedDict()
    hits = used = 0
    for number, wanted in enumerate(asked):
        if wanted in held:
            hits += number >= warm
            held.move_to_end(wanted)
            continue
        needed = size(wanted)
        if needed > budget:
            continue
        held[wanted] = needed
        used += needed
        while used > budget:
            used -= held.popitem(last=False)[1]
    return hits


def embedding_by_name(name: str) -> Callable[[str], list[float]]:
    """What turns a text into a vector of length one, as `ingest --embed` does.

    Args:
        name: "hash", which needs no model, or "minilm", a small one that comes as a package.

    Raises:
        MissingExtraError: If a package is missing that the model needs.
    """
    if name == "hash":
        return hash_vector
    from kvcache_rag.models.minilm import Minilm

    try:
        model = Minilm.installed()
    except ImportError as error:
        raise MissingExtraError(str(error.name), "demo", "llama-index-kvcache-rag") from error
    return lambda text: model.vectors([text])[0]


def nearest(
    texts: Sequence[str],
    questions: Sequence[str],
    top: int,
    embed: Callable[[str], list[float]] = hash_vector,
    *,
    show_progress: bool = False,
) -> list[NDArray[np.int64]]:
    """Per question the `top` texts of largest cosine, best first; of equal ones the earlier.

    Args:
        texts: What is looked through.
        questions: What is asked.
        top: How many; fewer where there are no more.
        embed: Gives vectors of length one.
        show_progress: Whether to show a bar.
    """
    with progress_bar(len(texts) + len(questions), "embed", " texts", show=show_progress) as bar:

        def vector(text: str) -> list[float]:
            bar.update()
            return embed(text)

        vectors = np.array([vector(text) for text in texts])  # (texts, dimensions)
        rows = (vectors @ np.array(vector(question)) for question in questions)
        return [np.argsort(-row, kind="stable")[:top] for row in rows]


# ---------------------------------------------------------------------- shares of the hottest
def curve_of(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of the retrievals that the hottest 0, 1, ... 100 % of the documents serve.

    Args:
        counts: `(documents,)`, or `(draws, documents)`.

    Returns:
        `(GRID,)`, or `(draws, GRID)`; a part of a document counts as that part of it.
    """
    served = served_shares(counts)
    places = np.linspace(0, counts.shape[-1], GRID)
    below = np.minimum(places.astype(np.int64), counts.shape[-1] - 1)
    part = places - below
    curve: NDArray[np.float64] = served[..., below] * (1 - part) + served[..., below + 1] * part
    return curve


def served_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of the retrievals that the hottest 0, 1, 2, ... documents serve."""
    hottest = -np.sort(-counts, axis=-1)
    nothing = np.zeros_like(hottest[..., :1])
    summed = np.concatenate([nothing, hottest.cumsum(-1)], axis=-1)
    served: NDArray[np.float64] = summed / summed[..., -1:]
    return served


def null_counts(
    documents: int, sizes: NDArray[np.int64], draws: int, seed: int = 0
) -> NDArray[np.int64]:
    """Retrievals per document where every question draws different documents uniformly.

    Args:
        documents: How many there are.
        sizes: `(questions,)` how many each draws.
        draws: How often all of this is repeated.
        seed: Of the numbers.

    Returns:
        `(draws, documents)`.
    """
    generator = np.random.default_rng(seed)
    counted = np.empty((draws, documents), dtype=np.int64)
    widest = int(sizes.max())
    wanted = np.arange(widest) < sizes[:, None]
    for draw in range(draws):
        if 2 * widest > documents:  # nearly every other draw would have repeats
            picked = generator.random((len(sizes), documents)).argsort(axis=1)[:, :widest]
        else:
            picked = generator.integers(0, documents, (len(sizes), widest))
        while len(twice := _with_repeats(picked)):
            picked[twice] = generator.integers(0, documents, (len(twice), widest))
        counted[draw] = np.bincount(picked[wanted], minlength=documents)
    return counted


def _with_repeats(picked: NDArray[np.int64]) -> NDArray[np.int64]:
    ordered = np.sort(picked, axis=1)
    return np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
