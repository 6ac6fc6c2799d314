"""Bytes in a folder, one file per name, shared by every process that opens it.

    root/<name>                           a file, published in one step by renaming it
    root/<folder of a name>/.tmp-*        one that is being written
    root/<name of a lock>.lock
    root/<first part>/quarantine/<time>-* damaged files, of which the newest few stay
    root/<first part>/.deleted-*          what is being deleted

In the root itself only folders named by 32 hexadecimal digits are listed; nothing else in it is
ours.  Below it no link is followed: a link or a file in place of a folder is refused.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores import filesystem as fs
from kvcache_rag.stores.bytes import GENERATION, ByteStore, Entry
from kvcache_rag.stores.locks import hold_file
from kvcache_rag.stores.object_names import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from io import FileIO

    from kvcache_rag.stores.bytes import Blob, Buffer

QUARANTINE = "quarantine"

MAX_QUARANTINED = 4  # of each folder in the root

DELETED = ".deleted-"

USED_AGAIN = 60.0  # seconds: a file that was marked as used within them is not marked again

_OURS = re.compile(r"[0-9a-f]{32}")

_PASSES = 100


class Folder(ByteStore):
    """Files below `root`, which is made when something is put.

    A file's mtime is its last use.  With `dated` it is the time of its writing, and the last use
    is its atime, which is what the two names mean.

    Attributes:
        root: Absolute path.
        durable: Whether what is put is on the medium when `put` returns.
        dated: Whether times of writing are kept.
    """

    excludes_processes = True

    def __init__(self, root: str, *, durable: bool = True, dated: bool = False) -> None:
        """Look at nothing yet."""
        self.root, self.durable, self.dated = root, durable, dated

    def path(self, name: str) -> str:
        """Where the file of a name is or would be."""
        return f"{self.root}/{name}"

    def get(self, name: str, most: int | None = None) -> FileIO | None:
        del most
        path = self.path(name)
        try:
            fs.check_folder(self.root, os.path.dirname(path))
            descriptor, status = fs.open_file(path, fs.READ)
        except FileNotFoundError:
            return None
        except fs.NotAFileError as error:
            raise CorruptChunkError(f"it is not a file: {error}") from None
        if abs(time.time() - self._last_use(status)) > USED_AGAIN:
            with suppress(OSError):  # in a read-only folder nothing is marked, nor evicted
                times = (time.time_ns(), status.st_mtime_ns) if self.dated else None
                fs.set_times(path, times)
        return open(descriptor, "rb", buffering=0)

    def put(
        self,
        name: str,
        pieces: Sequence[Buffer],
        allowed: Callable[[], bool] | None = None,
    ) -> bool:
        """Write a file and rename it.

        A deletion that begins after `allowed` was asked finds the file, finished or not, and takes
        it away; after one that began before, `allowed` says no.  So whoever is killed or stopped
        here undoes no deletion.
        """
        path, durable = self.path(name), self.durable and allowed is not None
        folder = os.path.dirname(path)
        fs.make_folder(self.root, folder)
        temporary = fs.temporary_path(folder)
        try:
            with fs.opened(temporary, fs.NEW) as descriptor:
                if hasattr(os, "fchmod"):  # whatever the umask
                    os.fchmod(descriptor, 0o600)
                for piece in pieces:
                    fs.write_all(descriptor, piece)
                if durable:
                    os.fsync(descriptor)
            if allowed is not None and not allowed():
                return False
            if os.path.isdir(path) and not os.path.islink(path):
                fs.remove(path, [])  # nothing of ours
            os.replace(temporary, path)
        finally:
            fs.unlink(temporary)
        if durable:
            fs.sync_folder(folder)
        return True

    def delete(self, names: Iterable[str], *, damaged: Blob | None = None) -> int:
        gone = 0
        for name in names:
            path = self.path(name.rstrip("/"))
            with suppress(FileNotFoundError):
                fs.check_folder(self.root, os.path.dirname(path))
                if name.endswith("/"):
                    gone += self._clear(path)
                elif os.path.basename(name).startswith(DELETED):
                    gone += fs.remove(path, [])
                elif damaged is not None:
                    gone += self._put_aside(name, damaged)
                else:
                    os.unlink(path)
                    gone += name.endswith(SUFFIX)
        return gone

    def list(self, prefix: str) -> Iterator[Entry]:
        """A walk, folder by folder; what vanishes meanwhile was not there.

        What a wrong clock dated more than a minute ahead is dated anew, for else it would never
        become old.
        """
        if prefix and not prefix.endswith("/"):
            with suppress(OSError):
                path = self.path(prefix)
                fs.check_folder(self.root, os.path.dirname(path))
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    yield self._entry(prefix, status)
            return
        with suppress(OSError):
            fs.check_folder(self.root, self.path(prefix.rstrip("/")).rstrip("/"))
            yield from self._below(prefix)

    def lock(self, name: str, patience: float | None = None) -> AbstractContextManager[bool]:
        return hold_file(f"{self.path(name)}.lock", partial(fs.make_folder, self.root), patience)

    def _last_use(self, status: os.stat_result) -> float:
        return max(status.st_atime, status.st_mtime) if self.dated else status.st_mtime

    def _entry(self, name: str, status: os.stat_result) -> Entry:
        return Entry(name, status.st_size, status.st_mtime, self._last_use(status))

    def _below(self, prefix: str) -> Iterator[Entry]:
        with os.scandir(self.path(prefix)) as items:
            found = sorted(items, key=lambda item: item.name)
        for item in found:
            with suppress(OSError):
                if not item.is_dir(follow_symlinks=False):
                    if prefix:
                        yield self._dated_right(prefix + item.name, item)
                elif item.name.startswith(DELETED):
                    nbytes = sum(entry.nbytes for entry in self._below(f"{prefix}{item.name}/"))
                    yield replace(self._dated_right(prefix + item.name, item), nbytes=nbytes)
                elif prefix or _OURS.fullmatch(item.name):
                    yield from self._below(f"{prefix}{item.name}/")

    def _dated_right(self, name: str, item: os.DirEntry[str]) -> Entry:
        status = item.stat(follow_symlinks=False)
        if status.st_mtime > time.time() + USED_AGAIN:
            with suppress(OSError):
                fs.set_times(item.path)
            status = os.lstat(item.path)
        entry = self._entry(name, status)
        latest = time.time() + USED_AGAIN
        return Entry(name, entry.nbytes, min(entry.written, latest), min(entry.used, latest))

    def _put_aside(self, name: str, damaged: Blob) -> int:
        """Rename a damaged file, unless another one is in its place now; a link as such."""
        path, now = self.path(name), os.lstat(self.path(name))
        if hasattr(damaged, "fileno"):
            if not os.path.samestat(os.fstat(damaged.fileno()), now):
                return 0
        elif stat.S_ISREG(now.st_mode):
            return 0
        aside = self.path(f"{name.partition('/')[0]}/{QUARANTINE}")
        fs.make_folder(self.root, aside)
        stem = os.path.basename(path).removesuffix(SUFFIX)
        os.replace(path, f"{aside}/{time.time_ns():020d}-{stem}")
        for old in sorted(os.listdir(aside))[:-MAX_QUARANTINED]:
            fs.remove(f"{aside}/{old}", [])
        return 1

    def _clear(self, folder: str) -> int:
        """Remove all that a folder holds, at once out of sight of readers.

        Raises:
            OSError: If something of it could not be removed.
        """
        # What a reader puts aside meanwhile comes out of the other folders: they go first.
        names = sorted(os.listdir(folder), key=lambda name: name == QUARANTINE)
        for name in dict.fromkeys([*names, QUARANTINE]):
            if name != GENERATION and not name.startswith(DELETED):
                with suppress(FileNotFoundError):
                    os.rename(f"{folder}/{name}", f"{folder}/{DELETED}{secrets.token_hex(16)}")
        # All of it, also what another deletion took away a moment before and has not removed yet,
        # and again, because a system call that began before the renaming may still add a file.
        removed = 0
        failures: list[OSError] = []
        for _ in range(_PASSES):
            leftovers = [name for name in os.listdir(folder) if name.startswith(DELETED)]
            if not leftovers:
                if self.durable:
                    fs.sync_folder(folder)
                return removed
            failures = []
            removed += sum(fs.remove(f"{folder}/{name}", failures) for name in leftovers)
        raise next(iter(failures), OSError(f"{folder} is filled faster than it can be emptied"))
