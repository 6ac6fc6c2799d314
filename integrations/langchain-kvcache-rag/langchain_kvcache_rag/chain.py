"""A whole retrieval chain in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    AddableDict,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
)
from langchain_core.runnables.passthrough import RunnableAssign

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag.first_step import FirstStep
from langchain_kvcache_rag.rag import KVCacheRAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from langchain_core.documents import Document
    from langchain_core.messages import AIMessage
    from langchain_core.prompts import StringPromptTemplate
    from langchain_core.runnables import Runnable


_MESSAGE: Final = "kvcache_rag_message"


def create_kvcache_rag_chain(
    retriever: BaseRetriever | Runnable[dict[str, Any], list[Document]],
    llm: Runnable[Any, AIMessage],
    *,
    document_prompt: StringPromptTemplate | None = None,
) -> Runnable[dict[str, Any], dict[str, Any]]:
    """Make a retrieval chain over cached chunks, with the keys of `create_retrieval_chain`.

    Args:
        retriever: A retriever, which gets `input`, or a Runnable over the whole input, such as one
            that searches with `chat_history`.
        llm: A `ChatKVCache`, or one with bound arguments.
        document_prompt: See `KVCacheRAG`.

    Returns:
        A Runnable from `{"input"[, "chat_history"]}` to the same with `context`, a list of
        Documents, `answer`, a text, and `kv_cache`, its cost, whose `answered_from` has the places
        in `context` of the documents it was computed from.
    """
    find: Runnable[dict[str, Any], list[Document]]
    if isinstance(retriever, BaseRetriever):
        find = RunnableLambda(_searched) | retriever
    else:
        find = retriever
    answer: RunnableParallel[Any] = RunnableParallel(
        {_MESSAGE: KVCacheRAG(llm, document_prompt=document_prompt)}
    )
    found = FirstStep({"context": find.with_config(run_name="retrieve_documents")})
    # Not `assign`, which makes a class that pickle does not find.
    told: Runnable[Any, dict[str, Any]] = RunnableGenerator(_told, _atold)
    chain = RunnableAssign(found) | RunnableAssign(answer) | told
    return chain.with_config(run_name="kvcache_rag_chain")


def _told(pieces: Iterator[dict[str, Any]]) -> Iterator[AddableDict]:
    """What a chain has, piece by piece, with text and cost of an answer in place of its message."""
    for piece in pieces:
        yield from _parts(piece)


async def _atold(pieces: AsyncIterator[dict[str, Any]]) -> AsyncIterator[AddableDict]:
    async for piece in pieces:
        for part in _parts(piece):
            yield part


def _parts(piece: dict[str, Any]) -> Iterator[AddableDict]:
    others = {name: value for name, value in piece.items() if name != _MESSAGE}
    if others:
        yield AddableDict(others)
    if _MESSAGE in piece:
        message: AIMessage = piece[_MESSAGE]
        yield AddableDict(answer=str(message.text))
        cost = message.response_metadata.get("kv_cache")
        if cost is not None:  # of a stream the last piece has it
            yield AddableDict(kv_cache=cost)


def _searched(given: dict[str, Any]) -> str:
    if not isinstance(given, dict) or not isinstance(given.get("input"), str):
        raise InvalidInputError('the chain needs {"input": "a question"}')
    text: str = given["input"]
    return text
