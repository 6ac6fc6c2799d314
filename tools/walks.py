"""Walk through the code as four requests do: files entered, climbs, calls that only hand on.

    python tools/walks.py                    # a table
    python tools/walks.py --files            # and every file, in order
    python tools/walks.py --json FILE

    question   `generate` over stored chunks of a `DiskStore`, one token, copied
    chunk      `add` of a new chunk, until its file lies in a `DiskStore`
    deferred   as `question`, with `rotation="deferred"`
    chat       `POST /v1/chat/completions` with documents, until an engine's answering method

Each runs once before it is measured, in the same process, so that nothing is counted that happens
once: imports, probing of the model. Walks end where their method returns, `chat` where an engine is
entered. Only functions of the package count; generated ones (of dataclasses) have no file. A climb
is a call from a file to one of a higher layer of the layers contract, whatever lies between; a rise
is a step up in the order of first entry: where a reader who follows the request turns back.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import scripted
from tools.import_graph import PACKAGE, module_name, parsed
from tools.scripted import QUESTION, SOURCE, Ear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

ROOT: Final = SOURCE.parent.parent
ANSWERING: Final = ("generate", "stream", "generate_batch", "complete", "stream_complete")
MOMENT: Final = 0.1  # seconds


def layers(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, int]:
    """The height of each module or folder that the layers contract names; the lowest is 0."""
    try:
        tomllib = import_module("tomllib")
    except ImportError as error:
        raise RuntimeError("layers are read with tomllib; use Python 3.11 or newer") from error
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    lines = next(
        one["layers"]
        for one in contracts
        if one["type"] == "layers" and one.get("containers") == [PACKAGE]
    )
    return {
        name.strip(" ()"): height
        for height, line in enumerate(reversed(lines))
        for name in line.replace(":", "|").split("|")
    }


@cache
def file_of(code: CodeType) -> str:
    """The file of a function, below the package."""
    return Path(code.co_filename).relative_to(SOURCE).as_posix()


def layer_of(file: str, heights: dict[str, int]) -> int | None:
    """The layer of a file: that of its longest name in the contract."""
    parts = module_name(SOURCE / file).split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((heights[name] for name in names if name in heights), None)


@cache
def _functions(file: str) -> dict[tuple[str, int], ast.FunctionDef | ast.AsyncFunctionDef]:
    return {
        (node.name, min([node.lineno, *(one.lineno for one in node.decorator_list)])): node
        for node in ast.walk(parsed(SOURCE / file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _is_name(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Starred):
        node = node.value
    return isinstance(node, ast.Name)


def only_hands_on(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is one call that is given nothing but names, a parameter among them."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    if isinstance(call, ast.Await | ast.YieldFrom):
        call = call.value
    if not isinstance(call, ast.Call) or not _is_name(call.func):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    own = node.args
    listed = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
    parameters = {one.arg for one in listed if one is not None} - {"self", "cls"}
    used = {name.id for one in given for name in ast.walk(one) if isinstance(name, ast.Name)}
    return bool(given) and all(map(_is_name, given)) and bool(used & parameters)


@dataclass
class Walk:
    """What was entered on one way, in order of first entry.

    Attributes:
        files: Files of ours, and how many calls went into each.
        climbs: Pairs of a lower and a higher file, and how often the lower called the higher.
        pass_throughs: Functions that only hand on, as `file:name`.
        functions: How many different functions.
        opened_at: Frames of ours where the first file of the store was opened; None for none.
    """

    files: Counter[str] = field(default_factory=Counter)
    climbs: Counter[tuple[str, str]] = field(default_factory=Counter)
    pass_throughs: Counter[str] = field(default_factory=Counter)
    functions: set[CodeType] = field(default_factory=set)
    opened_at: int | None = None

    def enter(self, frame: FrameType, heights: dict[str, int]) -> None:
        """Note an entry."""
        code = frame.f_code
        file = file_of(code)
        self.files[file] += 1
        self.functions.add(code)
        back = scripted.caller(frame)
        if back is not None:
            low = file_of(back.f_code)
            mine, theirs = layer_of(file, heights), layer_of(low, heights)
            if mine is not None and theirs is not None and mine > theirs:
                self.climbs[low, file] += 1
        node = _functions(file).get((code.co_name, code.co_firstlineno))
        if node is not None and only_hands_on(node):
            qualname = getattr(code, "co_qualname", code.co_name)
            self.pass_throughs[f"{file}:{qualname}"] += 1

    def opened(self, path: str) -> None:
        """Note an opened file."""
        if self.opened_at is None:
            self.opened_at = scripted.depth(sys._getframe())

    def rises(self) -> list[tuple[str, str]]:
        """Neighbours in the order of first entry of which the later lies in a higher layer."""
        heights = layers()
        found = [(file, layer_of(file, heights)) for file in self.files]
        return [
            (low, high)
            for (low, before), (high, height) in pairwise(found)
            if before is not None and height is not None and height > before
        ]

    def figures(self) -> dict[str, Any]:
        """Everything, as JSON."""
        parts = [Path(file).parts for file in self.files]
        return {
            "files": len(self.files),
            "files_at_top": sum(len(one) == 1 for one in parts),
            "folders": len({one[0] for one in parts if len(one) > 1}),
            "climbs": len(self.climbs),
            "climbing_calls": sum(self.climbs.values()),
            "rises_in_order": len(self.rises()),
            "pass_throughs": len(self.pass_throughs),
            "functions": len(self.functions),
            "calls": sum(self.files.values()),
            "frames_at_first_open": self.opened_at,
            "in_order": list(self.files),
            "climbing": sorted(f"{low} -> {high}" for low, high in self.climbs),
            "rising": [f"{low} -> {high}" for low, high in self.rises()],
            "passing_through": sorted(self.pass_throughs),
        }


def _walked(ear: Ear, folder: Path, run: Callable[[], object], end: frozenset[CodeType]) -> Walk:
    """Run something; the walk ends with it, or where a function of `end` is entered."""
    walk, heights = Walk(), layers()

    def hear(frame: FrameType) -> None:
        if frame.f_code in end:
            time.sleep(MOMENT)  # till other threads have come to where they wait
            ear.deaf()
        else:
            walk.enter(frame, heights)

    with scripted.opens(folder, walk.opened), ear.hearing(hear):
        run()
    return walk


def question(ear: Ear, folder: Path, **options: Any) -> Walk:
    """A question over three stored chunks."""
    from kvcache_rag import DiskStore

    chunks = scripted.texts(5, 3)
    scripted.reader_engine(DiskStore(folder)).add(chunks)
    engine = scripted.reader_engine(DiskStore(folder), **options)
    # Two chunks: no rate of this machine is known yet, so none decides anything.
    engine.generate(QUESTION, chunks[3:], max_new_tokens=1)
    answers = []

    def run() -> None:
        answers.append(engine.generate(QUESTION, chunks[:3], max_new_tokens=1))

    walk = _walked(ear, folder, run, frozenset())
    metrics = answers[0].metrics
    if metrics.hits != {"disk": 3} or metrics.rotation != options.get("rotation", "copied"):
        raise RuntimeError(f"the question went another way: {metrics}")
    return walk


def deferred(ear: Ear, folder: Path) -> Walk:
    """A question whose chunks stay where they are."""
    return question(ear, folder, rotation="deferred")


def chunk(ear: Ear, folder: Path) -> Walk:
    """A chunk that is new."""
    from kvcache_rag import DiskStore

    before, new = scripted.texts(2, 3)
    engine = scripted.reader_engine(DiskStore(folder))
    engine.add([before])
    walk = _walked(ear, folder, lambda: engine.add([new]), frozenset())
    if not all(engine.store.contains(key) for key in engine.keys([new])):
        raise RuntimeError("the chunk is not in the store")
    return walk


def chat(ear: Ear, folder: Path) -> Walk:
    """A chat with documents that are stored."""
    import httpx

    from kvcache_rag import DiskStore, Engine, MemoryStore, TieredStore
    from kvcache_rag_server.app import build_app
    from kvcache_rag_server.local import LocalBackend
    from kvcache_rag_server.settings import ServerSettings

    documents = scripted.texts(3, 3)
    engine = scripted.reader_engine(TieredStore(MemoryStore(), DiskStore(folder)))
    engine.add(documents)
    engine.generate(QUESTION, documents[:2], max_new_tokens=1)
    backend = LocalBackend(engine, name="tiny")
    app = build_app(backend, ServerSettings(model="tiny"))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "documents": documents,
        "max_tokens": 1,
    }

    async def ready() -> None:
        while not await backend.ready():
            await asyncio.sleep(MOMENT)
        await asyncio.sleep(MOMENT)  # till that thread waits for work

    async def ask() -> None:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
        ) as http:
            reply = await http.post("/v1/chat/completions", json=body)
        await backend.close()
        if reply.status_code != 200:
            raise RuntimeError(f"the chat was refused: {reply.text}")

    asyncio.run(ready())  # its thread tries the model out first
    end = frozenset(getattr(Engine, name).__code__ for name in ANSWERING)
    return _walked(ear, folder, lambda: asyncio.run(ask()), end)


WALKS: Final = {"question": question, "chunk": chunk, "deferred": deferred, "chat": chat}


def measure() -> dict[str, Walk]:
    """Every walk, each for the second time."""
    ear = Ear()
    found = {}
    with scripted.same_machine(), ear.ready():
        for name, walk in WALKS.items():
            for _ in range(2):
                with tempfile.TemporaryDirectory() as folder:
                    found[name] = walk(ear, Path(folder).resolve() / "kv")
    return found


def figures(walks: dict[str, Walk]) -> dict[str, dict[str, Any]]:
    """All walks as JSON; `deferred` says which files `question` does not enter."""
    found = {name: walk.figures() for name, walk in walks.items()}
    plain = walks["question"].files
    further = [file for file in walks["deferred"].files if file not in plain]
    found["deferred"] |= {"further_files": len(further), "further": further}
    serving = [file for file in walks["chat"].files if file.startswith("serve/")]
    found["chat"]["files_of_serve"] = len(serving)
    return found


def table(found: dict[str, dict[str, Any]], *, files: bool) -> Iterator[str]:
    """A line per figure, a column per walk; lists below."""
    counts = [key for one in found.values() for key, value in one.items() if not _is_list(value)]
    yield f"{'':22}" + "".join(f"{name:>10}" for name in found)
    for key in dict.fromkeys(counts):
        cells = (one.get(key) for one in found.values())
        yield f"{key:22}" + "".join(f"{'-' if cell is None else cell:>10}" for cell in cells)
    for name, one in found.items():
        lists = {key: value for key, value in one.items() if _is_list(value)}
        for key, value in lists.items():
            if value and (files or key not in ("in_order", "rising")):
                yield f"\n{name}, {key}:"
                yield from (f"  {line}" for line in value)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def main() -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="list the files, in order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    arguments = parser.parse_args()
    found = figures(measure())
    print("\n".join(table(found, files=arguments.files)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
