"""What comparing the weights costs before every question: `python -m benchmarks.identity`.

SmolLM2-135M's shape with random weights, alone and with LoRA on all linear layers.
"""

from __future__ import annotations

import time
import warnings
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcache_rag.models.weights import Weights

ROUNDS, CALLS = 200, 50


def _model() -> Any:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def _measure(name: str, model: Any) -> None:
    started = time.perf_counter()
    weights = Weights(model)
    digest = time.perf_counter() - started
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            weights.are_unchanged()
        times.append((time.perf_counter() - started) / CALLS)
    tensors = sum(1 for _ in model.parameters())
    print(
        f"{name}: {tensors} tensors, digest {digest * 1e3:.0f} ms, comparison "
        f"{min(times) * 1e6:.0f} us at best, median {median(times) * 1e6:.0f} us"
    )


def main() -> None:
    """Measure both."""
    torch.set_num_threads(1)
    model = _model()
    _measure("SmolLM2's shape", model)
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, settings)
    _measure("with LoRA on all linear layers", model)


if __name__ == "__main__":
    main()
