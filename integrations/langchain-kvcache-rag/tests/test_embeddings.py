"""HashEmbeddings: the vectors of the core's `hash_vector`."""

from __future__ import annotations

import pytest

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import hash_vector
from langchain_kvcache_rag import HashEmbeddings


def test_queries_and_documents_have_the_same_vectors() -> None:
    embeddings = HashEmbeddings(dimensions=16)
    texts = ["The cat sat.", "", "?"]
    assert embeddings.embed_documents(texts) == [hash_vector(text, 16) for text in texts]
    assert embeddings.embed_query(texts[0]) == hash_vector(texts[0], 16)
    # Written down, so that another process or version would be noticed.
    first = embeddings.embed_query(texts[0])[:4]
    assert [round(value, 4) for value in first] == [-0.5222, 0.1741, 0.0, -0.6963]


def test_too_few_dimensions_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="8 or more"):
        HashEmbeddings(dimensions=4)
