"""What lies around a digest in a folder of chunks, and dropping it.

A name that is not one of ours is left alone, and no link is followed.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache_rag.stores.filetimes import last_use, set_times

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPORARY = ".tmp"

_FILE = re.compile(r"([0-9a-f]{64})\.(safetensors(?!-)|(?:owner|released)(?=-))(?:-[0-9a-f]{16})?")


@dataclass(frozen=True)
class Deadlines:
    """What is too old for a sweep; all times in seconds since the epoch.

    Attributes:
        released: Chunks go whose last owner let go then or before.
        temporary: Unfinished files go that were last written then or before.
        written: Chunks go that were written then or before; None for none.
        future: A file dated later than this is of a clock that was wrong.  It counts as of now,
            and is dated so, for else it would never become old.
    """

    released: float
    temporary: float
    written: float | None
    future: float

    def is_expired(self, written: float) -> bool:
        """Whether a chunk written then has to go."""
        return self.written is not None and written <= self.written


@dataclass
class Entry:
    """What lies around one digest in one folder.

    Attributes:
        path: The chunk's file, "" when there is none.
        written: Its mtime.
        used: When it was used last.
        size: Its bytes.
        claimed: Whether an owner uses it.
        tombstones: Time and path of every release.
    """

    path: str = ""
    written: float = 0.0
    used: float = 0.0
    size: int = 0
    claimed: bool = False
    tombstones: list[tuple[float, str]] = field(default_factory=list)

    def is_released(self, latest: float) -> bool:
        """Whether the last owner let go at `latest` or before."""
        return (
            not self.claimed
            and bool(self.tombstones)
            and all(mtime <= latest for mtime, _ in self.tombstones)
        )


def folders(path: str, levels: tuple[re.Pattern[str], ...]) -> Iterator[str]:
    """Folders below `path` whose names, level by level, are of the given forms."""
    if not levels:
        yield path
        return
    with suppress(OSError), os.scandir(path) as found:
        for entry in found:
            if levels[0].fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield from folders(entry.path, levels[1:])


def scan(folder: str, when: Deadlines) -> dict[str, Entry]:
    """What lies around each digest in a folder; unfinished files that are too old are dropped."""
    entries: dict[str, Entry] = {}
    with suppress(OSError), os.scandir(folder) as found:
        for item in found:
            with suppress(OSError):
                _note(item, entries, when)
    return entries


def _note(item: os.DirEntry[str], entries: dict[str, Entry], when: Deadlines) -> None:
    match = _FILE.fullmatch(item.name)
    unfinished = item.name.startswith(TEMPORARY)
    if match is None and not unfinished:
        return
    status = item.stat(follow_symlinks=False)
    if status.st_mtime > when.future:
        set_times(item.path)
        status = os.lstat(item.path)
    if match is None:
        if status.st_mtime <= when.temporary:
            unlink(item.path)
        return
    entry = entries.setdefault(match[1], Entry())
    if match[2] == "owner":
        entry.claimed = True
    elif match[2] == "released":
        entry.tombstones.append((status.st_mtime, item.path))
    else:
        used = min(last_use(status, dated=when.written is not None), when.future)
        entry.path, entry.size = item.path, status.st_size
        entry.written, entry.used = status.st_mtime, used


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
            removed = int(_is_chunk(path))
    except FileNotFoundError:
        return removed
    except OSError as error:
        failures.append(error)
    return removed


def _is_chunk(path: str) -> bool:
    match = _FILE.fullmatch(os.path.basename(path))
    return match is not None and match[2] == "safetensors"
