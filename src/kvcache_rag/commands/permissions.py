"""`kvcache-rag store fix-permissions`: a store's folder for its user only."""

from __future__ import annotations

import os
import re
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.commands.garbage import chosen
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.progress import plain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvcache_rag.stores.listing import NamespaceFolder

DONE, LEFT = 0, 1

_OTHERS = 0o077

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_OF_A_REMOTE = re.compile(r"[0-9a-f]{32}\.epoch|\.tmp-[0-9a-f]{32}")


def run(arguments: argparse.Namespace) -> int:
    """Restrict what others may open, and say it; 1 if something was left as it is."""
    if not hasattr(os, "fchmod"):
        raise InvalidInputError("this system has no modes of files; restrict the folder by its own")
    changed = left = 0
    for found in _restrictions(arguments):
        if found.problem:
            left += 1
            print(f"{plain(found.path)}: left as it is: {found.problem}")
        else:
            changed += 1
            print(f"{_mode(found.before)} -> {_mode(found.after)}  {plain(found.path)}")
    if changed or left:
        print(f"{changed} restricted, {left} left as they are")
    else:
        print("nothing was open to others")
    return LEFT if left else DONE


def _restrictions(arguments: argparse.Namespace) -> Iterator[Restriction]:
    root = os.path.realpath(arguments.folder)
    if arguments.namespace is None:
        yield from restrict_root(root)
    for namespace in chosen(arguments):
        yield from restrict_namespace(root, namespace)


def _mode(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"


# ---------------------------------------------------------------------- changing modes
# Others may be writing there meanwhile, so everything is changed through a descriptor of what was
# looked at, and nothing is reached by its path.


@dataclass(frozen=True)
class Restriction:
    """What was done about one file or folder that others may open.

    Attributes:
        path: Where it is.
        before: Its mode.
        after: Its mode now.
        problem: Why it was left as it is, "" if it was changed.
    """

    path: str
    before: int
    after: int
    problem: str = ""


def restrict_root(root: str) -> Iterator[Restriction]:
    """Restrict a store's folder itself, and the files in it that a remote keeps there."""
    with _opened(root, None, follow=True) as folder:
        yield from _restrict(folder, root)
        for name in sorted(os.listdir(folder)):
            if _OF_A_REMOTE.fullmatch(name):
                yield from _entry(folder, name, f"{root}/{name}")


def restrict_namespace(root: str, namespace: NamespaceFolder) -> Iterator[Restriction]:
    """Restrict everything in a tenant's folder, and the folder itself."""
    with _opened(root, None, follow=True) as folder:
        yield from _entry(folder, namespace.name, namespace.path)


def _entry(parent: int, name: str, path: str) -> Iterator[Restriction]:
    """Restrict what has a name in an open folder, and what is below it."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return  # it is gone
    problem = _problem(status)
    if problem:
        if status.st_mode & _OTHERS:
            yield Restriction(path, status.st_mode, status.st_mode, problem)
        return
    try:
        with _opened(name, parent) as descriptor:
            yield from _restrict(descriptor, path)
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                for child in sorted(os.listdir(descriptor)):
                    yield from _entry(descriptor, child, f"{path}/{child}")
    except OSError as error:
        yield Restriction(path, status.st_mode, status.st_mode, error.strerror or str(error))


def _restrict(descriptor: int, path: str) -> Iterator[Restriction]:
    status = os.fstat(descriptor)
    before = status.st_mode
    problem = _problem(status)
    if not before & _OTHERS:
        return
    if problem:
        yield Restriction(path, before, before, problem)
        return
    try:
        os.fchmod(descriptor, stat.S_IMODE(before) & ~_OTHERS)
    except OSError as error:
        yield Restriction(path, before, before, error.strerror or str(error))
        return
    yield Restriction(path, before, before & ~_OTHERS)


def _problem(status: os.stat_result) -> str:
    if stat.S_ISDIR(status.st_mode):
        return ""
    if stat.S_ISLNK(status.st_mode):
        return "a link; what it leads to is left alone"
    if not stat.S_ISREG(status.st_mode):
        return "neither a file nor a folder"
    return "a file that has another name elsewhere" if status.st_nlink > 1 else ""


@contextmanager
def _opened(name: str, parent: int | None, *, follow: bool = False) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY if follow else _FLAGS
    descriptor = os.open(name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
