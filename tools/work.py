"""Count the work of scripted questions, without a clock.

    python tools/work.py            # a table
    python tools/work.py --write    # and write tests/golden/work.json anew

    calls     calls into functions of the package, in all its threads
    opens     files below the store's folder that were opened, folders and lock files included
    read      bytes that were read from them
    copied    bytes that operations of torch wrote that only copy, where our own code called them
    large     tensors and maps of memory of more than 1 MiB that our own code had made
    all_copied, all_large: the same of everybody, transformers included

The model is three random layers over prompts of some 1200 tokens: 1.2 MiB of keys a layer. Every
question is asked twice, each time of a new engine that was asked another one before; where threads
make the counts uneven, it is asked a third time, and the least counts.
"""

from __future__ import annotations

import argparse
import builtins
import gc
import io
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools import scripted
from tools.scripted import QUESTION, Ear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from kvcache_rag import ChunkStore, Engine

GOLDEN: Final = Path(__file__).resolve().parent.parent / "tests" / "golden" / "work.json"
LARGE: Final = 1 << 20
TOKENS: Final = 2
COPYING: Final = frozenset(
    (
        *(
            "copy_",
            "_to_copy",
            "clone",
            "contiguous",
            "cat",
            "stack",
            "repeat",
            "repeat_interleave",
        ),
        *("index_select", "index", "gather", "masked_select", "constant_pad_nd", "roll", "flip"),
        *("index_copy_", "index_copy", "index_put_", "index_put", "scatter_", "scatter"),
        *("slice_scatter", "select_scatter"),
    )
)
_TORCH: Final = f"{os.path.dirname(torch.__file__)}{os.sep}"


@dataclass
class Work:
    """What was done; see the top of the file."""

    calls: int = 0
    opens: int = 0
    read: int = 0
    copied: int = 0
    large: int = 0
    all_copied: int = 0
    all_large: int = 0


