"""Which tests `make test` leaves to `make test-all`: what takes long, and all but ten families."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

SLOW: Final = Path(__file__).with_name("slow.txt")
"""Files and functions, written by `tools/slow_tests.py`."""

# Plain, biases, windows, part of the columns, neighbours and no positions, ALiBi, MLA, sinks, and
# recurrent layers among attention and beside it.
FAMILIES: Final = frozenset(
    (
        *("llama", "qwen2", "gemma3", "phi", "cohere2", "bloom", "deepseek_v3", "gpt_oss"),
        *("qwen3_5", "falcon_h1"),
    )
)


def is_of_others(parameters: str) -> bool:
    """Whether parameters, as pytest joins them, name a model of the zoo but no quick one."""
    zoo = sys.modules.get("zoo")
    if zoo is None:  # whatever these are, nobody has imported its names
        return False
    known = {*zoo.FAMILIES, *zoo.HYBRIDS, *zoo.REFUSED}
    named = known.intersection(parameters.split("-"))
    return bool(named) and not named & FAMILIES


def slow_names() -> frozenset[str]:
    """What is slow: `path` of a file, or `path::function`."""
    return frozenset(SLOW.read_text(encoding="utf-8").split()) if SLOW.exists() else frozenset()
