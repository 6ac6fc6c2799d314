"""Whether fine-tuning for stitching held: asked once, of the adapter as it is published.

    python -m training.smollm2.confirm --data DATA --block FOLDER --control FOLDER \
        --work build/smollm2/confirm --scores lab/benchmarks/results/smollm2_scores.json \
        --out lab/benchmarks/results/smollm2_confirmation.json

The set: the 4,143 questions of `squad_queries` (SQuAD v1.1's development half), each with its
paragraph of `squad_corpus` and four distractors, two of the same article and two of others, none of
which holds an answer to a question of the paragraph; ordered by hash, all questions of a paragraph
over the same five.  No paragraph of it was trained on.  Full prefill's cache of a context is made
once (`Combination`): the same logits.

Ways: stitched and full prefill of the model as it came ("base"), with the adapter ("block"), and
with the control's ("control": as many steps under full attention), and each without documents.
F1 and containment (`substring_match` of normalised texts); intervals by a bootstrap over
paragraphs.  Bars, in points of F1:

- stitched after - stitched before: interval above 0,
- stitched after - the control's full prefill: lower bound above -3,
- the control's full prefill - the control without documents: interval above 0.

Answers are kept in `--work` as they come, so a stopped run goes on; scores of each way that is
whole in `--scores`, which holds no text: ids of questions and numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from benchmarks.common import commit, described, load
from kvcache_rag.engine import Engine
from kvcache_rag.models.adapters import WEIGHTS
from kvcache_rag.models.names import PACKAGED
from kvcache_rag.policies import Combination, LegoLink, Reuse
from kvcache_rag.prompt.words import normalised
from kvcache_rag_lab.evaluation.runner import evaluate, make_cells
from kvcache_rag_lab.scoring.ask import cluster_of
from kvcache_rag_lab.scoring.metrics import best, f1_longbench, substring_match
from kvcache_rag_lab.scoring.question import Question, Task
from kvcache_rag_lab.scoring.statistics import mean_interval, paired_bootstrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_rag_lab.scoring.ask import Cell

SAME, OTHER = 2, 2
MAX_NEW_TOKENS: Final = 32
CONFIRM, CLOSED = "confirmation", "closed book"
STITCHED, FULL, LEGOLINK = "reuse", "full prefill", "LegoLink 16"
METRICS: Final = ("f1", "contains")


def questions(data: Path) -> list[Question]:
    """The set, in the file's order.

    Raises:
        OSError: If the data are missing.
    """
    corpus = {row["id"]: row for row in _lines(data / "squad_corpus.jsonl")}
    asked = list(_lines(data / "squad_queries.jsonl"))
    answers: dict[str, list[str]] = {}
    for row in asked:
        answers.setdefault(row["gold"], []).extend(row["answers"])
    contexts = {gold: _context(gold, corpus, known) for gold, known in answers.items()}
    return [
        Question(
            id=row["id"],
            question=row["question"],
            chunks=tuple(corpus[place]["text"] for place in contexts[row["gold"]]),
            answers=tuple(row["answers"]),
            relevant=(contexts[row["gold"]].index(row["gold"]),),
        )
        for row in asked
    ]


def _context(
    gold: str, corpus: Mapping[str, Mapping[str, str]], answers: Sequence[str]
) -> tuple[str, ...]:
    """The paragraph and its distractors, ordered by hash."""
    # Whole words: "8" stands in every second paragraph as a part of another number.
    words = "|".join(re.escape(answer.lower()) for answer in sorted(set(answers)))
    answered = re.compile(rf"(?<!\w)(?:{words})(?!\w)")
    free = [
        place
        for place, row in corpus.items()
        if place != gold and not answered.search(row["text"].lower())
    ]
    rng = random.Random(f"confirmation/{gold}")  # a draw of data, not a secret
    title = corpus[gold]["title"]
    near = [place for place in free if corpus[place]["title"] == title]
    far = [place for place in free if corpus[place]["title"] != title]
    chosen = rng.sample(near, min(SAME, len(near)))
    chosen += rng.sample(far, SAME + OTHER - len(chosen))
    return tuple(sorted([gold, *chosen], key=lambda place: _hash(gold + place)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def task(name: str, rows: Sequence[Question]) -> Task:
    """Questions scored by SQuAD's F1, and by whether they contain an answer."""

    def measure(answer: str, question: Question) -> tuple[float, ...]:
        wanted = [normalised(reference) for reference in question.answers]
        contains = substring_match(normalised(answer), [wanted])
        return best(f1_longbench, answer, question.answers), contains

    def draw(n: int | None, _seed: int, _k: int | None) -> list[Question]:
        return list(rows[:n])

    return Task(name, METRICS, "", MAX_NEW_TOKENS, draw, measure)


def cells(parts: Sequence[str]) -> dict[str, tuple[Cell, ...]]:
    """Ways to answer with documents, and without, of each model in `parts`."""
    ways = {
        "base": {STITCHED: Reuse(), FULL: Combination()},
        "block": {STITCHED: Reuse(), FULL: Combination(), LEGOLINK: LegoLink(16)},
        "control": {FULL: Combination(), STITCHED: Reuse()},
    }
    return {part: make_cells(ways[part], (part,)) for part in parts}


@dataclass(frozen=True)
class Way:
    """One model answering in one way."""

    task: str
    model: str
    policy: str


