"""Reading chunks from disk against the ways that need no library, in one run.

    python -m benchmarks.store

Eight chunks of 512 tokens in the shape of Qwen2.5-0.5B (24 layers, 2 heads of 64, bfloat16), files
in the page cache, all checks on, one thread.  The sides take turns in every round; medians are
printed with their range, and the ratio of medians beside the target.

- read         into the buffer of the prompt, which is allocated beforehand
- fresh        the same, with the allocation of that buffer
- unchecked    the same as `read`, with hashing switched off
- load_file    `safetensors.torch.load_file` of the same files, then `torch.cat`
- torch.load   `torch.load` of the same tensors, then `torch.cat`
- ... turned   with the keys moved to their places, by the same code on both sides

Then lookups (`contains` and `get` of tiny files) among 10^2 to 10^5 entries, and lookups while a
sweep of 10^5 files runs, in a thread of this process and in another process.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import safetensors
import torch
from safetensors.torch import load_file

from benchmarks.lookups import measure_lookups, measure_sweeps, tiny_store
from benchmarks.timing import PREFIX, Row, chunk_of, row_of, show
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout
from kvcache_rag.kv.rotary import NO_ROTATION, Rotation
from kvcache_rag.models.rotation import FrequencySet, LayerGroup, LayerKind, ModelLayout
from kvcache_rag.stitching.stitch import stitch
from kvcache_rag.stores import DiskStore
from kvcache_rag.stores.disk import file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNKS = 8
TOKENS = 512
LAYERS = tuple(range(24))
LAYOUT = ChunkLayout((GroupLayout(LAYERS, (2, 64), (2, 64)),), torch.bfloat16)

Side = tuple[str, str, float]  # side, the one it is compared with, highest ratio


class _Anything:
    """Equal to every checksum, so that a read without hashing passes."""

    def __ne__(self, other: object) -> bool:
        return False


class _NoHash:
    def update(self, view: object) -> None:
        """Hash nothing."""

    def hexdigest(self) -> Any:
        """A checksum that is never wrong."""
        return _Anything()


def qwen() -> ModelLayout:
    """How Qwen2.5-0.5B turns its keys, without the model."""
    frequencies = 1e6 ** -(torch.arange(0, 64, 2).float() / 64)
    group = LayerGroup(LAYOUT.groups[0], None, Rotation("half", 0, 64, 0), NO_ROTATION)
    kinds = (LayerKind(),) * len(LAYERS)
    found = FrequencySet("default", lambda _: frequencies)
    return ModelLayout((group,), kinds, (found,), torch.bfloat16, 0.0)


def views_of(buffer: KVBuffer) -> list[ChunkKV]:
    """The places of the chunks in a prompt's buffer."""
    return [
        buffer.view(
            0,
            place,
            place + TOKENS,
            local_start=PREFIX,
            tokens=torch.empty(TOKENS, dtype=torch.int32),
        )
        for place in range(0, CHUNKS * TOKENS, TOKENS)
    ]


def joined(parts: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """What `read` gives, by concatenation."""
    return torch.cat([part["kv"] for part in parts], dim=-2).unsqueeze(2)


def turned(load: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A side that also moves the keys to their places."""
    model = qwen()

    def run() -> torch.Tensor:
        found = load()
        stitch(model, views_of(KVBuffer(LAYOUT, ((found,),), 1, CHUNKS * TOKENS)), "reordered")
        return found

    return run


def loading_sides(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed; each call gives the prompt's tensor `[layers, 2, 1, heads, tokens, width]`."""
    store = DiskStore(folder / "store", durable=False)
    chunks = [chunk_of(LAYOUT, TOKENS, seed) for seed in range(CHUNKS)]
    for index, (key, chunk) in enumerate(chunks):
        if not store.put(key, chunk):
            raise RuntimeError(f"a chunk could not be written: {store.stats().last_failure}")
        torch.save({"kv": chunk.tensors[0][0], "tokens": chunk.tokens}, folder / f"{index}.pt")
    keys = [key for key, _ in chunks]
    ready = KVBuffer.allocate(LAYOUT, 1, CHUNKS * TOKENS, "cpu")

    def read(buffer: KVBuffer | None = None) -> torch.Tensor:
        buffer = buffer or ready
        for key, view in zip(keys, views_of(buffer), strict=True):
            store.get(key, LAYOUT, view)
        return buffer.tensors[0][0]

    def fresh() -> torch.Tensor:
        return read(KVBuffer.allocate(LAYOUT, 1, CHUNKS * TOKENS, "cpu"))

    def unchecked() -> torch.Tensor:
        with mock.patch.object(file, "xxhash", SimpleNamespace(xxh3_128=_NoHash)):
            return read()

    def by_load_file() -> torch.Tensor:
        return joined([load_file(store.path(key)) for key in keys])

    def by_torch_load() -> torch.Tensor:
        return joined([torch.load(folder / f"{index}.pt") for index in range(CHUNKS)])

    sides = {"read": read, "load_file": by_load_file, "torch.load": by_torch_load}
    sides |= {"unchecked": unchecked, "fresh": fresh}
    return {
        **sides,
        "read, turned": turned(read),
        "load_file, turned": turned(by_load_file),
        "torch.load, turned": turned(by_torch_load),
    }


def check_equal(sides: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Every side gives the same bits as the plainest one, so they are comparable."""
    expected = {tail: sides[f"load_file{tail}"]().clone() for tail in ("", ", turned")}
    for name, run in sides.items():
        plain = expected[", turned" if name.endswith(", turned") else ""]
        if not torch.equal(run(), plain):
            raise RuntimeError(f"{name} does not give what load_file gives")


def measure_loading(folder: Path, rounds: int) -> list[Row]:
    """Let the sides take turns; the first round of each is not counted."""
    sides = loading_sides(folder)
    check_equal(sides)
    found: dict[str, list[float]] = {name: [] for name in sides}
    chance = random.Random(0)
    for number in range(rounds + 1):
        # Another order in every round: what a side leaves in the processor's cache helps no other.
        for name, run in chance.sample(list(sides.items()), len(sides)):
            gc.collect()
            begun = time.perf_counter()
            run()
            if number:
                found[name].append(time.perf_counter() - begun)
    compared: list[Side] = [
        ("read", "load_file", 0.30),
        ("read", "torch.load", 0.25),
        ("read, turned", "load_file, turned", 0.50),
        ("read", "unchecked", 1.15),
        ("fresh", "load_file", 0.0),
    ]
    rows = [row_of(name, found[name]) for name in sides]
    return rows + [
        row_of(one, found[one], other, found[other], top) for one, other, top in compared
    ]


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--entries", type=int, nargs="*", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--sweeps", type=int, default=3, help="rounds of sweeps")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, 1 thread"
    versions = f"torch {torch.__version__}, safetensors {safetensors.__version__}"
    print(f"{CHUNKS} chunks of {TOKENS} tokens, {LAYOUT.nbytes(TOKENS)} bytes each")
    print(f"{machine}; {versions}")
    print(f"{'side':<30}{'ms':>9}{'range':>20}{'samples':>9}  ratio of medians")
    with tempfile.TemporaryDirectory() as folder:
        rows = show(measure_loading(Path(folder), arguments.rounds))
        stores = {n: tiny_store(Path(folder, f"tiny-{n}"), n) for n in arguments.entries}
        if stores:
            rows += show(measure_lookups(stores, arguments.rounds))
            rows += show(measure_sweeps(*stores[max(stores)], arguments.sweeps))
    if arguments.json:
        report = {"machine": machine, "versions": versions, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
