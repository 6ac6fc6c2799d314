"""Compute missing chunks: batched, each once, stored as soon as computed.

Of many batches one is written while the next is computed: the model does not wait for the medium.
A kill loses at most these two; the next run skips what is stored.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvcache_rag.codecs import EncodedChunk, Native
from kvcache_rag.errors import ChunkNotFoundError
from kvcache_rag.kv.chunk import FORMAT_VERSION, ChunkKey, ChunkKV, chunk_key, spec_digest
from kvcache_rag.models.rotation import unrotated
from kvcache_rag.progress import progress_bar
from kvcache_rag.stores.device import moved
from kvcache_rag.stores.listing import manifest_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from kvcache_rag.kv.chunk import ChunkLayout
    from kvcache_rag.kv.rotary import StoredPosition
    from kvcache_rag.metrics import MissReason
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.stores import ChunkStore

# Padded tokens of one batch, prefix included: what bounds the memory of a batch.
BATCH_TOKENS = 2048
# Seconds in which a waiting question can take the model between two batches; locks are not fair.
YIELD = 0.001
# Chunks of which is remembered that they were stored: one that is missing was evicted.
REMEMBERED = 4096
# Batches between their locks and their files: one that is computed, and one that is written.
WRITERS = 2
_NOTHING = nullcontext()
_LOG = logging.getLogger(__name__)
_Computed: TypeAlias = "dict[ChunkKey, ChunkKV]"


@dataclass(frozen=True)
class ContextChunk:
    """A chunk of a prompt, on its way from a text to its keys and values.

    Attributes:
        key: Its address.
        ids: Its token ids; empty when it is known by its key alone.
        text: Its text, for a reference that has gone meanwhile; None when it is not known.
        is_joint: Whether it is several chunks computed together (`Combinations`).
        place: Its number among the chunks of the question.
        places: Those of the chunks in it, if it is joint.
        why: Why it will be missing, as far as its caller's reference tells; "" if it does not.
    """

    key: ChunkKey
    ids: tuple[int, ...]
    text: str | None = None
    is_joint: bool = False
    place: int = field(default=0, compare=False)
    places: tuple[int, ...] = field(default=(), compare=False)
    why: MissReason | Literal[""] = field(default="", compare=False)

    def __len__(self) -> int:
        """Number of tokens."""
        return self.key.tokens


@dataclass(eq=False)
class Prefiller:
    """Computes chunks behind one prefix and puts them into a store.

    Attributes:
        model: The model.
        store: Where chunks go.
        prefix_ids: The shared prefix, may be empty.
        spec: Digest of the spec.
        namespace: Tenant.
        description: What of the spec a person wants to know.
        weights: Identity of the weights that the spec is about; None for the model's as they are.
        key: Gives the address of token ids behind the prefix.
        stored: The last chunks that were stored; they may have been dropped since.
    """

    model: LanguageModel
    store: ChunkStore
    prefix_ids: tuple[int, ...]
    spec: str
    namespace: str
    description: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] | None = None
    key: Callable[[Sequence[int]], ChunkKey] = field(init=False, repr=False)
    _computed_prefix: ChunkKV | None = field(default=None, init=False, repr=False)
    _stored_prefix: ChunkKV | None = field(default=None, init=False, repr=False)
    _encoded_prefix: EncodedChunk | None = field(default=None, init=False, repr=False)
    stored: deque[ChunkKey] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.stored = deque(maxlen=REMEMBERED)
        if self.weights is None:
            self.weights = self.model.weights.identity
        self.key = partial(
            chunk_key, prefix_ids=self.prefix_ids, spec=self.spec, namespace=self.namespace
        )

    @classmethod
    def from_model(
        cls,
        model: LanguageModel,
        store: ChunkStore,
        prefix_ids: tuple[int, ...],
        namespace: str,
    ) -> Prefiller | None:
        """A prefiller whose spec covers model and codec; None if nothing can be captured."""
        if model.layout is None:
            return None
        fingerprint, description = _fingerprint(model, store, prefix_ids)
        store.describe(fingerprint, namespace, description)
        return cls(model, store, prefix_ids, fingerprint, namespace, description)

    def in_namespace(self, namespace: str) -> Prefiller:
        """The same for another tenant; what the model makes of the prefix is the same there."""
        self.store.describe(self.spec, namespace, self.description)
        other = replace(self, namespace=namespace)
        other._computed_prefix = self._computed_prefix
        return other

    @property
    def layout(self) -> ChunkLayout:
        """Shapes of the chunks."""
        return self.model.measured.chunk_layout

    @property
    def position(self) -> StoredPosition:
        """Where the keys of the store's chunks stand, and of all that this hands out."""
        return _position(self.model, self.store)

    def stored_form(self, chunk: ChunkKV) -> ChunkKV:
        """A chunk as the model computed it, in the form in which the store keeps it."""
        return unrotated(self.model.measured, chunk) if self.position == "raw" else chunk

    def prefix(self) -> ChunkKV | None:
        """The prefix's own cache as the store keeps it, computed once, on the model's device.

        None for an empty prefix.
        """
        if not self.prefix_ids:
            return None
        with torch.inference_mode():
            return self._load_prefix()

    @property
    def _prefix_key(self) -> ChunkKey:
        ids, none = self.prefix_ids, ()
        return chunk_key(ids, prefix_ids=none, spec=self.spec, namespace=self.namespace)

    def encoded_prefix(self) -> EncodedChunk | None:
        """The prefix's own cache in the form of the store's codec; None for an empty prefix."""
        if self._encoded_prefix is None and self.prefix_ids:
            with torch.inference_mode():
                prefix = self._load_prefix()  # stored by that, if need be
            try:
                self._encoded_prefix = self.store.encoded(self._prefix_key, self.layout).chunk
            except ChunkNotFoundError:
                self._encoded_prefix = EncodedChunk.of(self.store.codec, prefix)
        return self._encoded_prefix

    def _load_prefix(self) -> ChunkKV:
        if self._stored_prefix is None:
            key = self._prefix_key
            try:
                stored = self.store.get(key, self.layout).chunk
            except ChunkNotFoundError:
                with self.store.locked([key]):  # others may miss it at the same moment
                    stored = self._fill_prefix(key)
            # Every prompt begins with it: from pageable memory, each copy would stop the caller.
            self._stored_prefix = moved(stored, self.model.device)
        return self._stored_prefix

    def _fill_prefix(self, key: ChunkKey) -> ChunkKV:
        """`fill_batch` of the prefix, whose lock is held."""
        with suppress(ChunkNotFoundError):
            return self.store.get(key, self.layout).chunk
        generation = self.store.generation(self.namespace)
        stored = self.stored_form(self._unrounded_prefix())
        weights = self.model.weights
        if weights.identity is self.weights and weights.are_unchanged():
            self.store.put(key, stored, generation)
            self.stored.append(key)
        return stored

    def _unrounded_prefix(self) -> ChunkKV:
        # Chunks attend to the prefix as it was computed, not as it was rounded for the store.
        if self._computed_prefix is None:
            if self._stored_prefix is not None and self.stores_as_computed:
                self._computed_prefix = self._stored_prefix
            else:
                self._computed_prefix = self.model.prefill(None, [self.prefix_ids])[0]
        return self._computed_prefix

    @property
    def stores_as_computed(self) -> bool:
        """Whether what the store gives back is, bit for bit, what the model computed."""
        return self.position == "local" and isinstance(self.store.codec, Native)

    def forget_prefix(self) -> None:
        """Keep nothing of the prefix in memory; it is computed again when it is needed."""
        self._computed_prefix = self._stored_prefix = self._encoded_prefix = None

    def compute(self, ids: Sequence[Sequence[int]]) -> list[ChunkKV]:
        """Prefill one batch of chunks, in the store's form, without looking at the store."""
        prefix = self._unrounded_prefix() if self.prefix_ids else None
        return [self.stored_form(chunk) for chunk in self.model.prefill(prefix, ids)]

    def fill(
        self,
        chunks: Sequence[ContextChunk],
        *,
        guard: AbstractContextManager[object] = _NOTHING,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> int:
        """Prefill and store what is not held yet; return how many chunks were computed.

        Args:
            chunks: With their ids, also several times the same.
            guard: Held for one batch at a time, so that questions are answered in between.
            show_progress: Whether to show a bar.
            cancelled: Stops before the next batch once set.

        Raises:
            CancelledError: If it was stopped; what was computed is stored.
        """
        torch.get_num_threads()  # tells OpenMP of a new thread what `set_num_threads` has set
        missing = list(
            {chunk.key: chunk for chunk in chunks if not self.store.contains(chunk.key)}.values()
        )
        work = [*batches(missing, len(self.prefix_ids))]
        started = time.perf_counter()
        writing: deque[Future[None]] = deque()
        done = computed = tokens = nbytes = 0
        with ExitStack() as stack:
            bar = stack.enter_context(_bar(missing)) if show_progress else None
            # A single batch has no other beside which it could be written.
            writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="kvcache-rag-prefill")
            pool = stack.enter_context(writers) if len(work) > 1 else None
            for batch in work:
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError("prefilling was cancelled")
                if len(writing) == WRITERS:
                    writing.popleft().result()  # not under the guard
                with guard:
                    filled = self._fill_behind(pool, batch, writing)
                computed += len(filled)
                tokens += sum(map(attrgetter("tokens"), filled))
                nbytes += sum(self.store.codec.nbytes(self.layout, key.tokens) for key in filled)
                done += len(batch)
                if bar is not None:
                    bar.set_postfix_str(f"{done}/{len(missing)} chunks", refresh=False)
                    bar.update(sum(map(len, batch)))
                time.sleep(YIELD)
        for one in writing:
            one.result()
        if _LOG.isEnabledFor(logging.INFO):
            seconds = time.perf_counter() - started
            text = "computed %d of %d chunks: %d tokens, %d bytes, %.3f s"
            _LOG.info(text, computed, len(chunks), tokens, nbytes, seconds)
        return computed

    def fill_batch(self, batch: Sequence[ContextChunk]) -> _Computed:
        """Compute what of one batch is still missing under its locks, and store it."""
        with torch.inference_mode(), self.store.locked([member.key for member in batch]):
            generation = self.store.generation(self.namespace)
            computed, kept = self._compute_missing(self._missing(batch))
            for key, chunk in kept.items():
                self.store.put(key, chunk, generation)
        return computed

    def _fill_behind(
        self,
        pool: ThreadPoolExecutor | None,
        batch: Sequence[ContextChunk],
        pending: deque[Future[None]],
    ) -> _Computed:
        """`fill_batch` that returns when the batch is computed; it is written in a thread.

        That thread takes the locks before and keeps them until all is written.  Locks belong to
        threads, so this one may go on with a batch that has the same stripes.

        Args:
            pool: Has the threads; None to write at once.
            batch: What is computed.
            pending: Told of the writing.
        """
        found: Future[list[ContextChunk]] = Future()
        given: Future[_Computed] = Future()

        def write() -> None:
            try:
                with torch.inference_mode(), self.store.locked([one.key for one in batch]):
                    generation = self.store.generation(self.namespace)
                    found.set_result(self._missing(batch))
                    for key, chunk in given.result().items():
                        self.store.put(key, chunk, generation)
            except BaseException as error:
                if not found.done():
                    found.set_exception(error)
                raise

        try:
            writing = None if pool is None else pool.submit(write)
        except RuntimeError:  # no more threads
            writing = None
        if writing is None:
            given.set_result({})  # a thread that there is may find it in its queue
            return self.fill_batch(batch)
        pending.append(writing)
        kept: _Computed = {}
        try:
            with torch.inference_mode():
                computed, kept = self._compute_missing(found.result())
        finally:
            given.set_result(kept)  # of a batch that failed, nothing
        return computed

    def _missing(self, batch: Sequence[ContextChunk]) -> list[ContextChunk]:
        return [member for member in batch if not self.store.contains(member.key)]

    def _compute_missing(self, missing: Sequence[ContextChunk]) -> tuple[_Computed, _Computed]:
        """Compute chunks; what was computed, and what of it may be stored, and counts as that."""
        if not missing:
            return {}, {}
        with self.model.computing():
            chunks = self.compute([member.ids for member in missing])
            was_trained = self.model.model.training  # by another thread, meanwhile
        computed = {member.key: chunk for member, chunk in zip(missing, chunks, strict=True)}
        weights = self.model.weights
        # Weights may have changed under a long ingestion: such chunks have other keys.
        if was_trained or weights.identity is not self.weights or not weights.are_unchanged():
            return computed, {}
        self.stored.extend(computed)
        return computed, computed


