"""`kvcache-rag demo`: a whole RAG app, asked from stored caches and by full prefill.

A real model (`smollm2` by default) answers questions about articles that come with this package;
`--model tiny` takes the packaged reader and made-up facts instead, which need no other package.
Each question is answered both ways over the same chunks in the same run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvcache_rag.commands.options import add_options
from kvcache_rag.errors import expanded
from llama_index.kvcache_rag.commands.corpus import add_policy

if TYPE_CHECKING:
    import argparse

    from llama_index.kvcache_rag.commands.demo_app import DemoApp
    from llama_index.kvcache_rag.commands.demo_articles import ArticlesDemo
    from llama_index.kvcache_rag.commands.demo_reader import ReaderDemo

    Demo: TypeAlias = ArticlesDemo | ReaderDemo

HELP = "ask a small real model about forty articles, from stored caches and by full prefill"
MODEL: Final = "smollm2"
TINY: Final = "tiny"

# Says that nothing but JSON goes to the standard output.
_STDOUT: Final = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare who is asked what, and where it is kept."""
    from kvcache_rag.settings import EngineSettings

    group = parser.add_argument_group(
        "model", f"Without one {MODEL}; {TINY}, the packaged reader, is asked about made-up facts."
    )
    add_options(group, EngineSettings, "model", "backend", "adapter", "weight_format")
    add_policy(parser)
    parser.add_argument("--questions", type=int, metavar="N", help="ask only N of them")
    parser.add_argument("--top-k", type=int, help="chunks per question (default: 3; tiny: 8)")
    parser.add_argument("--seed", type=int, help="decides the facts for tiny (default: 1)")
    parser.add_argument("--threads", type=int, help="processor threads (default: torch's own)")
    parser.add_argument(
        "--dir",
        type=expanded,
        default=".kvcache-rag-demo",
        help="where to keep everything, to be used again",
    )
    parser.add_argument(
        "--min-ratio",
        type=float,
        metavar="R",
        help="fail if the median ratio of the times to the first token is below R",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const=_STDOUT,
        type=expanded,
        metavar="FILE",
        help="write one JSON object to FILE; without FILE print it, and nothing else",
    )


def run(arguments: argparse.Namespace) -> int:
    """Ingest, ask, compare; 1, and one sentence, if the outcome is not good enough."""
    arguments.model = arguments.model or MODEL
    _check(arguments)
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    demo = _demo(arguments)
    app = _app(arguments, demo)
    talks = arguments.json != _STDOUT
    facts = demo.facts(app, app.fill(demo.texts, show_progress=talks))
    if talks:
        demo.print_start(facts)
    summary = demo.ask(app, talks=talks)
    if talks:
        demo.print_end(summary, facts)
    if arguments.json is not None:
        _write({**facts, **summary}, arguments.json)
    failure = demo.failure(summary) or _too_slow(summary, arguments.min_ratio)
    if failure:
        print(f"kvcache-rag demo: {failure}", file=sys.stderr)
    return 1 if failure else 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse numbers that cannot be used, before any model is loaded."""
    from kvcache_rag import InvalidInputError

    for option in ("top_k", "threads", "questions"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise InvalidInputError(f"--{option.replace('_', '-')} must be at least 1")
    if arguments.seed is not None and arguments.model != TINY:
        raise InvalidInputError("--seed decides the facts that tiny is asked about; leave it out")
    if arguments.json not in (None, _STDOUT) and not Path(arguments.json).parent.is_dir():
        raise InvalidInputError(f"there is no folder for --json {arguments.json}; make it first")


def _demo(arguments: argparse.Namespace) -> Demo:
    """What is asked."""
    if arguments.model == TINY:
        from llama_index.kvcache_rag.commands.demo_reader import QUESTIONS, ReaderDemo

        seed = 1 if arguments.seed is None else arguments.seed
        return ReaderDemo(seed, arguments.questions or QUESTIONS)
    from llama_index.kvcache_rag.commands.demo_articles import ArticlesDemo

    return ArticlesDemo(arguments.questions)


def _app(arguments: argparse.Namespace, demo: Demo) -> DemoApp:
    """Who is asked."""
    from kvcache_rag.policies import policy_by_name
    from llama_index.kvcache_rag.commands.demo_app import DemoApp

    return DemoApp(
        arguments.dir,
        demo.collection,
        model=arguments.model,
        backend=arguments.backend or "transformers",
        adapter=arguments.adapter,
        weight_format=arguments.weight_format or "auto",
        policy=None if arguments.policy is None else policy_by_name(arguments.policy),
        top_k=arguments.top_k or demo.top_k,
        max_new_tokens=demo.max_new_tokens,
    )


def _too_slow(summary: dict[str, Any], least: float | None) -> str:
    """The sentence about `--min-ratio`; "" where it is kept."""
    ratio = summary["ttft_ratio"]
    if least is None or ratio >= least:
        return ""
    return (
        f"the first token from cached chunks came {ratio:.1f} times sooner than by full prefill "
        f"(median), which is below --min-ratio {least:g}"
    )


def _write(values: dict[str, Any], place: str) -> None:
    text = json.dumps(values, indent=2)
    if place == _STDOUT:
        print(text)
    else:
        Path(place).write_text(text + "\n", encoding="utf-8")
