"""`kvcache-rag plan DIR --model NAME`: what caching a folder of texts will cost, before it is done.

Chunks are cut by tokens alone.  A splitter that keeps sentences whole makes shorter and so somewhat
more of them; tokens and bytes in total differ little.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_rag.commands.listing import (
    ADAPTER,
    FOLDER,
    MODEL,
    add_weight_format,
    duration,
    size,
)
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.progress import plural, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.kv.chunk import ChunkLayout

HELP = "say how many bytes and how much time the cache of a folder of texts will take"
CODECS = ("native", "int8", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the texts, the model and how they are cut."""
    parser.add_argument("folder", metavar="DIR", help=FOLDER)
    parser.add_argument("--model", default="tiny", help=f"{MODEL} (default: tiny)")
    parser.add_argument("--adapter", metavar="NAME", help=ADAPTER)
    add_weight_format(parser)
    parser.add_argument("--revision", help="commit, branch or tag of a model on the hub")
    parser.add_argument("--codec", choices=CODECS, default="native", help="form on disk")
    parser.add_argument("--chunk-size", type=int, default=256, help="tokens (default: 256)")
    parser.add_argument("--overlap", type=int, default=32, help="shared tokens (default: 32)")
    parser.add_argument("--kv", metavar="STORE", help="count what this store holds already")
    parser.add_argument(
        "--sample", type=int, default=8, help="chunks to time; 0 for none (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Count, measure a few chunks, and print; nothing is stored."""
    from kvcache_rag.integration.extraction import left_out_lines, read_folder
    from kvcache_rag_server.commands.corpora import cut

    if not 0 <= arguments.overlap < arguments.chunk_size:
        raise InvalidInputError("--overlap must be at least 0 and less than --chunk-size")
    if arguments.sample < 0:
        raise InvalidInputError("--sample must be at least 0")
    found = read_folder(arguments.folder)
    engine, layout = _open(arguments)
    pieces = [
        piece
        for text in found.texts.values()
        for piece in cut(text, engine.tokenizer, arguments.chunk_size, arguments.overlap)
    ]
    plan = _count(engine, pieces)
    pace = _measure(engine, plan, arguments.sample)
    values = _described(arguments, layout, plan, pace)
    left_out = {one.name: one.reason for one in found.left_out}
    values = {"model": arguments.model, "files": len(found.texts), "left_out": left_out, **values}
    if arguments.json:
        print(json.dumps(values))
    else:
        lines = [*_lines(values, arguments.codec), *left_out_lines(found.left_out)]
        print("\n".join(lines))
    return 0


@dataclass(frozen=True)
class CorpusSize:
    """What there is, and what of it would be computed.

    Attributes:
        pieces: All chunks, equal ones too.
        texts: Different chunks, by digest.
        tokens: Tokens of each, by digest.
        there: Digests of those that the store holds.
    """

    pieces: int
    texts: dict[str, str]
    tokens: dict[str, int]
    there: frozenset[str]


@dataclass(frozen=True)
class MeasuredPrefill:
    """What was measured.

    Attributes:
        chunks: How many chunks were prefilled.
        tokens: Their tokens.
        seconds: The time it took.
    """

    chunks: int
    tokens: int
    seconds: float


def _open(arguments: argparse.Namespace) -> tuple[Engine, ChunkLayout]:
    from kvcache_rag.integration.engine import EngineSettings, open_store
    from kvcache_rag.models.hf import TransformersModel

    if arguments.kv is not None:
        _check_store(arguments.kv)
    store = open_store(arguments.kv, codec=arguments.codec)
    engine = EngineSettings.of(arguments).open(store)
    return engine, TransformersModel(engine.model).measured.chunk_layout


def _check_store(folder: str) -> None:
    from pathlib import Path

    if not Path(folder).is_dir():
        raise InvalidInputError(f"there is no store {folder}; leave --kv out to count from nothing")


def _count(engine: Engine, pieces: Sequence[str]) -> CorpusSize:
    keys = engine.keys(pieces)
    return CorpusSize(
        len(pieces),
        {key.digest: text for key, text in zip(keys, pieces, strict=True)},
        {key.digest: key.tokens for key in keys},
        frozenset(key.digest for key in set(keys) if engine.store.contains(key)),
    )


def _measure(engine: Engine, plan: CorpusSize, count: int) -> MeasuredPrefill | None:
    """Prefill some of the chunks into memory; the first ones only warm the machine up."""
    from kvcache_rag.engine import like
    from kvcache_rag.stores import MemoryStore

    missing = sorted(plan.tokens.keys() - plan.there, key=lambda digest: plan.tokens[digest])
    count = min(count, len(missing))
    if not count:
        return None
    # Evenly over all lengths, as they will come.
    sample = [missing[(2 * index + 1) * len(missing) // (2 * count)] for index in range(count)]
    fresh = like(engine, store=MemoryStore())
    if len(missing) > count:
        other = next(digest for digest in missing if digest not in sample)
        fresh.add([plan.texts[other]])
    started = time.perf_counter()
    fresh.add([plan.texts[digest] for digest in sample])
    seconds = time.perf_counter() - started
    return MeasuredPrefill(count, sum(plan.tokens[digest] for digest in sample), seconds)


def _described(
    arguments: argparse.Namespace,
    layout: ChunkLayout,
    plan: CorpusSize,
    pace: MeasuredPrefill | None,
) -> dict[str, Any]:
    from kvcache_rag_lab.evaluation.cost.sizes import file_sizes

    lengths = list(plan.tokens.values())
    missing = sum(count for digest, count in plan.tokens.items() if digest not in plan.there)
    tiers = {"memory": sum(layout.nbytes(count) + 4 * count for count in lengths)}
    for name, sizes in file_sizes(layout, lengths).items():
        tiers[f"disk {name}"] = sum(sizes)
    values: dict[str, Any] = {
        "chunks": len(lengths),
        "repeated": plan.pieces - len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "stored": len(plan.there),
        "tokens_to_prefill": missing,
        "codec": arguments.codec,
        "bytes": tiers,
        "measured": None,
        "seconds": None if missing else 0.0,
    }
    if pace is not None:
        speed = pace.tokens / pace.seconds
        measured = {"chunks": pace.chunks, "tokens": pace.tokens, "seconds": pace.seconds}
        values["measured"] = {**measured, "tokens_per_second": speed}
        values["seconds"] = missing / speed
    return values


def _lines(values: dict[str, Any], codec: str) -> Iterator[str]:
    chunks = values["chunks"]
    repeated = f", {values['repeated']} more repeat one of them" if values["repeated"] else ""
    yield f"{plural(values['files'], 'file')}, {plural(chunks, 'chunk')}{repeated}"
    yield f"{values['tokens']} tokens for {values['model']}, at most {values['longest']} in a chunk"
    rows = [("", "per chunk", "in all", "")]
    for name, nbytes in values["bytes"].items():
        chosen = "chosen" if name == f"disk {codec}" else ""
        rows.append((name, size(nbytes / chunks), size(nbytes), chosen))
    yield from table(rows, frozenset({1, 2}))
    if values["stored"]:
        yield f"{plural(values['stored'], 'chunk')} stored already"
    measured = values["measured"]
    if measured is not None:
        yield (
            f"prefill takes about {duration(values['seconds'])} on this machine: "
            f"{measured['tokens_per_second']:.0f} tokens/s, measured on "
            f"{plural(measured['chunks'], 'chunk')} of {measured['tokens']} tokens"
        )
    elif values["seconds"] == 0.0:
        yield "nothing is left to prefill"
