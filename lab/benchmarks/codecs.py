"""What codecs cost: speed of encoding, decoding and reading, and size of the files.

    python -m benchmarks.codecs --json lab/benchmarks/results/codecs.json

Eight chunks of 512 tokens in the shape of Qwen2.5-0.5B (24 layers, 2 heads of 64, bfloat16).  The
codecs take turns in every round; medians are printed with their range.  GB/s count the bytes of the
chunk as the model computed it, whatever the file holds.

- encode    a dense chunk into the tensors of a file; `Native` hands them on
- decode    the tensors of a file into the chunk's place in the prompt's buffer
- read      a file in the page cache into that place, all checks on
- file      bytes of a file, header and token ids included
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvcache_rag.codecs import CODECS, Codec, by_name
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout, GroupLayout, chunk_key, spec_digest
from kvcache_rag.stores import DiskStore

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNKS = 8
TOKENS = 512
LAYOUT = ChunkLayout((GroupLayout(tuple(range(24)), (2, 64), (2, 64)),), torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """GB/s of one step of one codec, and the size of its files."""

    codec: str
    step: str
    median: float
    lowest: float
    highest: float
    rounds: int
    file_bytes: int
    times_smaller: float


def make_chunk(seed: int) -> tuple[ChunkKey, ChunkKV]:
    """A chunk of random numbers and its key."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32000, (TOKENS,), generator=generator, dtype=torch.int32)
    tensors = LAYOUT.empty(TOKENS)
    tensors[0][0].normal_(generator=generator)
    spec = spec_digest({"benchmark": "codecs"})
    key = chunk_key(ids.tolist(), prefix_ids=(), spec=spec, namespace="")
    return key, ChunkKV(LAYOUT, ids, 0, tensors)


def steps_of(
    codec: Codec, store: DiskStore, chunks: list[tuple[ChunkKey, ChunkKV]], places: list[ChunkKV]
) -> dict[str, Callable[[], None]]:
    """What is timed: each step works through all chunks."""
    encoded = [codec.encode(chunk) for _, chunk in chunks]

    def encode() -> None:
        for _, chunk in chunks:
            codec.encode(chunk)

    def decode() -> None:
        for tensors, place in zip(encoded, places, strict=True):
            codec.decode(tensors, place)

    def read() -> None:
        for (key, _), place in zip(chunks, places, strict=True):
            store.get(key, LAYOUT, place)

    return {"encode": encode, "decode": decode, "read": read}


def seconds(step: Callable[[], None]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure(folder: Path, rounds: int) -> list[Row]:
    """All codecs, taking turns; the first round is thrown away."""
    chunks = [make_chunk(seed) for seed in range(CHUNKS)]
    buffer = KVBuffer.allocate(LAYOUT, 1, CHUNKS * TOKENS, "cpu")
    places = [
        buffer.view(
            0,
            index * TOKENS,
            (index + 1) * TOKENS,
            local_start=0,
            tokens=torch.empty(TOKENS, dtype=torch.int32),
        )
        for index in range(CHUNKS)
    ]
    codecs = {name: by_name(name) for name in CODECS}
    steps, sizes = {}, {}
    for name, codec in codecs.items():
        store = DiskStore(folder / name, durable=False, codec=codec)
        for key, chunk in chunks:
            if not store.put(key, chunk):
                raise SystemExit(f"a chunk could not be written: {store.stats().last_failure}")
        sizes[name] = store.path(chunks[0][0]).stat().st_size
        for step, call in steps_of(codec, store, chunks, places).items():
            steps[name, step] = call
    taken: dict[tuple[str, str], list[float]] = {place: [] for place in steps}
    for number in range(rounds + 1):
        for place, call in steps.items():
            spent = seconds(call)
            if number:
                taken[place].append(spent)
    gigabytes = sum(chunk.nbytes for _, chunk in chunks) / 1e9
    return [
        Row(
            codec=codecs[name].name,
            step=step,
            median=gigabytes / statistics.median(spent),
            lowest=gigabytes / max(spent),
            highest=gigabytes / min(spent),
            rounds=rounds,
            file_bytes=sizes[name],
            times_smaller=sizes["native"] / sizes[name],
        )
        for (name, step), spent in taken.items()
    ]


def main() -> int:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description="Measure codecs.")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = f"{platform.machine()}, {arguments.threads} thread(s)"
    print(f"{CHUNKS} chunks of {TOKENS} tokens, {machine}, torch {torch.__version__}\n")
    print(f"{'codec':<12}{'step':<8}{'GB/s':>8}{'range':>18}{'file bytes':>12}{'smaller':>9}")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.rounds)
    for row in rows:
        print(
            f"{row.codec:<12}{row.step:<8}{row.median:>8.2f}"
            f"{f'{row.lowest:.2f}-{row.highest:.2f}':>18}{row.file_bytes:>12}"
            f"{row.times_smaller:>8.2f}x"
        )
    if arguments.json:
        report = {
            "shape": "qwen2.5-0.5b",
            "dtype": "bfloat16",
            "tokens": TOKENS,
            "chunks": CHUNKS,
            "machine": machine,
            "versions": f"torch {torch.__version__}",
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
