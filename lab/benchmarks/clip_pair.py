"""How much alike the two models of CacheClip's pair look at documents.

    python -m benchmarks.clip_pair --model MODEL.gguf --data ../shared/data --work clip.work

The similarity study of CacheClip (arXiv 2510.10129, section 3.2) with a pair of its kind:
SmolLM2-135M chooses for a Qwen2.5 of another tokenizer (the paper's has 14B, and its SmolLM2 was
fine-tuned; ours is as it comes).  Of every row, documents best first, the importance of each token
of the documents is the attention it gets, mean of heads and of the question's tokens:

| chooser | whose attention |
|---|---|
| last | the answering model's last layer, full prefill |
| all | all of its layers, full prefill |
| auxiliary | the auxiliary's last layer over its own stitched chunks, carried over by characters |
| last stitched | the answering model's last layer over its stitched chunks |
| first | its first layer, which sees the same in both |
| all stitched | all of its layers over its stitched chunks (what `ProphetKV` chooses by) |
| random | nobody's: uniform numbers |
| even | nobody's: every token alike; its top are the first tokens |

Each is compared with `last` and with `all`: Kullback-Leibler divergence from them, and the Jaccard
index of the fifths that are ranked highest; `behind` is the same index without the first document,
of which a policy never chooses.  The paper says that the auxiliary is nearer to the last layer than
the model's own first layer is, by both; the results say whether that holds here.

Rows are kept in `--work`, and a run goes on from them; results, without any text, are written to
`lab/benchmarks/results/clip_pair.json`.  What the choices are worth in answers is asked by
`python -m benchmarks.answers --auxiliary smollm2 --policies full cacheclip:0.2 random:0.2 ...`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from benchmarks.answers import Retriever, identity, retrieved, sitting
from benchmarks.answers_scores import RESULTS
from kvcache_rag import Auxiliary, Engine, ReusePolicy
from kvcache_rag.models.attention.last_layer import QueryAttention
from kvcache_rag.models.cache import buffer_cache
from kvcache_rag.policies.selection import candidates, nothing
from kvcache_rag.policies.signals import RowSignals
from kvcache_rag.recompute import recompute
from kvcache_rag_lab.evaluation.auxiliary import SHARE, attention_divergence, carried, top_jaccard
from kvcache_rag_lab.scoring.ask import Asked, Workplaces, cluster_of
from kvcache_rag_lab.scoring.statistics import mean_interval, paired_bootstrap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt, StitchedRow
    from kvcache_rag_lab.scoring.question import Question

SETS: Final = ("squad", "hotpotqa", "2wiki")
REFERENCES: Final = ("last", "all")
MEASURES: Final = ("kl", "jaccard", "behind")
EVERY: Final = "all sets"


@dataclass(frozen=True)
class Looking(ReusePolicy):
    """Looks at what the question attends to, stitched and when all is computed again.

    Attributes:
        seen: `(context_tokens,)` float32 by chooser, of the last prompt.
    """

    name: ClassVar[str] = "looking"
    seen: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """Nothing: looking is all it does."""
        if not isinstance(signals, RowSignals):
            raise TypeError("only a stitched row can be looked at")
        row = signals.row
        self.seen["all stitched"] = signals.attention()
        self.seen["first"], self.seen["last stitched"] = _ends(row)
        recompute(row, candidates(prompt), self)
        self.seen["all"] = RowSignals(row, signals.costs).attention()
        _, self.seen["last"] = _ends(row)
        return nothing(prompt)


def _ends(row: StitchedRow) -> tuple[Tensor, Tensor]:
    """Attention of the question in the first and in the last layer, `(context_tokens,)` each."""
    context = row.shape.context_tokens
    cache = buffer_cache(row.buffer, row.model.measured.kinds, context)
    view = QueryAttention(row.model, with_first=True)
    first, last = view.both(row.ids[context:], cache, context)  # (query, tokens) each
    return first.mean(0)[:context], last.mean(0)[:context]


@dataclass(frozen=True, eq=False)
class Choices:
    """What choosers say of the answering model's tokens that hold a letter of a document.

    Attributes:
        found: By chooser, weights and ranks, `(tokens read,)` each.
        is_behind: `(tokens read,)` bool, those of every document but the first.
    """

    found: dict[str, tuple[Tensor, Tensor]]
    is_behind: Tensor

    def compared(self) -> dict[str, dict[str, dict[str, float]]]:
        """By reference and chooser, every measure."""
        return {
            reference: {
                name: dict(zip(MEASURES, self._measures(reference, name), strict=True))
                for name in self.found
                if name != reference
            }
            for reference in REFERENCES
        }

    def _measures(self, reference: str, name: str) -> tuple[float, ...]:
        (expected, best), (weights, ranks) = self.found[reference], self.found[name]
        behind = self.is_behind
        return (
            round(attention_divergence(expected, weights), 5),
            round(top_jaccard(best, ranks), 5),
            round(top_jaccard(best[behind], ranks[behind]), 5),
        )


def choices(engine: Engine, auxiliary: Auxiliary, question: Question, seed: int) -> Choices:
    """Ask every chooser.

    Args:
        engine: Answers.
        auxiliary: Chooses.
        question: With its documents in the order of the prompt, at least two.
        seed: Of the random chooser.
    """
    looking = Looking()
    engine.logits(question.question, question.chunks, policy=looking)
    ids = engine.tokenize(question.question, question.chunks)
    theirs = carried(engine, auxiliary, question.question, question.chunks)
    is_behind = torch.arange(len(theirs.is_read)) >= len(ids.chunks[0])
    found = {"auxiliary": (theirs.weights, theirs.ranks)}
    for name, weights in looking.seen.items():
        read = weights[len(ids.prefix) :][theirs.is_read].double()
        found[name] = read, read
    blind = torch.Generator().manual_seed(seed)
    drawn = torch.rand(len(theirs.ranks), generator=blind, dtype=torch.double)
    even = torch.ones_like(drawn)
    found |= {"random": (drawn, drawn), "even": (even, even)}
    return Choices(found, is_behind[theirs.is_read])


def rows_of(
    name: str, options: argparse.Namespace, engine: Engine, auxiliary: Auxiliary, folder: Path
) -> Iterator[dict[str, Any]]:
    """The rows of a set, compared now unless the folder has them."""
    task = retrieved(name, options, Retriever(options.work))
    reader = Workplaces(engine, folder).get("", task.instruction).reader
    for question in task.questions():
        asked = Asked.of(question)
        file = folder / f"{name}-{asked.digest}.json"
        if not file.is_file():
            found = choices(reader, auxiliary, question, int(asked.digest[:12], 16))
            row = {
                "set": name,
                "cluster": cluster_of(replace(question, chunks=tuple(sorted(question.chunks)))),
                "tokens": len(found.is_behind),
                "found": found.compared(),
            }
            aside = file.with_suffix(".new")  # a run that is killed leaves no half of one
            aside.write_text(json.dumps(row), encoding="utf-8")
            aside.replace(file)
            print(f"{name}, {asked.digest}", flush=True)
        yield json.loads(file.read_text(encoding="utf-8"))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means with their 95 % intervals, and what they say of the paper's claim.

    Returns:
        Of each reference: per chooser `[mean, low, high]` of every measure, and per measure by how
        much the auxiliary is nearer than the first layer, row by row.
    """
    clusters = [(row["set"], row["cluster"]) for row in rows]

    def column(reference: str, name: str, measure: str) -> list[float]:
        return [row["found"][reference][name][measure] for row in rows]

    def claim(reference: str, measure: str) -> dict[str, Any]:
        first, other = (column(reference, name, measure) for name in ("first", "auxiliary"))
        # Nearer is a smaller divergence, and a larger overlap.
        pair = (first, other) if measure == "kl" else (other, first)
        apart = paired_bootstrap(*pair, clusters)
        holds = "holds" if apart.low > 0 else "does not hold" if apart.high < 0 else "open"
        return {"claim": holds, "by": _short(apart.difference, apart.low, apart.high)}

    found: dict[str, Any] = {"rows": len(rows)}
    found["tokens"] = round(statistics.fmean(row["tokens"] for row in rows))
    for reference in REFERENCES:
        found[reference] = {"nearer than first": {one: claim(reference, one) for one in MEASURES}}
        for name in rows[0]["found"][reference]:
            means = [mean_interval(column(reference, name, one), clusters) for one in MEASURES]
            values = [_short(mean.value, mean.low, mean.high) for mean in means]
            found[reference][name] = dict(zip(MEASURES, values, strict=True))
    return found


