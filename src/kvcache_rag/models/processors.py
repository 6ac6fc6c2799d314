"""What this CPU is and can do, and the kernels that a package has for it.

`kvcache-rag-cpu` has an entry point of the group `kvcache_rag.kernels`, which loads a `Kernels`.
Without it everything runs in torch's own functions, on this CPU slower.
"""

from __future__ import annotations

import logging
import platform
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Mapping

GROUP: Final = "kvcache_rag.kernels"
_LOG: Final = logging.getLogger(__name__)


class Kernels(Protocol):
    """Layers and functions that are sooner on a CPU."""

    def pack(self, model: Any, weight_format: str) -> Any:
        """See `weight_formats.pack_weights`, but for "plain" of a model that is so."""

    def unpack(self, model: Any) -> Any:
        """See `weight_formats.unpack_weights`."""

    def attention(self) -> ctypes.CDLL | None:
        """The library of `attention/few_queries.py`; None where it was not built, or cannot run."""

    def missing(self) -> Mapping[str, str]:
        """Why each kernel does not run, for people, by its name; "" if it does."""


@cache
def kernels() -> Kernels | None:
    """Those that are installed, or None; some that cannot be loaded count as none."""
    point = next(iter(entry_points(group=GROUP)), None)
    try:
        return None if point is None else cast("Kernels", point.load())
    except Exception as error:  # whatever another package raises: models run without
        _LOG.warning("the kernels for this CPU cannot be loaded: %r", error)
        return None


def processor() -> str:
    """The name of the CPU, or its kind where nobody tells."""
    known = Path("/proc/cpuinfo")
    if known.is_file():
        for line in known.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU; elsewhere torch does, far more slowly."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_kernels() -> bool:
    """Whether kernels are made for a CPU such as this one."""
    return platform.machine().lower() in ("x86_64", "amd64") and multiplies_bfloat16()


@cache
def advise() -> None:
    """Say once what would be sooner on this CPU."""
    _LOG.warning("models run sooner on this CPU with its kernels: pip install kvcache-rag-cpu")
