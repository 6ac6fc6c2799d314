"""Decoding: forms of weights, the attention kernel, and guesses from the prompt, against before.

    python -m benchmarks.decoding --json lab/benchmarks/results/decoding.json --data FOLDER

"before" is the same engine over plain weights, with torch's attention and transformers' own
`generate()`; the others are what `weight_format=` says.  The sides take turns in every round, one
thread; ratios are medians of the rounds' own, with the lowest and the highest.  The Qwen2.5-0.5B
shape has random weights.  The floor is `generate()` of the question alone over a cache that lies in
place, with torch's attention and with the kernel.  Perplexity and guesses (`guesses`) need the
folder of evaluation data (`squad_corpus.jsonl`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch

from benchmarks import guesses
from benchmarks.machine import described, load
from benchmarks.shapes import QUERY, build_model, build_tokenizer, words
from benchmarks.ttft_sides import FLOOR, PAGES, Bench, Case
from benchmarks.ttft_targets import FLOORS, GUESSES
from kvcache_rag import Engine, MemoryStore, Reuse
from kvcache_rag.models import generate as generating
from kvcache_rag.models import pretrained
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.linears import pack_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_rag import Answer, WeightFormat

BEFORE: Final = "before"
FORMS: Final[dict[str, WeightFormat]] = {
    BEFORE: "plain",
    "auto": "auto",
    "int8": "int8",
    "int4": "int4",
}
TOKENS: Final = 32


@contextmanager
def as_side(side: str) -> Iterator[None]:
    """Answer as `side` does."""
    if side != BEFORE:
        yield
        return
    without = patch.object(few_queries, "library", lambda: None)
    with without, patch.object(generating, "decodes", lambda *values: False):
        yield


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"value": statistics.median(values), "low": min(values), "high": max(values)}


def timed(engines: dict[str, Engine], texts: list[str], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds per token and to the first one, of every side over the same chunks."""
    seen: dict[str, list[Answer]] = {side: [] for side in engines}
    for turn in range(rounds + 1):
        for side, engine in engines.items():
            with as_side(side):
                answer = engine.generate(
                    "What is said?",
                    texts,
                    max_new_tokens=TOKENS,
                    min_new_tokens=TOKENS,
                    prompt_lookup_num_tokens=None if side == BEFORE else 0,
                )
            if turn:  # the first round is for the caches
                seen[side].append(answer)

    def times(side: str, first: bool) -> list[float]:
        found = [answer.metrics for answer in seen[side]]
        if first:
            return [one.ttft for one in found]
        return [(one.total - one.ttft) / (one.generated_tokens - 1) for one in found]

    rows = []
    for side in engines:
        steps, firsts = times(side, False), times(side, True)
        pairs = zip(times(BEFORE, False), steps, strict=True)
        firsts_before = zip(firsts, times(BEFORE, True), strict=True)
        rows.append(
            {
                "side": side,
                "ms a token": statistics.median(steps) * 1e3,
                "tokens/s": 1 / statistics.median(steps),
                "times before's": interval([old / new for old, new in pairs]),
                "ms to the first": statistics.median(firsts) * 1e3,
                "of before's": interval([new / old for new, old in firsts_before]),
            }
        )
        print(rows[-1], flush=True)
    return rows


def smollm2_steps(rounds: int) -> list[dict[str, Any]]:
    """SmolLM2 over two chunks, about 1,000 tokens of context."""
    source = Path(few_queries.__file__).read_text("utf-8") * 3
    engines = {
        side: Engine.from_pretrained(
            "smollm2", adapter="none", device="cpu", policy=Reuse(), weight_format=form
        )
        for side, form in FORMS.items()
    }
    tokenizer = engines[BEFORE].tokenizer
    ids = tokenizer(source)["input_ids"]
    texts = [tokenizer.decode(ids[start : start + 480]) for start in (0, 480)]
    for engine in engines.values():
        engine.add(texts)
    return timed(engines, texts, rounds)


