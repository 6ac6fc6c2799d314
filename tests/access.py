"""The private attributes that tests look at: each behind one function, which says what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_kvcache_rag import KVCacheChroma


# LangChain's vector store.
def collection(store: KVCacheChroma) -> Any:
    """Chroma's collection under it, with our wrapper around it."""
    return store._collection


def client(store: Any) -> Any:
    """Chroma's client of a store or of a collection."""
    return store._client


# transformers.
def attention(config: Any) -> str:
    """The name of the attention that a model computes with."""
    name: str = config._attn_implementation
    return name
