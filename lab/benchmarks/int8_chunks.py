"""Chunks in 8 bits, attended to where they lie, against native ones: load, first token, memory.

    python -m benchmarks.int8_chunks --json lab/benchmarks/results/int8_chunks.json

SmolLM2 over sixteen chunks in a new order each round, one thread, the sides in turns:

- native        files as the model computed them, read into the prompt's buffer and rotated there
- int8 copied   files of `Int8()`, decoded into the buffer and rotated there (`rotation="copied"`)
- int8          the same files, read as they are and attended to

in three places: files in the page cache, files read anew from the medium (`cold`), and files that
come at 100 MB/s, however the reading waits.  Load time is the first token less the floor: the
question's own forward pass over a context that is there.  Memory is the peak of one question above
what the process held before it, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch

from benchmarks.decoding import interval
from benchmarks.machine import described, load
from benchmarks.shapes import words
from kvcache_rag import DiskStore, Engine, PromptTemplate, Reuse
from kvcache_rag.codecs import Int8
from kvcache_rag_lab.evaluation.cost.memory import peak_of_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

NATIVE: Final = "native"
COPIED: Final = "int8 copied"
PLACE: Final = "int8"
SIDES: Final = (NATIVE, COPIED, PLACE)
CHUNKS: Final = 16
TOKENS: Final = 8
RATE: Final = 100e6
QUESTION: Final = "Which of them is the first of all, and why was that so? Say it in few words."


def engine_of(side: str, folder: Path) -> Engine:
    """An engine over its files."""
    codec = None if side == NATIVE else Int8()
    return Engine.from_pretrained(
        "smollm2",
        adapter="none",
        device="cpu",
        policy=Reuse(),
        template=PromptTemplate(system="Use the documents."),
        store=DiskStore(folder / ("native" if codec is None else "int8"), codec=codec),
        rotation="auto" if side == PLACE else "copied",
    )


def texts_of(engine: Engine, context: int) -> list[str]:
    """Chunks of `context` tokens together."""
    size = context // CHUNKS
    ids = [engine.tokenizer(words(2 * size, seed))["input_ids"] for seed in range(CHUNKS)]
    return [engine.tokenizer.decode(one[:size]) for one in ids]


def forgotten(folder: Path) -> None:
    """Let the system read all files of a folder from the medium the next time."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def slowly() -> Iterator[None]:
    """Let whatever is read come at `RATE` bytes per second."""
    plain, due = os.preadv, [0.0]

    def throttled(descriptor: int, buffers: Any, offset: int) -> int:
        count = plain(descriptor, buffers, offset)
        now = time.perf_counter()
        due[0] = max(due[0], now) + count / RATE
        time.sleep(max(0.0, due[0] - now))
        return count

    with patch.object(os, "preadv", throttled):
        yield


def floor_of(engine: Engine, texts: Sequence[str]) -> Callable[[], float]:
    """Seconds of the question's own forward pass over a native context that is there."""
    answerer = engine._answerer
    if answerer.filler is None:
        raise SystemExit("the model keeps no chunks")
    filler = answerer.filler
    request = engine._planner.request(QUESTION, list(texts), policy=engine.policy, max_new_tokens=8)
    prompt = answerer.prompt(request, 0, "")

    def run() -> float:
        with torch.inference_mode():
            context = filler.fill([prompt])
            (row,) = context.rows
            first = row.shape.context_tokens
            with context.attended():
                cache = context.cache([len(prompt.query)])
                places = torch.arange(first, len(row.ids))
                started = time.perf_counter()
                logits = answerer.model.forward(row.ids[None, first:], cache, places, keep=1)
                int(logits[0, -1].argmax())
                return time.perf_counter() - started

    return run


