"""Engines for the tenants of a server, and a second one with the same weights elsewhere."""

from __future__ import annotations

import copy
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from cachetools import LRUCache

from kvcache_rag.engine import Engine
from kvcache_rag.errors import InvalidInputError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

# Tenants whose engines are remembered; another one costs nothing but its prefix.
TENANTS = 64


class Engines:
    """One engine per tenant over one model; the memory of a prompt is kept for one of them only.

    Safe to use from any thread.

    Attributes:
        base: The engine that the others are made from.
    """

    def __init__(self, base: Engine) -> None:
        """Serve `base` for its own namespace, and others made from it."""
        self.base = base
        self._lock = threading.Lock()
        self._known: LRUCache[str, Engine] = LRUCache(TENANTS)
        self._last = base

    def of(self, namespace: str) -> Engine:
        """The engine of a tenant."""
        if namespace == self.base.namespace:
            return self.base
        with self._lock:
            known = self._known.get(namespace)
        if known is None:
            made = self.base.in_namespace(namespace)
            with self._lock:
                known = self._known.setdefault(namespace, made)
        return known

    def answering(self, namespace: str) -> Engine:
        """The engine of a tenant, for the thread that answers."""
        engine = self.of(namespace)
        if engine is not self._last:
            self._last.forget_buffer()  # large, and made for prompts of another tenant
            self._last = engine
        return engine

    def explained(self, namespace: str) -> None:
        """Keep no memory of a prompt that was only explained; for the thread that answers."""
        engine = self.of(namespace)
        if engine is not self._last:
            engine.forget_buffer()


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
    try:
        model = _placed(engine.model, torch.device(device))
        second = Engine(
            model,
            engine.tokenizer,
            store=engine.store,
            combinations=engine.combinations,
            template=engine.template,
            policy=engine.policy,
            namespace=engine.namespace,
            auxiliary=engine.auxiliary,
            gate=engine.gate,
            prefill_dtype=engine.prefill_dtype,
            context_window=engine.context_window,
        )
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
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
