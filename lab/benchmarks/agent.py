"""A five-step agent: tokens that each step reuses, and its time beside a full prefill.

    python -m benchmarks.agent --rounds 7

The agent searches four times and answers in its fifth step.  Which documents a search finds is a
script's, so that every run asks the same; what the model makes of them is thrown away.  A search
finds some of what an earlier one found, as searches of one agent do.  Before every step the whole
conversation so far is asked again, with the documents of all searches: by a full prefill, from
chunks that earlier steps left in the cache (`cold`: nothing is there before the first), and from
chunks that ingestion prefilled (`warm`).  The sides take turns, and each step is timed to its first
token.  Writes a table and `lab/benchmarks/results/agent.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.machine import commit, described, load
from benchmarks.when_not import articles, chunks_of
from kvcache_rag import Engine, FullRecompute, MemoryStore, Reuse
from kvcache_rag.integration import ConversationForms, ToolChoice, reference_to

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag import Metrics

RESULTS: Final = Path(__file__).parent / "results" / "agent.json"
SEARCHES: Final = ((0, 1, 2), (3, 1, 4), (5, 0, 6), (7, 3, 8))
"""Numbers of the documents that each search finds."""

SIDES: Final = ("full", "cold", "warm")
QUESTION: Final = "Compare what is said about these people and places, and name the oldest."
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches articles.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}


@dataclass(frozen=True)
class Step:
    """One step of the agent.

    Attributes:
        step: From 1.
        prompt_tokens: Of the whole prompt.
        document_tokens: Of the documents in it.
        reused_tokens: By side, those that came from the cache.
        ttft_ms: By side, the median in milliseconds.
        lowest_ms: By side.
        highest_ms: By side.
    """

    step: int
    prompt_tokens: int
    document_tokens: int
    reused_tokens: Mapping[str, int]
    ttft_ms: Mapping[str, float]
    lowest_ms: Mapping[str, float]
    highest_ms: Mapping[str, float]


def conversation(texts: Sequence[str], searches: int) -> tuple[list[str], list[dict[str, Any]]]:
    """What is asked after so many searches: documents, and turns that refer to them.

    Args:
        texts: All documents.
        searches: Made so far.
    """
    found: list[str] = []
    turns: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for number, indices in enumerate(SEARCHES[:searches]):
        name = f"call0000{number}"
        call = {"name": "search", "arguments": {"query": f"article {number}"}}
        called = {"type": "function", "id": name, "function": call}
        turns.append({"role": "assistant", "content": "", "tool_calls": [called]})
        lines = []
        for index in indices:
            if texts[index] not in found:
                found.append(texts[index])
            lines.append(reference_to(texts[index], found.index(texts[index]) + 1))
        turns.append(
            {"role": "tool", "name": "search", "tool_call_id": name, "content": "\n".join(lines)}
        )
    return found, turns


def run(engine: Engine, texts: Sequence[str], side: str) -> list[Metrics]:
    """What each of the five steps costs on one side."""
    choice = ToolChoice.of([TOOL], None, None)
    costs = []
    for searches in range(len(SEARCHES) + 1):
        found, turns = conversation(texts, searches)
        form = ConversationForms.of(engine).form(turns, choice)
        question, history = form.asked
        costs.append(
            engine.generate(
                question,
                found,
                history=history,
                policy=FullRecompute() if side == "full" else Reuse(),
                max_new_tokens=1,
                **form.options,
                **form.chat,
            ).metrics
        )
    return costs


def measure(engine: Engine, texts: Sequence[str], rounds: int) -> list[Step]:
    """All steps on all sides, in turn; the first round warms up and does not count.

    Raises:
        RuntimeError: If a side did not do what it is timed for.
    """
    counted: dict[str, list[list[Metrics]]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        order = SIDES if number % 2 else SIDES[::-1]
        for side in order:
            for key in engine.keys(texts):
                engine.store.delete(key)
            if side == "warm":
                engine.add(texts)
            gc.collect()
            costs = run(engine, texts, side)
            check(side, costs)
            if number:
                counted[side].append(costs)
    return [step_of(index, counted) for index in range(len(SEARCHES) + 1)]


def check(side: str, costs: Sequence[Metrics]) -> None:
    """Raise `RuntimeError` if something was read or computed that this side must not."""
    reused = [one.reused_tokens for one in costs]
    if side == "full" and any(reused):
        raise RuntimeError("a full prefill read chunks")
    if side == "warm" and any(one.prefilled_tokens for one in costs):
        raise RuntimeError("chunks were prefilled that should have been read")
    if side == "cold" and not all(reused[2:]):
        raise RuntimeError("a later step read nothing that an earlier one had left")


def step_of(index: int, counted: Mapping[str, Sequence[Sequence[Metrics]]]) -> Step:
    """One step over all rounds."""
    times = {
        side: [1e3 * costs[index].ttft for costs in rounds] for side, rounds in counted.items()
    }
    last = {side: rounds[-1][index] for side, rounds in counted.items()}
    full = last["full"]
    return Step(
        step=index + 1,
        prompt_tokens=full.prompt_tokens,
        document_tokens=full.prompt_tokens - full.prefix_tokens - full.query_tokens,
        reused_tokens={side: one.reused_tokens for side, one in last.items()},
        ttft_ms={side: statistics.median(some) for side, some in times.items()},
        lowest_ms={side: min(some) for side, some in times.items()},
        highest_ms={side: max(some) for side, some in times.items()},
    )


def show(steps: Sequence[Step]) -> None:
    """Print the steps as a table."""
    print(f"{'step':>4}{'prompt':>8}{'of documents':>14}{'reused cold':>13}{'warm':>7}", end="")
    print("".join(f"{f'{side} ms':>11}" for side in SIDES))
    for one in steps:
        reused = one.reused_tokens
        print(f"{one.step:>4}{one.prompt_tokens:>8}{one.document_tokens:>14}", end="")
        print(f"{reused['cold']:>13}{reused['warm']:>7}", end="")
        print("".join(f"{one.ttft_ms[side]:>11.1f}" for side in SIDES))


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=256, help="of each document")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    engine = Engine.from_pretrained(
        arguments.model, store=MemoryStore(), device="cpu", cost_aware=False, adapter="none"
    )
    documents = 1 + max(index for found in SEARCHES for index in found)
    texts = chunks_of(engine.tokenizer, articles(), documents, arguments.tokens)
    before = load()
    steps = measure(engine, texts, arguments.rounds)
    show(steps)
    report = {
        **described("cpu", arguments.threads),
        "commit": commit(),
        "load": [before, load()],
        "model": arguments.model,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "steps": [asdict(step) for step in steps],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
