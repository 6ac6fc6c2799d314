"""How `DiskStore` reads chunks: whole or layer by layer, always checked, always counted."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.stores import directory
from kvcache_rag.stores.base import Hit
from kvcache_rag.stores.checks import check_key, check_out
from kvcache_rag.stores.chunkfile import empty_chunk, file_spec
from kvcache_rag.stores.chunkio import begin, load
from kvcache_rag.stores.filetimes import mark_used
from kvcache_rag.stores.layerfile import LayerFile, is_layered

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from kvcache_rag.chunk import ChunkKey, ChunkKV, ChunkLayout
    from kvcache_rag.codecs import Codec
    from kvcache_rag.stores.counters import Counters


@dataclass(frozen=True, eq=False)
class FileReading:
    """Reads the files of one folder.

    Attributes:
        root: The folder.
        codec: The codec of its files.
        counters: Where every reading is counted.
        tier: Name under which hits are counted.
        ttl: Seconds from the writing of a chunk to its end, None for no end.
    """

    root: str
    codec: Codec
    counters: Counters
    tier: str
    ttl: float | None

    def get(self, key: ChunkKey, layout: ChunkLayout, out: ChunkKV | None) -> Hit:
        """As `ChunkStore.get`."""
        started = time.perf_counter()
        spec = file_spec(check_key(key), layout, self.codec)
        if out is None:
            out = empty_chunk(key, layout)
        else:
            check_out(key, layout, out)
        with self._counted(key):
            status = load(self.root, key, spec, self.codec, out, self.check_age)
        self._found(key, status, time.perf_counter() - started)
        return Hit(out, self.tier)

    def reader(self, key: ChunkKey, layout: ChunkLayout) -> LayerFile | None:
        """As `ChunkStore.reader`."""
        started = time.perf_counter()
        spec = file_spec(check_key(key), layout, self.codec)
        if not is_layered(layout, self.codec):
            return None
        with self._counted(key):
            descriptor, status = begin(self.root, key, self.check_age)
            opening = time.perf_counter() - started

            @contextmanager
            def guard() -> Iterator[None]:
                with self._counted(key), directory.quarantining(self.root, key, status):
                    yield

            with directory.quarantining(self.root, key, status):
                return LayerFile(
                    descriptor,
                    status.st_size,
                    spec,
                    self.tier,
                    guard,
                    lambda seconds: self._found(key, status, opening + seconds),
                )

    def check_age(self, status: os.stat_result) -> None:
        """Raise `FileNotFoundError` for a file that is too old."""
        if self.ttl is not None and status.st_mtime <= time.time() - self.ttl:
            raise FileNotFoundError(f"it was written more than {self.ttl} seconds ago")

    def _counted(self, key: ChunkKey) -> AbstractContextManager[None]:
        return self.counters.reading(
            f"the file of chunk {key.digest} was put aside", f"chunk {key.digest} is not on disk"
        )

    def _found(self, key: ChunkKey, status: os.stat_result, seconds: float) -> None:
        path = directory.stem_path(self.root, key) + directory.SUFFIX
        mark_used(path, status, dated=self.ttl is not None)
        self.counters.hit(self.tier, status.st_size, seconds)