def measured(
    engines: dict[str, Engine], texts: list[str], folder: Path, place: str, rounds: int
) -> list[dict[str, Any]]:
    """First token and load time of every side, and as parts of native's of the same round."""
    floor = floor_of(engines[NATIVE], texts)
    firsts: dict[str, list[float]] = {side: [] for side in engines}
    steps: dict[str, list[float]] = {side: [] for side in engines}
    floors = []
    order = random.Random(place)
    for turn in range(rounds + 1):
        shuffled = order.sample(texts, len(texts))
        if turn:
            floors.append(floor())
        for side, engine in engines.items():
            if place == "cold":
                forgotten(folder)
            pace: AbstractContextManager[None] = slowly() if place == "100 MB/s" else nullcontext()
            with pace:
                answer = engine.generate(
                    QUESTION,
                    shuffled,
                    max_new_tokens=TOKENS,
                    min_new_tokens=TOKENS,
                    prompt_lookup_num_tokens=0,
                )
            found = (answer.metrics.hits, answer.metrics.rotation)
            if found != ({"disk": CHUNKS}, "deferred" if side == PLACE else "copied"):
                raise SystemExit(f"{side} answered otherwise: {answer.metrics}")
            if turn:
                firsts[side].append(answer.metrics.ttft)
                rest = answer.metrics.total - answer.metrics.ttft
                steps[side].append(rest / (answer.metrics.generated_tokens - 1))
    rows = []
    loads = {
        side: [one - bare for one, bare in zip(firsts[side], floors, strict=True)]
        for side in engines
    }
    for side in engines:
        pairs = zip(firsts[side], firsts[NATIVE], strict=True)
        stepping = zip(steps[side], steps[NATIVE], strict=True)
        loading = zip(loads[side], loads[NATIVE], strict=True)
        rows.append(
            {
                "place": place,
                "side": side,
                "floor ms": statistics.median(floors) * 1e3,
                "ms to the first": statistics.median(firsts[side]) * 1e3,
                "of native's": interval([one / other for one, other in pairs]),
                "ms of loading": statistics.median(loads[side]) * 1e3,
                "loading of native's": interval([one / other for one, other in loading]),
                "ms a further token": statistics.median(steps[side]) * 1e3,
                "a token of native's": interval([one / other for one, other in stepping]),
            }
        )
        print(rows[-1], flush=True)
    return rows


def peak_of(side: str, folder: Path, context: int) -> int:
    """Bytes at the peak of one question above those before, in this process."""
    engine = engine_of(side, folder)
    texts = texts_of(engine, context)
    engine.generate(QUESTION, texts[:1], max_new_tokens=2)
    return peak_of_call(lambda: engine.generate(QUESTION, texts, max_new_tokens=2))


def peaks(folder: Path, context: int, threads: int) -> list[dict[str, Any]]:
    """Peak memory of every side, each in a process of its own."""
    found: dict[str, float] = {}
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.int8_chunks", "--peak", side]
        command += ["--folder", str(folder), "--context", str(context), "--threads", str(threads)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[side] = int(done.stdout.splitlines()[-1]) / 1e6
    rows = [
        {"side": side, "MB": peak, "of native's": peak / found[NATIVE]}
        for side, peak in found.items()
    ]
    for row in rows:
        print(row, flush=True)
    return rows


def measure(folder: Path, parsed: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    before = load()
    engines = {side: engine_of(side, folder) for side in SIDES}
    texts = texts_of(engines[NATIVE], parsed.context)
    for side in (NATIVE, PLACE):
        engines[side].add(texts)
    places = ("page cache", "cold", "100 MB/s")
    rows = [
        row for place in places for row in measured(engines, texts, folder, place, parsed.rounds)
    ]
    layout = engines[NATIVE]._adapter.measured.chunk_layout
    nbytes = {NATIVE: layout.nbytes(1), PLACE: Int8().nbytes(layout, 1000) / 1000}
    del engines
    return {
        "about": described("cpu", parsed.threads),
        "load": [before, load()],
        "context": parsed.context,
        "bytes a token": nbytes,
        "rows": rows,
        "memory": peaks(folder, parsed.context, parsed.threads),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Chunks in 8 bits against native ones.")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--folder", type=Path, help="where files go; it is kept")
    parser.add_argument("--peak", choices=SIDES, help="measure one side's memory in this process")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    if parsed.peak is not None:
        print(peak_of(parsed.peak, parsed.folder, parsed.context))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        report = measure(parsed.folder or Path(temporary), parsed)
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
