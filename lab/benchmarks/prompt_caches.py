"""What four ways to keep documents find of prompts of several documents.

A request is the documents of one prompt, in order, all of one length.  A cache has room for so many
documents and drops the least recently used one; what a request did not find is put into it.

- prefix          of equal prefixes only, as stock servers do: a copy is of a document behind those
                  before it, and is found if all of these are.  The copies of a request count as
                  used from its end to its beginning, so a copy never outlives what it stands behind
- Prompt Cache    (arXiv 2311.04934) a module stands at the one place of its schema: a document is
                  bound to the place at which it was computed, for as long as it is held.  Asked for
                  at another, it is computed for that prompt alone, and nothing is kept
- per position    one copy per document and place
- position-free   one copy per document

Place is the number of a document in its prompt: with documents of one length, its position.  A
schema that has each document at each place (a union per place) holds what "per position" holds.
"""

from __future__ import annotations

import csv
from collections import OrderedDict
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.caching import popularity
from benchmarks.sizes import SHAPES
from kvcache_rag_lab.evaluation.cost.popularity import lru_hits
from kvcache_rag_lab.scoring.statistics import Interval, mean_interval, paired_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

Prompts = list[tuple[int, ...]]
"""Per request the numbers of its documents, in order."""

PREFIX, PROMPT_CACHE, PER_POSITION, FREE = (
    "prefix",
    "prompt_cache",
    "per_position",
    "position_free",
)


def prefix_hits(prompts: Prompts, warm: int, room: int) -> int:
    """Documents found as part of an equal prefix."""
    held: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for number, prompt in enumerate(prompts):
        paths = [prompt[: place + 1] for place in range(len(prompt))]
        found = next((place for place, path in enumerate(paths) if path not in held), len(paths))
        hits += found if number >= warm else 0
        for path in reversed(paths):
            _use(held, path, room)
    return hits


def prompt_cache_hits(prompts: Prompts, warm: int, room: int) -> int:
    """Documents found at the place to which they are bound."""
    held: OrderedDict[int, int] = OrderedDict()  # the place of each document
    hits = 0
    for number, prompt in enumerate(prompts):
        for place, document in enumerate(prompt):
            if held.get(document, place) != place:
                continue
            hits += document in held and number >= warm
            _use(held, document, room)
            if document in held:
                held[document] = place
    return hits


def per_position_hits(prompts: Prompts, warm: int, room: int) -> int:
    """Documents found in a copy for their place."""
    copies = [(document, place) for prompt in prompts for place, document in enumerate(prompt)]
    return lru_hits(copies, sum(map(len, prompts[:warm])), room)


def position_free_hits(prompts: Prompts, warm: int, room: int) -> int:
    """Documents found wherever they stand."""
    copies = [(document, 0) for prompt in prompts for document in prompt]
    return lru_hits(copies, sum(map(len, prompts[:warm])), room)


def _use(held: OrderedDict[Any, Any], copy: Hashable, room: int) -> None:
    """Make a copy the last used one, put in if it is not there; drop what has no room."""
    held[copy] = held.get(copy)
    held.move_to_end(copy)
    if len(held) > room:
        held.popitem(last=False)


WAYS: Final[dict[str, Callable[[Prompts, int, int], int]]] = {
    PREFIX: prefix_hits,
    PROMPT_CACHE: prompt_cache_hits,
    PER_POSITION: per_position_hits,
    FREE: position_free_hits,
}


