"""`kvcache-rag eval`: how well models answer under different policies, on the same questions.

It covers policies x models x codecs x numbers of documents, and every model without documents
(closed book); it gives quality with intervals, and cost.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache_rag.commands.options import add_options, add_report, new_file, policy_name, whole
from kvcache_rag.progress import markdown, tell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prompt.tokens import TextEncoder
    from kvcache_rag_lab.evaluation.tasks import TokenCounter
    from kvcache_rag_lab.scoring.ask import Cell, Records
    from kvcache_rag_lab.scoring.question import Task

HELP = "measure how well models answer with cached chunks and with full prefill"
CODECS = ("native", "int8", "int4")
POLICIES = (
    "full, bestfew, reuse, bestlast, composite, legolink:16, cacheblend:0.15, prophetkv:0.2, "
    "cacheclip:0.2, ape:0.9,0.9, combination (default: full reuse)"
)
TASKS = (
    "reader (all its kinds), reader_KIND, niah_single_1, rgb_en_noise40, "
    "hotpotqa, 2wiki, musique, squad, dureader, multifieldqa_zh, ...; a wrong name lists all "
    "(default: reader)"
)
READER = "reader"
# Tasks that are cut into chunks of so many tokens of the model's tokenizer.
_COUNTED = ("niah_", "multifieldqa_zh", "longbench_multifieldqa_zh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare tasks, cells, size and where results go."""
    from kvcache_rag.settings import EngineSettings

    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        default=["tiny"],
        help=f"{EngineSettings.model_fields['model'].description} Several are compared (default: "
        "tiny)",
    )
    tasks = parser.add_argument_group("questions")
    tasks.add_argument("--task", nargs="+", metavar="TASK", default=[READER], help=TASKS)
    tasks.add_argument(
        "--data", metavar="DIR", type=Path, help="folder of NAME.jsonl (default: the hub)"
    )
    tasks.add_argument(
        "--questions",
        metavar="N",
        type=whole(),
        help="questions per task (default: all, 200 of niah_*)",
    )
    tasks.add_argument(
        "--in-order",
        action="store_true",
        help="the first --questions rows of a file, instead of drawn ones",
    )
    tasks.add_argument(
        "--metric",
        metavar="NAME",
        help="score of the tables and differences (default: each task's)",
    )
    for flag, least, default, text in (
        ("--seed", 0, 0, "of questions and resamples"),
        ("--length", 1, 4096, "tokens of a prompt of niah_*"),
    ):
        text = f"{text} (default: {default})"
        tasks.add_argument(flag, metavar="N", type=whole(least), default=default, help=text)
    compared = parser.add_argument_group("what is compared, every combination")
    compared.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        type=policy_name,
        default=["full", "reuse"],
        help=POLICIES,
    )
    compared.add_argument(
        "--kv-codec",
        nargs="+",
        choices=CODECS,
        help="put chunks into files in these forms; native is always one of them",
    )
    compared.add_argument(
        "--k",
        nargs="+",
        metavar="N",
        type=whole(),
        help="documents per question, relevant ones first (default: all)",
    )
    add_options(
        compared,
        EngineSettings,
        *("backend", "adapter", "auxiliary", "device", "dtype", "weight_format"),
    )
    compared.add_argument(
        "--divergence",
        action="store_true",
        help="how far first tokens are from full prefill's; always with --kv-codec",
    )
    work = parser.add_argument_group("work and results")
    work.add_argument(
        "--batch", metavar="N", type=whole(), default=32, help="questions at a time (default: 32)"
    )
    work.add_argument(
        "--timed",
        metavar="N",
        type=whole(0),
        default=16,
        help="questions per task asked alone for their times (default: 16)",
    )
    work.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="all results; run again to go on where a run was cut short, or to add policies",
    )
    add_report(work, "the numbers of the tables")
    work.add_argument(
        "--plot", metavar="FILE", type=new_file, help="quality against TTFT, .png or .svg"
    )


def run(arguments: argparse.Namespace) -> int:
    """Ask, print tables with 95 % intervals, and write the requested files."""
    from kvcache_rag.settings import EngineSettings

    _check(arguments)
    policies = _policies(arguments)
    settings = [EngineSettings.from_source(arguments, model=model) for model in arguments.models]
    for one in settings:
        one.check()
    tasks = [task.in_order() if arguments.in_order else task for task in _tasks(arguments)]
    metrics = _metrics(arguments.metric, tasks)
    tell(f"loading {', '.join(arguments.models)}")
    from kvcache_rag.models.pretrained import check_model
    from kvcache_rag_lab.evaluation.runner import evaluate

    cells = _cells(arguments, policies)
    for one in settings:  # before a bar promises thousands of answers
        check_model(one.model, one.backend)
    records = evaluate(
        tasks,
        cells,
        models=_models(arguments),
        n=arguments.questions,
        seed=arguments.seed,
        file=arguments.out / "records.jsonl" if arguments.out else None,
        batch=arguments.batch,
        timed=arguments.timed,
        auxiliary=_auxiliary(arguments),
        divergence=arguments.divergence or bool(arguments.kv_codec),
        show_progress=True,
    )
    _report(arguments, replace(records, metrics=metrics))
    return 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    if arguments.out:
        return (
            f"{arguments.out} has the answers until then, and the same command goes on from there"
        )
    return "nothing of it is kept; with --out DIR the same command would go on from there"


