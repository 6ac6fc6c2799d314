"""Compute or load what waiting questions will need, before their turn.

The KV cache generator of Shared RAG-DCache (arXiv 2504.11765): while a question waits for the
model, the keys and values of its chunks are made on another device (a dedicated one, or the
processor), so that its turn only has to load them.  Nothing is computed twice: who comes second to
a chunk waits under the store's lock of its key.
"""

from __future__ import annotations

import atexit
import copy
import logging
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from cachetools import LRUCache

from kvcache_rag.engine import Engine, like
from kvcache_rag.errors import (
    InvalidInputError,
    KVCacheRagError,
    UnsupportedModelError,
    check_settings,
)
from kvcache_rag.forks import new_condition, new_lock
from kvcache_rag.generation.request import retrieved_chunks
from kvcache_rag.models.pretrained import checked_device
from kvcache_rag.models.weights import PACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvcache_rag.generation.question import StoredChunk
    from kvcache_rag.kv.chunk import ChunkKey
    from kvcache_rag.policies import ReusePolicy

_LOG = logging.getLogger(__name__)

# Questions that may wait for a prefetcher, and that may have been prefetched and still wait for
# their turn: further ahead, what was made could be evicted again before it is used.
LIMIT, AHEAD = 1024, 32

# Tenants whose engines are remembered; another one costs nothing but its prefix.
TENANTS = 64


def _never() -> float:
    return float("inf")


class _State(Enum):
    WAITING = 1
    RUNNING = 2
    READY = 3
    OVER = 4


@dataclass(eq=False)
class Prefetch:
    """What one waiting question will need.

    Attributes:
        chunks: Texts, best first unless there are scores.
        namespace: Tenant.
        policy: What will be reused; None for the engine's own.
        due: When to begin, on the monotonic clock.
        turn_in: Tells in how many seconds its turn will come.
        done: Done when nothing more will be computed or loaded for it; its result says whether all
            that is needed is there.
        scores: Of the chunks, higher is better; None where the best stands first.
        question: By which its policy may choose among the chunks.
        keys: Addresses of the chunks, one each; () until a prefetcher has looked them up.
    """

    chunks: tuple[Any, ...]
    namespace: str
    policy: ReusePolicy | None
    due: float
    turn_in: Callable[[], float]
    done: Future[bool] = field(default_factory=Future)
    scores: tuple[float, ...] | None = None
    question: str = ""
    keys: tuple[ChunkKey, ...] = ()
    _state: _State = _State.WAITING
    _is_begun: bool = False
    _is_useless: bool = False


