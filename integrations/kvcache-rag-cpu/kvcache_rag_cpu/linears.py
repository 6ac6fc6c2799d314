"""Weights of linear layers in the forms that CPUs multiply fastest.

A generated token reads every weight once, so decoding takes a matrix times a vector per layer.
There torch's function for bfloat16 reaches a quarter of the memory's speed, oneDNN's half.  Our
kernel (`few_rows.c`), which reads oneDNN's blocked order of the same weights, reaches all of it.
Eight and four bits read less, also by our kernel (`rounded_weights.c`).  Norms take one step
(`norms.py`); all else stays the same.

Layers are replaced in place, and the memory of their old weights is freed.
"""

from __future__ import annotations

import copy
import ctypes
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.processors import has_kernels
from kvcache_rag.models.weight_formats import parameter_count
from kvcache_rag.models.weights import PACKED, OpaqueWeight, Packed, model_identity
from kvcache_rag_cpu import few_rows, rounded_weights
from kvcache_rag_cpu.norms import FusedNorm, fused_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

_LOG: Final = logging.getLogger(__name__)

# Inputs that share a scale and a zero point in four bits, as in llama.cpp's Q4_1.
GROUP: Final = 32

# torch's kernel takes outputs in such blocks.
_BLOCK: Final = 16

# Smaller layers (routers of experts, heads of values) cost nothing and lose most.
_SMALLEST: Final = 2**12

# Scales are no less than this in their dtype; float16 has nothing so small.
_LEAST: Final = {torch.bfloat16: 1e-12, torch.float16: 2.0**-24, torch.float32: 1e-12}

# Weights that are rounded to eight bits at a time.
_ROUNDED: Final = 2**22

# Rows from which on eight bits are widened first: their kernel's time grows with every row.
_WIDEN: Final = 48


# Found once: looking for an operator takes as long as calling it.  Not every torch has oneDNN.
_POINTWISE: Final = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_PREPACKED: Final[Any] = getattr(_POINTWISE, "default", None)
_INT4: Final = torch._weight_int4pack_mm_for_cpu


class PackedLinear(nn.Module):
    """A linear layer whose weights are kept in another form.

    Attributes:
        in_features: Width of its input.
        out_features: Width of its output.
        bias: `(out_features,)`, or None.
    """

    weight_format: ClassVar[str]
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Take the place of `linear`."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self.dtype = linear.weight.dtype

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """`linear`, in this form."""
        # Not in an inference mode: torch counts writes to no tensor that is made there.
        with torch.inference_mode(mode=False), torch.no_grad():
            return cls(linear)

    @property
    def weight(self) -> Tensor:
        """`(out_features, in_features)`, a copy in the dtype of the model.

        Made in inference mode, so that torch refuses writes, which would be lost.
        """
        with torch.inference_mode():
            return self.dense()

    def dense(self) -> Tensor:
        """`(out_features, in_features)`, as it multiplies."""
        raise NotImplementedError

    def plain(self) -> nn.Linear:
        """A linear layer of torch's with these weights."""
        with torch.inference_mode(mode=False), torch.no_grad():
            linear = nn.Linear(
                self.in_features, self.out_features, self.bias is not None, dtype=self.dtype
            )
            linear.weight.copy_(self.dense())
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear.requires_grad_(False)

    def extra_repr(self) -> str:
        """Its widths, as torch prints them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = torch.empty(1, dtype=self.dtype)
        moved = fn(probe)
        if moved.dtype != probe.dtype or moved.device != probe.device:
            raise InvalidInputError(
                f"weights that are packed for a CPU stay there, in {self.dtype}; load the model "
                'with weight_format="plain" to move or cast it'
            )
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        raise InvalidInputError(
            f"weights rounded to {self.weight_format} are not saved, as transformers would load "
            "others in their place; save the model that they were made of, or unpack_weights(model)"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        raise InvalidInputError(
            f"weights that are {self.weight_format} take no others in; load the others into the "
            "plain model, or call unpack_weights(model) first"
        )


class PrepackedLinear(PackedLinear, OpaqueWeight):
    """The same numbers in oneDNN's blocked order: bfloat16, added up in float32."""

    weight_format = "prepacked"

    def __init__(self, linear: nn.Linear) -> None:
        """Reorder the weights of `linear`."""
        super().__init__(linear)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self._address = few_rows.address(self._packed, linear.weight)

    def dense(self) -> Tensor:
        """`(out_features, in_features)`, bit by bit what it was made of."""
        return cast("Tensor", self._packed.to_dense())

    def forward(self, inputs: Tensor) -> Tensor:
        """`(..., out_features)` of `(..., in_features)`."""
        bias = self._parameters["bias"]
        if self._address and few_rows.takes(inputs, self.in_features):
            width, outputs = self.in_features, self.out_features
            return few_rows.linear(inputs, width, self._address, outputs, bias)
        return cast("Tensor", _PREPACKED(inputs, self._packed, bias, "none", [], ""))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # torch copies no opaque tensor; nothing writes this one, so copies share it.
        memo[id(self)] = other = self.__class__.__new__(self.__class__)
        for name, value in vars(self).items():
            other.__dict__[name] = value if name == "_packed" else copy.deepcopy(value, memo)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_linear, (self.plain(),)  # nor can it be pickled

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.dense()


