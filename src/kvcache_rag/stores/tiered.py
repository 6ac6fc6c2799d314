"""A store in front of a store is a store."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache_rag.errors import ChunkNotFoundError, InvalidInputError, check_settings
from kvcache_rag.kv.chunk import ChunkKV
from kvcache_rag.stores.base import (
    ChunkStore,
    Counters,
    EncodedHit,
    Hit,
    StoreStats,
    check_key,
    check_out,
    check_store,
    joined,
)
from kvcache_rag.stores.epochs import EpochWatch, IdleLooks
from kvcache_rag.stores.locks import HeldEpochs, in_a_hurry
from kvcache_rag.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvcache_rag.codecs import Codec, EncodedChunk, Room
    from kvcache_rag.kv.chunk import ChunkKey, ChunkLayout
    from kvcache_rag.stores.base import ChunkReader

AnyHit = TypeVar("AnyHit", Hit, EncodedHit)

_NOTHING = nullcontext()

_IDLE_LOOK = 60.0  # seconds between two looks at namespaces that nobody asks for


class TieredStore(ChunkStore):
    """Stores from the fastest to the slowest; the last one is the truth that the others copy.

    A hit in a slower tier is put into the faster ones, and one in a faster tier counts as use in
    the slower ones.  Locks are those of the last tier that excludes processes.

    A namespace that another process deleted in a slower tier is forgotten in the faster ones: the
    epochs are looked at again before a chunk of it is given back, when the last look is `recheck`
    seconds old, and every minute when nobody asks for one.

    Attributes:
        tiers: The stores, fastest first.
        recheck: Seconds for which a faster tier is believed about a namespace.
    """

    def __init__(self, *stores: ChunkStore, recheck: float = 5.0) -> None:
        """Join stores.

        Raises:
            InvalidInputError: If there is none, or if two of them write different codecs.
        """
        check_settings(TieredStore.__init__, locals())
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
        self.recheck = recheck
        self.excludes_processes = any(store.excludes_processes for store in stores)
        self._watches = [EpochWatch(store, recheck) for store in stores]
        self._locks = next((tier for tier in stores[::-1] if tier.excludes_processes), stores[-1])
        self._held: HeldEpochs[list[int]] = HeldEpochs()
        self._idle = IdleLooks(self._look_at_all, max(_IDLE_LOOK, recheck))
        self._counters = Counters(self.tier)

    def __repr__(self) -> str:
        """The call that made it."""
        return f"TieredStore({', '.join(map(repr, self.tiers))}, recheck={self.recheck})"

    @property
    def codec(self) -> Codec:
        return self.tiers[-1].codec

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None = None) -> Hit:
        """Give back the chunk of the first tier that has it and promote it."""
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
        """Give back the chunk of the first tier that has it and promote it as it is."""
        first = self.tiers[0]

        def ask(store: ChunkStore) -> EncodedHit:
            # What is promoted is kept, so it needs memory of its own.
            return store.encoded(key, layout, room if store is first else None)

        return self._first(key, ask)

    def _first(self, key: ChunkKey, get: Callable[[ChunkStore], AnyHit]) -> AnyHit:
        self._look(check_key(key).namespace)
        worst: ChunkNotFoundError | None = None
        for index, store in enumerate(self.tiers):
            epoch = self._watches[index].number(key.namespace) if index else 0
            try:
                hit = get(store)
            except ChunkNotFoundError as error:
                # A corrupt chunk says more than a missing one.
                worst = error if worst is None or type(worst) is ChunkNotFoundError else worst
                continue
            if index:
                self._promote(key, hit.chunk, index, epoch)
            for slower in self.tiers[index + 1 :]:
                slower.touch(key)
            return hit
        self._counters.add("misses")
        raise worst or ChunkNotFoundError(f"chunk {key.digest} is not stored; prefill it")

    def reader(self, key: ChunkKey, layout: ChunkLayout) -> ChunkReader | None:
        """The first tier's, when it holds the key; from the others `get` has to promote it."""
        self._look(check_key(key).namespace)
        opened, first = None, self.tiers[0]
        with suppress(ChunkNotFoundError):  # gone or damaged: `get` asks the other tiers too
            opened = first.reader(key, layout) if first.contains(key) else None
        for slower in self.tiers[1:] if opened else ():
            slower.touch(key)
        return opened

    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Write to all tiers; True when any of them kept the chunk."""
        self._look(check_key(key).namespace)
        expected = self._held.of(key.namespace, self._epochs_now)
        kept = [store.put(key, chunk) for store in self.tiers]
        if self._epochs_now(key.namespace) != expected:
            # The namespace was deleted since the chunk was begun: it is not to come back.
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
        self._look(check_key(key).namespace)
        return next(filter(None, (store.locate(key) for store in self.tiers)), None)

    def touch(self, key: ChunkKey) -> None:
        """Note the use in all tiers."""
        for store in self.tiers:
            store.touch(key)

    def delete(self, key: ChunkKey) -> bool:
        """Drop a chunk in all tiers, the slowest first: no faster one is filled again then."""
        self._refuse(check_key(key).namespace)
        return sum(store.delete(key) for store in reversed(self.tiers)) > 0

    def delete_namespace(self, namespace: str) -> int:
        """Drop a namespace in all tiers, also when one fails.

        Returns:
            How many chunks the tier dropped that held most.
        """
        self._refuse(namespace)
        failures: list[OSError] = []
        # The slowest first: then no faster tier is filled again from one that still holds it.
        tiers = [*zip(self.tiers, self._watches, strict=True)]
        dropped = [_forget(*tier, namespace, failures) for tier in reversed(tiers)]
        if failures:
            raise failures[0]
        return max(dropped)

    def epoch(self, namespace: str) -> int:
        """The largest of the tiers'."""
        return max(store.epoch(namespace) for store in self.tiers)

    @contextmanager
    def locked(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Hold the locks of the last tier that excludes processes, or of the last tier.

        What the thread puts meanwhile belongs to the epochs of now: it is not kept when the
        namespace is deleted before.
        """
        keys = [check_key(key) for key in keys]
        with self._locks.locked(keys):
            for namespace in {key.namespace for key in keys}:
                self._look(namespace)
            epochs = {key.namespace: self._epochs_now(key.namespace) for key in keys}
            with self._held.hold(epochs):
                yield

    def claim(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` uses the key, in all tiers."""
        self._look(check_key(key).namespace)
        for store in self.tiers:
            store.claim(key, owner)

    def release(self, key: ChunkKey, owner: str) -> None:
        """Note that `owner` no longer uses the key, in all tiers."""
        self._look(check_key(key).namespace)
        for store in self.tiers:
            store.release(key, owner)

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
        chunks that the last tier did not keep; what each tier did for itself is in the stats of
        `tiers`.
        """
        own = self._counters.stats()
        return joined(own, [store.stats() for store in self.tiers], own.put_failures)

    def _epochs_now(self, namespace: str) -> list[int]:
        """The epochs of the tiers, as last seen of those that have no locks and so are far away."""
        return [
            watch.store.epoch(namespace)
            if watch.store.excludes_processes
            else watch.number(namespace)
            for watch in self._watches[1:]
        ]

    def promote(self, key: ChunkKey, chunk: ChunkKV, tier: str) -> None:
        """Copy a chunk that `tier` holds into the faster tiers."""
        source = {store.tier: index for index, store in enumerate(self.tiers)}.get(tier, 0)
        if source:
            self._promote(key, chunk, source, self._watches[source].number(key.namespace))

    def _promote(
        self, key: ChunkKey, chunk: ChunkKV | EncodedChunk, source: int, epoch: int
    ) -> None:
        """Copy a chunk of tier `source` into the faster ones, unless its namespace went away."""
        for faster in self.tiers[:source]:
            hurry = in_a_hurry() if faster.excludes_processes else _NOTHING
            with hurry, suppress(Exception):  # as out of memory: the chunk is served all the same
                if isinstance(chunk, ChunkKV):
                    faster.put(key, chunk)
                elif isinstance(faster, MemoryStore):
                    faster.keep(key, chunk)
                else:
                    faster.put(key, chunk.decoded())
        if self.tiers[source].epoch(key.namespace) != epoch:
            for faster in self.tiers[:source]:
                faster.delete(key)

    def _look(self, namespace: str) -> None:
        """Forget a namespace in faster tiers that was deleted in a slower one."""
        if len(self.tiers) > 1:
            self._idle.start()
        for index in range(len(self.tiers) - 1, -1, -1):
            before, now = self._watches[index].look(namespace)
            if before == now:
                continue
            failures: list[OSError] = []
            for faster, watch in [*zip(self.tiers[:index], self._watches, strict=False)][::-1]:
                # Seen for the first time: was the slower one deleted after this one was?
                if before or now > faster.epoch(namespace):
                    _forget(faster, watch, namespace, failures)
            if failures:
                # A folder that cannot be written, for example; tried again at the next look.
                self._watches[index].undone(namespace)

    def _look_at_all(self) -> None:
        for namespace in {name for watch in self._watches for name in watch.namespaces()}:
            with suppress(InvalidInputError):  # somebody asked for it, and a tier refused
                self._look(namespace)

    def _refuse(self, namespace: str) -> None:
        """Let a tier that serves one namespace refuse another, before anything is dropped."""
        for store in (tier for tier in self.tiers if tier.excludes_processes):
            store.epoch(namespace)


def _forget(store: ChunkStore, watch: EpochWatch, namespace: str, failures: list[OSError]) -> int:
    """Drop a namespace in a store, and know its new epoch for our own doing.

    Returns:
        How many chunks were dropped; 0 after an error, which is added to `failures`.
    """
    try:
        dropped = store.delete_namespace(namespace)
        watch.accept(namespace)
    except OSError as error:
        failures.append(error)
        return 0
    return dropped
