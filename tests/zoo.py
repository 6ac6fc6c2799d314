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
    "max_position_embeddings": 2048,
    "vocab_size": VOCABULARY,
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
Row = tuple[str, dict[str, Any], str]
"""Model type, changes to `BASE`, and what is special."""


def _of(special: str, model_type: str = "", **changes: Any) -> Row:
    """What is special, the model type unless the name begins with it, and changes to `BASE`."""
    return model_type, changes, special


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_LONGROPE = {
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
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
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_MLA = {**_LATENT, "q_lora_rank": 24, **_GROUPED}
_BLOOM = {"n_layer": 4, "n_head": 4}
_GPT = {**_BLOOM, "n_embd": 64, "n_positions": 2048}
_MPT = {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 2048}
_FALCON = {"new_decoder_architecture": False, "multi_query": True}
_SHARING = {"num_kv_shared_layers": 2, "num_hidden_layers": 6, "hidden_size_per_layer_input": 8}
_WINDOWED = {"head_dim": 16, "sliding_window": WINDOW}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
_LAST_FULL = ["sliding_attention"] * 2 + ["full_attention"]

FAMILIES: dict[str, Row] = {
    "llama": _of("half-split"),
    "llama linear": _of("half-split, linear scaling", **_rope("linear", factor=4.0)),
    "llama llama3": _of("half-split, llama3 scaling", **_rope("llama3", factor=8.0, **_LLAMA3)),
    "llama yarn": _of("half-split, YaRN with attention scaling", **_rope("yarn", **_YARN)),
    "llama dynamic": _of("half-split, up to its trained length", **_rope("dynamic", factor=4.0)),
    "llama longrope": _of(
        "half-split, up to its original length",
        **_rope("longrope", factor=4.0, original_max_position_embeddings=1536, **_LONGROPE),
    ),
    "mistral": _of("half-split", sliding_window=None),
    "mistral window": _of("half-split, sliding window", sliding_window=WINDOW),
    "mixtral": _of("half-split, experts", sliding_window=None, **_LOCAL),
    "qwen2": _of("half-split"),
    "qwen2 window": _of(
        "half-split, some layers with a window",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "qwen3": _of("half-split, norm before the rotation", head_dim=16),
    "qwen3_moe": _of(
        "half-split, norm before the rotation, experts",
        head_dim=16,
        moe_intermediate_size=32,
        **_MOE,
    ),
    "gemma2": _of("half-split, sliding window, softcap", **_WINDOWED, query_pre_attn_scalar=16),
    "gemma3": _of(
        "half-split, two bases",
        "gemma3_text",
        **_WINDOWED,
        query_pre_attn_scalar=16,
        layer_types=[*_LAST_FULL, "sliding_attention"],
    ),
    "gemma3n": _of(
        "half-split, two bases, layers that share a cache",
        "gemma3n_text",
        **_SHARING,
        **_WINDOWED,
        vocab_size_per_layer_input=VOCABULARY,
        altup_num_inputs=2,
        laurel_rank=8,
        intermediate_size=[96] * 6,
        activation_sparsity_pattern=[0.0] * 6,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "phi": _of("half-split on part of the columns", partial_rotary_factor=0.5),
    "phi3": _of("half-split"),
    "stablelm": _of("half-split on part of the columns", partial_rotary_factor=0.25),
    "glm4": _of("interleaved on part of the columns", head_dim=16),
    "cohere": _of("interleaved"),
    "cohere2": _of("interleaved with a window, every fourth layer without positions", **_WINDOWED),
    "olmo2": _of("half-split, norm before the rotation"),
    "smollm3": _of(
        "half-split, every fourth layer without positions",
        no_rope_layers=[1, 1, 1, 0],
        use_sliding_window=False,
    ),
    "granite": _of("half-split", attention_multiplier=0.25),
    "gpt_neox": _of("half-split on part of the columns", rotary_pct=0.25),
    "gpt_neox narrow": _of(
        "one pair of columns: half-split and interleaved are the same",
        rotary_pct=0.25,
        num_attention_heads=8,
    ),
    "falcon": _of("half-split, one KV head", alibi=False, **_FALCON),
    "falcon alibi": _of("no positions in keys: ALiBi by place, one KV head", alibi=True, **_FALCON),
    "bloom": _of("no positions in keys: ALiBi by place", **_BLOOM),
    "mpt": _of("no positions in keys: ALiBi by place", **_MPT),
    "starcoder2": _of("half-split", sliding_window=None),
    "deepseek_v3": _of("MLA: the rotary part lies in the V slot, experts", **_MLA),
    "gemma": _of("half-split", head_dim=16),
    "gemma4": _of(
        "half-split, two bases and widths, layers that share a cache",
        "gemma4_text",
        **_SHARING,
        **_WINDOWED,
        global_head_dim=32,
        vocab_size_per_layer_input=VOCABULARY,
        layer_types=_LAST_FULL * 2,
    ),
    "llama4": _of(
        "interleaved, every fourth layer without positions, up to a stretch of attention, experts",
        "llama4_text",
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 1, 0],
        attention_chunk_size=1024,
    ),
    "exaone4": _of(
        "half-split with a window, every fourth layer without positions",
        sliding_window=WINDOW,
        sliding_window_pattern=4,
    ),
    "glm4_moe": _of(
        "half-split on part of the columns, experts",
        head_dim=16,
        moe_intermediate_size=32,
        **_GROUPED,
    ),
    "ernie4_5": _of("interleaved", head_dim=16),
    "ernie4_5_moe": _of(
        "interleaved, experts", moe_num_experts=4, moe_k=2, moe_intermediate_size=32
    ),
    "phimoe": _of("half-split, experts", sliding_window=None, **_LOCAL, **_SURE),
    "granitemoe": _of("half-split, experts", attention_multiplier=0.25, **_LOCAL),
    "olmo3": _of("half-split, norm before the rotation, sliding window", sliding_window=WINDOW),
    "olmoe": _of("half-split, norm before the rotation, experts", **_MOE),
    "qwen2_moe": _of(
        "half-split, experts", moe_intermediate_size=32, shared_expert_intermediate_size=32, **_MOE
    ),
    "minimax_m2": _of(
        "half-split on part of the columns, norm before the rotation, experts",
        head_dim=16,
        rotary_dim=8,
        **_LOCAL,
    ),
    "ministral3": _of(
        "half-split, YaRN, up to the length from which queries are scaled",
        head_dim=16,
        sliding_window=None,
        **_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=1100,
            llama_4_scaling_beta=0.1,
            mscale=1.0,
            mscale_all_dim=1.0,
            **_BETAS,
        ),
    ),
    "seed_oss": _of("half-split", head_dim=16, **_SURE),
    "apertus": _of("half-split, norm before the rotation"),
    "deepseek_v2": _of(
        "MLA: the rotary part lies in the V slot, interleaved, experts",
        topk_method="greedy",
        **_MLA,
    ),
    "gptj": _of(
        "interleaved on part of the columns, frequencies from the config", rotary_dim=8, **_GPT
    ),
    "gpt_oss": _of(
        "half-split, sliding window, sinks, YaRN, experts",
        **_WINDOWED,
        **_LOCAL,
        **_rope("yarn", **_YARN, truncate=False, **_BETAS),
    ),
    "minimax full": _of(
        "half-split, experts, a cache of its own",
        head_dim=16,
        layer_types=["full_attention"] * 4,
        block_size=16,
        **_LOCAL,
    ),
}

# What is special is what the refusal must name.
REFUSED: dict[str, Row] = {
    "gpt2": _of("learned absolute positions", **_GPT),
    "opt": _of("learned absolute positions", ffn_dim=96, word_embed_proj_dim=64),
    "recurrent_gemma": _of(
        "recurrent state",
        block_types=["recurrent", "attention"],
        lru_width=64,
        attention_window_size=1024,
    ),
    "rwkv": _of("wrote no keys and values", attention_hidden_size=64, **_NO_ATTENTION),
    "hunyuan": _of("fit no rotation", "hunyuan_v1_dense", head_dim=16),
}

_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_EXPERTS = {**_MOE, "moe_intermediate_size": 32}
_KIMI = {**_LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, **_LOCAL}
# Where the published models have it: three recurrent layers, then one that attends.
_THREE_OF_FOUR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_QWEN = {"head_dim": 16, **_THREE_OF_FOUR, **_GATED_DELTA}
_SHARED = {**_QWEN, **_EXPERTS, "shared_expert_intermediate_size": 32}
# The last layer that keeps anything keeps a state.
_STATE_LAST = {"layer_types": ["linear_attention", "full_attention"] + ["linear_attention"] * 2}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "mamba_d_state": 8,
    "num_key_value_heads": 4,
}

