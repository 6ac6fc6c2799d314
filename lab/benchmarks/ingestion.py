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

Then where the time of "disk, durable" goes: seconds of its parts, of which those in another thread
run beside the forward passes.  Last, embedding beside prefilling: `benchmarks/ingestion_embedding`.
All of it takes some seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

from benchmarks.ingestion_embedding import Beside, embeddings, measure_beside
from benchmarks.machine import described, load
from benchmarks.prefill import adding, forgetting
from kvcache_rag import DiskStore, Engine, MemoryStore
from kvcache_rag.models.attention.packed import PACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_rag.stores import ChunkStore

RESULTS: Final = Path(__file__).parent / "results" / "ingestion.json"
LENGTHS: Final = (64, 256, 1024)
EMBEDDED: Final = 128  # tokens of the chunks that are embedded, too
WHOLE: Final = "the whole"
TARGET: Final = 0.95  # of the bare rate
BARE_TOKENS: Final = (1024, 4096)  # of one batch
# Parts of the work: where each is done, and its name.
PARTS: Final[dict[str, tuple[str, str]]] = {
    "tokenising, addresses": ("kvcache_rag.generation.request.Planner", "chunks"),
    "forward passes": ("kvcache_rag.models.hf.TransformersModel", "forward"),
    "batches: buffers, ids, views": ("kvcache_rag.models.hf.TransformersModel", "prefill"),
    "weights compared": ("kvcache_rag.models.weights.Weights", "are_unchanged"),
    "looking for what is there": ("kvcache_rag.stores.disk.store.DiskStore", "contains"),
    "writing: all": ("kvcache_rag.stores.disk.store.DiskStore", "put"),
    "writing: copy, checksum, file": ("kvcache_rag.stores.disk.store", "write_file"),
    "writing: on the medium": ("os", "fsync"),
}
_WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "life", "world", "state")


@dataclass(frozen=True)
class Row:
    """Rate of one side.

    Attributes:
        tokens: Of a chunk.
        threads: Of torch.
        side: Its name.
        rate: Median of the rounds' chunk tokens per second.
        ratio: Median of this rate by "bare" of the same round.
        ratio_lowest: Of all rounds.
        ratio_highest: Of all rounds.
        cores: CPU time of all threads by wall time.
        rounds: How many were counted.
        bare_batch: Tokens of a batch, and the attention, that are fastest for "bare".
    """

    tokens: int
    threads: int
    side: str
    rate: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    cores: float
    rounds: int
    bare_batch: str


@dataclass(frozen=True)
class Part:
    """Seconds of one part of the work.

    Attributes:
        tokens: Of a chunk.
        threads: Of torch.
        part: What is done.
        seconds: Of all its calls.
        beside: Seconds of these in another thread, beside the forward passes.
        share: `seconds` that are not beside, by those of the whole.
    """

    tokens: int
    threads: int
    part: str
    seconds: float
    beside: float
    share: float


