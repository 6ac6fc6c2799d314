"""Who uses a chunk on disk: empty marker files beside it.

`<digest>.owner-<id>` says that an owner uses the chunk, `<digest>.released-<id>` that it stopped at
the marker's mtime; `<id>` is a digest of the owner's name.  One rename turns one into the other, so
an owner never has both for good.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress


def claim(stem: str, owner: str) -> None:
    """Mark the chunk at path `stem` (without suffix) as used by `owner`; its folder must exist.

    Raises:
        OSError: If the marker cannot be made.
    """
    identity = _identity(owner)
    # The claim is made before the release is undone, so a sweep in between sees a claim.
    os.close(os.open(f"{stem}.owner-{identity}", os.O_WRONLY | os.O_CREAT, 0o600))
    with suppress(FileNotFoundError):
        os.unlink(f"{stem}.released-{identity}")


def release(stem: str, owner: str) -> None:
    """Turn the owner's mark into a tombstone of this moment.

    Raises:
        OSError: If it cannot be done; `FileNotFoundError` if the owner has no mark.
    """
    identity = _identity(owner)
    mark = f"{stem}.owner-{identity}"
    os.utime(mark)  # before the rename, so that no sweep sees a tombstone as old as the claim
    os.replace(mark, f"{stem}.released-{identity}")


def _identity(owner: str) -> str:
    return hashlib.sha256(owner.encode()).hexdigest()[:16]
