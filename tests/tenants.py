"""Small chunks of tenants of one folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import access

from tests.contracts import key_of, make_chunk

if TYPE_CHECKING:
    from kvcache_rag.stores import DiskStore, MemoryStore

SMALL = make_chunk(tokens=4)
SIZE = 4096 + SMALL.nbytes + 16  # of its file
KEY = key_of(SMALL, namespace="a")


def fill(store: DiskStore | MemoryStore, namespace: str, count: int, first: int = 0) -> None:
    """Put so many chunks, each another one."""
    for seed in range(first, first + count):
        chunk = make_chunk(seed, tokens=4)
        assert store.put(key_of(chunk, namespace=namespace), chunk)


def held(store: DiskStore, namespace: str) -> int:
    """How many chunks lie in a namespace's folder."""
    folder = Path(access.namespace_folder(store.root, namespace))
    return len(list(folder.rglob("*.safetensors")))
