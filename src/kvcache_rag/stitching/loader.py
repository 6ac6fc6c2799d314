"""Find the chunks of a prompt's context: load what is cached, compute what is not.

A partial hit never fails a question and never stays a miss: what was missing is prefilled, used and
stored.  What is cached but slower to load than to prefill is prefilled too (`costs`).  Where the
chunks go is up to the caller: copied to their places in a prompt's buffer and rotated there
(`ContextLoader.load`), or left where they lie (`ContextLoader.hold`).
"""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import torch

from kvcache_rag.codecs import EncodedChunk
from kvcache_rag.errors import ChunkNotFoundError, CorruptChunkError, UntrustedChunkError
from kvcache_rag.metrics import Miss
from kvcache_rag.prefill import ContextChunk, Prefiller, batches
from kvcache_rag.stitching.costs import Costs
from kvcache_rag.stitching.overlap import Part, Placing, PlacingAhead, cross
from kvcache_rag.stitching.stitch import stitch
from kvcache_rag.stores import MemoryStore
from kvcache_rag.stores.base import ResidentChunk
from kvcache_rag.stores.device import in_main_memory, moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from kvcache_rag.codecs import Room
    from kvcache_rag.kv.buffer import KVBuffer
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.metrics import MissReason
    from kvcache_rag.models.cache import Loading
    from kvcache_rag.models.rotation import ModelLayout
    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag.stores.base import ChunkReader, EncodedHit, Hit

    Fill = Callable[[Sequence[ContextChunk]], dict[ChunkKey, ChunkKV]]

# Seconds of loading and rotating from which a thread of its own is worth what it costs the model:
# it takes turns with it at Python and at the memory.
_WORTH_A_THREAD = 0.008

# Bytes per second below which whoever loads mostly waits, so that no processor has to be free.
_WAITING = 5e8

_UNUSABLE: Final[Mapping[type[ChunkNotFoundError], MissReason]] = {
    CorruptChunkError: "damaged",
    UntrustedChunkError: "not signed",
}

_MOST_OPEN = 64  # files that one prompt opens at once

SharedChunks: TypeAlias = "dict[ChunkKey, tuple[ChunkKV, str]]"
"""Chunks that the prompts of one batch attend to in place, and the tier that each came from."""

SharedEncoded: TypeAlias = "dict[ChunkKey, tuple[EncodedChunk, str]]"
"""The same of chunks in the form of the store's codec."""


@dataclass(frozen=True)
class LoadedContext:
    """What bringing the context of one prompt gave and cost.

    Attributes:
        ids: Ids of prefix and chunks.
        load: Seconds for reading and computing.
        stitch: Seconds for rotating keys.
        hits: Chunks found, per tier.
        misses: Chunks computed.
        reused_tokens: Tokens of the chunks found.
        prefilled_tokens: Tokens of the chunks computed, missing or declined.
        declined: Chunks that were cached and computed all the same, per reason.
        ahead: Brings what is not there yet; whoever asked for that closes it.  None when everything
            lies in its place.
        missed: The chunks computed because they were not cached, and why.
        begun: `time.perf_counter()` when it began; `load` and then `stitch` follow.
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
    missed: tuple[Miss, ...] = ()
    begun: float = 0.0


@dataclass(frozen=True, eq=False)
class OpenChunk:
    """A cached chunk that is open for reading.

    Attributes:
        key: Its address.
        reader: Reads it.
        seconds: What opening took.
    """

    key: ChunkKey
    reader: ChunkReader
    seconds: float


class Destination(Protocol):
    """Where the chunks of one prompt's context go; `index` counts them in prompt order."""

    def load(self, index: int, chunk: ContextChunk) -> str | None:
        """Bring a cached chunk; the tier it came from, None for a miss."""

    def take(self, index: int, chunk: ContextChunk, computed: ChunkKV) -> None:
        """Bring a chunk that was computed just now."""

    def tokens(self, index: int, chunk: ContextChunk) -> Tensor:
        """Token ids of a chunk that was brought, `(tokens,)` int32."""


