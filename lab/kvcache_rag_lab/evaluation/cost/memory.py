"""Peak memory of this process or a CUDA device during a block."""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def resident(field: str) -> int:
    """Bytes of a field of this process's status: `VmRSS` now, `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> None:
    """Let the peak of resident memory begin anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_of_call(call: Callable[[], object], device: torch.device | None = None) -> int:
    """Bytes at the peak of a call above those that were held before it.

    Args:
        call: What is done.
        device: A CUDA device, whose memory is counted; else this process's.

    Raises:
        OSError: If the kernel does not let a peak begin anew.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    _trim()
    reset_peak()
    held = resident("VmRSS")
    call()
    return max(0, resident("VmHWM") - held)


def _trim() -> None:
    """Hand back what was freed, so that it is not held before and used unseen."""
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
