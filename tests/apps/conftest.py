"""Engines that count, for apps."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeAlias

import pytest
from apps.catalogue import CountingEngine
from small import make_model, make_tokenizer

from kvcache_rag import MemoryStore, PromptTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MakeCounting: TypeAlias = "Callable[[], CountingEngine]"


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What an app leaves open is found while its own warnings count, and not in a later test."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def measured() -> CountingEngine:
    """Measuring a model takes a second, so all apps share one."""
    engine = CountingEngine(
        make_model(), make_tokenizer(), template=PromptTemplate(system="Read.\n")
    )
    engine.costs = []
    return engine


@pytest.fixture
def counting(measured: CountingEngine) -> MakeCounting:
    """That engine, with an empty store and nothing counted."""

    def make() -> CountingEngine:
        store = measured.store
        MemoryStore.__init__(store)  # type: ignore[arg-type]
        measured.costs.clear()
        return measured

    return make
