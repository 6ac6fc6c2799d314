"""Let a model use another attention function for one call.

What is asked of a model here leaves no trace in it: it is the app's, which may look at it, copy or
save it, or run it, while an answer is on its way.  So functions of ours stand behind the name
"sdpa" itself, and are called for the models of the passes within, in their thread alone.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache_rag.forks import in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor

STOCK = "sdpa"


def whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The bool mask of sdpa, always written out, so that it needs no causal rule beside it."""
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


@dataclass(frozen=True, eq=False)
class _Standing:
    """What stands behind "sdpa" for the modules of some configs."""

    configs: dict[int, Any]
    attention: Callable[..., tuple[Tensor, None]]
    mask: Callable[..., Any]


class _Here(threading.local):
    """What is in force in a thread; a context variable would go along into threads begun here."""

    standing: _Standing | None = None


_HERE = _Here()


def _attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The stock function, in whose place another one may stand for some calls."""
    if not is_compiling():  # an app that compiles its model compiles the stock function
        found = _HERE.standing
        if found is not None and id(vars(module).get("config")) in found.configs:
            return found.attention(module, *args, **kwargs)
    return sdpa_attention_forward(module, *args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    """The same of the mask that the function takes."""
    if not is_compiling():
        found = _HERE.standing
        if found is not None and id(kwargs.get("config")) in found.configs:
            return found.mask(*args, **kwargs)
    return sdpa_mask(*args, **kwargs)


def take_stock() -> bool:
    """Stand behind "sdpa"; False where an app has a function of its own there."""
    if ALL_ATTENTION_FUNCTIONS[STOCK] is sdpa_attention_forward:
        AttentionInterface.register(STOCK, _attention)
    if ALL_MASK_ATTENTION_FUNCTIONS[STOCK] is sdpa_mask:
        AttentionMaskInterface.register(STOCK, _mask)
    return ALL_ATTENTION_FUNCTIONS[STOCK] is _attention


def stock_configs(module: torch.nn.Module) -> list[Any]:
    """Configs of the parts of a model that attend by the stock "sdpa", for `standing`."""
    if not take_stock():
        return []
    return [one for one in _configs(module) if one._attn_implementation_internal == STOCK]


def _configs(module: torch.nn.Module) -> list[Any]:
    # Modules share their configs, and parts of a model may have different ones.
    found: list[Any] = [vars(part).get("config") for part in module.modules()]
    configs = {id(config): config for config in found}
    return [one for one in configs.values() if hasattr(one, "_attn_implementation_internal")]


@contextmanager
def standing(
    configs: list[Any],
    attention: Callable[..., tuple[Tensor, None]],
    mask: Callable[..., Any] = sdpa_mask,
) -> Iterator[None]:
    """Let a function stand behind "sdpa" within, in this thread, where modules have these configs.

    Args:
        configs: What `stock_configs` gave.
        attention: Takes and gives what the stock function does.
        mask: Makes the mask that it takes.
    """
    before = _HERE.standing
    _HERE.standing = _Standing({id(one): one for one in configs}, attention, mask)
    try:
        yield
    finally:
        _HERE.standing = before


def stands(configs: list[Any]) -> bool:
    """Whether a function stands behind "sdpa" for any of these configs in this thread."""
    found = _HERE.standing
    return found is not None and any(id(one) in found.configs for one in configs)


# Configs that say another name for now, and what they say else.
_NAMED: dict[int, tuple[Any, Any]] = {}


@contextmanager
def attention_switched(
    module: torch.nn.Module,
    name: str,
    attention: Callable[..., tuple[Tensor, None]],
    mask: Callable[..., Any],
) -> Iterator[None]:
    """Let every forward pass within attend by a function.

    Args:
        module: The model, whose lock is held (`lock_of`).
        name: To register the function by, for what does not attend by "sdpa": "eager" is in no
            register, so the config has to say this name meanwhile.
        attention: As transformers calls them.
        mask: Makes the mask that it takes.
    """
    stock = stock_configs(module)
    known = {id(one) for one in stock}
    # Not the property, which sets parts below as well, nor the model's method, which warns.
    others = [
        (one, one._attn_implementation_internal) for one in _configs(module) if id(one) not in known
    ]
    if others:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)
    with ExitStack() as stack:
        stack.enter_context(standing(stock, attention, mask))
        for config, implementation in others:
            stack.callback(_say, config, implementation)
            _NAMED.setdefault(id(config), (config, implementation))
            config._attn_implementation_internal = name
        yield


def _say(config: Any, implementation: Any) -> None:
    config._attn_implementation_internal = implementation
    found = _NAMED.get(id(config))
    if found is not None and found[1] == implementation:
        del _NAMED[id(config)]


@in_child
def _say_all() -> None:
    """What another thread would have put back."""
    for config, implementation in [*_NAMED.values()]:
        _say(config, implementation)
