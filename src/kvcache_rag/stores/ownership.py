"""Who uses a chunk on disk: empty marker files beside it.

`<digest>.owner-<id>` says that an owner uses the chunk, `<digest>.released-<id>` that it stopped at
the marker's mtime; `<id>` is a digest of the owner's name.  One rename turns one into the other, so
an owner never has both for good.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcache_rag.stores.entries import TEMPORARY
from kvcache_rag.stores.filetimes import set_times

if TYPE_CHECKING:
    from collections.abc import Callable


def claim(stem: str, owner: str, check: Callable[[], None]) -> None:
    """Mark the chunk at path `stem` (without suffix) as used by `owner`; its folder must exist.

    Args:
        stem: Path of the chunk.
        owner: Who uses it.
        check: Called before the mark is published; raises when it must not be any more.

    Raises:
        OSError: If the marker cannot be made.
    """
    mark = identity(owner)
    temporary = f"{os.path.dirname(stem)}/{TEMPORARY}-{secrets.token_hex(16)}"
    # Renamed, not opened: a link in the place of the mark is replaced and not followed.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        check()
        os.replace(temporary, f"{stem}.owner-{mark}")
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    # The claim is made before the release is undone, so a sweep in between sees a claim.
    with suppress(FileNotFoundError):
        os.unlink(f"{stem}.released-{mark}")


def release(stem: str, owner: str) -> None:
    """Turn the owner's mark into a tombstone of this moment.

    Raises:
        OSError: If it cannot be done; `FileNotFoundError` if the owner has no mark.
    """
    release_mark(stem, identity(owner))


def release_mark(stem: str, mark: str) -> None:
    """Turn the mark of an owner, known by `identity`, into a tombstone of this moment.

    Raises:
        OSError: If it cannot be done; `FileNotFoundError` if the owner has no mark.
    """
    # Before the rename, so that no sweep sees a tombstone as old as the claim.
    set_times(f"{stem}.owner-{mark}")
    os.replace(f"{stem}.owner-{mark}", f"{stem}.released-{mark}")


def identity(owner: str) -> str:
    """The 16 hexadecimal digits by which an owner is known on disk."""
    return hashlib.sha256(owner.encode()).hexdigest()[:16]
