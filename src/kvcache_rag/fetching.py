"""Open and read cached chunks, noting what every reading took."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from kvcache_rag.crossing import cross
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.loaded import LoadedContext
from kvcache_rag.placing import Part, PlacingAhead
from kvcache_rag.stores import MemoryStore
from kvcache_rag.stores.reader import ResidentChunk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import ExitStack

    from kvcache_rag.chunk import ChunkKey, ChunkKV
    from kvcache_rag.costs import Costs
    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.models.arrival import Loading
    from kvcache_rag.placing import Placing
    from kvcache_rag.prefill import Prefiller
    from kvcache_rag.stores.reader import ChunkReader

# Seconds of loading and turning from which a thread of its own is worth what it costs the model: it
# takes turns with it at Python and at the memory.
_WORTH_A_THREAD = 0.008
# Bytes per second below which whoever loads mostly waits, so that no processor has to be free.
_WAITING = 5e8


@dataclass(frozen=True, eq=False)
class Opened:
    """A chunk that is open for reading.

    Attributes:
        key: Its address.
        reader: Reads it.
        seconds: What opening took.
    """

    key: ChunkKey
    reader: ChunkReader
    seconds: float


@dataclass(frozen=True, eq=False)
class Fetcher:
    """Reads the chunks of one engine's store.

    Attributes:
        prefiller: Knows the store and the keys.
        costs: Where it is noted what loading took.
    """

    prefiller: Prefiller
    costs: Costs

    def open(self, key: ChunkKey) -> Opened | None:
        """Open a chunk to be read by layers; None where only `fetch` can read or judge it.

        Raises:
            ChunkNotFoundError: If it is not held, or is damaged.
        """
        started = self.costs.clock()
        layout = self.prefiller.model.measured.chunk_layout
        try:
            reader = self.prefiller.store.reader(key, layout)
        except ChunkNotFoundError:
            self._missed(key, started)
            raise
        if reader is None:
            return None
        if self.prefiller.key(reader.tokens.tolist()) != key:
            reader.close()  # `fetch` finds out what is wrong with it
            return None
        return Opened(key, reader, self.costs.clock() - started)

    def open_all(
        self, keys: Mapping[int, ChunkKey], files: ExitStack, *, kept_only: bool = False
    ) -> dict[int, Opened | None]:
        """What of `keys` can be read by layers, None for what is missing; `files` closes it.

        With `kept_only` only what is kept in memory: a file goes to a device whole, by `fetch`.
        """
        opened: dict[int, Opened | None] = {}
        first = getattr(self.prefiller.store, "tiers", (self.prefiller.store,))[0]
        if kept_only and not isinstance(first, MemoryStore):
            return opened
        for index, key in keys.items():
            try:
                found = self.open(key)
            except ChunkNotFoundError:
                opened[index] = None
                continue
            if found is None:
                continue
            files.callback(found.reader.close)
            if not kept_only or isinstance(found.reader, ResidentChunk):
                opened[index] = found
        return opened

    def parts(self, views: Sequence[ChunkKV], opened: Sequence[Opened]) -> list[Part]:
        """Prefix and open chunks with the views where they go, whose ids are filled in."""
        prefix = self.prefiller.prefix()
        parts = [] if prefix is None else [Part(ResidentChunk(prefix, ""), views[0])]
        for view, one in zip(views[1:], opened, strict=True):
            view.tokens.copy_(one.reader.tokens)
            parts.append(Part(one.reader, view))
        return parts

    def place_ahead(
        self, placing: Placing, opened: Sequence[Opened], started: float
    ) -> LoadedContext | None:
        """Begin to bring a context of open chunks alone into its buffer, beside what follows.

        Args:
            placing: Of the prefix and these chunks.
            opened: The chunks.
            started: `time.perf_counter()` when loading began.

        Returns:
            None if there is no thread to be had; nothing was read then.
        """
        thread = PlacingAhead.start(placing, partial(self._note, opened, placing))
        if thread is None:
            return None
        self.prefiller.model.narrow()  # after a trial, or a prefix that was not stored
        return self._found(opened, time.perf_counter() - started, 0.0, thread)

    def cross(
        self,
        parts: Sequence[Part],
        opened: Sequence[Opened],
        scheme: PositionScheme,
        started: float,
        *,
        adjacent: bool,
        ahead: bool,
    ) -> LoadedContext:
        """Bring a context of chunks that are kept in memory into its buffer on a device.

        Args:
            parts: The prefix and these chunks.
            opened: The chunks.
            scheme: Where they shall stand.
            started: `time.perf_counter()` when loading began.
            adjacent: Whether the query stands right behind the highest position.
            ahead: Whether it may return before everything is there.
        """
        kept = [one.reader.chunk for one in parts if isinstance(one.reader, ResidentChunk)]
        places = [one.place for one in parts]
        layout, position = self.prefiller.model.measured, self.prefiller.position
        arrivals = cross(layout, kept, places, scheme, position, adjacent=adjacent)
        if not ahead:
            arrivals.close()
        self.prefiller.model.narrow()  # after a prefix that was not stored
        seconds = time.perf_counter() - started
        return self._found(opened, seconds, 0.0, arrivals if ahead else None)

    def _found(
        self, opened: Sequence[Opened], load: float, stitch: float, ahead: Loading | None
    ) -> LoadedContext:
        tokens = [one.reader.tokens for one in opened]
        return LoadedContext(
            ids=(*self.prefiller.prefix_ids, *chain.from_iterable(one.tolist() for one in tokens)),
            load=load,
            stitch=stitch,
            hits=dict(Counter(one.reader.tier for one in opened)),
            misses=0,
            reused_tokens=sum(map(len, tokens)),
            prefilled_tokens=0,
            ahead=ahead,
        )

    def fetch(self, key: ChunkKey, view: ChunkKV) -> str | None:
        """Read a chunk into its place; the tier it came from, or None for a miss."""
        started = self.costs.clock()
        try:
            hit = self.prefiller.store.get(
                key, self.prefiller.model.measured.chunk_layout, out=view
            )
        except ChunkNotFoundError:
            self._missed(key, started)
            return None
        self.costs.loaded(hit.tier, view.nbytes, self.costs.clock() - started)
        # The key is the hash of these ids, so this holds even for a file that lies about itself.
        if self.prefiller.key(view.tokens.tolist()) != key:
            self.prefiller.store.delete(key)
            return None
        return hit.tier

    def take(
        self, opened: Opened, view: ChunkKV, sources: dict[int, ChunkKV], index: int
    ) -> str | None:
        """Like `fetch`, of an open chunk, which is closed; what is in memory goes to `sources`."""
        started = self.costs.clock()
        reader = opened.reader
        try:
            if isinstance(reader, ResidentChunk):
                sources[index] = reader.chunk
            else:
                reader.read(view)
            reader.finish()
        except ChunkNotFoundError:
            return None
        finally:
            reader.close()
        view.tokens.copy_(reader.tokens)
        seconds = opened.seconds + self.costs.clock() - started
        self.costs.loaded(reader.tier, view.nbytes, seconds)
        return reader.tier

    @property
    def may_pay_ahead(self) -> bool:
        """Whether it is worth the opening of files to find out whether loading ahead pays."""
        return _is_free() or self.costs.waits

    def pays_ahead(self, opened: Sequence[Opened]) -> bool:
        """Whether to load beside the forward pass: it takes long enough, and disturbs nobody.

        It disturbs nobody where the model leaves a processor free, and where loading is slow enough
        to be mostly waiting.  Until both tier and machine were measured, nothing is loaded ahead.
        """
        total, nbytes = 0.0, 0
        for one in opened:
            seconds = self.costs.load_seconds(one.reader.tier, one.reader.nbytes)
            if seconds is None:
                return False
            total += seconds
            nbytes += one.reader.nbytes
        total += self.costs.turn_seconds(nbytes)
        return total >= _WORTH_A_THREAD and (_is_free() or nbytes < _WAITING * total)

    def _note(self, opened: Sequence[Opened], placing: Placing) -> None:
        """Note what a finished placing of these chunks (the last of its parts) took."""
        reading = placing.reading[len(placing.reading) - len(opened) :]
        for one, seconds in zip(opened, reading, strict=True):
            self.costs.loaded(one.reader.tier, one.reader.nbytes, one.seconds + seconds)
        self.costs.turned(sum(one.reader.nbytes for one in opened), placing.turning)

    def _missed(self, key: ChunkKey, started: float) -> None:
        seconds = self.costs.clock() - started
        held = self.prefiller.store.locate(key) if self.costs.is_noticed(seconds) else None
        if held is not None:
            nbytes = self.prefiller.model.measured.chunk_layout.nbytes(key.tokens)
            self.costs.loaded(held, nbytes, seconds)


def _is_free() -> bool:
    """Whether the model leaves a processor free of those that this process may use."""
    return torch.get_num_threads() < _processors()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
