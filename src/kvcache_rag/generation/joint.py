"""Chunks computed together: the KV of an ordered list of chunks under full attention.

Shared RAG-DCache, arXiv 2504.11765, with k > 1.  The address is that of one chunk whose ids are
those of all chunks: such a chunk behind the same prefix has the very same keys and values, so one
key for both is right, and equal content is never stored under two names.  Ordered chunk keys fix
these ids, since each key is the hash of its chunk's.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from cachetools import LRUCache

from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.forks import new_lock
from kvcache_rag.prefill import ContextChunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag.generation.request import Request
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.stitching.loader import ContextLoader
    from kvcache_rag.stores import ChunkStore


# Chunks whose ids, and combinations whose chunks, are remembered.
REMEMBERED = 4096

COMBINATION_BYTES = 1 << 30
"""Limit of the store that keeps combinations when the caller gives none."""


class Combinations:
    """Turns the chunks of a prompt into one, and prefills such ahead.

    They have a store of their own, so that they, many and large as they are, never push out chunks.
    Safe to use from any thread.
    """

    def __init__(self, plain: ContextLoader, joint: ContextLoader, window: int) -> None:
        """Combine what `plain` addresses into what `joint` stores.

        Args:
            plain: Of single chunks.
            joint: Of combinations.
            window: Context window in tokens.
        """
        self._plain, self._joint, self._window = plain, joint, window
        self._lock = new_lock()
        self._ids: LRUCache[ChunkKey, array[int]] = LRUCache(REMEMBERED)
        self._members: LRUCache[ChunkKey, frozenset[ChunkKey]] = LRUCache(REMEMBERED)
        self._generation = -1

    @property
    def store(self) -> ChunkStore:
        """Where combinations are kept."""
        return self._joint.prefiller.store

    def arranged(self, request: Request) -> Request:
        """The request with the chunks of each round as one, as its policy wants it.

        Raises:
            ChunkNotFoundError: If only the key of a chunk is known and its ids are nowhere.
        """
        self._look()
        rounds = tuple(map(self.joined, request.rounds))
        return replace(request, rounds=rounds)

    def joined(self, chunks: Sequence[ContextChunk]) -> tuple[ContextChunk, ...]:
        """Chunks as one combination; none or a single one stays what it is."""
        if len(chunks) < 2:
            return tuple(chunks)
        parts = [chunk.ids or self._known_ids(chunk) for chunk in chunks]
        ids = tuple(chain.from_iterable(parts))
        members = frozenset(chunk.key for chunk in chunks)
        key = self._joint.prefiller.key(ids)
        with self._lock:
            self._members[key] = members
            for chunk, part in zip(chunks, parts, strict=True):
                self._ids[chunk.key] = array("i", part)
        places = tuple(chunk.place for chunk in chunks)
        return (ContextChunk(key, ids, is_joint=True, place=places[0], places=places),)

    def _known_ids(self, chunk: ContextChunk) -> Sequence[int]:
        if chunk.ids:
            return chunk.ids
        with self._lock:
            remembered = self._ids.get(chunk.key)
        if remembered is not None:
            return remembered
        return self._plain.known(chunk).ids

    def combined(self, lists: Sequence[Sequence[ContextChunk]]) -> list[ContextChunk]:
        """Each list of chunks, in prompt order, as one; a single chunk stays what it is.

        Raises:
            InvalidInputError: If one has no chunk.
            ContextTooLongError: If one does not fit the context window.
        """
        self._look()
        room = self._window - len(self._plain.prefiller.prefix_ids)
        for index, chunks in enumerate(lists):
            if not chunks:
                raise InvalidInputError(f"combination {index} is empty; leave it out")
            tokens = sum(map(len, chunks))
            if tokens > room:
                raise ContextTooLongError(
                    f"combination {index} has {tokens} tokens and the model's context window has "
                    f"room for {room}; combine fewer or smaller chunks"
                )
        return [self.joined(chunks)[0] for chunks in lists]

    def fill(
        self,
        combined: Sequence[ContextChunk],
        guard: AbstractContextManager[object],
        *,
        show_progress: bool,
    ) -> int:
        """Prefill and store combinations that are not stored yet.

        Args:
            combined: As `combined` gave them; single chunks are stored as what they are.
            guard: Held for one batch at a time.
            show_progress: Whether to show a bar.

        Returns:
            How many were computed.
        """
        computed = 0
        for loader in (self._plain, self._joint):
            mine = [
                replace(chunk, ids=tuple(self._known_ids(chunk)))
                for chunk in combined
                if chunk.is_joint == (loader is self._joint)
            ]
            if mine:
                with guard:
                    loader.prefiller.prefix()
                computed += loader.prefiller.fill(mine, guard=guard, show_progress=show_progress)
        return computed

    def forget_all(self) -> None:
        """Remember nothing of any chunk, nor of the prefix."""
        with self._lock:
            self._members.clear()
            self._ids.clear()
        for loader in (self._plain, self._joint):
            loader.prefiller.forget_prefix()

    def _look(self) -> None:
        """Forget a namespace whose chunks were deleted, by any process or past the engine."""
        plain = self._plain.prefiller
        now = plain.store.generation(plain.namespace)
        if now == self._generation:
            return
        self._generation = now
        with self._lock:
            self._members.clear()
            self._ids.clear()
        if self.store.generation(plain.namespace) < now:
            try:
                self.store.delete_namespace(plain.namespace, now)
            except OSError:  # as a remote that is down; tried again at the next look
                self._generation = -1

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Drop at once every combination of which a chunk was deleted.

        Known are those that this process used or computed; others on disk age out by their limit.
        """
        gone = frozenset(keys)
        with self._lock:
            combinations = [key for key, members in self._members.items() if members & gone]
            for key in combinations:
                del self._members[key]
            for key in gone:
                self._ids.pop(key, None)
        for key in combinations:
            self.store.delete(key)
