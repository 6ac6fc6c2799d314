"""Fixtures over the tiny random model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Tests are imported without packages, so that two `tests` folders can have equal file names.
sys.path.insert(0, str(Path(__file__).parent))

from langchain_core.embeddings import DeterministicFakeEmbedding
from standard_outcomes import pytest_configure  # noqa: F401  # pytest calls it

from langchain_kvcache_rag import ChatKVCache

if TYPE_CHECKING:
    from kvcache_rag import Engine

pytest.register_assert_rewrite("contracts_frameworks")

import contracts_frameworks as shared  # noqa: E402  # behind the line above

engine, make_engine, measured_engine = shared.engine, shared.make_engine, shared.measured_engine
loop, prefilled = shared.loop, shared.prefilled


@pytest.fixture
def llm(engine: Engine) -> ChatKVCache:
    return ChatKVCache(engine=engine, max_tokens=6)


@pytest.fixture
def embedding() -> DeterministicFakeEmbedding:
    return DeterministicFakeEmbedding(size=32)
