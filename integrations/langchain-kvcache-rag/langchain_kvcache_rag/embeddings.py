"""An embedding that needs no model, for tests and offline trials."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import NamedArguments
from kvcache_rag.integration import hash_vector


class HashEmbeddings(NamedArguments, Embeddings):
    """Hashes words and their character n-grams into a vector of length one.

    It finds literal matches but no synonyms; the same text gives the same vector everywhere.
    """

    def __init__(self, dimensions: int = 384) -> None:
        """Make vectors of `dimensions` numbers, at least 8."""
        if dimensions < 8:
            raise InvalidInputError(f"dimensions must be 8 or more, not {dimensions}")
        self.dimensions = dimensions

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector per text."""
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """The vector of a text."""
        return hash_vector(text, self.dimensions)