def _is_our_call() -> bool:
    """Whether the nearest frame that is neither torch's nor of this file is ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((_TORCH, "<")):
            return file.startswith(f"{scripted.SOURCE}{os.sep}")
        frame = frame.f_back
    return False


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of one thread."""

    def __init__(self, work: Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do it, and count what it copied and made."""
        given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = _tensors(result)
        copied = 0
        if func.overloadpacket.__name__ in COPYING:
            copied = sum(one.numel() * one.element_size() for one in made)
        storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in made}
        large = sum(size > LARGE for key, size in storages.items() if key not in given)
        if copied or large:
            is_ours = _is_our_call()
            self._work.all_copied += copied
            self._work.all_large += large
            self._work.copied += copied * is_ours
            self._work.large += large * is_ours
        return result


@contextmanager
def _operations(work: Work) -> Iterator[None]:
    """Count operations of torch in this thread and in those that begin meanwhile."""
    real = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with _Operations(work):
            real(self)

    with mock.patch.object(threading.Thread, "run", run), _Operations(work):
        yield


@contextmanager
def _reading(work: Work, folder: Path) -> Iterator[None]:
    """Count bytes that are read from files below a folder."""
    root, ours = f"{folder}{os.sep}", set()
    real = {
        name: getattr(os, name)
        for name in ("open", "close", "read", "pread", "preadv", "readv")
        if hasattr(os, name)
    }
    plain = builtins.open

    def os_open(path: Any, *rest: Any, **options: Any) -> int:
        descriptor: int = real["open"](path, *rest, **options)
        if os.fsdecode(path).startswith(root):
            ours.add(descriptor)
        return descriptor

    def os_close(descriptor: int) -> None:
        ours.discard(descriptor)
        real["close"](descriptor)

    def reader(name: str, descriptor: int, *rest: Any) -> Any:
        got = real[name](descriptor, *rest)
        if descriptor in ours:
            work.read += got if isinstance(got, int) else len(got)
        return got

    def whole(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        file = plain(path, mode, *rest, **options)
        is_path = isinstance(path, str | bytes | os.PathLike)
        if is_path and os.fsdecode(path).startswith(root) and "r" in mode:
            work.read += os.fstat(file.fileno()).st_size  # as if it were read to its end
        return file

    with ExitStack() as stack:
        for name in real:
            mine = {"open": os_open, "close": os_close}.get(name, partial(reader, name))
            stack.enter_context(mock.patch.object(os, name, mine))
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", whole))
        yield


@contextmanager
def _mapping(work: Work) -> Iterator[None]:
    """Count maps of memory, which torch does not know of."""
    real = mmap.mmap

    def made(fileno: int, length: int, *rest: Any, **options: Any) -> mmap.mmap:
        if length > LARGE:
            is_ours = _is_our_call()
            work.all_large += 1
            work.large += is_ours
        return real(fileno, length, *rest, **options)

    with mock.patch.object(mmap, "mmap", made):
        yield


def counted(ear: Ear, folder: Path, run: Callable[[], object]) -> Work:
    """What a run does over a store in `folder`."""
    work, lock = Work(), threading.Lock()

    def opened(_: str) -> None:
        work.opens += 1

    def entered(_: FrameType) -> None:
        with lock:
            work.calls += 1

    gc.disable()  # what ends meanwhile is not this run's
    try:
        with (
            scripted.opens(folder, opened),
            _reading(work, folder),
            _mapping(work),
            _operations(work),
            ear.hearing(entered),
        ):
            run()
    finally:
        gc.enable()
    return work


def chunks() -> list[str]:
    """Three chunks that are asked about, and two that were before."""
    return scripted.texts(5, 14)


def disk(folder: Path, **options: Any) -> ChunkStore:
    """A store on disk, not waited for."""
    from kvcache_rag import DiskStore

    return DiskStore(folder, durable=False, **options)


def memory(_: Path) -> ChunkStore:
    """A store in memory."""
    from kvcache_rag import MemoryStore

    return MemoryStore()


@cache
def _stored(make: Callable[[Path], ChunkStore], missing: int) -> tempfile.TemporaryDirectory[str]:
    """A folder with the chunks but for the first `missing`, till the process ends."""
    place = tempfile.TemporaryDirectory()
    scripted.wide_engine(make(Path(place.name) / "kv")).add(chunks()[missing:])
    return place


def asked(
    folder: Path,
    ask: Callable[[Engine, list[str]], object],
    *,
    make: Callable[[Path], ChunkStore] = disk,
    missing: int = 0,
    **options: Any,
) -> Callable[[], object]:
    """A question to an engine that has its chunks but for `missing`, and was asked another one."""
    texts = chunks()
    if make is not memory:
        shutil.copytree(Path(_stored(make, missing).name) / "kv", folder)
    engine = scripted.wide_engine(make(folder), **options)
    if make is memory:
        engine.add(texts[missing:])
    # Two chunks: no rate of this machine is known yet, so none decides anything.
    ask(engine, texts[3:])
    return lambda: ask(engine, texts[:3])


def _generate(engine: Engine, texts: list[str], **options: Any) -> object:
    return engine.generate(QUESTION, texts, max_new_tokens=TOKENS, **options)


def _policy(name: str) -> Callable[[Engine, list[str]], object]:
    from kvcache_rag import policy_by_name

    return partial(_generate, policy=policy_by_name(name))


def _batch(engine: Engine, texts: list[str]) -> object:
    questions = [(f"{QUESTION} {at}", [text]) for at, text in enumerate(texts)]
    return engine.generate_batch(questions, max_new_tokens=TOKENS)


def _stream(engine: Engine, texts: list[str]) -> object:
    return list(engine.stream(QUESTION, texts, max_new_tokens=TOKENS))


def _int8(folder: Path) -> ChunkStore:
    from kvcache_rag import Int8

    return disk(folder, codec=Int8())


def _tiered(folder: Path) -> ChunkStore:
    from kvcache_rag import MemoryStore, TieredStore

    return TieredStore(MemoryStore(), disk(folder))


SCRIPTS: Final[dict[str, Callable[[Path], Callable[[], object]]]] = {
    "disk": lambda folder: asked(folder, _generate),
    "memory": lambda folder: asked(folder, _generate, make=memory),
    "tiered": lambda folder: asked(folder, _generate, make=_tiered),
    "int8": lambda folder: asked(folder, _generate, make=_int8),
    "deferred": lambda folder: asked(folder, _generate, make=memory, rotation="deferred"),
    "deferred_disk": lambda folder: asked(folder, _generate, rotation="deferred"),
    "legolink": lambda folder: asked(folder, _policy("legolink")),
    "cacheblend": lambda folder: asked(folder, _policy("cacheblend")),
    "full": lambda folder: asked(folder, _policy("full")),
    "combination": lambda folder: asked(folder, _policy("combination")),
    "missing": lambda folder: asked(folder, _generate, missing=1),
    "batch": lambda folder: asked(folder, _batch),
    "stream": lambda folder: asked(folder, _stream),
    "add": lambda folder: asked(folder, lambda engine, texts: engine.add(texts), missing=3),
    "explain": lambda folder: asked(folder, lambda engine, texts: engine.explain(QUESTION, texts)),
    "logits": lambda folder: asked(folder, lambda engine, texts: engine.logits(QUESTION, texts)),
}


def warm_up() -> None:
    """Let happen what happens once in a process, so that it is not counted."""
    _once(next(iter(SCRIPTS)))


def measured(name: str) -> tuple[Work, list[Work]]:
    """The least of the runs of a script, and the runs."""
    runs = [_once(name), _once(name)]
    if runs[0] != runs[1]:
        runs.append(_once(name))
    fields = [asdict(run) for run in runs]
    return Work(**{key: min(one[key] for one in fields) for key in fields[0]}), runs


def _once(name: str) -> Work:
    ear = Ear()
    with scripted.same_machine(), ear.ready(), tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve() / "kv"
        return counted(ear, folder, SCRIPTS[name](folder))


def versions() -> dict[str, str]:
    """What the counts depend on."""
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "platform": sys.platform,
        "torch": version("torch").partition("+")[0],
        "transformers": version("transformers"),
    }


def comparable(recorded: Mapping[str, str]) -> frozenset[str]:
    """The counts that can be held against those of other versions.

    Calls are those of one Python; what everybody does is that of one torch and transformers.
    """
    same = {key for key, value in versions().items() if recorded.get(key) == value}
    names = {"opens", "read"}
    names |= {"calls"} if {"python", "platform"} <= same else set()
    names |= {"copied", "large"} if "torch" in same else set()
    names |= {"all_copied", "all_large"} if {"torch", "transformers"} <= same else set()
    return frozenset(names)


def main() -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write tests/golden/work.json")
    parser.add_argument("names", nargs="*", metavar="SCRIPT", help=", ".join(SCRIPTS))
    arguments = parser.parse_args()
    if arguments.write and arguments.names:
        parser.error("--write writes every script; name none")
    found = {}
    warm_up()
    print(f"{'':14}" + "".join(f"{key:>12}" for key in asdict(Work())))
    for name in arguments.names or SCRIPTS:
        least, runs = measured(name)
        found[name] = asdict(least)
        uneven = "" if all(run == least for run in runs) else f"  uneven: {runs}"
        print(f"{name:14}" + "".join(f"{value:>12}" for value in found[name].values()) + uneven)
    if arguments.write:
        GOLDEN.parent.mkdir(exist_ok=True)
        text = json.dumps({"versions": versions(), "work": found}, indent=2)
        GOLDEN.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
