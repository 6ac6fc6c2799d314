"""Files and folders below a root, safe against whatever others put in their place.

A link, a pipe, a socket or a device in place of a file is neither opened nor followed; a link in
place of a folder is refused.  Everything made here is for this user only.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvcache_rag.stores.object_names import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator


_ALWAYS = 0

# O_NONBLOCK: a pipe that was put in place of a file a moment ago must not stop us.
for _flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
    _ALWAYS |= getattr(os, _flag, 0)

READ = os.O_RDONLY

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class NotAFileError(OSError):
    """A link, a pipe, a socket, a device or a folder is where a file of the store belongs."""

    def __init__(self, path: str) -> None:
        """Say where it is, and that it was not opened."""
        reason = "something else than a file is where one of the store belongs; remove it"
        super().__init__(errno.EINVAL, reason, path)


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A descriptor of the file that is at `path` itself, as `open_file` gives it."""
    descriptor = open_file(path, flags)[0]
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(path: str, flags: int) -> tuple[int, os.stat_result]:
    """Open the file that is at `path` itself.

    It is looked at before, because opening alone can start a device or wake who waits at a pipe,
    and after, because it may have been replaced in between.

    Returns:
        Descriptor, which the caller closes, and status.

    Raises:
        NotAFileError: If it is no file.
        OSError: If it cannot be opened.
    """
    if not flags & os.O_EXCL:
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise NotAFileError(path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
    descriptor = os.open(path, flags | _ALWAYS, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise NotAFileError(path)
    return descriptor, status


def check_lock(path: str) -> None:
    """Make sure that there is nothing at `path`, or a file that may be emptied.

    Raises:
        NotAFileError: If there is something else, or a second name of a file with content.
        OSError: If it cannot be looked at.
    """
    with suppress(FileNotFoundError):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or (status.st_nlink > 1 and status.st_size):
            raise NotAFileError(path)


def sync_folder(path: str) -> None:
    """Have the names in a folder on the medium, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _ALWAYS)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def temporary_path(folder: str) -> str:
    """A name in `folder` for what is not finished."""
    return f"{folder}/.tmp-{secrets.token_hex(16)}"


def check_folder(root: str, path: str) -> None:
    """Make sure that `path` and everything between it and `root` are folders, not links to some.

    Raises:
        OSError: If one is missing or something else.
    """
    if path == root:
        return
    check_folder(root, os.path.dirname(path))
    _check_one(path)


def why_unwritable(path: str | os.PathLike[str]) -> str:
    """Why no file can be made in a folder; "" if one can."""
    try:
        with tempfile.TemporaryFile(dir=os.path.abspath(path)):  # permissions alone do not say it
            return ""
    except OSError as error:
        return error.strerror or str(error)


def private_folder(path: str) -> None:
    """Make a folder and missing parents, for this user only, whatever the umask.

    Existing ones are left as they are.  `os.makedirs` would give the parents the umask's rights.

    Raises:
        OSError: If it cannot be made.
    """
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    if above and above != path:
        private_folder(above)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def make_folder(root: str, path: str) -> None:
    """Make `path` and what is missing between it and `root`, for this user only.

    Raises:
        OSError: If it cannot be made, or a link or a file is in its place.
    """
    if path == root:
        private_folder(path)
        return
    make_folder(root, os.path.dirname(path))
    try:
        _check_one(path)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        _check_one(path)


def _check_one(path: str) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        reason = "a link or a file is where a folder of the store belongs; remove it"
        raise NotADirectoryError(errno.ENOTDIR, reason, path)


def unlink(path: str) -> bool:
    """Remove a file; False when there is none or it cannot be removed."""
    with suppress(OSError):
        os.unlink(path)
        return True
    return False


def remove(path: str, failures: list[OSError]) -> int:
    """Remove a file, a link or a folder with all it holds; a link is not followed.

    Args:
        path: What to remove; it may be gone already.
        failures: What could not be removed is noted here; the rest goes.

    Returns:
        How many files of chunks were removed.
    """
    removed = 0
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            removed = sum(remove(f"{path}/{name}", failures) for name in os.listdir(path))
            os.rmdir(path)
        else:
            os.unlink(path)
            removed = int(path.endswith(SUFFIX))
    except FileNotFoundError:
        return removed
    except OSError as error:
        failures.append(error)
    return removed


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of it; a system call may take less than it was given."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_FOLLOW = os.utime not in os.supports_follow_symlinks  # where it cannot be avoided


def set_times(path: str, times: tuple[int, int] | None = None) -> None:
    """Set the times of what is at `path` itself, to now or to (atime, mtime) in nanoseconds.

    Raises:
        OSError: If it cannot be done.
    """
    if times is None:
        os.utime(path, follow_symlinks=_FOLLOW)
    else:
        os.utime(path, ns=times, follow_symlinks=_FOLLOW)