def texts_of(engine: Engine, count: int, tokens: int) -> list[str]:
    """Different texts that are chunks of exactly so many tokens."""
    generator = torch.Generator().manual_seed(tokens)
    found = []
    for _ in range(count):
        picks = torch.randint(0, len(_WORDS), (tokens,), generator=generator).tolist()
        words = [_WORDS[pick] for pick in picks]
        while (excess := engine.keys([" ".join(words)])[0].tokens - tokens) > 0:
            del words[-max(1, excess // 4) :]
        if excess:
            words = _padded(engine, words, tokens)
        found.append(" ".join(words))
    return found


def _padded(engine: Engine, words: list[str], tokens: int) -> list[str]:
    """The words with short ones behind them that make up the length."""
    while True:
        for last in ("a", ".", "I"):
            longer = [*words, last]
            excess = engine.keys([" ".join(longer)])[0].tokens - tokens
            if excess <= 0:
                break
        else:
            raise RuntimeError(f"no text of {tokens} tokens")
        if not excess:
            return longer
        words = longer


class Bare:
    """The model by itself, over the same token ids."""

    def __init__(self, engine: Engine, ids: torch.Tensor) -> None:
        """Try batch sizes and attentions once each, and keep the fastest.

        Args:
            engine: Whose model it is.
            ids: `(chunks, tokens)` int64.
        """
        self._model = engine._adapter.model
        self._ids = ids
        tried = {}
        self.rows = 1
        for self.attention in ("sdpa", PACKED):
            self.run(1)  # the first pass of each costs more
        for rows in sorted({max(1, min(len(ids), n // ids.shape[1])) for n in BARE_TOKENS}):
            for attention in ("sdpa", PACKED):
                self.rows, self.attention = rows, attention
                begun = time.perf_counter()
                count = self.run(max(1, 1024 // (rows * ids.shape[1])))
                tried[rows, attention] = (time.perf_counter() - begun) / count
        self.rows, self.attention = min(tried, key=tried.__getitem__)

    @property
    def batch(self) -> str:
        """What was fastest."""
        return f"{self.rows * self._ids.shape[1]}, {self.attention.rpartition('_')[2]}"

    def run(self, most: int | None = None) -> int:
        """All forward passes, or the first few; how many chunks they had."""
        self._model.set_attn_implementation(self.attention)
        given = torch.split(self._ids, self.rows)[:most]
        with torch.inference_mode():
            for ids in given:
                self._model(input_ids=ids, use_cache=False, logits_to_keep=1)
        self._model.set_attn_implementation(PACKED)
        return sum(map(len, given))


class Clock:
    """Seconds within the parts of the work, apart for other threads."""

    def __init__(self) -> None:
        self.here: dict[str, float] = defaultdict(float)
        self.beside: dict[str, float] = defaultdict(float)
        self._main = threading.get_ident()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure in this block."""
        with ExitStack() as stack:
            for name, (place, function) in PARTS.items():
                stack.enter_context(self._measured(name, place, function))
            yield

    def _measured(self, name: str, place: str, function: str) -> Any:
        target = _resolved(place)
        original = getattr(target, function)

        def measured(*given: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(*given, **options)
            finally:
                mine = threading.get_ident() == self._main
                (self.here if mine else self.beside)[name] += time.perf_counter() - begun

        return mock.patch.object(target, function, measured)


def _resolved(place: str) -> Any:
    import importlib

    try:
        return importlib.import_module(place)
    except ImportError:
        module, _, name = place.rpartition(".")
        return getattr(importlib.import_module(module), name)


def measure(
    engines: dict[str, Engine], tokens: int, threads: int, total: int, rounds: int
) -> tuple[list[Row], list[Part]]:
    """All sides at one length, taking turns; the first round is not counted."""
    first = next(iter(engines.values()))
    texts = texts_of(first, total // tokens, tokens)
    ids = torch.tensor(first.tokenize("", texts).chunks)
    bare = Bare(first, ids)
    sides: dict[str, Callable[[], object]] = {"bare": bare.run}
    sides |= {name: adding(engine, texts) for name, engine in engines.items()}
    forget = {name: forgetting(engine, texts) for name, engine in engines.items()}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            gc.collect()
            begun, used = time.perf_counter(), time.process_time()
            run()
            elapsed = time.perf_counter() - begun
            burnt = time.process_time() - used
            forget.get(name, lambda: None)()
            if number:
                wall[name].append(elapsed)
                busy[name].append(burnt / elapsed)
    rows = []
    for name in sides:
        ratios = [theirs / mine for theirs, mine in zip(wall["bare"], wall[name], strict=True)]
        rows.append(
            Row(
                tokens,
                threads,
                name,
                ids.numel() / statistics.median(wall[name]),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                statistics.median(busy[name]),
                rounds,
                bare.batch,
            )
        )
    name = list(engines)[-1]
    return rows, parts_of(sides[name], forget[name], tokens, threads)


def parts_of(
    add: Callable[[], object], forget: Callable[[], None], tokens: int, threads: int
) -> list[Part]:
    """Where the time goes."""
    clock = Clock()
    begun = time.perf_counter()
    with clock.running():
        add()
    whole = time.perf_counter() - begun
    forget()
    # Its forward passes are within it.
    clock.here["batches: buffers, ids, views"] -= clock.here["forward passes"]
    parts = []
    for name in PARTS:
        here, beside = clock.here[name], clock.beside[name]
        parts.append(Part(tokens, threads, name, here + beside, beside, here / whole))
    return [*parts, Part(tokens, threads, WHOLE, whole, 0.0, 1.0)]


def profile(parts: Sequence[Part]) -> list[dict[str, str]]:
    """One row per part, one column per length and number of threads."""
    rows: dict[str, dict[str, str]] = {}
    for one in parts:
        column = f"{one.tokens} tokens, {one.threads} thread{'s' if one.threads > 1 else ''}"
        beside = f", beside: {one.beside:.3f} s" if one.beside else ""
        cell = f"{one.seconds:.3f} s" if one.part == WHOLE else f"{one.share:.1%}{beside}"
        rows.setdefault(one.part, {"part": one.part})[column] = cell
    return [*rows.values()]


def show(rows: Sequence[Row], parts: Sequence[Part]) -> None:
    """Print both tables."""
    for row in rows:
        span = f"{row.ratio_lowest:.2f}-{row.ratio_highest:.2f}"
        print(
            f"{row.tokens:>5} {row.threads} {row.side:<15}{row.rate:>8.0f} tok/s{row.ratio:>8.3f}"
            f"{span:>12}{row.cores:>6.2f} cores  {row.bare_batch}",
            flush=True,
        )
    for part in parts:
        print(f"{'':>8}{part.part:<32}{part.seconds:>8.3f} s{part.beside:>8.3f}{part.share:>8.1%}")


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--total", type=int, default=3072, help="tokens of all chunks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS, help="write the rows there")
    arguments = parser.parse_args(given)
    busy, before = load(), torch.get_num_threads()
    rows: list[Row] = []
    parts: list[Part] = []
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
        ways = embeddings()
        texts = texts_of(first, max(1, arguments.total // EMBEDDED // 3), EMBEDDED)
        beside: list[Beside] = []
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for tokens in arguments.lengths:
                found = measure(engines, tokens, threads, arguments.total, arguments.rounds)
                show(*found)
                rows += found[0]
                parts += found[1]
            for name, embed in ways.items():
                seconds = measure_beside(first, texts, embed, arguments.rounds)
                beside.append(Beside(name, threads, **seconds))
                print(beside[-1], flush=True)
    torch.set_num_threads(before)
    report = {
        "command": "python -m benchmarks.ingestion",
        "model": arguments.model,
        **described("cpu", max(arguments.threads)),
        "load_before": busy,
        "load_after": load(),
        "target": TARGET,
        "tokens_in_all": arguments.total,
        "rows": [asdict(row) for row in rows],
        "where_the_time_of_disk_durable_goes": profile(parts),
        "seconds_of_embedding_beside_prefilling": [asdict(one) for one in beside],
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
