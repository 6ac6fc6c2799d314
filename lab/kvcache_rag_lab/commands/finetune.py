"""`kvcache-rag finetune`: teach a model to read stitched chunks like a full prefill."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcache_rag.commands.options import add_model, add_options

if TYPE_CHECKING:
    import argparse

    from kvcache_rag_lab.finetune import FinetuneConfig, JsonlData, ReaderData, Report

HELP = "fine-tune a model under the block mask, or an auxiliary model to choose tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare model, data, recipe and resources."""
    parser.epilog = (
        "In brackets: defaults. A run that was stopped goes on when it is started again."
    )
    add_model(parser)
    parser.add_argument("--out", type=Path, required=True, help="new folder of the finished model")
    parser.add_argument("--work", type=Path, help="checkpoints and log (default: OUT.work)")
    _add_data(parser)
    _add_recipe(parser)
    _add_resources(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        help='JSONL of {"question", "answers": [...], "documents": [{"text", "relevant"}, ...]}',
    )
    data.add_argument(
        "--task", choices=("reader",), help="questions of the reader's generator instead of a file"
    )
    data.add_argument(
        "--kinds",
        nargs="+",
        default=[],
        metavar="KIND[:WEIGHT]",
        help="of the reader's questions (default: mix, several kinds as in its own training)",
    )
    data.add_argument(
        "--documents", nargs="+", type=int, default=[6], help="reader: per context (6)"
    )
    data.add_argument("--facts", nargs="+", type=int, default=[4], help="reader: per document (4)")
    data.add_argument(
        "--questions", type=int, default=14, help="of one context, trained together at most (14)"
    )
    data.add_argument(
        "--plain",
        metavar="FILE",
        type=Path,
        help='JSONL of {"text"} or {"messages"}, under full attention (default: the documents)',
    )
    data.add_argument(
        "--holdout", type=int, default=64, help="contexts and texts kept to measure with (64)"
    )


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument(
        "--positions",
        choices=("reordered", "composite"),
        default="reordered",
        help="of chunks (reordered)",
    )
    recipe.add_argument(
        "--objective",
        choices=("answers", "selection"),
        default="answers",
        help="selection: attend to what matters, for CacheClip's auxiliary model (answers)",
    )
    recipe.add_argument(
        "--teacher",
        metavar="MODEL",
        help="selection: whose attention is the target (default: documents marked relevant)",
    )
    recipe.add_argument(
        "--block-share",
        type=float,
        default=1.0,
        help="of document batches under the block mask (default 1, as TurboRAG; 0: the control)",
    )
    recipe.add_argument(
        "--both-masks",
        action="store_true",
        help="train each document batch under both masks, as Block-Attention",
    )
    recipe.add_argument(
        "--plain-share", type=float, help="of plain batches (default 0.5; 0 for selection)"
    )
    recipe.add_argument("--steps", type=int, default=300, help="optimiser steps (300)")
    recipe.add_argument("--accumulate", type=int, default=2, help="forward passes per step (2)")
    recipe.add_argument(
        "--rate", type=float, help="highest learning rate (default 1e-5; 1e-4 with --lora)"
    )
    recipe.add_argument("--warm-up", type=float, default=0.03, help="share of the steps (0.03)")
    recipe.add_argument("--weight-decay", type=float, default=0.0, help="of AdamW (0)")
    recipe.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient (1)")
    recipe.add_argument("--seed", type=int, default=0, help="of data order and adapters (0)")
    recipe.add_argument(
        "--lora", metavar="RANK", type=int, default=0, help="train adapters (default: all weights)"
    )
    recipe.add_argument(
        "--keep-adapter", action="store_true", help="write the adapter alone, not a merged model"
    )


def _add_resources(parser: argparse.ArgumentParser) -> None:
    from kvcache_rag.settings import DeviceOption

    resources = parser.add_argument_group("resources")
    add_options(resources, DeviceOption, "device")
    resources.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="of the computation (fp32)"
    )
    resources.add_argument(
        "--batch-tokens", type=int, default=4096, help="of a forward pass, padding included (4096)"
    )
    resources.add_argument(
        "--gradient-checkpointing", action="store_true", help="less memory, a third more time"
    )
    resources.add_argument("--attention", help="transformers' attn_implementation, such as eager")
    resources.add_argument(
        "--save-every", type=int, default=100, help="steps between checkpoints (100)"
    )
    resources.add_argument("--quiet", action="store_true", help="no progress bar")


def run(arguments: argparse.Namespace) -> int:
    """Fine-tune, and print what it did to the model."""
    from kvcache_rag_lab.finetune import finetune

    config = _config(arguments)
    try:
        report = finetune(config, show_progress=not arguments.quiet)
    except KeyboardInterrupt:
        if config.work_folder.is_dir():
            print(f"stopped; saved in {config.work_folder}: the same command goes on from there")
        raise
    _print(report, config.out)
    return 0


def _config(arguments: argparse.Namespace) -> FinetuneConfig:
    from kvcache_rag_lab.finetune import FinetuneConfig

    same = (
        *("model", "out", "work", "plain", "positions", "objective", "teacher", "block_share"),
        *("both_masks", "plain_share", "steps", "batch_tokens", "accumulate", "rate", "warm_up"),
        *("weight_decay", "clip", "lora", "keep_adapter", "precision", "gradient_checkpointing"),
        *("attention", "seed", "holdout", "save_every", "device"),
    )
    return FinetuneConfig(
        data=_data(arguments), **{name: getattr(arguments, name) for name in same}
    )


def _data(arguments: argparse.Namespace) -> JsonlData | ReaderData:
    from kvcache_rag.errors import InvalidInputError
    from kvcache_rag_lab.finetune import JsonlData, ReaderData

    if (arguments.data is None) == (arguments.task is None):
        raise InvalidInputError("say what to learn from: --data FILE or --task reader, one of them")
    if arguments.data is not None:
        if arguments.kinds:
            raise InvalidInputError("--kinds belongs to --task reader; leave it out with --data")
        return JsonlData(arguments.data, arguments.questions)
    return ReaderData(
        kinds=tuple(arguments.kinds) or ("mix",),
        documents=tuple(arguments.documents),
        facts=tuple(arguments.facts),
        questions=arguments.questions,
    )


def _print(report: Report, out: Path) -> None:
    print(
        f"{report.steps} steps, {report.tokens} tokens, {report.seconds:.0f} s "
        f"({report.tokens / max(report.seconds, 1e-9):.0f} tokens/s); data: {report.data}"
    )
    if report.skipped:
        print(f"{report.skipped} samples were too long and were left out")
    print(f"\n{report.table()}\n")
    print("\n".join(report.verdict))
    print(f"\n{out} is ready: Engine.from_pretrained({str(out)!r})")
