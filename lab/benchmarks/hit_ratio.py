"""Hits of a store with one copy per chunk against one with a copy per position.

    python -m benchmarks.hit_ratio
    python -m benchmarks.hit_ratio --trace FILE --gigabytes 1 4 16

LazyAttention's model (arXiv 2606.04302): requests ask for chunks by Zipf's law (the i-th in
proportion to i^-alpha), each at one of D positions, all equally likely; a store has room for C
copies.  Where a copy serves any position, C chunks fit; where each position needs a copy of its
own, C / D do.

- formula     the C most popular copies are kept: sums of i^-alpha, as in the paper
- Che         the least recently used copy goes first: the approximation of Che et al. (2002)
- lru         the last C copies on random streams

Gains are hits with one copy per chunk by hits with one per position, with 95 % intervals over
streams, and beside each the same for uniform popularity (alpha 0): the null.

Prompts of several documents follow, with budgets in bytes of a model's keys and values, the least
recently used document dropped first; with `--trace` the requests of a CSV file are looked at
instead, one a row, its document ids in order.

- prefix          of equal prefixes only, as stock servers do: a copy is of a document behind those
                  before it, and is found if all of these are.  The copies of a request count as
                  used from its end to its beginning, so a copy never outlives what it stands behind
- prompt_cache    (arXiv 2311.04934) a module stands at the one place of its schema: a document is
                  bound to the place at which it was computed, for as long as it is held.  Asked for
                  at another, it is computed for that prompt alone, and nothing is kept
- per_position    one copy per document and place
- position_free   one copy per document

Place is the number of a document in its prompt: with documents of one length, its position.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.common import read, result_file, write
from benchmarks.render import table
from benchmarks.sizes import CONFIGS, kv_shape
from kvcache_rag_lab.evaluation.cost.popularity import lru_hits
from kvcache_rag_lab.scoring.statistics import Interval, mean_interval, paired_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from numpy.typing import NDArray


def popularity(chunks: int, alpha: float) -> NDArray[np.float64]:
    """Probability of each chunk, the most popular first."""
    weights = np.arange(1, chunks + 1, dtype=np.float64) ** -alpha
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def static_ratio(chunks: int, alpha: float, budget: int, copies: int = 1) -> float:
    """Hit ratio of the `budget` most popular copies, where every chunk has `copies` of them."""
    full, rest = divmod(budget, copies)
    weights = np.append(popularity(chunks, alpha), 0.0)
    return float(weights[:full].sum() + weights[min(full, chunks)] * rest / copies)


def che_ratio(chunks: int, alpha: float, budget: int, copies: int = 1) -> float:
    """Hit ratio of a least-recently-used cache (Che, Tung, Wang, IEEE JSAC 2002).

    An approximation: a copy asked for with probability p is held with 1 - exp(-p t), where t is
    such that as many as fit are held on average.
    """
    weights = popularity(chunks, alpha) / copies
    if budget >= chunks * copies:
        return 1.0
    low, high = 0.0, 1.0 / weights.min() * chunks * copies
    for _ in range(200):
        middle = (low + high) / 2
        held = copies * -np.expm1(-weights * middle).sum()
        low, high = (middle, high) if held < budget else (low, middle)
    return float(copies * (weights * -np.expm1(-weights * low)).sum())


def exponent_for(gain: float, positions: int, budget: int) -> float:
    """The exponent at which the formula gives `gain`; it falls as the exponent rises.

    The number of chunks cancels out of the formula as long as there are `budget` of them.
    """
    low, high = 0.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        ratio = static_ratio(budget, middle, budget) / static_ratio(
            budget, middle, budget, positions
        )
        low, high = (middle, high) if ratio > gain else (low, middle)
    return low


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
        shape: Of the model (`sizes.CONFIGS`).
        tokens: Of a document.
        gigabytes: 10^9 bytes, for all of them.
    """

    shape: str
    tokens: int
    gigabytes: float

    @property
    def documents(self) -> int:
        """How many fit, keys and values in bfloat16."""
        each = kv_shape(self.shape).layout.nbytes(self.tokens)
        return int(self.gigabytes * 1e9 // each)


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


def prompt_row(room: Room, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What every way finds, with 95 % intervals over streams; of one stream there are none."""
    values = {name: [one[name] for one in found] for name in WAYS}
    row: dict[str, Any] = {"gigabytes": room.gigabytes, "room": room.documents}
    row |= {name: asdict(_mean(each)) for name, each in values.items()}
    free, place = values[FREE], values[PER_POSITION]
    if len(found) > 1:
        row["gain"] = asdict(paired_ratio(free, place)) if any(place) else None
    else:
        row["gain"] = asdict(_mean([free[0] / place[0]])) if place[0] else None
    return row


def _mean(each: Sequence[float]) -> Interval:
    """The mean over streams; where all agree there is no telling how far others would be."""
    if min(each) == max(each):
        return Interval(each[0], each[0], each[0], len(each))
    return mean_interval(each)


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

    def rows(self, alphas: Sequence[float]) -> list[dict[str, Any]]:
        """Every exponent, number of documents and budget, over the same streams."""
        rows = []
        for alpha in alphas:
            for count in self.per_prompt:
                drawn = partial(draw_prompts, self.documents, alpha, count, self.requests)
                streams = [drawn(seed) for seed in range(self.streams)]
                for room in self.rooms():
                    found = [ratios(prompts, room.documents) for prompts in streams]
                    rows.append({"alpha": alpha, "per_prompt": count, **prompt_row(room, found)})
        return rows

    def traced(self, file: Path) -> list[dict[str, Any]]:
        """A trace under every budget.

        Raises:
            ValueError: If it cannot be read.
        """
        prompts = read_trace(file)
        mean = sum(map(len, prompts)) / len(prompts)
        return [
            {
                "trace": file.name,
                "per_prompt": mean,
                **prompt_row(room, [ratios(prompts, room.documents)]),
            }
            for room in self.rooms()
        ]

    def facts(self) -> dict[str, Any]:
        """What is the same in every row."""
        return {key: value for key, value in asdict(self).items() if not isinstance(value, tuple)}


PAPER_GAIN: Final = 2.86  # at D = 20, C = 100; the exponent follows from it (`exponent_for`)
BUDGET: Final = 100
PAPER_ALPHAS: Final = (1.1, 1.5, 2.1)  # of its experiments
CHUNKS: Final = 1000
POSITIONS: Final = (5, 20)
REQUESTS: Final = 5000
STREAMS: Final = 20


def rows_of(alpha: float, requests: int, streams: int) -> list[dict[str, Any]]:
    """All sides at all numbers of positions."""
    rows = []
    for count in POSITIONS:
        for side, ratio in (("formula", static_ratio), ("Che", che_ratio)):
            one, each = ratio(CHUNKS, alpha, BUDGET), ratio(CHUNKS, alpha, BUDGET, count)
            known = [asdict(Interval(value, value, value, 0)) for value in (one, each, one / each)]
            rows.append(_row(alpha, count, side, *known))
        shared, own = simulated(alpha, count, requests, streams)
        found = (mean_interval(shared), mean_interval(own), paired_ratio(shared, own))
        rows.append(_row(alpha, count, "lru", *map(asdict, found)))
    return rows


def simulated(
    alpha: float, positions: int, requests: int, streams: int
) -> tuple[list[float], list[float]]:
    """Hit ratios of the last C copies on random streams, one copy per chunk and one per position.

    The first fifth of a stream only fills the cache; its chunks do not depend on `positions`.
    """
    shared, own = [], []
    warm = requests // 5
    for seed in range(streams):
        asked, placed = (np.random.default_rng([seed, which]) for which in (0, 1))
        chunks = asked.choice(CHUNKS, requests, p=popularity(CHUNKS, alpha)).tolist()
        places = placed.integers(0, positions, requests).tolist()
        counted = requests - warm
        shared.append(lru_hits([(chunk, 0) for chunk in chunks], warm, BUDGET) / counted)
        copies = list(zip(chunks, places, strict=True))
        own.append(lru_hits(copies, warm, BUDGET) / counted)
    return shared, own


def _row(alpha: float, positions: int, side: str, *found: Any) -> dict[str, Any]:
    names = ("per_chunk", "per_position", "gain")
    place = {"alpha": alpha, "positions": positions, "side": side}
    return {**place, **dict(zip(names, found, strict=True))}


def with_null(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the gain that uniform popularity gives on the same side."""
    nulls = {
        (row["positions"], row["side"]): row["gain"]["value"] for row in rows if row["alpha"] == 0
    }
    return [{**row, "null": nulls.get((row["positions"], row["side"]))} for row in rows]


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each stream")
    parser.add_argument(
        "--trace", type=Path, help="CSV: a request a row, its document ids in order"
    )
    parser.add_argument("--shape", choices=CONFIGS, default=PromptStudy.shape)
    parser.add_argument("--tokens", type=int, default=PromptStudy.tokens, help="of a document")
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=PromptStudy.gigabytes, help="for documents"
    )
    parser.add_argument("--json", type=Path, default=result_file("hit_ratio"))
    parsed = parser.parse_args(given)
    if min(parsed.streams, parsed.requests, parsed.tokens) < 1 or min(parsed.gigabytes) <= 0:
        parser.error("--streams, --requests, --tokens and --gigabytes must be positive")
    return parsed


def main(given: Sequence[str] | None = None) -> int:
    """Compute, simulate, print, write."""
    arguments = parse(given)
    budgets = tuple(arguments.gigabytes)
    study = PromptStudy(shape=arguments.shape, tokens=arguments.tokens, gigabytes=budgets)
    if arguments.trace is not None:
        return traced(study, arguments)
    paper = exponent_for(PAPER_GAIN, 20, BUDGET)
    alphas = (0.0, 0.6, paper, 1.0, *PAPER_ALPHAS)
    given_rows = [rows_of(alpha, arguments.requests, arguments.streams) for alpha in alphas]
    rows = with_null([row for found in given_rows for row in found])
    study = replace(
        study,
        streams=min(study.streams, arguments.streams),
        requests=min(study.requests, arguments.requests),
    )
    prompts = study.rows(PAPER_ALPHAS)
    print(table(rows), table(prompts), sep="\n\n")
    about = {"benchmark": "hit_ratio", "chunks": CHUNKS, "budget": BUDGET}
    report = {
        "about": {**about, "requests": arguments.requests, "streams": arguments.streams},
        "paper": {"gain": PAPER_GAIN, "positions": 20, "budget": BUDGET, "alpha": paper},
        "rows": rows,
        "prompts_of_several_documents": prompts,
        "prompts": study.facts(),
        "traces": read(arguments.json).get("traces", []),
    }
    write(arguments.json, report)
    return 0


def traced(study: PromptStudy, arguments: argparse.Namespace) -> int:
    """Look at a trace; its rows take the place of those of a file of its name."""
    try:
        rows = study.traced(arguments.trace)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows))
    report = read(arguments.json) or {"about": {"benchmark": "hit_ratio"}}
    others = [row for row in report.get("traces", []) if row["trace"] != arguments.trace.name]
    about = {"shape": study.shape, "tokens": study.tokens}
    report["traces"] = [*others, *({**row, **about} for row in rows)]
    write(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
