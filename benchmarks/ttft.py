"""Time to first token: stock transformers against cached chunks, in one run.

    python benchmarks/ttft.py --shape qwen2.5-0.5b --contexts 1024 2048 4096

Random weights in a real model's shape: they cost what trained ones cost, and nothing here speaks of
answers.  The sides take turns in every round, each through `generate()` to its first token; medians
are printed with their range.

- full       stock transformers (sdpa): a prefill of instruction, chunks and question
- disk       cached chunks from files in the page cache, all checks on
- memory     cached chunks from this process's memory
- floor      only the question's forward pass over a cache that already lies in place
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from kvcache_rag import DiskStore, Engine, FullRecompute, MemoryStore, PromptTemplate, Reuse
from kvcache_rag.models.attention import PACKED

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 512
PREFIX = 32
QUERY = 20
WORDS = 4096
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}


@dataclass(frozen=True)
class Row:
    """Seconds to the first token of one side at one context length."""

    context: int
    side: str
    median: float
    lowest: float
    highest: float
    rounds: int
    times_sooner: float


def build_model(shape: str, dtype: torch.dtype) -> Any:
    """A model of the shape with random weights."""
    config = Qwen2Config(
        **SHAPES[shape],
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word `w0`, `w1`, ..., so that a text of n words is a chunk of n tokens."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def words(count: int, seed: int) -> str:
    """A text of `count` words."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, WORDS, (count,), generator=generator).tolist()
    return " ".join(f"w{pick}" for pick in picks)


def engines(model: Any, folder: Path) -> dict[str, Engine]:
    """The same model behind a store on disk and one in memory."""
    template = PromptTemplate(system=words(PREFIX, 1) + " ", chunk_start="", chunk_end="")
    tokenizer = build_tokenizer()
    stores = {"disk": DiskStore(folder, durable=False), "memory": MemoryStore(8 << 30)}
    return {
        name: Engine(model, tokenizer, store=store, template=template)
        for name, store in stores.items()
    }


def sides(model: Any, by_store: dict[str, Engine], context: int) -> dict[str, Callable[[], float]]:
    """What is timed at one context length; each call gives seconds to the first token."""
    texts = [words(CHUNK, 100 + index) for index in range(context // CHUNK)]
    # The plain template adds two words of its own: "Question:" and "Answer:".
    question = words(QUERY - 2, 7)
    keys = {name: engine.add(texts) for name, engine in by_store.items()}
    ids = torch.tensor([by_store["disk"].tokenize(question, texts).all])
    mask = torch.ones_like(ids)

    def full() -> float:
        model.set_attn_implementation("sdpa")
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
        elapsed = time.perf_counter() - started
        model.set_attn_implementation(PACKED)
        return elapsed

    def cached(name: str) -> Callable[[], float]:
        def run() -> float:
            answer = by_store[name].generate(question, keys[name], max_new_tokens=1, policy=Reuse())
            if answer.metrics.reused_tokens != len(texts) * CHUNK:
                raise RuntimeError(f"only {answer.metrics.reused_tokens} tokens were reused")
            return answer.metrics.ttft

        return run

    def floor() -> float:
        # The prefill part of an answer whose context already lies in memory.
        metrics = by_store["memory"].generate(question, keys["memory"], max_new_tokens=1).metrics
        return metrics.prefill

    return {"full": full, "disk": cached("disk"), "memory": cached("memory"), "floor": floor}


def measure(
    timed: dict[str, Callable[[], float]], context: int, rounds: int, full_rounds: int
) -> list[Row]:
    """Let the sides take turns; the first round of each is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, run in timed.items():
            if name == "full" and number > full_rounds:
                continue
            gc.collect()
            elapsed = run()
            if number:
                seconds[name].append(elapsed)
    slowest = statistics.median(seconds["full"])
    return [
        Row(
            context,
            name,
            statistics.median(found),
            min(found),
            max(found),
            len(found),
            slowest / statistics.median(found),
        )
        for name, found in seconds.items()
    ]


def check_equal(by_store: dict[str, Engine]) -> None:
    """Both sides are the same computation for one chunk: equal logits up to rounding."""
    engine = by_store["disk"]
    text = [words(CHUNK, 100)]
    reused = engine.logits("w1 w2", text, policy=Reuse())
    plain = engine.logits("w1 w2", text, policy=FullRecompute())
    error = float((reused - plain).pow(2).mean().sqrt() / plain.std())
    print(f"one chunk, cached against full: rms error of logits {error:.1e} standard deviations")


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--full-rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = build_model(arguments.shape, getattr(torch, arguments.dtype))
    machine = f"{platform.machine()}, {arguments.threads} thread(s)"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{arguments.shape}, {arguments.dtype}, random weights; {machine}; {versions}")
    print(f"instruction {PREFIX}, chunks of {CHUNK}, question {QUERY} tokens; seconds, medians")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        by_store = engines(model, Path(folder))
        check_equal(by_store)
        print(f"{'context':>8} {'side':<8}{'median':>9}{'range':>18}{'rounds':>8}{'sooner':>9}")
        for context in arguments.contexts:
            timed = sides(model, by_store, context)
            for row in measure(timed, context, arguments.rounds, arguments.full_rounds):
                rows.append(row)
                span = f"{row.lowest:.3f}-{row.highest:.3f}"
                print(
                    f"{context:>8} {row.side:<8}{row.median:>9.3f}{span:>18}{row.rounds:>8}"
                    f"{row.times_sooner:>8.1f}x",
                    flush=True,
                )
    if arguments.json:
        report = {
            "shape": arguments.shape,
            "dtype": arguments.dtype,
            "machine": machine,
            "versions": versions,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