@dataclass(frozen=True)
class Room:
    """Memory for documents of a model.

    Attributes:
        shape: Of the model (`sizes.SHAPES`).
        tokens: Of a document.
        gigabytes: 10^9 bytes, for all of them.
    """

    shape: str
    tokens: int
    gigabytes: float

    @property
    def documents(self) -> int:
        """How many fit, keys and values in bfloat16."""
        each = SHAPES[self.shape].layout.nbytes(self.tokens)
        return int(self.gigabytes * 1e9 // each)


@dataclass(frozen=True)
class PromptRow:
    """What every way finds, as a share of the documents asked for.

    Attributes:
        trace: File of the requests; "" for random ones.
        alpha: Exponent of Zipf's law, by which documents are drawn; None for a trace.
        per_prompt: Documents of a request, on average.
        gigabytes: For all documents.
        room: Documents that fit.
        prefix: Hit ratio of prefix caching.
        prompt_cache: Of Prompt Cache.
        per_position: With one copy per document and place.
        position_free: With one copy per document.
        gain: The last by the one before it; None where that has no hit.
    """

    trace: str
    alpha: float | None
    per_prompt: float
    gigabytes: float
    room: int
    prefix: Interval
    prompt_cache: Interval
    per_position: Interval
    position_free: Interval
    gain: Interval | None


def draw_prompts(
    documents: int, alpha: float, per_prompt: int, requests: int, seed: int
) -> Prompts:
    """Random requests: different documents by Zipf's law, in an order of chance.

    The documents are drawn one after the other, each in proportion to its popularity among those
    that are left (Gumbel's trick), and then shuffled.
    """
    generator = np.random.default_rng([seed, 2])
    weights = np.log(popularity(documents, alpha))
    prompts = []
    for _ in range(requests):
        keys = weights + generator.gumbel(size=documents)
        prompts.append(
            tuple(generator.permutation(np.argpartition(-keys, per_prompt)[:per_prompt]).tolist())
        )
    return prompts


def read_trace(file: Path) -> Prompts:
    """Requests of a CSV file: a row is a request, its document ids in order.

    Raises:
        ValueError: If there is no such file, or no request in it.
    """
    if not file.is_file():
        raise ValueError(f"there is no trace {file}; name a CSV file of document ids")
    numbers: dict[str, int] = {}
    prompts = []
    with file.open(encoding="utf-8", newline="") as rows:
        for row in csv.reader(rows):
            ids = [name.strip() for name in row if name.strip()]
            if ids:
                prompts.append(tuple(numbers.setdefault(name, len(numbers)) for name in ids))
    if not prompts:
        raise ValueError(f"{file} holds no request: write a row of document ids for each")
    return prompts


def ratios(prompts: Prompts, room: int) -> dict[str, float]:
    """Hit ratio of every way; the first fifth of the requests only fills the caches."""
    warm = len(prompts) // 5
    asked = sum(map(len, prompts[warm:]))
    return {name: hits(prompts, warm, room) / asked for name, hits in WAYS.items()}


def drawn_row(alpha: float, per_prompt: int, room: Room, streams: Sequence[Prompts]) -> PromptRow:
    """What every way finds of random requests, with 95 % intervals over streams."""
    found = [ratios(prompts, room.documents) for prompts in streams]
    values = {name: [one[name] for one in found] for name in WAYS}
    gain = paired_ratio(values[FREE], values[PER_POSITION]) if any(values[PER_POSITION]) else None
    means = {name: _mean(each) for name, each in values.items()}
    return PromptRow("", alpha, per_prompt, room.gigabytes, room.documents, gain=gain, **means)


def _mean(each: Sequence[float]) -> Interval:
    """The mean over streams; where all agree there is no telling how far others would be."""
    if min(each) == max(each):
        return Interval(each[0], each[0], each[0], len(each))
    return mean_interval(each)


def trace_row(name: str, prompts: Prompts, room: Room) -> PromptRow:
    """What every way finds of a trace."""
    found = {
        way: Interval(value, value, value, 0)
        for way, value in ratios(prompts, room.documents).items()
    }
    each, free = found[PER_POSITION].value, found[FREE].value
    gain = Interval(free / each, free / each, free / each, 0) if each else None
    per_prompt = sum(map(len, prompts)) / len(prompts)
    return PromptRow(name, None, per_prompt, room.gigabytes, room.documents, gain=gain, **found)


@dataclass(frozen=True)
class PromptStudy:
    """What is asked of every exponent.

    Attributes:
        documents: How many there are.
        per_prompt: Documents of a request, each a study of its own.
        requests: Of a stream.
        streams: How many, with seeds 0, 1, ...
        shape: Of the model whose keys and values are kept.
        tokens: Of a document.
        gigabytes: Budgets.
    """

    documents: int = 1000
    per_prompt: tuple[int, ...] = (5, 20)
    requests: int = 1000
    streams: int = 10
    shape: str = "Llama-3.1-8B"
    tokens: int = 512
    gigabytes: tuple[float, ...] = (1, 4, 16)

    def rooms(self) -> list[Room]:
        """A room per budget."""
        return [Room(self.shape, self.tokens, budget) for budget in self.gigabytes]

    def rows(self, alphas: Sequence[float]) -> list[PromptRow]:
        """Every exponent, number of documents and budget, over the same streams."""
        rows = []
        for alpha in alphas:
            for count in self.per_prompt:
                drawn = partial(draw_prompts, self.documents, alpha, count, self.requests)
                streams = [drawn(seed) for seed in range(self.streams)]
                rows += [drawn_row(alpha, count, room, streams) for room in self.rooms()]
        return rows

    def traced(self, file: Path) -> list[PromptRow]:
        """A trace under every budget.

        Raises:
            ValueError: If it cannot be read.
        """
        prompts = read_trace(file)
        return [trace_row(file.name, prompts, room) for room in self.rooms()]

    def facts(self) -> dict[str, Any]:
        """What is the same in every row."""
        return {key: value for key, value in asdict(self).items() if not isinstance(value, tuple)}
