"""What models, chunks and prompts weigh, by their shapes alone: computed, nothing is measured.

    python -m benchmarks.sizes

- chunks     bytes per token of a stored chunk, by codec (Shared RAG-DCache, arXiv 2504.11765, table
             II, for the models that we measure with)
- weights    bytes in a file all of Q4_K, in memory in 16 bits, and rounded again
- prompts    operations of a full prefill and of the question alone over cached chunks (TurboRAG,
             arXiv 2410.07590, appendix G), bytes of keys and values in 16 bits, and the least times
             that the hardware allows: PCIe at the rate of its lanes (128b/130b coding), an A100 at
             its peak.  Real copies and real prefills take longer.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import result_file, write
from benchmarks.shapes import CHUNK, SHAPES, config_of
from kvcache_rag.codecs import CODECS, by_name
from kvcache_rag.kv.chunk import ChunkLayout, GroupLayout
from kvcache_rag.models.linears import GROUP
from kvcache_rag.stores.file import file_bytes
from kvcache_rag_lab.evaluation.cost.flops import DecoderShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_FIELDS: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
# As published with the weights; only what sizes depend on.
CONFIGS: Final[Mapping[str, tuple[Any, ...]]] = {
    "SmolLM2-135M": ("llama", 49152, 576, 1536, 30, 9, 3, 64, True),
    "Gemma-3-270M": ("gemma3_text", 262144, 640, 2048, 18, 4, 1, 256, True),
    "Qwen2.5-0.5B": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, True),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "Mistral-7B-v0.3": ("mistral", 32768, 4096, 14336, 32, 32, 8, 128, False),
    "Llama-3.1-8B": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
}
# Of `shapes.SHAPES`.
PROMPTED: Final = (
    "qwen2.5-3b",
    "qwen2-7b",
    "llama-3.1-8b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "llama-3.1-70b",
    "qwen2.5-72b",
)
CONTEXTS: Final = (743, 2048, 8192, 32768)
LENGTHS: Final = (256, 743, 1024, 4096, 16384)
BATCHES: Final = (1, 2, 4, 8)
QUESTION: Final = 128
"""Tokens of the question, as in TurboRAG's prompts of 8192 + 128."""
LANES: Final = 16
PCIE: Final[Mapping[int, float]] = {4: 16e9, 5: 32e9}
"""Transfers per second of a lane, by generation; a transfer is a bit."""
PEAK: Final = 312e12
"""Operations per second of an NVIDIA A100 in 16 bits, by its data sheet (dense)."""


@dataclass(frozen=True)
class KVShape:
    """Keys and values of a model: layers, KV heads, and the width of a head."""

    layers: int
    heads: int
    width: int

    @property
    def layout(self) -> ChunkLayout:
        """As stored in bfloat16."""
        slot = (self.heads, self.width)
        return ChunkLayout((GroupLayout(tuple(range(self.layers)), slot, slot),), torch.bfloat16)


def kv_shape(model: str) -> KVShape:
    """Of one of `CONFIGS`."""
    _, _, _, _, layers, _, heads, width, _ = CONFIGS[model]
    return KVShape(layers, heads, width)


def chunks() -> Iterator[dict[str, Any]]:
    """Bytes per token of the file of a chunk, its header included, by codec."""
    for model in CONFIGS:
        layout = kv_shape(model).layout
        sizes = {name: file_bytes(layout, by_name(name), CHUNK) / CHUNK for name in CODECS}
        yield {"model": model, "chunk tokens": CHUNK, **sizes}


def weights() -> Iterator[dict[str, Any]]:
    """Bytes of weights by form; no memory is allocated for them."""
    of_blocks, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType.Q4_K]
    for name, (kind, *values) in CONFIGS.items():
        config = AutoConfig.for_model(kind, **dict(zip(_FIELDS, values, strict=True)))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        parameters = sum(tensor.numel() for tensor in model.parameters())
        yield {
            "model": name,
            "parameters": parameters,
            "in a Q4_K file": parameters * block_bytes / of_blocks,
            "in memory": 2 * parameters,
            "int8": rounded_bytes(model, "int8"),
            "int4": rounded_bytes(model, "int4"),
        }


def rounded_bytes(model: Any, weight_format: str) -> float:
    """Of a 16-bit model whose linear layers are rounded: what is none of them stays.

    In eight bits there is a 16-bit scale per output, in four bits two 16-bit numbers per `GROUP`
    inputs; the output layer has eight bits in both, and a copy of its own where it was tied.
    """
    nbytes: float = 2 * sum(tensor.numel() for tensor in model.parameters())
    tied = model.get_input_embeddings().weight
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        weight = linear.weight
        nbytes -= 0 if weight is tied else 2 * weight.numel()
        if weight_format == "int8" or linear is model.get_output_embeddings():
            nbytes += weight.numel() + 2 * linear.out_features
        else:
            nbytes += weight.numel() * (1 / 2 + 4 / GROUP)
    return nbytes


@cache
def _decoder(model: str) -> DecoderShape:
    return DecoderShape.of(config_of(model))


def prompt(model: str, context: int, batch: int = 1) -> dict[str, Any]:
    """What a batch of prompts costs, each over a cached context of its own.

    Args:
        model: Of `SHAPES`.
        context: Tokens of the chunks of one prompt; they need not be multiples of a chunk's.
        batch: Prompts.
    """
    flops = _decoder(model).prompt(context, QUESTION, batch=batch)
    shape = SHAPES[model]
    width = shape["hidden_size"] // shape["num_attention_heads"]
    kv = KVShape(shape["num_hidden_layers"], shape["num_key_value_heads"], width)
    nbytes = batch * kv.layout.nbytes(context)
    return {
        "model": model,
        "context": context,
        "batch": batch,
        "full prefill TFLOPs": flops.full / 1e12,
        "question alone TFLOPs": flops.cached / 1e12,
        "saved %": 100 * flops.reduction,
        "KV MB": nbytes / 1e6,
        **{f"PCIe {gen}.0 x16 ms": 1e3 * nbytes / pcie_rate(gen) for gen in PCIE},
        "full prefill at 312 TFLOP/s ms": 1e3 * flops.full / PEAK,
    }


def pcie_rate(generation: int) -> float:
    """Bytes per second of 16 lanes."""
    return LANES * PCIE[generation] * 128 / 130 / 8


def main(words: Sequence[str] | None = None) -> int:
    """Compute, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", type=Path, default=result_file("sizes"))
    parsed = parser.parse_args(words)
    report = {
        "about": {"benchmark": "sizes", "how": "computed from configs, nothing is measured"},
        "chunks": [*chunks()],
        "weights": [*weights()],
        "prompts by model": [prompt(model, size) for model in PROMPTED for size in CONTEXTS],
        "prompts by length and batch": [
            prompt("qwen2-7b", length, batch) for length in LENGTHS for batch in BATCHES
        ],
        "prompt of TurboRAG's tables": [prompt("qwen2-7b", 8192, batch) for batch in (1, 2, 4, 8)],
    }
    write(parsed.json, report)
    print(f"wrote {parsed.json.name}; python -m benchmarks.render sizes shows it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
