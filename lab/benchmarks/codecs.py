"""What codecs cost and save: bytes, speed of each step, and first tokens over their chunks.

    python -m benchmarks.codecs

Steps: eight chunks of 512 tokens in the shape of Qwen2.5-0.5B, bfloat16, the codecs in turns.  GB/s
count the bytes of the chunk as the model computed it, whatever the file holds.

- encode    a dense chunk into the tensors of a file; `Native` hands them on
- decode    the tensors of a file into the chunk's place in the prompt's buffer
- read      a file in the page cache into that place, all checks on

First tokens: SmolLM2 over sixteen chunks in a new order each round, by `Reuse()`, from files in the
page cache and from files read anew from the medium (`cold`).

- native        files as the model computed them, read into the prompt's buffer and rotated there
- int8 copied   files of `Int8()`, decoded into the buffer and rotated there (`rotation="copied"`)
- int8          the same files, read as they are and attended to
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.common import (
    chunk_of,
    described,
    in_turns,
    load,
    over,
    result_file,
    seconds_of,
    write,
)
from benchmarks.shapes import words
from kvcache_rag import DiskStore, Engine, PromptTemplate, Reuse
from kvcache_rag.codecs import CODECS, Codec, Int8, by_name
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout, GroupLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag import Answer

CHUNKS: Final = 8
TOKENS: Final = 512
LAYOUT: Final = ChunkLayout((GroupLayout(tuple(range(24)), (2, 64), (2, 64)),), torch.bfloat16)
NATIVE, COPIED, PLACE = "native", "int8 copied", "int8"
ASKED: Final = 16  # chunks of a question
GENERATED: Final = 8
QUESTION: Final = "Which of them is the first of all, and why was that so? Say it in few words."


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


def steps(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """GB/s of every step of every codec, and bytes of a file."""
    chunks = [chunk_of(LAYOUT, TOKENS, seed) for seed in range(CHUNKS)]
    start = chunks[0][1].start
    buffer = KVBuffer.allocate(LAYOUT, 1, CHUNKS * TOKENS, "cpu")
    places = []
    for begin in range(0, CHUNKS * TOKENS, TOKENS):
        tokens = torch.empty(TOKENS, dtype=torch.int32)
        places.append(buffer.view(0, begin, begin + TOKENS, local_start=start, tokens=tokens))
    calls, sizes = {}, {}
    for name in CODECS:
        codec = by_name(name)
        store = DiskStore(folder / name, durable=False, codec=codec)
        for key, chunk in chunks:
            if not store.put(key, chunk):
                raise SystemExit(f"a chunk could not be written: {store.stats().last_failure}")
        sizes[name] = store.path(chunks[0][0]).stat().st_size
        for step, call in steps_of(codec, store, chunks, places).items():
            calls[f"{name} {step}"] = partial(seconds_of, call)
    gigabytes = sum(chunk.nbytes for _, chunk in chunks) / 1e9
    rows = []
    for place, taken in in_turns(calls, rounds).items():
        name, _, step = place.partition(" ")
        rows.append(
            {
                "codec": name,
                "step": step,
                "median": gigabytes / statistics.median(taken),
                "lowest": gigabytes / max(taken),
                "highest": gigabytes / min(taken),
                "rounds": rounds,
                "file_bytes": sizes[name],
                "times_smaller": sizes[NATIVE] / sizes[name],
            }
        )
        print(rows[-1], flush=True)
    return rows


def engine_of(side: str, folder: Path, model: str) -> Engine:
    """An engine over its files."""
    codec = None if side == NATIVE else Int8()
    return Engine.from_pretrained(
        model,
        adapter="none",
        device="cpu",
        policy=Reuse(),
        template=PromptTemplate(system="Use the documents."),
        store=DiskStore(folder / ("native" if codec is None else "int8"), codec=codec),
        rotation="auto" if side == PLACE else "copied",
    )


def texts_of(engine: Engine, context: int) -> list[str]:
    """Chunks of `context` tokens together."""
    size = context // ASKED
    ids = [engine.tokenizer(words(2 * size, seed))["input_ids"] for seed in range(ASKED)]
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


def first_tokens(folder: Path, model: str, context: int, rounds: int) -> list[dict[str, Any]]:
    """First tokens and loading of every side, and as parts of native's of the same round."""
    engines = {side: engine_of(side, folder, model) for side in (NATIVE, COPIED, PLACE)}
    texts = texts_of(engines[NATIVE], context)
    for side in (NATIVE, PLACE):
        engines[side].add(texts)
    rows = []
    for place in ("page cache", "cold"):

        def asking(side: str, place: str = place) -> Callable[[], Answer]:
            order = random.Random(place)  # the same for every side

            def ask() -> Answer:
                shuffled = order.sample(texts, len(texts))
                if place == "cold":
                    forgotten(folder)
                return engines[side].generate(
                    QUESTION,
                    shuffled,
                    max_new_tokens=GENERATED,
                    min_new_tokens=GENERATED,
                    prompt_lookup_num_tokens=0,
                )

            return ask

        answers = in_turns({side: asking(side) for side in engines}, rounds)
        for side, given in answers.items():
            found = [answer.metrics for answer in given]
            native = [answer.metrics for answer in answers[NATIVE]]
            if any(one.reused_tokens == 0 or one.misses for one in found):
                raise SystemExit(f"{side} computed chunks that were stored")
            rows.append(
                {
                    "place": place,
                    "side": side,
                    "rotation": found[0].rotation,
                    "ms to the first": statistics.median(one.ttft for one in found) * 1e3,
                    "of native's": over([one.ttft for one in found], [one.ttft for one in native]),
                    "rounds": rounds,
                }
            )
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2", help='of the first tokens; "" for none')
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=result_file("codecs"))
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    about = {"benchmark": "codecs", **described("cpu", parsed.threads), "load": load()}
    about |= {"shape": "qwen2.5-0.5b", "chunks": CHUNKS, "tokens": TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {"about": about, "rows": steps(Path(folder), parsed.rounds)}
        if parsed.model:
            about |= {"model": parsed.model, "context": parsed.context}
            report["first tokens"] = first_tokens(
                Path(folder) / "asked", parsed.model, parsed.context, parsed.rounds
            )
    write(parsed.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
