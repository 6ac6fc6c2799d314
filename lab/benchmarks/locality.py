"""How few documents serve most questions, beside what chance alone would give.

    python -m benchmarks.locality --corpus squad_corpus.jsonl --queries squad_queries.jsonl

Figure 1 of Shared RAG-DCache (arXiv 2504.11765): documents are ordered by how often they are
retrieved, and the curve says which share of the retrievals the first x % of them serve.  A cache of
x % of the documents can hit no more.

Retrieval is real: BM25 over words, the project's hashing embedding, and the gold labels (the
document that a question was written about).  Data are read where they lie; only counts are kept.

Questions that are thrown at documents blindly are not spread evenly either: with five questions per
document some get none and some get ten.  So the same number of questions is drawn uniformly over
the documents, many times (each draws as many different documents as it retrieves), and the curve of
these draws with their 95 % range is the null.  Skew is what is left of it.

Writes a table, a plot, and `lab/benchmarks/results/locality.json`.  With `--trace` it only writes
which documents BM25 retrieves, a question a row, for `benchmarks.hit_ratio --trace`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.locality_retrieval import RETRIEVERS, Data, read
from kvcache_rag_lab.evaluation.cost.popularity import curve_of, null_counts, served_shares
from kvcache_rag_lab.scoring.statistics import Interval, percentiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from benchmarks.locality_retrieval import Found

ROOT: Final = Path(__file__).parents[2]
SERVED: Final = (50, 80, 90)  # % of the retrievals
HOTTEST: Final = (1, 5, 10, 20)  # % of the documents
DRAWS: Final = 1000


@dataclass(frozen=True)
class Row:
    """One way to retrieve, at one number of documents per question.

    Attributes:
        retriever: "BM25", "hashing embedding" or "gold label".
        top: Documents per question.
        right: Share of questions whose own document is among them.
        retrievals: Documents retrieved for all questions together.
        shares: By % of retrievals, the smallest share of the documents that serves so many.
        null_shares: The same where questions fall on documents uniformly at random.
        hottest: By % of documents, the share of the retrievals that these serve at most.
        null_hottest: The same of the null.
        curve: Share of the retrievals that the first 0, 1, ... 100 % of the documents serve.
        null_curve: Medians of the null.
    """

    retriever: str
    top: int
    right: float
    retrievals: int
    shares: dict[str, float]
    null_shares: dict[str, Interval]
    hottest: dict[str, float]
    null_hottest: dict[str, Interval]
    curve: list[float]
    null_curve: list[float]


def counts_of(found: Found, documents: int) -> NDArray[np.int64]:
    """How often each document is retrieved."""
    return np.bincount(np.concatenate(found), minlength=documents)


def shares_of(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Smallest shares of the documents that serve `SERVED` % of the retrievals.

    Args:
        counts: `(documents,)`, or `(draws, documents)`.

    Returns:
        `(len(SERVED),)`, or `(draws, len(SERVED))`.
    """
    served = served_shares(counts)
    needed = np.stack([(served < percent / 100).sum(-1) for percent in SERVED], axis=-1)
    shares: NDArray[np.float64] = needed / counts.shape[-1]
    return shares


def row_of(data: Data, retriever: str, top: int, draws: int) -> Row:
    """Retrieve, count, and draw the null."""
    found = RETRIEVERS[retriever](data, top)
    counts = counts_of(found, len(data.documents))
    sizes = np.array([len(one) for one in found], dtype=np.int64)
    null = null_counts(len(data.documents), sizes, draws)
    curve, null_curve = curve_of(counts), curve_of(null)
    right = [own in one for own, one in zip(data.gold.tolist(), found, strict=True)]
    shares = dict(zip(map(str, SERVED), shares_of(counts).tolist(), strict=True))
    null_shares = dict(zip(map(str, SERVED), _ranges(shares_of(null)), strict=True))
    return Row(
        retriever,
        top,
        float(np.mean(right)),
        int(counts.sum()),
        shares,
        null_shares,
        {str(percent): float(curve[percent]) for percent in HOTTEST},
        {str(percent): _ranges(null_curve[:, [percent]])[0] for percent in HOTTEST},
        [round(value, 5) for value in curve.tolist()],
        [round(value, 5) for value in np.median(null_curve, axis=0).tolist()],
    )


