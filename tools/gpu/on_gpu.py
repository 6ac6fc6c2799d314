"""A plugin of pytest under which tests make their tensors and models on a GPU: laws as they are.

    python -m pytest -p tools.gpu.on_gpu tests/test_equivalence.py

Without a GPU nothing is tested, and the exit status is 2.  KVCACHE_RAG_LAWS names another device.
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure() -> None:
    """Make everything on the GPU from now on."""
    device = os.environ.get("KVCACHE_RAG_LAWS", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.exit("there is no CUDA device here; run this on a machine with one", 2)
    torch.set_default_device(device)
