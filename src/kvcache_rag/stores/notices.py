"""What a store has to say once: whose folder others may open, or this process may not.

A store goes on in either case, and would say the same at every chunk.
"""

from __future__ import annotations

import logging
import os
import shlex
import stat
import threading
from contextlib import suppress

_LOG = logging.getLogger(__name__)

_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH

_lock = threading.Lock()

_said: set[tuple[str, str]] = set()


def check_open(root: str, path: str, mode: int) -> None:
    """Say once per store and process that others may read or write a folder of it.

    Args:
        root: Folder of the store.
        path: The folder that was looked at.
        mode: Its mode.
    """
    if os.name != "posix" or not mode & _OTHERS or not stat.S_ISDIR(mode):
        return
    if _is_new("open", root):
        _LOG.warning(
            "other users may read or write %r, and a cache is as sensitive as its texts; restrict "
            "the store's folder by: kvcache-rag store fix-permissions %s",
            path,
            shlex.quote(root),
        )


def denied(root: str, path: str) -> None:
    """Say once per store and process that what is there may not be read.

    Args:
        root: Folder of the store.
        path: What could not be opened or looked at.
    """
    if _is_new("denied", root):
        owner = ""
        with suppress(OSError):
            owner = f" (it belongs to user {os.lstat(path).st_uid}, this is user {os.geteuid()})"
        _LOG.warning(
            "%r may not be read%s, so what the store holds is prefilled again every time; run as "
            "the owner of %r, or give the folder to this user by chown -R",
            path,
            owner,
            root,
        )


def _is_new(kind: str, root: str) -> bool:
    with _lock:
        before = len(_said)
        _said.add((kind, root))
        return len(_said) > before
