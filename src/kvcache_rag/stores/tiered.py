"""A store in front of a store is a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError
from kvcache_rag.stores.base import ChunkStore, Hit, StoreStats
from kvcache_rag.stores.checks import check_key
from kvcache_rag.stores.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from kvcache_rag.chunk import ChunkKey, ChunkKV, ChunkLayout
    from kvcache_rag.codecs import Codec


class TieredStore(ChunkStore):
    """Stores from the fastest to the slowest; the last one is the truth that the others copy.

    A hit in a slower tier is put into the faster ones, and one in a faster tier counts as use in
    the slower ones.  Locks are the last tier's.

    Attributes:
        tiers: The stores, fastest first.
    """

    def __init__(self, *stores: ChunkStore) -> None:
        """Join stores.

        Raises:
            InvalidInputError: If there is none.
        """
        if not stores:
            raise InvalidInputError("a TieredStore joins at least one store")
        self.tiers = stores
        self._counters = Counters()

    def __repr__(self) -> str:
        """The call that made it."""
        return f"TieredStore({', '.join(map(repr, self.tiers))})"

    @property
    def codec(self) -> Codec:
        """The last tier's."""
        return self.tiers[-1].codec

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Give back the chunk of the first tier that has it and promote it.

        Raises:
            ChunkNotFoundError: If no tier has it; a `CorruptChunkError` when one had it damaged.
            InvalidInputError: If the key or `out` cannot be used.
        """
        worst: ChunkNotFoundError | None = None
        for index, store in enumerate(self.tiers):
            try:
                hit = store.get(key, layout, out)
            except ChunkNotFoundError as error:
                # A corrupt chunk says more than a missing one.
                worst = error if worst is None or type(worst) is ChunkNotFoundError else worst
                continue
            for faster in self.tiers[:index]:
                faster.put(key, hit.chunk)
            for slower in self.tiers[index + 1 :]:
                slower.touch(key)
            return hit
        self._counters.add("misses")
        raise worst or ChunkNotFoundError(f"chunk {key.digest} is not stored; prefill it")

    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Write through to all tiers; True when any of them kept the chunk."""
        kept = [store.put(key, chunk) for store in self.tiers]
        if any(kept):
            self._counters.add("puts")
        if not kept[-1]:
            self._counters.add("put_failures")
        return any(kept)

    def contains(self, key: ChunkKey) -> bool:
        """Whether any tier holds the key now."""
        return any(store.contains(key) for store in self.tiers)

    def touch(self, key: ChunkKey) -> None:
        """Note the use in all tiers."""
        for store in self.tiers:
            store.touch(key)

    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk in all tiers."""
        return sum(store.delete(key) for store in self.tiers) > 0

    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[None]:
        """Hold the locks of the last tier, the one that is shared most widely."""
        return self.tiers[-1].locked([check_key(key) for key in keys])

    def claim(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` uses the key, in all tiers."""
        for store in self.tiers:
            store.claim(key, owner)

    def release(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` no longer uses the key, in all tiers."""
        for store in self.tiers:
            store.release(key, owner)

    def sweep(self) -> int:
        """Sweep all tiers; the sum of what they dropped."""
        return sum(store.sweep() for store in self.tiers)

    def stats(self) -> StoreStats:
        """Counters of all tiers as one store's.

        Hits are per tier, `corrupt` and `evictions` are sums.  `misses` are keys that no tier had,
        `puts` are chunks that any tier kept, `put_failures` are chunks that the last tier did not
        keep; what each tier did for itself is in the stats of `tiers`.
        """
        tiers = [store.stats() for store in self.tiers]
        own = self._counters.stats()
        hits: dict[str, int] = {}
        for tier in tiers:
            for name, count in tier.hits.items():
                hits[name] = hits.get(name, 0) + count
        return StoreStats(
            hits=hits,
            misses=own.misses,
            corrupt=sum(tier.corrupt for tier in tiers),
            puts=own.puts,
            put_failures=own.put_failures,
            evictions=sum(tier.evictions for tier in tiers),
            last_failure=next((t.last_failure for t in reversed(tiers) if t.last_failure), ""),
        )