def _ranges(drawn: NDArray[np.float64]) -> list[Interval]:
    """Median and 95 % range of every column."""
    columns = (drawn[:, column] for column in range(drawn.shape[1]))
    return [Interval(float(np.median(one)), *percentiles(one), len(one)) for one in columns]


def write_trace(data: Data, top: int, file: Path) -> None:
    """Write the numbers of the documents that BM25 retrieves, best first, a question a row."""
    with file.open("w", encoding="utf-8", newline="") as rows:
        csv.writer(rows).writerows(found.tolist() for found in RETRIEVERS["BM25"](data, top))


def show(rows: Sequence[Row]) -> None:
    """Print the table: share of the documents for half of the retrievals, and the null's."""
    print(f"{'retrieval':<20}{'top':>4}{'right':>7}" + "".join(f"{f'{p} %':>30}" for p in SERVED))
    for row in rows:
        line = f"{row.retriever:<20}{row.top:>4}{100 * row.right:>6.1f}%"
        for percent in map(str, SERVED):
            null = row.null_shares[percent]
            cell = f"{100 * row.shares[percent]:.1f} | {100 * null.value:.1f} "
            line += f"{cell + f'[{100 * null.low:.1f}, {100 * null.high:.1f}]':>30}"
        print(line, flush=True)


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpus", type=Path, help="documents, JSON lines with id and text")
    parser.add_argument("--queries", type=Path, help="questions, JSON lines with question and gold")
    parser.add_argument("--tops", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--draws", type=int, default=DRAWS, help="of the uniform null")
    parser.add_argument("--trace", type=Path, help="CSV of the documents that BM25 retrieves")
    parser.add_argument("--json", type=Path, default=ROOT / "lab/benchmarks/results/locality.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/locality.svg")
    parsed = parser.parse_args(given)
    if min([*parsed.tops, parsed.draws]) < 1:
        parser.error("--tops and --draws must be at least 1")
    return parsed


def main(given: Sequence[str] | None = None) -> int:
    """Retrieve, count, print a table, write JSON and a plot."""
    parsed = parse(given)
    if parsed.corpus is None or parsed.queries is None:
        print(
            "locality measures real questions over real documents, which are not part of the "
            "project; name them by --corpus and --queries",
            file=sys.stderr,
        )
        return 2
    try:
        data = read(parsed.corpus, parsed.queries)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if max(parsed.tops) > len(data.documents):
        print(f"--tops must not exceed the {len(data.documents)} documents", file=sys.stderr)
        return 2
    if parsed.trace is not None:
        write_trace(data, max(parsed.tops), parsed.trace)
        return 0
    started = time.perf_counter()
    print(
        f"{len(data.documents)} documents, {len(data.questions)} questions; share of the documents "
        f"that serve 50, 80, 90 % of the retrievals | null of {parsed.draws} uniform draws, in %"
    )
    cases = [("gold label", 1), *((name, top) for top in parsed.tops for name in RETRIEVERS)]
    rows = [
        row_of(data, name, top, parsed.draws)
        for name, top in dict.fromkeys(cases)
        if name != "gold label" or top == 1
    ]
    show(rows)
    print(f"{time.perf_counter() - started:.0f} s")
    report: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "corpus": parsed.corpus.name,
        "documents": len(data.documents),
        "queries": parsed.queries.name,
        "questions": len(data.questions),
        "draws": parsed.draws,
        "rows": [asdict(row) for row in rows],
    }
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    parsed.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    from benchmarks.locality_plot import plot

    plot(report, parsed.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
