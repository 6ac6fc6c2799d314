"""Every app of LlamaIndex keeps what the list says, and answers."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
from apps.catalogue import APPS, App, check, scripted_engine
from apps.llama_index_apps import FRAMEWORK, Kit

from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM

if TYPE_CHECKING:
    from apps.conftest import MakeCounting

# LlamaIndex leaves an event loop of its own open, and its agents ask pydantic in a way of before.
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed event loop",
    "ignore:Payload indexes have no effect in the local Qdrant",
    "ignore::pydantic.warnings.PydanticDeprecatedSince20",
    "ignore::pydantic.warnings.PydanticDeprecatedSince211",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@pytest.mark.parametrize(
    "one", [app for app in APPS if app.framework == FRAMEWORK], ids=lambda app: app.build.__name__
)
def test_an_app_keeps_its_caches(one: App, counting: MakeCounting) -> None:
    engine = counting()
    llm = KVCacheLLM(engine=engine, max_new_tokens=4)

    def scripted(*answers: str) -> KVCacheLLM:
        return KVCacheLLM(engine=scripted_engine(engine.costs, *answers), max_new_tokens=200)

    ask = one.build(Kit(llm, HashEmbedding(dimensions=64), uuid.uuid4().hex, scripted))
    check(one, ask, engine)
