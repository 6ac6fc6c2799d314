"""The core without the kernels of kvcache-rag-cpu: everything runs, and it is said once."""

from __future__ import annotations

import logging
from functools import partial
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small import make_untrained

from kvcache_rag import Engine
from kvcache_rag.errors import MissingExtraError
from kvcache_rag.models import pack_weights, processors, unpack_weights
from kvcache_rag.models.attention import few_queries

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(processors, "entry_points", lambda **_: [])
    caches: tuple[Any, ...] = (processors.kernels, processors.advise, few_queries.library)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.mark.usefixtures("bare")
def test_a_model_stays_as_it_is_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(few_queries, "has_kernels", lambda: True)
    model = make_untrained().to(torch.bfloat16)
    kinds = [type(module) for module in model.modules()]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert pack_weights(model) is unpack_weights(model) is model
            assert few_queries.library() is None
            few_queries.library.cache_clear()
    assert [record.message for record in caplog.records] == [
        "models run sooner on this CPU with its kernels: pip install kvcache-rag-cpu"
    ]
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.usefixtures("bare")
def test_other_forms_of_weights_say_what_brings_them() -> None:
    model = make_untrained()
    assert pack_weights(model, "plain") is model
    for form in ("prepacked", "int8", "int4"):
        for ask in (
            partial(pack_weights, model, form),
            partial(Engine.from_pretrained, "tiny", weight_format=form),
        ):
            with pytest.raises(MissingExtraError, match=r"pip install 'kvcache-rag\[cpu\]'"):
                ask()


def test_kernels_that_cannot_be_loaded_are_none(
    bare: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    point = EntryPoint("installed", "nowhere:INSTALLED", processors.GROUP)
    monkeypatch.setattr(processors, "entry_points", lambda **_: [point])
    with caplog.at_level(logging.WARNING):
        assert processors.kernels() is None
    assert "the kernels for this CPU cannot be loaded: ModuleNotFoundError" in caplog.text
