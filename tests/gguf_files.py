"""Small GGUF files of random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Container
    from pathlib import Path

WIDTH, HEADS, LAYERS, FEED = 64, 4, 2, 96
TOKENS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "\u0120", "\u010a", "ab", "cd"]


def write_gguf(
    path: Path,
    *,
    quantised: bool = True,
    seed: int = 0,
    tokenizer: bool = True,
    lacking: Container[str] = (),
) -> Path:
    """A Llama of two layers; its tokenizer has one token per character.

    Args:
        path: The file.
        quantised: Whether its matrices are Q8_0; else all is float32.
        seed: Of the weights.
        tokenizer: Whether it has one.
        lacking: Matrices that are not in it.
    """
    import gguf

    random = np.random.default_rng(seed)
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("random")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    if tokenizer:
        _add_tokenizer(writer)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output": (len(TOKENS), WIDTH)}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}"] = (WIDTH, WIDTH)
        shapes[f"blk.{layer}.ffn_gate"] = shapes[f"blk.{layer}.ffn_up"] = (FEED, WIDTH)
        shapes[f"blk.{layer}.ffn_down"] = (WIDTH, FEED)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        if name in lacking:
            continue
        values = (random.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
        if quantised:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    norms = ["output_norm"]
    for layer in range(LAYERS):
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    for name in norms:  # trained in bfloat16
        values = torch.from_numpy(1 + 0.1 * random.standard_normal(WIDTH)).bfloat16()
        writer.add_tensor(f"{name}.weight", values.float().numpy())
    _close(writer)
    return path


def _add_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---------------------------------------------------------------------- any architecture
SIZES: dict[str, int | float] = {
    "context_length": 512,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": FEED,
    "rope.dimension_count": WIDTH // HEADS,
    "rope.freq_base": 10000.0,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS // 2,
    "attention.key_length": WIDTH // HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.sliding_window": 32,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_gating_func": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 2 * WIDTH,
    "vocab_size": len(TOKENS),
}


_BARE = ("ssm_a", "ssm_d")  # in llama.cpp's files, too


def write_architecture(
    path: Path,
    architecture: str,
    *,
    name: str = "random",
    kind: str = "Q8_0",
    tied: bool = False,
    ending: str = ".weight",
    **sizes: Any,
) -> Path:
    """A file of another architecture, with the tensors that transformers reads into it.

    Args:
        path: The file.
        architecture: llama.cpp's name.
        name: Of the model.
        kind: Of its matrices, where their rows are whole blocks; norms and biases are float32.
        tied: Whether it has no output matrix of its own.
        ending: Of tensors that are neither weights nor biases by their names in transformers.
        sizes: Changes to `SIZES`, with `_` for `.`, None for none; others by their names.
    """
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    given = {key: sizes.pop(key.replace(".", "_"), value) for key, value in SIZES.items()}
    described = {key: value for key, value in {**given, **sizes}.items() if value is not None}
    _write(
        path,
        architecture,
        name,
        described,
        {} if tied else {"output.weight": np.ones(1, np.float32)},
    )
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    kind_of: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    found = get_gguf_hf_weights_map(model, kind_of(config=config.to_dict()))
    state, tensors = model.state_dict(), {}
    for stored, own in found.items():
        if own in state and not (tied and stored == "output.weight"):
            full = stored if stored.endswith((".weight", ".bias", *_BARE)) else f"{stored}{ending}"
            tensors[full] = _stored(architecture, stored, state[own].numpy())
    _write(path, architecture, name, described, tensors, gguf.GGMLQuantizationType[kind])
    return path


def _stored(architecture: str, name: str, values: np.ndarray) -> np.ndarray:
    """A parameter as files of that architecture have it."""
    if name.endswith(("ffn_gate_exps", "ffn_up_exps")):  # beside each other in transformers
        return values[:, : values.shape[1] // 2]
    if architecture == "gpt2" and values.ndim == 2 and name.startswith("blk."):
        return values.T
    if name.endswith("ssm_a"):
        decay: np.ndarray = -np.exp(values)
        return decay
    if "conv" in name or "gate_inp_shexp" in name:
        return values.squeeze()
    return values


def _write(
    path: Path,
    architecture: str,
    name: str,
    described: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: Any = None,
) -> None:
    import gguf

    writer: Any = gguf.GGUFWriter(str(path), architecture)
    writer.add_name(name)
    for key, value in described.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_array if isinstance(value, list) else add)(f"{architecture}.{key}", value)
    _add_tokenizer(writer)
    writer.add_pad_token_id(0)
    for stored, values in tensors.items():
        if kind is not None and values.ndim > 1 and values.shape[-1] % _block(kind) == 0:
            writer.add_tensor(stored, quantised(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values, np.float32))
    _close(writer)


def _block(kind: Any) -> int:
    import gguf

    return int(gguf.GGML_QUANT_SIZES[kind][0])


def quantised(values: np.ndarray, kind: Any) -> np.ndarray:
    """Bytes of values of a type; random ones, if gguf can only read it."""
    import gguf

    try:
        found: np.ndarray = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    except NotImplementedError:
        shape = gguf.quants.quant_shape_to_byte_shape(values.shape, kind)
        # Without this bit, each two bytes are a small number as float16, whichever the scales are.
        found = np.random.default_rng(0).integers(0, 256, shape, np.uint8) & np.uint8(0xBF)
    return found
