"""transformers' `from_pretrained`, with its failures in one sentence."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_rag.errors import InvalidInputError


def load_pretrained(
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
