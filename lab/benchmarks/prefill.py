"""Rate of offline prefill: `engine.add` into a store against bare forwards, in one run.

    python -m benchmarks.prefill --shape qwen2.5-0.5b

Random weights in a real model's shape: they cost what trained ones cost.  The sides take turns in
every round over the same batches of the same token ids; the prefix's own forward is done before on
every side, outside the clock.  A round's rates are divided by each other, and the median of these
ratios is printed with its range.

- bare           stock transformers (sdpa, its own cache): each batch of chunks behind a copy of the
                 prefix's cache, logits of the last token only, the cache dropped at once
- bare, no cache the same with the prefix's tokens again in each row and no cache at all: nothing
                 could be kept of it; its rate too counts the chunks' tokens only
- memory         `engine.add(texts)` into an empty `MemoryStore`: tokenising, addresses, forwards,
                 extraction, copies
- disk           the same into an empty `DiskStore(durable=False)`: files, checksums, renames
- disk, durable  the same into an empty `DiskStore(durable=True)`: all on the medium
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from benchmarks.machine import described
from benchmarks.shapes import CHUNK, PREFIX, SHAPES, build_model, build_tokenizer, words
from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate
from kvcache_rag.models.attention.packed import PACKED
from kvcache_rag.models.cache import CACHE_NAME, layer_tensors
from kvcache_rag.prefill import ContextChunk, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.stores import ChunkStore

RESULTS = Path(__file__).parent / "results" / "prefill.json"
TARGET = 0.95  # of the bare rate


@dataclass(frozen=True)
class Row:
    """Rate of one side.

    Attributes:
        side: Its name.
        median: Median of the rounds' chunk tokens per second.
        lowest: Of all rounds.
        highest: Of all rounds.
        rounds: How many were counted.
        ratio: Median of this rate by "bare" of the same round.
        ratio_lowest: Of all rounds.
        ratio_highest: Of all rounds.
        cpu_ratio: The same in CPU time of all threads instead of wall time.
    """

    side: str
    median: float
    lowest: float
    highest: float
    rounds: int
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    cpu_ratio: float


def chunk_batches(engine: Engine, texts: Sequence[str]) -> tuple[list[int], list[torch.Tensor]]:
    """Ids of the prefix, and the batches that `engine.add` makes, `(rows, tokens)` int64 each."""
    keys = engine.keys(texts)
    prompt = engine.tokenize("", texts)
    pending = [ContextChunk(*pair) for pair in zip(keys, map(tuple, prompt.chunks), strict=True)]
    made = batches(pending, len(prompt.prefix))
    return list(prompt.prefix), [torch.tensor([one.ids for one in batch]) for batch in made]


def bare_sides(
    model: Any, prefix: list[int], given: list[torch.Tensor]
) -> dict[str, Callable[[], None]]:
    """Forwards of stock transformers over the batches."""
    head = torch.tensor([prefix])

    def stock(ids: torch.Tensor, cache: DynamicCache | None) -> None:
        given = {CACHE_NAME: cache}
        model(input_ids=ids, **given, use_cache=cache is not None, logits_to_keep=1)

    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        computed = DynamicCache(config=model.config)
        stock(head, computed)
    held = [pair for pair in layer_tensors(computed) if pair is not None]
    model.set_attn_implementation(PACKED)

    def behind_cache() -> None:
        for ids in given:
            cache = DynamicCache(config=model.config)
            for index, (keys, values) in enumerate(held):
                rows = (len(ids), -1, -1, -1)
                cache.update(keys.expand(rows), values.expand(rows), index)
            stock(ids, cache)

    def whole() -> None:
        for ids in given:
            stock(torch.cat([head.expand(len(ids), -1), ids], 1), None)

    def bare(run: Callable[[], None]) -> Callable[[], None]:
        def forwards() -> None:
            model.set_attn_implementation("sdpa")
            with torch.inference_mode():
                run()
            model.set_attn_implementation(PACKED)

        return forwards

    return {"bare": bare(behind_cache), "bare, no cache": bare(whole)}


def adding(engine: Engine, texts: Sequence[str]) -> Callable[[], None]:
    """Add the chunks to a store that has none of them."""
    engine.add(["w1"])  # computes the prefix

    def add() -> None:
        keys = engine.add(texts)
        if not all(map(engine.store.contains, keys)):
            raise RuntimeError(f"not stored: {engine.store.stats().last_failure}")

    return add


def measure(
    timed: dict[str, Callable[[], None]],
    forget: dict[str, Callable[[], None]],
    tokens: int,
    rounds: int,
) -> list[Row]:
    """Let the sides take turns; the first round of each is not counted."""
    wall: dict[str, list[float]] = {name: [] for name in timed}
    processor: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, run in timed.items():
            gc.collect()
            started, used = time.perf_counter(), time.process_time()
            run()
            elapsed, burnt = time.perf_counter() - started, time.process_time() - used
            forget.get(name, lambda: None)()
            if number:
                wall[name].append(elapsed)
                processor[name].append(burnt)
    rows = []
    for name in timed:
        rates = [tokens / seconds for seconds in wall[name]]
        pairs = zip(wall["bare"], wall[name], strict=True)
        ratios = [theirs / mine for theirs, mine in pairs]
        in_cpu = zip(processor["bare"], processor[name], strict=True)
        rows.append(
            Row(
                name,
                statistics.median(rates),
                min(rates),
                max(rates),
                rounds,
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                statistics.median(theirs / mine for theirs, mine in in_cpu),
            )
        )
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    print(f"{'side':<16}{'tokens/s':>9}{'range':>16}{'of bare':>9}{'range':>13}{'CPU time':>10}")
    for row in rows:
        print(
            f"{row.side:<16}{row.median:>9.1f}{f'{row.lowest:.1f}-{row.highest:.1f}':>16}"
            f"{row.ratio:>9.3f}{f'{row.ratio_lowest:.2f}-{row.ratio_highest:.2f}':>13}"
            f"{row.cpu_ratio:>10.3f}"
        )
    print(f"target: at least {TARGET} of bare")


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--chunks", type=int, default=6, help="how many")
    parser.add_argument("--tokens", type=int, default=CHUNK, help="length of a chunk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS, help="write the rows there")
    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    model = build_model(arguments.shape, getattr(torch, arguments.dtype))
    where = described("cpu", arguments.threads)
    print(f"{arguments.shape}, {arguments.dtype}, random weights; {'; '.join(where.values())}")
    texts = [words(arguments.tokens, 100 + index) for index in range(arguments.chunks)]
    template = PromptTemplate(system=words(PREFIX, 1) + " ", chunk_start="", chunk_end="")
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, ChunkStore] = {
            "memory": MemoryStore(8 << 30),
            "disk": DiskStore(Path(folder) / "fast", durable=False),
            "disk, durable": DiskStore(Path(folder) / "durable"),
        }
        tokenizer = build_tokenizer()
        engines = {
            name: Engine(model, tokenizer, store=store, template=template)
            for name, store in stores.items()
        }
        prefix, batched = chunk_batches(engines["memory"], texts)
        sizes = ", ".join(str(tuple(ids.shape)) for ids in batched)
        print(
            f"{arguments.chunks} chunks of {arguments.tokens} in batches {sizes}; prefix {PREFIX}"
        )
        timed = bare_sides(model, prefix, batched)
        timed |= {name: adding(engine, texts) for name, engine in engines.items()}
        forget = {name: forgetting(engine, texts) for name, engine in engines.items()}
        rows = measure(timed, forget, arguments.chunks * arguments.tokens, arguments.rounds)
    show(rows)
    report = {
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        **where,
        "chunks": arguments.chunks,
        "chunk_tokens": arguments.tokens,
        "prefix_tokens": len(prefix),
        "batches": [list(ids.shape) for ids in batched],
        "target": TARGET,
        "rows": [asdict(row) for row in rows],
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def forgetting(engine: Engine, texts: Sequence[str]) -> Callable[[], None]:
    """Drop the chunks, so that the next round computes them again."""
    keys = engine.keys(texts)

    def forget() -> None:
        for key in keys:
            engine.store.delete(key)

    return forget


if __name__ == "__main__":
    sys.exit(main())
