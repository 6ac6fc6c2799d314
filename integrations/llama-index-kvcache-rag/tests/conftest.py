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
from small import Loop, make_model, make_tokenizer

from kvcache_rag import Engine, MemoryStore, PromptTemplate
from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.register_assert_rewrite("contracts_frameworks")


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """Engines over the tiny model; every one has a store of its own unless it is given one."""

    def make(**options: Any) -> Engine:
        options.setdefault("template", PromptTemplate(system="Read.\n"))
        return Engine(make_model(), make_tokenizer(), **{"store": MemoryStore(), **options})

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
def loop() -> Loop:
    return Loop()


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for every forward pass from now on."""
    forward, seen = make_model().forward, list[int]()

    def note(*args: Any, **options: Any) -> Any:
        seen.append(1)
        return forward(*args, **options)

    monkeypatch.setattr(make_model(), "forward", note)
    return seen
