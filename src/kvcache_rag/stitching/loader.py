"""Find the chunks of a prompt's context: load what is cached, compute what is not.

A partial hit never fails a question and never stays a miss: what was missing is prefilled, used and
stored.  A context is a list of segments, each a chunk where it lies.  They are copied to a prompt's
buffer (`ContextLoader.load`), or attended to where they are (`ContextLoader.hold`).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kvcache_rag.codecs import EncodedChunk
from kvcache_rag.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    UnreadableChunkError,
    UntrustedChunkError,
)
from kvcache_rag.metrics import Miss
from kvcache_rag.prefill import ContextChunk, Prefiller, batches
from kvcache_rag.stitching.stitch import materialise, placed
from kvcache_rag.stores.device import moved

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from kvcache_rag.codecs import Room
    from kvcache_rag.kv.buffer import KVBuffer
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.metrics import MissReason
    from kvcache_rag.models.deferred.segments import Segment
    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag.stitching.stitch import Chunk

_UNUSABLE: Final[dict[type[ChunkNotFoundError], MissReason]] = {
    CorruptChunkError: "damaged",
    UntrustedChunkError: "not signed",
    UnreadableChunkError: "unreadable",
}

Shared: TypeAlias = "dict[ChunkKey, tuple[Chunk, str]]"
"""Chunks that the prompts of one batch attend to in place, and the tier that each came from."""


@dataclass(frozen=True)
class LoadedContext:
    """What bringing the context of one prompt gave and cost.

    Attributes:
        ids: Ids of prefix and chunks.
        load: Seconds for reading and computing.
        stitch: Seconds for rotating keys.
        hits: Chunks found, per tier.
        reused_tokens: Tokens of the chunks found.
        prefilled_tokens: Tokens of the chunks computed.
        missed: The chunks computed, and why they were not cached.
        begun: `time.perf_counter()` when it began; `load` and then `stitch` follow.
        segments: Prefix, if any, and chunks where they lie; once they are copied, none, but of
            models with recurrent layers, as states lie there alone.
    """

    ids: tuple[int, ...]
    load: float = 0.0
    stitch: float = 0.0
    hits: Mapping[str, int] = field(default_factory=dict)
    reused_tokens: int = 0
    prefilled_tokens: int = 0
    missed: tuple[Miss, ...] = ()
    begun: float = 0.0
    segments: tuple[Segment, ...] = ()

    @property
    def misses(self) -> int:
        """Chunks computed."""
        return len(self.missed)


@dataclass(frozen=True, eq=False)
class _Where:
    """Where the chunks of a prompt come to lie.

    Attributes:
        places: Per chunk the memory to read it into, if it is in none yet.  Without it chunks stay
            where they are, on the model's device, each once for all prompts of a batch.
        shared: What stays, of all prompts of the batch.
        codes: Memory for chunks in the form of the store's codec, which they keep; None to decode.
    """

    places: Sequence[ChunkKV] | None = None
    shared: Shared = field(default_factory=dict)
    codes: Room | None = None


@dataclass(frozen=True, eq=False)
class ContextLoader:
    """Finds the chunks of prompts in one store, and computes those that are missing.

    Attributes:
        prefiller: Computes what is missing; knows store, prefix and model.
        renderer: Tokenises the text of a reference that has gone.
        combinations: Loads chunks that were computed together, which have a store of their own.
        unusable: How reading failed for chunks of the prompt that is brought.
    """

    prefiller: Prefiller
    renderer: PromptRenderer
    combinations: ContextLoader | None = None
    unusable: dict[ChunkKey, type[ChunkNotFoundError]] = field(default_factory=dict)

    def for_chunks(self, chunks: Iterable[ContextChunk]) -> ContextLoader:
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

    # ------------------------------------------------------------------ where the chunks lie

    def load(
        self,
        buffer: KVBuffer,
        chunks: Sequence[ContextChunk],
        scheme: PositionScheme,
        *,
        adjacent: bool = False,
    ) -> LoadedContext:
        """Fill a buffer with prefix and chunks, and rotate their keys to their places.

        Args:
            buffer: Of one row, with the model's layout.
            chunks: In prompt order, all of this loader (see `for_chunks`).
            scheme: Where the chunks stand.
            adjacent: Whether the query stands right behind the highest position (see `placed`).

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
            UnsupportedModelError: If chunks would have to move and the model's keys cannot.
        """
        started = time.perf_counter()
        prefix = self.prefiller.prefix()  # first: what is missing is computed behind it
        context, found = self._find(chunks, _Where(self._places(buffer, chunks)))
        members: list[Chunk] = found if prefix is None else [prefix, *found]
        segments = placed(members, scheme, adjacent=adjacent)
        loaded = time.perf_counter()
        materialise(self.prefiller.model.measured, segments, buffer, self.prefiller.position)
        return replace(
            context,
            load=loaded - started,
            stitch=time.perf_counter() - loaded,
            begun=started,
            segments=tuple(segments) if self.prefiller.layout.states else (),
        )

    def hold(
        self,
        chunks: Sequence[ContextChunk],
        scheme: PositionScheme,
        shared: Shared,
        *,
        adjacent: bool = False,
        codes: Room | None = None,
    ) -> LoadedContext:
        """Find prefix and chunks where they lie, on the model's device.

        Args:
            chunks: In prompt order, all of this loader (see `for_chunks`).
            scheme: Where the chunks stand.
            shared: Of other prompts of the batch; those of this one are added.
            adjacent: Whether the query stands right behind the highest position (see `placed`).
            codes: Memory for chunks that are read for this batch alone, in the form of the store's
                codec, which its store gives; None for keys and values.

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more; a `CorruptChunkError`
                if one holds values that the codec cannot store.
        """
        started = time.perf_counter()
        prefix: Chunk | None
        if codes is not None:
            prefix = self.prefiller.encoded_prefix()
        elif (prefix := self.prefiller.prefix()) is not None:
            prefix = moved(prefix, self.prefiller.model.device)
        context, found = self._find(chunks, _Where(shared=shared, codes=codes))
        segments = placed(found if prefix is None else [prefix, *found], scheme, adjacent=adjacent)
        load = time.perf_counter() - started
        return replace(context, load=load, begun=started, segments=tuple(segments))

    def _find(
        self, chunks: Sequence[ContextChunk], where: _Where
    ) -> tuple[LoadedContext, list[Chunk]]:
        """Load or compute every chunk; each where it lies, in prompt order."""
        hits: Counter[str] = Counter()
        found: dict[int, Chunk] = {}
        missing: dict[ContextChunk, list[int]] = {}
        for index, chunk in enumerate(chunks):
            # A chunk may stand twice.
            hit = None if chunk in missing else self._read(index, chunk.key, where)
            if hit is None:
                missing.setdefault(chunk, []).append(index)
            else:
                found[index], tier = hit
                hits[tier] += 1
        missed: tuple[Miss, ...] = ()
        if missing:
            missed = self.missed_of(missing)
            self._fill(missing, where, found)
        members = [found[index] for index in range(len(chunks))]
        ids = chain.from_iterable(member.tokens.tolist() for member in members)
        prefilled = sum({chunk.key: len(chunk) for chunk in missing}.values())
        context = LoadedContext(
            ids=(*self.prefiller.prefix_ids, *ids),
            hits=dict(hits),
            reused_tokens=sum(map(len, members)) - prefilled,
            prefilled_tokens=prefilled,
            missed=missed,
        )
        return context, members

    def _fill(
        self,
        missing: Mapping[ContextChunk, Sequence[int]],
        where: _Where,
        found: dict[int, Chunk],
    ) -> None:
        """Compute chunks, store them, and add them to those that were found."""
        chunks: dict[ChunkKey, ContextChunk] = {}
        for chunk in missing:
            computable = self._computable(chunk)
            if computable is None:
                raise _gone(chunk)
            chunks[chunk.key] = computable
        computed: dict[ChunkKey, ChunkKV] = {}
        for batch in batches([*chunks.values()], len(self.prefiller.prefix_ids)):
            computed |= self.prefiller.fill_batch(batch)
        for chunk, indices in missing.items():
            for index in indices:
                if chunk.key not in computed:  # another process has stored it meanwhile
                    hit = self._read(index, chunk.key, where)
                    if hit is not None:
                        found[index] = hit[0]
                        continue
                    # It is gone again.
                    computed[chunk.key] = self.prefiller.compute([chunks[chunk.key].ids])[0]
                found[index] = self._computed(index, chunk.key, computed[chunk.key], where)

    def _computed(self, index: int, key: ChunkKey, chunk: ChunkKV, where: _Where) -> Chunk:
        """A chunk that was computed just now, where others of the prompt lie."""
        if where.places is not None:
            place = where.places[index]
            place.tokens.copy_(chunk.tokens)
            place.copy_from(chunk)
            return place
        if key not in where.shared:
            store, device = self.prefiller.store, self.prefiller.model.device
            is_code = where.codes is not None
            form = EncodedChunk.of(store.codec, chunk) if is_code else moved(chunk, device)
            where.shared[key] = form, store.locate(key) or store.tier
        return where.shared[key][0]

    def missed_of(self, missing: Iterable[ContextChunk]) -> tuple[Miss, ...]:
        """What is not cached, and why; before it is computed, and stored again."""
        stored = set(self.prefiller.stored)
        missed: dict[ChunkKey, Miss] = {}
        for chunk in missing:
            key = chunk.key
            if key not in missed:
                known: MissReason | None = _UNUSABLE.get(self.unusable.get(key, ChunkNotFoundError))
                guess: MissReason = "evicted" if key in stored else "not prefilled"
                missed[key] = Miss(chunk.place, key.tokens, known or chunk.why or guess)
        self.unusable.clear()
        return tuple(missed.values())

    def _places(self, buffer: KVBuffer, chunks: Sequence[ContextChunk]) -> list[ChunkKV]:
        """Where in a buffer the chunks go; their ids are not filled in."""
        behind = place = len(self.prefiller.prefix_ids)
        places = []
        for chunk in chunks:
            stop = place + chunk.key.tokens
            ids = torch.empty(chunk.key.tokens, dtype=torch.int32)  # (tokens,)
            places.append(buffer.view(0, place, stop, local_start=behind, tokens=ids))
            place = stop
        return places

    def tiers(self, chunks: Sequence[ContextChunk]) -> tuple[str, ...]:
        """Per chunk the tier from which it would be loaded, "" for one that would be computed."""
        keys = dict.fromkeys(chunk.key for chunk in chunks)
        tiers = {key: self.prefiller.store.locate(key) or "" for key in keys}
        return tuple(tiers[chunk.key] for chunk in chunks)

    # ------------------------------------------------------------------ reading the store

    def _read(self, index: int, key: ChunkKey, where: _Where) -> tuple[Chunk, str] | None:
        """A cached chunk and the tier it came from; None for a miss."""
        if key in where.shared:
            return where.shared[key]
        store, layout = self.prefiller.store, self.prefiller.layout
        hit: tuple[Chunk, str]
        try:
            if where.codes is not None:
                encoded = store.encoded(key, layout, where.codes)
                hit = encoded.chunk, encoded.tier
            elif where.places is not None:
                read = store.get(key, layout, out=where.places[index])
                hit = read.chunk, read.tier
            else:
                kept = store.get(key, layout)
                hit = moved(kept.chunk, self.prefiller.model.device), kept.tier
        except ChunkNotFoundError as error:
            self.unusable[key] = type(error)
            return None
        if not self._is(key, hit[0].tokens):
            return None
        if where.places is None:
            where.shared[key] = hit
        return hit


def _gone(chunk: ContextChunk) -> ChunkNotFoundError:
    return ChunkNotFoundError(
        f"chunk {chunk.key.digest[:12]} is not in the store any more; pass its text instead of "
        "its key"
    )
