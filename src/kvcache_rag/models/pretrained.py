"""Models, tokenizers and prompt templates by name, with one clear sentence when that fails."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_rag.errors import InvalidInputError, check_name
from kvcache_rag.prompt.template import PromptTemplate

TINY = "tiny"
"""Name of the small reader that comes with this package."""


def resolve(name: str | os.PathLike[str]) -> str:
    """The name or path to load: `tiny` is the packaged reader.

    Raises:
        InvalidInputError: If it is no text, or looks like a path and nothing is there.
    """
    is_path = isinstance(name, os.PathLike)
    name = check_name("name of a model", os.fspath(name) if is_path else name)
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
    model, tokenizer = _load_pretrained(
        resolved, os.fspath(name), dtype=dtype, device=device, options=options
    )
    return model, tokenizer, brought_template(resolved)


def brought_template(name: str | os.PathLike[str]) -> PromptTemplate | None:
    """The prompt template that a model brings along in its folder, if any."""
    folder = Path(resolve(name))
    return PromptTemplate.load(folder) if folder.is_dir() else None


def _load_pretrained(
    path: str, name: str, *, dtype: torch.dtype | str, device: str | None, options: dict[str, Any]
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer.

    Args:
        path: Folder or hub id.
        name: What the user wrote, for messages.
        dtype: "auto" for the checkpoint's own.
        device: Where to put the model, unless `options` has a `device_map`; None for CUDA if there
            is one.
        options: Further arguments of `from_pretrained`; `revision`, `token`, `cache_dir`,
            `local_files_only`, `trust_remote_code` and `subfolder` go to the tokenizer as well.

    Raises:
        InvalidInputError: If transformers cannot load it.
    """
    shared = (
        "revision",
        "token",
        "cache_dir",
        "local_files_only",
        "trust_remote_code",
        "subfolder",
    )
    common = {key: options[key] for key in shared if key in options}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
        if "device_map" not in options:
            model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # libraries below raise what they like for a bad file or argument
        reason = str(error).strip().splitlines()
        raise InvalidInputError(
            f"cannot load the model {name!r}: {reason[0] if reason else type(error).__name__}"
        ) from error
    return model, tokenizer


def load_tokenizer(name: str, options: dict[str, Any]) -> Any:
    """A tokenizer by its name or folder.

    Raises:
        InvalidInputError: If transformers cannot load it.
    """
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise InvalidInputError(
            f"cannot load the tokenizer {name!r}: {reason[0] if reason else type(error).__name__}"
        ) from error
