"""How fast this machine is now, for tests of who waits for whom."""

from __future__ import annotations

import json
import time


def seconds_to_make(values: int) -> float:
    """Seconds of computing in which Python's JSON makes so many lists."""
    raw = b"[" + b"[]," * (values - 1) + b"[]]"
    before = time.process_time()
    json.loads(raw)
    return time.process_time() - before
