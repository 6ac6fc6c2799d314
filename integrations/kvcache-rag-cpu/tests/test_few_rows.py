"""Linear layers of few rows as exact as oneDNN's, and norms with the very bits of transformers'."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from zoo import build

from kvcache_rag.models import pack_weights, unpack_weights
from kvcache_rag.models.weights import Weights
from kvcache_rag_cpu import few_rows
from kvcache_rag_cpu.linears import PrepackedLinear
from kvcache_rag_cpu.norms import FusedNorm, fused_norm

BF16 = torch.bfloat16

needs_kernel = pytest.mark.skipif(
    few_rows.library() is None, reason="no compiled kernel, or no CPU with AVX-512 for bfloat16"
)


def _layer(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias).to(BF16).requires_grad_(False)


def _by_onednn(form: PrepackedLinear, inputs: Tensor) -> Tensor:
    other = copy.copy(form)
    other.__dict__["_address"] = 0
    return other(inputs)


@needs_kernel
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, few_rows.MOST, few_rows.MOST + 1])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (256, 192), (1536, 576)])
def test_it_is_as_exact_as_onednn(inputs: int, outputs: int, rows: int, bias: bool) -> None:
    linear = _layer(inputs, outputs, bias=bias)
    form = PrepackedLinear.from_linear(linear)
    assert form._address
    given = torch.randn(1, rows, inputs).to(BF16)
    exact = nn.functional.linear(given.double(), linear.weight.double())
    exact += 0 if linear.bias is None else linear.bias.double()
    found, other = form(given), _by_onednn(form, given)
    assert found.shape == other.shape
    assert float((found - exact).abs().mean()) <= 1.001 * float((other - exact).abs().mean())
    # Products and sums are those of the same instruction; only the last bit of some may differ.
    assert float((found == other).float().mean()) > 0.99


@needs_kernel
def test_what_it_cannot_take_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    form, given = PrepackedLinear.from_linear(_layer(256, 192)), torch.randn(4, 256).to(BF16)
    expected, strided = form(given), given.t().contiguous().t()
    assert torch.equal(form(strided), expected)
    # No rows more than it is made for, and none that something is to be learned through.
    assert few_rows.takes(given, 256)
    many = torch.zeros(few_rows.MOST + 1, 256, dtype=BF16)
    for other in (strided, given.float(), given.to("meta"), given.clone().requires_grad_(), many):
        assert not few_rows.takes(other, 256)
    for inputs, outputs in ((96, 64), (64, 80)):
        odd = PrepackedLinear.from_linear(_layer(inputs, outputs))
        assert not odd._address
        assert odd(torch.zeros(1, inputs, dtype=BF16)).shape == (1, outputs)
    monkeypatch.setattr(few_rows, "library", lambda: None)
    without = PrepackedLinear.from_linear(_layer(256, 192))
    assert not without._address
    assert torch.allclose(without(given), expected, atol=0.02)


@needs_kernel
def test_an_order_of_onednn_that_is_another_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = _layer(128, 128)
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, 1)
    assert few_rows.address(packed, linear.weight)
    for row, column in ((0, 0), (127, 127), (64, 3)):  # of one number that stands elsewhere
        other = linear.weight.clone()
        other[row, column] += 1
        assert not few_rows.address(packed, other)
    monkeypatch.setattr(few_rows, "_BYTES", lambda packed: 128 * 128 * 2 + 64)
    assert not few_rows.address(packed, linear.weight)
    monkeypatch.setattr(few_rows, "_PLACE", None)
    assert not few_rows.address(packed, linear.weight)


# ---------------------------------------------------------------------- norms
def _norm(kind: Any = LlamaRMSNorm, width: int = 128) -> nn.Module:
    torch.manual_seed(width)
    norm: nn.Module = kind(width, 1e-5).to(BF16)
    with torch.no_grad():
        norm.weight.normal_()  # type: ignore[operator]  # a parameter
    return norm


@needs_kernel
@pytest.mark.parametrize("width", [64, 128, 576, 896, 1024, 1536, 2560, 8192])
def test_a_norm_differs_in_no_bit(width: int) -> None:
    norm = _norm(width=width)
    fused = fused_norm(norm)
    assert fused is not None
    with torch.inference_mode():
        for rows, scale in ((1, 1.0), (2, 1e-4), (7, 30.0), (300, 1e3), (1, 0.0)):
            given = (torch.randn(1, rows, width) * scale).to(BF16)
            assert torch.equal(fused(given).view(torch.int16), norm(given).view(torch.int16))
            strided = given.transpose(1, 2).contiguous().transpose(1, 2)
            for other in (strided, given.float()):
                assert torch.equal(fused(hidden_states=other), norm(other))
        strange = torch.tensor([torch.inf, torch.nan, 1e38, -0.0] * (width // 4)).to(BF16)
        assert torch.equal(fused(strange).isnan(), norm(strange).isnan())


@needs_kernel
def test_only_a_norm_that_does_exactly_this_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    class Silent(LlamaRMSNorm):
        pass

    for kind in (LlamaRMSNorm, Qwen2RMSNorm, MistralRMSNorm, Silent):
        assert fused_norm(_norm(kind)) is not None
    for kind in (Other, nn.LayerNorm, nn.RMSNorm, GemmaRMSNorm):
        assert fused_norm(_norm(kind)) is None
    for width in (80, 8256):  # no whole blocks; more than torch's order is known of
        assert fused_norm(_norm(width=width)) is None
    assert fused_norm(_norm().float()) is None
    assert fused_norm(_norm().to("meta")) is None
    hooked, own = _norm(), _norm()
    hooked.register_forward_hook(lambda *_: None)
    own.forward = lambda hidden_states: hidden_states  # type: ignore[method-assign]  # meant
    assert fused_norm(hooked) is fused_norm(own) is None
    with monkeypatch.context() as patch:  # a torch that adds up in another order
        patch.setattr(few_rows, "normed", lambda given, *_: given)
        assert fused_norm(_norm()) is None
    monkeypatch.setattr(few_rows, "library", lambda: None)
    assert fused_norm(_norm()) is None


@needs_kernel
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda form: pickle.loads(pickle.dumps(form))])
def test_a_fused_norm_is_copied_written_and_made_plain(copied: Any) -> None:
    norm = _norm()
    fused, given = fused_norm(norm), torch.randn(3, 128).to(BF16)
    assert fused is not None
    other = copied(fused)
    with torch.no_grad():
        other.weight.mul_(2)
        assert torch.equal(other(given), 2 * fused(given))
        plain = other.plain()
        assert type(plain) is LlamaRMSNorm
        assert torch.equal(plain(given), other(given))
    assert repr(plain)[len("LlamaRMSNorm") :] == repr(other)[len("FusedNorm") :]
    assert fused.state_dict().keys() == norm.state_dict().keys()
    learned = fused(given)  # where something is to be learned it is transformers' own
    learned.float().sum().backward()
    assert fused.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(fused.float()(given), norm.float()(given)), "cast later"


@needs_kernel
@pytest.mark.parametrize("name", ["auto", "int8"])
def test_norms_of_a_packed_model_are_exchanged_and_given_back(name: Any) -> None:
    def count(kind: type) -> int:
        return sum(type(one) is kind for one in model.modules())

    model = build("llama").to(BF16)
    plain, before = count(LlamaRMSNorm), Weights(model).identity
    pack_weights(model, name)
    assert (count(LlamaRMSNorm), count(FusedNorm)) == (0, plain)
    weights = Weights(model)
    assert (weights.identity == before) == (name == "auto")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    assert not weights.are_unchanged()
    unpack_weights(model)
    assert (count(LlamaRMSNorm), count(FusedNorm)) == (plain, 0)
