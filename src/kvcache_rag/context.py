"""Bring the cached chunks of a prompt into one buffer, computing on the spot what is not cached.

A partial hit never fails a question and never stays a miss: what was missing is prefilled, used and
stored.  What is cached but slower to load than to prefill is prefilled too (`costs`).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvcache_rag.costs import Costs
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.prefill import PendingChunk, Prefiller, batches
from kvcache_rag.stitch import stitch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_rag.chunk import ChunkKey, ChunkKV
    from kvcache_rag.kvbuffer import KVBuffer
    from kvcache_rag.mask import PositionScheme
    from kvcache_rag.models.base import ModelLayout
    from kvcache_rag.prompt import PromptRenderer

    Fill = Callable[[Sequence[PendingChunk]], dict[ChunkKey, ChunkKV]]


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
    """

    ids: tuple[int, ...]
    load: float
    stitch: float
    hits: Mapping[str, int]
    misses: int
    reused_tokens: int
    prefilled_tokens: int
    declined: Mapping[str, int] = field(default_factory=dict)


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
        if self.prefiller.key(ids) != chunk.key:  # as in `_fetch`
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
    ) -> LoadedContext:
        """Fill a row from `offset` on with prefix and chunks, and turn their keys to their places.

        Args:
            buffer: With the model's layout.
            row: Which row.
            offset: Place of the first token (the padding in front of it, in a batch).
            chunks: In prompt order.
            scheme: Where the chunks stand.
            adjacent: Whether the query stands right behind the highest position (see `stitch`).

        Raises:
            ChunkNotFoundError: If a chunk without text is not held any more.
            UnsupportedModelError: If chunks would have to move and the model's keys cannot.
        """
        if self.combinations is not None and any(chunk.is_joint for chunk in chunks):
            return self.combinations.load(buffer, row, offset, chunks, scheme, adjacent)
        started = time.perf_counter()
        parts = self._views(buffer, row, offset, chunks)
        prefix = self.prefiller.prefix()
        if prefix is not None:
            parts[0].copy_from(prefix)
        hits: Counter[str] = Counter()
        missing, declined = [], []
        reasons = {one: why for one in dict.fromkeys(chunks) if (why := self._reason(one))}
        for chunk, view in zip(chunks, parts[1:], strict=True):
            if chunk in reasons:
                declined.append((chunk, view))
                continue
            tier = self._fetch(chunk, view)
            if tier is None:
                missing.append((chunk, view))
            else:
                hits[tier] += 1
        self._compute(missing, self.prefiller.fill_batch)
        self._compute(declined, self._without_storing)
        self.prefiller.model.narrow()  # after a trial, or a prefix that was not stored
        for chunk, view in declined:
            # As after a load from there.
            self.prefiller.store.promote(chunk.key, view, reasons[chunk][0])
        loaded = time.perf_counter()
        stitch(self._layout, parts, scheme, self.prefiller.position, adjacent=adjacent)
        ids = [*self.prefiller.prefix_ids]
        for part in parts[1:]:
            ids += part.tokens.tolist()
        # A chunk may stand twice.
        computed = {chunk.key: len(chunk) for chunk, _ in missing}
        prefilled = sum(computed.values()) + sum(map(len, reasons))
        return LoadedContext(
            ids=tuple(ids),
            load=loaded - started,
            stitch=time.perf_counter() - loaded,
            hits=dict(hits),
            misses=len(computed),
            reused_tokens=sum(map(len, chunks)) - prefilled,
            prefilled_tokens=prefilled,
            declined=dict(Counter(why for _, why in reasons.values())),
        )

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

    def _reason(self, chunk: ContextChunk) -> tuple[str, str] | None:
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

    def _fetch(self, chunk: ContextChunk, view: ChunkKV) -> str | None:
        """Read a chunk into its place; the tier it came from, or None for a miss."""
        store, nbytes = self.prefiller.store, view.nbytes
        started = self.costs.clock()
        try:
            hit = store.get(chunk.key, self._layout.chunk_layout, out=view)
        except ChunkNotFoundError:
            seconds = self.costs.clock() - started
            held = store.locate(chunk.key) if self.costs.is_noticed(seconds) else None
            if held is not None:
                self.costs.loaded(held, nbytes, seconds)
            return None
        self.costs.loaded(hit.tier, nbytes, self.costs.clock() - started)
        # The key is the hash of these ids, so this holds even for a file that lies about itself.
        if self.prefiller.key(view.tokens.tolist()) != chunk.key:
            store.delete(chunk.key)
            return None
        return hit.tier

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
            elif self._fetch(chunk, view) is None:  # another process stored it; it is gone again
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
