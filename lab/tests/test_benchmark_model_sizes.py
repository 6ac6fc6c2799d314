"""Operations, bytes and times of models that no machine here holds: against sums by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.model_sizes import (
    CONTEXTS,
    LENGTHS,
    MODELS,
    PCIE,
    by_length,
    by_model,
    cost,
    pcie_rate,
    token_bytes,
)
from benchmarks.shapes import SHAPES, build_model, config_of
from kvcache_rag_lab.evaluation.cost.flops import DecoderShape


def test_743_tokens_of_qwen2_7b_by_hand() -> None:
    found = cost("qwen2-7b", 743)
    assert found.chunks == (512, 231)
    # 28 layers, keys and values, 4 heads of 128, 2 bytes: 57,344 a token; 42,606,592 for 743
    assert token_bytes(SHAPES["qwen2-7b"]) == 57_344
    assert found.nbytes == 42_606_592
    # q and output 3584 x 3584 each, k and v 3584 x 512 each, three of 3584 x 18944:
    # 25,690,112 + 3,670,016 + 203,685,888 = 233,046,016 weights a layer, 2 operations each;
    # attention 4 x 28 heads x 128 x 871 tokens = 12,486,656 a token and layer
    layer = 2 * 233_046_016 + 12_486_656
    assert layer == 478_578_688
    assert found.flops.full == 28 * 871 * layer == 11_671_577_042_944
    assert found.flops.cached == 28 * 128 * layer == 1_715_226_017_792
    assert found.flops.reduction == pytest.approx(743 / 871)
    # 16 lanes x 16e9 x 128/130 / 8 = 31.508 GB/s: 1.352 ms; twice that with PCIe 5
    assert 1e3 * found.pcie_seconds(4) == pytest.approx(1.3522, abs=1e-4)
    assert 1e3 * found.pcie_seconds(5) == pytest.approx(0.6761, abs=1e-4)
    assert 1e3 * found.prefill_seconds == pytest.approx(37.409, abs=1e-3)


@pytest.mark.parametrize(
    ("batch", "full", "cached"),
    [
        (1, 136.36, 2.09),
        (2, 272.72, 4.19),
        (4, 545.46, 8.39),
        (6, 818.20, 12.58),
        (8, 1090.93, 16.78),
    ],
)
def test_turborags_own_tflops(batch: int, full: float, cached: float) -> None:
    """Its table of batches: Qwen2-7B, 8192 + 128 tokens; it cuts digits off instead of rounding."""
    found = cost("qwen2-7b", 8192, batch).flops
    assert found.full / 1e12 == pytest.approx(full, abs=0.016)
    assert found.cached / 1e12 == pytest.approx(cached, abs=0.01)


def test_the_attention_of_a_token_is_four_operations_per_head_width_and_key() -> None:
    """Appendix G prints two; torch's own counter is compared with in test_benchmarks."""
    decoder = DecoderShape.of(config_of("qwen2-7b"))
    printed = decoder.prompt(8192, 128).full - 28 * 8320 * 2 * 28 * 128 * 8320
    assert printed / 1e12 == pytest.approx(122.47, abs=0.01), "not the paper's 136.36"
    more = decoder.forward(1, 1001) - decoder.forward(1, 1000)
    assert more == SHAPES["qwen2-7b"]["num_hidden_layers"] * 4 * 28 * 128


@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_those_of_the_models_own_projections(model: str) -> None:
    built = build_model(model, torch.bfloat16, "meta")
    outputs = sum(
        layer.self_attn.k_proj.out_features + layer.self_attn.v_proj.out_features
        for layer in built.model.layers
    )
    assert token_bytes(SHAPES[model]) == 2 * outputs


def test_a_batch_costs_its_prompts_and_a_context_its_tokens() -> None:
    model = "qwen2.5-72b"
    one, eight = cost(model, 256), cost(model, 256, 8)
    assert (eight.nbytes, eight.flops.full) == (8 * one.nbytes, 8 * one.flops.full)
    assert cost(model, 743).nbytes * 2048 == cost(model, 2048).nbytes * 743
    assert cost(model, 512).chunks == (512,)
    assert pcie_rate(5) == 2 * pcie_rate(4) == pytest.approx(63.015e9, rel=1e-4)


def test_tables_have_every_model_and_length() -> None:
    models, lengths = by_model().splitlines(), by_length().splitlines()
    assert len(models) == 2 + len(MODELS) * len(CONTEXTS)
    assert any("| 743 | 1 x 512 + 231 |" in line for line in models)
    assert {line.split(" | ")[0][2:] for line in lengths[2:]} == {f"{one:,}" for one in LENGTHS}
    assert "| 256 | 8 | 256 |" in by_length()
    assert all(line.count("|") == models[0].count("|") for line in models)
    assert len(PCIE) == 2