def _metrics(wanted: str | None, tasks: Sequence[Task]) -> dict[str, str]:
    """What the answers of each task are compared by."""
    from kvcache_rag.errors import InvalidInputError

    known = dict.fromkeys(name for task in tasks for name in task.metrics)
    if wanted is not None and wanted not in known:
        raise InvalidInputError(
            f"no task has the metric {wanted!r}; choose from {', '.join(known)}"
        )
    return {task.name: wanted if wanted in task.metrics else task.metric for task in tasks}


def _check(arguments: argparse.Namespace) -> None:
    """Everything that can be said before a model is loaded."""
    from kvcache_rag.commands.listing import check_file
    from kvcache_rag.errors import InvalidInputError

    if arguments.data is not None and not arguments.data.is_dir():
        raise InvalidInputError(f"there is no folder {arguments.data}; name that of the data sets")
    if arguments.plot is not None:
        from kvcache_rag_lab.evaluation.report import check_plot

        check_plot(arguments.plot)
        if not arguments.timed:
            raise InvalidInputError("--plot shows times, and --timed 0 takes none; leave one out")
    if arguments.out is not None:
        if arguments.out.exists() and not arguments.out.is_dir():
            raise InvalidInputError(f"{arguments.out} is a file; name a folder for the results")
        arguments.out.mkdir(parents=True, exist_ok=True)
        check_file(arguments.out / "report.json")


def _policies(arguments: argparse.Namespace) -> dict[str, ReusePolicy]:
    from kvcache_rag.errors import InvalidInputError
    from kvcache_rag.policies.policy_registry import policy_by_name

    policies = {name: policy_by_name(name) for name in arguments.policies}
    for name, policy in policies.items():
        if "relevance" in policy.reads and not arguments.auxiliary:
            raise InvalidInputError(f"{name} needs a model that scores chunks; name --auxiliary")
    if arguments.kv_codec and all(policy.is_full for policy in policies.values()):
        raise InvalidInputError(
            "--kv-codec needs a policy that reuses chunks; add --policies reuse"
        )
    return policies


def _tasks(arguments: argparse.Namespace) -> list[Task]:
    from kvcache_rag_lab.evaluation.tasks import task_by_name
    from kvcache_rag_lab.reader import KINDS

    names: list[str] = []
    for name in arguments.task:
        names += [f"{READER}_{kind}" for kind in KINDS] if name == READER else [name]
    count = _counter(arguments.models[0]) if any(map(_is_counted, names)) else None
    return [
        task_by_name(
            name,
            data=arguments.data,
            count=count,
            length=arguments.length,
        )
        for name in dict.fromkeys(names)
    ]


def _is_counted(name: str) -> bool:
    return name.startswith(_COUNTED)


def _counter(model: str) -> TokenCounter:
    """Tokens of a text by the tokenizer of a model, which is loaded for the first one."""

    @cache
    def encoder() -> TextEncoder:
        from kvcache_rag.models.model_names import resolve
        from kvcache_rag.models.pretrained import load_tokenizer
        from kvcache_rag.prompt.tokens import TextEncoder

        return TextEncoder.for_tokenizer(load_tokenizer(resolve(model), {}))

    return lambda text: len(encoder().encode_untrusted(text))


def _cells(arguments: argparse.Namespace, policies: Mapping[str, ReusePolicy]) -> tuple[Cell, ...]:
    from kvcache_rag_lab.scoring.ask import make_cells

    codecs = tuple(dict.fromkeys(("native", *arguments.kv_codec))) if arguments.kv_codec else ("",)
    models = tuple(dict.fromkeys(arguments.models))
    ks = tuple(dict.fromkeys(arguments.k or [None]))
    return make_cells(policies, models, codecs, ks, closed_book=True)


def _models(arguments: argparse.Namespace) -> dict[str, Callable[[], Engine]]:
    from kvcache_rag.settings import EngineSettings

    settings = EngineSettings.from_source(arguments, auxiliary=None)
    return {
        name: settings.model_copy(update={"model": name}).open_engine for name in arguments.models
    }


def _auxiliary(arguments: argparse.Namespace) -> Scorer | None:
    if arguments.auxiliary is None:
        return None
    from kvcache_rag.auxiliary import Auxiliary

    return Auxiliary.from_pretrained(arguments.auxiliary)


def _report(arguments: argparse.Namespace, records: Records) -> None:
    from kvcache_rag.errors import MissingExtraError
    from kvcache_rag_lab.evaluation.report import draw, summarise, to_json, to_markdown

    groups = summarise(records, seed=arguments.seed)
    table = to_markdown(groups)
    print(markdown(table), end="")
    values = json.dumps(to_json(groups, records), indent=1, allow_nan=False) + "\n"
    if arguments.out is not None:
        (arguments.out / "report.json").write_text(values, encoding="utf-8")
        (arguments.out / "report.md").write_text(table, encoding="utf-8")
    if arguments.report is not None:
        arguments.report.write_text(values, encoding="utf-8")
    if arguments.plot is not None:
        draw(groups, arguments.plot, records.baseline)
    if arguments.out is not None and arguments.timed:
        try:
            draw(groups, arguments.out / "plot.svg", records.baseline)
        except MissingExtraError as error:
            print(f"no plot: {error}")
