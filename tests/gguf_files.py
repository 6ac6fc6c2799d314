"""Small GGUF files of random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, HEADS, LAYERS, FEED = 64, 4, 2, 96
TOKENS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "\u0120", "\u010a", "ab", "cd"]


def write_gguf(
    path: Path, *, quantised: bool = True, seed: int = 0, tokenizer: bool = True
) -> Path:
    """A Llama of two layers; its tokenizer has one token per character.

    Args:
        path: The file.
        quantised: Whether its matrices are Q8_0; else all is float32.
        seed: Of the weights.
        tokenizer: Whether it has one.
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
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([2, 3, 3] + [1] * (len(TOKENS) - 3))
        writer.add_token_merges(["a b", "c d"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output": (len(TOKENS), WIDTH)}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}"] = (WIDTH, WIDTH)
        shapes[f"blk.{layer}.ffn_gate"] = shapes[f"blk.{layer}.ffn_up"] = (FEED, WIDTH)
        shapes[f"blk.{layer}.ffn_down"] = (WIDTH, FEED)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = (random.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
        if quantised:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    norms = ["output_norm"]
    for layer in range(LAYERS):
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
