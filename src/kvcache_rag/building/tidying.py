"""Unfinished files of workers that were killed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvcache_rag.chunk import ChunkKey
from kvcache_rag.stores.directory import namespace_digest
from kvcache_rag.stores.inventory import Leftover, namespaces
from kvcache_rag.stores.upkeep import discard

if TYPE_CHECKING:
    from kvcache_rag.stores import DiskStore


def tidy(store: DiskStore, spec: str, namespace: str) -> int:
    """Remove what killed workers left half written in a spec's folder.

    Chunks are written under the lock of their stripe, so what lies unfinished while that lock is
    held belongs to nobody (on this machine: an unlucky writer of another one computes its chunk
    again).

    Returns:
        How many files were removed.
    """
    found = [
        entry
        for folder in namespaces(store.root)
        if folder.name == namespace_digest(namespace)
        for one in folder.specs()
        if one.name == spec[:16]
        for entry in one.entries()
        if isinstance(entry, Leftover)
    ]
    removed = 0
    for leftover in found:
        stripe = os.path.basename(os.path.dirname(leftover.path))
        if len(stripe) != 2:
            continue  # a manifest, which is written without a lock
        with store.locked([ChunkKey(stripe * 32, spec, namespace, 1, 0)]):
            removed += discard(leftover)
    return removed
