"""What the times of a file say about a chunk: when it was used, when it was written.

The mtime is the last use.  A store with a `ttl` has to know when a chunk was written; it leaves the
mtime at that, and notes the use in the atime, which is what the two names mean.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

from kvcache_rag.errors import InvalidInputError

USED_AGAIN = 60.0  # seconds: a file that was marked within them is not marked again

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


def check_ttl(ttl: float | None) -> float | None:
    """Return the life time.

    Raises:
        InvalidInputError: If it is not above zero.
    """
    if ttl is not None and not ttl > 0:
        raise InvalidInputError(f"ttl is a number of seconds above 0, not {ttl}; None for no end")
    return ttl


def last_use(status: os.stat_result, *, dated: bool) -> float:
    """When a chunk was used last, in seconds since the epoch.

    Args:
        status: Of its file.
        dated: Whether the mtime is the time of writing.
    """
    return max(status.st_atime, status.st_mtime) if dated else status.st_mtime


def mark_used(path: str, status: os.stat_result, *, dated: bool) -> None:
    """Let a file count as used now, unless it did within the last minute; best effort.

    In a read-only folder nothing is marked, and nothing is evicted either.

    Args:
        path: The file.
        status: Its status; what is no file is left alone.
        dated: Whether the mtime is the time of writing and stays.
    """
    if not stat.S_ISREG(status.st_mode):
        return
    if abs(time.time() - last_use(status, dated=dated)) > USED_AGAIN:
        with suppress(OSError):
            set_times(path, (time.time_ns(), status.st_mtime_ns) if dated else None)
