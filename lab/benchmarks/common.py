"""What all benchmarks share: sides in turns, statistics, where it was measured, and the one JSON.

A report is an object: `about` says with what and where something was measured, and by which
benchmark; everything else are tables (lists of alike objects) or named values.  An interval is
`{"value", "low", "high"}`.  `raw`, where there is one, is what the tables were computed from.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout, chunk_key, spec_digest
from kvcache_rag_lab.commands.machine import described, load

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = ["commit", "described", "load", "processor_of"]

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = Path(__file__).parent / "results"
PREFIX: Final = 32  # tokens in front of the chunks of `chunk_of`
SPEC: Final = spec_digest({"benchmark": "store"})
RAW: Final = "raw"


def in_turns(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    few: Collection[str] = (),
    few_rounds: int = 0,
) -> dict[str, list[Any]]:
    """What the sides give back, asked in turns, round by round; the first round is not counted.

    A machine that is slower for a while is so for all sides, so ratios are formed within a round.

    Args:
        sides: By name.
        rounds: How many count.
        few: Sides that take so long that they have fewer rounds.
        few_rounds: How many those have.
    """
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            if name in few and number > few_rounds:
                continue
            gc.collect()
            value = run()
            if number:
                found[name].append(value)
    return found


def seconds_of(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest, as an interval."""
    return {"value": statistics.median(values), "low": min(values), "high": max(values)}


def over(ours: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The ratio of each round, and its spread."""
    return spread([one / other for one, other in zip(ours, others, strict=True)])


def commit() -> str:
    """Of the checkout, with "+" where code of it was changed; "" outside of one."""
    folder = Path(__file__).parent
    with suppress(OSError, subprocess.CalledProcessError):
        git = partial(subprocess.run, cwd=folder, check=True, capture_output=True, text=True)
        head = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--", "../../src", ".", ":!results"]).stdout
        return head + ("+" if changed.strip() else "")
    return ""


def processor_of(machine: str) -> str:
    """What `described` calls a machine, without its size."""
    return re.sub(r", \d+ cores, \d+ thread\(s\)$", "", machine)


def result_file(benchmark: str) -> Path:
    """Where a benchmark's report lies."""
    return RESULTS / f"{benchmark}.json"


def read(file: Path) -> dict[str, Any]:
    """A report, {} where there is none yet."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def write(file: Path, report: Mapping[str, Any]) -> None:
    """Replace a report in one step; a row is a line, so that changes can be read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}")
    aside.write_text(_text(report, 0) + "\n", encoding="utf-8")
    aside.replace(file)


def _text(value: Any, depth: int) -> str:
    pad = " " * (depth + 1)
    if isinstance(value, dict) and depth < 5 and len(json.dumps(value)) > 100:
        inner = (f"{pad}{json.dumps(name)}: {_text(one, depth + 1)}" for name, one in value.items())
        return "{\n" + ",\n".join(inner) + f"\n{pad[1:]}}}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        rows = ",\n".join(f"{pad}{json.dumps(one)}" for one in value)
        return f"[\n{rows}\n{pad[1:]}]"
    return json.dumps(value)


def chunk_of(layout: ChunkLayout, tokens: int, seed: int) -> tuple[ChunkKey, ChunkKV]:
    """A chunk of random numbers and its key."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32000, (tokens,), generator=generator, dtype=torch.int32)
    tensors = layout.empty(tokens)
    for group in tensors:
        for tensor in group:
            tensor.normal_(generator=generator)
    # The seed as a prefix: ids of one token would collide among many.
    key = chunk_key(ids.tolist(), prefix_ids=[seed] * PREFIX, spec=SPEC, namespace="")
    return key, ChunkKV(layout, ids, PREFIX, tensors)