def shape_steps(shape: str, context: int, rounds: int) -> list[dict[str, Any]]:
    """A shape with random weights over `context` tokens of chunks."""
    engines = {}
    texts = [words(512, seed) for seed in range(context // 512)]
    for side, form in FORMS.items():
        model = pack_weights(build_model(shape, torch.bfloat16, "cpu"), form)
        engine = Engine(model, build_tokenizer(), policy=Reuse(), store=MemoryStore(2**31))
        engine.add(texts)
        engines[side] = engine
    return timed(engines, texts, rounds)


def floors(model: Any, context: int, rounds: int) -> list[dict[str, Any]]:
    """The floor and the first token from the page cache, each as before and with the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        bench, case = Bench(model, Path(folder)), Case(context, QUERY)
        sides = {name: bench.side(name, case) for name in (FLOOR, PAGES)}
        seen: dict[tuple[str, str], list[float]] = {
            (name, way): [] for name in sides for way in (BEFORE, "auto")
        }
        for turn in range(rounds + 1):
            for (name, way), seconds in seen.items():
                with as_side(way):
                    sample = sides[name](1)
                if turn:  # the first round is for the caches
                    seconds.append(sample.ttft)
    rows = []
    for name in sides:
        old, new = seen[name, BEFORE], seen[name, "auto"]
        rows.append(
            {
                "first token": name,
                "ms before": statistics.median(old) * 1e3,
                "ms": statistics.median(new) * 1e3,
                "of before's": interval([one / two for one, two in zip(new, old, strict=True)]),
                "rounds": rounds,
            }
        )
        print(rows[-1], flush=True)
    return rows


def perplexities(data: Path, windows: int, tokens: int = 768) -> list[dict[str, Any]]:
    """Of SmolLM2 on SQuAD's articles, in windows, by the form of its weights."""
    documents = [json.loads(line)["text"] for line in (data / "squad_corpus.jsonl").open()]
    rows = []
    for side, form in {"float32": "plain", **FORMS}.items():
        model, tokenizer, _ = pretrained.load(
            "smollm2",
            dtype=torch.float32 if side == "float32" else "auto",
            device="cpu",
            options={},
            weight_format=form,
        )
        ids = tokenizer("\n\n".join(documents[:400]))["input_ids"]
        lost, count = 0.0, 0
        with torch.inference_mode():
            for start in range(0, windows * tokens, tokens):
                window = [tokenizer.bos_token_id, *ids[start : start + tokens]]
                known = torch.tensor([window])  # (1, tokens + 1)
                chances = model(known).logits[0, :-1].float().log_softmax(-1)
                lost -= float(chances.gather(1, known[0, 1:, None]).sum())
                count += len(window) - 1
        rows.append({"weights": side, "perplexity": math.exp(lost / count), "tokens": count})
        print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write a report; 1 if an answer with guesses differs by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where the report goes; parts of it are replaced")
    parser.add_argument("--data", type=Path, help="folder of squad_corpus.jsonl")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--answers", type=int, default=100, help="that quote their documents")
    parser.add_argument("--windows", type=int, default=32, help="of 768 tokens")
    parser.add_argument(
        "--parts", nargs="+", choices=("steps", "floor", "guesses", "perplexity"), default=["steps"]
    )
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    if parsed.json and parsed.json.is_file():
        report = json.loads(parsed.json.read_text("utf-8"))
    report |= {**described("cpu", 1), "kernel": few_queries.library() is not None}
    report[f"load before {' and '.join(parsed.parts)}"] = load()
    if "steps" in parsed.parts:
        report["SmolLM2, 960 tokens of chunks"] = smollm2_steps(parsed.rounds)
        report["Qwen2.5-0.5B's shape, 4,096 tokens of chunks"] = shape_steps(
            "qwen2.5-0.5b", 4096, parsed.rounds
        )
    if "floor" in parsed.parts:
        model = build_model("qwen2.5-0.5b", torch.bfloat16)
        report[FLOORS] = floors(model, 4096, parsed.rounds)
    if "guesses" in parsed.parts:
        report[GUESSES] = guesses.measured(parsed.data, parsed.answers)
    if "perplexity" in parsed.parts:
        report["perplexity of SmolLM2"] = perplexities(parsed.data, parsed.windows)
    if parsed.json:
        parsed.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = sum(row["wrong"] for row in report[GUESSES]) if "guesses" in parsed.parts else 0
    if wrong:
        print(f"{wrong} answers with guesses differ by more than rounding", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
