"""Fixtures over the tiny random model."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Tests are imported without packages, so that two `tests` folders can have equal file names.
sys.path.insert(0, str(Path(__file__).parent))

from langchain_core.embeddings import DeterministicFakeEmbedding
from small import CHAT_TEMPLATE, Loop, make_model, make_tokenizer
from standard_outcomes import pytest_configure  # noqa: F401  # pytest calls it

from kvcache_rag import Engine, MemoryStore, PromptTemplate
from langchain_kvcache_rag import ChatKVCache

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.register_assert_rewrite("contracts_frameworks")


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """Engines over the tiny model; every one has a store of its own unless it is given one."""

    def make(*, chat: bool = False, **options: Any) -> Engine:
        tokenizer = make_tokenizer()
        if chat:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = CHAT_TEMPLATE
        options.setdefault("template", PromptTemplate(system="Read.\n"))
        return Engine(make_model(), tokenizer, **{"store": MemoryStore(), **options})

    return make


@pytest.fixture(scope="session")
def measured_engine() -> Engine:
    """Measuring a model takes a second, so most tests share an engine and empty its store."""
    template = PromptTemplate(system="Read.\n")
    engine = Engine(make_model(), make_tokenizer(), store=MemoryStore(), template=template)
    engine.add(["the prefix is computed with the first chunk"])
    return engine


@pytest.fixture
def engine(measured_engine: Engine) -> Engine:
    store: Any = measured_engine.store
    measured_engine._follow().capturing.prefix()  # a test may have changed weights or tokenizer
    MemoryStore.__init__(store)
    measured_engine.forget_buffer()  # the last test's prompt, from which one would go on
    return measured_engine


@pytest.fixture
def prefilled(engine: Engine) -> Callable[[], int]:
    """How many chunks were prefilled since the last call."""
    seen = [0]

    def count() -> int:
        puts = engine.store.stats().puts
        seen[0], fresh = puts, puts - seen[0]
        return fresh

    return count


@pytest.fixture
def llm(engine: Engine) -> ChatKVCache:
    return ChatKVCache(engine=engine, max_tokens=6)


@pytest.fixture
def embedding() -> DeterministicFakeEmbedding:
    return DeterministicFakeEmbedding(size=32)


@pytest.fixture
def loop() -> Loop:
    return Loop()
