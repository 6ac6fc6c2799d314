"""The prompts of the peers' benchmark, as text and as ids, each part exactly as long as wanted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Final

from benchmarks.when_not import articles
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.prompt.template import PromptTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


PREFIX: Final = 128
CHUNK: Final = 256
QUERY: Final = 40
LONGEST: Final = 4096
QUESTIONS: Final = 24
_FILLERS: Final = ("and", "so", "on", "as", "it", "is")
_SYSTEM: Final = """Answer the question using only the documents below. If they do not contain the
answer, say that you do not know. Every document stands by itself, and their order says nothing
about what they are worth. Where two documents disagree, name both and say where they differ. Keep
names, numbers and years as they are written there. Do not add what you remember from elsewhere, and
do not repeat the question. Write in full sentences, in the language of the question, and begin with
the answer itself. A short answer is better than a long one, but leave out nothing that was asked
for, in whatever words it was asked."""
_ASKED: Final = (
    "What do the documents say about the year in which this began, and who was there to see it?",
    "Which of the places that the documents name is the oldest one, and how do they know of it?",
    "Who is said to have changed most of what these documents describe, and what did it cost them?",
    "How many people, ships, houses or years are counted in the documents, and which are guesses?",
)


@dataclass(frozen=True)
class Material:
    """What prompts are made of.

    Attributes:
        system: The template's instruction.
        prefix: Ids of everything before the first chunk.
        texts: Of the chunks.
        chunks: Ids of each chunk in its wrapper.
        questions: As they are asked.
        queries: Ids of everything behind the chunks, per question.
    """

    system: str
    prefix: tuple[int, ...]
    texts: tuple[str, ...]
    chunks: tuple[tuple[int, ...], ...]
    questions: tuple[str, ...]
    queries: tuple[tuple[int, ...], ...]

    def prompt(self, context: int, order: int, question: int) -> dict[str, Any]:
        """One prompt, as text and as ids.

        Args:
            context: Tokens of its chunks.
            order: Which of their orders, 0 for the first one.
            question: Which question.
        """
        chosen = order_of(context // CHUNK, order)
        return {
            "texts": [self.texts[index] for index in chosen],
            "question": self.questions[question],
            "prefix": list(self.prefix),
            "context": [*self.prefix, *(token for one in chosen for token in self.chunks[one])],
            "query": list(self.queries[question]),
        }


def order_of(chunks: int, order: int) -> list[int]:
    """Numbers of the chunks in an order: 0 is their own one, the others begin with another chunk.

    Orders next to each other never begin alike, so that what they share is the instruction alone.
    """
    if order == 0 or chunks < 2:
        return list(range(chunks))
    first = 1 + (order - 1) % (chunks - 1)
    rest = [index for index in range(chunks) if index != first]
    random.Random(1000 * chunks + order).shuffle(rest)
    return [first, *rest]


def fitted(count: Callable[[str], int], words: Sequence[str], tokens: int) -> str:
    """The first words, and fillers, as a text of exactly so many tokens.

    Args:
        count: Tokens of a text.
        words: Enough of them.
        tokens: How many are wanted.

    Raises:
        ValueError: If no such text was found.
    """
    low, high = 0, len(words)
    while low < high:  # the most words that fit
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if count(" ".join(words[:middle])) <= tokens else (low, middle - 1)
        )
    for kept in range(low, max(low - 8, 0), -1):
        filling = words[:kept]
        for filler in islice(cycle(_FILLERS), tokens):
            found = count(" ".join(filling))
            if found >= tokens:
                break
            filling = [*filling, filler]
        if count(" ".join(filling)) == tokens:
            return " ".join(filling)
    raise ValueError(f"no text of {tokens} tokens was found")


def template_of(system: str) -> PromptTemplate:
    """The template of all sides."""
    return PromptTemplate(system=system)


def material(tokenizer: Any, longest: int = LONGEST) -> Material:
    """Everything that is asked, for contexts up to `longest` tokens of chunks."""

    def prefix_tokens(text: str) -> int:
        return len(PromptRenderer(template_of(f"{text}\n\n"), tokenizer).prefix_ids)

    system = fitted(prefix_tokens, _SYSTEM.split(), PREFIX) + "\n\n"
    renderer = PromptRenderer(template_of(system), tokenizer)
    texts, words = [], " ".join(articles()).split()
    for _ in range(longest // CHUNK):
        text = fitted(lambda text: len(renderer.chunk_ids(text)), words[: 2 * CHUNK], CHUNK)
        texts.append(text)
        words = words[len(text.split()) :]
    questions = []
    for number in range(QUESTIONS):
        asked = f"{_ASKED[number % len(_ASKED)]} Think of document {number % 9 + 1} first."
        words_of = [*asked.split(), *_FILLERS[: number % len(_FILLERS)]]
        questions.append(fitted(lambda text: len(renderer.query_ids(text)), words_of, QUERY))
    return Material(
        system,
        renderer.prefix_ids,
        tuple(texts),
        tuple(map(renderer.chunk_ids, texts)),
        tuple(questions),
        tuple(map(renderer.query_ids, questions)),
    )
