"""Write `tests/golden`: what must not change by accident.

Run from the repository root: `python tools/freeze.py PART ...` writes parts anew from the code as
it is; `tests/test_golden.py` compares.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("ANONYMIZED_TELEMETRY", "False")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import golden_cases as cases
from tests import golden_surfaces as surfaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag import Engine

GOLDEN: Final = cases.GOLDEN


def main() -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all, {', '.join(PARTS)}")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - {"all", *PARTS}
    if unknown or not arguments.parts:
        parser.error(f"there is no part {min(unknown)}" if unknown else "name parts, or all")
    GOLDEN.mkdir(exist_ok=True)
    for name, write in PARTS.items():
        if {"all", name} & set(arguments.parts):
            write()
            print(f"wrote {name}")
    return 0


# ---------------------------------------------------------------------- stores
def write_stores() -> None:
    """`store`, `chroma` and `made`, which are of one piece, and what is in them as JSON."""
    for name in ("store", "chroma", "made"):
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
    _write("store.json", cases.to_json({name: _variant(name) for name in cases.VARIANTS}))
    # In a process of its own: the database is whole on disk when it has ended.
    code = "from tools import freeze; freeze.write_chroma()"
    subprocess.run([sys.executable, "-c", code], cwd=cases.ROOT, check=True)
    _write("made.json", cases.to_json(dict(_made())))
    for name in ("store", "made"):
        for locks in (GOLDEN / name).rglob("locks"):
            shutil.rmtree(locks)


def _variant(name: str) -> dict[str, Any]:
    """Fill the folder by an engine; says what it then holds."""
    import json

    engine = cases.open_engine(GOLDEN / "store", name)
    keys = engine.add(cases.TEXTS)
    if name == cases.MAIN:
        tenant = engine.in_namespace(cases.TENANT)
        tenant.add(cases.TEXTS[:1])
    store: Any = engine.store
    folder = store.path(keys[0]).parent.parent
    layout = cases.layout_of(json.loads((folder / "spec.json").read_text(encoding="utf-8")))
    answer = engine.generate(cases.QUESTION, cases.TEXTS, max_new_tokens=8)
    return {
        "spec": engine.spec,
        "folder": folder.relative_to(GOLDEN / "store").as_posix(),
        "keys": [key.digest for key in keys],
        "tokens": [key.tokens for key in keys],
        "start": keys[0].start,
        "tensors": [cases.tensors_digest(store.get(key, layout).chunk) for key in keys],
        "answer": answer.text,
    }


def _made() -> Iterator[tuple[str, dict[str, str]]]:
    from kvcache_rag import DiskStore

    for name, codec, key, chunk in cases.made_chunks():
        store = DiskStore(GOLDEN / "made" / name, codec=codec)
        store.put(key, chunk)
        read = store.get(key, chunk.layout).chunk
        yield name, {"key": key.digest, "tensors": cases.tensors_digest(read)}


def write_chroma() -> None:
    """`chroma`, a collection of each framework that refers to `store`, and `chroma.json`."""
    import chromadb
    from llama_index.core.schema import TextNode

    from langchain_kvcache_rag import HashEmbeddings, KVCacheChroma
    from llama_index.kvcache_rag import HashEmbedding, KVCacheVectorStore

    engine: Engine = cases.open_engine(GOLDEN / "store")
    place = str(GOLDEN / "chroma")
    llama, langchain = cases.COLLECTIONS
    embed = HashEmbedding(dimensions=cases.DIMENSIONS)
    nodes = [
        TextNode(
            id_=f"node-{index}",
            text=text,
            metadata=cases.LLAMA_METADATA if index == 0 else {},
            embedding=embed.get_text_embedding(text),
        )
        for index, text in enumerate(cases.TEXTS)
    ]
    KVCacheVectorStore.from_params(llama, persist_dir=place, engine=engine).add([*nodes])
    KVCacheChroma(
        langchain, HashEmbeddings(cases.DIMENSIONS), persist_directory=place, engine=engine
    ).add_texts(
        cases.TEXTS,
        [{"page": index} for index in range(len(cases.TEXTS))],
        ids=[f"document-{index}" for index in range(len(cases.TEXTS))],
    )
    client = chromadb.PersistentClient(place)
    rows = {
        name: client.get_collection(name).get(include=["documents", "metadatas"])
        for name in cases.COLLECTIONS
    }
    values = {
        name: {
            "id": str(client.get_collection(name).id),
            "rows": {
                one: {"document": text, "metadata": metadata}
                for one, text, metadata in zip(
                    found["ids"], found["documents"] or [], found["metadatas"] or [], strict=True
                )
            },
        }
        for name, found in rows.items()
    }
    _write("chroma.json", cases.to_json(values))


# ---------------------------------------------------------------------- verdicts
def write_verdicts() -> None:
    """`verdict.json` by the command `verify`, `verdict_nulls.json` with what is not known."""
    from dataclasses import replace

    from kvcache_rag.cli import main as command_line
    from kvcache_rag.verdict import PolicyScore, Verdict

    path = GOLDEN / "verdict.json"
    words = (
        "verify tiny --task reader --questions 12 --device cpu --auxiliary tiny --max-new-tokens 8"
    )
    policies = ["--policies", "reuse", "legolink:4", "cacheblend:0.5", "cacheclip", "ape"]
    if command_line([*words.split(), *policies, "--out", str(path)]) != 0:
        raise SystemExit("verify failed")
    known = Verdict.load(path)
    rows = (PolicyScore("Reuse()"), replace(known.policies[0], policy="LegoLink(tokens=16)"))
    unknown = replace(known, policies=rows, auxiliary=None, checks=(), notes=("Ä note.",))
    unknown.save(GOLDEN / "verdict_nulls.json")
    found = {
        file: repr(Verdict.load(GOLDEN / file)) for file in ("verdict.json", "verdict_nulls.json")
    }
    _write("verdicts.json", cases.to_json(found))


# ---------------------------------------------------------------------- settings
def write_settings() -> None:
    """`settings`: every file of settings that the project writes or reads again."""
    import json
    from dataclasses import asdict

    from kvcache_rag_lab.finetune.loop import RunFolder
    from kvcache_rag_lab.scoring.ask import RecordFile
    from llama_index.kvcache_rag.commands.settings import FullPrefill, Settings

    folder = GOLDEN / "settings"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    texts = {k: v for k, v in asdict(cases.TEMPLATE).items() if isinstance(v, str)}
    _write("settings/prompt_template.json", cases.to_json(texts))
    _write("settings/api_keys.txt", cases.api_keys_text())
    for name, config in cases.FINETUNES.items():
        with tempfile.TemporaryDirectory() as place, RunFolder(Path(place)).open(config.settings()):
            shutil.copy(Path(place) / "settings.json", folder / f"finetune-{name}.json")
    records = RecordFile(folder / "records.jsonl")
    for name, value in cases.NOTES.items():
        records.note(name, value)
    records.append(cases.RECORDS)
    _write(
        "settings/questions.jsonl", "".join(f"{json.dumps(row)}\n" for row in cases.QUESTION_ROWS)
    )
    settings = Settings(full=FullPrefill(*cases.FULL), **cases.INGEST)  # type: ignore[arg-type]  # of JSON
    _write("settings/ingest.json", settings.to_text())
    found = {name: one.to_dict() for name, one in cases.llama_index_objects().items()}
    _write("settings/llama_index.json", cases.to_json(found))
    _write("settings/langchain.json", cases.to_json(cases.langchain_values()))


# ---------------------------------------------------------------------- surfaces
def write_server() -> None:
    """`openapi.json`, `openapi_keys.json` and `metrics.json`."""
    _write("openapi.json", cases.to_json(cases.openapi(None)))
    keys = GOLDEN / "settings" / "api_keys.txt"
    _write("openapi_keys.json", cases.to_json(cases.openapi(keys)))
    _write("metrics.json", cases.to_json(asyncio.run(cases.metric_families())))


def write_help() -> None:
    """`help.txt`, as the argparse of Python 3.11 lays it out."""
    _write("help.txt", surfaces.from_pages(surfaces.help_pages()))


def write_interface() -> None:
    """`interface.json`, `projects.json`, `configuration.json` and `representations.json`."""
    _write("interface.json", cases.to_json(surfaces.interface()))
    _write("configuration.json", cases.to_json(surfaces.configuration()))
    _write("projects.json", cases.to_json(surfaces.projects()))
    _write("representations.json", cases.to_json(surfaces.representations()))


def write_conversations() -> None:
    """`conversations.json`: each as every front end puts it to the model."""
    sys.path.insert(0, str(cases.ROOT / "tests"))
    told = import_module("test_conversations")

    read = {
        name: {front_end: told.read_of(front_end, case) for front_end in told.FRONT_ENDS}
        for name, case in told.CASES.items()
    }
    _write("conversations.json", cases.to_json(read))


def _write(name: str, text: str) -> None:
    (GOLDEN / name).write_text(text, encoding="utf-8")


PARTS: Final[dict[str, Callable[[], None]]] = {
    "stores": write_stores,
    "verdicts": write_verdicts,
    "settings": write_settings,
    "server": write_server,
    "help": write_help,
    "interface": write_interface,
    "conversations": write_conversations,
}


if __name__ == "__main__":
    sys.exit(main())