@dataclass(frozen=True, eq=False)
class ContextLoader:
    """Finds the chunks of prompts in one store, and computes those that are missing.

    Attributes:
        prefiller: Computes what is missing; knows store, prefix and model.
        renderer: Tokenises the text of a reference that has gone.
        costs: What loading and prefilling take on this machine.
        combinations: Loads chunks that were computed together, which have a store of their own.
        unusable: How reading failed for chunks of the prompt that is brought.
    """

    prefiller: Prefiller
    renderer: PromptRenderer
    costs: Costs = field(default_factory=Costs)
    combinations: ContextLoader | None = None
    unusable: dict[ChunkKey, type[ChunkNotFoundError]] = field(default_factory=dict)

    def of(self, chunks: Iterable[ContextChunk]) -> ContextLoader:
        """Who loads these chunks of one prompt: combinations have a loader of their own."""
        if self.combinations is not None and any(chunk.is_joint for chunk in chunks):
            return self.combinations
        return self

    # ------------------------------------------------------------------ ids and texts

    def ids(self, chunk: ContextChunk) -> tuple[int, ...]:
        """Ids of a chunk, from its text or from the store.

        Raises:
            ChunkNotFoundError: If only its key is known and the store does not hold it.
        """
        if chunk.ids:
            return chunk.ids
        if chunk.text is not None:
            return self.renderer.chunk_ids(chunk.text)
        return self._stored_ids(chunk.key)

    def known(self, chunk: ContextChunk) -> ContextChunk:
        """A chunk with its ids; a reference that has gone is what its text is.

        Raises:
            ChunkNotFoundError: If only its key is known and the store does not hold it.
        """
        if chunk.ids:
            return chunk
        computable = self._computable(chunk)
        if computable is not None:
            return computable
        try:
            return replace(chunk, ids=self._stored_ids(chunk.key))
        except ChunkNotFoundError as error:
            if chunk.text is None:
                raise _gone(chunk) from error
            return self.from_text(chunk)

    def from_text(self, chunk: ContextChunk) -> ContextChunk:
        """A reference as what its text is; without a text it stays a reference."""
        if chunk.text is None:
            return chunk
        ids = self.renderer.chunk_ids(chunk.text)
        key = self.prefiller.key(ids)
        why = chunk.why if key == chunk.key else "other text"
        return ContextChunk(key, ids, chunk.text, place=chunk.place, why=why)

    def _computable(self, chunk: ContextChunk) -> ContextChunk | None:
        """A chunk with the ids that its key stands for; None if the store alone knows them."""
        if chunk.ids:
            return chunk
        written = self.from_text(chunk)
        return written if written.ids and written.key == chunk.key else None

    def _stored_ids(self, key: ChunkKey) -> tuple[int, ...]:
        # Nothing of this is noted in `costs`: whoever asks may not hold the model.
        stored = self.prefiller.store.get(key, self.prefiller.layout).chunk
        if not self._is(key, stored.tokens):
            raise ChunkNotFoundError(f"chunk {key.digest[:12]} is not what it should be")
        return tuple(stored.tokens.tolist())

    def _is(self, key: ChunkKey, tokens: Tensor) -> bool:
        """Whether ids are those of a key; if not, what the store holds is dropped.

        The key is the hash of the ids, so this holds even for a file that lies about itself.
        """
        if self.prefiller.key(tokens.tolist()) == key:
            return True
        self.prefiller.store.delete(key)
        self.unusable[key] = CorruptChunkError
        return False

    # ------------------------------------------------------------------ where the chunks go

    def load(
        self,
        buffer: KVBuffer,
        chunks: Sequence[ContextChunk],
        scheme: PositionScheme,
        adjacent: bool = False,
        *,
        ahead: bool = False,
    ) -> LoadedContext:
        """Fill a buffer with prefix and chunks, and rotate their keys to their places.

        Args:
            buffer: Of one row, with the model's layout.
            chunks: In prompt order, all of this loader (see `of`).
            scheme: Where the chunks stand.
            adjacent: Whether the query stands right behind the highest position (see `stitch`).
            ahead: Whether it may return before everything is there, when that is sooner.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
            UnsupportedModelError: If chunks would have to move and the model's keys cannot.
        """
        started = time.perf_counter()
        parts = self._views(buffer, chunks)  # the prefix, also an empty one, then the chunks
        declined = self._declined(chunks)
        is_near = in_main_memory(parts[0])
        with ExitStack() as files:
            may_wait = is_near and ahead and (_is_free() or self.costs.waits)
            opened = self._open_all(chunks, declined, files, kept_only=not may_wait)
            layered = self._in_layers(
                parts, opened, scheme, started, adjacent=adjacent, ahead=ahead, is_near=is_near
            )
            if layered is not None:
                if layered.ahead is not None:
                    files.pop_all()
                return layered
            prefix = self.prefiller.prefix()
            target = _InBuffer(self, parts[1:], opened, {} if prefix is None else {0: prefix})
            context = self._bring(chunks, target, declined)
        loaded = time.perf_counter()
        layout, position, sources = self._layout, self.prefiller.position, target.sources
        if is_near:
            stitch(layout, parts, scheme, position, adjacent=adjacent, sources=sources)
        else:  # the same in few calls
            kept = [sources.get(index) for index in range(len(parts))]
            cross(layout, kept, parts, scheme, position, adjacent=adjacent).close()
        rotating = time.perf_counter() - loaded
        self.costs.rotated(sum(part.nbytes for part in parts), rotating)
        return replace(context, load=loaded - started, stitch=rotating, begun=started)

    def hold(
        self, chunks: Sequence[ContextChunk], shared: SharedChunks
    ) -> tuple[LoadedContext, list[ChunkKV]]:
        """Find prefix and chunks where they lie, on the model's device.

        Args:
            chunks: In prompt order, all of this loader (see `of`).
            shared: Of other prompts of the batch; those of this one are added.

        Returns:
            What it cost, and prefix (if any) and chunks in prompt order, which others share.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
        """
        started = time.perf_counter()
        prefix = self.prefiller.prefix()
        fresh = [chunk for chunk in chunks if chunk.key not in shared]
        context = self._bring(chunks, _InPlace(self, shared), self._declined(fresh))
        members = [] if prefix is None else [moved(prefix, self.prefiller.model.device)]
        members += [shared[chunk.key][0] for chunk in chunks]
        return replace(context, load=time.perf_counter() - started, begun=started), members

    def hold_encoded(
        self, chunks: Sequence[ContextChunk], shared: SharedEncoded, room: Room
    ) -> tuple[LoadedContext, list[EncodedChunk]]:
        """`hold` of chunks in the form of the store's codec, whose store gives them.

        Args:
            chunks: As for `hold`.
            shared: As for `hold`.
            room: Memory for those that are read for this batch alone.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more; a `CorruptChunkError`
                if one holds values that the codec cannot store.
        """
        started = time.perf_counter()
        prefix = self.prefiller.encoded_prefix()
        fresh = [chunk for chunk in chunks if chunk.key not in shared]
        context = self._bring(chunks, _Encoded(self, shared, room), self._declined(fresh))
        members = [] if prefix is None else [prefix]
        members += [shared[chunk.key][0] for chunk in chunks]
        return replace(context, load=time.perf_counter() - started, begun=started), members

    def _bring(
        self,
        chunks: Sequence[ContextChunk],
        target: Destination,
        declined: Mapping[ContextChunk, tuple[str, str]],
    ) -> LoadedContext:
        """Bring every chunk to where it goes, loading or computing it; nothing is rotated.

        Args:
            chunks: In prompt order.
            target: Where they go.
            declined: Cached chunks that are computed: the tier that holds each, and why.
        """
        hits: Counter[str] = Counter()
        missing: dict[ContextChunk, list[int]] = {}
        for index, chunk in enumerate(chunks):
            # A chunk may stand twice.
            if chunk in declined or chunk in missing:
                missing.setdefault(chunk, []).append(index)
            elif (tier := target.load(index, chunk)) is None:
                missing[chunk] = [index]
            else:
                hits[tier] += 1
        missed: Sequence[Miss] = ()
        if missing:
            missed = self._missed_of(missing, declined)
            self._fill(missing, target, declined)
        # (tokens,) int32 each
        tokens = [target.tokens(index, chunk) for index, chunk in enumerate(chunks)]
        return self._context(tokens, hits, missing, declined, missed)

    def _fill(
        self,
        missing: Mapping[ContextChunk, Sequence[int]],
        target: Destination,
        declined: Mapping[ContextChunk, tuple[str, str]],
    ) -> None:
        """Compute chunks, store those that are not held, and bring them to where they go."""
        chunks: dict[ChunkKey, ContextChunk] = {}
        for chunk in missing:
            computable = self._computable(chunk)
            if computable is None:
                raise _gone(chunk)
            chunks[chunk.key] = computable
        cached = {chunk.key: tier for chunk, (tier, _) in declined.items()}
        absent = [chunk for key, chunk in chunks.items() if key not in cached]
        computed = self._compute(absent, self.prefiller.fill_batch)
        computed |= self._compute([chunks[key] for key in cached], self._without_storing)
        for key, tier in cached.items():  # as after a load from there
            self.prefiller.store.promote(key, computed[key], tier)
        for chunk, indices in missing.items():
            for index in indices:
                if chunk.key in computed:
                    target.take(index, chunk, computed[chunk.key])
                elif target.load(index, chunk) is None:
                    # Another process stored it; it is gone again.
                    lost = self.prefiller.compute([chunks[chunk.key].ids])[0]
                    target.take(index, chunk, lost)

    def _compute(self, chunks: Sequence[ContextChunk], fill: Fill) -> dict[ChunkKey, ChunkKV]:
        computed: dict[ChunkKey, ChunkKV] = {}
        for batch in batches(chunks, len(self.prefiller.prefix_ids)):
            started = self.costs.clock()
            filled = fill(batch)
            tokens = sum(chunk.key.tokens for chunk in batch if chunk.key in filled)
            self.costs.passed(tokens, self.costs.clock() - started)
            computed |= filled
        return computed

    def _without_storing(self, batch: Sequence[ContextChunk]) -> dict[ChunkKey, ChunkKV]:
        """Compute chunks that are cached."""
        started = self.costs.clock()
        chunks = self.prefiller.compute([chunk.ids for chunk in batch])
        seconds = self.costs.clock() - started
        self.costs.prefilled([chunk.key.tokens for chunk in batch], seconds)
        return {chunk.key: computed for chunk, computed in zip(batch, chunks, strict=True)}

    def _context(
        self,
        tokens: Sequence[Tensor],
        hits: Mapping[str, int],
        missing: Iterable[ContextChunk] = (),
        declined: Mapping[ContextChunk, tuple[str, str]] | None = None,
        missed: Sequence[Miss] = (),
    ) -> LoadedContext:
        reasons = declined or {}
        prefilled = sum(map(attrgetter("tokens"), set(map(attrgetter("key"), missing))))
        ids = chain.from_iterable(part.tolist() for part in tokens)
        return LoadedContext(
            ids=(*self.prefiller.prefix_ids, *ids),
            load=0.0,
            stitch=0.0,
            hits=dict(hits),
            misses=len(missed),
            reused_tokens=sum(map(len, tokens)) - prefilled,
            prefilled_tokens=prefilled,
            declined=dict(Counter(why for _, why in reasons.values())),
            missed=tuple(missed),
        )

    def _missed_of(
        self, missing: Iterable[ContextChunk], declined: Iterable[ContextChunk]
    ) -> list[Miss]:
        """What is not cached, and why; before it is computed, and stored again."""
        cached = set(map(attrgetter("key"), declined))
        stored = set(self.prefiller.stored)
        missed: dict[ChunkKey, Miss] = {}
        for chunk in missing:
            key = chunk.key
            if key not in cached and key not in missed:
                known: MissReason | None = _UNUSABLE.get(self.unusable.get(key, ChunkNotFoundError))
                guess: MissReason = "evicted" if key in stored else "not prefilled"
                missed[key] = Miss(chunk.place, key.tokens, known or chunk.why or guess)
        self.unusable.clear()
        return [*missed.values()]

    def _views(self, buffer: KVBuffer, chunks: Sequence[ContextChunk]) -> list[ChunkKV]:
        """Where prefix and chunks go; the ids of the chunks are not filled in."""
        behind = place = len(self.prefiller.prefix_ids)
        tokens = torch.tensor(self.prefiller.prefix_ids, dtype=torch.int32)  # (prefix,)
        views = [buffer.view(0, 0, place, local_start=0, tokens=tokens)]  # empty without a prefix
        for chunk in chunks:
            stop = place + chunk.key.tokens
            ids = torch.empty(chunk.key.tokens, dtype=torch.int32)  # (tokens,)
            views.append(buffer.view(0, place, stop, local_start=behind, tokens=ids))
            place = stop
        return views

    # ------------------------------------------------------------------ load or compute?

    def passed(self, tokens: int, seconds: float) -> None:
        """Note that the model read `tokens` tokens of a question in at most `seconds`."""
        self.costs.passed(tokens, seconds)

    def foreseen(self, chunks: Sequence[ContextChunk]) -> tuple[str, ...]:
        """Per chunk the tier from which it would be loaded, "" for one that would be computed.

        As loading decides, but on a copy of what was measured, and nothing is tried out.
        """
        quiet, layout = replace(self, costs=copy.deepcopy(self.costs)), self.prefiller.layout
        tiers: dict[ChunkKey, str] = {}
        for chunk in chunks:
            if chunk.key not in tiers:
                is_declined = quiet._objection(chunk, layout.nbytes(chunk.key.tokens)) is not None
                tier = None if is_declined else self.prefiller.store.locate(chunk.key)
                tiers[chunk.key] = tier or ""
        return tuple(tiers[chunk.key] for chunk in chunks)

    def _declined(self, chunks: Iterable[ContextChunk]) -> dict[ContextChunk, tuple[str, str]]:
        """Cached chunks that are rather prefilled: the slow tier that holds each, and why."""
        declined, layout = {}, self.prefiller.layout
        for chunk in dict.fromkeys(chunks):
            nbytes = layout.nbytes(chunk.key.tokens)
            trial = self.costs.trial(nbytes, chunk.key.tokens)
            if trial:
                started = self.costs.clock()
                # For the clock alone; any ids will do.
                self.prefiller.compute([[0] * trial])
                self.costs.passed(trial, self.costs.clock() - started)
            objection = self._objection(chunk, nbytes)
            if objection is not None:
                declined[chunk] = objection
        return declined

    def _objection(self, chunk: ContextChunk, nbytes: int) -> tuple[str, str] | None:
        if not self.costs.is_slow(nbytes, chunk.key.tokens):
            return None
        tier = self.prefiller.store.locate(chunk.key)
        if tier is None or self._computable(chunk) is None:
            return None
        why = self.costs.verdict(tier, nbytes, chunk.key.tokens)
        return (tier, why) if why else None

    @property
    def _layout(self) -> ModelLayout:
        return self.prefiller.model.measured

    # ------------------------------------------------------------------ reading the store

    def get(self, key: ChunkKey, view: ChunkKV | None = None) -> Hit | None:
        """A cached chunk, read into a view or as the store keeps it; None for a miss."""
        started = self.costs.clock()
        try:
            hit = self.prefiller.store.get(key, self.prefiller.layout, out=view)
        except ChunkNotFoundError as error:
            self.unusable[key] = type(error)
            self._missed(key, started)
            return None
        self.costs.loaded(hit.tier, hit.chunk.nbytes, self.costs.clock() - started)
        return hit if self._is(key, hit.chunk.tokens) else None

    def encoded(self, key: ChunkKey, room: Room) -> EncodedHit | None:
        """A cached chunk in the form of the store's codec, perhaps in `room`; None for a miss."""
        started = self.costs.clock()
        try:
            hit = self.prefiller.store.encoded(key, self.prefiller.layout, room)
        except ChunkNotFoundError as error:
            self.unusable[key] = type(error)
            self._missed(key, started)
            return None
        nbytes = self.prefiller.layout.nbytes(key.tokens)
        self.costs.loaded(hit.tier, nbytes, self.costs.clock() - started)
        return hit if self._is(key, hit.chunk.tokens) else None

    def open(self, key: ChunkKey) -> OpenChunk | None:
        """Open a chunk to be read by layers; None where only `get` can read or judge it.

        Raises:
            ChunkNotFoundError: If it is not held, or is damaged.
        """
        started = self.costs.clock()
        try:
            reader = self.prefiller.store.reader(key, self.prefiller.layout)
        except ChunkNotFoundError as error:
            self.unusable[key] = type(error)
            self._missed(key, started)
            raise
        if reader is None:
            return None
        if self.prefiller.key(reader.tokens.tolist()) != key:
            reader.close()  # `get` finds out what is wrong with it
            return None
        return OpenChunk(key, reader, self.costs.clock() - started)

    def _open_all(
        self,
        chunks: Sequence[ContextChunk],
        declined: Mapping[ContextChunk, tuple[str, str]],
        files: ExitStack,
        *,
        kept_only: bool,
    ) -> dict[int, OpenChunk | None]:
        """By index what can be read by layers, None for what is missing; `files` closes it.

        With `kept_only` only what is kept in memory: a file is read whole, by `get`.
        """
        opened: dict[int, OpenChunk | None] = {}
        first = getattr(self.prefiller.store, "tiers", (self.prefiller.store,))[0]
        if len(chunks) > _MOST_OPEN or (kept_only and not isinstance(first, MemoryStore)):
            return opened
        for index, chunk in enumerate(chunks):
            if chunk in declined:
                continue
            try:
                readable = self.open(chunk.key)
            except ChunkNotFoundError:
                opened[index] = None
                continue
            if readable is None:
                continue
            files.callback(readable.reader.close)
            if not kept_only or isinstance(readable.reader, ResidentChunk):
                opened[index] = readable
        return opened

    def read(self, opened: OpenChunk, view: ChunkKV) -> ChunkKV | None:
        """Read an open chunk and close it; None if it cannot be read.

        Returns:
            The view it was read into, or the chunk itself if it is kept in memory: it can be copied
            and rotated in one pass.
        """
        started, reader = self.costs.clock(), opened.reader
        source = view
        try:
            if isinstance(reader, ResidentChunk):
                source = reader.chunk
            else:
                reader.read(view)
            reader.finish()
        except ChunkNotFoundError as error:
            self.unusable[opened.key] = type(error)
            return None
        finally:
            reader.close()
        view.tokens.copy_(reader.tokens)
        seconds = opened.seconds + self.costs.clock() - started
        self.costs.loaded(reader.tier, view.nbytes, seconds)
        return source

    def _missed(self, key: ChunkKey, started: float) -> None:
        seconds = self.costs.clock() - started
        tier = self.prefiller.store.locate(key) if self.costs.is_noticed(seconds) else None
        if tier is not None:
            nbytes = self.prefiller.layout.nbytes(key.tokens)
            self.costs.loaded(tier, nbytes, seconds)

    # ------------------------------------------------------------------ layer by layer

    def pays_ahead(self, opened: Sequence[OpenChunk]) -> bool:
        """Whether to load beside the forward pass: it takes long enough, and disturbs nobody.

        It disturbs nobody where the model leaves a processor free, and where loading is slow enough
        to be mostly waiting.  Until both tier and machine were measured, nothing is loaded ahead.
        """
        total, nbytes = 0.0, 0
        for chunk in opened:
            seconds = self.costs.load_seconds(chunk.reader.tier, chunk.reader.nbytes)
            if seconds is None:
                return False
            total += seconds
            nbytes += chunk.reader.nbytes
        total += self.costs.rotation_seconds(nbytes)
        return total >= _WORTH_A_THREAD and (_is_free() or nbytes < _WAITING * total)

    def _in_layers(
        self,
        views: Sequence[ChunkKV],
        opened: Mapping[int, OpenChunk | None],
        scheme: PositionScheme,
        started: float,
        *,
        adjacent: bool,
        ahead: bool,
        is_near: bool,
    ) -> LoadedContext | None:
        """Bring a context whose chunks are all open layer by layer, if that pays.

        On a device, bands of layers cross one after another; in main memory a thread reads them
        beside what follows.

        Returns:
            None if nothing was read.
        """
        chunks = [chunk for chunk in opened.values() if chunk is not None]
        if not chunks or len(chunks) != len(views) - 1:
            return None
        if is_near and not (ahead and self.pays_ahead(chunks)):
            return None
        prefix, position = self.prefiller.prefix(), self.prefiller.position
        parts = [] if prefix is None else [Part(ResidentChunk(prefix, ""), views[0])]
        for chunk, view in zip(chunks, views[1:], strict=True):
            view.tokens.copy_(chunk.reader.tokens)
            parts.append(Part(chunk.reader, view))
        arriving: Loading | None
        if is_near:
            placing = Placing(self._layout, parts, scheme, position, adjacent)
            arriving = PlacingAhead.start(placing, partial(self._placed, chunks, placing))
            if arriving is None:  # no thread to be had
                return None
        else:
            kept = [part.reader.chunk for part in parts if isinstance(part.reader, ResidentChunk)]
            places = [part.place for part in parts]
            arriving = cross(self._layout, kept, places, scheme, position, adjacent=adjacent)
            if not ahead:
                arriving.close()
        hits = Counter(chunk.reader.tier for chunk in chunks)
        context = self._context([chunk.reader.tokens for chunk in chunks], hits)
        load = time.perf_counter() - started
        return replace(context, load=load, ahead=arriving if ahead else None, begun=started)

    def _placed(self, opened: Sequence[OpenChunk], placing: Placing) -> None:
        """Note what a finished placing of these chunks (the last of its parts) took."""
        reading = placing.reading[len(placing.reading) - len(opened) :]
        for chunk, seconds in zip(opened, reading, strict=True):
            self.costs.loaded(chunk.reader.tier, chunk.reader.nbytes, chunk.seconds + seconds)
        self.costs.rotated(sum(chunk.reader.nbytes for chunk in opened), placing.rotating)


