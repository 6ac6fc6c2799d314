"""What a report says about where it was measured."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import transformers


def described(device: str, threads: int) -> dict[str, str]:
    """Machine, versions and date.

    Args:
        device: "cpu" or "cuda".
        threads: Of torch.
    """
    machine = f"{_processor()}, {os.cpu_count()} cores, {threads} thread(s)"
    if device == "cuda":
        machine = f"{torch.cuda.get_device_name()}; {machine}"
    return {
        "device": device,
        "machine": machine,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
    }


def load() -> float:
    """Processes that wanted to run in the last minute, on average."""
    return round(os.getloadavg()[0], 2)


def commit() -> str:
    """Of the checkout, with "+" where code of it was changed; "" outside of one."""
    folder = Path(__file__).parent
    with suppress(OSError, subprocess.CalledProcessError):
        git = partial(subprocess.run, cwd=folder, check=True, capture_output=True, text=True)
        head = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--", "../src", ".", ":!results"]).stdout
        return head + ("+" if changed.strip() else "")
    return ""


def processor_of(machine: str) -> str:
    """What `described` calls a machine, without its size."""
    return re.sub(r", \d+ cores, \d+ thread\(s\)$", "", machine)


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    if known.is_file():
        for line in known.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
