"""Five documents a question, three of them hot and cached: the first token, and what is found.

    python -m benchmarks.hot_documents

After LazyAttention's study of hot documents (arXiv 2606.04302).  One prompt of the three hot
documents came before, and left in each cache what that way keeps of it; a question asks for these
three and two that nobody asked for before, in an order of chance.  SmolLM2, one thread, greedy.

- full prefill       nothing is kept
- equal prefixes     the cache of that prompt, as far as the question begins like it
- one per position   the hot documents at their places in that prompt: Prompt Cache's modules, and
                     also a copy per position; found where a question has them at the same places
- copied             one copy per document, whose keys are copied and rotated to any place
- deferred           one copy per document, attended to where it lies

What is not found is computed.  The share of documents found is that of all 120 orders, and of the
questions that were timed; ways take turns on each question.  Times are to the first token, of the
processor and by the clock.  Writes a table and `lab/benchmarks/results/hot_documents.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from benchmarks.machine import commit, described, load
from benchmarks.stock import cache_copy, prefilled, timed_generate
from kvcache_rag import MemoryStore
from kvcache_rag.engine import Engine, like
from kvcache_rag.integration.engine import EngineSettings
from kvcache_rag.policies import FullRecompute, Reuse
from kvcache_rag_lab.scoring.statistics import Interval, median_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag.kv.chunk import ChunkKey, ChunkKV

HOT: Final = 3
ASKED: Final = 5
FULL, PREFIX, PLACED, COPIED, DEFERRED = (
    "full prefill",
    "equal prefixes",
    "one per position",
    "copied",
    "deferred",
)
WAYS: Final = (FULL, PREFIX, PLACED, COPIED, DEFERRED)
Order = tuple[int, ...]
"""Documents of a question by number: those below `HOT` are hot, as the first prompt had them."""

_WORDS: Final = [
    "river",
    "stone",
    "garden",
    "market",
    "winter",
    "letter",
    "bridge",
    "captain",
    "copper",
    "island",
    "harbour",
    "village",
    "music",
    "paper",
    "engine",
    "forest",
    "teacher",
    "window",
    "morning",
    "silver",
    "doctor",
    "valley",
    "painter",
    "summer",
    "railway",
]


def orders() -> list[Order]:
    """All orders of a question's documents."""
    return list(permutations(range(ASKED)))


def found_of(way: str, order: Order) -> tuple[int, ...]:
    """The places of a question whose documents a way finds."""
    hot = tuple(place for place, document in enumerate(order) if document < HOT)
    if way == FULL:
        return ()
    if way == PREFIX:
        equal = (place for place in range(ASKED) if order[: place + 1] == tuple(range(place + 1)))
        return tuple(place for place in equal if place < HOT)
    if way == PLACED:
        return tuple(place for place in hot if order[place] == place)
    return hot


def share_found(way: str, asked: Sequence[Order]) -> float:
    """Share of the documents of some questions that a way finds."""
    return fmean(len(found_of(way, order)) / ASKED for order in asked)


@dataclass(frozen=True)
class Row:
    """One way.

    Attributes:
        way: Its name.
        found: Share of the documents found, of all orders.
        found_here: The same of the questions that were timed.
        cpu_ms: Of the processor to the first token, the median.
        of_full: The same by full prefill's of the same question: the median.
        ms: By the clock.
        prompt_tokens: Of a question, on average.
    """

    way: str
    found: float
    found_here: float
    cpu_ms: float
    of_full: Interval
    ms: float
    prompt_tokens: float


