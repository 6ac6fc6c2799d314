"""`kvcache-rag finetune`: teach a model to read stitched chunks like a full prefill."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.commands.options import (
    add_model,
    add_options,
    check_file_there,
    number,
    ready,
    whole,
)

if TYPE_CHECKING:
    import argparse

    from kvcache_rag_lab.finetune import FinetuneConfig, Report

HELP = "fine-tune a model under the block mask, so that it reads cached chunks"


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
        required=True,
        help='JSONL of {"question", "answers": [...], "documents": [{"text", "relevant"}, ...]}',
    )
    data.add_argument(
        "--per-context",
        metavar="N",
        type=whole(),
        default=14,
        help="questions of one context, trained together at most (14)",
    )
    data.add_argument(
        "--plain",
        metavar="FILE",
        type=Path,
        help='JSONL of {"text"} or {"messages"}, under full attention (default: the documents)',
    )
    _add_count(data, "--holdout", 64, "contexts and texts kept to measure with")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument(
        "--positions",
        choices=("reordered", "composite"),
        default="reordered",
        help="of chunks (reordered)",
    )
    recipe.add_argument(
        "--block-share",
        metavar="SHARE",
        type=number(0, 1),
        default=1.0,
        help="of document batches under the block mask (default 1, as TurboRAG; 0: the control)",
    )
    recipe.add_argument(
        "--both-masks",
        action="store_true",
        help="train each document batch under both masks, as Block-Attention",
    )
    recipe.add_argument(
        "--plain-share",
        metavar="SHARE",
        type=number(0, 1),
        help="of plain batches (default 0.5)",
    )
    _add_count(recipe, "--steps", 300, "optimiser steps")
    _add_count(recipe, "--accumulate", 2, "forward passes per step")
    recipe.add_argument(
        "--rate",
        metavar="R",
        type=number(above=True),
        help="highest learning rate (default 1e-5; 1e-4 with --lora)",
    )
    for flag, default, kind, text in (
        ("--warm-up", 0.03, number(0, 1), "share of the steps (0.03)"),
        ("--weight-decay", 0.0, number(), "of AdamW (0)"),
        ("--clip", 1.0, number(above=True), "largest norm of the gradient (1)"),
    ):
        recipe.add_argument(flag, metavar="R", type=kind, default=default, help=text)
    _add_count(recipe, "--seed", 0, "of data order and adapters", least=0)
    recipe.add_argument(
        "--lora",
        metavar="RANK",
        type=whole(0),
        default=0,
        help="train adapters (default: all weights)",
    )
    recipe.add_argument(
        "--lora-tokens",
        choices=("all", "question"),
        default="all",
        help="where adapters act (all); question: on question and answer alone, --keep-adapter "
        "implied: chunks are the model's own",
    )
    recipe.add_argument(
        "--objective",
        choices=("answers", "distillation"),
        default="answers",
        help="what is learned of document questions (answers); distillation, of adapters: what the "
        "model itself makes of them when all documents see each other",
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
    _add_count(resources, "--batch-tokens", 4096, "of a forward pass, padding included")
    resources.add_argument(
        "--gradient-checkpointing", action="store_true", help="less memory, a third more time"
    )
    resources.add_argument("--attention", help="transformers' attn_implementation, such as eager")
    _add_count(resources, "--save-every", 100, "steps between checkpoints")
    resources.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_count(
    group: argparse._ArgumentGroup, flag: str, default: int, text: str, *, least: int = 1
) -> None:
    how: dict[str, Any] = {"type": whole(least), "metavar": "N", "default": default}
    group.add_argument(flag, help=f"{text} ({default})", **how)


def run(arguments: argparse.Namespace) -> int:
    """Fine-tune, and print how it changed the model."""
    from kvcache_rag.settings import EngineSettings

    config = _config(arguments)
    config.check_folders()
    check_file_there("--data", arguments.data)
    check_file_there("--plain", arguments.plain)
    ready(EngineSettings.from_source(arguments))
    from kvcache_rag_lab.finetune import finetune

    report = finetune(config, show_progress=not arguments.quiet)
    _print(report, config.out)
    return 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves; a running step is finished and saved."""
    work = arguments.work or f"{arguments.out}.work"
    return f"what was trained until then is kept in {work}, the same command goes on from there"


def _config(arguments: argparse.Namespace) -> FinetuneConfig:
    from kvcache_rag_lab.finetune import FinetuneConfig, JsonlData

    same = (
        *("model", "out", "work", "plain", "positions", "block_share"),
        *("both_masks", "plain_share", "steps", "batch_tokens", "accumulate", "rate", "warm_up"),
        *("weight_decay", "clip", "lora", "lora_tokens", "objective", "precision"),
        "gradient_checkpointing",
        *("attention", "seed", "holdout", "save_every", "device"),
    )
    return FinetuneConfig(
        data=JsonlData(arguments.data, arguments.per_context),
        keep_adapter=arguments.keep_adapter or arguments.lora_tokens == "question",
        **{name: getattr(arguments, name) for name in same},
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
