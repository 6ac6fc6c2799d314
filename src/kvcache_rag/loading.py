"""Load a model and its tokenizer by name, with one clear sentence when that fails."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.pretrained import load_pretrained
from kvcache_rag.template import PromptTemplate

if TYPE_CHECKING:
    import torch

TINY = "tiny"
"""Name of the small reader that comes with this package."""


def resolve(name: str | os.PathLike[str]) -> str:
    """The name or path to load: `tiny` is the packaged reader.

    Raises:
        InvalidInputError: If it looks like a path and nothing is there.
    """
    is_path = not isinstance(name, str)
    name = os.fspath(name)
    if name == TINY:
        return str(files("kvcache_rag").joinpath("reader", "model"))
    looks_like_path = is_path or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not Path(name).expanduser().is_dir():
        raise InvalidInputError(f"there is no model folder {name}; check the path")
    return str(Path(name).expanduser()) if looks_like_path else name


def load(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str,
    device: str | None,
    options: dict[str, Any],
) -> tuple[Any, Any, PromptTemplate | None]:
    """Model, tokenizer and the prompt template that the model brings along, if any.

    Args:
        name: Hub id, folder, or "tiny".
        dtype: "auto" for the checkpoint's own.
        device: Where to put the model; None for CUDA if there is one, else the CPU.
        options: Further arguments of transformers' `from_pretrained`.
    """
    resolved = resolve(name)
    model, tokenizer = load_pretrained(
        resolved, os.fspath(name), dtype=dtype, device=device, options=options
    )
    folder = Path(resolved)
    template = PromptTemplate.load(folder) if folder.is_dir() else None
    return model, tokenizer, template
