"""Checkpoints that are made once of files and kept, whole, in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from filelock import FileLock
from safetensors import SafetensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

_LOG = logging.getLogger(__name__)

KEPT_BYTES: Final = 5_000_000_000
"""A larger checkpoint is not kept."""

# Free bytes of the disk for each that is kept.
_ROOM: Final = 4

_MANIFEST: Final = "kvcache-rag.json"

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


def has_room(nbytes: int) -> bool:
    """Whether a checkpoint of so many bytes is kept: it is no large one, for this disk either."""
    place = cache_folder()
    while not place.exists():
        place = place.parent
    return nbytes <= KEPT_BYTES and _ROOM * nbytes <= shutil.disk_usage(place).free


def keep(folder: Path, write: Callable[[Path], None]) -> bool:
    """Write a folder that is kept, once, as a whole; False if that cannot be."""
    try:
        base = folder.parent.parent
        base.parent.mkdir(parents=True, exist_ok=True)
        for private in (base, folder.parent):
            private.mkdir(exist_ok=True, mode=0o700)
        # Who comes second waits: making one twice at once takes twice the memory, too.
        with FileLock(f"{folder}.lock", timeout=_PATIENCE, mode=0o600):
            if not folder.is_dir():
                _appear(folder, write)
    except OSError as error:
        _LOG.warning("what was made of a GGUF file cannot be kept: %s", error)
        return False
    return True


def _appear(target: Path, write: Callable[[Path], None]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))  # 0700
    try:
        write(unfinished)
        manifest = json.dumps(_files(unfinished))
        (unfinished / _MANIFEST).write_text(manifest, encoding="utf-8")
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _files(folder: Path) -> dict[str, list[int]]:
    """Size and time of the last change of each file of a checkpoint."""
    found = {path.name: path.stat() for path in folder.iterdir() if path.name != _MANIFEST}
    return {name: [one.st_size, one.st_mtime_ns] for name, one in sorted(found.items())}


def changed(folder: Path) -> str:
    """What of a kept folder is not as it was written; "" for nothing."""
    try:
        written = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        now = _files(folder)
        names = [name for name in {**written, **now} if written.get(name) != now.get(name)]
    except (OSError, ValueError, AttributeError, TypeError):
        return f"its {_MANIFEST} cannot be read"
    return f"its {names[0]} is gone, or was changed" if names else ""


def load_kept(
    folder: Path, dtype: torch.dtype, options: Mapping[str, Any], *, own_tokenizer: bool
) -> tuple[Any, Any] | None:
    """Model and tokenizer of a kept checkpoint; None for one that is damaged or was changed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        if difference := changed(folder):
            raise OSError(difference)
        has_tokenizer = own_tokenizer and (folder / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(str(folder)) if has_tokenizer else None
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options)
    except (OSError, ValueError, SafetensorError) as error:
        _LOG.warning("the kept checkpoint %s is damaged and made anew: %s", folder.name, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return model, tokenizer


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
