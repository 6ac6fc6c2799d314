"""Which retrieved chunks match a question best, by the retriever's scores and by words.

An embedding hears what a question is about and misses which name, number or title it asks for; the
words say that.  Both together put a needed document first more often than either alone
(docs/quality.md, "The best few").
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Kana and Han, which have no spaces between words.
_UNSPACED: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD: Final = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
_IS_UNSPACED: Final = re.compile(f"[{_UNSPACED}]")
_STEM: Final = 6
"""Letters of a word that count, so that most endings do not."""
_SATURATION, _LENGTH = 1.2, 0.75
"""k1 and b of BM25 (Robertson and Zaragoza 2009, 3.1)."""
_UNSCORED: Final = 0.25
"""How much the order of chunks without scores weighs; it may be anything, or best first."""
Numbers: TypeAlias = tuple[int, ...]
"""Chunks by their numbers, in prompt order."""

_EQUAL: Final = 1e-9
"""Values whose standard deviation is this part of the largest one differ by rounding alone."""


@dataclass(frozen=True)
class Retrieved:
    """A question and the chunks retrieved for it.

    Attributes:
        question: Its text; "" if it is not known.
        texts: Texts of the chunks; "" for one known only by its key.
        scores: The retriever's score of each chunk, higher is better.  None: the best is first, as
            far as known.
        read: What the model said of contexts of these chunks that were asked for
            (`ReusePolicy.wants`): the likelihood of the question after each, in nats; None for one
            that would have cost too much.
    """

    question: str
    texts: tuple[str, ...]
    scores: Sequence[float] | None = None
    read: Mapping[Numbers, float | None] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.texts)

    def only(self, indices: Sequence[int]) -> Retrieved:
        """Some of the chunks, in this order."""
        scores = None if self.scores is None else tuple(map(self.scores.__getitem__, indices))
        places = {index: place for place, index in enumerate(indices)}
        read = {
            tuple(map(places.__getitem__, context)): said
            for context, said in self.read.items()
            if places.keys() >= {*context}
        }
        texts = tuple(map(self.texts.__getitem__, indices))
        return replace(self, texts=texts, scores=scores, read=read)

    @cached_property
    def relevance(self) -> tuple[float, ...]:
        """How well each chunk matches, in standard deviations; the same for scores a·s + b."""
        if self.scores is None:
            order = (_UNSCORED * one for one in standardised(range(0, -len(self), -1)))
            return tuple(map(add, order, self.without_order))
        words = standardised(self._words.scores)
        # Beside scores words count as far as the chunks have them: of another language it is a few
        # names.
        found = (self._words.known * one for one in words)
        return tuple(map(add, standardised(self.scores), found))

    @cached_property
    def without_order(self) -> tuple[float, ...]:
        """The same if the order in which chunks were given says nothing."""
        if self.scores is not None:
            return self.relevance
        return tuple(standardised(self._words.scores))

    def ranked(self) -> tuple[int, ...]:
        """Numbers of the chunks, best first; of equal ones the first is better."""
        return tuple(sorted(range(len(self)), key=lambda index: -self.relevance[index]))

    @cached_property
    def _words(self) -> _Words:
        is_known = self.question and all(self.texts)
        return _Words.from_texts(self.question if is_known else "", self.texts)


@dataclass(frozen=True)
class _Words:
    """The question's words in the chunks.

    Attributes:
        weights: Per word how much it says, by how few chunks have it.
        counts: Per chunk how often it has which word.
        lengths: Words of each chunk.
        known: Share of the weights whose words any chunk has.
    """

    weights: dict[str, float]
    counts: tuple[Counter[str], ...]
    lengths: tuple[int, ...]
    known: float

    @classmethod
    def from_texts(cls, question: str, texts: Sequence[str]) -> _Words:
        asked = dict.fromkeys(_terms(question))
        counts, lengths = [], []
        for text in texts if asked else [""] * len(texts):
            terms = _terms(text)
            counts.append(Counter(term for term in terms if term in asked))
            lengths.append(len(terms))
        chunks = len(counts)
        having = {term: sum(term in one for one in counts) for term in asked}
        weights = {
            term: math.log1p((chunks - count + 0.5) / (count + 0.5))
            for term, count in having.items()
        }
        total = sum(weights.values())
        found = sum(weights[term] for term, count in having.items() if count)
        return cls(weights, tuple(counts), tuple(lengths), found / total if total else 0.0)

    @property
    def scores(self) -> list[float]:
        """BM25 of each chunk."""
        mean = sum(self.lengths) / max(1, len(self.lengths)) or 1.0
        found = []
        for counts, length in zip(self.counts, self.lengths, strict=True):
            damped = _SATURATION * (1 - _LENGTH + _LENGTH * length / mean)
            found.append(
                sum(
                    self.weights[term] * count * (_SATURATION + 1) / (count + damped)
                    for term, count in counts.items()
                )
            )
        return found


def standardised(values: Sequence[float]) -> list[float]:
    """Mean 0 and standard deviation 1; of equal values, zeros."""
    largest = max(map(abs, values), default=0.0)
    # Of values up to 1 no square is too large or too small for a float.
    scaled = [one / largest for one in values] if largest else [0.0] * len(values)
    mean = math.fsum(scaled) / max(1, len(scaled))
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in scaled) / max(1, len(scaled)))
    if deviation <= _EQUAL:
        return [0.0] * len(values)
    return [(one - mean) / deviation for one in scaled]


def _terms(text: str) -> list[str]:
    terms: list[str] = []
    for word in _WORD.findall(text.casefold()):
        if _IS_UNSPACED.match(word) and len(word) > 1:
            terms += map(add, word, word[1:])  # pairs of neighbours
        else:
            terms.append(word[:_STEM])
    return terms
