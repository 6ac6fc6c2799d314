"""How many tokens CacheClip's windows leave of those it chooses, and what that is worth.

    python -m benchmarks.clip_windows --data ../shared/data --work clip.work

SmolLM2 answers, and its first layers with its final norm and head are the auxiliary models, down
from SmolLM2 itself.  Every auxiliary scores the documents of the first rows of each set, five
documents a row; what each rule would compute again is counted from these scores, and some rules
answer.  Scores and answers are kept in `--work`, and a run goes on from them.  docs/experiments.md
has what was found.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag import (
    Auxiliary,
    CacheBlend,
    CacheClip,
    DiskStore,
    Engine,
    FullRecompute,
    MemoryStore,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.evaluation.runner import evaluate
from kvcache_rag.evaluation.tasks import task_by_name
from kvcache_rag.models.linears import pack_weights
from kvcache_rag.models.pretrained import load
from kvcache_rag.policies.selection import candidates, grouped, top
from kvcache_rag.prompt.offsets import chunk_scores
from kvcache_rag.scoring.ask import Cell
from kvcache_rag.stitching.stitch import StitchedPrompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvcache_rag.policies.base import Signals
    from kvcache_rag.scoring.question import Question, Task

MODEL: Final = "smollm2"
SETS: Final = ("squad", "hotpotqa")
DEPTHS: Final = (30, 24, 15, 6)
K: Final = 5  # documents a row
RATIOS: Final = (0.1, 0.2, 0.3, 0.4)
WINDOW: Final = 8
THRESHOLDS: Final = (3, 4, 5, 6)


@dataclass(frozen=True)
class Scored:
    """What one auxiliary says of one row.

    Attributes:
        prompt: Spans of the answering model's prompt.
        tokens: `(context_tokens,)` float32, the prefix lowest.
        characters: Per document `(characters,)` float32.
    """

    prompt: StitchedPrompt
    tokens: Tensor
    characters: list[Tensor]


class Kept:
    """A scorer that knows its answers."""

    def __init__(self, questions: Sequence[Question], scored: Sequence[Scored]) -> None:
        self._known = {
            (question.question, question.chunks): one.characters
            for question, one in zip(questions, scored, strict=True)
        }

    def scores(self, question: str, chunks: Sequence[str]) -> list[Tensor]:
        """As they were worked out before."""
        return self._known[question, tuple(chunks)]


class Sliding(CacheClip):
    """Any `window` tokens in a row of which more than `threshold` were chosen, wherever they begin.

    The second version of the paper speaks of sliding windows; this is one reading of it.
    """

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """All tokens of all such windows."""
        allowed = candidates(prompt)
        return slid(
            top(signals.relevance(), round(self.ratio * int(allowed.sum())), allowed), prompt
        )


def slid(chosen: Tensor, prompt: StitchedPrompt, threshold: int = 5) -> Tensor:
    """`(context_tokens,)` bool: windows that begin at every token."""
    result = torch.zeros_like(chosen)
    for chunk in prompt.chunks[1:]:
        for start in range(chunk.start, max(chunk.stop - WINDOW, chunk.start) + 1):
            stop = min(start + WINDOW, chunk.stop)
            if int(chosen[start:stop].sum()) * WINDOW > threshold * (stop - start):
                result[start:stop] = True
    return result


def auxiliary(depth: int, instruction: str, store: DiskStore) -> Auxiliary:
    """The first layers of SmolLM2 as a model; all of them are SmolLM2 and share its chunks."""
    model, tokenizer, brought = load(
        MODEL,
        dtype="auto",
        device="cpu",
        options={},
        tokenizer=None,
        adapter=None,
        weight_format="plain",
    )
    is_whole = depth == model.config.num_hidden_layers
    model = copy.deepcopy(model)
    model.model.layers = model.model.layers[:depth]
    model.config.num_hidden_layers = depth
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:depth]
    pack_weights(model, "auto")
    template = replace(brought or PromptTemplate(), system=instruction)
    own = store if is_whole else MemoryStore(1 << 28)
    return Auxiliary(Engine(model, tokenizer, template=template, store=own))


def scored(task: Task, questions: Sequence[Question], depth: int, store: DiskStore) -> list[Scored]:
    """What an auxiliary says of every row."""
    helper = auxiliary(depth, task.instruction, store)
    engine, rows = helper.engine, []
    for question in questions:
        characters = [*helper.scores(question.question, question.chunks)]
        ids = engine.tokenize(question.question, question.chunks)
        prompt = StitchedPrompt.of(
            len(ids.prefix), [len(chunk) for chunk in ids.chunks], len(ids.query)
        )
        tokens = torch.full((prompt.context_tokens,), -1.0)
        parts = zip(prompt.chunks, question.chunks, ids.chunks, characters, strict=True)
        for span, text, own, values in parts:
            tokens[span.start : span.stop] = chunk_scores(
                engine.tokenizer, engine.template, text, list(own), values
            )
        rows.append(Scored(prompt, tokens, characters))
    return rows


def shares(rows: Sequence[Scored]) -> Iterator[tuple[str, float]]:
    """Part of the tokens that may be chosen which each rule computes again, mean of the rows."""
    for ratio in RATIOS:
        found: dict[str, list[float]] = {}
        for row in rows:
            allowed = candidates(row.prompt)
            count = int(allowed.sum())
            chosen = top(row.tokens, round(ratio * count), allowed)
            rules = {
                f"more than {limit} of {WINDOW}": grouped(chosen, row.prompt, WINDOW, limit)
                for limit in THRESHOLDS
            }
            rules["sliding, more than 5"] = slid(chosen, row.prompt)
            for rule, selected in rules.items():
                found.setdefault(rule, []).append(int(selected.sum()) / count)
        for rule, parts in found.items():
            yield f"{ratio:.0%} chosen, {rule}", statistics.fmean(parts)


def cells(scorers: dict[int, Kept]) -> list[Cell]:
    """Who answers; CacheBlend at the shares that CacheClip computes again (its ratio is of all)."""
    whole, *_, least = scorers.values()
    policies = {
        "full": FullRecompute(),
        "reordered": Reuse(),
        "windows": CacheClip(whole, 0.2),
        "windows, filled": CacheClip(whole, 0.2, ratio_of="recomputed"),
        "windows, sliding": Sliding(whole, 0.2),
        "best means": CacheClip(whole, 0.2, threshold=None),
        "fewest layers, filled": CacheClip(least, 0.2, ratio_of="recomputed"),
        "cacheblend, as filled": CacheBlend(0.2 * (K - 1) / K),
        "cacheblend, as windows": CacheBlend(0.075),
    }
    return [Cell(label, policy, MODEL, k=K) for label, policy in policies.items()]


def answers(
    name: str, task: Task, scorers: dict[int, Kept], options: Any, store: DiskStore
) -> None:
    """Ask, and print scores, share computed again, and divergence of the first token."""
    first = options.work / f"first-{name}"
    first.mkdir(parents=True, exist_ok=True)
    found = evaluate(
        [task],
        cells(scorers),
        n=options.rows,
        file=options.work / f"{name}.jsonl",
        batch=4,
        timed=0,
        divergence=True,
        store=store,
        first_tokens=first,
        show_progress=True,
    )
    for label in found.policies:
        rows = [row for row in found.rows if row.place.policy == label]
        again = sum(row.recomputed_tokens for row in rows) / sum(row.chunk_tokens for row in rows)
        divergences = [row.divergence for row in rows if row.divergence is not None]
        mean = statistics.fmean(divergences) if divergences else 0.0
        scores = {
            metric: 100 * statistics.fmean(row.scores[metric] for row in rows)
            for metric in ("containment", "f1")
        }
        written = ", ".join(f"{metric} {value:.1f}" for metric, value in scores.items())
        print(f"{name}, {label}: {written}, {again:.1%} again, KL {mean:.3f}, {len(rows)} rows")


def main() -> None:
    """Score, count and ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is kept")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    store = DiskStore(options.work / "chunks", max_bytes=4 << 30, durable=False)
    for name in options.sets:
        task = task_by_name(name, data=options.data).in_order()
        questions = task.questions(options.rows, 0, K)
        scorers = {}
        for depth in options.depths:
            file = options.work / f"{name}-{options.rows}-{depth}.pt"
            if not file.is_file():
                torch.save(scored(task, questions, depth, store), file)
            rows = torch.load(file, weights_only=False)  # written by this very command
            for rule, share in shares(rows):
                print(f"{name}, {depth} layers, {rule}: {share:.1%}", flush=True)
            scorers[depth] = Kept(questions, rows)
        answers(name, task, scorers, options, store)


if __name__ == "__main__":
    main()