# What is special is the kind of recurrence.
HYBRIDS: dict[str, Row] = {
    "qwen3_5": _of("gated delta", "qwen3_5_text", **_QWEN),
    "qwen3_5_moe": _of("gated delta, experts", "qwen3_5_moe_text", **_SHARED),
    "qwen3_next": _of("gated delta, experts", **_SHARED),
    "olmo_hybrid": _of(
        "gated delta with negative eigenvalues",
        **_THREE_OF_FOUR,
        **{**_GATED_DELTA, "linear_num_key_heads": 4},
    ),
    "kimi_linear": _of(
        "Kimi delta, MLA", linear_head_dim=16, linear_num_heads=4, **_KIMI, **_THREE_OF_FOUR
    ),
    "bailing_hybrid": _of(
        "Kimi delta, MLA", head_dim=16, first_k_dense_replace=1, **_KIMI, **_STATE_LAST
    ),
    "bamba": _of("Mamba2", attn_layer_indices=[1, 3], **_MAMBA2),
    "granitemoehybrid": _of(
        "Mamba2, experts", shared_intermediate_size=32, **_STATE_LAST, **_LOCAL, **_MAMBA2
    ),
    "falcon_h1": _of("Mamba2 beside attention", mamba_d_ssm=128, **_MAMBA2),
    "nemotron_h": _of(
        "Mamba2, layers that keep nothing",
        layers_block_type=[
            *("linear_attention", "mlp", "linear_attention", "moe"),
            *("linear_attention", "full_attention", "mlp", "linear_attention"),
        ],
        head_dim=16,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        n_routed_experts=4,
        num_hidden_layers=ABSENT,  # it counts them itself
    ),
    "zamba2": _of(
        "Mamba2 beside shared attention",
        n_mamba_heads=8,
        chunk_size=16,
        use_mem_rope=True,
        **_ZAMBA,
    ),
    "mamba2": _of(
        "Mamba2, no attention",
        num_heads=8,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=16,
        **_NO_ATTENTION,
    ),
    "jamba": _of(
        "Mamba1, experts",
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
    ),
    "zamba": _of("Mamba1 in heads, beside shared attention", **_ZAMBA),
    "mamba": _of("Mamba1, no attention", state_size=8, **_NO_ATTENTION),
    "falcon_mamba": _of("Mamba1, no attention", state_size=8, **_NO_ATTENTION),
    "lfm2": _of(
        "short convolution", layer_types=["conv", "full_attention", "full_attention", "conv"]
    ),
    "lfm2_moe": _of(
        "short convolution, experts",
        layer_types=["conv", "full_attention"] * 2,
        num_dense_layers=1,
        **_EXPERTS,
    ),
    "lfm3": _of(
        "short convolution, sliding window",
        layer_types=["conv", "full_attention", "conv", "sliding_attention"],
        **_WINDOWED,
    ),
    "zaya": _of(
        "convolution and shift inside attention",
        head_dim=16,
        num_experts=4,
        router_hidden_size=32,
        moe_intermediate_size=32,
    ),
    "minimax": _of(
        "lightning",
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        block_size=16,
        **_LOCAL,
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
    for _name, (_type, *_rest) in list(_rows.items()):
        _rows[_name] = (_type or _name.partition(" ")[0], *_rest)
        if _rows[_name][0] not in CONFIG_MAPPING:
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
    for place, buffer in frequencies.items():  # from_pretrained(dtype=...) keeps them in float32
        owner, _, leaf = place.rpartition(".")
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


def make_byte_tokenizer(begin: str, end: str) -> PreTrainedTokenizerFast:
    """One token per byte, after `<pad>` 0, the beginning of a sequence 1 and its end 2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", begin, end, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token="<pad>"
    )


@lru_cache(maxsize=1)
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; `<pad>` 0, `<bos>` 1, `<eos>` 2."""
    return make_byte_tokenizer("<bos>", "<eos>")
