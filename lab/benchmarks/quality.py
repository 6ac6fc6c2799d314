"""What each policy costs the packaged reader, before and after fine-tuning.

    python -m benchmarks.quality --work quality.work

Fine-tunes the packaged reader under the block mask, and for as many steps under full attention (the
control), and asks three models the same questions under every policy.  Answers are kept in `--work`
as they come, so an interrupted run goes on.  An hour or two on two cores; `--n 200` gives a rough
picture in a tenth of it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.common import described, read, result_file, write
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.engine import Engine
from kvcache_rag.policies import Ape, CacheBlend, CacheClip, FullRecompute, LegoLink, Reuse
from kvcache_rag_lab.evaluation.report import summarise
from kvcache_rag_lab.evaluation.runner import evaluate, make_cells
from kvcache_rag_lab.evaluation.tasks import task_by_name
from kvcache_rag_lab.finetune import FinetuneConfig, ReaderData, finetune
from kvcache_rag_lab.reader import model_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag_lab.evaluation.report import Group
    from kvcache_rag_lab.scoring.ask import Records

NOISE: Final = ("reader_noise_20", "reader_noise_40", "reader_noise_60", "reader_noise_80")
SINGLE: Final = ("reader_single", *NOISE, "reader_same_relation")
OTHER: Final = ("reader_multi_value", "reader_two_hop_direct", "reader_unit")
CROSS: Final = ("reader_pronoun", "reader_alias")
MODELS: Final = ("before", "block", "control")
# What the block run and its control learn from: the cross-chunk kinds, and what must not be lost.
KINDS: Final = (
    *("alias:0.40", "pronoun:0.10", "unit:0.05", "single:0.15", "noise_80:0.10"),
    *("two_hop:0.10", "multi_value:0.10"),
)
# What the auxiliary for CacheClip learns to attend to, from the reader's own full prefill.
CHOOSING: Final = ("alias:0.3", "pronoun:0.3", "unit:0.1", "single:0.2", "multi_value:0.1")
READER: Final = "tiny"
RATIO: Final = 0.2
BATCH: Final = 128  # of so small a reader
LEGO_TOKENS: Final = 12  # of chunks of about 50 tokens, but for the first: about 20 % of all


@dataclass(frozen=True)
class Study:
    """One part of the study: tasks, policies and models."""

    name: str
    tasks: tuple[str, ...]
    documents: int
    policies: tuple[str, ...]
    models: tuple[str, ...] = MODELS


def policies(auxiliary: Auxiliary, taught: Auxiliary) -> dict[str, ReusePolicy]:
    """What is compared, by label; `taught` is an auxiliary that was fine-tuned for choosing."""
    return {
        "full prefill": FullRecompute(),
        "reuse": Reuse(),
        "composite": Reuse(positions="composite"),
        "LegoLink": LegoLink(LEGO_TOKENS),
        "CacheBlend": CacheBlend(RATIO),
        "CacheClip": CacheClip(auxiliary, RATIO),
        "APE": Ape(0.9, 0.9),
        "CacheClip, best windows": CacheClip(auxiliary, RATIO, threshold=None),
        "CacheClip, taught": CacheClip(taught, RATIO, threshold=None),
        "LegoLink, 11 tokens": LegoLink(LEGO_TOKENS - 1),
    }


def studies() -> tuple[Study, ...]:
    """Facts that need two chunks, those that need one (noise as RGB's: 5 documents), more ways."""
    rest = tuple(name for name in (*SINGLE, *OTHER) if name not in NOISE)
    every = (*("full prefill", "reuse", "composite", "LegoLink", "CacheBlend", "CacheClip", "APE"),)
    clips = ("CacheClip, best windows", "CacheClip, taught")
    more = ("full prefill", *clips, "LegoLink, 11 tokens")
    return (
        Study("cross", CROSS, 6, every),
        Study("main", rest, 6, every),
        Study("noise", NOISE, 5, every),
        Study("more", CROSS, 6, more, models=("before",)),
    )


def tuned(work: Path, steps: int, rate: float, wanted: Sequence[str]) -> dict[str, Path]:
    """The packaged reader, and what is made of it: block, control, auxiliary."""
    data = ReaderData(KINDS, documents=(6, 5, 4, 3), facts=(4, 3), names=("train", "wide_train"))
    shared = FinetuneConfig(
        model=READER,
        out=work / "block",
        data=data,
        plain_share=0.3,
        steps=steps,
        rate=rate,
        precision="bf16",
        attention="eager",
    )
    runs = {
        "block": shared,
        "control": replace(shared, out=work / "control", block_share=0.0),
        "auxiliary": FinetuneConfig(
            model=READER,
            out=work / "auxiliary",
            data=replace(data, kinds=CHOOSING, questions=4),
            objective="selection",
            teacher=READER,
            steps=steps // 2,
            accumulate=1,
            rate=rate,
        ),
    }
    for label, config in runs.items():
        if label in wanted and not config.out.exists():
            finetune(config, show_progress=True)
    return {"before": model_path(), **{label: config.out for label, config in runs.items()}}


def ask(
    study: Study, asked: Sequence[str], models: dict[str, Path], options: argparse.Namespace
) -> Records:
    """Ask the questions of one part, every model with an auxiliary of its own weights."""
    parts = []
    for label in asked:
        if label not in study.models:
            continue
        folder = models[label]
        own = Auxiliary(Engine.from_pretrained(str(folder)))
        known = policies(own, Auxiliary(Engine.from_pretrained(str(models["auxiliary"]))))
        parts.append(
            evaluate(
                [task_by_name(name, documents=study.documents) for name in study.tasks],
                make_cells({name: known[name] for name in study.policies}, [label], ks=(None,)),
                models={label: str(folder)},
                n=options.n,
                seed=options.seed,
                file=options.work / f"{study.name}-{label}.jsonl",
                batch=BATCH,
                timed=options.timed,
                show_progress=True,
            )
        )
    rows = tuple(row for part in parts for row in part.rows)
    return replace(parts[0], rows=rows)


def rows_of(study: str, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row per question kind, model and policy."""
    return [
        {
            "part": study,
            "task": group.task,
            "model": group.model,
            "policy": row.policy,
            "n": row.n,
            "computed again": row.recomputed_share,
            "right": _interval(row.quality.value, row.quality),
            "against full prefill": row.difference
            and _interval(row.difference.difference, row.difference),
        }
        for group in groups
        for row in group.rows
    ]


def _interval(value: float, bounds: Any) -> dict[str, float]:
    return {"value": value, "low": bounds.low, "high": bounds.high}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--work", type=Path, default=Path("quality.work"), help="models, answers")
    parser.add_argument(
        "--n", type=int, default=2000, help="questions per kind that needs two chunks"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="of each fine-tuning run")
    parser.add_argument("--rate", type=float, default=1e-3, help="its highest learning rate")
    parser.add_argument(
        "--only", choices=MODELS, help="ask this model alone and write nothing, beside other runs"
    )
    parser.add_argument("--timed", type=int, default=16, help="questions per kind asked alone")
    parser.add_argument("--json", type=Path, default=result_file("quality"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    asked = (options.only,) if options.only else MODELS
    models = tuned(options.work, options.steps, options.rate, (*asked, "auxiliary"))
    records = {
        study.name: ask(study, asked, models, options)
        for study in studies()
        if set(study.models) & set(asked)
    }
    if options.only:
        return 0
    tuning = []
    for label in ("block", "control", "auxiliary"):
        found = read(options.work / label / "report.json")
        shown = {name: found[name] for name in ("steps", "tokens", "seconds", "skipped")}
        tuning.append({"model": label, **shown, "verdict": " ".join(found["verdict"])})
    about = {"benchmark": "quality", **described("cpu", 1), "metric": "exact match"}
    about |= {"n": options.n, "steps": options.steps, "rate": options.rate}
    rows = [row for name, found in records.items() for row in rows_of(name, summarise(found))]
    write(options.json, {"about": about, "fine-tuning": tuning, "rows": rows})
    print(f"wrote {options.json.name}; python -m benchmarks.render quality shows it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
