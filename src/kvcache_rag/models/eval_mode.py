"""A model as its chunks' keys promise it, whatever the app has switched on.

Autocast rounds what is computed, modules in training mode drop parts of it at random, and a default
device takes what was meant for the CPU.  None of this is in the name of a chunk, so that passes of
ours run without it; the app finds everything as it was.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.forks import in_child, new_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

# Modules of training that are in evaluation for now, and by how many passes at once.  An auxiliary
# model may be a view of the very model that answers in another thread.
_EVALUATED: dict[int, tuple[torch.nn.Module, int]] = {}

_LOCK = new_lock()


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Let a model compute in evaluation mode, in its own dtype, on its own device within."""
    kind = model.device.type
    is_cast = torch.is_autocast_enabled(kind)
    is_on_cpu = torch.get_default_device().type == "cpu"
    switched = _evaluate(model)
    try:
        with (
            torch.autocast(kind, enabled=False) if is_cast else nullcontext(),
            nullcontext() if is_on_cpu else torch.device("cpu"),
        ):
            yield
    finally:
        _put_back(switched)


def _evaluate(model: torch.nn.Module) -> list[torch.nn.Module]:
    found: dict[int, torch.nn.Module] = {}
    rest: list[Any] = [model]
    with _LOCK:
        while rest:  # `modules()` takes three times as long, and a question waits for it
            module = rest.pop()
            own = vars(module)
            if own["training"] or (_EVALUATED and id(module) in _EVALUATED):
                found[id(module)] = module
            rest += [part for part in own["_modules"].values() if part is not None]
        for module in found.values():
            count = _EVALUATED.get(id(module), (module, 0))[1]
            _EVALUATED[id(module)] = (module, count + 1)
            module.training = False
    return [*found.values()]


def _put_back(switched: list[torch.nn.Module]) -> None:
    if not switched:
        return
    with _LOCK:
        for module in switched:
            count = _EVALUATED.pop(id(module))[1] - 1
            if count:
                _EVALUATED[id(module)] = (module, count)
            else:
                module.training = True


@in_child
def _all_back() -> None:
    """The passes of other threads do not end in a forked child."""
    for module, _ in _EVALUATED.values():
        module.training = True
    _EVALUATED.clear()
