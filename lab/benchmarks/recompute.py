"""Cost of computing some context tokens again, as a part of a full prefill, in one run.

    python -m benchmarks.recompute --shape qwen2.5-0.5b --context 4096

Random weights in a real model's shape: they cost what trained ones cost, and nothing here speaks of
answers.  The sides take turns in every round, each through `generate()` to its first token; medians
are printed with their range, and as a part of the full prefill's.

- full           stock transformers (sdpa): a prefill of instruction, chunks and question
- reuse          cached chunks from memory, nothing computed again
- heads R        the first tokens of every chunk but the first, R of all chunk tokens together
- spread R       as many tokens, evenly over the chunks but the first
- cacheblend R   the tokens of largest deviation: signal and recomputation
- signal         CacheBlend's signal alone (all tokens through layer 0), without the answer
- prophetkv R    the tokens that the question attends to most: its attention and recomputation

Behind them processor time, which other work on the machine does not change, of

- first token    the question's pass over the stitched chunks, which `Reuse()` answers by
- attention      ProphetKV's signal alone, a pass that counts attention, as a part of it
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from benchmarks.common import described, in_turns, result_file, write
from benchmarks.shapes import CHUNK, PREFIX, QUERY, SHAPES, build_model, build_tokenizer, words
from kvcache_rag import Engine, MemoryStore, PromptTemplate, ProphetKV, Reuse
from kvcache_rag.policies import ReusePolicy
from kvcache_rag.policies.cacheblend import CacheBlend
from kvcache_rag.policies.legolink import LegoLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvcache_rag.policies.base import Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt

RATIOS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
# What is asked for, as a part of the full prefill of the same run.
TARGETS = {"spread 0.20": 0.26, "heads 0.20": 0.26, "signal": 0.07, "attention": 1.3}
# Sides that are no part of a full prefill, and of what they are.
AGAINST = {"attention": "first token"}


@dataclass(frozen=True)
class Spread(ReusePolicy):
    """Every n-th token behind the first chunk."""

    name: ClassVar[str] = "spread"
    ratio: float

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """So many of all chunk tokens, at equal distances."""
        selected = torch.zeros(prompt.context_tokens, dtype=torch.bool)
        count = round(self.ratio * sum(map(len, prompt.chunks)))
        first, last = prompt.chunks[1].start, prompt.context_tokens - 1
        selected[torch.linspace(first, last, count).round().long()] = True
        return selected


@dataclass(frozen=True)
class Signal(ReusePolicy):
    """Looks at the deviation and computes nothing again."""

    name: ClassVar[str] = "signal"

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """No token."""
        signals.deviation(1)
        return torch.zeros(prompt.context_tokens, dtype=torch.bool)


@dataclass(frozen=True, eq=False)
class Attention(ReusePolicy):
    """Looks at the question's attention and computes nothing again.

    Attributes:
        seconds: Processor time of each look.
        ended: Processor time of the process when the last one ended; what follows is `Reuse()`.
    """

    name: ClassVar[str] = "attention"
    seconds: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        """No token."""
        started = time.process_time()
        signals.attention()
        self.ended[:] = [time.process_time()]
        self.seconds[:] = [self.ended[0] - started]
        return torch.zeros(prompt.context_tokens, dtype=torch.bool)


def sides(model: Any, engine: Engine, context: int) -> dict[str, Callable[[], float]]:
    """What is timed; each call gives seconds."""
    texts = [words(CHUNK, 100 + index) for index in range(context // CHUNK)]
    question = words(QUERY - 2, 7)  # the plain template adds two words of its own
    keys = engine.add(texts)
    ids = torch.tensor([engine.tokenize(question, texts).all])
    mask = torch.ones_like(ids)

    def full() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
        return time.perf_counter() - started

    def by(policy: ReusePolicy, expected: int, part: str = "ttft") -> Callable[[], float]:
        def run() -> float:
            metrics = engine.generate(question, keys, max_new_tokens=1, policy=policy).metrics
            if abs(metrics.recomputed_tokens - expected) > len(texts):
                raise RuntimeError(f"{policy}: {metrics.recomputed_tokens} tokens, not {expected}")
            seconds: float = getattr(metrics, part)
            return seconds

        return run

    def processor(part: str) -> Callable[[], float]:
        def run() -> float:
            policy = Attention()
            by(policy, 0)()
            looking, rest = policy.seconds[0], time.process_time() - policy.ended[0]
            return looking if part == "attention" else rest

        return run

    found = {"full": full, "reuse": by(Reuse(), 0), "signal": by(Signal(), 0, "choose")}
    for ratio in RATIOS:
        count = round(ratio * context)
        heads = LegoLink(round(count / (len(texts) - 1)))
        found[f"heads {ratio:.2f}"] = by(heads, count)
    for ratio in (0.15, 0.2):
        count = round(ratio * context)
        found[f"spread {ratio:.2f}"] = by(Spread(ratio), count)
        found[f"cacheblend {ratio:.2f}"] = by(CacheBlend(ratio), count)
        found[f"prophetkv {ratio:.2f}"] = by(ProphetKV(ratio), count)
    found |= {part: processor(part) for part in ("first token", "attention")}
    return found


def row_of(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of one side, and its median as a part of another's."""
    own = seconds[name]
    against = "" if name in ("full", *AGAINST.values()) else AGAINST.get(name, "full")
    others = seconds.get(against, ())
    return {
        "side": name,
        "median": statistics.median(own) * 1e3,
        "lowest": min(own) * 1e3,
        "highest": max(own) * 1e3,
        "samples": len(own),
        "against": against,
        "ratio": statistics.median(own) / statistics.median(others) if others else None,
        "target": TARGETS.get(name),
    }


def main(words_given: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full-rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=result_file("recompute"))
    arguments = parser.parse_args(words_given)
    torch.set_num_threads(arguments.threads)
    model = build_model(arguments.shape, getattr(torch, arguments.dtype))
    template = PromptTemplate(system=words(PREFIX, 1) + " ", chunk_start="", chunk_end="")
    store = MemoryStore(8 << 30)
    engine = Engine(model, build_tokenizer(), store=store, template=template)
    about = {"benchmark": "recompute", "shape": arguments.shape, "dtype": arguments.dtype}
    about |= {"context": arguments.context, **described("cpu", arguments.threads)}
    seconds = in_turns(
        sides(model, engine, arguments.context),
        arguments.rounds,
        few=("full",),
        few_rounds=arguments.full_rounds,
    )
    rows = [row_of(name, seconds) for name in seconds]
    for row in rows:
        print(row)
    write(arguments.json, {"about": about, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
