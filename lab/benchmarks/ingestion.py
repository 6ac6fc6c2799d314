"""Whether ingestion is bound by compute: `Engine.add` against bare forwards of SmolLM2, in one run.

    python -m benchmarks.ingestion

Chunks of 64, 256 and 1,024 tokens, with one thread and with two.  The sides take turns in every
round; a round's rates are divided by each other, and the median of these ratios is printed with its
range.

- bare           the model by itself over the same ids: without the instruction before them, no
                 cache, logits of the last token only, at the batch size and with the attention that
                 are fastest (tried before, see `bare_batch`)
- memory         `engine.add(texts)` into an empty `MemoryStore`: tokenising, addresses, forwards
                 behind the instruction, copies
- disk, durable  the same into an empty `DiskStore()`: all on the medium
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.common import described, in_turns, load, over, result_file, write
from kvcache_rag import DiskStore, Engine, MemoryStore
from kvcache_rag.models.attention.packed import packed_attention
from kvcache_rag.models.attention.support import standing, stock_configs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.stores import ChunkStore

LENGTHS: Final = (64, 256, 1024)
TARGET: Final = 0.95  # of the bare rate
BARE: Final = "bare"
BARE_TOKENS: Final = (1024, 4096)  # of one batch
_WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "life", "world", "state")


def texts_of(engine: Engine, count: int, tokens: int) -> list[str]:
    """Different texts that are chunks of exactly so many tokens."""
    generator = torch.Generator().manual_seed(tokens)
    found = []
    for _ in range(count):
        picks = torch.randint(0, len(_WORDS), (tokens,), generator=generator).tolist()
        words = [_WORDS[pick] for pick in picks]
        while (excess := _tokens(engine, words) - tokens) > 0:
            del words[-max(1, excess // 4) :]
        if excess:
            words = _padded(engine, words, tokens)
        found.append(" ".join(words))
    return found


def _padded(engine: Engine, words: list[str], tokens: int) -> list[str]:
    """The words with short ones behind them that make up the length."""
    while True:
        longer = [[*words, last] for last in ("a", ".", "I")]
        fitting = [one for one in longer if _tokens(engine, one) <= tokens]
        if not fitting:
            raise RuntimeError(f"no text of {tokens} tokens")
        words = fitting[0]
        if _tokens(engine, words) == tokens:
            return words


def _tokens(engine: Engine, words: Sequence[str]) -> int:
    return engine.keys([" ".join(words)])[0].tokens


class Bare:
    """The model by itself, over the same token ids."""

    def __init__(self, engine: Engine, ids: torch.Tensor) -> None:
        """Try batch sizes and attentions once each, and keep the fastest.

        Args:
            engine: Whose model it is.
            ids: `(chunks, tokens)` int64.
        """
        self._model = engine.model
        self._ids = ids
        tried = {}
        self.rows = 1
        for self.attention in ("sdpa", "packed"):
            self.run(1)  # the first pass of each costs more
        for rows in sorted({max(1, min(len(ids), n // ids.shape[1])) for n in BARE_TOKENS}):
            for attention in ("sdpa", "packed"):
                self.rows, self.attention = rows, attention
                begun = time.perf_counter()
                count = self.run(max(1, 1024 // (rows * ids.shape[1])))
                tried[rows, attention] = (time.perf_counter() - begun) / count
        self.rows, self.attention = min(tried, key=tried.__getitem__)

    @property
    def batch(self) -> str:
        """What was fastest."""
        return f"{self.rows * self._ids.shape[1]}, {self.attention}"

    def run(self, most: int | None = None) -> int:
        """All forward passes, or the first few; how many chunks they had."""
        given = torch.split(self._ids, self.rows)[:most]
        ours = stock_configs(self._model) if self.attention == "packed" else []
        with standing(ours, packed_attention), torch.inference_mode():
            for ids in given:
                self._model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return sum(map(len, given))


def adding(engine: Engine, texts: Sequence[str]) -> None:
    """Add the chunks to a store that has none of them."""
    keys = engine.add(texts)
    if not all(map(engine.store.contains, keys)):
        raise RuntimeError(f"not stored: {engine.store.stats().last_failure}")


def timed(run: Callable[[], object], forget: Callable[[], None]) -> tuple[float, float]:
    """Wall time of a call, and processor time by it."""
    begun, used = time.perf_counter(), time.process_time()
    run()
    elapsed, burnt = time.perf_counter() - begun, time.process_time() - used
    forget()
    return elapsed, burnt / elapsed


def measure(
    engines: dict[str, Engine], tokens: int, threads: int, total: int, rounds: int
) -> list[dict[str, Any]]:
    """All sides at one length, in turns."""
    first = next(iter(engines.values()))
    texts = texts_of(first, total // tokens, tokens)
    ids = torch.tensor(first.tokenize("", texts).chunks)
    bare = Bare(first, ids)

    def forget(engine: Engine) -> None:
        for key in engine.keys(texts):
            engine.store.delete(key)

    sides: dict[str, Callable[[], tuple[float, float]]] = {
        BARE: partial(timed, bare.run, lambda: None)
    }
    for name, engine in engines.items():
        engine.add(["w1"])  # computes the prefix
        sides[name] = partial(timed, partial(adding, engine, texts), partial(forget, engine))
    found = in_turns(sides, rounds)
    wall = {name: [seconds for seconds, _ in samples] for name, samples in found.items()}
    rows = []
    for name, samples in found.items():
        ratio = over(wall[BARE], wall[name])
        rows.append(
            {
                "tokens": tokens,
                "threads": threads,
                "side": name,
                "rate": ids.numel() / statistics.median(wall[name]),
                "ratio": ratio["value"],
                "ratio_lowest": ratio["low"],
                "ratio_highest": ratio["high"],
                "cores": statistics.median(cores for _, cores in samples),
                "rounds": rounds,
                "bare_batch": bare.batch,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--total", type=int, default=3072, help="tokens of all chunks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=result_file("ingestion"))
    arguments = parser.parse_args(given)
    busy, before = load(), torch.get_num_threads()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, ChunkStore] = {
            "memory": MemoryStore(8 << 30),
            "disk, durable": DiskStore(Path(folder)),
        }
        first = Engine.from_pretrained(arguments.model, store=stores["memory"], adapter="none")
        engines = {
            name: Engine(first.model, first.tokenizer, store=store, template=first.template)
            for name, store in stores.items()
        }
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for tokens in arguments.lengths:
                rows += measure(engines, tokens, threads, arguments.total, arguments.rounds)
    torch.set_num_threads(before)
    about = {
        "benchmark": "ingestion",
        "model": arguments.model,
        **described("cpu", max(arguments.threads)),
        "load_before": busy,
        "load_after": load(),
        "target": TARGET,
        "tokens_in_all": arguments.total,
    }
    write(arguments.json, {"about": about, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
