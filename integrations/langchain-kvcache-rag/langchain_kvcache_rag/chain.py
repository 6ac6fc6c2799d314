"""A whole retrieval chain in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.runnables.passthrough import RunnableAssign

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag.first_step import FirstStep
from langchain_kvcache_rag.rag import KVCacheRAG

if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.messages import AIMessage
    from langchain_core.prompts import StringPromptTemplate
    from langchain_core.runnables import Runnable


def create_kvcache_rag_chain(
    retriever: BaseRetriever | Runnable[dict[str, Any], list[Document]],
    llm: Runnable[Any, AIMessage],
    *,
    document_prompt: StringPromptTemplate | None = None,
) -> Runnable[dict[str, Any], dict[str, Any]]:
    """A retrieval chain over cached chunks, with the keys of LangChain's `create_retrieval_chain`.

    Args:
        retriever: Gets `input`; or a Runnable over the whole input, such as one that puts
            `chat_history` into its search.
        llm: A `ChatKVCache`, or one with bound arguments.
        document_prompt: As of `KVCacheRAG`.

    Returns:
        A Runnable from `{"input"[, "chat_history"]}` to the same with `context`, a list of
        Documents, and `answer`, a text.
    """
    find: Runnable[dict[str, Any], list[Document]]
    if isinstance(retriever, BaseRetriever):
        find = RunnableLambda(_searched) | retriever
    else:
        find = retriever
    answer: Runnable[Any, str] = (
        KVCacheRAG(llm, document_prompt=document_prompt) | StrOutputParser()
    )
    found = FirstStep({"context": find.with_config(run_name="retrieve_documents")})
    # Not `assign`, which makes a class that pickle does not find.
    chain = RunnableAssign(found) | RunnableAssign(RunnableParallel({"answer": answer}))
    return chain.with_config(run_name="kvcache_rag_chain")


def _searched(given: dict[str, Any]) -> str:
    if not isinstance(given, dict) or not isinstance(given.get("input"), str):
        raise InvalidInputError('the chain needs {"input": "a question"}')
    text: str = given["input"]
    return text
