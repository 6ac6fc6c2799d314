"""Rank documents by how likely the question is behind each, read alone out of its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import BaseDocumentCompressor, Document

from kvcache_rag.errors import NamedArguments
from kvcache_rag.generation import cancellable
from kvcache_rag.integration.ranking import check_most, ranked
from langchain_kvcache_rag.blocks import SCORE, checked_document, checked_prompt, document_text
from langchain_kvcache_rag.chat_model import ChatKVCache  # noqa: TC001  # pydantic reads it

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from langchain_core.callbacks import Callbacks


class KVCacheRerank(NamedArguments, BaseDocumentCompressor):
    """Puts documents first that make the question likeliest, for whatever model answers then.

        rerank = KVCacheRerank(llm=ChatKVCache(model="smollm2"), top_n=3)
        ContextualCompressionRetriever(base_compressor=rerank, base_retriever=retriever)

    No reranking model is needed: the language model itself reads the question behind each document
    (`Engine.read`).  A document that was prefilled costs the question's tokens.
    `metadata["relevance_score"]` says how much likelier it makes the question than no document
    does, in nats: above 0 it says something of what is asked.  Documents without text come last.

    Attributes:
        llm: The `ChatKVCache` that reads.
        top_n: How many documents are left; None for all.
        document_prompt: What of a document is read, as of `KVCacheRAG`; None for its text.
    """

    llm: ChatKVCache
    top_n: int | None = None
    document_prompt: Any = None

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Documents with a score each, the likeliest first.

        Args:
            documents: As they were retrieved; they stay as they are.
            query: The question.
            callbacks: Told nothing, as nothing is generated.

        Raises:
            InvalidInputError: If a document or the question cannot be used.
        """
        return self._ranked(documents, query)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """`compress_documents` that does not block the event loop; cancelling it stops it."""
        return await cancellable(self._ranked, documents, query)

    def _ranked(
        self,
        documents: Sequence[Document],
        query: str,
        cancelled: threading.Event | None = None,
    ) -> list[Document]:
        check_most(self.top_n)
        prompt = None if self.document_prompt is None else checked_prompt(self.document_prompt)
        given = [checked_document(one) for one in documents]
        texts = [document_text(one, prompt) for one in given]
        engine, references = self.llm.engine, self.llm.references
        numbers = ranked(
            engine,
            query,
            texts,
            lambda number: references.chunk(texts[number], engine),
            most=self.top_n,
            cancelled=cancelled,
        )
        return [
            given[number]
            if score is None
            else given[number].model_copy(
                update={"metadata": {**given[number].metadata, SCORE: score}}
            )
            for number, score in numbers
        ]
