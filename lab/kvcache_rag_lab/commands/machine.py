"""What a report says about the machine it was measured on."""

from __future__ import annotations

import datetime
import os


def described(device: str, threads: int) -> dict[str, str]:
    """Machine, versions and date.

    Args:
        device: "cpu" or "cuda".
        threads: Torch's threads.
    """
    import torch
    import transformers

    from kvcache_rag.models.processors import processor

    machine = f"{processor()}, {os.cpu_count()} cores, {threads} thread(s)"
    if device == "cuda":
        machine = f"{torch.cuda.get_device_name()}; {machine}"
    return {
        "device": device,
        "machine": machine,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
    }


def load() -> float:
    """Average number of processes that wanted to run in the last minute."""
    return round(os.getloadavg()[0], 2)
