"""An embedding that needs no model, for tests and offline trials."""

from __future__ import annotations

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import Field

from kvcache_rag.errors import NamedArguments
from kvcache_rag.integration import hash_vector


class HashEmbedding(NamedArguments, BaseEmbedding):
    """Hashes words and their character n-grams into a vector of length one.

    It finds literal matches but no synonyms; the same text gives the same vector everywhere.

    Attributes:
        dimensions: Number of components.
        ngrams: Sizes of the character n-grams, word boundaries included.
    """

    model_name: str = "hash"
    dimensions: int = Field(default=384, ge=8)
    ngrams: tuple[int, ...] = (3, 4, 5)

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "HashEmbedding"

    def _get_text_embedding(self, text: str) -> Embedding:
        return hash_vector(text, self.dimensions, self.ngrams)

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embedding(text)
