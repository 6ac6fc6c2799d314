"""`kvcache-rag store fix-permissions`: a store's folder for its user only."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from kvcache_rag.commands.garbage import chosen
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.progress import plain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvcache_rag.stores.permissions import Restriction

DONE, LEFT = 0, 1


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
    from kvcache_rag.stores.permissions import restrict_namespace, restrict_root

    root = os.path.realpath(arguments.folder)
    if arguments.namespace is None:
        yield from restrict_root(root)
    for namespace in chosen(arguments):
        yield from restrict_namespace(root, namespace)


def _mode(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"
