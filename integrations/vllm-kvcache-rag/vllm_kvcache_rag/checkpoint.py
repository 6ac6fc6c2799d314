"""Identify an engine's weights by their files, because it keeps them in its own form."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import digest

_KINDS: Final = (".safetensors", ".bin", ".pt", ".gguf")

# Read of each file at so many places, and as a whole where that is no more.
_PLACES: Final = 64
_BYTES: Final = 1 << 16


def checkpoint_digest(model: str, revision: str | None = None) -> str:
    """SHA-256 of the config and of what the weights' files hold, sampled where they are long.

    Args:
        model: Folder, GGUF file or hub id, whose files are there since the engine has loaded them.
        revision: Of the hub.

    Raises:
        InvalidInputError: If there are no such files.
    """
    place = Path(model)
    if place.is_file():
        files = [place]
    else:
        folder = place if place.is_dir() else _snapshot(model, revision)
        names = [*folder.glob("config.json"), *(f for k in _KINDS for f in folder.glob(f"*{k}"))]
        files = sorted(names)
    if not any(file.suffix in _KINDS for file in files):
        raise InvalidInputError(
            f"there are no weights in {place.name}, by which chunks are addressed"
        )
    return digest("kvcache-rag-checkpoint", *(_sampled(file) for file in files))


def _snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def _sampled(file: Path) -> bytes:
    """Name, size and bytes of a file."""
    size = file.stat().st_size
    state = hashlib.sha256(f"{file.name}\0{size}\0".encode())
    with file.open("rb") as handle:
        if size <= _PLACES * _BYTES:
            state.update(handle.read())
        else:
            for place in range(_PLACES):
                handle.seek(place * (size - _BYTES) // (_PLACES - 1), os.SEEK_SET)
                state.update(handle.read(_BYTES))
    return state.digest()
