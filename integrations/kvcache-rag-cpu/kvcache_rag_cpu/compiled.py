"""The libraries that `hatch_build.py` compiled for this CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch  # noqa: F401  # whose OpenMP the kernels call: it has to be loaded first

KERNELS: Final = {
    "attention": "libfew_queries.so",
    "linear layers": "libfew_rows.so",
    "rounded weights": "librounded_weights.so",
}
"""What is compiled, and its path."""

_HERE: Final = Path(__file__).parent


def compiled(name: str) -> ctypes.CDLL | None:
    """Load a library by its relative path; None if it was not built or is for another CPU."""
    try:
        found = ctypes.CDLL(str(_HERE / name))
        return found if found.kvcache_rag_supported() else None
    except (OSError, AttributeError):  # not there, or its OpenMP is not that of this torch
        return None


def why_missing(kernel: str) -> str:
    """Why one of `KERNELS` does not run, for people; "" if it does."""
    name = KERNELS[kernel]
    if compiled(name) is not None:
        return ""
    if not (_HERE / name).is_file():
        return "not compiled: there was no C compiler when kvcache-rag-cpu was installed"
    return "not for this CPU, which lacks AVX-512 with bfloat16"
