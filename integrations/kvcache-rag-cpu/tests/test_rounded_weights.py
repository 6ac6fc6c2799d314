"""Products with weights of eight and four bits: as exact as by torch, of the same weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcache_rag_cpu import few_rows, linears, rounded_weights
from kvcache_rag_cpu.linears import Int4Linear, Int8Linear, PrepackedLinear

BF16 = torch.bfloat16
BITS = {Int8Linear: 8, Int4Linear: 4}

needs_kernel = pytest.mark.skipif(
    rounded_weights.library() is None, reason="no compiled kernel, or no CPU with AVX-512 for it"
)
both = pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
every = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            PrepackedLinear,
            marks=pytest.mark.skipif(few_rows.library() is None, reason="no compiled kernel"),
        ),
        Int8Linear,
        Int4Linear,
    ],
)


def _layer(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    linear = nn.Linear(inputs, outputs, bias).to(BF16).requires_grad_(False)
    linear.weight[1] = 0
    linear.weight[2] += 0.25  # all of one sign: the zero point is no step of its group
    return linear


def _by_torch(kind: Any, linear: nn.Linear) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded_weights, "library", lambda: None)
        return kind.from_linear(linear)


def _is_ours(form: Any) -> bool:
    return bool(form._is_read if isinstance(form, Int4Linear) else form.integers.dim() > 2)


@needs_kernel
@both
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, few_rows.MOST, few_rows.MOST + 1])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (576, 192), (1536, 576)])
def test_it_is_as_exact_as_torch(
    kind: Any, inputs: int, outputs: int, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linears, "_WIDEN", 1000)  # torch's kernels for weights of eight bits, too
    linear = _layer(inputs, outputs, bias=bias)
    form, other = kind.from_linear(linear), _by_torch(kind, linear)
    assert _is_ours(form)
    assert not _is_ours(other)
    given = torch.randn(1, rows, inputs).to(BF16)
    exact = nn.functional.linear(given.float(), form.weight.float())
    exact += 0 if linear.bias is None else linear.bias.float()
    found, expected = form(given), other(given)
    assert found.shape == expected.shape
    assert float((found - exact).abs().mean()) <= 1.1 * float((expected - exact).abs().mean())


@needs_kernel
@both
def test_no_weight_differs_and_none_is_kept_twice(kind: Any) -> None:
    linear = _layer(576, 192)
    form, other = kind.from_linear(linear), _by_torch(kind, linear)
    assert torch.equal(form.weight, other.weight)
    assert torch.equal(form.plain().weight, other.plain().weight)
    held = [sum(one.nbytes for one in each.buffers()) for each in (form, other)]
    assert held[0] == held[1]
    weights, levels = form.buffers()
    for some in (range(192), range(64, 192), range(64, 128)):
        wide = rounded_weights.widened(weights, levels, (576, 192), some, BITS[kind])
        assert torch.equal(wide.t(), other.weight[some.start : some.stop])


@needs_kernel
@every
def test_a_row_does_not_depend_on_the_others(kind: Any) -> None:
    form = kind.from_linear(_layer(256, 192))
    given = torch.randn(few_rows.MOST, 256).to(BF16)
    together = form(given)
    for row in range(len(given)):
        assert torch.equal(form(given[row : row + 1])[0], together[row])
    assert torch.equal(form(given.view(2, 1, -1, 256)), together.view(2, 1, -1, 192))
    assert form(given[:0]).shape == (0, 192)


@needs_kernel
@every
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_threads_share_the_outputs(kind: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form, given = kind.from_linear(_layer(256, 448)), torch.randn(rows, 256).to(BF16)
    alone = form(given)
    for threads in (2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(form(given), alone)


@needs_kernel
@both
def test_many_rows_widen_a_part_of_the_weights_at_a_time(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, given = kind.from_linear(_layer(256, 448)), torch.randn(100, 256).to(BF16)
    whole = form(given)
    widths: list[int] = []

    def seen(weights: Tensor, levels: Tensor, shape: Any, some: range, bits: int) -> Tensor:
        widths.append(len(some))
        return widened(weights, levels, shape, some, bits)

    widened = rounded_weights.widened
    monkeypatch.setattr(rounded_weights, "widened", seen)
    monkeypatch.setattr(rounded_weights, "_WIDENED", 130 * 256)
    assert torch.allclose(form(given), whole, rtol=0.01, atol=0.02)
    assert widths == [128, 128, 128, 64]
    strided = given[:3].t().contiguous().t()  # not for the kernel either
    assert torch.allclose(form(strided), whole[:3], rtol=0.01, atol=0.02)
    learned = given[:3].clone().requires_grad_()
    form(learned).float().sum().backward()
    assert learned.grad is not None


@needs_kernel
@both
def test_what_it_cannot_take_is_left_to_torch(kind: Any) -> None:
    for inputs, outputs in ((96, 64), (64, 80)):
        odd = kind.from_linear(_layer(inputs, outputs))
        assert not _is_ours(odd)
        assert odd(torch.zeros(1, inputs, dtype=BF16)).shape == (1, outputs)
    for dtype in (torch.float32, torch.float16):
        assert not _is_ours(kind.from_linear(_layer(64, 64).to(dtype)))


@needs_kernel
@every
@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda form: pickle.loads(pickle.dumps(form))])
def test_a_copy_outlives_what_it_was_made_of(
    kind: Any, copied: Any, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, given = kind.from_linear(_layer(256, 192)), torch.randn(rows, 256).to(BF16)
    expected, other = form(given), copied(form)
    del form
    assert torch.equal(other(given), expected)
    monkeypatch.setattr(rounded_weights, "library", lambda: None)
    assert torch.allclose(other(given), expected, rtol=0.01, atol=0.02), "without the kernel, too"


@needs_kernel
def test_an_order_of_torch_that_is_another_is_never_read() -> None:
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(0, 16, (128, 64), generator=generator, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
    assert rounded_weights.is_read(packed, integers)
    for row, column in ((0, 0), (127, 63), (64, 3)):  # of one number that stands elsewhere
        other = integers.clone()
        other[row, column] ^= 1
        assert not rounded_weights.is_read(packed, other)


def test_the_order_of_eight_bits_is_undone() -> None:
    integers = torch.randint(-127, 128, (192, 128), dtype=torch.int8)
    assert torch.equal(rounded_weights.as_rows(rounded_weights.ordered(integers)), integers)
