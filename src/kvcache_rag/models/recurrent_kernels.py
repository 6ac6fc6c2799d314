"""What recurrent kernels of transformers do not return, obtained by replacing them by name.

Kernels are functions of a modelling module.  One site of one model is given another function under
such a name, in a copy of its forward function and for the time of one pass; the module's own stays.
Nothing of it lies in the model, which an app may look at, copy, save or run meanwhile: classes of
sites ask, at each call, what stands in for them in this thread.
"""

from __future__ import annotations

import inspect
import math
import threading
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from kvcache_rag.forks import new_lock
from kvcache_rag.models.cache import held_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class _Here(threading.local):
    """What stands in for the forward functions of some modules in a thread, by their identity."""

    forwards: Mapping[int, Callable[..., Any]] = MappingProxyType({})


_HERE = _Here()

_OWN: dict[type[nn.Module], Callable[..., Any]] = {}  # of the classes that ask

_ASKING = new_lock()


def forward_of(module: nn.Module) -> FunctionType | None:
    """The forward function of a module's class, undecorated; None where another stands in."""
    inner = inspect.unwrap(type(module).forward)
    is_stock = id(module) not in _HERE.forwards
    return inner if is_stock and isinstance(inner, FunctionType) else None


def running(module: nn.Module) -> Callable[..., Any]:
    """What runs in this thread where a module's class would."""
    kind = type(module)
    return _HERE.forwards.get(id(module)) or _OWN.get(kind, kind.forward)


