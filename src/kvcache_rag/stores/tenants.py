"""Deleting a namespace on disk, so that nothing comes back.

The file `epoch` in the folder of a namespace is touched by every deletion; its time and length are
the epoch.  A deletion touches it first, then renames every folder beside it away, then removes what
it renamed, then touches it again for those who read a chunk in between.  A writer reads the
epoch, makes a temporary file, and looks at the epoch once more before it renames that file into its
place.  If its temporary file was there before the epoch grew, the deletion takes it away with its
folder, published or not; if it came later, the second look sees the new epoch.  Either way the
writer fails, and no lock is needed: a writer that is killed or stopped at any point can neither
block a deletion nor undo it.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvcache_rag.stores import directory, entries
from kvcache_rag.stores.filetimes import set_times

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

EPOCH = "epoch"
_PASSES = 100


def epoch(folder: str) -> int:
    """A number that grows with every deletion of the namespace of this folder, at first 0.

    It is about the time of the last deletion in nanoseconds, so that folders can be compared.
    """
    with suppress(OSError):
        status = os.lstat(f"{folder}/{EPOCH}")
        if stat.S_ISREG(status.st_mode):
            # Some file systems keep whole seconds: the length grows at any rate.
            return status.st_mtime_ns + status.st_size
    return 0


def check_epoch(folder: str, expected: int) -> None:
    """Refuse what was begun before a deletion.

    Raises:
        OSError: If the namespace was deleted since its epoch was `expected`.
    """
    if epoch(folder) != expected:
        raise OSError("the namespace was deleted meanwhile; what was made before is not kept")


class Epochs:
    """The epochs at which the threads began their work: a lock's holder cannot undo a deletion.

    What a thread computes under `locked` belongs to the epoch at which it took the lock, however
    long it takes.
    """

    def __init__(self) -> None:
        """No thread has begun."""
        self._begun = threading.local()

    @contextmanager
    def hold(self, folders: Iterable[str]) -> Iterator[None]:
        """Note the epochs of namespaces for the length of a block."""
        outer: dict[str, int] = getattr(self._begun, "epochs", {})
        self._begun.epochs = {**{folder: epoch(folder) for folder in set(folders)}, **outer}
        try:
            yield
        finally:
            self._begun.epochs = outer

    def of(self, folder: str) -> int:
        """The epoch that this thread works for."""
        begun: dict[str, int] = getattr(self._begun, "epochs", {})
        return begun[folder] if folder in begun else epoch(folder)


def delete(folder: str, *, durable: bool) -> int:
    """Remove everything in the folder of a namespace but its epoch, which grows.

    Args:
        folder: An existing folder.
        durable: Whether to have it on the medium when this returns.

    Returns:
        How many chunks were removed.

    Raises:
        OSError: If something of it could not be removed.
    """
    dropped = 0
    try:
        _grow(folder, durable=durable)
    except OSError:
        # The disk may be full: make room and try again.
        dropped = _purge(folder)
        _grow(folder, durable=durable)
    dropped += _purge(folder)
    _grow(folder, durable=durable)
    if durable and hasattr(os, "O_DIRECTORY"):
        with directory.opened(folder, directory.FOLDER) as descriptor:
            os.fsync(descriptor)
    return dropped


def _grow(folder: str, *, durable: bool) -> None:
    path = f"{folder}/{EPOCH}"
    later = max(epoch(folder) + 1, time.time_ns())
    with directory.opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as descriptor:
        os.write(descriptor, b".")
        set_times(path, (later, later))
        if durable:
            os.fsync(descriptor)


def _purge(folder: str) -> int:
    # What a reader puts aside meanwhile comes out of the other folders: they go first.
    names = sorted(os.listdir(folder), key=lambda name: name == "quarantine")
    for name in dict.fromkeys([*names, "quarantine"]):
        if name != EPOCH and not name.startswith(directory.DELETED):
            away = f"{folder}/{directory.DELETED}{secrets.token_hex(16)}"
            with suppress(FileNotFoundError):
                os.rename(f"{folder}/{name}", away)
    # All of it, also what another deletion took away a moment before and has not removed yet, and
    # again, because a system call that began before the renaming may still add a file.
    dropped = 0
    failures: list[OSError] = []
    for _ in range(_PASSES):
        left = [name for name in os.listdir(folder) if name.startswith(directory.DELETED)]
        if not left:
            return dropped
        failures = []
        dropped += sum(entries.remove(f"{folder}/{name}", failures) for name in left)
    raise next(iter(failures), OSError(f"{folder} is filled faster than it can be emptied"))
