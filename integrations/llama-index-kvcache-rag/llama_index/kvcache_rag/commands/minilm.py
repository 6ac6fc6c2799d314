"""The embedding minilm, run by transformers alone.

Importing sentence-transformers takes a third of the time in which `ask` answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import PrivateAttr
from transformers import AutoModel, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence


class MinilmEmbedding(BaseEmbedding):
    """The mean of the last hidden states of a BERT, of length one, on the CPU."""

    model_name: str = "minilm"
    _tokenizer: Any = PrivateAttr()
    _model: Any = PrivateAttr()
    _longest: int = PrivateAttr()

    def __init__(self, folder: str) -> None:
        """Load it from a folder of sentence-transformers."""
        super().__init__()
        settings = json.loads((Path(folder) / "sentence_bert_config.json").read_text("utf-8"))
        self._longest = int(settings["max_seq_length"])
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()

    @classmethod
    def class_name(cls) -> str:
        return "MinilmEmbedding"

    def _vectors(self, texts: Sequence[str]) -> list[Embedding]:
        how: dict[str, Any] = {"max_length": self._longest, "truncation": True, "padding": True}
        rows = self._tokenizer([text.strip() for text in texts], return_tensors="pt", **how)
        with torch.inference_mode():
            states = self._model(**rows).last_hidden_state  # (texts, tokens, width)
        seen = rows["attention_mask"][..., None].to(states.dtype)
        means = (states * seen).sum(1) / seen.sum(1)
        vectors: list[Embedding] = torch.nn.functional.normalize(means, dim=1).tolist()
        return vectors

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return self._vectors(texts)

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._vectors([text])[0]

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)