BARS: Final = {
    "a": (Way(CONFIRM, "block", STITCHED), Way(CONFIRM, "base", STITCHED), 0.0),
    "b": (Way(CONFIRM, "block", STITCHED), Way(CONFIRM, "control", FULL), -0.03),
    "c": (Way(CONFIRM, "control", FULL), Way(CLOSED, "control", FULL), 0.0),
}

Scores: TypeAlias = "dict[str, list[float]]"
"""Of each question by its id, in the order of `METRICS`."""


def results(scores: Mapping[Way, Scores], paragraphs: Mapping[str, str]) -> dict[str, Any]:
    """Means of each way, and the differences that the bars are about.

    Args:
        scores: Of each way that was asked.
        paragraphs: Of each question the context that it shares with others.
    """
    means = [
        {**asdict(way), "n": len(found), **_means(found, paragraphs)}
        for way, found in scores.items()
    ]
    bars = {
        name: _bar(scores[first], scores[second], least, paragraphs)
        for name, (first, second, least) in BARS.items()
        if first in scores and second in scores
    }
    return {"scores": means, "bars": bars}


def _means(scores: Scores, paragraphs: Mapping[str, str]) -> dict[str, list[float]]:
    groups = [paragraphs[name] for name in scores]
    found = {}
    for index, metric in enumerate(METRICS):
        interval = mean_interval([each[index] for each in scores.values()], groups)
        found[metric] = [interval.value, interval.low, interval.high]
    return found


def _bar(
    first: Scores, second: Scores, least: float, paragraphs: Mapping[str, str]
) -> dict[str, Any]:
    both = [name for name in first if name in second]
    found: dict[str, Any] = {"n": len(both), "least": least}
    for index, metric in enumerate(METRICS):
        compared = paired_bootstrap(
            [first[name][index] for name in both],
            [second[name][index] for name in both],
            [paragraphs[name] for name in both],
        )
        found[metric] = [compared.difference, compared.low, compared.high]
    found["holds"] = found["f1"][1] > least
    return found


class Kept:
    """Scores of whole ways in one file, which has no texts and may be published.

    Attributes:
        scores: Of each way, with the digest of the adapter's weights that gave them.
        about: Of each way, when and with what it was measured.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        self.scores: dict[Way, tuple[str, Scores]] = {
            Way(*row["way"]): (row["adapter"], row["scores"]) for row in known
        }
        self.about: dict[Way, dict[str, Any]] = {Way(*row["way"]): row["about"] for row in known}

    def add(self, way: Way, adapter: str, scores: Scores, about: Mapping[str, Any]) -> None:
        """Keep a way, and write all of them."""
        self.scores[way], self.about[way] = (adapter, scores), dict(about)
        rows = [
            {
                "way": list(asdict(way).values()),
                "adapter": adapter,
                "about": self.about[way],
                "scores": scores,
            }
            for way, (adapter, scores) in self.scores.items()
        ]
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        self._path.write_text(f"[{lines}]\n", encoding="utf-8")


def _digest(adapter: Path | None) -> str:
    return "" if adapter is None else hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest()


def _opened(adapter: Path | None) -> Callable[[], Engine]:
    return lambda: Engine.from_pretrained(
        "smollm2", dtype=torch.bfloat16, adapter=adapter or "none"
    )


def main() -> int:
    """Ask, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--block", type=Path, help="the adapter's folder")
    parser.add_argument("--control", type=Path, help="the control's")
    parser.add_argument("--parts", nargs="+", default=["block", "base", "control"])
    parser.add_argument("--policies", nargs="*", help="of all ways these (all)")
    parser.add_argument("--work", type=Path, required=True, help="answers, as they come")
    parser.add_argument("--scores", type=Path, required=True, help="of each question, no texts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n", type=int, help="questions (all); fewer for a trial")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folders = {"base": None, "block": arguments.block, "control": arguments.control}
    rows = questions(arguments.data)[: arguments.n]
    paragraphs = {row.id: cluster_of(row) for row in rows}
    closed = [Question(row.id, row.question, (), row.answers) for row in rows]
    arguments.work.mkdir(parents=True, exist_ok=True)
    kept = Kept(arguments.scores)
    for part, ways in cells(arguments.parts).items():
        digest = _digest(folders[part])
        closed_book = (CLOSED, closed, make_cells({FULL: Reuse()}, (part,)))
        # One way at a time, so that a run that is stopped has some that are whole.
        for name, asked, how in (*((CONFIRM, rows, (way,)) for way in ways), closed_book):
            way = Way(name, part, how[0].label)
            wanted = not arguments.policies or way.policy in arguments.policies
            known = kept.scores.get(way, ("", {}))
            if not wanted or (known[0] == digest and known[1].keys() >= paragraphs.keys()):
                continue
            began = load()
            records = evaluate(
                [task(name, asked)],
                how,
                models={part: _opened(folders[part])},
                file=arguments.work / f"{part}-{name.replace(' ', '-')}.jsonl",
                timed=0,
                show_progress=sys.stderr.isatty(),
            )
            scores = {row.place.question: list(row.scores.values()) for row in records.rows}
            about = {**described("cpu", arguments.threads), "commit": commit()}
            kept.add(way, digest, scores, {**about, "load": [began, load()]})
    found = {
        "base": PACKAGED["smollm2"].sha256,
        "adapters": {way.model: digest for way, (digest, _) in kept.scores.items()},
        **results({way: scores for way, (_, scores) in kept.scores.items()}, paragraphs),
    }
    for row in found["scores"]:
        row["about"] = kept.about[Way(row["task"], row["model"], row["policy"])]
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(found["bars"], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
