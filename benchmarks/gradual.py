r"""CacheBlend's gradual filtering beside one choice, at the same mean share of tokens.

    kvcache-rag eval --task reader_pronoun reader_alias reader_multi_value --n 150 --divergence \
        --policies full reordered cacheblend:0.1 cacheblend:0.1,1,2,3 cacheblend:0.2 \
        cacheblend:0.2,1,2,3 --json benchmarks/results/gradual_reader.json
    kvcache-rag eval --model smollm2 --task squad hotpotqa --data ../shared/data --n 40 \
        --divergence --policies full reordered cacheblend:0.2 cacheblend:0.2,1,2,3 \
        cacheblend:0.2,1,4,8,15 --json benchmarks/results/gradual_smollm2.json
    python -m benchmarks.gradual

The last one writes its part of docs/quality.md from what the others wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.quality_document import GRADUAL, put

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ("gradual_reader.json", "gradual_smollm2.json")
_HEAD: Final = """# Gradual filtering

CacheBlend's paper (arXiv 2405.16444, section 4.3) narrows the choice of tokens over the first
layers; its code, and every other that we know, chooses once. `cacheblend:0.2,1,2,3` chooses at
layer 1, by the values of a full prefill, and drops tokens at layers 2 and 3 by those that they were
just given; 0.2 is the mean over the layers, so that both forms compute as many tokens. They differ
in operations by the keys and values at check layers, which are computed once more.

On questions of the packaged reader that need the chunk before, it is the better use of as many
tokens, and its answers begin closer to a full prefill's (KL) there and on SmolLM2, whose scores on
40 questions a set do not tell the forms apart. No time is given: other work ran on the machine.

"""
_COLUMNS: Final = (
    "policy",
    "score %",
    "points against full prefill",
    "KL, mean",
    "computed again",
)


def page(results: list[dict[str, Any]]) -> str:
    """The part, from reports of `kvcache-rag eval`."""
    lines = [_HEAD]
    for report in results:
        for group in report["groups"]:
            lines.append(f"## {group['task']}, {group['model']} ({group['n']} questions)\n\n")
            lines.append("| " + " | ".join(_COLUMNS) + " |\n" + "|---" * len(_COLUMNS) + "|\n")
            lines += [f"| {' | '.join(_cells(row))} |\n" for row in group["rows"]]
            lines.append("\n")
    usage = (__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0]
    return "".join([*lines, "Written from:\n\n", usage, "\n"])


def _cells(row: dict[str, Any]) -> list[str]:
    score, apart, far = row["quality"], row["difference"], row["divergence"]
    against = ""
    if apart is not None:
        low, high = 100 * apart["low"], 100 * apart["high"]
        against = f"{100 * apart['difference']:+.1f} ({low:+.1f} to {high:+.1f})"
    return [
        row["policy"],
        f"{100 * score['value']:.1f}",
        against,
        "" if far is None else f"{far[0]:.2g}",
        f"{100 * row['recomputed_share']:.0f} %",
    ]


def main() -> int:
    """Write the part anew."""
    folder = ROOT / "benchmarks/results"
    found = [json.loads((folder / name).read_text("utf-8")) for name in RESULTS]
    put(ROOT / "docs/quality.md", GRADUAL, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
