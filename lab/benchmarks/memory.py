"""Peak memory of one side, above what the process held after its imports.

    python -m benchmarks.memory --side ram --shape tiny --context 2048

Each side answers one question in a process of its own: chunks, answer of a few tokens.  On a CPU it
is the peak of resident memory over that after imports (a tiny model generates first, since much is
imported when it is first needed); on a GPU it is the most that torch held at a time.  The peak
begins anew when the model is there: making random weights needs more than loading real ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from benchmarks.shapes import SHAPES, build_model
from benchmarks.stock import timed_generate
from benchmarks.ttft_sides import DEFERRED, NAIVE, PAGES, RAM, TURBORAG, Bench, Case
from kvcache_rag_lab.evaluation.cost.memory import reset_peak, resident

if TYPE_CHECKING:
    from collections.abc import Sequence

SIDES: Final = (NAIVE, TURBORAG, PAGES, RAM, DEFERRED)
GENERATED: Final = 4
QUERY: Final = 20


@dataclass(frozen=True)
class Peak:
    """Peak memory of one side, and what it has to hold, in bytes.

    Attributes:
        side: Which side.
        context: Tokens of the chunks.
        peak: Above imports.
        weights: Parameters and buffers of the model.
        stitched: Keys and values of instruction, chunks, query and answer.
        chunks: Keys and values of the chunks.
    """

    side: str
    context: int
    peak: int
    weights: int
    stitched: int
    chunks: int

    @property
    def held(self) -> int:
        """What its peak is measured against: the weights and one copy of the context.

        From RAM, copying, the chunks lie in the store besides; deferred, they are the context.
        """
        if self.side == DEFERRED:
            return self.weights + self.chunks
        if self.side == RAM:
            return self.weights + self.chunks + self.stitched
        return self.weights + self.stitched


def measure_one(side: str, shape: str, dtype: str, device: str, folder: Path, context: int) -> Peak:
    """Answer once in this process, whose imports are done."""
    is_cuda = device == "cuda"
    timed_generate(build_model("tiny", getattr(torch, dtype), device), torch.tensor([[3, 4]]), 2)
    gc.collect()
    before = 0 if is_cuda else resident("VmRSS")
    model = build_model(shape, getattr(torch, dtype), device)
    gc.collect()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()
    case = Case(context, QUERY)
    bench = Bench(model, folder)
    bench.side(side, case)(1 + GENERATED)
    peak = torch.cuda.max_memory_allocated() if is_cuda else resident("VmHWM") - before
    tensors = [*model.parameters(), *model.buffers()]
    layout = bench.layout
    tokens = context + len(bench.prefix_ids) + QUERY + GENERATED
    return Peak(
        side,
        context,
        peak,
        weights=sum(tensor.nbytes for tensor in tensors),
        stitched=layout.nbytes(tokens),
        chunks=layout.nbytes(context),
    )


def measure_all(parsed: argparse.Namespace, folder: Path, context: int) -> list[Peak]:
    """Each side in a fresh process, over the chunks that lie in `folder` already."""
    found = []
    print(f"\npeak memory above imports at {context} tokens, MB")
    for side in SIDES:
        words = ["--side", side, "--shape", parsed.shape, "--dtype", parsed.dtype]
        words += ["--device", parsed.device, "--threads", str(parsed.threads)]
        words += ["--context", str(context), "--folder", str(folder)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        one = Peak(**json.loads(done.stdout.splitlines()[-1]))
        print(
            f"  {side:<15}{one.peak / 1e6:>9.0f}   weights {one.weights / 1e6:.0f}, "
            f"stitched {one.stitched / 1e6:.0f}, chunks {one.chunks / 1e6:.0f}",
            flush=True,
        )
        found.append(one)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one side in this process and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--folder", type=Path, required=True, help="with the chunks' files")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    peak = measure_one(
        parsed.side, parsed.shape, parsed.dtype, parsed.device, parsed.folder, parsed.context
    )
    print(json.dumps(asdict(peak)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