@dataclass(frozen=True, eq=False)
class _InBuffer:
    """Chunks go to their places in a prompt's buffer.

    Attributes:
        loader: Reads them.
        views: Their places.
        opened: By index those that are open, None for one that is missing.
        sources: By number of the part (the prefix is 0) what is kept in memory: `stitch` copies and
            rotates it in one pass.
    """

    loader: ContextLoader
    views: Sequence[ChunkKV]
    opened: dict[int, OpenChunk | None]
    sources: dict[int, ChunkKV]

    def load(self, index: int, chunk: ContextChunk) -> str | None:
        view = self.views[index]
        if index not in self.opened:
            hit = self.loader.get(chunk.key, view)
            return None if hit is None else hit.tier
        opened = self.opened.pop(index)
        source = None if opened is None else self.loader.read(opened, view)
        if opened is None or source is None:
            return None
        if source is not view:
            self.sources[index + 1] = source
        return opened.reader.tier

    def take(self, index: int, chunk: ContextChunk, computed: ChunkKV) -> None:
        view = self.views[index]
        view.tokens.copy_(computed.tokens)
        view.copy_from(computed)

    def tokens(self, index: int, chunk: ContextChunk) -> Tensor:
        return self.views[index].tokens


@dataclass(frozen=True, eq=False)
class _InPlace:
    """Chunks stay where they lie, each once for all prompts of a batch."""

    loader: ContextLoader
    shared: SharedChunks

    def load(self, index: int, chunk: ContextChunk) -> str | None:
        if chunk.key not in self.shared:
            hit = self.loader.get(chunk.key)
            if hit is None:
                return None
            device = self.loader.prefiller.model.device
            self.shared[chunk.key] = moved(hit.chunk, device), hit.tier
        return self.shared[chunk.key][1]

    def take(self, index: int, chunk: ContextChunk, computed: ChunkKV) -> None:
        if chunk.key not in self.shared:
            store, device = self.loader.prefiller.store, self.loader.prefiller.model.device
            tier = store.locate(chunk.key) or store.tier
            self.shared[chunk.key] = moved(computed, device), tier

    def tokens(self, index: int, chunk: ContextChunk) -> Tensor:
        return self.shared[chunk.key][0].tokens


