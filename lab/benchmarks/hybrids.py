"""Models with recurrent layers: the first token, what a chunk weighs, what composing states costs.

    python -m benchmarks.hybrids

Three published shapes at their real width with fewer layers (one of each kind in their proportion)
and random weights with the decays that their authors begin training at.  Sides take turns: stock
transformers, and stored chunks from files in the page cache and from memory.  transformers runs its
own torch code for recurrent layers on a CPU, for both sides.  Bytes are those of all layers of the
published models; times are those of the layers that ran.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.common import described, in_turns, read, result_file, seconds_of, write
from benchmarks.shapes import build_tokenizer, words
from benchmarks.stock import timed_generate
from kvcache_rag import DiskStore, Engine, LegoLink, MemoryStore, PromptTemplate
from kvcache_rag.kv.buffer import KVBuffer
from kvcache_rag.models.cache import growing_cache, remembered, rewind
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.policies import policy_by_name
from kvcache_rag.stitching.states import compose
from kvcache_rag_lab.evaluation.cost.memory import peak_of_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.models.rotation import ModelLayout
    from kvcache_rag.policies import ReusePolicy

PREFIX: Final = 32
QUERY: Final = 20
TOKENS: Final = 512  # of the chunks that are weighed
_COMMON: Final = {"vocab_size": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Shape:
    """A published model.

    Attributes:
        kind: Its recurrence.
        model_type: Of transformers.
        config: Its widths, with the layers that are run.
        recurrent: How many of its layers are recurrent.
        attention: How many attend.
    """

    kind: str
    model_type: str
    config: dict[str, Any]
    recurrent: int
    attention: int


_THREE_OF_FOUR: Final = ["linear_attention"] * 3 + ["full_attention"]
_QWEN: Final = {"head_dim": 256, "linear_num_key_heads": 16, "layer_types": _THREE_OF_FOUR}
# Layers that are run keep the model's proportion as far as four layers can.
SHAPES: Final = {
    "Qwen3.5-0.8B": Shape(
        "gated delta",
        "qwen3_5_text",
        {
            **_QWEN,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
        },
        18,
        6,
    ),
    "Granite-4.0-H-Micro": Shape(
        "Mamba2",
        "granitemoehybrid",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "shared_intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": _THREE_OF_FOUR,
        },
        36,
        4,
    ),
    "LFM2-1.2B": Shape(
        "short convolution",
        "lfm2",
        {
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 3,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "layer_types": ["conv", "conv", "full_attention"],
        },
        10,
        6,
    ),
    "Qwen3.5-4B": Shape(
        "gated delta",
        "qwen3_5_text",
        {
            **_QWEN,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "linear_num_value_heads": 32,
        },
        24,
        8,
    ),
    "Falcon-H1-1.5B": Shape(
        "Mamba2 beside attention",
        "falcon_h1",
        {
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 256,
        },
        24,
        24,
    ),
}
TIMED: Final = ("Qwen3.5-0.8B", "Granite-4.0-H-Micro", "LFM2-1.2B")


def build(shape: Shape, dtype: torch.dtype) -> Any:
    """The layers that are run, with random weights."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[shape.model_type](
        **{**_COMMON, "max_position_embeddings": 8192, **shape.config}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(1, 16).log_()
            elif name.endswith("dt_bias"):
                step = torch.empty_like(parameter).uniform_(-6.9, -2.3).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def weighed(shape: Shape, layout: ModelLayout) -> dict[str, Any]:
    """What a chunk weighs in all layers of the published model."""
    chunk = layout.chunk_layout
    of_tokens = sum(len(group.layers) for group in chunk.groups)
    of_states = sum(len(state.layers) for state in chunk.states)
    bare = chunk.nbytes(0)  # states, windows and transitions
    a_token = (chunk.nbytes(1) - bare) * shape.attention / of_tokens
    fixed = bare * shape.recurrent / of_states
    parts = {"window": 0, "state": 0, "transition": 0}
    for state in chunk.states:
        for name, (dtype, sizes) in state.parts.items():
            parts[name] += torch.Size(sizes).numel() * dtype.itemsize
    scale = shape.recurrent / of_states / 2**20
    return {
        "kind": shape.kind,
        "layers": f"{shape.recurrent} recurrent, {shape.attention} attend",
        "kib_a_token": round(a_token / 1024, 1),
        **{f"{name}s_mib": round(size * scale, 3) for name, size in parts.items()},
        f"chunk_of_{TOKENS}_mib": round((a_token * TOKENS + fixed) / 2**20, 1),
        "break_even_tokens": round(fixed / a_token),
    }


def composing(model: Any, ids: Sequence[int]) -> dict[str, float]:
    """Seconds to prefill a chunk, and to put its states behind another's."""
    adapter = TransformersModel(model)
    (prefix,) = adapter.prefill(None, [ids[:PREFIX]])
    prefilling = _median(lambda: adapter.prefill(prefix, [ids]), 3)
    chunk = adapter.prefill(prefix, [ids])[0]
    buffer = KVBuffer.allocate(adapter.measured.chunk_layout, 1, 1, "cpu")
    states = adapter.measured.states
    one = _median(lambda: compose(states, [prefix, chunk], buffer.states), 9)
    five = _median(lambda: compose(states, [prefix, *[chunk] * 5], buffer.states), 9)
    return {"prefill_ms": 1000 * prefilling, "compose_ms": 1000 * (five - one) / 4}


