"""What the stores of an engine hold and did, as plain values."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from kvcache_rag.stores import DiskStore, MemoryStore
from kvcache_rag.stores.inventory import namespaces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.stores import ChunkStore

# Seconds for which the size of a folder is believed: it is found by looking at every file.
RECOUNT = 60.0
_COUNTS = ("misses", "puts", "evictions", "corrupt", "put_failures", "failures")


class TierCounters:
    """Counters of every tier, and how much each holds now.  Safe to use from any thread."""

    def __init__(self, stores: Sequence[ChunkStore]) -> None:
        """Look at `stores`; a store that is given twice counts once."""
        self._tiers = list(
            dict.fromkeys(tier for store in stores for tier in getattr(store, "tiers", (store,)))
        )
        self._lock = threading.Lock()
        self._folders: dict[DiskStore, tuple[float, int]] = {}

    def read(self) -> list[dict[str, Any]]:
        """One entry per tier, fastest first; see `Backend.stats`.  It may look at many files."""
        found: list[dict[str, Any]] = []
        for store in self._tiers:
            stats = store.stats()
            names = [one["tier"] for one in found]
            found.append(
                {
                    # Metrics are told apart by it: chunks and combinations may both lie on disk.
                    "tier": store.tier if store.tier not in names else f"combinations-{store.tier}",
                    "bytes": self._held(store),
                    "hits": sum(stats.hits.values()),
                    "bytes_read": sum(stats.bytes_read.values()),
                    "bytes_written": sum(stats.bytes_written.values()),
                    "seconds": sum(stats.seconds.values()),
                    **{name: getattr(stats, name) for name in _COUNTS},
                }
            )
        return found

    def _held(self, store: ChunkStore) -> int | None:
        if isinstance(store, MemoryStore):
            return store.nbytes
        if not isinstance(store, DiskStore):
            return None
        with self._lock:
            counted, held = self._folders.get(store, (0.0, 0))
            now = time.monotonic()
            if store not in self._folders or now - counted > RECOUNT:
                held = _folder_bytes(store)
                self._folders[store] = (now, held)
        return held


def _folder_bytes(store: DiskStore) -> int:
    return sum(
        file.nbytes
        for namespace in namespaces(store.root)
        for spec in namespace.specs()
        for file in spec.chunks()
    )
