"""What a report of a checkout says about where it was measured."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvcache_rag.commands.machine import described, load

__all__ = ["commit", "described", "load", "processor_of"]


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
