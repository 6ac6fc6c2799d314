"""What a cached context saves and what it has to move, by model size, length and batch: computed.

python -m benchmarks.model_sizes

Nothing is measured and no weights are needed: operations are `DecoderShape`'s, bytes are those of
keys and values in 16 bits, and times are the least that the hardware allows: PCIe at the rate of
its lanes (128b/130b coding, nothing else subtracted), an accelerator at its peak.  Real copies and
real prefills take longer.  Contexts need not be multiples of a chunk's length: 743 tokens are a
chunk of 512 and one of 231.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report_tables import markdown
from benchmarks.shapes import CHUNK, SHAPES, config_of
from kvcache_rag_lab.evaluation.cost.flops import DecoderShape, Flops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODELS: Final = (
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

ELEMENT: Final = 2
"""Bytes of a 16-bit number."""

LANES: Final = 16

PCIE: Final[Mapping[int, float]] = {4: 16e9, 5: 32e9}
"""Transfers per second of a lane, by generation; a transfer is a bit."""

PEAK: Final = 312e12
"""Operations per second of an NVIDIA A100 in 16 bits, by its data sheet (dense)."""


@dataclass(frozen=True)
class Cost:
    """A batch of prompts over cached contexts of their own.

    Attributes:
        context: Tokens of the chunks of one prompt.
        batch: Prompts.
        flops: Operations, with and without the caches.
        nbytes: Keys and values of all contexts.
    """

    context: int
    batch: int
    flops: Flops
    nbytes: int

    @property
    def chunks(self) -> tuple[int, ...]:
        """Tokens of the chunks of one prompt: as many whole ones as there are, and the rest."""
        whole, rest = divmod(self.context, CHUNK)
        return (CHUNK,) * whole + ((rest,) if rest else ())

    def pcie_seconds(self, generation: int) -> float:
        """The least time that copying all contexts to a device takes, over 16 lanes."""
        return self.nbytes / pcie_rate(generation)

    @property
    def prefill_seconds(self) -> float:
        """The least time of a prefill of all tokens, at `PEAK`."""
        return self.flops.full / PEAK


def pcie_rate(generation: int) -> float:
    """Bytes per second of 16 lanes."""
    return LANES * PCIE[generation] * 128 / 130 / 8


def token_bytes(shape: Mapping[str, Any]) -> int:
    """Bytes of the keys and values of one token."""
    width: int = shape["hidden_size"] // shape["num_attention_heads"]
    nbytes: int = ELEMENT * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * width
    return nbytes


def cost(model: str, context: int, batch: int = 1) -> Cost:
    """What a batch of prompts costs.

    Args:
        model: Of `SHAPES`.
        context: Tokens of the chunks of one prompt.
        batch: Prompts.
    """
    flops = _decoder(model).prompt(context, QUESTION, batch=batch)
    return Cost(context, batch, flops, batch * context * token_bytes(SHAPES[model]))


@cache
def _decoder(model: str) -> DecoderShape:
    return DecoderShape.of(config_of(model))


def by_model(models: Sequence[str] = MODELS, contexts: Sequence[int] = CONTEXTS) -> str:
    """A table: model sizes by context."""
    lines = []
    for model in models:
        for context in contexts:
            found = cost(model, context)
            lines.append([model, f"{context:,}", *_cells(found)])
    return markdown(["model", "context tokens", *_HEADER], lines)


def by_length(
    model: str = "qwen2-7b", lengths: Sequence[int] = LENGTHS, batches: Sequence[int] = BATCHES
) -> str:
    """A table: length of the context by batch, of one model."""
    lines = []
    for length in lengths:
        for batch in batches:
            found = cost(model, length, batch)
            lines.append([f"{length:,}", f"{batch}", *_cells(found)])
    return markdown(["context tokens", "batch", *_HEADER], lines)


_HEADER: Final = (
    "chunks",
    "full prefill TFLOPs",
    "question alone TFLOPs",
    "saved",
    "KV MB",
    "PCIe 4.0 x16 ms",
    "PCIe 5.0 x16 ms",
    "full prefill at 312 TFLOP/s ms",
)


def _cells(found: Cost) -> list[str]:
    chunks = found.chunks
    rest = f" + {chunks[-1]}" if chunks[-1] != CHUNK and len(chunks) > 1 else ""
    whole = chunks.count(CHUNK)
    return [
        f"{whole} x {CHUNK}{rest}" if whole else f"{chunks[-1]}",
        f"{found.flops.full / 1e12:,.2f}",
        f"{found.flops.cached / 1e12:,.3f}",
        f"{100 * found.flops.reduction:.2f} %",
        f"{found.nbytes / 1e6:,.1f}",
        *(f"{1e3 * found.pcie_seconds(generation):,.2f}" for generation in PCIE),
        f"{1e3 * found.prefill_seconds:,.1f}",
    ]


if __name__ == "__main__":
    print(f"{by_model()}\n\nqwen2-7b:\n\n{by_length()}")