def guessing(model: Any, ids: Sequence[int]) -> dict[str, float]:
    """Seconds of a pass of one token and of five, and of going back from them."""
    adapter = TransformersModel(model)
    cache = growing_cache(adapter.measured.kinds)
    adapter.forward(torch.tensor([ids]), cache, torch.arange(len(ids)))
    held = len(ids)

    def run(count: int) -> None:
        places = torch.arange(held, held + count)
        adapter.forward(torch.tensor([ids[:count]]), cache, places, keep=count)

    found: dict[str, list[float]] = {"one_ms": [], "five_ms": [], "back_ms": []}
    for _ in range(12):
        before = remembered(cache)
        found["one_ms"].append(seconds_of(partial(run, 1)))
        rewind(cache, before, 1)
        found["five_ms"].append(seconds_of(partial(run, 5)))
        begun = time.perf_counter()
        rewind(cache, before, 5)
        remembered(cache)
        found["back_ms"].append(time.perf_counter() - begun)
    return {name: round(1000 * statistics.median(own), 2) for name, own in found.items()}


def _median(call: Any, times: int) -> float:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        with torch.inference_mode():
            call()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def first_tokens(
    model: Any,
    folder: Path,
    context: int,
    size: int,
    rounds: int,
    policies: Sequence[ReusePolicy],
) -> list[dict[str, Any]]:
    """Seconds to the first token of all sides."""
    template = PromptTemplate(system=words(PREFIX, 1) + " ", chunk_start="", chunk_end="")
    texts = [words(size, 100 + index) for index in range(context // size)]
    question = words(QUERY - 2, 7)
    tokenizer = build_tokenizer()
    engines: dict[str, tuple[Engine, ReusePolicy]] = {}
    kept, memory = DiskStore(folder, durable=False), MemoryStore(16 << 30)
    # Chunks are in one piece but for who computes their heads again.
    for asked in policies:
        cut = LegoLink(asked.head)
        made = {
            where: Engine(
                model, tokenizer, template=template, store=store, policy=cut, prompt_memory=0
            )
            for where, store in (("disk", kept), ("memory", memory))
        }
        layout = made["disk"]._adapter.measured.chunk_layout
        for key in made["disk"].add(texts):
            memory.put(key, kept.get(key, layout).chunk)
        engines |= {f"{asked!r} from {where}": (one, asked) for where, one in made.items()}
    ids = next(iter(engines.values()))[0].tokenize(question, texts)
    prompt = torch.tensor([ids.all])

    def ours(engine: Engine, policy: ReusePolicy) -> float:
        answer = engine.generate(question, texts, policy=policy, max_new_tokens=1)
        return answer.metrics.ttft

    sides: dict[str, Any] = {"stock": lambda: timed_generate(model, prompt, 1).ttft}
    for name, (engine, policy) in engines.items():
        sides[name] = lambda engine=engine, policy=policy: ours(engine, policy)
    peaks = {name: round(peak_of_call(side) / 2**20, 1) for name, side in sides.items()}
    found = in_turns(sides, rounds, few=("stock",), few_rounds=2)
    slow = statistics.median(found["stock"])
    return [
        {
            "context": context,
            "chunks_of": size,
            "side": name,
            "seconds": statistics.median(values),
            "sooner": slow / statistics.median(values),
            "peak_mib": peaks[name],
        }
        for name, values in found.items()
    ]


def main() -> None:
    """Measure and write `results/hybrids.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="*", default=list(TIMED))
    parser.add_argument("--contexts", nargs="*", type=int, default=[1024, 4096])
    parser.add_argument("--sizes", nargs="*", type=int, default=[512, 128])
    parser.add_argument("--policies", nargs="*", default=["reuse", "bestlast", "legolink"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    dtype = getattr(torch, parsed.dtype)
    policies = [policy_by_name(name) for name in parsed.policies]
    bytes_rows, times, composed = [], [], []
    for name, shape in SHAPES.items():
        layout = TransformersModel(build(shape, torch.bfloat16)).measured
        bytes_rows.append({"model": name, **weighed(shape, layout)})
        print(bytes_rows[-1], flush=True)
    for name in parsed.shapes:
        model = build(SHAPES[name], dtype)
        ids = torch.randint(3, 8192, (TOKENS,)).tolist()
        composed.append({"model": name, **composing(model, ids), **guessing(model, ids)})
        print(composed[-1], flush=True)
        for context, size in product(parsed.contexts, parsed.sizes):
            with tempfile.TemporaryDirectory() as folder:
                rows = first_tokens(model, Path(folder), context, size, parsed.rounds, policies)
            for row in rows:
                times.append({"model": name, **row})
                print(times[-1], flush=True)
    about = {"benchmark": "hybrids", **described("cpu", parsed.threads), "dtype": parsed.dtype}
    before = read(result_file("hybrids")).get("first_token", [])
    measured = {(*row.values(),)[:4] for row in times}
    others = [row for row in before if (*row.values(),)[:4] not in measured]
    rows = [*others, *times]
    report = {"about": about, "bytes": bytes_rows, "composing": composed, "first_token": rows}
    write(result_file("hybrids"), report)


if __name__ == "__main__":
    main()