def _bar(missing: Sequence[ContextChunk]) -> Any:
    """Tokens per second, and the time that the rest of the tokens takes at this rate."""
    tokens = sum(map(len, missing))
    return progress_bar(tokens, "prefill", "token", show=True, scaled=True)


def _fingerprint(
    model: LanguageModel,
    store: ChunkStore,
    prefix_ids: tuple[int, ...],
) -> tuple[str, Mapping[str, Any]]:
    """Digest of the spec, and what of it a person wants to know."""
    spec = {
        **model.spec(),
        "format": FORMAT_VERSION,
        "codec": store.codec.name,
        "position": _position(model, store),
        # In the key anyway; here it lets a reference behind another prefix be told by its spec.
        "prefix": list(prefix_ids),
    }
    return spec_digest(spec), manifest_of(spec, str(getattr(model.config, "_name_or_path", "")))


def _position(model: LanguageModel, store: ChunkStore) -> StoredPosition:
    # Keys that cannot be moved are stored as they are: the codec is then only coarser.
    return "raw" if store.codec.raw_keys and not model.measured.immovable else "local"


def batches(chunks: Sequence[ContextChunk], behind: int = 0) -> Iterator[list[ContextChunk]]:
    """Batches of similar length, padded to `BATCH_TOKENS` at most (or one long chunk).

    Args:
        chunks: To be computed, with their ids.
        behind: Tokens of the prefix, of which each row holds a copy.
    """
    batch: list[ContextChunk] = []
    for member in sorted(chunks, key=lambda chunk: len(chunk.ids)):
        # Sorted, so this is the longest yet, to which all rows would be padded.
        if batch and (len(batch) + 1) * (behind + len(member.ids)) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(member)
    if batch:
        yield batch