class Bench:
    """The model, the hot documents, and what each way keeps of them."""

    def __init__(self, engine: Engine, words: int) -> None:
        """Compute what the first prompt leaves.

        Args:
            engine: With the model.
            words: Of a document.
        """
        self.words = words
        self.store = MemoryStore()
        self.engine = like(engine, store=self.store, rotation="copied")
        self.deferred = like(engine, store=self.store, rotation="deferred")
        self.hot = [self.text(number) for number in range(HOT)]
        keys = self.engine.add(self.hot)
        layout = self.engine._adapter.measured.chunk_layout
        self.chunks: Mapping[ChunkKey, ChunkKV] = {
            key: self.store.get(key, layout).chunk for key in keys
        }
        prompt = self.engine.tokenize("?", self.hot)
        self.lengths = [len(prompt.prefix), *map(len, prompt.chunks)]
        ids = [*prompt.prefix, *(token for chunk in prompt.chunks for token in chunk)]
        self.prefix = prefilled(self.engine.model, torch.tensor([ids]))

    def text(self, number: int) -> str:
        """A document of chance, the same for the same number."""
        picks = np.random.default_rng([number, self.words]).integers(0, len(_WORDS), self.words)
        return " ".join(_WORDS[pick] for pick in picks)

    def texts(self, number: int, order: Order) -> list[str]:
        """Documents of a question: its cold ones are its own."""
        cold = [self.text(HOT + number * (ASKED - HOT) + index) for index in range(ASKED - HOT)]
        return [[*self.hot, *cold][document] for document in order]

    def first_token(self, way: str, number: int, order: Order) -> tuple[float, float, int]:
        """Seconds of the processor and by the clock to the first token, and the tokens."""
        question, texts = f"Which word comes first, and why? ({number})", self.texts(number, order)
        self.arrange(texts, found_of(way, order))
        if way == PREFIX:
            return self._behind_prefix(question, texts, len(found_of(way, order)))
        engine = self.deferred if way == DEFERRED else self.engine
        policy = FullRecompute() if way == FULL else Reuse()
        busy = time.process_time()
        found = engine.generate(question, texts, max_new_tokens=1, policy=policy).metrics
        busy = time.process_time() - busy
        if way != FULL and found.misses != ASKED - len(found_of(way, order)):
            raise RuntimeError(f"{way}: {found.misses} documents were missed")
        if way == DEFERRED and found.rotation != "deferred":
            raise RuntimeError(f"keys were copied: {found.not_deferred}")
        return busy, found.ttft, found.prompt_tokens

    def arrange(self, texts: Sequence[str], places: Sequence[int]) -> None:
        """Hold of these documents those at `places`, which are hot, and no other."""
        keys = self.engine.keys(texts)
        for key in {*keys, *self.chunks}:
            self.store.delete(key)
        for place in places:
            self.store.put(keys[place], self.chunks[keys[place]])

    def _behind_prefix(
        self, question: str, texts: Sequence[str], equal: int
    ) -> tuple[float, float, int]:
        prompt = self.engine.tokenize(question, texts)
        parts = [prompt.prefix, *prompt.chunks, prompt.query]
        ids = torch.tensor([[token for part in parts for token in part]])
        started, busy = time.perf_counter(), time.process_time()
        cache = cache_copy(self.prefix, sum(self.lengths[: 1 + equal]))
        sample = timed_generate(self.engine.model, ids, 1, cache, started)
        return time.process_time() - busy, sample.ttft, ids.shape[1]


def measure(engine: Engine, words: int, questions: int) -> list[Row]:
    """Time every way on questions in orders of chance."""
    bench = Bench(engine, words)
    every = orders()
    asked = [every[pick] for pick in np.random.default_rng(0).integers(0, len(every), questions)]
    for way in WAYS:  # whoever is first warms the machine up
        bench.first_token(way, questions, asked[0])
    taken: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    for number, order in enumerate(asked):
        for way in WAYS:
            taken[way].append(bench.first_token(way, number, order))
    full = [busy for busy, _, _ in taken[FULL]]
    return [
        Row(
            way,
            share_found(way, every),
            share_found(way, asked),
            1e3 * median(busy for busy, _, _ in found),
            median_interval([one[0] / whole for one, whole in zip(found, full, strict=True)]),
            1e3 * median(ttft for _, ttft, _ in found),
            fmean(tokens for _, _, tokens in found),
        )
        for way, found in taken.items()
    ]


def show(row: Row) -> None:
    """Print a row."""
    against = f"{row.of_full.value:.2f} ({row.of_full.low:.2f}-{row.of_full.high:.2f})"
    print(
        f"{row.way:<18}{100 * row.found:>8.1f} % found{row.cpu_ms:>10.0f} ms of the processor"
        f"{against:>20}{row.ms:>10.0f} ms",
        flush=True,
    )


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--words", type=int, default=256, help="of a document")
    parser.add_argument("--questions", type=int, default=12)
    results = Path(__file__).parent / "results"
    parser.add_argument("--json", type=Path, default=results / "hot_documents.json")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    engine = EngineSettings(options.model, adapter="none", device="cpu").open()
    rows = measure(engine, options.words, options.questions)
    for row in rows:
        show(row)
    report: dict[str, Any] = {
        **described("cpu", torch.get_num_threads()),
        "commit": commit(),
        "load": load(),
        "model": options.model,
        "words": options.words,
        "questions": options.questions,
        "rows": [asdict(row) for row in rows],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
