"""What commands print and write: readable numbers, times and names; files are written whole."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.progress import plain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def check_file(path: Path) -> None:
    """Say before hours of work whether a file could be written.

    Raises:
        InvalidInputError: If it is a folder, or its folder does not exist or takes no files.
    """
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise InvalidInputError(f"{path} cannot be a file; name one in a folder there is")
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions alone do not say it
            pass
    except OSError as error:
        raise InvalidInputError(
            f"{path} cannot be written ({error.strerror}); name a file in another folder"
        ) from error


def size(count: float) -> str:
    """Bytes for people."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def moment(seconds: float) -> str:
    """A time since the epoch in UTC; "never" for none."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else "never"


def model_name(manifest: Mapping[str, Any]) -> str:
    """Which model a spec's chunks are of, harmless to a terminal."""
    name = str(manifest.get("model") or "unknown model")
    revision = manifest.get("revision")
    return plain(f"{name}@{str(revision)[:8]}" if revision else name)