def with_names(inner: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """The same function, which knows other functions under some global names."""
    copy = FunctionType(
        inner.__code__,
        {**inner.__globals__, **names},
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy


@contextmanager
def rebound(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let another function stand in for the class of this module alone, in this thread alone.

    A function that an app has put into the module, as accelerate does, calls it, too.
    """
    _let_ask(type(module))
    before = _HERE.forwards
    _HERE.forwards = {**before, id(module): forward}
    try:
        yield
    finally:
        _HERE.forwards = before


def _let_ask(kind: type[nn.Module]) -> None:
    with _ASKING:
        if kind in _OWN:
            return
        own = _OWN[kind] = kind.forward

        @wraps(own)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # An app that compiles its model compiles the stock function; a class under this one
            # may call it from its own.
            if type(self) is kind and not is_compiling():
                found = _HERE.forwards.get(id(self))
                if found is not None:
                    return found(self, *args, **kwargs)
            return own(self, *args, **kwargs)

        kind.forward = forward


# ---------------------------------------------------------------------------- transitions
# How the state before some tokens gets into the state behind them, out of the run that computes
# them.


def _of_delta_rule(found: Callable[[Tensor], None], kernel: Any) -> Any:
    """A delta rule treats every column of its state alike.

    So it is given as many columns more as a key is wide, whose values are 0 and whose state is the
    identity: what it makes of them is `A` (arXiv 2406.06484, equation 3: `S (I - beta k k^T)`).
    """

    def wrapped(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows, width = key.shape[-1], value.shape[-1]
        state = kwargs.pop("initial_state", None)
        if state is None:
            state = torch.zeros(value.shape[0], value.shape[2], rows, width, device=value.device)
        unit = torch.eye(rows, device=state.device).expand(*state.shape[:2], rows, rows)
        state = wide(state)
        output, behind = kernel(
            query,
            key,
            nn.functional.pad(value, (0, rows)),
            *args,
            initial_state=torch.cat([state, unit.to(state)], -1),
            **kwargs,
        )
        if behind is not None:
            found(behind[..., width:].clone())
            behind = behind[..., :width].contiguous()
        return output[..., :width].contiguous(), behind

    return wrapped


def _of_mamba2(found: Callable[[Tensor], None], kernel: Any) -> Any:
    """One number a head decays at each token: `exp(A dt)` (arXiv 2405.21060, section 2)."""

    def wrapped(hidden: Tensor, dt: Tensor, decay: Tensor, *args: Any, **kwargs: Any) -> Any:
        bias = kwargs.get("dt_bias")
        step = dt if bias is None else dt + bias.to(dt.dtype)
        step = nn.functional.softplus(step) if kwargs.get("dt_softplus") else step
        step = wide(step.clamp(*kwargs.get("dt_limit", (0.0, math.inf))))  # (rows, tokens, heads)
        found((wide(decay) * step).sum(1).exp()[..., None, None])  # (rows, heads, 1, 1)
        return kernel(hidden, dt, decay, *args, **kwargs)

    return wrapped


KERNELS: Final[dict[str, Callable[[Callable[[Tensor], None], Any], Any]]] = {
    "torch_chunk_gated_delta_rule": _of_delta_rule,
    "chunk_kimi_delta_attention": _of_delta_rule,
    "mamba2_chunk_scan": _of_mamba2,
}


# ---------------------------------------------------------------------------- scans
# Mamba1's scan over several tokens begins at zeros in transformers, whatever state there is, as its
# fast kernel takes none: off by several standard deviations. The scan is linear, so what the state
# adds is put on top of what any kernel gives.

SCAN: Final = "mamba_selective_scan"
_SCAN_TOKENS: Final = 64  # worked on at once: `(rows, channels, tokens, states)` is large


def carrying(inner: FunctionType, layer: int, slot: int | str) -> Callable[..., Any]:
    """A forward function whose scans go on from the state that its cache holds.

    Args:
        inner: The forward function of a site.
        layer: Its layer in the cache.
        slot: Which argument is the cache: a place or a name.
    """
    waiting = threading.local()
    kernel = inner.__globals__[SCAN]

    def scan(
        hidden: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        result = kernel(hidden, dt, decay, b, c, *args, **kwargs)
        if not waiting.states:
            return result
        added, behind = _added(waiting.states.pop(0), dt, decay, c, kwargs)
        if kwargs.get("return_last_state"):
            return result[0] + added.to(result[0]), result[1] + behind.to(result[1])
        return result + added.to(result)

    copy = with_names(inner, {SCAN: scan})

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get(slot) if isinstance(slot, str) else args[slot]
        state = None if cache is None else held_state(cache, layer)[1]
        if state is None or not cache.layers[layer].has_previous_state[0]:
            waiting.states = []
        else:  # per head where the module scans its heads one after another
            waiting.states = [state] if state.ndim == 3 else [*state.unbind(1)]
        return copy(module, *args, **kwargs)

    return forward


def _added(
    state: Tensor, dt: Tensor, decay: Tensor, c: Tensor, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """What a state `(rows, channels, n)` adds to a scan's outputs, and to the state behind it."""
    bias = options.get("delta_bias")
    step = dt if bias is None else dt + bias[..., None].to(dt.dtype)
    step = nn.functional.softplus(step) if options.get("delta_softplus") else step
    step = wide(step).cumsum(-1)  # (rows, channels, tokens)
    decay, state = wide(decay), wide(state)
    outputs = []
    for first in range(0, step.shape[-1], _SCAN_TOKENS):
        some = slice(first, first + _SCAN_TOKENS)
        carried = (decay[None, :, None] * step[..., some, None]).exp() * state[:, :, None]
        outputs.append(torch.einsum("rctn,rnt->rct", carried, wide(c[..., some])))
    added = torch.cat(outputs, -1)
    if options.get("z") is not None:
        added = added * nn.functional.silu(options["z"])
    return added, (decay * step[..., -1:]).exp() * state


def named_kernel(module: nn.Module, kernels: Iterable[str]) -> str:
    """The one of these kernels that a site's forward function calls by its name, or ""."""
    inner = forward_of(module)
    if inner is None:
        return ""
    names = [name for name in kernels if name in inner.__code__.co_names]
    return names[0] if len(names) == 1 and names[0] in inner.__globals__ else ""


def wide(tensor: Tensor) -> Tensor:
    """In float32, or wider as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
