"""What the back end says where llama.cpp itself may be missing."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("kvcache_rag_llamacpp", reason="pip install 'kvcache-rag[llama-cpp]'")

from kvcache_rag import InvalidInputError
from kvcache_rag.models.backends import named_backend


def test_it_is_found_by_its_name() -> None:
    backend = named_backend("llama.cpp")
    assert backend is not None
    with pytest.raises(InvalidInputError, match="runs GGUF files, and 'tiny' is none; name one"):
        backend.check("tiny")


@pytest.mark.parametrize(
    ("weight_format", "has_adapter", "said"),
    [
        ("int8", False, "has weights as the file has them, not int8; leave weight_format out"),
        ("auto", True, "takes an adapter while it loads a model, and a loaded one was given"),
    ],
)
def test_a_loaded_model_stays_as_it_is(weight_format: str, has_adapter: bool, said: str) -> None:
    backend = named_backend("llama.cpp")
    assert backend is not None
    with pytest.raises(InvalidInputError, match=re.escape(said)):
        backend.check_loaded(weight_format, has_adapter=has_adapter)
