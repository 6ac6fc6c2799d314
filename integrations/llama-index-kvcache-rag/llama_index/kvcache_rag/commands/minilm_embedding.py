"""minilm as an embedding of LlamaIndex."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import PrivateAttr

if TYPE_CHECKING:
    from kvcache_rag.models.minilm import Minilm


class MinilmEmbedding(BaseEmbedding):
    """The vectors of `Minilm`."""

    model_name: str = "minilm"
    _minilm: Minilm = PrivateAttr()

    def __init__(self, minilm: Minilm) -> None:
        """Embed by a model that is loaded."""
        super().__init__()
        self._minilm = minilm

    @classmethod
    def class_name(cls) -> str:
        return "MinilmEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return self._minilm.vectors(texts)

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._minilm.vectors([text])[0]

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)
