"""Fixtures over the tiny random model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Tests are imported without packages, so that two `tests` folders can have equal file names.
sys.path.insert(0, str(Path(__file__).parent))

from llama_index.core.instrumentation import get_dispatcher
from llama_index_helpers import Recorder
from small import make_model

from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag import Engine

pytest.register_assert_rewrite("contracts_frameworks")

import contracts_frameworks as shared  # noqa: E402  # behind the line above

engine, make_engine, measured_engine = shared.engine, shared.make_engine, shared.measured_engine
loop, prefilled = shared.loop, shared.prefilled


@pytest.fixture
def llm(engine: Engine) -> KVCacheLLM:
    return KVCacheLLM(engine=engine, max_new_tokens=6)


@pytest.fixture
def embedding() -> HashEmbedding:
    return HashEmbedding(dimensions=64)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    root = get_dispatcher()
    handler = Recorder(events=[])
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for every forward pass from now on."""
    forward, seen = make_model().forward, list[int]()

    def note(*args: Any, **options: Any) -> Any:
        seen.append(1)
        return forward(*args, **options)

    monkeypatch.setattr(make_model(), "forward", note)
    return seen
