"""Moving keys by rotation: exact, in place, in every layout, and as transformers itself rotates."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvcache_rag.kv import rotary
from kvcache_rag.kv.rotary import (
    NO_ROTATION,
    RotaryTable,
    Rotation,
    angle_table,
    forget_scratch,
    rotate,
    rotate_,
)

WIDTH = 16
ROTATIONS = [
    NO_ROTATION,
    Rotation("half", 0, 16, 0),
    Rotation("half", 0, 16, 0, reverse=True),
    Rotation("interleaved", 0, 16, 0),
    Rotation("interleaved", 0, 16, 0, reverse=True),
    Rotation("half", 0, 8, 0),
    Rotation("half", 8, 8, 0),
    Rotation("interleaved", 4, 8, 0, reverse=True),
]
TURNING = ROTATIONS[1:]
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
}


def frequencies(rotation: Rotation, base: float = 10000.0) -> Tensor:
    dim = rotation.dim or WIDTH
    return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)


def plain(keys: Tensor, rotation: Rotation, angles: Tensor) -> Tensor:
    """Every pair of columns as a complex number, in double precision."""
    out = keys.double().clone()
    half = rotation.dim // 2
    for pair in range(half):
        a, b = (pair, pair + half) if rotation.style == "half" else (2 * pair, 2 * pair + 1)
        a, b = a + rotation.start, b + rotation.start
        turn = -angles[:, pair] if rotation.reverse else angles[:, pair]
        number = torch.complex(out[..., a], out[..., b]) * torch.polar(torch.ones_like(turn), turn)
        out[..., a], out[..., b] = number.real, number.imag
    return out


@pytest.mark.parametrize("rotation", TURNING, ids=str)
def test_every_layout_turns_the_pairs_it_says(rotation: Rotation) -> None:
    keys = torch.randn(3, 2, 5, WIDTH)
    old, new = torch.arange(5), torch.arange(5) + torch.tensor([7, 0, 300, -2, 41])
    inv_freq = frequencies(rotation)
    angles = (new - old)[:, None].double() * inv_freq.double()
    expected = plain(keys, rotation, angles)
    moved = rotate(keys, rotation, inv_freq, old, new)
    assert (moved - expected).abs().max() < 1e-4
    assert (moved - keys).abs().max() > 0.1
    outside = [c for c in range(WIDTH) if not 0 <= c - rotation.start < rotation.dim]
    assert torch.equal(moved[..., outside], keys[..., outside])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_law_4_a_move_by_nothing_changes_no_bit(rotation: Rotation, dtype: torch.dtype) -> None:
    keys = torch.randn(2, 9, WIDTH).to(dtype)
    places = torch.randint(0, 100_000, (9,))
    assert torch.equal(rotate(keys, rotation, frequencies(rotation), places, places), keys)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TURNING),
    st.lists(st.tuples(*[st.integers(0, 40_000)] * 3), min_size=1, max_size=6),
)
def test_law_4_two_moves_are_the_move_by_their_sum(
    rotation: Rotation, places: list[tuple[int, int, int]]
) -> None:
    first, second, third = (torch.tensor(column) for column in zip(*places, strict=True))
    inv_freq = frequencies(rotation)
    keys = torch.randn(2, len(places), WIDTH)
    twice = rotate(
        rotate(keys, rotation, inv_freq, first, second), rotation, inv_freq, second, third
    )
    once = rotate(keys, rotation, inv_freq, first, third)
    assert (twice - once).abs().max() < 1e-5
    back = rotate(once, rotation, inv_freq, third, first)
    assert (back - keys).abs().max() < 1e-5


def llama_keys(scaling: str, raw: Tensor, places: Tensor) -> tuple[Tensor, Tensor, float]:
    """Keys at `places` as transformers makes them, its frequencies, and its attention scaling."""
    config = LlamaConfig(
        hidden_size=4 * raw.shape[-1],
        num_attention_heads=4,
        max_position_embeddings=32768,
        rope_parameters={"rope_theta": 10000.0, **SCALINGS[scaling]},
    )
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(raw, places[None])
    keys = apply_rotary_pos_emb(raw, raw, cos, sin)[1]
    return keys, embedding.inv_freq, float(embedding.attention_scaling)


@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_moved_keys_are_those_of_transformers_at_the_new_place(scaling: str) -> None:
    raw = torch.randn(1, 2, 64, 64)
    old = torch.arange(64)
    rotation = Rotation("half", 0, 64, 0)
    for start in (17, 1000, 8191, 32768 - 64):
        new = old + start
        stored, inv_freq, factor = llama_keys(scaling, raw, old)
        expected, _, _ = llama_keys(scaling, raw, new)
        moved = rotate(stored, rotation, inv_freq, old, new)
        # The scaling of YaRN is inside the stored key: applied again it would be off by a tenth.
        assert (factor > 1.1) == (scaling == "yarn")
        assert (moved - expected).abs().max() / expected.abs().max() < 3e-6
        assert (factor * moved - expected).abs().max() > 0.1 or factor == 1.0


def test_one_angle_per_token_is_closer_than_one_angle_per_distance() -> None:
    raw, old = torch.randn(1, 2, 64, 64), torch.arange(64)
    new = old + 32_000
    rotation = Rotation("half", 0, 64, 0)
    stored, inv_freq, _ = llama_keys("default", raw, old)
    expected, _, _ = llama_keys("default", raw, new)
    zero = torch.zeros_like(old)
    per_distance = rotate(stored, rotation, inv_freq, zero, zero + 32_000)

    def off(found: Tensor) -> float:
        return float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())

    per_token = off(rotate(stored, rotation, inv_freq, old, new))
    assert per_token < 3e-7
    assert per_token * 100 < off(per_distance)


def test_bfloat16_costs_one_rounding() -> None:
    raw, old = torch.randn(1, 4, 256, 64), torch.arange(256)
    new = old + 4000
    exact, inv_freq, _ = llama_keys("default", raw, new)
    stored = llama_keys("default", raw, old)[0].bfloat16()
    direct = exact.bfloat16().float()
    # "Directly": as the model computes in bfloat16, cos and sin rounded too.
    cos = (new[:, None] * inv_freq).cos().repeat(1, 2).bfloat16()
    sin = (new[:, None] * inv_freq).sin().repeat(1, 2).bfloat16()
    computed = apply_rotary_pos_emb(raw.bfloat16(), raw.bfloat16(), cos[None], sin[None])[1]
    moved = rotate(stored, Rotation("half", 0, 64, 0), inv_freq, old, new)
    assert moved.dtype == torch.bfloat16

    def rms(found: Tensor) -> float:
        return float((found.float() - exact).pow(2).mean().sqrt())

    assert rms(moved) <= 1.2 * rms(computed)
    assert rms(moved) <= 1.6 * rms(direct)  # two roundings instead of one: the root of two


@pytest.mark.parametrize("rotation", TURNING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_views_are_turned_in_place_and_nothing_beside_them(
    rotation: Rotation, dtype: torch.dtype
) -> None:
    buffer = torch.randn(3, 2, 2, 4, 30, WIDTH).to(dtype)
    wanted, places = buffer.clone(), (slice(None), 0, 1, slice(None), slice(11, 18))
    old, new = torch.arange(7) + 4, torch.arange(7) + 500
    angles = angle_table(frequencies(rotation), old, new)
    wanted[places] = rotate(buffer[places], rotation, frequencies(rotation), old, new)
    view = buffer[places]
    assert rotate_(view, rotation, *angles).data_ptr() == view.data_ptr()
    assert torch.equal(buffer, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rotation", [*TURNING, Rotation("half", 3, 8, 0, True)], ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 7, 16), (2, 7, 16), (7, 16), (2, 3, 2, 7, 16)])
def test_turning_layer_by_layer_changes_no_bit(
    dtype: torch.dtype, rotation: Rotation, shape: tuple[int, ...]
) -> None:
    cos, sin = angle_table(frequencies(rotation), torch.arange(7), torch.arange(7) * 11 + 5)
    keys = (torch.randn(shape) * 3).to(dtype)
    found, half = rotate_(keys.clone(), rotation, cos, sin), rotation.dim // 2
    turned = keys[..., rotation.start : rotation.start + rotation.dim]
    if rotation.style == "half":
        left, right = turned[..., :half], turned[..., half:]
    else:
        left, right = turned[..., 0::2], turned[..., 1::2]
    signed = -sin if rotation.reverse else sin
    a, b = left.float(), right.float()
    moved = a * cos - b * signed, b * cos + a * signed
    for part, wanted in zip((left, right), moved, strict=True):
        part.copy_(wanted)
    assert torch.equal(found, keys)


def test_frequencies_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4,\), the rotation needs \(8,\)"):
        rotate(torch.randn(1, 2, WIDTH), TURNING[0], torch.ones(4), *[torch.arange(2)] * 2)


def test_scratch_memory_remembers_no_gradient() -> None:
    angles = angle_table(frequencies(ROTATIONS[1]), torch.zeros(5), torch.arange(5.0))
    keys = torch.randn(2, 5, WIDTH, requires_grad=True)
    turned = rotate_(keys.clone(), ROTATIONS[1], *angles)
    again = rotate_(torch.zeros(2, 5, WIDTH), ROTATIONS[1], *angles)
    assert not again.requires_grad
    with torch.inference_mode():
        assert torch.equal(rotate_(keys.clone(), ROTATIONS[1], *angles), turned)


def test_scratch_memory_of_all_threads_is_let_go_of() -> None:
    angles = angle_table(frequencies(ROTATIONS[1]), torch.zeros(5), torch.arange(5.0))
    keys = torch.randn(2, 5, WIDTH)
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        rotate_(keys.clone(), ROTATIONS[1], *angles)
        begun.set()
        assert end.wait(10)

    def held() -> list[int]:
        return [kept.memory.numel() for kept in rotary._KEPT_BY.values()]

    rotate_(keys.clone(), ROTATIONS[1], *angles)
    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    assert sum(size > 0 for size in held()) >= 2
    forget_scratch()
    assert not any(held())
    end.set()
    thread.join()
    assert torch.equal(rotate_(keys.clone(), NO_ROTATION, *angles), keys)
    assert any(rotate_(keys.clone(), ROTATIONS[1], *angles).ne(keys).flatten())


@pytest.mark.parametrize("rotation", TURNING, ids=str)
def test_gradients_get_through_a_rotation(rotation: Rotation) -> None:
    keys = torch.randn(2, 3, 5, WIDTH)
    old, new = torch.arange(5), torch.arange(5) + 70
    inv_freq = frequencies(rotation)
    table = RotaryTable.from_angles(rotation, *angle_table(inv_freq, old, new))
    before = keys.clone().requires_grad_()
    behind = table.rotated(before)
    assert torch.allclose(behind, rotate(keys, rotation, inv_freq, old, new), atol=1e-6)
    weights = torch.randn(behind.shape)
    torch.autograd.backward((behind * weights).sum())
    # A rotation's gradient is the rotation back.
    assert before.grad is not None
    back = rotate(weights, rotation, inv_freq, new, old)
    assert torch.allclose(before.grad, back, atol=1e-5)
