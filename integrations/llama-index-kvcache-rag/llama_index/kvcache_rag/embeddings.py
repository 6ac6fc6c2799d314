"""An embedding that needs no model: for tests, offline trials and machines without a download.

Texts that share words share character n-grams, so near duplicates and literal matches are found;
synonyms are not.
"""

from __future__ import annotations

import math
import re
import zlib

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import Field

_WORD = re.compile(r"\w+")


class HashEmbedding(BaseEmbedding):
    """Words and their character n-grams, hashed into a vector of length one.

    The same text gives the same vector in every process and on every machine.

    Attributes:
        dimensions: Length of the vectors.
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
        counts: dict[int, int] = {}
        for word in _WORD.findall(text.lower()):
            for feature in self._features(word):
                hashed = zlib.crc32(feature.encode("utf-8", "surrogatepass"))
                # The sign lets collisions cancel instead of adding up.
                sign = 1 if hashed & 1 else -1
                index = (hashed >> 1) % self.dimensions
                counts[index] = counts.get(index, 0) + sign
        length = math.sqrt(sum(count * count for count in counts.values()))
        vector = [0.0] * self.dimensions
        if not length:
            # No word at all: any fixed direction will do, but a vector of zeros has no cosine.
            vector[0] = 1.0
            return vector
        for index, count in counts.items():
            vector[index] = count / length
        return vector

    def _features(self, word: str) -> list[str]:
        bounded = f"<{word}>"
        features = [bounded]
        for size in self.ngrams:
            features.extend(bounded[at : at + size] for at in range(len(bounded) - size + 1))
        return features

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embedding(text)
