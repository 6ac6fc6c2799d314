"""`kvcache-rag build MODEL CORPUS --kv-dir DIR|URL`: prefill a corpus ahead of time.

Stored chunks are looked up, not computed.  So a build stopped by Ctrl-C, a kill or a full disk
continues when it is run again, and a corpus that grew only costs its growth.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.commands.collections import add_chroma
from kvcache_rag.commands.listing import duration, size
from kvcache_rag.commands.options import (
    MODEL_GROUPS,
    add_chunking,
    add_groups,
    add_model,
    add_report,
    check_chunking,
    number,
    whole,
)
from kvcache_rag.errors import InvalidInputError, expanded
from kvcache_rag.progress import plural, tell
from kvcache_rag_documents.extraction import FOLDER

if TYPE_CHECKING:
    import argparse

    from kvcache_rag_server.corpus.run import Build, Workers
    from kvcache_rag_server.corpus.texts import Corpus
    from kvcache_rag_server.corpus.worker import BuildSettings

HELP = "prefill a corpus into a store, with several processes or on a Ray cluster"

WHOLE, INCOMPLETE = 0, 1

ENGINES = ("threads", "processes", "ray")

# What chunks belong to is to be the same where they are used.
GROUPS: Final = {**MODEL_GROUPS, "chunks": (*MODEL_GROUPS["chunks"], "namespace")}

_SHOWN = 20  # texts that are named at the end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the corpus, the store and the workers."""
    from kvcache_rag_server.corpus.worker import BuildSettings

    add_model(parser)
    parser.add_argument(
        "corpus",
        metavar="CORPUS",
        nargs="?",
        type=expanded,
        help=f'file of JSON lines ({{"text": ...}} or {{"documents": [...]}}), or {FOLDER}',
    )
    _add_engine(parser)
    add_groups(parser, BuildSettings, GROUPS)
    files = parser.add_argument_group("folders of texts")
    add_chunking(files, "default: 256", 256)
    rows = parser.add_argument_group("collections, in place of CORPUS")
    add_chroma(rows)
    rows.add_argument("--collection", metavar="NAME", help="the collection whose rows are meant")
    rows.add_argument(
        "--text",
        metavar="FORM",
        default="",
        help="what of a row stands in prompts: document, or a form that an installed package "
        "brings, such as llama-index (default: each row tells)",
    )
    add_report(parser, "what was done")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who computes")
    group.add_argument(
        "--engine",
        choices=ENGINES,
        help="this process, processes of this machine, or Ray Data actors (default: threads, "
        "which is this process, for one worker, else processes)",
    )
    group.add_argument(
        "--workers", metavar="N", type=whole(1, 1024), help="models at work (default: 1)"
    )
    group.add_argument(
        "--batch",
        metavar="N",
        type=whole(),
        default=16,
        help="chunks handed out at a time (default: 16)",
    )
    group.add_argument(
        "--gpus", type=number(), metavar="N", help="GPUs of each Ray actor, may be a part of one"
    )
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="a running cluster (default: one is started on this machine)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Build; returns 0, or 1 if something of the corpus is not in the store."""
    _check(arguments)
    settings = _settings(arguments)
    settings.check()
    tell(f"reading the corpus, then loading {settings.model}")
    from kvcache_rag_server.corpus.run import Build

    corpus = _corpus(arguments, settings)
    workers = _workers(arguments)
    settings.check_store()
    build = Build(settings, corpus, workers, arguments.batch)
    try:
        build.run()
    except BaseException as error:
        if build.tally.done:
            again = "" if isinstance(error, KeyboardInterrupt) else "; run it again to go on"
            print(f"until then: {_counts(build)}{again}", file=sys.stderr)
        raise
    finally:
        if arguments.report:
            _write(arguments.report, _described(arguments, build))
    print("\n".join(_lines(build)))
    return WHOLE if build.is_whole else INCOMPLETE


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return f"chunks that are in {arguments.kv_dir} are kept, the same command goes on from there"


# ---------------------------------------------------------------------- arguments
def _check(arguments: argparse.Namespace) -> None:
    check_chunking(arguments.chunk_size, arguments.chunk_overlap)
    if arguments.engine == "threads" and (arguments.workers or 1) > 1:
        raise InvalidInputError(
            "one process works on one chunk at a time; say --engine processes for several workers"
        )
    if arguments.engine != "ray" and (arguments.ray_address or arguments.gpus is not None):
        raise InvalidInputError("--ray-address and --gpus are for --engine ray")
    if (arguments.corpus is None) == (arguments.chroma is None):
        raise InvalidInputError("say what to build: CORPUS, or --chroma with --collection")
    path = None if arguments.corpus is None else Path(arguments.corpus)
    if path is not None and not (path.is_file() or path.is_dir()):
        raise InvalidInputError(
            f"there is no corpus {arguments.corpus}; name a file of JSON lines or a folder"
        )
    if (arguments.chroma is None) != (arguments.collection is None):
        raise InvalidInputError("--chroma and --collection belong together; say both")


