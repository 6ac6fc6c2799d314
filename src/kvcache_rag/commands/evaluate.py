"""`kvcache-rag eval`: how well a model answers under different policies, on the same questions.

With `--codec` instead: over chunks stored in different codecs, each against `Native`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from kvcache_rag.engine import Engine
    from kvcache_rag.evaluation.codec_task import CodecResult
    from kvcache_rag.evaluation.reader_task import KindResult
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.reader.scoring import Share

HELP = "measure how well a model answers with cached chunks and with full prefill"
POLICIES = ("full", "reordered", "composite")
CODECS = ("native", "int8", "int4")


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
    parser.add_argument(
        "--codec",
        nargs="+",
        choices=CODECS,
        help="compare stored forms of chunks with native instead, under the first policy that "
        "reuses chunks",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print exact match with 95 % intervals."""
    from kvcache_rag.engine import Engine
    from kvcache_rag.errors import InvalidInputError

    for name in ("n", "documents", "facts"):
        if getattr(arguments, name) < 1:
            raise InvalidInputError(f"--{name} must be at least 1")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise InvalidInputError(f"there is no folder for {arguments.json}; make it first")
    if arguments.json is not None and arguments.json.is_dir():
        raise InvalidInputError(f"{arguments.json} is a folder; name a file")
    if arguments.codec and set(arguments.policies) == {"full"}:
        raise InvalidInputError(
            "--codec needs a policy that reuses chunks; add --policies reordered"
        )
    engine = Engine.from_pretrained(arguments.model)
    print(
        f"model {arguments.model}, {arguments.documents} documents of {arguments.facts} facts, "
        f"names never seen in training, seed {arguments.seed}\n"
    )
    compare = _compare_codecs if arguments.codec else _compare_policies
    rows = compare(engine, arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _compare_policies(engine: Engine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from kvcache_rag.evaluation.reader_task import evaluate_reader

    print(f"{'kind':<15}{'policy':<36}{'n':>6}  {'exact match':<22}{'refused':<22}")
    results = evaluate_reader(
        engine, _policies(arguments.policies), note=_print_result, **_size(arguments)
    )
    return [_plain(result, "right", "refused") for result in results]


def _compare_codecs(engine: Engine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import tempfile

    from kvcache_rag.codecs import by_name
    from kvcache_rag.evaluation.codec_task import evaluate_codecs

    policy = next(one for one in _policies(arguments.policies) if one.name != "full")
    print(
        f"{policy!r}; changed: answers unlike native's; KL: of the first token from native's\n\n"
        f"{'kind':<15}{'codec':<12}{'n':>6}  {'exact match':<22}{'changed':<20}"
        f"{'mean KL':<11}{'largest KL':<11}"
    )
    with tempfile.TemporaryDirectory() as folder:
        results = evaluate_codecs(
            engine,
            [by_name(name) for name in arguments.codec],
            policy,
            Path(folder),
            note=_print_codec,
            **_size(arguments),
        )
    return [_plain(result, "right", "refused", "changed") for result in results]


def _size(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "questions": arguments.n,
        "seed": arguments.seed,
        "documents": arguments.documents,
        "facts": arguments.facts,
    }


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


def _print_codec(result: CodecResult) -> None:
    right, changed = _written(result.right), _written(result.changed)
    print(
        f"{result.kind:<15}{result.codec:<12}{result.right.trials:>6}  {right:<22}{changed:<20}"
        f"{result.divergence:<11.2g}{result.largest:<11.2g}",
        flush=True,
    )


def _written(share: Share) -> str:
    low, high = share.interval
    return f"{100 * share.value:.1f} % ({100 * low:.1f}-{100 * high:.1f})"


def _plain(result: KindResult | CodecResult, *shares: str) -> dict[str, Any]:
    values = asdict(result)
    for name in shares:
        share = getattr(result, name)
        values[name] = {**values[name], "value": share.value, "interval": share.interval}
    return values
