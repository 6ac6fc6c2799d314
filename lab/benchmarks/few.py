"""Which documents `BestFew` takes, and how many: what docs/quality.md says of its choice.

    python -m benchmarks.few --data ../shared/data --work answers.work

Without a model.  How often a document that is needed stands first, by a retriever and by
`policies.relevance`; and what limits of the distance from the best one do, by the answers of
`bestfew:1`, `bestfew:2` and `bestfew:3` that `benchmarks.answers` collected.  The first half of the
rows alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.answers import RETRIEVERS, SETS, Retriever, in_first_half
from benchmarks.answers_scores import FULL, KINDS, Results
from benchmarks.common import result_file
from kvcache_rag.policies.bestfew import MOST
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag_lab.evaluation.tasks import task_by_name
from kvcache_rag_lab.scoring.ask import Asked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag_lab.scoring.question import Question

LIMITS: Final = (1.0, 1.5, 2.0, 2.5, 3.0)


def retrieved(row: Question) -> Retrieved:
    """What a policy chooses by."""
    return Retrieved(row.question, row.chunks, row.scores or None)


def distances(row: Question) -> list[float]:
    """How far the best three are behind the best one, in standard deviations."""
    found = retrieved(row)
    best = [found.relevance[place] for place in found.ranked()[:MOST]]
    return [best[0] - one for one in best]


def first_needed(rows: Sequence[Question]) -> tuple[float, float]:
    """Shares whose first document is needed: as it was retrieved, and by relevance."""
    told = [row for row in rows if row.relevant]
    return (
        statistics.fmean(0 in row.relevant for row in told),
        statistics.fmean(retrieved(row).ranked()[0] in row.relevant for row in told),
    )


def auroc(low: Sequence[float], high: Sequence[float]) -> float:
    """How often one of `low` is below one of `high`; ties count half."""
    return statistics.fmean((a < b) + (a == b) / 2 for a in low for b in high)


def limits(rows: Mapping[str, Sequence[Question]], results: Results) -> None:
    """Print right answers and those from a wrong document, by the limit."""
    labels = [FULL, *(f"bestfew:{count}" for count in range(1, MOST + 1))]
    taken: dict[float, list[tuple[float, float]]] = {limit: [] for limit in LIMITS}
    full = []
    for name, questions in rows.items():
        kept = results.sets[name]
        right = {label: kept.column(label, "right") for label in labels}
        wrong = {label: kept.column(label, "wrong_document") for label in labels}
        places = {digest: place for place, digest in enumerate(kept.rows)}
        for row in questions:
            place = places[Asked.of(row).digest]
            full.append((right[FULL][place], wrong[FULL][place]))
            for limit, found in taken.items():
                label = f"bestfew:{sum(one <= limit for one in distances(row))}"
                found.append((right[label][place], wrong[label][place]))
    sides = {"full prefill": full} | {f"limit {limit}": found for limit, found in taken.items()}
    for side, found in sides.items():
        good, bad = (100 * statistics.fmean(one) for one in zip(*found, strict=True))
        print(f"{side}: {good:.1f} % right, {bad:.1f} % from a wrong document")


def main() -> None:
    """Print it all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="similarities are kept there")
    parser.add_argument("--name", default="qwen05", help="of the model whose answers are read")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Question]] = {}
    for kind in RETRIEVERS[::-1]:  # the embedding last, whose rows are kept
        retriever = Retriever(options.work, kind)
        for name in SETS:
            questions = task_by_name(name, data=options.data).in_order().questions()
            rows[name] = retriever.ranked([one for one in questions if in_first_half(one.id)])
            shares = " and ".join(f"{100 * share:.0f} %" for share in first_needed(rows[name]))
            print(f"{kind}, {name}: a needed document is first in {shares} by relevance")
    behind = {name: [distances(row)[1] for row in found] for name, found in rows.items()}
    one, two = ([value for name in sets for value in behind[name]] for sets in KINDS.values())
    print(f"the second's distance tells one document from two: AUROC {auroc(two, one):.2f}")
    results = Results.read(result_file("answers"), options.name)
    if results is not None:
        limits(rows, results)


if __name__ == "__main__":
    main()
