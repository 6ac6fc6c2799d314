"""Caches of a fixed number of copies under Zipf's law: computed, simulated, and our own store.

A copy is of a chunk at a position; where one serves every position, all positions count as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvcache_rag import MemoryStore
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout, GroupLayout, chunk_key, spec_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TOKENS: Final = 4
LAYOUT: Final = ChunkLayout((GroupLayout((0, 1), (1, 4), (1, 4)),), torch.float32)
SPEC: Final = spec_digest({"benchmark": "hit ratio"})
Copy = tuple[int, int]  # rank of the chunk, position of the copy


@dataclass(frozen=True)
class Requests:
    """A stream of requests.

    Attributes:
        chunks: `(requests,)` ranks of the chunks, 0 the most popular.
        places: `(requests,)` positions, uniform in `[0, D)`.
        warm: So many first requests only fill the caches.
    """

    chunks: NDArray[np.int64]
    places: NDArray[np.int64]
    warm: int

    def copies(self, *, by_position: bool) -> list[Copy]:
        """The copy that each request needs."""
        places = self.places if by_position else np.zeros_like(self.places)
        return list(zip(self.chunks.tolist(), places.tolist(), strict=True))


def popularity(chunks: int, alpha: float) -> NDArray[np.float64]:
    """Probability of each chunk, the most popular first."""
    weights = np.arange(1, chunks + 1, dtype=np.float64) ** -alpha
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def static_ratio(chunks: int, alpha: float, budget: int, copies: int = 1) -> float:
    """Hit ratio of the `budget` most popular copies, where every chunk has `copies` of them."""
    full, rest = divmod(budget, copies)
    weights = np.append(popularity(chunks, alpha), 0.0)
    return float(weights[:full].sum() + weights[min(full, chunks)] * rest / copies)


def che_ratio(chunks: int, alpha: float, budget: int, copies: int = 1) -> float:
    """Hit ratio of a least-recently-used cache (Che, Tung, Wang, IEEE JSAC 2002).

    An approximation: a copy asked for with probability p is held with 1 - exp(-p t), where t is
    such that as many as fit are held on average.
    """
    weights = popularity(chunks, alpha) / copies
    if budget >= chunks * copies:
        return 1.0
    low, high = 0.0, 1.0 / weights.min() * chunks * copies
    for _ in range(200):
        middle = (low + high) / 2
        held = copies * -np.expm1(-weights * middle).sum()
        low, high = (middle, high) if held < budget else (low, middle)
    return float(copies * (weights * -np.expm1(-weights * low)).sum())


def exponent_for(gain: float, positions: int, budget: int) -> float:
    """The exponent at which the formula gives `gain`; it falls as the exponent rises.

    The number of chunks cancels out of the formula as long as there are `budget` of them.
    """
    low, high = 0.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        ratio = static_ratio(budget, middle, budget) / static_ratio(
            budget, middle, budget, positions
        )
        low, high = (middle, high) if ratio > gain else (low, middle)
    return low


def draw(chunks: int, alpha: float, positions: int, requests: int, seed: int) -> Requests:
    """A random stream; its chunks do not depend on `positions`."""
    asked, placed = (np.random.default_rng([seed, which]) for which in (0, 1))
    ranks = asked.choice(chunks, requests, p=popularity(chunks, alpha))
    return Requests(ranks, placed.integers(0, positions, requests), requests // 5)


def static_hits(copies: Sequence[Copy], warm: int, budget: int, positions: int) -> int:
    """Hits of a cache that always holds the most popular copies."""
    return sum(chunk * positions + place < budget for chunk, place in copies[warm:])


def store_hits(copies: Sequence[Copy], warm: int, budget: int) -> int:
    """Hits of a `MemoryStore` with room for `budget` chunks, that gets what it does not hold."""
    store = MemoryStore(budget * (LAYOUT.nbytes(TOKENS) + TOKENS * 4))
    before = 0
    for number, copy in enumerate(copies):
        if number == warm:
            before = store.stats().hits.get("memory", 0)
        key, chunk = _stored(copy)
        try:
            store.get(key, LAYOUT)
        except ChunkNotFoundError:
            store.put(key, chunk)
    return store.stats().hits.get("memory", 0) - before


@cache
def _stored(copy: Copy) -> tuple[ChunkKey, ChunkKV]:
    """A chunk whose keys stand behind `place` chunks of other tokens, and its address."""
    rank, place = copy
    ids = [rank * TOKENS + index + 1 for index in range(TOKENS)]
    before = [0] * (place * TOKENS)
    key = chunk_key(ids, prefix_ids=before, spec=SPEC, namespace="")
    tensors = LAYOUT.empty(TOKENS)
    for group in tensors:
        for tensor in group:
            tensor.fill_(float(rank))
    return key, ChunkKV(LAYOUT, torch.tensor(ids, dtype=torch.int32), len(before), tensors)
