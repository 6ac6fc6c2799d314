"""The reader's part of docs/quality.md, written from what `quality.py` kept; nothing is typed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.report_tables import markdown

if TYPE_CHECKING:
    from collections.abc import Mapping

TASKS: Final = {"reader_pronoun": "pronoun", "reader_alias": "alias"}
MODELS: Final = ("before", "block", "control")
_HEAD: Final = """# The packaged reader

Where policies matter most: a pronoun or an alias whose meaning stands at the end of the chunk
before. Exact match in % of the packaged reader, which is tiny and reads controlled English, so this
ranks remedies on *this* model and these questions; `kvcache-rag verify` says how far each policy is
from full prefill on yours. {n:,} questions of each kind, the same for every policy and model, names
never seen in training; 95 % intervals reach {reach:.1f} points at most.

    python -m benchmarks.quality

"""
_LEGEND: Final = """
**before** is the packaged reader; **block** the same after {steps} steps of `kvcache-rag finetune`
under the block mask; **control** after as many on the same data under full attention. LegoLink
takes the first 12 tokens of each chunk but the first, CacheBlend and CacheClip choose 20 % of the
chunk tokens (CacheClip's auxiliary is the reader itself, "taught" one that was fine-tuned for
choosing; its windows were those of 5 of 8, where today it takes more than 5:
[experiments.md](experiments.md)); APE has T = S = 0.9, which was not tuned.
{single}
{date}, {machine}, torch {torch}, transformers {transformers}.

## Fine-tuning

"""


def page(results: Mapping[str, Any]) -> str:
    """The part, from `lab/benchmarks/results/quality.json`."""
    found = {
        (row["policy"], group["task"], group["model"]): row
        for part in ("cross", "more")
        for group in results[part]["groups"]
        for row in group["rows"]
    }
    lines = []
    for policy in dict.fromkeys(policy for policy, *_ in found):
        rows = [found.get((policy, task, model)) for task in TASKS for model in MODELS]
        again = max(row["recomputed_share"] for row in rows if row is not None)
        shown = ["" if row is None else f"{100 * row['quality']['value']:.1f}" for row in rows]
        lines.append([policy.replace("|", "\\|"), f"{100 * again:.0f} %", *shown])
    kinds = [f"{kind}, {model}" for kind in TASKS.values() for model in MODELS]
    table = markdown(["policy", "computed again", *kinds], lines)
    verdicts = [
        f"- {label}: {line}\n"
        for label, report in results["finetuning"].items()
        for line in report["verdict"]
    ]
    widths = [row["quality"]["high"] - row["quality"]["low"] for row in found.values()]
    facts = {**results["facts"], "reach": 50 * max(widths), "single": _single(results)}
    return "".join([_HEAD.format(**facts), table, "\n", _LEGEND.format(**facts), *verdicts])


def _single(results: Mapping[str, Any]) -> str:
    """What a fact that stands in one chunk loses."""
    groups = [group for group in results["main"]["groups"] if group["task"] == "reader_single"]
    lost = [
        -100 * row["difference"]["difference"]
        for group in groups
        for row in group["rows"]
        if row["difference"] is not None and row["policy"] != "APE"
    ]
    return f"Facts that stand in one chunk lose {max(lost):.1f} points at most, but with APE."
