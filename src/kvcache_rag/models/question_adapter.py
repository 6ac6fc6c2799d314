"""An adapter that acts on question and answer alone (activated LoRA, arXiv 2504.12397).

Chunks are the untouched model's own, so one store serves the model with any such adapter and with
none, and what is answered without documents is what the model says by itself.  Beside each linear
layer that the adapter changes lies one with the product in its weights, which computes instead of
it while the adapter is in force in a thread.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.adapters import base_of, compare_base, note_training, trains_blocks
from kvcache_rag.models.lora import LoraPair, lora_digest, read_lora
from kvcache_rag.models.weights import PACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_ATTRIBUTE: Final = "_kvcache_rag_question_adapter"


class _InForce(threading.local):
    """The adapter that acts in a thread."""

    adapter: QuestionAdapter | None = None


_HERE: Final = _InForce()


class _Either:
    """The forward pass of a linear layer that an adapter changes."""

    def __init__(self, adapter: QuestionAdapter, layer: nn.Module, other: nn.Module) -> None:
        self._adapter, self._layer, self._other = adapter, layer, other
        self._own = type(layer).forward

    def __call__(self, inputs: Tensor) -> Tensor:
        found: Tensor
        if _HERE.adapter is self._adapter:
            found = self._other(inputs)
        else:
            found = self._own(self._layer, inputs)
        return found


class QuestionAdapter:
    """An adapter in a model.

    Attributes:
        digest: What names it.
    """

    def __init__(self, model: nn.Module, digest: str, changed: Mapping[str, nn.Module]) -> None:
        """Let layers with an adapter in their weights stand in for those of a model.

        Args:
            model: Gets it as an attribute.
            digest: What names the adapter.
            changed: The layers by the paths of those that they stand in for.
        """
        self.digest = digest
        self._model, self._changed = model, dict(changed)
        self._stand_in()
        setattr(model, _ATTRIBUTE, self)

    def _stand_in(self) -> None:
        for path, other in self._changed.items():
            layer = self._model.get_submodule(path)
            # No module, which would be a part of the model.
            layer.__dict__["forward"] = _Either(self, layer, other)

    def follow(self) -> None:
        """Keep the weights as those beside them are kept now."""
        for path, other in self._changed.items():
            layer = self._model.get_submodule(path)
            unpacked: Callable[[], nn.Module] | None = getattr(other, "plain", None)
            plain = other if unpacked is None else unpacked()
            packed: Callable[[nn.Module], nn.Module] | None
            packed = getattr(type(layer), "from_linear", None)
            self._changed[path] = plain if packed is None else packed(plain)
        self._stand_in()

    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Go where the model has gone.

        Raises:
            InvalidInputError: If that was cast.
        """
        for other in self._changed.values():
            if any(tensor.dtype != dtype for tensor in other.parameters()):
                raise InvalidInputError(
                    f"the model was cast to {dtype} after its adapter for questions was put into "
                    "it; load both in that dtype"
                )
            other.to(device)


@contextmanager
def acting(adapter: QuestionAdapter | None) -> Iterator[None]:
    """Let an adapter act in this thread, or none: chunks are the model's own."""
    before, _HERE.adapter = _HERE.adapter, adapter
    try:
        yield
    finally:
        _HERE.adapter = before


def question_adapter(model: Any) -> QuestionAdapter | None:
    """The adapter of a model that acts on questions alone; None for none."""
    found: QuestionAdapter | None = vars(model).get(_ATTRIBUTE)
    return found


def put_question_adapter(model: Any, folder: Path, name: str) -> Any:
    """Put an adapter that acts on questions alone beside the layers of a model.

    Args:
        model: A loaded transformers model; is changed, as is what its config says of its training.
        folder: The adapter's, which says so (`trained_on_questions`).
        name: What the model was loaded as, for messages.

    Returns:
        The model.

    Raises:
        InvalidInputError: If it does not fit, is more than a LoRA, the model has another one, or
            its weights are rounded.
    """
    pairs = read_lora(folder, "questions take", "train it as a plain LoRA")
    digest, known = lora_digest(folder), question_adapter(model)
    if known is not None:
        if known.digest != digest:
            raise InvalidInputError(
                f"the model {name!r} has another adapter for questions already; load it again for "
                f"{folder}"
            )
        return model
    from kvcache_rag.models.weight_formats import pack_weights

    is_packed = getattr(model, PACKED, None) is not None
    pack_weights(model, "plain")
    made_for = f", which was made for {base_of(folder)!r}," if base_of(folder) else ""
    changed = {}
    for path, pair in pairs.items():
        layer, shape = _layer(model, path), (len(pair.up), pair.down.shape[1])
        if layer is None or layer.weight.shape != shape:
            raise InvalidInputError(
                f"the adapter {folder}{made_for} does not fit the model {name!r}: it has no plain "
                f"linear layer {path} of {pair.down.shape[1]} inputs and {len(pair.up)} outputs"
            )
        changed[path] = _with_product(layer, pair)
    compare_base(model, folder, name)
    note_training(model.config, blocks=trains_blocks(folder))
    QuestionAdapter(model, digest, changed)
    return pack_weights(model) if is_packed else model


def _layer(model: nn.Module, path: str) -> nn.Linear | None:
    """The linear layer at a path; None if there is none, or one that does more than its product."""
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return None
    is_plain = type(found) is nn.Linear and "forward" not in vars(found)
    return cast("nn.Linear", found) if is_plain else None


def _with_product(layer: nn.Linear, pair: LoraPair) -> nn.Linear:
    """A layer with an adapter's product in its weights, summed in float64 on every machine."""
    outputs, inputs = layer.weight.shape
    device = layer.weight.device
    # Not in an inference mode: torch counts writes to no tensor that is made there.
    with torch.inference_mode(mode=False), torch.no_grad():
        other = nn.Linear(inputs, outputs, bias=False, device=device, dtype=layer.weight.dtype)
        product = pair.factor * (pair.up.double() @ pair.down.double())
        other.weight.copy_(layer.weight.cpu().double() + product)
        other.bias = layer.bias
    # On CPUs torch 2.13 takes twice the time for a few tokens where weights want no gradient.
    return other
