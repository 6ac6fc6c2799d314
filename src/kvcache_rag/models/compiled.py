"""What `hatch_build.py` compiled, where there was a C compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path


def compiled(name: str) -> ctypes.CDLL | None:
    """A library, by its path from here; None where it was not built or is not for this CPU."""
    try:
        found = ctypes.CDLL(str(Path(__file__).parent / name))
        return found if found.kvcache_rag_supported() else None
    except (OSError, AttributeError):  # not there, or its OpenMP is not that of this torch
        return None
