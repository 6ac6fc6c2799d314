"""The policy of one call, where the model is a step of a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from chat_model_helpers import over
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)

from kvcache_rag import Engine, FullRecompute, InvalidInputError, Reuse
from langchain_kvcache_rag import ChatKVCache, KVCacheRAG, create_kvcache_rag_chain, document_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from langchain_core.runnables import Runnable

DOCUMENTS = [Document("The cat sat on the mat."), Document("A dog ran away from home.")]
FULL: Any = {"configurable": {"policy": FullRecompute()}}


def found(_: Any) -> list[Document]:
    return DOCUMENTS


def piped(llm: Any) -> Runnable[Any, Any]:
    start: Any = {"context": RunnableLambda(found), "question": RunnablePassthrough()}
    return start | KVCacheRAG(llm)


def prompted(llm: Any) -> Runnable[Any, Any]:
    blocks: Any = [*map(document_block, DOCUMENTS), {"type": "text", "text": "{question}"}]
    return ChatPromptTemplate([("human", blocks)]) | llm


def called(llm: Any) -> Runnable[Any, Any]:
    """A step that hands nothing on by itself."""
    return RunnableLambda(lambda question: llm.invoke(over(question, "one", "two")))


def alone(llm: Any) -> Runnable[Any, Any]:
    return RunnableLambda(lambda question: over(question, "one", "two")) | llm


CHAINS = [piped, prompted, called, alone]


def reused(message: Any) -> int:
    count: int = message.response_metadata["kv_cache"]["reused_tokens"]
    return count


@pytest.mark.parametrize("make", CHAINS)
async def test_a_config_says_the_policy_of_any_chain(
    make: Callable[[Any], Runnable[Any, Any]], llm: ChatKVCache
) -> None:
    chain = make(llm)
    chain.invoke("Who sat?")
    assert reused(chain.invoke("Who sat?")) > 0
    assert reused(chain.invoke("Who sat?", FULL)) == 0
    assert reused(chain.with_config(FULL).invoke("Who sat?")) == 0
    assert reused(chain.invoke("Who sat?", {"configurable": {"policy": "full"}})) == 0
    assert reused(chain.invoke("Who sat?", {"configurable": {"policy": None}})) > 0
    assert reused(await chain.ainvoke("Who sat?", FULL)) == 0
    assert reused(list(chain.stream("Who sat?", FULL))[-1]) == 0
    assert reused([piece async for piece in chain.astream("Who sat?", FULL)][-1]) == 0


async def test_rows_of_a_batch_may_differ(llm: ChatKVCache) -> None:
    chain = piped(llm)
    chain.invoke("Who sat?")
    configs: Any = [{}, FULL, {}, FULL]
    asked = ["Who sat?"] * 4
    for answers in (chain.batch(asked, configs), await chain.abatch(asked, configs)):
        assert [reused(one) > 0 for one in answers] == [True, False, True, False]
        assert len({one.content for one in answers[::2]}) == 1


def test_keywords_win_over_the_config_and_the_config_over_settings(engine: Engine) -> None:
    llm = ChatKVCache(engine=engine, max_tokens=2, policy=FullRecompute())
    asked, plain = over("Who sat?", "one"), {"configurable": {"policy": Reuse()}}
    llm.invoke(asked, policy=Reuse())
    assert reused(llm.invoke(asked)) == 0
    assert reused(llm.invoke(asked, plain)) > 0
    assert reused(llm.invoke(asked, plain, policy=FullRecompute())) == 0
    assert reused(llm.bind(policy=FullRecompute()).invoke(asked, plain)) == 0


def test_a_configurable_field_still_works(llm: ChatKVCache) -> None:
    chain = piped(llm.configurable_fields(policy=ConfigurableField(id="policy")))
    chain.invoke("Who sat?")
    assert reused(chain.invoke("Who sat?")) > 0
    assert reused(chain.invoke("Who sat?", FULL)) == 0


def test_a_cache_of_answers_tells_them_apart(engine: Engine) -> None:
    llm = ChatKVCache(engine=engine, max_tokens=2, cache=InMemoryCache())
    asked = over("Who sat?", "one")
    llm.invoke(asked)
    assert reused(llm.invoke(asked, {"configurable": {"policy": Reuse()}})) > 0
    assert reused(llm.invoke(asked, FULL)) == 0


@pytest.mark.parametrize(
    ("policy", "message"), [("fast", "there is no policy 'fast'"), (3, "policy.*not 3")]
)
def test_no_policy_is_refused(policy: Any, message: str, llm: ChatKVCache) -> None:
    with pytest.raises(InvalidInputError, match=message):
        piped(llm).invoke("Who sat?", {"configurable": {"policy": policy}})


# ---------------------------------------------------------------------- keywords
def whole(llm: Any) -> Runnable[Any, Any]:
    return create_kvcache_rag_chain(RunnableLambda(found), llm)


@pytest.mark.parametrize("make", [piped, lambda llm: piped(llm) | StrOutputParser(), whole])
async def test_keywords_that_langchain_drops_are_told(make: Any, llm: ChatKVCache) -> None:
    chain = make(llm)
    asked: Any = {"input": "Who sat?"} if make is whole else "Who sat?"
    dropped: Any = {"policy": FullRecompute(), "max_tokens": 2}

    def told() -> Any:
        return pytest.warns(UserWarning, match="policy= and max_tokens= get lost.*configurable")

    with told():
        chain.invoke(asked, **dropped)
    with told():
        list(chain.stream(asked, **dropped))
    with told():
        chain.batch([asked], **dropped)
    with told():
        await chain.ainvoke(asked, **dropped)
    with told():
        assert [piece async for piece in chain.astream(asked, **dropped)]
    with told():
        await chain.abatch([asked], **dropped)


async def test_a_first_step_that_tells_is_otherwise_langchains(llm: ChatKVCache) -> None:
    start: Any = {"context": RunnableLambda(found), "question": RunnablePassthrough()}
    ours, stock = piped(llm), RunnableParallel(start) | KVCacheRAG(llm)
    assert ours.get_graph().draw_mermaid() == stock.get_graph().draw_mermaid()
    assert ours.invoke("Who sat?").content == stock.invoke("Who sat?").content
    assert await traced(ours) == await traced(stock)


async def traced(chain: Runnable[Any, Any]) -> set[tuple[str, str]]:
    events = chain.astream_events("Who sat?")
    return {(event["event"], event["name"]) async for event in events}
