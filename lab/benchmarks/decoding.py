"""How fast tokens come behind the first, by the form of the weights, and what rounding them costs.

    python -m benchmarks.decoding
    python -m benchmarks.decoding --parts steps perplexity --data FOLDER

"before" is the same engine over plain weights, with torch's attention and transformers' own
`generate()`; the others are what `weight_format=` says.  The sides take turns in every round, one
thread, without guesses from the prompt; ratios are medians of the rounds' own, with the lowest and
the highest.  SmolLM2 stands over 960 tokens of chunks, and the shape of Qwen2.5-0.5B, with random
weights, over 4,096.  Perplexity is of SmolLM2 on SQuAD's articles (`squad_corpus.jsonl` of the
folder of evaluation data).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch

from benchmarks.common import described, in_turns, load, over, read, result_file, write
from benchmarks.shapes import build_model, build_tokenizer, words
from kvcache_rag import Engine, MemoryStore, Reuse
from kvcache_rag.models import generate as generating
from kvcache_rag.models import pretrained
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.linears import pack_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_rag import Answer
    from kvcache_rag.models import WeightFormat

BEFORE: Final = "before"
FORMS: Final[dict[str, WeightFormat]] = {
    BEFORE: "plain",
    "auto": "auto",
    "int8": "int8",
    "int4": "int4",
}
TOKENS: Final = 32
WINDOW: Final = 768  # tokens of which perplexity is taken at a time


@contextmanager
def as_side(side: str) -> Iterator[None]:
    """Answer as `side` does."""
    if side != BEFORE:
        yield
        return
    without = patch.object(few_queries, "library", lambda: None)
    with without, patch.object(generating, "decodes", lambda *values: False):
        yield


def timed(engines: dict[str, Engine], texts: list[str], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds per token and to the first one, of every side over the same chunks."""

    def asking(side: str, engine: Engine) -> Callable[[], Answer]:
        guesses = None if side == BEFORE else 0

        def ask() -> Answer:
            with as_side(side):
                return engine.generate(
                    "What is said?",
                    texts,
                    max_new_tokens=TOKENS,
                    min_new_tokens=TOKENS,
                    prompt_lookup_num_tokens=guesses,
                )

        return ask

    answers = in_turns({side: asking(side, engine) for side, engine in engines.items()}, rounds)
    firsts, steps = {}, {}
    for side, given in answers.items():
        found = [answer.metrics for answer in given]
        firsts[side] = [one.ttft for one in found]
        steps[side] = [(one.total - one.ttft) / (one.generated_tokens - 1) for one in found]
    rows = []
    for side in engines:
        rows.append(
            {
                "side": side,
                "ms a token": statistics.median(steps[side]) * 1e3,
                "tokens/s": 1 / statistics.median(steps[side]),
                "times before's": over(steps[BEFORE], steps[side]),
                "ms to the first": statistics.median(firsts[side]) * 1e3,
                "of before's": over(firsts[side], firsts[BEFORE]),
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


def perplexities(data: Path, windows: int) -> list[dict[str, Any]]:
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
            for start in range(0, windows * WINDOW, WINDOW):
                window = [tokenizer.bos_token_id, *ids[start : start + WINDOW]]
                known = torch.tensor([window])  # (1, tokens + 1)
                chances = model(known).logits[0, :-1].float().log_softmax(-1)
                lost -= float(chances.gather(1, known[0, 1:, None]).sum())
                count += len(window) - 1
        rows.append({"weights": side, "perplexity": math.exp(lost / count), "tokens": count})
        print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and replace these parts of the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, default=result_file("decoding"))
    parser.add_argument("--data", type=Path, help="folder of squad_corpus.jsonl")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=32, help=f"of {WINDOW} tokens")
    parser.add_argument("--parts", nargs="+", choices=("steps", "perplexity"), default=["steps"])
    parsed = parser.parse_args(arguments)
    if "perplexity" in parsed.parts and parsed.data is None:
        parser.error("perplexity needs --data")
    torch.set_num_threads(1)
    report = read(parsed.json)
    about: dict[str, Any] = {"benchmark": "decoding", **described("cpu", 1)}
    about |= {"kernel": few_queries.library() is not None, "load": load()}
    report["about"] = about
    if "steps" in parsed.parts:
        report["SmolLM2, 960 tokens of chunks"] = smollm2_steps(parsed.rounds)
        report["Qwen2.5-0.5B's shape, 4,096 tokens of chunks"] = shape_steps(
            "qwen2.5-0.5b", 4096, parsed.rounds
        )
    if "perplexity" in parsed.parts:
        report["perplexity of SmolLM2"] = perplexities(parsed.data, parsed.windows)
    write(parsed.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
