"""The prompts of the peers' benchmark, as text and as ids, each part exactly as long as wanted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Final

from benchmarks.answers import Retriever
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.prompt.template import PromptTemplate
from kvcache_rag_lab.articles import read_articles
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


PREFIX: Final = 128
CHUNK: Final = 256
QUERY: Final = 40
LONGEST: Final = 4096
_FILLERS: Final = ("and", "so", "on", "as", "it", "is")
_SYSTEM: Final = """Answer the question using only the documents below. If they do not contain the
answer, say that you do not know. Every document stands by itself, and their order says nothing
about what they are worth. Where two documents disagree, name both and say where they differ. Keep
names, numbers and years as they are written there. Do not add what you remember from elsewhere, and
do not repeat the question. Write in full sentences, in the language of the question, and begin with
the answer itself. A short answer is better than a long one, but leave out nothing that was asked
for, in whatever words it was asked."""
# About the first articles, of which every context has chunks.  Of the public sets' documents
# `BestFew` takes 1.8 on average (one for 49 % of the questions, two for 21, three for 30), of these
# chunks 1.6 to 2.0 for the first six questions, which are asked most; a row says how many (`read`).
_ASKED: Final = (
    "Where was Ada Lovelace born, and who was her father?",
    "Who was the first patient that was given penicillin?",
    "Were Neil Armstrong and Alexander Fleming born in the same country?",
    "How many years lie between Fleming's Nobel Prize and the landing of Apollo 11?",
    "In which city did both Ada Lovelace and Alexander Fleming spend years?",
    "Which of Charles Babbage and Howard Florey went to the United States?",
    "Why did Alexander Fleming name the substance penicillin?",
    "Who was born earlier, Ada Lovelace or Ludwig van Beethoven?",
    "How much did the Philharmonic Society pay Beethoven for the symphony?",
    "Did Ada Lovelace die before Alexander Fleming was born?",
    "On which rocket did Apollo 11 start, and when?",
    "Which article did Ada Lovelace translate from French?",
    "Which came first, Note G or the first performance of the Ninth Symphony?",
    "What did Armstrong and Aldrin set up on the Moon?",
    "Who lived longer, Ada Lovelace or Alexander Fleming?",
    "Whose poem do the singers of the Ninth Symphony sing?",
    "What does Note G say step by step?",
    "Which took longer, the walk on the Moon or the Ninth Symphony?",
    "Which ship picked up the crew of Apollo 11?",
    "Which is older, the Analytical Engine or penicillin?",
    "In which hospital did Alexander Fleming work?",
    "What had Howard Florey and the builders of the Saturn rocket to do with the war?",
    "How long did it take Beethoven to write the Ninth Symphony?",
    "Which of Babbage's engine and Apollo's computer gave alarms?",
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
        scores: How well each chunk matches, per question, as a retriever says.
    """

    system: str
    prefix: tuple[int, ...]
    texts: tuple[str, ...]
    chunks: tuple[tuple[int, ...], ...]
    questions: tuple[str, ...]
    queries: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[float, ...], ...]

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
            "scores": [self.scores[question][index] for index in chosen],
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
    texts, words = [], " ".join(article.text for article in read_articles()).split()
    for _ in range(longest // CHUNK):
        text = fitted(lambda text: len(renderer.chunk_ids(text)), words[: 2 * CHUNK], CHUNK)
        texts.append(text)
        words = words[len(text.split()) :]
    questions = [
        fitted(lambda text: len(renderer.query_ids(text)), asked.split(), QUERY) for asked in _ASKED
    ]
    rows = [Question(asked, asked, tuple(texts), ()) for asked in _ASKED]
    return Material(
        system,
        renderer.prefix_ids,
        tuple(texts),
        tuple(map(renderer.chunk_ids, texts)),
        tuple(questions),
        tuple(map(renderer.query_ids, questions)),
        tuple(map(tuple, Retriever(None).scores(rows))),
    )
