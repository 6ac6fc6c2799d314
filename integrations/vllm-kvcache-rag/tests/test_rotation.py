"""Laws of the measured rotation: keys that are moved by it are those the model would compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.models.cache import CACHE_NAME
from vllm_kvcache_rag.rotation import EngineRotation, frequencies, measured

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "qwen2 yarn": {"rope_parameters": YARN},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "cohere": {},
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.partition(" ")[0]](**{**SMALL, **ROPES[name]})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def computed(model: Any, ids: list[int], first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens that stand at `first` and behind, `(layers, kv_heads, tokens, width)`."""
    cache = DynamicCache()
    places = torch.arange(first, first + len(ids))[None]
    given = {CACHE_NAME: cache, "use_cache": True}
    model(input_ids=torch.tensor([ids]), position_ids=places, **given)
    layers = cache.layers
    return torch.cat([one.keys for one in layers]), torch.cat([one.values for one in layers])


def rotation_of(model: Any) -> EngineRotation:
    keys, values = computed(model, [7] * 192)
    inv_freq = frequencies(model.config, keys.shape[3])
    return measured(keys, values, inv_freq, model.config.model_type)


@pytest.mark.parametrize("name", ROPES)
def test_a_moved_chunk_is_one_that_was_computed_there(name: str) -> None:
    model = model_of(name)
    rotation = rotation_of(model)
    ids = torch.randint(1, 64, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    for old, new in ((0, 13), (31, 400), (400, 31)):
        keys, _ = computed(model, ids, old)
        moved = keys.clone()
        rotation.move(moved, old, new)
        expected, _ = computed(model, ids, new)
        assert (moved - expected).abs().max() < 1e-4 * expected.abs().max()
        assert (keys - expected).abs().max() > 1e-2 * expected.abs().max()
        rotation.move(moved, new, new)
        assert (moved - expected).abs().max() < 1e-4 * expected.abs().max()


def test_layers_that_do_not_rotate_are_found() -> None:
    styles = [one.style for one in rotation_of(model_of("smollm3")).layers]
    assert styles == ["half", "half", "half", "none"]
    assert {one.style for one in rotation_of(model_of("cohere")).layers} == {"interleaved"}


def test_another_rotation_is_refused_by_name() -> None:
    model = model_of("llama")
    keys, values = computed(model, [7] * 192)
    right = frequencies(model.config, keys.shape[3])
    with pytest.raises(UnsupportedModelError, match=r"llama: keys of layer 0 are .* off when they"):
        measured(keys, values, right * 1.1, "llama")
    damaged, bent = keys.clone(), values.clone()
    damaged[2, 1, 150, 3] += 1.0
    with pytest.raises(UnsupportedModelError, match="keys of layer 2 are"):
        measured(damaged, values, right, "llama")
    bent[3, 0, 100] += 1.0
    with pytest.raises(UnsupportedModelError, match="values of layer 3 depend on their position"):
        measured(keys, bent, right, "llama")


def test_engines_that_round_in_the_models_dtype_are_taken() -> None:
    model = model_of("llama").to(torch.bfloat16)
    keys, values = computed(model, [7] * 192)
    assert keys.dtype == torch.bfloat16
    rotation = measured(keys, values, frequencies(model.config, keys.shape[3]), "llama")
    assert {one.style for one in rotation.layers} == {"half"}


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "prompt's length .dynamic"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}, "prompt's length .longrope"),
        (
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "by frequencies of several kinds",
        ),
    ],
    ids=["dynamic", "longrope", "kinds of layers"],
)
def test_frequencies_that_are_not_one_for_all_are_refused(rope: dict[str, Any], said: str) -> None:
    config = model_of("llama").config
    config.rope_parameters = rope
    with pytest.raises(UnsupportedModelError, match=said):
        frequencies(config, 16)
