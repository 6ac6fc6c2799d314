"""A store made of stores, one in front of another."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError
from kvcache_rag.forks import Reopened
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.stores.base import (
    ChunkStore,
    Counters,
    EncodedHit,
    Hit,
    StoreStats,
    check_out,
    check_store,
    joined,
    next_generation,
)
from kvcache_rag.stores.memory import MemoryStore
from kvcache_rag.stores.object_names import check_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from kvcache_rag.codecs import Codec, EncodedChunk, Room
    from kvcache_rag.kv.chunk import ChunkKey, ChunkLayout

AnyHit = TypeVar("AnyHit", Hit, EncodedHit)


class TieredStore(Reopened, ChunkStore):
    """Stores from the fastest to the slowest; the last one is authoritative, the others copy it.

    A hit in a slower tier is put into the faster ones; a hit in a faster tier counts as use in the
    slower ones.  Locks are those of the last tier that excludes processes.

    If another process deletes a namespace in a slower tier, the faster ones, whose generation is
    then older, drop it before they return anything of it.

    Attributes:
        tiers: The stores, fastest first.
    """

    def __init__(self, *stores: ChunkStore) -> None:
        """Join stores.

        Raises:
            InvalidInputError: If there is none, or two of them have different codecs.
        """
        if not stores:
            raise InvalidInputError("a TieredStore joins at least one store")
        for store in stores:
            check_store("a tier", store)
        forms = {store.codec.name for store in stores if not isinstance(store, MemoryStore)}
        # Memory may hold what was decoded.
        forms |= {store.codec.name for store in stores if store.gives_encoded}
        if len(forms) > 1:
            raise InvalidInputError(f"tiers must have one codec, not {', '.join(sorted(forms))}")
        self.tiers = stores
        self.tier = stores[-1].tier
        self.excludes_processes = any(store.excludes_processes for store in stores)
        self._locks = next((tier for tier in stores[::-1] if tier.excludes_processes), stores[-1])
        self._counters = Counters(self.tier)

    def __repr__(self) -> str:
        """The call that made it."""
        return f"TieredStore({', '.join(map(repr, self.tiers))})"

    @property
    def codec(self) -> Codec:
        return self.tiers[-1].codec

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Return the chunk from the first tier that has it and promote it."""
        if self.gives_encoded:  # promoted as it is: what was decoded is rounded once more
            if out is not None:
                check_out(key, layout, out)
            hit = self.encoded(key, layout)
            if out is None:
                return Hit(hit.chunk.decoded(), hit.tier)
            hit.chunk.decode(out)
            return Hit(out, hit.tier)
        return self._first(key, lambda store: store.get(key, layout, out))

    @property
    def gives_encoded(self) -> bool:
        return all(store.gives_encoded for store in self.tiers)

    def encoded(self, key: ChunkKey, layout: ChunkLayout, room: Room | None = None) -> EncodedHit:
        """Return the chunk from the first tier that has it and promote it as it is."""
        first = self.tiers[0]

        def ask(store: ChunkStore) -> EncodedHit:
            # What is promoted is kept, so it needs memory of its own.
            return store.encoded(key, layout, room if store is first else None)

        return self._first(key, ask)

    def _first(self, key: ChunkKey, get: Callable[[ChunkStore], AnyHit]) -> AnyHit:
        generation = self.generation(check_key(key).namespace)
        worst: ChunkNotFoundError | None = None
        for index, store in enumerate(self.tiers):
            try:
                hit = get(store)
            except ChunkNotFoundError as error:
                # A corrupt chunk says more than a missing one.
                worst = error if worst is None or type(worst) is ChunkNotFoundError else worst
                continue
            if index:
                self._promote(key, hit.chunk, index, generation)
            for slower in self.tiers[index + 1 :]:
                slower.touch(key)
            return hit
        self._counters.add("misses")
        raise worst or ChunkNotFoundError(f"chunk {key.digest} is not stored; prefill it")

    def put(self, key: ChunkKey, chunk: ChunkKV, generation: int | None = None) -> bool:
        """Write to all tiers; True if any of them kept the chunk."""
        now = self.generation(check_key(key).namespace)
        begun = now if generation is None else generation
        kept = [store.put(key, chunk, begun) for store in self.tiers]
        if self.generation(key.namespace) > begun:  # deleted since in one of them: so in all
            self.delete(key)
            kept = [False]
        if any(kept):
            self._counters.add("puts")
        self._counters.add("put_failures", not kept[-1])
        return any(kept)

    def contains(self, key: ChunkKey) -> bool:
        """Whether any tier holds the key now."""
        return self.locate(key) is not None

    def locate(self, key: ChunkKey) -> str | None:
        """Name of the fastest tier that holds the key now."""
        self.generation(check_key(key).namespace)
        return next(filter(None, (store.locate(key) for store in self.tiers)), None)

    def touch(self, key: ChunkKey) -> None:
        """Note the use in all tiers."""
        for store in self.tiers:
            store.touch(key)

    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk in all tiers, the slowest first, so that no faster one is filled again."""
        self.generation(check_key(key).namespace)  # refused before anything goes
        return sum(store.delete(key) for store in reversed(self.tiers)) > 0

    def delete_namespace(self, namespace: str, generation: int | None = None) -> int:
        """Drop a namespace in all tiers, even if one fails.

        Returns:
            How many chunks the tier with the most dropped.
        """
        last = generation or next_generation(self.generation(namespace))
        failures: list[OSError] = []
        # The slowest first: then no faster tier is filled again from one that still holds it.
        tiers = reversed(self.tiers)
        dropped = [_deleted(store, namespace, last, failures) for store in tiers]
        if failures:
            raise failures[0]
        return max(dropped)

    def generation(self, namespace: str) -> int:
        """The newest of all tiers; a faster tier with an older one drops the namespace."""
        newest = 0
        for store in reversed(self.tiers):
            own = store.generation(namespace)
            if own < newest:
                with suppress(OSError):  # as a folder that cannot be written: tried again
                    store.delete_namespace(namespace, newest)
            newest = max(newest, own)
        return newest

    def locked(self, keys: Iterable[ChunkKey]) -> AbstractContextManager[object]:
        """Hold the locks of the last tier that excludes processes, or of the last tier."""
        return self._locks.locked([check_key(key) for key in keys])

    def describe(self, spec: str, namespace: str, description: Mapping[str, Any]) -> None:
        for store in self.tiers:
            store.describe(spec, namespace, description)

    def sweep(self) -> int:
        """Sweep all tiers; the sum of what they dropped."""
        return sum(store.sweep() for store in reversed(self.tiers))

    def close(self) -> None:
        """Close all tiers."""
        for store in self.tiers:
            store.close()

    def stats(self) -> StoreStats:
        """Counters of all tiers as one store's.

        Hits, bytes and seconds are per tier, `corrupt`, `evictions` and `failures` are sums.
        `misses` are keys that no tier had, `puts` are chunks that any tier kept, `put_failures` are
        chunks that the last tier did not keep.  The stats of `tiers` have each tier's own counts.
        """
        own = self._counters.stats()
        return joined(own, [store.stats() for store in self.tiers], own.put_failures)

    def _promote(
        self, key: ChunkKey, chunk: ChunkKV | EncodedChunk, source: int, generation: int
    ) -> None:
        """Copy a chunk of tier `source` into the faster ones, unless its namespace went away."""
        for faster in self.tiers[:source]:
            with suppress(Exception):  # as out of memory: the chunk is served all the same
                if isinstance(chunk, ChunkKV):
                    faster.put(key, chunk, generation)
                elif isinstance(faster, MemoryStore):
                    faster.keep(key, chunk, generation)
                else:
                    faster.put(key, chunk.decoded(), generation)
        if self.generation(key.namespace) > generation:
            for faster in self.tiers[:source]:
                faster.delete(key)


def _deleted(store: ChunkStore, namespace: str, last: int, failures: list[OSError]) -> int:
    """Delete a namespace in a tier; 0 after an error, which is added to `failures`."""
    try:
        return store.delete_namespace(namespace, last)
    except OSError as error:
        failures.append(error)
        return 0
