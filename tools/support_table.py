"""Write the table of supported model families into docs/models.md, from what the laws find.

    python tools/support_table.py            # rewrite the table
    python tools/support_table.py --check    # exit 1 if it is not what would be written

Each row is a tiny model of that family with random parameters (`tests/zoo.py`): its rotation as
measured, and whether a stitched prompt equals the one forward pass under the block mask
(`tests/test_equivalence.py`, law 3).  Of models with recurrent layers the form of their transition,
and whether a stitched prompt equals tokens one by one (`tests/recurrent_reference.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag import Engine
    from kvcache_rag.models.rotation import ModelLayout

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.readme import put  # noqa: E402  # found by the line above

BEGIN = "<!-- support table: written by tools/support_table.py -->"
END = "<!-- end of support table -->"
PAGE = ROOT / "docs" / "models.md"


def rows() -> list[str]:
    """The table's lines, measured."""
    from kvcache_rag import Reuse
    from kvcache_rag.errors import UnsupportedModelError

    # By name, because tests are no package.
    laws, zoo = import_module("test_equivalence"), import_module("zoo")
    stitched = len(zoo.FAMILIES) + len(zoo.HYBRIDS)
    lines = [
        f"{stitched} configurations are stitched, {len(zoo.REFUSED)} refused:",
        "",
        "| family | what it tests | rotation measured, per group of layers | stitched |",
        "|---|---|---|---|",
    ]
    for name, (_, _, special) in zoo.FAMILIES.items():
        engine = laws.make_engine(name)
        layout = engine._adapter.layout
        if layout is None:
            raise SystemExit(f"{name} is listed as supported and is not")
        found = engine.logits(laws.QUESTION, laws.TEXTS, policy=Reuse())
        expected = laws.masked_logits(engine, laws.TEXTS, "reordered")
        verdict = "exact" if laws.error(found, expected) < laws.TOLERANCE else "DIFFERS"
        lines.append(f"| {name} | {special} | {measured(layout)} | {verdict} |")
    for name, (_, _, reason) in zoo.REFUSED.items():
        engine = laws.make_engine(name)
        try:
            engine.generate(laws.QUESTION, laws.TEXTS, policy=Reuse(), max_new_tokens=1)
        except UnsupportedModelError:
            lines.append(f"| {name} | {reason} | - | refused; {_instead(engine)} |")
        else:
            raise SystemExit(f"{name} is listed as refused and is not")
    return [*lines, "", *_recurrent_rows()]


def _instead(engine: Engine) -> str:
    """What a refused model does: it reuses the best chunk where it was prefilled, or nothing."""
    from kvcache_rag import BestFew, FullRecompute
    from kvcache_rag.errors import UnsupportedModelError

    laws = import_module("laws")
    try:
        found = engine.logits(laws.QUESTION, laws.TEXTS[:1], policy=BestFew())
    except UnsupportedModelError:
        return "full prefill works"
    expected = engine.logits(laws.QUESTION, laws.TEXTS[:1], policy=FullRecompute())
    exact = laws.error(found, expected) < laws.TOLERANCE
    return f"`BestFew()` reuses one chunk, {'exact' if exact else 'DIFFERS'}"


def _recurrent_rows() -> list[str]:
    """The table of models with recurrent layers, measured."""
    from kvcache_rag import Reuse

    laws, zoo = import_module("laws"), import_module("zoo")
    reference = import_module("recurrent_reference").reference_logits
    lines = [
        "| family with recurrent layers | recurrence | a state goes through a chunk by | "
        "rotation of its attention | stitched |",
        "|---|---|---|---|---|",
    ]
    for name, (_, _, recurrence) in zoo.HYBRIDS.items():
        engine = laws.make_engine(name)
        layout = engine._adapter.measured
        ids = engine.tokenize(laws.QUESTION, laws.TEXTS)
        expected = reference(engine.model, ids.prefix, ids.chunks, ids.query)
        found = engine.logits(laws.QUESTION, laws.TEXTS, policy=Reuse())
        error = laws.error(found, expected)
        verdict = "exact" if error < laws.TOLERANCE else "DIFFERS"
        forms = sorted({FORMS[state.form] for state in layout.states})
        rotation = measured(layout) if layout.groups else "no attention"
        lines.append(f"| {name} | {recurrence} | {', '.join(forms)} | {rotation} | {verdict} |")
    return lines


FORMS = {
    "none": "nothing: its last inputs count",
    "scale": "numbers",
    "left": "a matrix a head",
    "right": "a matrix a head, from the right",
}


def measured(layout: ModelLayout) -> str:
    """Such as `K half[0:16]` per group of layers; V only where it turns."""
    turns = []
    for group in layout.groups:
        slots = {"K": group.key_rotation, "V": group.value_rotation}
        moving = [f"{slot} {turn}" for slot, turn in slots.items() if turn.style != "none"]
        window = f", window {group.window}" if group.window else ""
        turns.append((" ".join(moving) or "none") + window)
    return "; ".join(turns)


def main() -> int:
    """Rewrite or check the table."""
    parser = argparse.ArgumentParser(description="the table of supported families")
    parser.add_argument("--check", action="store_true", help="only say whether it is right")
    arguments = parser.parse_args()
    text = "".join(f"{row}\n" for row in rows())
    command = "run tools/support_table.py"
    return put(BEGIN, END, text, command=command, check=arguments.check, page=PAGE)


if __name__ == "__main__":
    sys.exit(main())
