"""`kvcache-rag demo`: a whole RAG app, asked from stored caches and by full prefill.

A real model (`smollm2` by default) answers questions about articles that come with the lab;
`--model tiny` takes the packaged reader and made-up facts instead, which need no other package.
Each question is answered both ways over the same chunks in the same run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvcache_rag.commands.options import (
    add_json,
    add_model,
    add_options,
    add_policy,
    add_report,
    add_threads,
    add_top_k,
    number,
    ready,
    whole,
)
from kvcache_rag.errors import expanded

if TYPE_CHECKING:
    import argparse

    from llama_index.kvcache_rag.commands.demo_app import DemoApp
    from llama_index.kvcache_rag.commands.demo_articles import ArticlesDemo
    from llama_index.kvcache_rag.commands.demo_reader import ReaderDemo

    Demo: TypeAlias = ArticlesDemo | ReaderDemo

HELP = "ask a small real model about forty articles, from stored caches and by full prefill"
MODEL: Final = "smollm2"
TINY: Final = "tiny"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare who is asked what, and where it is kept."""
    from kvcache_rag.settings import EngineSettings

    add_model(parser, nargs="?", default=MODEL)
    group = parser.add_argument_group(
        "model", f"Without one {MODEL}; {TINY}, the packaged reader, is asked about made-up facts."
    )
    add_options(group, EngineSettings, "backend", "adapter", "weight_format")
    add_policy(parser)
    parser.add_argument("--questions", type=whole(), metavar="N", help="ask only N of them")
    add_top_k(parser, "default: 3; tiny: 8")
    parser.add_argument(
        "--seed", metavar="N", type=whole(0), help="decides what tiny is asked (default: 1)"
    )
    add_threads(parser)
    parser.add_argument(
        "--dir",
        type=expanded,
        default=".kvcache-rag-demo",
        help="where to keep everything, to be used again",
    )
    parser.add_argument(
        "--min-ratio",
        type=number(),
        metavar="R",
        help="fail if the median ratio of the times to the first token is below R",
    )
    add_json(parser)
    add_report(parser, "every answer, time and count")


def run(arguments: argparse.Namespace) -> int:
    """Ingest, ask, compare; 1, and one sentence, if the outcome is not good enough."""
    from kvcache_rag.settings import EngineSettings

    _check(arguments)
    ready(EngineSettings.from_source(arguments))
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    demo = _demo(arguments)
    app = _app(arguments, demo)
    talks = not arguments.json
    facts = demo.facts(app, app.fill(demo.texts, show_progress=talks))
    if talks:
        demo.print_start(facts)
    summary = _ask(app, demo, talks=talks)
    if talks:
        demo.print_end(summary, facts)
    text = json.dumps({**facts, **summary}, indent=2)
    if arguments.json:
        print(text)
    if arguments.report is not None:
        arguments.report.write_text(f"{text}\n", encoding="utf-8")
    failure = demo.failure(summary) or _too_slow(summary, arguments.min_ratio)
    if failure:
        print(f"kvcache-rag demo: {failure}", file=sys.stderr)
    return 1 if failure else 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return f"what was stored is kept in {arguments.dir}, to be used again"


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be used, before any model is loaded."""
    from kvcache_rag import InvalidInputError
    from kvcache_rag.errors import MissingExtraError

    try:
        from kvcache_rag_lab.articles import read_questions
    except ImportError as error:
        raise MissingExtraError("kvcache-rag-lab", "demo", "llama-index-kvcache-rag") from error
    if arguments.model == TINY:
        return
    if arguments.seed is not None:
        raise InvalidInputError("--seed decides what tiny is asked; leave it out")
    from llama_index.kvcache_rag.commands.demo_articles import spread

    spread(read_questions(), arguments.questions)


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
    from llama_index.kvcache_rag.commands.settings import Settings

    settings = Settings(
        model=arguments.model,
        backend=arguments.backend or Settings.backend,
        adapter=arguments.adapter,
        weight_format=arguments.weight_format or Settings.weight_format,
        kv_dir=str(Path(arguments.dir) / "kv"),
        chroma=str(Path(arguments.dir) / "chroma"),
        collection=demo.collection,
    )
    return DemoApp(
        settings,
        policy=None if arguments.policy is None else policy_by_name(arguments.policy),
        top_k=arguments.top_k or demo.top_k,
        max_new_tokens=demo.max_new_tokens,
    )


def _ask(app: DemoApp, demo: Demo, *, talks: bool) -> dict[str, Any]:
    """Ask every question both ways, whose sides take turns; gives what all answers say together."""
    app.ask(demo.questions[0].text)  # the first pass of a process is slower: no side pays for it
    asked: list[Any] = []
    questions: list[Any] = [*demo.questions]
    for at, question in enumerate(questions):
        exchange = app.ask(question.text, cached_first=bool(at % 2))
        asked.append(demo.judged(question, exchange))
        if talks:
            print(demo.row(at + 1, asked[-1]), flush=True)
    return demo.summary(asked, exchange)


def _too_slow(summary: dict[str, Any], least: float | None) -> str:
    """The sentence about `--min-ratio`; "" where it is kept."""
    ratio = summary["ttft_ratio"]
    if least is None or ratio >= least:
        return ""
    return (
        f"the first token from cached chunks came {ratio:.1f} times sooner than by full prefill "
        f"(median), which is below --min-ratio {least:g}"
    )