def _settings(arguments: argparse.Namespace) -> BuildSettings:
    from kvcache_rag.models.adapters import lasting_adapter
    from kvcache_rag_server.corpus.worker import BuildSettings

    said = BuildSettings.from_source(arguments)
    # Workers may stand in another folder.
    model = os.path.abspath(said.model) if said.model.endswith(".gguf") else said.model
    changes = {
        "model": model,
        "adapter": said.adapter and lasting_adapter(said.adapter),
        "kv_dir": said.kv_dir if said.is_remote else os.path.abspath(said.place),
        "signing_key": said.signing_key and os.path.abspath(said.signing_key),
    }
    return said.model_copy(update=changes)


def _corpus(arguments: argparse.Namespace, settings: BuildSettings) -> Corpus:
    from kvcache_rag.settings import is_url
    from kvcache_rag_server.commands.corpora import ChromaRows, TextFiles
    from kvcache_rag_server.corpus.texts import JsonLines

    if arguments.chroma is not None:
        place = arguments.chroma if is_url(arguments.chroma) else os.path.abspath(arguments.chroma)
        rows = ChromaRows(place, arguments.collection, arguments.text, settings)
        rows.open()
        return rows
    path = Path(arguments.corpus).absolute()
    if path.is_dir():
        return TextFiles(str(path), settings, arguments.chunk_size, arguments.chunk_overlap)
    return JsonLines(str(path))


def _workers(arguments: argparse.Namespace) -> Workers:
    from kvcache_rag_server.corpus.processes import available_cores
    from kvcache_rag_server.corpus.run import InProcess, ProcessPool

    count = arguments.workers or 1
    engine = _engine(arguments)
    if engine == "threads":
        return InProcess()
    if engine == "processes":
        return ProcessPool(count, _devices(arguments.device))
    from kvcache_rag_server.corpus.ray_data import RayCluster

    _check_ray()
    return RayCluster(count, arguments.ray_address, arguments.gpus, available_cores())


def _engine(arguments: argparse.Namespace) -> str:
    if arguments.engine is not None:
        return str(arguments.engine)
    return "threads" if (arguments.workers or 1) == 1 else "processes"


def _devices(device: str | None) -> tuple[str, ...]:
    """The machine's GPUs, for workers to take in turn."""
    if device not in (None, "cuda"):
        return ()
    import torch

    return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))


def _check_ray() -> None:
    from importlib.util import find_spec

    from kvcache_rag.errors import MissingExtraError

    if find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")


# ---------------------------------------------------------------------- what was done
def _counts(build: Build) -> str:
    tally = build.tally
    return f"{tally.prefilled} prefilled, {tally.there} already there"


def _lines(build: Build) -> list[str]:
    tally, reading = build.tally, build.reading
    noun = plural(tally.prefilled + tally.there, "chunk")
    repeated = f", {reading.repeated} more in the corpus repeat one" if reading.repeated else ""
    lines = [f"{noun}: {_counts(build)}{repeated}"]
    took = duration(tally.seconds)
    if tally.prefilled:
        lines.append(
            f"{tally.prefilled_tokens} tokens in {took}, {tally.tokens_per_second:.0f} tokens/s; "
            f"{size(tally.nbytes)} written to {build.settings.place}"
        )
    else:
        lines.append(f"looked up in {took}")
    if build.tidied:
        lines.append(f"{plural(build.tidied, 'unfinished file')} of killed workers removed")
    problems = [(failure.name, failure.reason) for failure in tally.failures] + reading.problems
    missing = tally.failed + reading.unreadable
    if missing:
        lines.append(f"{plural(missing, 'text')} not in the store:")
        lines += [f"  {name}: {reason}" for name, reason in problems[:_SHOWN]]
        if missing > _SHOWN:
            lines.append(f"  and {missing - _SHOWN} more")
    return lines


def _described(arguments: argparse.Namespace, build: Build) -> dict[str, Any]:
    tally, reading = build.tally, build.reading
    return {
        "model": arguments.model,
        "store": build.settings.place,
        "engine": _engine(arguments),
        "workers": arguments.workers or 1,
        "codec": build.settings.kv_codec or "native",
        "namespace": build.settings.namespace,
        "spec": tally.spec,
        "is_complete": reading.is_complete and tally.done == reading.texts_found,
        **{name: getattr(tally, name) for name in ("prefilled", "there", "failed")},
        **{name: getattr(reading, name) for name in ("repeated", "empty", "unreadable")},
        **{name: getattr(tally, name) for name in ("tokens", "prefilled_tokens")},
        "tokens_per_second": tally.tokens_per_second,
        "bytes": tally.nbytes,
        "seconds": tally.seconds,
        "failures": [{"name": one.name, "reason": one.reason} for one in tally.failures],
        "problems": [{"name": name, "reason": reason} for name, reason in reading.problems],
    }


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
