"""Self-check of the paths of chunks to a GPU: equal to the plain ones, and how long they take.

    python -m benchmarks.gpu_check

Chunks of 512 tokens in the shape of Qwen2-7B (28 layers, 4 heads of 128, bfloat16) go to the places
of a prompt in GPU memory.  Each side's bytes are compared with what the plain path gives in main
memory; then the sides take turns, and medians are printed.  At last a small random model answers on
the GPU, its chunks coming from each kind of store, and its logits are compared with the CPU's; once
they are used in place, with deferred rotation.

- disk native   files in the page cache, read, checked, sent as bfloat16
- disk int8     the same, sent as int8 and decoded on the GPU
- pageable      chunks in plain main memory
- pinned        chunks in pinned main memory
- resident      chunks in GPU memory

"host" is when the caller may go on, "all" when everything is there.  Exit status: 0 when all is
equal, 1 when something differs, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from benchmarks.common import PREFIX, chunk_of, described, write
from benchmarks.shapes import build_model, build_tokenizer, words
from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate, Reuse
from kvcache_rag.codecs import Int8, Native
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkLayout, GroupLayout
from kvcache_rag.stores.device import deliver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.codecs import Codec
    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV
    from kvcache_rag.stores import ChunkStore

    Rotation = Literal["copied", "deferred"]

TOKENS = 512
LAYOUT = ChunkLayout((GroupLayout(tuple(range(28)), (4, 128), (4, 128)),), torch.bfloat16)
CLOSE = 2e-3  # of logits in float32, between two devices


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one side, medians; GB/s of the chunks' bytes as the model computed them."""

    side: str
    host: float
    everything: float
    gb_per_s: float
    equal: bool


@dataclass(frozen=True, eq=False)
class Bench:
    """Chunks in all kinds of memory, and their places in a buffer on a device.

    Attributes:
        layout: Of the chunks.
        device: Where they go.
        chunks: Keys and chunks.
        folder: For files.
    """

    layout: ChunkLayout
    device: torch.device
    chunks: Sequence[tuple[ChunkKey, ChunkKV]]
    folder: Path

    def sides(self) -> dict[str, ChunkStore]:
        """Filled stores."""
        found: dict[str, ChunkStore] = {
            "disk native": self._disk(Native()),
            "disk int8": self._disk(Int8()),
            "pageable": MemoryStore(1 << 40),
            "resident": MemoryStore(1 << 40, device=self.device),
        }
        if self.device.type == "cuda":
            found["pinned"] = MemoryStore(1 << 40, pinned=True)
        for store in found.values():
            for key, chunk in self.chunks:
                if not store.put(key, chunk):
                    raise RuntimeError(f"not kept: {store.stats().last_failure}")
        return found

    def _disk(self, codec: Codec) -> DiskStore:
        return DiskStore(self.folder / codec.name, durable=False, codec=codec)

    def places(self, device: torch.device) -> list[ChunkKV]:
        """Places of all chunks in a new buffer."""
        buffer = KVBuffer.allocate(self.layout, 1, sum(len(one) for _, one in self.chunks), device)
        found, begin = [], 0
        for _, one in self.chunks:
            ids = torch.empty(len(one), dtype=torch.int32)
            found.append(buffer.view(0, begin, begin + len(one), local_start=one.start, tokens=ids))
            begin += len(one)
        return found

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def load(self, store: ChunkStore, places: Sequence[ChunkKV]) -> list[float]:
        """Bring all chunks to their places; seconds of the host and of all."""
        self.wait()
        begun = time.perf_counter()
        found = [
            store.get(key, self.layout, place).chunk
            for (key, _), place in zip(self.chunks, places, strict=True)
        ]
        deliver(found, places)
        for chunk, place in zip(found, places, strict=True):
            place.tokens.copy_(chunk.tokens)
        host = time.perf_counter() - begun
        self.wait()
        return [host, time.perf_counter() - begun]

    def is_equal(self, store: ChunkStore) -> bool:
        """Whether the device gets, bit for bit, what the plain path gives in main memory."""
        there, here = self.places(self.device), self.places(torch.device("cpu"))
        self.load(store, there)
        for (key, _), place in zip(self.chunks, here, strict=True):
            kept = store.get(key, self.layout, place).chunk
            place.copy_from(kept)
            place.tokens.copy_(kept.tokens)
        return all(
            torch.equal(one.tokens, other.tokens)
            and all(
                torch.equal(mine.cpu(), theirs)
                for group, others in zip(one.tensors, other.tensors, strict=True)
                for mine, theirs in zip(group, others, strict=True)
            )
            for one, other in zip(there, here, strict=True)
        )


