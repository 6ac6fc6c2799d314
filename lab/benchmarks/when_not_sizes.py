"""What models weigh, by their configs alone: weights, GGUF, and keys and values per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.sizes import Shape
from kvcache_rag.codecs import CODECS, by_name
from kvcache_rag.models.linears import GROUP
from kvcache_rag.stores.disk.file import file_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS: Final = 512
"""Length of the chunks whose files are counted: a file has a header, too."""

# As published with the weights; only what sizes depend on.
CONFIGS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "SmolLM2-135M": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-3-270M": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-0.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-7B": (
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "Mistral-7B-v0.3": (
        "mistral",
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "Llama-3.1-8B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
}


@dataclass(frozen=True)
class Weight:
    """How large one model is.

    Attributes:
        model: Name.
        parameters: Tied ones once.
        rounded_bytes: In memory on a CPU, by `weight_format`.
        token_bytes: Of the file of a chunk, per token, by codec.
    """

    model: str
    parameters: int
    rounded_bytes: Mapping[str, float]
    token_bytes: Mapping[str, float]

    @property
    def loaded_bytes(self) -> int:
        """In memory, in bfloat16: a GGUF file of any type is dequantised to it at first."""
        return 2 * self.parameters

    def gguf_bytes(self, kind: GGMLQuantizationType = GGMLQuantizationType.Q4_K) -> float:
        """In a GGUF file all of one type."""
        weights, nbytes = GGML_QUANT_SIZES[kind]
        return self.parameters * nbytes / weights


def shape_of(config: Any) -> Shape:
    """Keys and values by a config."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(config.num_hidden_layers, config.num_key_value_heads, width)


def rounded_bytes(model: Any, weight_format: str) -> float:
    """Of a 16-bit model whose linear layers are rounded: what is none of them stays.

    In eight bits there is a 16-bit scale per output, in four bits two 16-bit numbers per `GROUP`
    inputs; the output layer has eight bits in both, and a copy of its own where it was tied.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    nbytes: float = 2 * sum(tensor.numel() for tensor in model.parameters())
    tied = model.get_input_embeddings().weight
    for linear in linears:
        weight = linear.weight
        nbytes -= 0 if weight is tied else 2 * weight.numel()
        if weight_format == "int8" or linear is model.get_output_embeddings():
            nbytes += weight.numel() + 2 * linear.out_features
        else:
            nbytes += weight.numel() * (1 / 2 + 4 / GROUP)
    return nbytes


def weights() -> list[Weight]:
    """All models; no memory is allocated for them."""
    found = []
    for name, (kind, values) in CONFIGS.items():
        config = AutoConfig.for_model(kind, **values)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        layout = shape_of(config).layout
        per_token = {codec: file_bytes(layout, by_name(codec), TOKENS) / TOKENS for codec in CODECS}
        parameters = sum(tensor.numel() for tensor in model.parameters())
        rounded = {form: rounded_bytes(model, form) for form in ("int8", "int4")}
        found.append(Weight(name, parameters, rounded, per_token))
    return found