class Prefetcher:
    """Computes or loads what waiting questions need, in a thread of its own, the oldest first.

    Safe to use from any thread.  An engine that answers questions too is used between its answers;
    a second one (`twin`) works beside it.

    Attributes:
        limit: Questions that may wait here; for further ones nothing is done ahead.
        ahead: Questions that may have been prefetched and not had their turn; tenants share it.
    """

    def __init__(self, engine: Engine, *, limit: int = LIMIT, ahead: int = AHEAD) -> None:
        """Prefetch with `engine` and its like for other tenants; the thread starts when needed."""
        check_settings(Prefetcher.__init__, locals())
        self.limit, self.ahead = limit, ahead
        self._engines = Engines(engine)
        self._changed = new_condition()
        self._waiting: dict[Prefetch, None] = {}
        self._ready: set[Prefetch] = set()
        self._counts: Counter[str] = Counter()
        self._seconds: float | None = None  # that the last chunk or combination took
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def want(
        self,
        chunks: Sequence[str | StoredChunk],
        *,
        namespace: str = "",
        policy: ReusePolicy | None = None,
        after: float = 0.0,
        turn_in: Callable[[], float] = _never,
        scores: Sequence[float] | None = None,
        question: str = "",
    ) -> Prefetch | None:
        """Note what a question that begins to wait will need.

        Args:
            chunks: Texts, best first unless there are scores.
            namespace: Tenant.
            policy: What it will reuse; None for the engine's own.
            after: Seconds to leave it alone, as its turn may come.
            turn_in: Tells in how many seconds its turn will come, from any thread and at once:
                what would not be ready by then is left to the answer.
            scores: Of the chunks, higher is better, as far as it has them.
            question: By which its policy may choose among the chunks.

        Returns:
            What to give to `turn` or `drop` later; None if nothing will be done for it.
        """
        with self._changed:
            if self._is_closed or not chunks:
                return None
            if len(self._waiting) >= self.limit:
                self._counts["refused"] += 1
                return None
            due = time.monotonic() + after
            ranks = None if scores is None else tuple(scores)
            prefetch = Prefetch(
                tuple(chunks), namespace, policy, due, turn_in, scores=ranks, question=question
            )
            prefetch.done.set_running_or_notify_cancel()  # nobody else can end it
            self._waiting[prefetch] = None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvcache-rag-prefetch", daemon=True
                )
                close_at_exit(self)
                self._thread.start()
            self._changed.notify_all()
        return prefetch

    def turn(self, prefetch: Prefetch) -> bool:
        """Note that the question is answered now; nothing more is done ahead for it.

        Returns:
            Whether something was computed or loaded, and all that it needs is there.
        """
        return self._end(prefetch) and prefetch._is_begun

    def drop(self, prefetch: Prefetch) -> None:
        """Note that the question was taken back."""
        prefetch._is_useless = True
        if self._end(prefetch) and prefetch._is_begun:
            with self._changed:
                self._counts["useless"] += 1

    def _end(self, prefetch: Prefetch) -> bool:
        """Do nothing more for a question; whether all was done."""
        with self._changed:
            before, prefetch._state = prefetch._state, _State.OVER
            self._waiting.pop(prefetch, None)
            self._ready.discard(prefetch)
            if before is _State.WAITING:
                prefetch.done.set_result(False)
            self._changed.notify_all()
        return before is _State.READY

    def stats(self) -> dict[str, int]:
        """Counts since the start, by name.

        Returns:
            Questions: `waiting` now, `started` (something had to be computed or loaded),
            `finished`, `cancelled` (midway: nobody wanted it any more, or its turn came),
            `useless` (finished, but taken back), `failed`, `refused` (too many waited); chunks and
            combinations: `computed`, `loaded` from a slower tier.
        """
        names = ("started", "finished", "cancelled", "useless", "failed", "refused")
        with self._changed:
            counts = {name: self._counts[name] for name in (*names, "computed", "loaded")}
            return {"waiting": len(self._waiting), **counts}

    def close(self) -> None:
        """Stop after what is being computed, and wait for that."""
        with self._changed:
            self._is_closed = True
            for prefetch in self._waiting:
                prefetch._state = _State.OVER
                prefetch.done.set_result(False)
            self._waiting.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (prefetch := self._next()) is not None:
            try:
                name = self._prepare(prefetch)
            except KVCacheRagError:
                name = "failed"  # the answer will say what is wrong with it
            except Exception:
                _LOG.exception("a prefetch failed")
                name = "failed"
            self._settle(prefetch, name)

    def _next(self) -> Prefetch | None:
        """The oldest question whose time has come, waiting for it; None at the end."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                allowed = self._allowed()
                first = min(
                    allowed,
                    key=lambda prefetch: (prefetch.due > now, allowed[prefetch]),
                    default=None,
                )
                if first is not None and first.due <= now:
                    del self._waiting[first]
                    first._state = _State.RUNNING
                    return first
                self._changed.wait(
                    min((prefetch.due for prefetch in allowed), default=now) - now or None
                )
        return None

    def _allowed(self) -> dict[Prefetch, tuple[int, float]]:
        """Who waits and is not too far ahead, with the order: tenants in turn, the oldest first."""
        ready = Counter(prefetch.namespace for prefetch in self._ready)
        tenants = {*ready, *(prefetch.namespace for prefetch in self._waiting)}
        share = max(1, self.ahead // max(1, len(tenants)))
        places = Counter(ready)
        allowed = {}
        for prefetch in self._waiting:
            if ready[prefetch.namespace] < share:
                allowed[prefetch] = (places[prefetch.namespace], prefetch.due)
                places[prefetch.namespace] += 1
        return allowed

    def _pays(self, prefetch: Prefetch) -> bool:
        """Whether something more is done for a question, and would be ready before its turn."""
        is_wanted = prefetch._state is _State.RUNNING
        return is_wanted and (self._seconds is None or prefetch.turn_in() >= self._seconds)

    def _settle(self, prefetch: Prefetch, name: str) -> None:
        is_ready = name == "finished"
        with self._changed:
            if prefetch._is_begun or name == "failed":
                self._counts[name] += 1
            if prefetch._state is _State.RUNNING and is_ready:
                prefetch._state = _State.READY
                self._ready.add(prefetch)
            elif is_ready and prefetch._is_useless:
                self._counts["useless"] += prefetch._is_begun
        prefetch.done.set_result(is_ready)

    def _prepare(self, prefetch: Prefetch) -> str:
        """Compute and load one after the other, for as long as it is wanted."""
        engine = self._engines.for_namespace(prefetch.namespace)
        policy = prefetch.policy or engine.policy
        given, scores, question = prefetch.chunks, prefetch.scores, prefetch.question
        keys = engine.needed(given, policy, scores, question=question)
        found = retrieved_chunks(question, given, scores)
        chunks = [given[at] for at in engine._bound.request_builder.needs(policy, found)]
        if len(keys) == len(given) and chunks == [*given]:
            prefetch.keys = tuple(keys)  # whose answer has no need to tokenise what is stored
        reads = len(chunks) > len(policy.plan(found).brought)  # one by one, and answers from fewer
        if not reads and sum(key.tokens for key in keys) > engine.context_window:
            return "failed"  # its answer will be refused
        is_joint = 0 < len(keys) < len(chunks)
        store = engine.combinations if is_joint else engine.store
        for key, text in dict(zip(keys, chunks, strict=False)).items():
            is_held = store.contains(key)
            if not (self._pays(prefetch) or (is_held and prefetch._state is _State.RUNNING)):
                return "cancelled"
            if is_held:
                self._note(prefetch, "loaded", engine.load_ahead([key]))
                continue
            self._note(prefetch, "computed", 1)
            started = time.monotonic()
            if is_joint:
                engine.add_combination([chunks])
            else:
                engine.add([text])
            self._seconds = time.monotonic() - started
        # Chunks that were added have it done already; of others the auxiliary's own may be gone.
        if "relevance" in policy.reads and self._pays(prefetch):
            engine._add_scored(given, policy)
        return "finished"

    def _note(self, prefetch: Prefetch, name: str, count: int) -> None:
        if not count:
            return
        with self._changed:
            self._counts["started"] += not prefetch._is_begun
            prefetch._is_begun = True
            self._counts[name] += count


class Engines:
    """One engine per tenant over one model; the memory of a prompt is kept for one of them only.

    Safe to use from any thread.

    Attributes:
        base: The engine that the others are made from.
    """

    def __init__(self, base: Engine) -> None:
        """Serve `base` for its own namespace, and others made from it."""
        self.base = base
        self._lock = new_lock()
        self._known: LRUCache[str, Engine] = LRUCache(TENANTS)

    def for_namespace(self, namespace: str) -> Engine:
        """The engine of a tenant."""
        if namespace == self.base.namespace:
            return self.base
        with self._lock:
            engine = self._known.get(namespace)
        if engine is None:
            candidate = self.base.in_namespace(namespace)
            with self._lock:
                engine = self._known.setdefault(namespace, candidate)
        return engine


def twin(engine: Engine, device: str) -> Engine:
    """A second engine over the same stores, with the same weights on a device of choice.

    On the engine's own device the weights are shared, not copied; each engine has its own lock, so
    both can compute at a time.

    Args:
        engine: The engine.
        device: "cpu", "cuda:1", ...

    Raises:
        InvalidInputError: If there is no such device, the weights cannot be put there, or what it
            computes would have other keys.
    """
    if why := engine._adapter.abilities.cannot_copy:
        raise InvalidInputError(
            f"{why} to prefetch beside itself; prefetch with the one that answers "
            '("same"), or not ("off")'
        )
    try:
        model = _placed(engine.model, checked_device(device))
        second = like(engine, model=model)
    except (RuntimeError, AssertionError, TypeError, UnsupportedModelError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidInputError(
            f"the model cannot be copied to {device!r} to prefetch there: {reason[0]}; name "
            "another device, or prefetch with the model that answers"
        ) from error
    ensure_same_keys(engine, second)
    return second


def ensure_same_keys(engine: Engine, second: Engine) -> None:
    """Refuse a second engine whose chunks the first one would never find.

    Raises:
        InvalidInputError: If their keys differ.
    """
    try:
        is_same = engine.spec == second.spec and engine.namespace == second.namespace
    except UnsupportedModelError as error:
        raise InvalidInputError(f"there is nothing to prefetch: {error}") from error
    if not is_same:
        raise InvalidInputError(
            "the engine that prefetches computes other keys than the one that answers; load it "
            "with the same weights, dtype, codec, template and namespace"
        )


def _placed(model: Any, device: torch.device) -> Any:
    """A copy of a module whose weights lie on `device`; those that lie there are shared."""
    if getattr(model, PACKED, None) is not None and device.type != "cpu":
        raise InvalidInputError(
            f"weights packed for a CPU cannot be copied to {str(device)!r}; load the model "
            'with weight_format="plain"'
        )
    memo: dict[int, Any] = {}
    for tensor in chain(model.parameters(), model.buffers()):
        memo[id(tensor)] = _moved(tensor, device)
    return copy.deepcopy(model, memo)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if torch.empty(0, device=device).device == tensor.device:
        return tensor
    moved = tensor.detach().to(device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=False)
    return moved


_LIVING: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(living: Any) -> None:
    """Close it when the process ends: a thread inside torch would abort the interpreter's end."""
    _LIVING.add(living)


@atexit.register
def _close_all() -> None:
    for living in list(_LIVING):
        living.close()
