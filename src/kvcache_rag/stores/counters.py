"""Counting what a store did, from any thread."""

from __future__ import annotations

import threading
from collections import Counter

from kvcache_rag.stores.base import StoreStats


class Counters:
    """The numbers behind `StoreStats`."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._hits: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._last_failure = ""

    def hit(self, tier: str) -> None:
        """Count a chunk given back by `tier`."""
        with self._lock:
            self._hits[tier] += 1

    def add(self, name: str, count: int = 1) -> None:
        """Count `count` more of an attribute of `StoreStats`."""
        with self._lock:
            self._counts[name] += count

    def failed(self, reason: str) -> None:
        """Count a chunk that could not be written."""
        with self._lock:
            self._counts["put_failures"] += 1
            self._last_failure = reason

    def note(self, reason: str) -> None:
        """Remember why writing will fail, before anything was written."""
        with self._lock:
            self._last_failure = reason

    def stats(self) -> StoreStats:
        """The counts at this moment."""
        with self._lock:
            return StoreStats(
                hits=dict(self._hits), last_failure=self._last_failure, **self._counts
            )
