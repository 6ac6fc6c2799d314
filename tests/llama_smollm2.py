"""SmolLM2 in llama.cpp, which tests of every front end share: it is loaded once by a process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import lru_cache
from typing import Any, Final

import pytest

from kvcache_rag import Engine, MemoryStore
from kvcache_rag.models.model_names import PACKAGED
from kvcache_rag.models.pretrained import load

NAME: Final = "smollm2"
BACKEND: Final = "llama.cpp"
HOW: Final[dict[str, Any]] = {"backend": BACKEND, "adapter": "none"}
"""The same model wherever its adapter is installed or not."""

TEXTS: Final = (
    "The lighthouse of Harrow Point is kept by Ann Miller, who came there in 1987.",
    "The bakery of the village opens at six and sells rye bread.",
    "Rain fell on the hill for three days in October.",
)
QUESTION: Final = "Who keeps the lighthouse of Harrow Point?"


def needed() -> None:
    """Skip a module where llama-cpp-python or the model is not installed."""
    if not all(map(importlib.util.find_spec, ("llama_cpp", "kvcache_rag_llamacpp"))):
        pytest.skip("pip install 'kvcache-rag[llama-cpp]'", allow_module_level=True)
    try:
        importlib.metadata.version(PACKAGED[NAME].package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(PACKAGED[NAME].install, allow_module_level=True)


@lru_cache(maxsize=1)
def loaded() -> tuple[Any, Any, Any]:
    """Model, tokenizer and template."""
    return load(NAME, dtype="auto", device="cpu", options={}, backend=BACKEND)


def engine(**options: Any) -> Engine:
    """An engine over it, with a store of its own unless it is given one."""
    model, tokenizer, template = loaded()
    options = {"store": MemoryStore(), "template": template, **options}
    return Engine(model, tokenizer, **options)


def has_gpu() -> bool:
    """Whether this llama.cpp was built with one."""
    from llama_cpp import llama_cpp

    return bool(llama_cpp.llama_supports_gpu_offload())
