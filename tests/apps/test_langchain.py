"""Every app of LangChain keeps what the list says, and answers."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
from apps.catalogue import APPS, App, check, scripted_engine
from apps.langchain_apps import FRAMEWORK, Kit

from langchain_kvcache_rag import ChatKVCache

if TYPE_CHECKING:
    from apps.conftest import MakeCounting

pytestmark = pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")


@pytest.mark.parametrize(
    "one", [app for app in APPS if app.framework == FRAMEWORK], ids=lambda app: app.build.__name__
)
def test_an_app_keeps_its_caches(one: App, counting: MakeCounting) -> None:
    engine = counting()
    llm = ChatKVCache(engine=engine, max_tokens=4)

    def scripted(*answers: str) -> ChatKVCache:
        return ChatKVCache(engine=scripted_engine(engine.costs, *answers), max_tokens=200)

    ask = one.build(Kit(llm, uuid.uuid4().hex, scripted))
    check(one, ask, engine)
