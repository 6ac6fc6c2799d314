"""Scripted questions over tiny models, and an ear for every function of ours that is entered.

Of `tools/walks.py`.  The scripts use public names only, so they say the
same of two versions of the code.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from kvcache_rag import Engine
    from kvcache_rag.stores import ChunkStore

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SOURCE: Final = Path(__file__).resolve().parent.parent / "src" / "kvcache_rag"
_ROOT: Final = f"{SOURCE}{os.sep}"
_GENERATORS: Final = 0x20 | 0x80 | 0x200
QUESTION: Final = "Where does Mira keep the red lamp?"


@cache
def is_ours(code: CodeType) -> bool:
    """Whether it is a function of the package; a module's own code and comprehensions are none."""
    name = code.co_name
    return code.co_filename.startswith(_ROOT) and (name[0] != "<" or name == "<lambda>")


@cache
def _begin(code: CodeType) -> int | None:
    """The last instruction at which a generator has just begun; None for a plain function."""
    if not code.co_flags & _GENERATORS:
        return None
    offsets = (one.offset for one in dis.get_instructions(code) if one.opname == "RESUME")
    return next(offsets, -1)


def is_entered(frame: FrameType) -> bool:
    """Whether a `call` event is a call, and not a generator or coroutine that goes on."""
    begin = _begin(frame.f_code)
    return begin is None or frame.f_lasti <= begin


def caller(frame: FrameType) -> FrameType | None:
    """The nearest calling frame of ours, through whatever lies between."""
    back = frame.f_back
    while back is not None and not is_ours(back.f_code):
        back = back.f_back
    return back


def depth(frame: FrameType | None) -> int:
    """How many frames of ours a frame stands on, itself included."""
    count = 0
    while frame is not None:
        count += is_ours(frame.f_code)
        frame = frame.f_back
    return count


class Ear:
    """Hears every entry of a function of ours in every thread that begins after it was made."""

    def __init__(self) -> None:
        self._hear: Callable[[FrameType], None] | None = None

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        hear = self._hear
        if hear is not None and event == "call" and is_ours(frame.f_code) and is_entered(frame):
            hear(frame)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Threads that begin in here can be heard."""
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def hearing(self, hear: Callable[[FrameType], None]) -> Iterator[None]:
        """Call `hear` at every entry, until the end or `deaf`."""
        before = sys.getprofile()
        self._hear = hear
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            self._hear = None

    def deaf(self) -> None:
        """Hear nothing more."""
        self._hear = None


_watchers: list[Callable[[str], None]] = []
_is_hooked: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watchers:
        path = arguments[0]
        if isinstance(path, str | bytes | os.PathLike):
            for watcher in tuple(_watchers):
                watcher(os.fsdecode(path))


@contextmanager
def opens(folder: Path, heard: Callable[[str], None]) -> Iterator[None]:
    """Call `heard` with every path below a folder that is opened, also of a lock file."""
    if not _is_hooked:
        sys.addaudithook(_hook)  # stays as long as the process
        _is_hooked.append(True)
    root = f"{folder}{os.sep}"

    def watcher(path: str) -> None:
        if path.startswith(root):
            heard(path)

    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def same_machine() -> Iterator[None]:
    """One thread of torch and one processor to spare, whatever this machine has."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        if hasattr(os, "sched_getaffinity"):
            stack.enter_context(mock.patch("os.sched_getaffinity", return_value={0, 1}))
        stack.enter_context(mock.patch("os.cpu_count", return_value=2))
        yield


def reader_engine(store: ChunkStore, **options: Any) -> Engine:
    """An engine of the packaged reader."""
    from kvcache_rag import Engine
    from kvcache_rag_lab.reader import model_path

    return Engine.from_pretrained(model_path(), store=store, device="cpu", **options)


def texts(count: int, sentences: int = 12, *, first: int = 0) -> list[str]:
    """Chunks of different words, `sentences` of some 25 tokens each."""
    colours = ("red", "blue", "old", "green")
    return [
        " ".join(
            f"Box {line} stands in room {(first + chunk) * 7 + line * 3} beside the "
            f"{colours[(chunk + line) % 4]} lamp of Mira."
            for line in range(sentences)
        )
        for chunk in range(count)
    ]
