"""When cached chunks do not pay, measured on SmolLM2.

Which contexts are too short, and how often a chunk has to be asked until prefilling and writing it
were worth it:

    python -m benchmarks.when_not --json lab/benchmarks/results/when_not.json

Both sides and the prefilling take turns in every round of one run, on one thread.  Chunks are files
in the page cache, every check on; each is deleted, prefilled and written again in every round.  The
first round is not counted.  A run that was stopped goes on behind the last finished context
(`--fresh`: from the beginning); `--quick` is a short one, to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.common import ROOT, commit, described, read, write
from kvcache_rag import DiskStore, Engine, FullRecompute, Reuse

if TYPE_CHECKING:
    from collections.abc import Sequence

ARTICLES: Final = ROOT.joinpath(
    "integrations", "llama-index-kvcache-rag", "llama_index", "kvcache_rag", "articles"
)
OUT: Final = ROOT / "build" / "when_not.json"
# Chunks, and tokens of each: what a retriever would give for contexts of such a length.
CONTEXTS: Final = (
    (1, 32),
    (1, 64),
    (1, 128),
    (2, 128),
    (4, 128),
    (4, 256),
    (8, 256),
    (16, 256),
)
QUICK: Final = ((1, 32), (2, 32), (2, 64))
ROUNDS: Final = 7
QUICK_ROUNDS: Final = 2
QUESTION: Final = "What is said about the year in which this happened?"
SIDES: Final = {"full": FullRecompute(), "cached": Reuse()}


def articles() -> list[str]:
    """Texts of the demonstration, without their names."""
    return [path.read_text(encoding="utf-8") for path in sorted(ARTICLES.glob("*.md"))]


def text_of(tokenizer: Any, texts: Sequence[str]) -> dict[str, int]:
    """How many bytes and tokens these texts have."""
    return {
        "texts": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "tokens": sum(len(ids) for ids in tokenize(tokenizer, texts)),
    }


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts, without special tokens."""
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return found


def chunks_of(tokenizer: Any, texts: Sequence[str], count: int, tokens: int) -> list[str]:
    """Chunks of about so many tokens each, in whole words, no two alike.

    Raises:
        ValueError: If the texts are too short.
    """
    words = " ".join(texts).split()
    lengths = [len(ids) for ids in tokenize(tokenizer, [f" {word}" for word in words])]
    found: list[str] = []
    start = held = 0
    for end, length in enumerate(lengths):
        held += length
        if held >= tokens:
            found.append(" ".join(words[start : end + 1]))
            start, held = end + 1, 0
        if len(found) == count:
            return found
    raise ValueError(f"the texts do not make {count} chunks of {tokens} tokens")


def measure(engine: Engine, texts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Seconds of every side in every round.

    Raises:
        RuntimeError: If a side did not do what it is timed for.
    """
    seconds: dict[str, list[float]] = {"add": [], **{side: [] for side in SIDES}}
    keys: Sequence[Any] = ()
    context = 0
    for number in range(rounds + 1):
        for key in keys:
            engine.store.delete(key)
        gc.collect()
        started = time.perf_counter()
        keys = engine.add(list(texts))
        found = {"add": time.perf_counter() - started}
        for side in sorted(SIDES, reverse=number % 2 == 0):
            gc.collect()
            cost = engine.generate(
                QUESTION, list(texts), policy=SIDES[side], max_new_tokens=1
            ).metrics
            if side == "cached" and (cost.prefilled_tokens or not cost.reused_tokens):
                raise RuntimeError("chunks were prefilled that should have been read")
            if side == "full" and cost.reused_tokens:
                raise RuntimeError("chunks were read that should have been prefilled")
            found[side] = cost.ttft
            context = cost.prompt_tokens - cost.query_tokens
        if number:
            for name, elapsed in found.items():
                seconds[name].append(elapsed)
    return {"context_tokens": context, **seconds}


def facts_of(engine: Engine, model: str, rounds: int) -> dict[str, Any]:
    """What a figure depends on; a run goes on only where all of it is the same."""
    identity = engine.identity
    return {
        "model": model,
        "revision": identity.revision,
        "dtype": identity.dtype,
        "rounds": rounds,
        "commit": commit(),
        **{
            name: value
            for name, value in described("cpu", torch.get_num_threads()).items()
            if name != "date"
        },
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write the file after each context."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2", help="default: smollm2")
    parser.add_argument("--json", metavar="FILE", type=Path, default=OUT, help=f"default: {OUT}")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}; quick: {QUICK_ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="short contexts, few rounds")
    parser.add_argument("--fresh", action="store_true", help="forget what the file has")
    arguments = parser.parse_args(words)
    contexts = QUICK if arguments.quick else CONTEXTS
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder)
        engine = Engine.from_pretrained(arguments.model, adapter="none", store=store)
        texts = articles()
        report: dict[str, Any] = {
            "about": {"benchmark": "when_not", **facts_of(engine, arguments.model, rounds)},
            "text": text_of(engine.tokenizer, texts),
            "cases": [],
        }
        before = {} if arguments.fresh else read(arguments.json)
        if before.get("about") == report["about"]:
            report["cases"] = before["cases"]
        elif before:
            print(f"{arguments.json} is of another model, machine or commit: measured anew")
        known = {(case["chunks"], case["chunk_tokens"]) for case in report["cases"]}
        for count, tokens in contexts:
            if (count, tokens) in known:
                continue
            load = os.getloadavg()
            found = measure(engine, chunks_of(engine.tokenizer, texts, count, tokens), rounds)
            report["cases"].append(
                {
                    "chunks": count,
                    "chunk_tokens": tokens,
                    "date": described("cpu", 1)["date"],
                    "load": list(load),
                    **found,
                }
            )
            write(arguments.json, report)
            print(f"{count} x {tokens} tokens: measured", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
