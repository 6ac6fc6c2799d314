"""An embedding that needs no model: for tests, offline trials and machines without a download.

Texts that share words share character n-grams, so near duplicates and literal matches are found;
synonyms are not.
"""

from __future__ import annotations

import math
import re
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_WORD = re.compile(r"\w+")

NGRAMS: Final = (3, 4, 5)


def hash_vector(text: str, dimensions: int = 384, ngrams: Sequence[int] = NGRAMS) -> list[float]:
    """Hash words and their character n-grams into a vector of length one.

    The same text gives the same vector in every process and on every machine.

    Args:
        text: Any text.
        dimensions: Number of components.
        ngrams: Sizes of the character n-grams, word boundaries included.
    """
    counts: dict[int, int] = {}
    for word in _WORD.findall(text.lower()):
        for feature in _features(word, ngrams):
            hashed = zlib.crc32(feature.encode("utf-8", "surrogatepass"))
            # The sign lets collisions cancel instead of adding up.
            sign = 1 if hashed & 1 else -1
            index = (hashed >> 1) % dimensions
            counts[index] = counts.get(index, 0) + sign
    length = math.sqrt(sum(count * count for count in counts.values()))
    vector = [0.0] * dimensions
    if not length:
        # No word at all: any fixed direction will do, but a vector of zeros has no cosine.
        vector[0] = 1.0
        return vector
    for index, count in counts.items():
        vector[index] = count / length
    return vector


def _features(word: str, ngrams: Sequence[int]) -> Iterator[str]:
    bounded = f"<{word}>"
    yield bounded
    for size in ngrams:
        yield from (bounded[at : at + size] for at in range(len(bounded) - size + 1))
