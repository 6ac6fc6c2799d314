"""Linear layers of few rows, read where oneDNN keeps their weights: as exact as oneDNN itself."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcache_rag.models import few_rows
from kvcache_rag.models.linears import PrepackedLinear

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
@pytest.mark.parametrize("rows", range(1, few_rows.MOST + 2))
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (256, 192), (576, 1536), (1536, 576)])
def test_it_is_as_exact_as_onednn(inputs: int, outputs: int, rows: int, bias: bool) -> None:
    linear = _layer(inputs, outputs, bias=bias)
    form = PrepackedLinear.of(linear)
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
def test_a_row_does_not_depend_on_the_others() -> None:
    form = PrepackedLinear.of(_layer(256, 192))
    given = torch.randn(few_rows.MOST, 256).to(BF16)
    together = form(given)
    for row in range(len(given)):
        assert torch.equal(form(given[row : row + 1])[0], together[row])
    assert torch.equal(form(given.view(2, 1, -1, 256)), together.view(2, 1, -1, 192))


@needs_kernel
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_the_outputs(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form = PrepackedLinear.of(_layer(256, 448))
    given = torch.randn(7, 256).to(BF16)
    alone = form(given)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(form(given), alone)


@needs_kernel
def test_what_it_cannot_take_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    form = PrepackedLinear.of(_layer(256, 192))
    given = torch.randn(4, 256).to(BF16)
    expected = form(given)
    strided = given.t().contiguous().t()
    assert torch.equal(form(strided), expected)
    assert form(given[:0]).shape == (0, 192)
    # No rows more than it is made for, and none that something is to be learned through.
    assert few_rows.takes(given, 256)
    for other in (strided, given.float(), given.to("meta"), given.clone().requires_grad_()):
        assert not few_rows.takes(other, 256)
    assert not few_rows.takes(torch.zeros(few_rows.MOST + 1, 256, dtype=BF16), 256)
    for inputs, outputs in ((96, 64), (64, 80)):
        odd = PrepackedLinear.of(_layer(inputs, outputs))
        assert not odd._address
        assert odd(torch.zeros(1, inputs, dtype=BF16)).shape == (1, outputs)
    monkeypatch.setattr(few_rows, "library", lambda: None)
    without = PrepackedLinear.of(_layer(256, 192))
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


@needs_kernel
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda form: pickle.loads(pickle.dumps(form))])
def test_a_copy_outlives_what_it_was_made_of(copied: Any) -> None:
    form = PrepackedLinear.of(_layer(256, 192))
    given = torch.randn(3, 256).to(BF16)
    expected, other = form(given), copied(form)
    del form
    assert other._address
    assert torch.equal(other(given), expected)
