"""How the linear layers of a model keep their weights on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from torch import nn

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.models.processors import kernels
from kvcache_rag.models.question_adapter import question_adapter
from kvcache_rag.models.weights import PACKED

if TYPE_CHECKING:
    from kvcache_rag.models.weights import Packed

WeightFormat: TypeAlias = Literal["auto", "plain", "prepacked", "int8", "int4"]
"""How the linear layers of a model keep their weights.

"plain" keeps them as loaded.  The others need `kvcache-rag-cpu`: "prepacked" has the same numbers
in oneDNN's order; "int8" one scale per output; "int4" a scale and a zero point per 32 inputs, with
the output layer in int8.  "auto" is "prepacked" for a bfloat16 model on an x86 CPU that multiplies
bfloat16, else "plain".
"""

FORMATS: Final[tuple[str, ...]] = get_args(WeightFormat)


def pack_weights(model: Any, weight_format: WeightFormat = "auto") -> Any:
    """Replace the linear layers of a model on a CPU with faster ones.

    A "prepacked" model shares its chunks with the plain one: the numbers are the same, added up in
    another order.  "int8" and "int4" models have separate chunks.

    Args:
        model: A loaded transformers model; it is changed.  Layers that are not a plain `nn.Linear`
            (an adapter's, experts in one tensor) stay.
        weight_format: See `WeightFormat`.

    Returns:
        The model.

    Raises:
        InvalidInputError: If there is no such form, or the model cannot have it; nothing was
            changed then.
        MissingExtraError: If the form needs kvcache-rag-cpu, which is not installed.
    """
    check_weight_format(weight_format)
    return _followed(model if (found := kernels()) is None else found.pack(model, weight_format))


def check_weight_format(weight_format: str) -> None:
    """Refuse what is known before a model is read.

    Raises:
        InvalidInputError: If there is no such form.
        MissingExtraError: As for `pack_weights`.
    """
    if weight_format not in FORMATS:
        names = ", ".join(map(repr, FORMATS))
        raise InvalidInputError(f"weight_format must be one of {names}, not {weight_format!r}")
    if weight_format not in ("auto", "plain") and kernels() is None:
        raise MissingExtraError("kvcache-rag-cpu", "cpu")


def unpack_weights(model: Any) -> Any:
    """Give a model torch's layers again, with their current numbers."""
    return _followed(model if (found := kernels()) is None else found.unpack(model))


def _followed(model: Any) -> Any:
    """The model, with what stands in for its layers in their form."""
    if (adapter := question_adapter(model)) is not None:
        adapter.follow()
    return model


def parameter_count(model: Any) -> int:
    """Parameters of a model in any weight format; tied ones count once."""
    packed: Packed | None = getattr(model, PACKED, None)
    if packed is not None:
        return packed.parameters
    if not isinstance(model, nn.Module):  # of another back end
        return int(model.num_parameters())
    return sum(parameter.numel() for parameter in model.parameters())
