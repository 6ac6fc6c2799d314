"""What an engine does with its stores: address, prefill ahead, let go."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvcache_rag.answering import Answerer
from kvcache_rag.chunk import ChunkKey
from kvcache_rag.combination import Combinations
from kvcache_rag.errors import ChunkNotFoundError, FingerprintMismatchError, InvalidInputError
from kvcache_rag.gate import identity
from kvcache_rag.policies.auto import with_auxiliary
from kvcache_rag.prefill import PendingChunk, Prefiller
from kvcache_rag.rotary import forget_scratch

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Sequence

    import torch

    from kvcache_rag.context import ContextLoader
    from kvcache_rag.gate import BoundGate
    from kvcache_rag.models.hf import TransformersModel
    from kvcache_rag.policies.base import ReusePolicy, Scorer
    from kvcache_rag.request import ChunkInput, Planner
    from kvcache_rag.stores import ChunkStore
    from kvcache_rag.verdict import Gate, Identity

_Same = TypeVar("_Same", bound="StoreMethods")


class StoreMethods:
    """Methods of `Engine` that prepare or drop chunks and answer nothing.

    Attributes:
        store: Where chunks are kept.
        combinations: Where chunks that were computed together are kept.
        auxiliary: Scores chunks by an auxiliary model, or None.
        namespace: Tenant.
        policy: What is reused when a call does not say.
    """

    store: ChunkStore
    combinations: ChunkStore
    auxiliary: Scorer | None
    namespace: str
    policy: ReusePolicy
    _adapter: TransformersModel
    _answerer: Answerer
    _planner: Planner
    _prefiller: Prefiller | None
    _joint: Combinations | None
    _gate: BoundGate
    _lock: threading.RLock

    @property
    def spec(self) -> str:
        """Digest of everything about model and storage that cached chunks depend on."""
        return self._capturing.spec

    @property
    def identity(self) -> Identity:
        """What a verdict of `kvcache-rag verify` about this engine is about."""
        return identity(self._capturing, self._planner.renderer)

    @property
    def prefill_dtype(self) -> torch.dtype | None:
        """What chunks are computed in; None for the model's own."""
        return None if self._prefiller is None else self._prefiller.dtype

    @property
    def gate(self) -> Gate | None:
        """Which policies are let through; None for all."""
        return self._gate.gate

    def in_namespace(self: _Same, namespace: str) -> _Same:
        """An engine for another tenant: the same model, stores and settings, other chunks.

        Nothing is measured anew, and nothing waits for the model, which works for one at a time.
        """
        other = copy.copy(self)
        other.namespace = namespace
        other.auxiliary = _scorer_of(self.auxiliary, namespace)
        own = self.policy.auxiliary
        if own is not None:
            moved = other.auxiliary if own is self.auxiliary else _scorer_of(own, namespace)
            other.policy = with_auxiliary(self.policy, moved or own)
        answerer, loader = self._answerer, self._answerer.loader
        if loader is not None:
            joint = loader.combinations and _moved(loader.combinations, namespace)
            loader = replace(_moved(loader, namespace), combinations=joint)
            other._prefiller = loader.prefiller
            other._planner = replace(self._planner, prefiller=loader.prefiller)
            window = self._planner.window
            other._joint = None if joint is None else Combinations(loader, joint, window)
        other._answerer = Answerer(
            self._adapter,
            answerer.tokenizer,
            answerer.renderer,
            loader,
            answerer.window,
            other.auxiliary,
            "auto" if answerer.deferral is None else answerer.deferral.mode,
        )
        return other

    @property
    def _capturing(self) -> Prefiller:
        if self._prefiller is None:
            _ = self._adapter.measured  # raises UnsupportedModelError with the layer and the reason
            raise InvalidInputError("this model keeps no keys and values")
        return self._prefiller

    def keys(self, texts: Sequence[str]) -> list[ChunkKey]:
        """Addresses of chunks, computed from their tokens; nothing is prefilled."""
        _ = self._capturing
        return [chunk.key for chunk in self._planner.chunks(texts)]

    def nbytes(self, key: ChunkKey) -> int:
        """Bytes of the keys and values of a chunk, as the model computes them."""
        return self._adapter.measured.chunk_layout.nbytes(key.tokens)

    def reference(self, digest: str, spec: str, tokens: int) -> ChunkKey:
        """The key of a chunk whose digest, spec and length were noted elsewhere.

        Raises:
            FingerprintMismatchError: If it was made by another model, dtype, codec or prefix.
        """
        mine = self._capturing
        key = ChunkKey(digest, spec, self.namespace, tokens, len(mine.prefix_ids))
        mismatch = self._planner.mismatch(key)
        if mismatch:
            raise FingerprintMismatchError(mismatch)
        return key

    def add(
        self, texts: Sequence[str], *, owner: str = "", show_progress: bool = False
    ) -> list[ChunkKey]:
        """Prefill and store what is not stored yet; nothing is computed twice.

        An auxiliary model prefills its own chunks of the same texts (`Auxiliary.prefill`).  These
        have no owner: its store lets go of them by their age.

        Args:
            texts: Chunks.
            owner: Who will release them later (a collection id); "" for nobody.
            show_progress: Whether to show a bar.

        Returns:
            Their keys, in order.

        Raises:
            ContextTooLongError: If a chunk does not fit the context window; nothing is computed
                then.
            UnsupportedModelError: If the model keeps no keys and values per token.
        """
        prefiller = self._capturing
        chunks = self._planner.chunks(texts)
        pending = [PendingChunk(chunk.key, chunk.ids or ()) for chunk in chunks]
        if pending:
            with self._lock:
                prefiller.prefix()
        prefiller.fill(pending, guard=self._lock, show_progress=show_progress)
        ahead = getattr(self.auxiliary, "prefill", None)
        if ahead is not None:
            ahead(texts, show_progress=show_progress)
        keys = [chunk.key for chunk in chunks]
        if owner:
            for key in dict.fromkeys(keys):
                self.store.claim(key, owner)
        return keys

    def add_combination(
        self,
        combinations: Sequence[Sequence[ChunkInput]],
        *,
        owner: str = "",
        show_progress: bool = False,
    ) -> list[ChunkKey]:
        """Prefill lists of chunks, each list together, for questions asked with `Combination()`.

        Args:
            combinations: Chunks of each, in the order in which they will stand in the prompt.
            owner: Who will release them later; "" for nobody.
            show_progress: Whether to show a bar.

        Returns:
            Their keys, in order; a list of one chunk is that chunk.

        Raises:
            InvalidInputError: If a list is empty or a chunk cannot be used.
            ContextTooLongError: If a list does not fit the context window; nothing is computed
                then.
            UnsupportedModelError: If the model keeps no keys and values per token.
        """
        _ = self._capturing
        if self._joint is None:
            raise InvalidInputError("this model keeps no keys and values")
        lists = [self._planner.chunks(chunks) for chunks in combinations]
        keys = self._joint.fill(lists, self._lock, show_progress=show_progress)
        if owner:
            for key, chunks in zip(keys, lists, strict=True):
                (self.combinations if len(chunks) > 1 else self.store).claim(key, owner)
        return keys

    def needed(self, chunks: Sequence[ChunkInput], policy: ReusePolicy) -> list[ChunkKey]:
        """Addresses of what an answer over `chunks` will load; nothing is prefilled.

        Args:
            chunks: In the order in which they will stand in the prompt.
            policy: What will be reused; of a full prefill, or one that the gate replaces by it,
                nothing is.

        Raises:
            InvalidInputError: If a chunk cannot be used.
            ContextTooLongError: If one does not fit the context window.
        """
        _ = self._capturing
        if policy.is_full or self._gate.objection(policy):
            return []
        planned = self._planner.chunks(chunks)
        if policy.joint and self._joint is not None:
            planned = [*self._joint.joined(planned)]
        return [chunk.key for chunk in planned]

    def load_ahead(self, keys: Sequence[ChunkKey]) -> int:
        """Bring chunks and combinations out of slower tiers into the fastest one.

        The model is not needed for it; what is nowhere, or is there already, is left alone.

        Returns:
            How many were brought.
        """
        layout = self._capturing.model.measured.chunk_layout
        brought = 0
        for store in dict.fromkeys([self.store, self.combinations]):
            fastest = getattr(store, "tiers", (store,))[0].tier
            for key in dict.fromkeys(keys):
                if store.locate(key) in (None, fastest):
                    continue
                with suppress(ChunkNotFoundError):  # gone, or damaged: the answer finds out
                    store.get(key, layout)
                    brought += 1
        return brought

    def forget_buffer(self) -> None:
        """Let go of the memory of the last prompt, which the next one would have used again."""
        with self._lock:
            self._answerer.forget()
        forget = getattr(self.auxiliary, "forget_buffer", None)
        if forget is not None:
            forget()

    def delete_namespace(self) -> int:
        """Drop every chunk and combination of this engine's namespace at once, in all tiers.

        Returns:
            How many chunks and combinations were dropped.

        Raises:
            OSError: If something could not be dropped.
        """
        with self._lock:
            if self._joint is not None:
                self._joint.forget_all()
            self._answerer.forget()
            forget_scratch()
            stores = dict.fromkeys([self.combinations, self.store])
            return sum(store.delete_namespace(self.namespace) for store in stores)

    def release(self, keys: Iterable[ChunkKey], owner: str) -> None:
        """Let go of chunks and combinations that `owner` claimed.

        They are dropped after the grace time of their store, and combinations of which a released
        chunk is part at once.
        """
        released = list(keys)
        for key in released:
            self.store.release(key, owner)
            self.combinations.release(key, owner)
        if self._joint is not None:
            self._joint.forget(released)


def _moved(loader: ContextLoader, namespace: str) -> ContextLoader:
    """A loader of the same store for another tenant."""
    return replace(loader, prefiller=loader.prefiller.in_namespace(namespace))


def _scorer_of(scorer: Scorer | None, namespace: str) -> Scorer | None:
    """A scorer for another tenant, if it stores anything."""
    moving = getattr(scorer, "in_namespace", None)
    return scorer if moving is None else moving(namespace)