def _short(*values: float) -> list[float]:
    return [round(value, 4) for value in values]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what is missing, and write the results."""
    options = _options(arguments)
    engine = Engine.from_pretrained(options.model, adapter="none")
    auxiliary = Auxiliary.from_pretrained(options.auxiliary)
    models = {
        "main": identity(engine, options.model),
        "auxiliary": identity(auxiliary.engine, options.auxiliary),
    }
    began = sitting(options)
    # Rows of other models are none of these.
    folder = options.work / "-".join(["study", *(one["weights"][:8] for one in models.values())])
    folder.mkdir(exist_ok=True)
    by_set = {
        name: list(rows_of(name, options, engine, auxiliary, folder)) for name in options.sets
    }
    found = {name: summary(rows) for name, rows in by_set.items()}
    found[EVERY] = summary([row for rows in by_set.values() for row in rows])
    values = {"models": models, "sitting": began, "half": options.half, "share": SHARE}
    values["sets"] = found
    options.results.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    for name, one in found.items():
        for reference in REFERENCES:
            for chooser, said in one[reference].items():
                print(f"{name}, {one['rows']} rows, from {reference}, {chooser}: {said}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="that answers: a GGUF file, a folder")
    parser.add_argument("--auxiliary", default="smollm2", help="that chooses")
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl")
    parser.add_argument("--work", type=Path, required=True, help="rows, as they come")
    parser.add_argument("--results", type=Path, default=RESULTS / "clip_pair.json")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--half", choices=("first", "second", "all"), default="first")
    parser.add_argument("--rows", type=int, default=40, help="of each set, of that half")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args(arguments)
    # What `benchmarks.answers` draws rows by, and says of a sitting.
    options.shard, options.part, options.batch = (0, 1), "study", 1
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    return options


if __name__ == "__main__":
    sys.exit(main())
