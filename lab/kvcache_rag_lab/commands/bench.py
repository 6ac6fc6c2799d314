"""`kvcache-rag bench MODEL`: what caching chunks is worth for this model on this machine.

With `--quick` it asks twenty packaged questions and gives first tokens and right answers.  Else
it measures first tokens, decoding and peak memory by full prefill and over chunks from memory and
files, in turns, at several context lengths, and counts operations by the model's config.  For your
own corpus and questions it gives bytes of all chunks and how often the same ones are asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.commands.listing import duration, size
from kvcache_rag.commands.options import (
    add_chunking,
    add_json,
    add_max_new_tokens,
    add_model,
    add_options,
    add_policy,
    add_report,
    add_threads,
    add_top_k,
    as_json,
    check_chunking,
    check_file_there,
    nbytes,
    new_file,
    ready,
    whole,
)
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.backends import TRANSFORMERS
from kvcache_rag.progress import plural, table
from kvcache_rag_documents.extraction import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.settings import EngineSettings
    from kvcache_rag.stores import ChunkStore
    from kvcache_rag_lab.evaluation.cost.speed import SpeedBench

HELP = "measure first tokens, decoding and memory here, and how often your questions' chunks recur"

CHUNK: Final = 512  # tokens of a chunk of random words

PIECE: Final = 256  # of a corpus's files

BUDGETS: Final = (10**9, 4 * 10**9, 16 * 10**9)  # bytes

NAMESPACE: Final = "kvcache-rag bench"

MODEL: Final = "smollm2"  # of --quick

# What --quick asks is packaged, and chunks stay in memory.
_NOT_QUICK: Final = (
    *("contexts", "chunk_size", "chunk_overlap", "max_new_tokens", "rounds", "kv_dir", "kv_codec"),
    *("corpus", "queries", "top_k", "embed", "budgets", "plot"),
)

_SHORTEST: Final = 16  # tokens of a chunk: what a template writes around it may have some

_PREFIXES: Final = ("", "k", "M", "G", "T", "P")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, what is timed, the corpus and where results go."""
    from kvcache_rag.settings import LocalSettings

    add_model(parser, nargs="?")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="ask 20 packaged questions over some 1,000 tokens each by full prefill, the default "
        f"policy (or --policy), reuse and llama.cpp, in a few minutes (MODEL: {MODEL})",
    )
    options = ("backend", "adapter", "weight_format", "revision", "device", "dtype")
    add_options(parser.add_argument_group("model"), LocalSettings, *options)
    timed = parser.add_argument_group(
        "what is timed",
        "Chunks in files lie in --kv-dir, where other chunks stay as they are, else in a temporary "
        "folder.",
    )
    timed.add_argument(
        "--contexts",
        type=whole(_SHORTEST),
        nargs="+",
        metavar="TOKENS",
        help="of the chunks of a prompt (default: 1024 2048 4096, as far as they fit the model)",
    )
    add_chunking(timed, f"default: {CHUNK}; of a corpus's files {PIECE}", least=_SHORTEST)
    add_max_new_tokens(timed, 32, least=2)  # to time those behind the first
    timed.add_argument(
        "--rounds", metavar="N", type=whole(), default=7, help="of all sides in turns (default: 7)"
    )
    add_threads(timed)
    add_policy(timed)
    add_options(timed, LocalSettings, "kv_dir", "kv_codec")
    own = parser.add_argument_group("your corpus and questions")
    own.add_argument(
        "--corpus",
        metavar="CORPUS",
        type=Path,
        help=f'{FOLDER}, or file of JSON lines ({{"text": ...}}), as for build',
    )
    own.add_argument(
        "--queries",
        metavar="FILE",
        type=Path,
        help='questions in the order in which they come: JSON lines ({"question": ...}) in .jsonl, '
        "else one a line",
    )
    add_top_k(own, "default: 4", default=4)
    own.add_argument(
        "--embed",
        choices=("hash", "minilm"),
        default="hash",
        help="what finds chunks: hash (words and parts of words) or minilm, a small model "
        "(default: hash)",
    )
    own.add_argument(
        "--budgets",
        type=nbytes,
        nargs="+",
        metavar="SIZE",
        default=list(BUDGETS),
        help="of a cache (default: 1GB 4GB 16GB)",
    )
    results = parser.add_argument_group("results")
    add_json(results)
    add_report(results, "everything that was measured")
    results.add_argument("--plot", metavar="FILE", type=new_file, help=".svg, .png or .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; an interrupted run writes what was measured, too."""
    from kvcache_rag.settings import EngineSettings

    _check(arguments)
    questions = read_queries(arguments.queries) if arguments.queries else []
    settings = EngineSettings.from_source(arguments)
    ready(settings)
    import torch

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.quick:
        return _quick(arguments, settings)
    from kvcache_rag.policies.policy_registry import given_policy
    from kvcache_rag_lab.evaluation.cost.speed import SpeedBench, SpeedPlan

    policy = given_policy(arguments.policy)
    texts = _texts(arguments.corpus) if arguments.corpus else None
    engine = settings.open_engine(namespace=NAMESPACE)
    plan = SpeedPlan.from_engine(
        engine,
        arguments.contexts or (),
        chunk=arguments.chunk_size or CHUNK,
        tokens=arguments.max_new_tokens,
        rounds=arguments.rounds,
    )
    report = {"format": 1, "complete": False, **_facts(arguments, engine)}
    report["settings"] = {
        "chunk": plan.chunk,
        "tokens": plan.tokens,
        "rounds": plan.rounds,
        "codec": arguments.kv_codec or "native",
    }
    with contextlib.ExitStack() as stack:
        folder = arguments.kv_dir or stack.enter_context(tempfile.TemporaryDirectory())
        stores = _stores(arguments, engine, folder, stack)
        bench = SpeedBench(engine, stores, plan, policy)
        report |= {"speed": bench.report(), "corpus": None}
        try:
            if not arguments.json:
                _say_plan(arguments, bench, report)
            if texts is not None:
                report["corpus"] = _corpus(arguments, engine, texts, questions)
            _measure(bench)
            report["complete"] = True
        finally:
            report["speed"] = bench.report()
            if arguments.report:
                _write(arguments.report, report)
    if arguments.plot:
        from kvcache_rag_lab.evaluation.cost.plot import draw

        draw(report, arguments.plot)
    print(as_json(report) if arguments.json else "\n".join(lines(report)))
    return 0


def _quick(arguments: argparse.Namespace, settings: EngineSettings) -> int:
    """Ask the packaged questions; a report is written when all are answered."""
    from kvcache_rag.policies.policy_registry import given_policy
    from kvcache_rag_lab.evaluation.cost import quick

    engine = settings.open_engine(namespace=NAMESPACE)
    sides, missing = [*quick.quick_sides(engine, given_policy(arguments.policy))], []
    if settings.backend == TRANSFORMERS:  # else full prefill is llama.cpp's already
        found = quick.llama_side(settings)
        if isinstance(found, str):
            missing.append({"side": quick.LLAMA, "reason": found})
        else:
            sides.append(found)
    report = {"format": 1, "complete": True, **_facts(arguments, engine)}
    if not missing:
        report["machine"]["versions"] += f", llama-cpp-python {version('llama-cpp-python')}"
    questions = quick.packaged_questions(engine, quick.PLAN, settings.model)
    bench = quick.QuickBench(sides, questions, quick.PLAN.tokens)
    bench.prefill(show_progress=True)
    bench.measure(show_progress=True)
    report["quick"] = {**bench.report(), "missing": missing}
    if arguments.report:
        _write(arguments.report, report)
    print(as_json(report) if arguments.json else "\n".join(quick_lines(report)))
    return 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    if arguments.quick:
        return "nothing of it is kept"
    if arguments.report:
        return f"{arguments.report} has what was measured until then"
    return "nothing of it is kept; --report FILE has what was measured until then"


# ---------------------------------------------------------------------- arguments
def _check(arguments: argparse.Namespace) -> None:
    """Everything that can be said before anything is read."""
    if arguments.quick:
        _check_quick(arguments)
    elif arguments.model is None:
        raise InvalidInputError(f"say which MODEL to measure; --quick alone asks {MODEL}")
    check_chunking(arguments.chunk_size or PIECE, arguments.chunk_overlap)
    if arguments.queries is not None and arguments.corpus is None:
        raise InvalidInputError("--queries are asked of a corpus; name --corpus, too")
    check_file_there("--queries", arguments.queries)
    if arguments.corpus is not None and not arguments.corpus.exists():
        raise InvalidInputError(
            f"there is no corpus {arguments.corpus}; name a file of JSON lines or a folder"
        )
    if arguments.plot is not None:
        from kvcache_rag_lab.evaluation.report import check_plot

        check_plot(arguments.plot)


def _check_quick(arguments: argparse.Namespace) -> None:
    """Refuse what it does not read, and fill in the model."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name in _NOT_QUICK:
        if getattr(arguments, name) != parser.get_default(name):
            raise InvalidInputError(
                f"--{name.replace('_', '-')} is not for --quick, which asks packaged questions; "
                "leave one of them out"
            )
    arguments.model = arguments.model or MODEL


def _stores(
    arguments: argparse.Namespace, engine: Engine, folder: Any, stack: contextlib.ExitStack
) -> dict[str, ChunkStore]:
    """One per side; what was written to the folder is deleted with the stack."""
    from kvcache_rag.codecs import by_name
    from kvcache_rag.stores import DiskStore, MemoryStore
    from kvcache_rag_lab.evaluation.cost.speed import DEVICE, FILES, MEMORY

    codec, unlimited = by_name(arguments.kv_codec or "native"), 1 << 50
    files = DiskStore(folder, codec=codec)
    stack.callback(files.delete_namespace, NAMESPACE)
    device = engine.model.device
    if device.type == "cpu":
        memory = MemoryStore(unlimited, codec=codec if codec.is_attended else None)
        return {MEMORY: memory, FILES: files}
    return {
        MEMORY: MemoryStore(unlimited, pinned=device.type == "cuda"),
        FILES: files,
        DEVICE: MemoryStore(unlimited, device=device),
    }


# ---------------------------------------------------------------------- corpus and questions
def read_queries(path: Path) -> list[str]:
    """The questions of a file, in order: JSON lines in .jsonl, else one per line.

    Raises:
        InvalidInputError: If it cannot be read, a line is not a question, or there is none.
    """
    try:
        rows = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InvalidInputError(
            f"the queries {path} cannot be read ({error.strerror}); check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"the queries {path} are not UTF-8 text") from error
    is_json = path.suffix.lower() == ".jsonl"
    questions = [
        _question(row, f"{path}, line {number}") if is_json else row.strip()
        for number, row in enumerate(rows, start=1)
        if row.strip()
    ]
    if not questions:
        raise InvalidInputError(f"{path} has no questions; write one a line")
    return questions


def _question(row: str, where: str) -> str:
    try:
        question = json.loads(row)["question"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInputError(
            f'{where}: this is not {{"question": "..."}}; correct it'
        ) from error
    if not isinstance(question, str) or not question.strip():
        raise InvalidInputError(f"{where}: its question is no text; correct it")
    return question


def _texts(corpus: Path) -> list[str] | dict[str, str]:
    """Texts of a file, which are chunks; or of a folder's files by name, which will be cut."""
    from kvcache_rag_documents import left_out_lines, read_folder
    from kvcache_rag_server.corpus.texts import CorpusReader, JsonLines

    if corpus.is_dir():
        found = read_folder(str(corpus))
        for line in left_out_lines(found.left_out):
            print(line, file=sys.stderr)
        return found.texts
    if not corpus.is_file():
        raise InvalidInputError(
            f"there is no corpus {corpus}; name a file of JSON lines or a folder"
        )
    reading = CorpusReader(JsonLines(str(corpus)))
    texts = [text.text for text in reading.texts()]
    if reading.unreadable:
        name, reason = reading.problems[0]
        raise InvalidInputError(f"{corpus}, {name} cannot be read: {reason}")
    if not texts:
        raise InvalidInputError(f"there is no text in {corpus}")
    return texts


def _corpus(
    arguments: argparse.Namespace,
    engine: Engine,
    texts: list[str] | dict[str, str],
    questions: Sequence[str],
) -> dict[str, Any]:
    """Bytes of all chunks, and how often questions ask for the same ones."""
    from kvcache_rag_lab.evaluation.cost.popularity import Recurrence, embedding_by_name, nearest
    from kvcache_rag_lab.evaluation.cost.sizes import file_sizes
    from kvcache_rag_server.commands.corpora import cut

    if isinstance(texts, dict):
        cutting = (engine.tokenizer, arguments.chunk_size or PIECE, arguments.chunk_overlap)
        texts = [piece for text in texts.values() for piece in cut(text, *cutting)]
    pieces = list(dict.fromkeys(texts))
    lengths = [key.tokens for key in engine.keys(pieces)]
    sizes = file_sizes(engine._adapter.measured.chunk_layout, lengths)
    recurrence = None
    if questions:
        embed = embedding_by_name(arguments.embed)
        found = nearest(pieces, questions, arguments.top_k, embed, show_progress=True)
        recurrence = asdict(
            Recurrence.from_retrieved(found, sizes, [one / 1e9 for one in arguments.budgets])
        )
    return {
        "chunks": len(pieces),
        "tokens": sum(lengths),
        "bytes": {codec: sum(values) for codec, values in sizes.items()},
        "top_k": arguments.top_k,
        "embedding": arguments.embed,
        "recurrence": recurrence,
    }


# ---------------------------------------------------------------------- measuring
def _facts(arguments: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    import torch

    from kvcache_rag.models.model_names import chosen_adapter
    from kvcache_rag.models.weight_formats import parameter_count
    from kvcache_rag_lab.commands.machine import described, load

    identity, device = engine.identity, engine.model.device.type
    return {
        "model": {
            "name": arguments.model,
            "revision": identity.revision,
            "backend": arguments.backend or TRANSFORMERS,
            "adapter": chosen_adapter(arguments.model, arguments.adapter),
            "dtype": identity.dtype,
            "weight_format": arguments.weight_format or "auto",
            "parameters": parameter_count(engine.model),
            "window": engine.context_window,
        },
        "machine": {
            **described(device, torch.get_num_threads()),
            "threads": torch.get_num_threads(),
            "load_before": load(),
        },
    }


def _say_plan(arguments: argparse.Namespace, bench: SpeedBench, report: Mapping[str, Any]) -> None:
    plan = bench.plan
    print("\n".join(_where(report)))
    print(
        f"{plural(plan.rounds, 'round')} of full prefill and of chunks of {plan.chunk} tokens "
        f"({arguments.kv_codec or 'native'}) from memory and from files by {bench.policy}, in "
        f"turns, at {_listed(plan.contexts)} tokens of context and {plan.tokens} tokens an answer"
    )
    if plan.short:
        print(f"first tokens also at {_listed(plan.short)}, to see from where on it pays")
    print(f"this takes about {duration(bench.estimate())}", flush=True)


def _listed(values: Sequence[int | str]) -> str:
    *first, last = (value if isinstance(value, str) else f"{value:,}" for value in values)
    return f"{', '.join(first)} and {last}" if first else last


def _measure(bench: SpeedBench) -> None:
    bench.ingest()
    for _ in bench.measure(show_progress=True):
        pass


def _write(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------- what was found
def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Tables, the corpus, and two sentences."""
    speed = report["speed"]
    contexts = speed["contexts"]
    decoded = [one for one in contexts if one["generated"] > 1]
    yield ""
    yield from _times_table(contexts)
    yield ""
    yield from _decoding_table(decoded)
    yield ""
    yield from _flops_table(decoded)
    rate = speed["ingestion"]["tokens_per_second"]
    yield f"prefilling chunks into files, once for each: {rate:,.0f} tokens/s"
    if report["corpus"] is not None:
        yield ""
        yield from _corpus_lines(report["corpus"])
    yield ""
    yield _sooner(decoded, speed["policy"])
    yield _pays(speed["pays_from"], contexts)


def _where(report: Mapping[str, Any]) -> Iterator[str]:
    """Model, machine and versions."""
    model, machine = report["model"], report["machine"]
    with_adapter = f" with adapter {model['adapter']}" if model["adapter"] else ""
    size_of = f"{model['parameters'] / 1e6:,.0f} M parameters, {model['dtype']}"
    yield f"{model['name']}{with_adapter} ({size_of}, {model['backend']}), on {machine['machine']}"
    yield machine["versions"]


def quick_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What `--quick` shows."""
    found = report["quick"]
    prefilled, number = found["prefilled"], found["questions"]
    yield from _where(report)
    yield (
        f"{number} packaged questions, each over {found['chunks']:,.0f} chunks "
        f"({found['context']:,.0f} tokens) in a new order; answers of at most "
        f"{found['max_new_tokens']} tokens"
    )
    yield (
        f"{plural(prefilled['chunks'], 'chunk')} of {prefilled['tokens']:,} tokens prefilled "
        f"once, in {_seconds(prefilled['seconds'])}; sides in turns, chunks in memory, medians"
    )
    yield ""
    rows = [
        ["answered by", "first token", "times as soon", "tokens computed", f"right of {number}"]
    ]
    for side in found["sides"]:
        time, sooner = _seconds(side["first_token"]["p50"]), side["sooner"]
        counts = f"{side['computed_tokens']:,.0f}", str(side["right"])
        rows.append([side["side"], time, "" if sooner is None else _ratio(sooner), *counts])
    yield from table(rows, right=frozenset(range(1, len(rows[0]))))
    yield ""
    for one in found["missing"]:
        yield f"not asked: {one['side']}: {one['reason']}"
    yield (
        f"{number} questions show large differences alone; `kvcache-rag verify "
        f"{report['model']['name']}` asks your own."
    )


def _times_table(contexts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [["context", *contexts[0]["sides"]]]
    rows[0] += [f"sooner from {side}" for side in contexts[0]["sooner"]]
    for one in contexts:
        times = [side["first_token"] for side in one["sides"].values()]
        cells = [f"{_seconds(time['p50'])} ({_seconds(time['p95'])})" for time in times]
        rows.append([f"{one['context']:,}", *cells, *map(_ratio, one["sooner"].values())])
    rounds = plural(contexts[0]["rounds"], "round")
    yield f"first token: median of {rounds} (p95), and how many times sooner than by full prefill"
    yield from table(rows, right=frozenset(range(len(rows[0]))))


def _decoding_table(contexts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    sides = list(contexts[0]["sides"])
    rows = [["context", *(f"{side} tokens/s" for side in sides)]]
    rows[0] += [f"{side} peak" for side in sides]
    for one in contexts:
        found = [one["sides"][side] for side in sides]
        rates = [f"{side['decoding']['tokens_per_second']:.1f}" for side in found]
        peaks = [side["peak_bytes"] for side in found]
        shown = ["-" if peak is None else size(peak) for peak in peaks]
        rows.append([f"{one['context']:,}", *rates, *shown])
    yield "decoding, and peak memory of an answer above what was held before it"
    yield from table(rows, right=frozenset(range(len(rows[0]))))


def _flops_table(contexts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if any(one["flops"] is None for one in contexts):
        yield "the model's config does not say how many operations a token takes"
        return
    rows = [["context", "whole prompt", "question alone", "saved", "a token of the answer"]]
    for one in contexts:
        flops = one["flops"]
        names = ("full", "question", "per_generated_token")
        full, question, token = (_operations(flops[name]) for name in names)
        saved = _percent(flops["reduction"])
        rows.append([f"{one['context']:,}", full, question, saved, token])
    yield "operations, by the model's config"
    yield from table(rows, right=frozenset(range(len(rows[0]))))


def _corpus_lines(corpus: Mapping[str, Any]) -> Iterator[str]:
    sizes = ", ".join(f"{size(count)} {codec}" for codec, count in corpus["bytes"].items())
    yield (
        f"corpus: {plural(corpus['chunks'], 'chunk')} of {corpus['tokens']:,} tokens; in files "
        f"{sizes}"
    )
    found = corpus["recurrence"]
    if found is None:
        return
    yield (
        f"{plural(found['questions'], 'question')} ask for {found['retrieved']:,} chunks, "
        f"{found['distinct']:,} different ones: {_percent(found['recurring'])} were asked for "
        "before"
    )
    budgets = list(next(iter(found["hit_ratios"].values())))
    rows = [
        [codec, *(_percent(shares[budget]) for budget in budgets)]
        for codec, shares in found["hit_ratios"].items()
    ]
    heads = ["hits of a cache of", *(f"{budget} GB" for budget in budgets)]
    yield from table([heads, *rows], right=frozenset(range(1, len(heads))))
    rows = [
        [
            f"{one['percent']} %",
            _percent(one["retrievals"]),
            f"{_percent(one['null']['value'])} "
            f"({_percent(one['null']['low'])} to {_percent(one['null']['high'])})",
            _percent(one["questions"]),
        ]
        for one in found["hottest"]
    ]
    heads = ["hottest chunks", "serve of all retrieved", "if spread at random", "whole questions"]
    yield from table([heads, *rows], right=frozenset({1, 2, 3}))


def _sooner(contexts: Sequence[Mapping[str, Any]], policy: str) -> str:
    first, *others = contexts
    found = [
        f"{_times(first['sooner']['files']['value'])} times sooner at {first['context']:,} tokens "
        "of context"
    ]
    found += [
        f"{_times(one['sooner']['files']['value'])} times at {one['context']:,}" for one in others
    ]
    times = contexts[-1]["sides"]
    full, files = (_seconds(times[side]["first_token"]["p50"]) for side in ("full", "files"))
    return (
        f"With chunks from files, by {policy}, the first token comes {', '.join(found)} "
        f"({files} instead of {full})."
    )


def _pays(least: Mapping[str, int | None], contexts: Sequence[Mapping[str, Any]]) -> str:
    """From where on each side's first token surely comes sooner."""
    sides: dict[int | None, list[str]] = {}
    for side, start in least.items():
        sides.setdefault(start, []).append(side)
    never = sides.pop(None, [])
    if not sides:
        longest = contexts[-1]["context"]
        return f"On this machine stitching does not pay up to {longest:,} tokens of context."
    found = [
        f"from {start:,} tokens of context on with chunks from {_listed(names)}"
        for start, names in sorted(sides.items())
    ]
    without = f", and not with those from {_listed(never)}" if never else ""
    shortest = contexts[0]["context"]
    return (
        f"On this machine stitching pays {', '.join(found)}{without} ({shortest:,} is the shortest "
        "that was measured)."
    )


def _operations(count: int) -> str:
    power = max(0, min((len(str(count)) - 1) // 3, len(_PREFIXES) - 1))
    return f"{count / 1000**power:.1f} {_PREFIXES[power]}FLOP"


def _seconds(value: float) -> str:
    return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _times(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _ratio(found: Mapping[str, Any]) -> str:
    if found["low"] is None:
        return f"{_times(found['value'])} x"
    return f"{_times(found['value'])} x ({_times(found['low'])} to {_times(found['high'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
