"""`kvcache-rag eval`: how well a model answers under different policies, on the same questions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from kvcache_rag.evaluation.reader_task import KindResult
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.reader.scoring import Share

HELP = "measure how well a model answers with cached chunks and with full prefill"
POLICIES = ("full", "reordered", "composite")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare task, model, policies and size."""
    parser.add_argument("--task", choices=("reader",), default="reader", help="which questions")
    parser.add_argument("--model", default="tiny", help="a folder, a hub name, or tiny")
    parser.add_argument("--n", type=int, default=200, help="questions per kind, at least")
    parser.add_argument("--seed", type=int, default=0, help="other names, facts and questions")
    parser.add_argument("--documents", type=int, default=6, help="documents per question")
    parser.add_argument("--facts", type=int, default=4, help="facts per document")
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["full", "reordered"], help="compared"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print exact match with 95 % intervals."""
    from kvcache_rag.engine import Engine
    from kvcache_rag.errors import InvalidInputError
    from kvcache_rag.evaluation.reader_task import evaluate_reader

    for name in ("n", "documents", "facts"):
        if getattr(arguments, name) < 1:
            raise InvalidInputError(f"--{name} must be at least 1")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise InvalidInputError(f"there is no folder for {arguments.json}; make it first")
    engine = Engine.from_pretrained(arguments.model)
    print(
        f"model {arguments.model}, {arguments.documents} documents of {arguments.facts} facts, "
        f"names never seen in training, seed {arguments.seed}\n"
    )
    print(f"{'kind':<15}{'policy':<36}{'n':>6}  {'exact match':<22}{'refused':<22}")
    results = evaluate_reader(
        engine,
        _policies(arguments.policies),
        questions=arguments.n,
        seed=arguments.seed,
        documents=arguments.documents,
        facts=arguments.facts,
        note=_print_result,
    )
    if arguments.json is not None:
        rows = [_plain(result) for result in results]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _policies(names: list[str]) -> list[ReusePolicy]:
    from kvcache_rag.policies import FullRecompute, Reuse

    known: dict[str, ReusePolicy] = {
        "full": FullRecompute(),
        "reordered": Reuse(),
        "composite": Reuse(positions="composite"),
    }
    return [known[name] for name in names]


def _print_result(result: KindResult) -> None:
    right, refused = _written(result.right), _written(result.refused)
    print(
        f"{result.kind:<15}{result.policy:<36}{result.right.trials:>6}  {right:<22}{refused:<22}",
        flush=True,
    )


def _written(share: Share) -> str:
    low, high = share.interval
    return f"{100 * share.value:.1f} % ({100 * low:.1f}-{100 * high:.1f})"


def _plain(result: KindResult) -> dict[str, Any]:
    values = asdict(result)
    for name in ("right", "refused"):
        share = getattr(result, name)
        values[name] = {**values[name], "value": share.value, "interval": share.interval}
    return values
