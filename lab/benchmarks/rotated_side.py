"""Which side of attention is rotated on a CPU: the keys as they are read, or the query per chunk.

    python -m benchmarks.rotated_side

LazyAttention (arXiv 2606.04302) rotates the tile of keys in prefill and the query in decoding,
inside one kernel.  Here one question attends to eight chunks of 512 tokens that lie apart, each
moved by another distance, in bfloat16, on one thread; a sample goes through eight layers, so that
keys come from memory.  Sides take turns; times are of the processor, so that other work on the
machine counts little.

- keys      the keys are rotated as the compiled kernel reads them, in one call: what the engine
            does for one question
- query     the query is rotated back per chunk and attends chunk by chunk, and the results are
            merged: what it does for batches, and where the kernel cannot turn a model's keys
- standing  `keys` with all distances 0: nothing is rotated, so that a kernel which rotates the
            query inside can gain no more than what `keys` takes above this

Each output is compared with plain attention in float32 over rotated copies.  Writes a table and
`lab/benchmarks/results/rotated_side.json`.  Exit status: 0 when all is equal within rounding, 1
when something differs, 2 without the compiled kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from benchmarks.machine import described, load
from kvcache_rag.kv.chunk import ChunkKV, GroupLayout
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.deferred.attention import fast_attention, plain_attention
from kvcache_rag.models.deferred.cache import HeldSegments, LayerSegments
from kvcache_rag.models.deferred.segments import LayerCall, SegmentTable
from kvcache_rag.models.rotation import FrequencySet, LayerGroup, LayerKind, ModelLayout
from kvcache_rag_lab.scoring.statistics import median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvcache_rag.models.attention.few_queries import ChunkContext

CHUNK: Final = 512
LAYERS: Final = 8
# Heads, heads of keys and values, and the width of one.
HEADS: Final = {
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Llama-3.1-8B": (32, 8, 128),
}
KEYS, QUERY, STANDING = "keys", "query", "standing"
FARTHEST: Final = 2e-2  # of an output, as a part of the largest one; bfloat16 keeps 8 bits
WARM: Final = 2


class QuerySegments(HeldSegments):
    """Segments whose keys no kernel turns, so that the query is rotated for each of them."""

    def context(self, group: int) -> ChunkContext | None:
        del group
        return None


@dataclass(frozen=True)
class Row:
    """One side of one shape and length of question.

    Attributes:
        shape: Of the model.
        context: Tokens of the chunks.
        question: Tokens of the question.
        side: "keys", "query" or "standing".
        ms: Of the processor, per layer: the median.
        lowest: The lowest.
        highest: The highest.
        of_keys: Median of the quotients by `keys` of the same round.
        of_keys_low: Lower end of its 95 % interval.
        of_keys_high: Upper end.
        off: Largest difference from plain attention, as a part of the largest output.
    """

    shape: str
    context: int
    question: int
    side: str
    ms: float
    lowest: float
    highest: float
    of_keys: float
    of_keys_low: float
    of_keys_high: float
    off: float


def layout_of(kv_heads: int, width: int) -> ModelLayout:
    """A model of `LAYERS` layers."""
    inv_freq = 500000.0 ** (-torch.arange(0, width, 2) / width)
    group = GroupLayout(tuple(range(LAYERS)), (kv_heads, width), (kv_heads, width))
    rotation = Rotation("half", 0, width, 0)
    return ModelLayout(
        (LayerGroup(group, None, rotation, NO_ROTATION),),
        (LayerKind(),) * LAYERS,
        (FrequencySet("benchmark", lambda _: inv_freq),),
        torch.bfloat16,
        0.0,
    )


class Setting:
    """Chunks, a question's tensors, and the sides that attend."""

    def __init__(self, shape: str, context: int, question: int) -> None:
        """Fill memory with random numbers, the same for the same arguments."""
        heads, kv_heads, width = HEADS[shape]
        torch.manual_seed(0)
        layout = layout_of(kv_heads, width)
        chunks = [_chunk(layout) for _ in range(context // CHUNK)]
        places = [(chunk, index * CHUNK) for index, chunk in enumerate(chunks)]
        moved = SegmentTable.of(layout, [[(chunk, at, at) for chunk, at in places]], context)
        still = SegmentTable.of(layout, [[(chunk, at, 0) for chunk, at in places]], context)
        self.held = {
            KEYS: HeldSegments.of(moved),
            QUERY: QuerySegments.of(moved),
            STANDING: HeldSegments.of(still),
        }
        query = torch.randn(1, question, heads, width).to(torch.bfloat16).transpose(1, 2)
        keys, values = torch.randn(2, 1, kv_heads, question, width).to(torch.bfloat16)
        self.call = LayerCall(query, keys, values, None, width**-0.5)

    def attend(self, side: str, place: int) -> Tensor:
        """Output of one layer, `(1, questions, heads, width)`."""
        return fast_attention(self.call, LayerSegments(self.held[side], 0, place))

    def off(self, side: str, place: int = 0) -> float:
        """How far a side is from plain attention over rotated copies."""
        plain = plain_attention(self.call, LayerSegments(self.held[side], 0, place)).float()
        apart = (self.attend(side, place).float() - plain).abs().max()
        return float(apart / plain.abs().max())


def _chunk(layout: ModelLayout) -> ChunkKV:
    tensors = layout.chunk_layout.empty(CHUNK)
    for group in tensors:
        for tensor in group:
            tensor.normal_()
    return ChunkKV(layout.chunk_layout, torch.zeros(CHUNK, dtype=torch.int32), 0, tensors)


def sample(attend: Callable[[int], object]) -> float:
    """Milliseconds of the processor per layer of one pass through the layers."""
    started = time.process_time()
    for place in range(LAYERS):
        attend(place)
    return 1e3 * (time.process_time() - started) / LAYERS


def measure(shape: str, context: int, question: int, rounds: int) -> list[Row]:
    """Compare and time all sides of one setting."""
    setting = Setting(shape, context, question)
    times: dict[str, list[float]] = {side: [] for side in setting.held}
    for number in range(WARM + rounds):
        for side, taken in times.items():
            took = sample(partial(setting.attend, side))
            if number >= WARM:
                taken.append(took)
    rows = []
    for side, taken in times.items():
        quotients = [mine / keys for mine, keys in zip(taken, times[KEYS], strict=True)]
        against = median_interval(quotients)
        rows.append(
            Row(
                shape,
                context,
                question,
                side,
                statistics.median(taken),
                min(taken),
                max(taken),
                against.value,
                against.low,
                against.high,
                setting.off(side),
            )
        )
    return rows


def show(row: Row) -> None:
    """Print a row."""
    name = f"{row.shape}, question {row.question}"
    span = f"{row.lowest:.3f}-{row.highest:.3f}"
    against = f"{row.of_keys:.2f} ({row.of_keys_low:.2f}-{row.of_keys_high:.2f})"
    print(f"{name:<30}{row.side:<10}{row.ms:>9.3f} ms{span:>16}{against:>20}  off {row.off:.1e}")


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write JSON; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--context", type=int, default=4096, help="in chunks of 512 tokens")
    parser.add_argument("--shapes", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--rounds", type=int, default=25)
    results = Path(__file__).parent / "results"
    parser.add_argument("--json", type=Path, default=results / "rotated_side.json")
    options = parser.parse_args(given)
    if few_queries.library() is None:
        print("the compiled kernel of attention is missing: nothing to compare", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows = []
    for shape in options.shapes:
        for question in options.questions:
            found = measure(shape, options.context, question, options.rounds)
            for row in found:
                show(row)
            rows += found
    report = {
        **described("cpu", torch.get_num_threads()),
        "rounds": options.rounds,
        "load": load(),
        "rows": [asdict(row) for row in rows],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if max(row.off for row in rows) > FARTHEST else 0


if __name__ == "__main__":
    sys.exit(main())