class Int8Linear(PackedLinear):
    """Eight bits a weight, one scale per output; inputs stay as they are.

    Attributes:
        integers: `(out_features, in_features)` int8, or those in the order of our kernel.
        scales: `(out_features,)` in the dtype of the model.
    """

    weight_format = "int8"
    integers: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weights of `linear` to 255 steps per output, symmetrically around 0."""
        super().__init__(linear)
        weight = linear.weight.detach()
        scales = weight.new_empty(self.out_features)
        integers = weight.new_empty(weight.shape, dtype=torch.int8)
        # By parts: an output layer of 150,000 tokens would be some GB in float32.
        step = max(1, _ROUNDED // self.in_features)
        for first in range(0, self.out_features, step):
            some = slice(first, first + step)
            numbers = weight[some].float()
            # In the model's dtype before dividing: the same scale multiplies later.
            scales[some] = (numbers.abs().amax(1) / 127).clamp_(min=_LEAST[self.dtype])
            integers[some] = (numbers / scales[some].float()[:, None]).round_().clamp_(-127, 127)
        if rounded_weights.fits(integers, self.dtype):
            integers = rounded_weights.ordered(integers)
        self.register_buffer("integers", integers)
        self.register_buffer("scales", scales)

    def dense(self) -> Tensor:
        """`(out_features, in_features)`, as rounded."""
        integers = self.integers
        if integers.dim() > 2:
            integers = rounded_weights.as_rows(integers)
        return integers.to(self.dtype) * self.scales[:, None]

    def forward(self, inputs: Tensor) -> Tensor:
        """`(..., out_features)` of `(..., in_features)`."""
        # Looked up without a call of Python's.
        own, bias = cast("dict[str, Tensor]", self._buffers), self._parameters["bias"]
        integers, is_ordered = own["integers"], own["integers"].dim() > 2
        if is_ordered and rounded_weights.library() is not None:
            scales, outputs = own["scales"], self.out_features
            return rounded_weights.product(inputs, integers, scales, bias, outputs, 8)
        rows = inputs.reshape(-1, self.in_features)  # (rows, in_features)
        if is_ordered or len(rows) >= _WIDEN:
            return nn.functional.linear(inputs, self.dense(), bias)
        output = torch._weight_int8pack_mm(rows.contiguous(), integers, own["scales"])
        return _shaped(output, inputs, bias)


class Int4Linear(PackedLinear):
    """Four bits a weight, a scale and a zero point per `GROUP` inputs; inputs stay as they are.

    Attributes:
        packed: `(out_features, in_features / 2)` uint8, in an order that depends on the CPU.
        levels: `(in_features / GROUP, out_features, 2)`: scale, and the weight that 8 stands for.
    """

    weight_format = "int4"
    packed: Tensor
    levels: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weights of `linear` to 16 steps from the least to the largest of a group."""
        super().__init__(linear)
        # (out_features, groups, GROUP)
        weight = linear.weight.detach().float().view(self.out_features, -1, GROUP)
        low, high = weight.amin(-1), weight.amax(-1)
        scales = ((high - low) / 15).clamp(min=_LEAST[self.dtype]).to(self.dtype)
        middle = (low + 8 * scales.float()).to(self.dtype)
        steps = (weight - middle.float()[..., None]) / scales.float()[..., None] + 8
        integers = steps.round_().clamp_(0, 15).to(torch.int32).flatten(1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
        fits = rounded_weights.fits(integers, self.dtype)
        self._is_read = fits and rounded_weights.is_read(packed, integers)
        self.register_buffer("packed", packed)
        self.register_buffer("levels", torch.stack([scales.t(), middle.t()], -1).contiguous())

    def dense(self) -> Tensor:
        """`(out_features, in_features)`, as rounded: what the kernel makes of a unit matrix."""
        units = torch.eye(self.in_features, dtype=self.dtype)
        return self._product(units).t().contiguous()

    def forward(self, inputs: Tensor) -> Tensor:
        """`(..., out_features)` of `(..., in_features)`."""
        bias = self._parameters["bias"]
        if self._is_read and rounded_weights.library() is not None:
            own, outputs = cast("dict[str, Tensor]", self._buffers), self.out_features
            packed, levels = own["packed"], own["levels"]
            return rounded_weights.product(inputs, packed, levels, bias, outputs, 4)
        rows = inputs.reshape(-1, self.in_features)  # (rows, in_features)
        return _shaped(self._product(rows), inputs, bias)

    def _product(self, rows: Tensor) -> Tensor:
        own = cast("dict[str, Tensor]", self._buffers)
        return _INT4(rows.contiguous(), own["packed"], GROUP, own["levels"])


def _shaped(output: Tensor, inputs: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        output += bias
    return output.view(*inputs.shape[:-1], -1)


def pack(model: Any, weight_format: str) -> Any:
    """See `kvcache_rag.models.weight_formats.pack_weights`."""
    before = getattr(model, PACKED, None)
    now = "plain" if before is None else before.weight_format
    if weight_format == "auto":
        gains = now == "plain" and _prepacks(model) and any(_forms(model, "prepacked"))
        return _pack(model, "prepacked") if gains else model
    if now == "prepacked" != weight_format:
        unpack(model)  # the numbers are the same
        now, before = "plain", None
    if weight_format == now:
        return model
    _ensure_packable(model, weight_format, before)
    if weight_format in ("int8", "int4") and not rounded_weights.has_kernel(model.dtype):
        _LOG.warning(
            "there is no kernel here for %s weights of a %s model, and torch's own functions take "
            "several times as long for a token as with plain weights: they save memory alone; "
            'backend="llama.cpp" runs a GGUF file\'s own bits',
            weight_format,
            str(model.dtype).removeprefix("torch."),
        )
    return _pack(model, weight_format)


def unpack(model: Any) -> Any:
    """See `kvcache_rag.models.weight_formats.unpack_weights`."""
    made: dict[nn.Module, nn.Module] = {}
    for module in [*model.modules()]:
        for name, child in [*module._modules.items()]:
            if isinstance(child, PackedLinear | FusedNorm):
                if child not in made:
                    made[child] = child.plain()
                setattr(module, name, made[child])
    if getattr(model, PACKED, None) is not None:
        delattr(model, PACKED)
        _tie_again(model)
    return model


def _pack(model: Any, weight_format: str) -> Any:
    forms = [*_forms(model, weight_format)]
    if not forms:
        raise InvalidInputError(
            f"no linear layer of the model can be {weight_format}; leave weight_format out"
        )
    identity = model_identity(model)
    if weight_format != "prepacked":
        # The number tells models apart of which some layers cannot be exchanged.
        identity = {**identity, "weight_format": weight_format, "packed_layers": len(forms)}
    parameters = parameter_count(model)
    made: dict[nn.Module, PackedLinear] = {}  # a layer may be at two places
    for module, name, linear, form in forms:
        if linear not in made:
            made[linear] = form.from_linear(linear)
            linear.weight = None  # type: ignore[assignment]  # gives memory back before the next
        setattr(module, name, made[linear])
    _fuse_norms(model)
    _give_back(model)
    setattr(model, PACKED, Packed(weight_format, identity, parameters))
    return model


def _give_back(model: Any) -> None:
    """Keep no memory but that of the weights as they are now.

    Loaded weights are views of the file's memory, and one of them keeps all of it: of SmolLM2 256
    MiB for the 54 of its embeddings.  The C library keeps what was freed: of 8 bits 370 MiB.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and type(tensor.data) is torch.Tensor:
            tensor.data = tensor.data.clone()
    with suppress(AttributeError, OSError, TypeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def _fuse_norms(model: Any) -> None:
    """Exchange norms for ones that give the same numbers sooner."""
    made: dict[nn.Module, FusedNorm | None] = {}
    for module in [*model.modules()]:
        for name, child in [*module._modules.items()]:
            if child is not None and made.setdefault(child, fused_norm(child)) is not None:
                setattr(module, name, made[child])


def _tie_again(model: Any) -> None:
    """Let the output layer share the memory of the embeddings where the numbers are the same."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    ties = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    if ties and type(head) is nn.Linear and torch.equal(head.weight, embeddings.weight):
        head.weight = embeddings.weight


def _forms(
    model: Any, weight_format: str
) -> Iterator[tuple[nn.Module, str, nn.Linear, type[PackedLinear]]]:
    """Where linear layers stand that can be packed, and what each becomes."""
    head = model.get_output_embeddings()
    for module in model.modules():
        for name, child in module._modules.items():
            # Not one derived from it, which may do something else, nor one that is hooked into.
            if type(child) is nn.Linear and not (child._forward_hooks or child._forward_pre_hooks):
                form = _form(child, weight_format, is_head=child is head)
                if form is not None:
                    yield module, name, child, form


def _form(module: nn.Linear, weight_format: str, *, is_head: bool) -> type[PackedLinear] | None:
    if module.weight.dtype not in _LEAST or module.weight.device.type != "cpu":
        return None
    if weight_format == "prepacked":
        return PrepackedLinear if module.weight.dtype == torch.bfloat16 else None
    whole = not (module.in_features % GROUP or module.out_features % _BLOCK)
    if not whole or module.weight.numel() < _SMALLEST:
        return None
    return Int8Linear if weight_format == "int8" or is_head else Int4Linear


def _prepacks(model: Any) -> bool:
    return (
        model.device.type == "cpu"
        and model.dtype == torch.bfloat16
        and not hasattr(model, "peft_config")
        and getattr(model, "hf_quantizer", None) is None
        and has_kernels()
    )


def _ensure_packable(model: Any, weight_format: str, before: Packed | None) -> None:
    if model.device.type != "cpu":
        raise InvalidInputError(
            f"weight_format={weight_format!r} is for CPUs; on {model.device.type} load quantised "
            "weights by model_kwargs={'quantization_config': ...}"
        )
    if before is not None:
        raise InvalidInputError(
            f"the model's weights are {before.weight_format} already; load it again for "
            f"{weight_format}"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise InvalidInputError(
            "the model's weights are quantised by transformers already; leave weight_format out"
        )
    if hasattr(model, "peft_config"):
        raise InvalidInputError(
            "an adapter that can be switched needs the weights as they are; merge it "
            "(merge_and_unload) or leave weight_format out"
        )
    if weight_format == "prepacked" and not _prepacks(model):
        raise InvalidInputError(
            "prepacked weights are for bfloat16 models on x86 CPUs that multiply bfloat16 "
            '(AVX-512); use weight_format="auto"'
        )
