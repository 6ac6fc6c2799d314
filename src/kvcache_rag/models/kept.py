"""Checkpoints that are made once of files and kept, whole, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from filelock import FileLock
from safetensors import SafetensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Found = TypeVar("_Found")

_LOG = logging.getLogger(__name__)

KEPT_BYTES: Final = 5_000_000_000
"""A larger checkpoint is not kept."""

ALL_BYTES: Final = 4 * KEPT_BYTES
"""All that is kept together; beyond that goes what was not used for longest."""

# Free bytes of the disk for each that is kept.
_ROOM: Final = 4

_MANIFEST: Final = "kvcache-rag.json"

# Changes when the same files make something else than before.
_FORM: Final = "2"

_DAMAGED: Final = "the kept checkpoint %s is damaged and made anew: %s"

_DAY: Final = 86_400.0  # seconds

# Seconds for which another process may make the same one before this one does it, too.
_PATIENCE = 900.0


def cache_folder() -> Path:
    """Where dequantised checkpoints are kept: below the user's folder for caches.

    `$XDG_CACHE_HOME` where it is set; else as the platform has it.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        base = Path(chosen)
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "kvcache-rag" / "models"


def kept_folder(contents: Iterable[str], kind: str) -> Path:
    """Where what is made of some files is kept: by these, and by what makes it.

    Args:
        contents: Digests of the files, and whatever else the result depends on.
        kind: Ends the name.
    """
    made_by = (f"{name} {version_of(name)}" for name in ("transformers", "gguf"))
    named = "\n".join((_FORM, *made_by, *contents))
    return cache_folder() / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}-{kind}"


def version_of(name: str) -> str:
    """The version of an installed package; "" where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def kept_or_made(
    folder: Path, read: Callable[[Path], _Found], write: Callable[[Path], None], nbytes: int = 0
) -> _Found | None:
    """What is read of a kept folder, which is written first if it has to be; None if it cannot be.

    Args:
        folder: As `kept_folder` names it.
        read: Reads it; what it raises is no damage, unless safetensors does.
        write: Fills an empty folder.
        nbytes: That will be in it.
    """
    for _ in range(2):
        found = read_kept(folder, read)
        if found is not None or not keep(folder, write, nbytes):
            return found
    return None


def read_kept(folder: Path, read: Callable[[Path], _Found]) -> _Found | None:
    """What is read of a kept folder; None if it is not there, or not as it was written."""
    if not _is_whole(folder):
        return None
    with suppress(OSError):
        os.utime(folder)  # who was not used for longest goes first
    try:
        return read(folder)
    except SafetensorError as error:  # changed, though size and date were not
        _LOG.warning(_DAMAGED, folder.name, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def keep(folder: Path, write: Callable[[Path], None], nbytes: int = 0) -> bool:
    """Write a folder that is kept, once, as a whole; False if that cannot be.

    Args:
        folder: As `kept_folder` names it.
        write: Fills an empty folder.
        nbytes: That will be in it.
    """
    try:
        if not _has_room(nbytes):
            return False
        base = folder.parent.parent
        base.parent.mkdir(parents=True, exist_ok=True)
        for private in (base, folder.parent):
            private.mkdir(exist_ok=True, mode=0o700)
        # Who comes second waits: making one twice at once takes twice the memory, too.
        with FileLock(f"{folder}.lock", timeout=_PATIENCE, mode=0o600):
            _sweep(folder)
            if not _is_whole(folder):
                _appear(folder, write)
    except (OSError, SafetensorError) as error:
        _LOG.warning("what was made of a GGUF file cannot be kept: %s", error)
        return False
    with suppress(OSError):  # another process may be at it, too
        _drop_oldest(folder)
    return True


def _has_room(nbytes: int) -> bool:
    """Whether a checkpoint of so many bytes is kept: it is no large one, for this disk either."""
    place = cache_folder()
    while not place.exists():
        place = place.parent
    return nbytes <= KEPT_BYTES and _ROOM * nbytes <= shutil.disk_usage(place).free


def _sweep(target: Path) -> None:
    """Remove what was left of a folder by a process that was killed, and a damaged one.

    Others' beginnings are removed when they are a day old.
    """
    for path in target.parent.glob(".*"):
        with suppress(FileNotFoundError):  # another process has finished it, or removes it, too
            is_old = path.stat().st_mtime < time.time() - _DAY
            if path.is_dir() and (path.name.startswith(f".{target.name}-") or is_old):
                shutil.rmtree(path, ignore_errors=True)
    if target.exists() and (difference := _changed(target)):
        _LOG.warning(_DAMAGED, target.name, difference)
        shutil.rmtree(target)


def _appear(target: Path, write: Callable[[Path], None]) -> None:
    prefix = f".{target.name}-"
    unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))  # 0700
    try:
        write(unfinished)
        manifest = json.dumps(_files(unfinished))
        (unfinished / _MANIFEST).write_text(manifest, encoding="utf-8")
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _drop_oldest(newest: Path) -> None:
    """Remove what was not used for longest, until all that is kept is no more than it may be."""
    # What begins with a point is being made.
    found = [one for one in newest.parent.glob("[!.]*") if one.is_dir() and one != newest]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    whole = _size(newest)
    for path in found:
        whole += _size(path)
        if whole > ALL_BYTES:
            shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _files(folder: Path) -> dict[str, list[int]]:
    """Size and time of the last change of each file of a checkpoint."""
    found = {path.name: path.stat() for path in folder.iterdir() if path.name != _MANIFEST}
    return {name: [one.st_size, one.st_mtime_ns] for name, one in sorted(found.items())}


def _is_whole(folder: Path) -> bool:
    """Whether a kept folder is as it was written; one that nobody may read is not."""
    try:
        return folder.is_dir() and not _changed(folder)
    except OSError:  # before Python 3.14
        return False


def _changed(folder: Path) -> str:
    """What of a kept folder is not as it was written; "" for nothing."""
    try:
        written = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        now = _files(folder)
        names = [name for name in {**written, **now} if written.get(name) != now.get(name)]
    except (OSError, ValueError, AttributeError, TypeError):
        return f"its {_MANIFEST} cannot be read"
    return f"its {names[0]} is gone, or was changed" if names else ""


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read again if it has changed since."""
    now = path.stat()
    return _digest(path, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


@lru_cache(maxsize=64)
def _digest(path: Path, *_: int) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            state.update(part)
    return state.hexdigest()
