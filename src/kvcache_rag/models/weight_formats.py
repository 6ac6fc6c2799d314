"""In which form the linear layers of a model keep their weights on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from torch import nn

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.models.processors import kernels
from kvcache_rag.models.weights import PACKED

if TYPE_CHECKING:
    from kvcache_rag.models.weights import Packed

WeightFormat: TypeAlias = Literal["auto", "plain", "prepacked", "int8", "int4"]
"""How the linear layers of a model keep their weights.

"plain" as they were loaded; the others by `kvcache-rag-cpu`: "prepacked" the same numbers in
oneDNN's order; "int8" with one scale per output; "int4" with a scale and a zero point per 32
inputs, the output layer in int8; "auto" is "prepacked" for a bfloat16 model on an x86 CPU that
multiplies bfloat16, else "plain".
"""

FORMATS: Final[tuple[str, ...]] = get_args(WeightFormat)


def pack_weights(model: Any, weight_format: WeightFormat = "auto") -> Any:
    """Exchange the linear layers of a model on a CPU for ones that are faster there.

    Chunks of a "prepacked" model are those of the plain one (its numbers are the same, added up in
    another order); "int8" and "int4" are models of their own, whose chunks are kept apart.

    Args:
        model: A loaded transformers model; it is changed.  Layers that are no plain `nn.Linear`
            (an adapter's, experts in one tensor) stay.
        weight_format: See `WeightFormat`.

    Returns:
        The model.

    Raises:
        InvalidInputError: If there is no such form, or it is none for this model.  Then nothing
            was changed.
        MissingExtraError: If a form is named that kvcache-rag-cpu brings, and it is not installed.
    """
    check_weight_format(weight_format)
    found = kernels()
    return model if found is None else found.pack(model, weight_format)


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
    """Give a model layers of torch's again, with the numbers that they have now."""
    found = kernels()
    return model if found is None else found.unpack(model)


def parameter_count(model: Any) -> int:
    """Parameters of a model, however its layers keep them; tied ones count once."""
    packed: Packed | None = getattr(model, PACKED, None)
    if packed is not None:
        return packed.parameters
    if not isinstance(model, nn.Module):  # of another back end
        return int(model.num_parameters())
    return sum(parameter.numel() for parameter in model.parameters())
