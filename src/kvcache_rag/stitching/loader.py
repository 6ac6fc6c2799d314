"""A chunk of a prompt, and what bringing a prompt's context into a buffer gave."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.prefill import PendingChunk, Prefiller, batches
from kvcache_rag.stitching.costs import Costs
from kvcache_rag.stitching.overlap import Part, Placing, PlacingAhead, cross
from kvcache_rag.stitching.stitch import stitch
from kvcache_rag.stores import MemoryStore
from kvcache_rag.stores.base import ResidentChunk
from kvcache_rag.stores.device import in_main_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_rag.kv.buffer import KVBuffer
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.models.cache import Loading
    from kvcache_rag.models.rotation import ModelLayout
    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag.stores.base import ChunkReader


@dataclass(frozen=True)
class ContextChunk:
    """A chunk of a prompt.

    Attributes:
        key: Its address.
        ids: Its token ids; None when it is loaded by reference, without tokenising.
        text: Its text, for a reference that has gone meanwhile; None when only the key is known.
        is_joint: Whether it is several chunks computed together (`combination`).
    """

    key: ChunkKey
    ids: tuple[int, ...] | None
    text: str | None = None
    is_joint: bool = False

    def __len__(self) -> int:
        """Number of tokens."""
        return self.key.tokens if self.ids is None else len(self.ids)


@dataclass(frozen=True)
class LoadedContext:
    """One row of a buffer, filled and stitched.

    Attributes:
        ids: Ids of prefix and chunks.
        load: Seconds for reading and computing.
        stitch: Seconds for turning keys.
        hits: Chunks found, per tier.
        misses: Chunks computed.
        reused_tokens: Tokens of the chunks found.
        prefilled_tokens: Tokens of the chunks computed, missing or declined.
        declined: Chunks that were cached and computed all the same, per reason.
        ahead: Brings what is not there yet; whoever asked for that closes it.  None when everything
            lies in its place.
    """

    ids: tuple[int, ...]
    load: float
    stitch: float
    hits: Mapping[str, int]
    misses: int
    reused_tokens: int
    prefilled_tokens: int
    declined: Mapping[str, int] = field(default_factory=dict)
    ahead: Loading | None = None


# Open and read cached chunks, noting what every reading took.


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


# Bring the cached chunks of a prompt into one buffer, computing on the spot what is not cached.
#
# A partial hit never fails a question and never stays a miss: what was missing is prefilled, used
# and stored. What is cached but slower to load than to prefill is prefilled too (`costs`).


if TYPE_CHECKING:
    Fill = Callable[[Sequence[PendingChunk]], dict[ChunkKey, ChunkKV]]

__all__ = ["ContextChunk", "ContextLoader", "LoadedContext"]

_MOST_OPEN = 64  # files that one prompt opens at once


@dataclass(frozen=True, eq=False)
class ContextLoader:
    """Fills rows of a buffer from a store.

    Attributes:
        prefiller: Computes what is missing; knows store, prefix and model.
        renderer: Tokenises the text of a reference that has gone.
        costs: What loading and prefilling take on this machine.
        combinations: Loads chunks that were computed together, which have a store of their own.
    """

    prefiller: Prefiller
    renderer: PromptRenderer
    costs: Costs = field(default_factory=Costs)
    combinations: ContextLoader | None = None

    @property
    def _fetcher(self) -> Fetcher:
        return Fetcher(self.prefiller, self.costs)

    @property
    def _layout(self) -> ModelLayout:
        return self.prefiller.model.measured

    def ids(self, chunk: ContextChunk) -> tuple[int, ...]:
        """Ids of a chunk, from its text or from the store.

        Raises:
            ChunkNotFoundError: If only its key is known and the store does not hold it.
        """
        if chunk.ids is not None:
            return chunk.ids
        if chunk.text is not None:
            return self.renderer.chunk_ids(chunk.text)
        found = self.prefiller.store.get(chunk.key, self._layout.chunk_layout).chunk
        ids = tuple(found.tokens.tolist())
        if self.prefiller.key(ids) != chunk.key:  # as in `Fetcher`
            self.prefiller.store.delete(chunk.key)
            raise ChunkNotFoundError(f"chunk {chunk.key.digest[:12]} is not what it should be")
        return ids

    def from_text(self, chunk: ContextChunk) -> ContextChunk:
        """A reference as what its text is; without a text it stays a reference."""
        if chunk.text is None:
            return chunk
        ids = self.renderer.chunk_ids(chunk.text)
        return ContextChunk(self.prefiller.key(ids), ids, chunk.text)

    def passed(self, tokens: int, seconds: float) -> None:
        """Note that the model read `tokens` tokens of a question in at most `seconds`."""
        # A wider copy, in which chunks are prefilled, is slower than the model that answers.
        if self.prefiller.dtype in (None, self.prefiller.model.dtype):
            self.costs.passed(tokens, seconds)

    def load(
        self,
        buffer: KVBuffer,
        row: int,
        offset: int,
        chunks: Sequence[ContextChunk],
        scheme: PositionScheme,
        adjacent: bool = False,
        *,
        ahead: bool = False,
    ) -> LoadedContext:
        """Fill a row from `offset` on with prefix and chunks, and turn their keys to their places.

        Args:
            buffer: With the model's layout.
            row: Which row.
            offset: Place of the first token (the padding in front of it, in a batch).
            chunks: In prompt order.
            scheme: Where the chunks stand.
            adjacent: Whether the query stands right behind the highest position (see `stitch`).
            ahead: Whether it may return before everything is there, when that is sooner.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
            UnsupportedModelError: If chunks would have to move and the model's keys cannot.
        """
        if self.combinations is not None and any(chunk.is_joint for chunk in chunks):
            return self.combinations.load(
                buffer, row, offset, chunks, scheme, adjacent, ahead=ahead
            )
        started = time.perf_counter()
        position = self.prefiller.position
        parts = self._views(buffer, row, offset, chunks)
        reasons = {one: why for one in dict.fromkeys(chunks) if (why := self.reason(one))}
        with ExitStack() as files:
            opened: dict[int, Opened | None] = {}
            is_near = in_main_memory(parts[0])
            if len(chunks) <= _MOST_OPEN:
                wanted = {i: one.key for i, one in enumerate(chunks) if one not in reasons}
                whole = not (is_near and ahead and self._fetcher.may_pay_ahead)
                opened = self._fetcher.open_all(wanted, files, kept_only=whole)
            readers = [one for one in opened.values() if one is not None]
            is_whole = 0 < len(readers) == len(chunks)
            if is_whole and not is_near:
                near = self._fetcher.parts(parts, readers)
                return self._fetcher.cross(
                    near, readers, scheme, started, adjacent=adjacent, ahead=ahead
                )
            if ahead and is_whole and self._fetcher.pays_ahead(readers):
                inputs = self._fetcher.parts(parts, readers)
                placing = Placing(self._layout, inputs, scheme, position, adjacent)
                found = self._fetcher.place_ahead(placing, readers, started)
                if found is not None:
                    files.pop_all()
                    return found
            context, sources = self._gathered(chunks, parts, reasons, opened)
        loaded = time.perf_counter()
        if is_near:
            stitch(self._layout, parts, scheme, position, adjacent=adjacent, sources=sources)
        else:  # the same in few calls
            kept = [sources.get(index) for index in range(len(parts))]
            cross(self._layout, kept, parts, scheme, position, adjacent=adjacent).close()
        turning = time.perf_counter() - loaded
        self.costs.turned(sum(part.nbytes for part in parts), turning)
        return replace(context, load=loaded - started, stitch=turning)

    def _gathered(
        self,
        chunks: Sequence[ContextChunk],
        parts: Sequence[ChunkKV],
        reasons: Mapping[ContextChunk, tuple[str, str]],
        opened: Mapping[int, Opened | None],
    ) -> tuple[LoadedContext, dict[int, ChunkKV]]:
        """Bring every chunk into the buffer, reading or computing it; nothing is turned.

        What is kept in memory is given back by the index of its part, to be copied and turned.
        """
        prefix = self.prefiller.prefix()
        sources = {} if prefix is None else {0: prefix}
        hits: Counter[str] = Counter()
        missing, declined = [], []
        for index, (chunk, view) in enumerate(zip(chunks, parts[1:], strict=True)):
            if chunk in reasons:
                declined.append((chunk, view))
                continue
            if index not in opened:
                tier = self._fetcher.fetch(chunk.key, view)
            else:
                tier = None
                if (found := opened[index]) is not None:
                    tier = self._fetcher.take(found, view, sources, index + 1)
            if tier is None:
                missing.append((chunk, view))
            else:
                hits[tier] += 1
        self._compute(missing, self.prefiller.fill_batch)
        self._compute(declined, self._without_storing)
        self.prefiller.model.narrow()  # after a trial, or a prefix that was not stored
        for chunk, view in declined:  # as after a load from there
            self.prefiller.store.promote(chunk.key, view, reasons[chunk][0])
        ids = [*self.prefiller.prefix_ids]
        for part in parts[1:]:
            ids += part.tokens.tolist()
        # A chunk may stand twice.
        computed = {chunk.key: len(chunk) for chunk, _ in missing}
        prefilled = sum(computed.values()) + sum(map(len, reasons))
        context = LoadedContext(
            ids=tuple(ids),
            load=0.0,
            stitch=0.0,
            hits=dict(hits),
            misses=len(computed),
            reused_tokens=sum(map(len, chunks)) - prefilled,
            prefilled_tokens=prefilled,
            declined=dict(Counter(why for _, why in reasons.values())),
        )
        return context, sources

    def _views(
        self, buffer: KVBuffer, row: int, offset: int, chunks: Sequence[ContextChunk]
    ) -> list[ChunkKV]:
        behind = len(self.prefiller.prefix_ids)
        tokens = torch.tensor(self.prefiller.prefix_ids, dtype=torch.int32)
        views = [buffer.view(row, offset, offset + behind, local_start=0, tokens=tokens)]
        place = offset + behind
        for chunk in chunks:
            ids = torch.empty(len(chunk), dtype=torch.int32)
            views.append(
                buffer.view(row, place, place + len(chunk), local_start=behind, tokens=ids)
            )
            place += len(chunk)
        return views

    def reason(self, chunk: ContextChunk) -> tuple[str, str] | None:
        """The slow tier and why a chunk it holds is rather prefilled; None to load it."""
        nbytes = self._layout.chunk_layout.nbytes(len(chunk))
        trial = self.costs.trial(nbytes, len(chunk))
        if trial:
            started = self.costs.clock()
            self.prefiller.compute([[0] * trial])
            self.costs.passed(trial, self.costs.clock() - started)
        if not self.costs.is_slow(nbytes, len(chunk)):
            return None
        tier = self.prefiller.store.locate(chunk.key)
        if tier is None or not self._is_computable(chunk):
            return None
        why = self.costs.verdict(tier, nbytes, len(chunk))
        return (tier, why) if why else None

    def _is_computable(self, chunk: ContextChunk) -> bool:
        try:
            return bool(self._known_ids(chunk))
        except ChunkNotFoundError:
            return False

    def _compute(self, missing: Sequence[tuple[ContextChunk, ChunkKV]], fill: Fill) -> None:
        if not missing:
            return
        pending = {
            chunk.key: PendingChunk(chunk.key, self._known_ids(chunk)) for chunk, _ in missing
        }
        computed: dict[ChunkKey, ChunkKV] = {}
        try:
            for batch in batches(list(pending.values()), len(self.prefiller.prefix_ids)):
                started = self.costs.clock()
                computed.update(fill(batch))
                tokens = sum(len(one.ids) for one in batch if one.key in computed)
                self.costs.passed(tokens, self.costs.clock() - started)
            self._place(missing, pending, computed)
        finally:
            self.prefiller.model.narrow()

    def _without_storing(self, batch: Sequence[PendingChunk]) -> dict[ChunkKey, ChunkKV]:
        """Compute chunks that are cached."""
        started = self.costs.clock()
        chunks = self.prefiller.compute([one.ids for one in batch])
        self.costs.prefilled([len(one.ids) for one in batch], self.costs.clock() - started)
        return {one.key: chunk for one, chunk in zip(batch, chunks, strict=True)}

    def _place(
        self,
        missing: Sequence[tuple[ContextChunk, ChunkKV]],
        pending: dict[ChunkKey, PendingChunk],
        computed: dict[ChunkKey, ChunkKV],
    ) -> None:
        for chunk, view in missing:
            view.tokens.copy_(torch.tensor(pending[chunk.key].ids, dtype=torch.int32))
            if chunk.key in computed:
                view.copy_from(computed[chunk.key])
            elif self._fetcher.fetch(chunk.key, view) is None:  # another stored it; it is gone
                view.copy_from(self.prefiller.compute([pending[chunk.key].ids])[0])
                view.tokens.copy_(torch.tensor(pending[chunk.key].ids, dtype=torch.int32))

    def _known_ids(self, chunk: ContextChunk) -> tuple[int, ...]:
        if chunk.ids is not None:
            return chunk.ids
        ids = self.renderer.chunk_ids(chunk.text) if chunk.text is not None else ()
        if self.prefiller.key(ids) != chunk.key:
            raise ChunkNotFoundError(
                f"chunk {chunk.key.digest[:12]} is not in the store any more; pass its text "
                "instead of its key"
            )
        return ids