def measure(bench: Bench, rounds: int) -> list[Timing]:
    """Compare each side with the plain path, then let the sides take turns."""
    sides = bench.sides()
    equal = {name: bench.is_equal(side) for name, side in sides.items()}
    places = bench.places(bench.device)
    samples: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, store in sides.items():
            seconds = bench.load(store, places)
            if number:
                samples[name].append(seconds)
    nbytes = sum(chunk.nbytes for _, chunk in bench.chunks)
    found = []
    for name, rows in samples.items():
        host, everything = (statistics.median(one) for one in zip(*rows, strict=True))
        rate = nbytes / everything / 1e9
        found.append(Timing(name, host * 1e3, everything * 1e3, rate, equal[name]))
    return found


def answers(device: str, folder: Path) -> dict[str, float]:
    """Largest difference of a small random model's logits from the CPU's, per kind of store."""
    texts = [words(count, seed) for seed, count in enumerate((40, 70, 25))]
    question = words(20, len(texts))
    model = build_model("tiny", torch.float32)

    def engine(device: str, store: ChunkStore, rotation: Rotation = "copied") -> Engine:
        template = PromptTemplate(system=words(PREFIX, 9) + " ", chunk_start="", chunk_end="")
        found = Engine(
            copy.deepcopy(model).to(device),
            build_tokenizer(),
            store=store,
            template=template,
            rotation=rotation,
            prompt_memory=0,
        )
        found.add(texts)
        return found

    def logits(device: str, store: ChunkStore, rotation: Rotation = "copied") -> torch.Tensor:
        asked = engine(device, store, rotation)
        return asked.logits(question, chunks=texts[::-1], policy=Reuse())

    def disk(name: str, codec: Codec) -> DiskStore:
        return DiskStore(folder / name, durable=False, codec=codec)

    kinds: dict[str, Callable[[], ChunkStore]] = {
        "disk native": lambda: disk("native", Native()),
        "disk int8": lambda: disk("int8", Int8()),
        "pageable": MemoryStore,
        "resident": lambda: MemoryStore(device=device),
    }
    if device == "cuda":
        kinds["pinned"] = lambda: MemoryStore(pinned=True)
    plain = logits("cpu", MemoryStore())
    engine("cpu", disk("int8", Int8()))
    coarse = logits("cpu", disk("int8", Int8()))  # from the very files that the device reads
    found = {
        name: float((logits(device, make()) - (coarse if "int8" in name else plain)).abs().max())
        for name, make in kinds.items()
    }
    store = MemoryStore(device=device)
    found["resident, in place"] = float((logits(device, store, "deferred") - plain).abs().max())
    metrics = (
        engine(device, store, "deferred").generate(question, chunks=texts, policy=Reuse()).metrics
    )
    if metrics.rotation != "deferred":
        raise RuntimeError(f"not used in place: {metrics.not_deferred}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit status."""
    parser = argparse.ArgumentParser(description="Check the paths of chunks to a GPU.")
    parser.add_argument("--chunks", type=int, default=16, help="chunks of 512 tokens")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to be timed")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device here; run this on a machine with one", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        chunks = [chunk_of(LAYOUT, TOKENS, seed) for seed in range(options.chunks)]
        rows = measure(Bench(LAYOUT, device, chunks, Path(folder, "bench")), options.rounds)
        differences = answers("cuda", Path(folder, "answers"))
    report(rows, differences)
    if options.json is not None:
        figures = {
            "about": {
                "benchmark": "gpu_check",
                **described("cuda", torch.get_num_threads()),
                "chunks": options.chunks,
                "tokens": TOKENS,
                "prefix": PREFIX,
                "rounds": options.rounds,
            },
            "loading": [asdict(row) for row in rows],
            "logits": differences,
        }
        write(options.json, figures)
    return int(not is_right(rows, differences))


def is_right(rows: Sequence[Timing], differences: dict[str, float]) -> bool:
    """Whether every path gave what it should."""
    return all(row.equal for row in rows) and max(differences.values()) <= CLOSE


def report(rows: Sequence[Timing], differences: dict[str, float]) -> None:
    """Print two tables."""
    print(f"{'ms':<14}{'host':>9}{'all':>9}{'GB/s':>8}  equal to plain")
    for row in rows:
        line = f"{row.side:<14}{row.host:>9.2f}{row.everything:>9.2f}"
        print(f"{line}{row.gb_per_s:>8.1f}  {'yes' if row.equal else 'NO'}")
    for name, difference in differences.items():
        verdict = "" if difference <= CLOSE else f", above {CLOSE}"
        print(f"logits, {name}: at most {difference:.1e} from the CPU's{verdict}")


if __name__ == "__main__":
    sys.exit(main())
