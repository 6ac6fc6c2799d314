"""Let a model attend by another function for one call."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor


_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()

_MAKING = threading.Lock()


def lock_of(module: torch.nn.Module) -> threading.RLock:
    """The lock of a model: engines that share it take turns, also with what they switch in it."""
    with _MAKING:
        return _LOCKS.setdefault(module, threading.RLock())


def whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The bool mask of sdpa, always written out, so that it needs no causal rule beside it."""
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


@contextmanager
def attention_switched(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Let every forward pass within attend by the registered function `name`.

    Args:
        module: The model, whose lock is held (`lock_of`).
        name: Registered with `AttentionInterface` and `AttentionMaskInterface`.
    """
    # Modules share their configs, and parts of a model may have different ones.
    found: list[Any] = [vars(part).get("config") for part in module.modules()]
    configs = {id(config): config for config in found}
    # Not the property, which sets parts below as well, nor the model's method, which warns.
    own: list[tuple[Any, Any]] = [
        (config, config._attn_implementation_internal)
        for config in configs.values()
        if hasattr(config, "_attn_implementation_internal")
    ]
    try:
        for config, _ in own:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in own:
            config._attn_implementation_internal = implementation
