"""Rank documents by how likely the question is after each, read alone from its cache."""

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
    """Puts the documents first that make the question likeliest, for any model to answer from.

        rerank = KVCacheRerank(llm=ChatKVCache(model="smollm2"), top_n=3)
        ContextualCompressionRetriever(base_compressor=rerank, base_retriever=retriever)

    No reranking model is needed: the language model itself reads the question after each document
    (`Engine.read`).  A prefilled document costs the question's tokens.
    `metadata["relevance_score"]` is how much likelier it makes the question than no document, in
    nats: above 0 it is about the question.  Documents without text come last.

    Attributes:
        llm: The `ChatKVCache` that reads.
        top_n: How many documents to keep; None for all.
        document_prompt: Writes the text that is read, as in `KVCacheRAG`; None for the text alone.
    """

    llm: ChatKVCache
    top_n: int | None = None
    document_prompt: Any = None

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Rank documents, the likeliest first, and give each a score.

        Args:
            documents: Documents as retrieved; they are not changed.
            query: The question.
            callbacks: Not called, because nothing is generated.

        Raises:
            InvalidInputError: If a document or the question cannot be used.
        """
        return self._ranked(documents, query)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """`compress_documents` that does not block the event loop and can be cancelled."""
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
