"""Changes to a store's folder that need no model: let go, take back, put aside, tidy up.

They work on what `inventory` found, by digests and marks, since the names of tenants and owners
cannot be read back from a folder.  Each is one rename or one unlink, so a store in use goes on.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcache_rag.stores.directory import MAX_QUARANTINED, make_folder
from kvcache_rag.stores.inventory import QUARANTINE
from kvcache_rag.stores.ownership import identity, release_mark

if TYPE_CHECKING:
    from kvcache_rag.stores.inventory import Leftover, NamespaceFolder, StoredFile

_MARK = re.compile(r"[0-9a-f]{16}")


def owner_mark(owner: str) -> str:
    """The id by which files know an owner; an id itself stays as it is."""
    return owner if _MARK.fullmatch(owner) else identity(owner)


def let_go(file: StoredFile, mark: str) -> bool:
    """Turn an owner's claim into a tombstone of this moment.

    Returns:
        False if there is no claim any more, or one that was made since `file` was listed.

    Raises:
        OSError: If the folder cannot be written.
    """
    try:
        if os.lstat(f"{file.stem}.owner-{mark}").st_mtime != file.owners.get(mark):
            return False
        release_mark(file.stem, mark)
    except FileNotFoundError:
        return False
    return True


def take_back(file: StoredFile, mark: str) -> None:
    """Undo `let_go`.

    Raises:
        OSError: If the folder cannot be written.
    """
    with suppress(FileNotFoundError):
        os.replace(f"{file.stem}.released-{mark}", f"{file.stem}.owner-{mark}")


def put_aside(
    namespace: NamespaceFolder, file: StoredFile, found: os.stat_result | None = None
) -> None:
    """Move a damaged file into the namespace's quarantine, of which the newest few stay.

    Args:
        namespace: Where it lies.
        file: The file.
        found: Its status when it was found damaged: another one in its place stays.

    Raises:
        OSError: If the folder cannot be written.
    """
    folder = f"{namespace.path}/{QUARANTINE}"
    make_folder(os.path.dirname(namespace.path), folder)
    with suppress(FileNotFoundError):
        now = os.lstat(file.path)
        if found is not None and (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
            return
        os.replace(file.path, f"{folder}/{time.time_ns():020d}-{file.digest}")
    kept = sorted(namespace.quarantined(), key=lambda found: found.path)
    for old in kept[:-MAX_QUARANTINED]:
        discard(old)


def discard(found: Leftover) -> bool:
    """Remove a leftover; False if it is gone already."""
    with suppress(FileNotFoundError):
        os.unlink(found.path)
        return True
    return False
