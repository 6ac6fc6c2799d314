"""Writes the table of docs/vllm.md: vLLM with the connector beside its own prefill.

python -m benchmarks.vllm_page
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, Final

from benchmarks.vllm_engine import PLAIN, RESULTS, ROOT, STITCHED
from tools.readme import put

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE: Final = ROOT / "docs" / "vllm.md"
BEGIN: Final = "<!-- vllm: written by python -m benchmarks.vllm_page -->"
END: Final = "<!-- end of vllm -->"

_HEAD: Final = """`{command}`: SmolLM2-135M-Instruct in {dtype}, vLLM {vllm}, {machine},
{date}; both sides in turns on one server, the connector by `Reuse()`, chunks from a folder in an
order that is new each time, {new} tokens an answer; medians (lowest to highest over streams and
rounds), load {load_before:.1f} before and {load_after:.1f} after:

| tokens | streams | first token, vLLM alone | connector | sooner | tokens/s alone | connector |
|---|---|---|---|---|---|---|
"""


def table(report: Mapping[str, Any]) -> str:
    """What stands between the marks."""
    found = {(row["context"], row["streams"], row["side"]): row for row in report["rows"]}
    lines = []
    for context, streams in dict.fromkeys((one, many) for one, many, _ in found):
        plain, stitched = (found[context, streams, side] for side in (PLAIN, STITCHED))
        cells = (
            f"{context:,}", str(streams), _first(plain), _first(stitched),
            f"{plain['first'] / stitched['first']:.1f} x",
            f"{plain['tokens_per_second']:.0f}", f"{stitched['tokens_per_second']:.0f}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |\n")
    return _HEAD.format(**report) + "".join(lines)


def _first(row: Mapping[str, Any]) -> str:
    low, high = row["first_lowest"], row["first_highest"]
    return f"{row['first']:.2f} s ({low:.2f}-{high:.2f})"


def main() -> int:
    """Rewrite or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is right")
    arguments = parser.parse_args()
    report = json.loads(RESULTS.read_text("utf-8"))
    command = "python -m benchmarks.vllm_page"
    return put(BEGIN, END, table(report), command=command, check=arguments.check, page=PAGE)


if __name__ == "__main__":
    sys.exit(main())