@dataclass(frozen=True, eq=False)
class _Encoded:
    """Chunks stay as the store keeps them, each once for all prompts of a batch."""

    loader: ContextLoader
    shared: SharedEncoded
    room: Room

    def load(self, index: int, chunk: ContextChunk) -> str | None:
        if chunk.key not in self.shared:
            hit = self.loader.encoded(chunk.key, self.room)
            if hit is None:
                return None
            self.shared[chunk.key] = hit.chunk, hit.tier
        return self.shared[chunk.key][1]

    def take(self, index: int, chunk: ContextChunk, computed: ChunkKV) -> None:
        if chunk.key not in self.shared:
            store = self.loader.prefiller.store
            tier = store.locate(chunk.key) or store.tier
            self.shared[chunk.key] = EncodedChunk.of(store.codec, computed), tier

    def tokens(self, index: int, chunk: ContextChunk) -> Tensor:
        return self.shared[chunk.key][0].tokens


def _gone(chunk: ContextChunk) -> ChunkNotFoundError:
    return ChunkNotFoundError(
        f"chunk {chunk.key.digest[:12]} is not in the store any more; pass its text instead of "
        "its key"
    )


def _is_free() -> bool:
    """Whether the model leaves a processor free of those that this process may use."""
    return torch.get_num_threads() < _processors()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
