"""Tiny models of many families with every parameter random, and a tokenizer without files."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.falcon import modeling_falcon
from transformers.models.gptj import modeling_gptj

from kvcache_rag.models.adapters import note_training
from kvcache_rag.models.cache import knows_states

VOCABULARY = 300
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a family's config does not have, in place of a value of `BASE`.
ABSENT: Any = object()
_NO_ATTENTION = dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads", "max_position_embeddings"), ABSENT
)
# Shorter than the chunks of the laws together, so that windows cut.
WINDOW = 48


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_LONGROPE = {
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
# What families do at random while they learn is left out.
_SURE = {"attention_dropout": 0.0, "residual_dropout": 0.0, "router_jitter_noise": 0.0}
_GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    **_GROUPED,
}

# name -> (model type, changes to BASE, what is special)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "half-split"),
    "llama linear": ("llama", _rope("linear", factor=4.0), "half-split, linear scaling"),
    "llama llama3": (
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=512,
        ),
        "half-split, llama3 scaling",
    ),
    "llama yarn": (
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=512),
        "half-split, YaRN with attention scaling",
    ),
    "llama dynamic": (
        "llama",
        _rope("dynamic", factor=4.0),
        "half-split, up to its trained length",
    ),
    "llama longrope": (
        "llama",
        _rope("longrope", factor=4.0, original_max_position_embeddings=1536, **_LONGROPE),
        "half-split, up to its original length",
    ),
    "mistral": ("mistral", {"sliding_window": None}, "half-split"),
    "mistral window": ("mistral", {"sliding_window": WINDOW}, "half-split, sliding window"),
    "mixtral": (
        "mixtral",
        {**_LOCAL, "sliding_window": None},
        "half-split, experts",
    ),
    "qwen2": ("qwen2", {}, "half-split"),
    "qwen2 window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        "half-split, some layers with a window",
    ),
    "qwen3": ("qwen3", {"head_dim": 16}, "half-split, norm before the rotation"),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "moe_intermediate_size": 32, **_MOE},
        "half-split, norm before the rotation, experts",
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
        "half-split, sliding window, softcap",
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        },
        "half-split, two bases",
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        "half-split, two bases, layers that share a cache",
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.5}, "half-split on part of the columns"),
    "phi3": ("phi3", {}, "half-split"),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}, "half-split on part of the columns"),
    "glm4": ("glm4", {"head_dim": 16}, "interleaved on part of the columns"),
    "cohere": ("cohere", {}, "interleaved"),
    "cohere2": (
        "cohere2",
        {"sliding_window": WINDOW, "head_dim": 16},
        "interleaved with a window, every fourth layer without positions",
    ),
    "olmo2": ("olmo2", {}, "half-split, norm before the rotation"),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
        "half-split, every fourth layer without positions",
    ),
    "granite": ("granite", {"attention_multiplier": 0.25}, "half-split"),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}, "half-split on part of the columns"),
    "gpt_neox narrow": (
        "gpt_neox",
        {"rotary_pct": 0.25, "num_attention_heads": 8},
        "one pair of columns: half-split and interleaved are the same",
    ),
    "falcon": (
        "falcon",
        {"alibi": False, "new_decoder_architecture": False, "multi_query": True},
        "half-split, one KV head",
    ),
    "falcon alibi": (
        "falcon",
        {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
        "no positions in keys: ALiBi by place, one KV head",
    ),
    "bloom": ("bloom", {"n_layer": 4, "n_head": 4}, "no positions in keys: ALiBi by place"),
    "mpt": (
        "mpt",
        {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 2048},
        "no positions in keys: ALiBi by place",
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}, "half-split"),
    "deepseek_v3": ("deepseek_v3", _MLA, "MLA: the rotary part lies in the V slot, experts"),
    "gemma": ("gemma", {"head_dim": 16}, "half-split"),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        },
        "half-split, two bases and widths, layers that share a cache",
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": 1024,
        },
        "interleaved, every fourth layer without positions, up to a stretch of attention, experts",
    ),
    "exaone4": (
        "exaone4",
        {"sliding_window": WINDOW, "sliding_window_pattern": 4},
        "half-split with a window, every fourth layer without positions",
    ),
    "glm4_moe": (
        "glm4_moe",
        {"head_dim": 16, "moe_intermediate_size": 32, **_GROUPED},
        "half-split on part of the columns, experts",
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}, "interleaved"),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
        "interleaved, experts",
    ),
    "phimoe": (
        "phimoe",
        {**_LOCAL, **_SURE, "sliding_window": None},
        "half-split, experts",
    ),
    "granitemoe": (
        "granitemoe",
        {**_LOCAL, "attention_multiplier": 0.25},
        "half-split, experts",
    ),
    "olmo3": (
        "olmo3",
        {"sliding_window": WINDOW},
        "half-split, norm before the rotation, sliding window",
    ),
    "olmoe": ("olmoe", _MOE, "half-split, norm before the rotation, experts"),
    "qwen2_moe": (
        "qwen2_moe",
        {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, **_MOE},
        "half-split, experts",
    ),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 16, "rotary_dim": 8, **_LOCAL},
        "half-split on part of the columns, norm before the rotation, experts",
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "sliding_window": None,
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=1100,
                llama_4_scaling_beta=0.1,
                mscale=1.0,
                mscale_all_dim=1.0,
                beta_fast=32.0,
                beta_slow=1.0,
            ),
        },
        "half-split, YaRN, up to the length from which queries are scaled",
    ),
    "seed_oss": ("seed_oss", {"head_dim": 16, **_SURE}, "half-split"),
    "apertus": ("apertus", {}, "half-split, norm before the rotation"),
    "deepseek_v2": (
        "deepseek_v2",
        {**_MLA, "topk_method": "greedy"},
        "MLA: the rotary part lies in the V slot, interleaved, experts",
    ),
    "gptj": (
        "gptj",
        {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 2048, "rotary_dim": 8},
        "interleaved on part of the columns, frequencies from the config",
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            **_LOCAL,
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=512,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
            ),
        },
        "half-split, sliding window, sinks, YaRN, experts",
    ),
    "minimax full": (
        "minimax",
        {"head_dim": 16, "layer_types": ["full_attention"] * 4, "block_size": 16, **_LOCAL},
        "half-split, experts, a cache of its own",
    ),
}

# name -> (model type, changes to BASE, what the refusal must name)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 2048},
        "learned absolute positions",
    ),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "learned absolute positions"),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "block_types": ["recurrent", "attention"],
            "lru_width": 64,
            "attention_window_size": 1024,
        },
        "recurrent state",
    ),
    "rwkv": (
        "rwkv",
        {**_NO_ATTENTION, "attention_hidden_size": 64},
        "wrote no keys and values",
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}, "fit no rotation"),
}

_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_EXPERTS = {**_MOE, "moe_intermediate_size": 32}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_KIMI = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    **_LOCAL,
}
# Where the published models have it: three recurrent layers, then one that attends.
_THREE_OF_FOUR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
# The last layer that keeps anything keeps a state.
_STATE_LAST = {"layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 2}

# name -> (model type, changes to BASE, kind of recurrence)
HYBRIDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_5": ("qwen3_5_text", {"head_dim": 16, **_THREE_OF_FOUR, **_GATED_DELTA}, "gated delta"),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {"head_dim": 16, **_THREE_OF_FOUR, **_GATED_DELTA, **_SHARED},
        "gated delta, experts",
    ),
    "qwen3_next": (
        "qwen3_next",
        {"head_dim": 16, **_THREE_OF_FOUR, **_GATED_DELTA, **_SHARED},
        "gated delta, experts",
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {**_THREE_OF_FOUR, **_GATED_DELTA, "linear_num_key_heads": 4},
        "gated delta with negative eigenvalues",
    ),
    "kimi_linear": (
        "kimi_linear",
        {**_KIMI, **_THREE_OF_FOUR, "linear_head_dim": 16, "linear_num_heads": 4},
        "Kimi delta, MLA",
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {**_KIMI, **_STATE_LAST, "head_dim": 16, "first_k_dense_replace": 1},
        "Kimi delta, MLA",
    ),
    "bamba": ("bamba", {"attn_layer_indices": [1, 3], **_MAMBA2}, "Mamba2"),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_STATE_LAST, "shared_intermediate_size": 32, **_LOCAL, **_MAMBA2},
        "Mamba2, experts",
    ),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 128}, "Mamba2 beside attention"),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention", "moe"),
                *("linear_attention", "full_attention", "mlp", "linear_attention"),
            ],
            "head_dim": 16,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_hidden_layers": ABSENT,  # it counts them itself
        },
        "Mamba2, layers that keep nothing",
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "chunk_size": 16,
            "use_mem_rope": True,
            "num_key_value_heads": 4,
        },
        "Mamba2 beside shared attention",
    ),
    "mamba2": (
        "mamba2",
        {
            **_NO_ATTENTION,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
        "Mamba2, no attention",
    ),
    "jamba": (
        "jamba",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
        },
        "Mamba1, experts",
    ),
    "zamba": (
        "zamba",
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "mamba_d_state": 8,
            "num_key_value_heads": 4,
        },
        "Mamba1 in heads, beside shared attention",
    ),
    "mamba": ("mamba", {**_NO_ATTENTION, "state_size": 8}, "Mamba1, no attention"),
    "falcon_mamba": (
        "falcon_mamba",
        {**_NO_ATTENTION, "state_size": 8},
        "Mamba1, no attention",
    ),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "full_attention", "conv"]},
        "short convolution",
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1, **_EXPERTS},
        "short convolution, experts",
    ),
    "lfm3": (
        "lfm3",
        {
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "head_dim": 16,
            "sliding_window": WINDOW,
        },
        "short convolution, sliding window",
    ),
    "zaya": (
        "zaya",
        {
            "head_dim": 16,
            "num_experts": 4,
            "router_hidden_size": 32,
            "moe_intermediate_size": 32,
        },
        "convolution and shift inside attention",
    ),
    "minimax": (
        "minimax",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "block_size": 16,
            **_LOCAL,
        },
        "lightning",
    ),
}

# Families whose attention counts places: nothing can stand at another position than its place.
BY_PLACE = ("falcon alibi", "bloom", "mpt")
# Families whose attention does not go through transformers' interface; gptj's does from 5.24 on.
OWN_ATTENTION = tuple(
    name
    for name, module in {"falcon": modeling_falcon, "gptj": modeling_gptj}.items()
    if not hasattr(module, "ALL_ATTENTION_FUNCTIONS")
)
# One of each kind, for what is no law over all: plain, a window, two bases, layers without
# positions, experts with sinks, MLA, the longest frequencies, attention of its own, ALiBi.
SEVERAL = (
    *("llama", "mistral window", "gemma3", "cohere2", "gpt_oss", "deepseek_v3", "llama longrope"),
    *("gptj", "bloom"),
)
# Not every transformers that is allowed has all of them, or knows states as they are stitched here.
if not knows_states():
    HYBRIDS.clear()
for _rows in (FAMILIES, REFUSED, HYBRIDS):
    for _name in [name for name, row in _rows.items() if row[0] not in CONFIG_MAPPING]:
        del _rows[_name]


def build(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, width: int | None = None
) -> Any:
    """A model of the family with random parameters, norms and biases included.

    Args:
        name: In `FAMILIES`, `REFUSED` or `HYBRIDS`.
        dtype: Of the parameters.
        seed: Of the random numbers.
        width: Of a head; None for the family's own.
    """
    model_type, changes, _ = {**FAMILIES, **REFUSED, **HYBRIDS}[name]
    arguments = {**BASE, **changes, **_wide(width)}
    config = CONFIG_MAPPING[model_type](
        **{key: value for key, value in arguments.items() if value is not ABSENT}
    )
    note_training(config, blocks=True)  # the laws are about plain reuse
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:  # families without an sdpa path
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    _randomise(model, seed)
    frequencies = {n: b.clone() for n, b in model.named_buffers() if n.endswith("inv_freq")}
    model = model.to(dtype).eval()
    for (
        buffer_name,
        buffer,
    ) in frequencies.items():  # from_pretrained(dtype=...) keeps them in float32
        owner, _, leaf = buffer_name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model


def _wide(width: int | None) -> dict[str, Any]:
    heads = BASE["num_attention_heads"]
    return {} if width is None else {"hidden_size": heads * width, "head_dim": width}


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Make every parameter matter: sharper attention, norms off one, biases off zero."""
    generator = torch.Generator().manual_seed(seed)
    attention = ("q_proj", "k_proj", "query_key_value", "qkv", "Wqkv", "c_attn", "q_b_proj")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            noise = noise.to(parameter.device)
            if _lives(model, name, parameter, noise):
                continue
            if parameter.ndim < 2:
                scale = 0.25 if "norm" in name or "ln" in name else 0.1
                parameter.add_(scale * noise)
                continue
            fan = parameter.shape[-1] if parameter.ndim == 2 else parameter.shape[-2]
            scale = 1.0 if "embed" in name or "wte" in name else fan**-0.5
            parameter.copy_(noise * scale * (2.0 if any(a in name for a in attention) else 1.0))


def _lives(model: torch.nn.Module, name: str, parameter: torch.Tensor, noise: torch.Tensor) -> bool:
    """Set what decays a recurrent state, so that it lives for some hundred tokens.

    With the families' own initial values nearly nothing of a state is left behind a chunk, and any
    law would hold.
    """
    leaf = name.rsplit(".", 1)[-1]
    is_bounded = bool(getattr(model.config, "kda_safe_gate", False))
    if leaf == "A_log":  # of a rate per token; bounded: -5 * sigmoid(exp(A_log) * (x + dt_bias))
        parameter.copy_(noise * 0.2 if is_bounded else noise * 0.7 - 4.5)
    elif leaf in ("dt_bias", "dt_proj_bias"):
        parameter.copy_(noise * 0.5 - (6.0 if is_bounded else 0.0))
    elif leaf == "recurrent_param":  # softplus(-7) * 8 = 0.007 a token
        parameter.copy_(noise * 0.5 - 6.0)
    elif "conv" in name and parameter.ndim == 3:
        parameter.copy_(noise * 0.5)
    else:
        return False
    return True


@lru_cache(maxsize=1)
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; `<pad>` 0, `<bos>` 1, `<eos>` 2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    vocabulary = {**special, **{letter: index + 3 for index, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
