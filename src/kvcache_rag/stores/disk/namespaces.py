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
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvcache_rag.stores.disk import folders
from kvcache_rag.stores.disk.folders import set_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvcache_rag.stores.base import ChunkStore


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
        with folders.opened(folder, folders.FOLDER) as descriptor:
            os.fsync(descriptor)
    return dropped


def _grow(folder: str, *, durable: bool) -> None:
    path = f"{folder}/{EPOCH}"
    later = max(epoch(folder) + 1, time.time_ns())
    with folders.opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as descriptor:
        os.write(descriptor, b".")
        set_times(path, (later, later))
        if durable:
            os.fsync(descriptor)


def _purge(folder: str) -> int:
    # What a reader puts aside meanwhile comes out of the other folders: they go first.
    names = sorted(os.listdir(folder), key=lambda name: name == "quarantine")
    for name in dict.fromkeys([*names, "quarantine"]):
        if name != EPOCH and not name.startswith(folders.DELETED):
            away = f"{folder}/{folders.DELETED}{secrets.token_hex(16)}"
            with suppress(FileNotFoundError):
                os.rename(f"{folder}/{name}", away)
    # All of it, also what another deletion took away a moment before and has not removed yet, and
    # again, because a system call that began before the renaming may still add a file.
    dropped = 0
    failures: list[OSError] = []
    for _ in range(_PASSES):
        left = [name for name in os.listdir(folder) if name.startswith(folders.DELETED)]
        if not left:
            return dropped
        failures = []
        dropped += sum(folders.remove(f"{folder}/{name}", failures) for name in left)
    raise next(iter(failures), OSError(f"{folder} is filled faster than it can be emptied"))


# Noticing that another process deleted a namespace.


class EpochWatch:
    """The epochs of a store's namespaces, as last seen.

    Attributes:
        store: The store that is asked.
        recheck: Seconds after which a number is looked at again.
    """

    def __init__(self, store: ChunkStore, recheck: float) -> None:
        """Know nothing yet."""
        self.store = store
        self.recheck = recheck
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}  # when, and which number
        self._undone: set[str] = set()  # what a change asked for could not be done

    def look(self, namespace: str) -> tuple[int | None, int]:
        """The number seen before, None when there was none, and the one of now.

        The two are equal when the last look is young enough; of several threads that look at once,
        one is told of a change.  After `undone` the one before is -1.
        """
        with self._lock:
            seen = self._seen.get(namespace)
        if seen is not None and time.monotonic() - seen[0] < self.recheck:
            return seen[1], seen[1]
        now = self.store.epoch(namespace)
        with self._lock:
            before = self._seen.get(namespace)
            self._seen[namespace] = (time.monotonic(), now)
            if namespace in self._undone:
                self._undone.discard(namespace)
                return -1, now
        return (None if before is None else before[1]), now

    def number(self, namespace: str) -> int:
        """The number as last seen, however long ago."""
        with self._lock:
            seen = self._seen.get(namespace)
        return self.store.epoch(namespace) if seen is None else seen[1]

    def accept(self, namespace: str) -> None:
        """Take the number of now for seen: the deletion was this process's own."""
        now = self.store.epoch(namespace)
        with self._lock:
            self._seen[namespace] = (time.monotonic(), now)

    def undone(self, namespace: str) -> None:
        """Look anew when next asked, and tell of a change whatever is seen."""
        with self._lock:
            self._seen.pop(namespace, None)
            self._undone.add(namespace)

    def namespaces(self) -> list[str]:
        """Those that were looked at."""
        with self._lock:
            return list(self._seen)


def forgotten(store: ChunkStore, watch: EpochWatch, namespace: str, failures: list[OSError]) -> int:
    """Drop a namespace in a store, and know its new epoch for our own doing.

    Returns:
        How many chunks were dropped; 0 after an error, which is added to `failures`.
    """
    try:
        dropped = store.delete_namespace(namespace)
        watch.accept(namespace)
    except OSError as error:
        failures.append(error)
        return 0
    return dropped


class IdleLooks:
    """Calls a method of an object every `seconds`, in a daemon thread, for as long as it lives."""

    def __init__(self, look: Callable[[], None], seconds: float) -> None:
        """Take a bound method; nothing runs yet."""
        self.seconds = seconds
        self._look = weakref.WeakMethod(look)
        self._process = 0

    def start(self) -> None:
        """Start the thread unless this process has it."""
        if self._process != os.getpid():  # threads do not survive a fork
            self._process = os.getpid()
            thread = threading.Thread(
                target=_repeat,
                args=(self._look, self.seconds),
                name="kvcache-rag-epochs",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads: who asks next tries again
                self._process = 0


def _repeat(method: weakref.WeakMethod[Callable[[], None]], seconds: float) -> None:
    while True:
        time.sleep(seconds)
        look = method()
        if look is None:
            return
        look()
        del look  # or the object would live until the next round
