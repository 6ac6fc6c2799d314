"""Needles in a haystack in RULER's format (arXiv 2404.06654, section 3 and appendix B).

"One of the special magic numbers for brave-otter is: 1234567." stands somewhere in a long text, and
the question asks for it.  The eight variants are RULER's: what the hay is, what keys and values
are, how many keys, values per key and keys asked for.  Three things differ from RULER's program:
the essays are our own (`essay`), a key or value never occurs twice, and the instruction stands in
the prefix, the question behind the documents, with nothing put into the model's mouth.

The text is cut into chunks for retrieval (CacheClip, arXiv 2510.10129: 1000 tokens, overlap 50).
Scoring is `metrics.reference_coverage`.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.evaluation.chunking import CHUNK_TOKENS, OVERLAP, split_text
from kvcache_rag.evaluation.essay import essay_sentences, key_words
from kvcache_rag.evaluation.question import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag.evaluation.question import TokenCounter

Hay = Literal["repeat", "essay", "needles"]
Thing = Literal["words", "numbers", "uuids"]

# RULER's settings: tokens kept for the answer, places of needles in an essay, noise, wording.
ANSWER_TOKENS: Final = 128
_DEPTHS: Final = tuple(round(index * 100 / 39) for index in range(40))
_NOISE: Final = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
_NEEDLE: Final = "One of the special magic {things} for {key} is: {value}."
_LOWEST, _HIGHEST = 10**6, 10**7 - 1  # seven digits


@dataclass(frozen=True)
class NeedleVariant:
    """One kind of needle task.

    Attributes:
        hay: What the needles are hidden in: one line of noise again and again, an essay, or other
            needles, which are not asked for.
        keys: What keys are.
        values: What values are.
        needles: Keys hidden in the text.
        per_key: Values of each key.
        asked: Keys asked for at once.
    """

    hay: Hay
    keys: Thing = "words"
    values: Thing = "numbers"
    needles: int = 1
    per_key: int = 1
    asked: int = 1

    @property
    def instruction(self) -> str:
        """What stands before the documents."""
        if self._plural:
            return (
                f"Some special magic {self.values} are hidden within the following text. "
                f"Make sure to memorize it. I will quiz you about the {self.values} afterwards."
            )
        return (
            f"A special magic {self.values[:-1]} is hidden within the following text. "
            f"Make sure to memorize it. I will quiz you about the {self.values[:-1]} afterwards."
        )

    def ask(self, keys: list[str]) -> str:
        """The question about `keys`."""
        named = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        if self._plural:
            return (
                f"What are all the special magic {self.values} for {named} "
                "mentioned in the provided text?"
            )
        return (
            f"What is the special magic {self.values[:-1]} for {named} "
            "mentioned in the provided text?"
        )

    @property
    def _plural(self) -> bool:
        return self.asked * self.per_key > 1


VARIANTS: Final[dict[str, NeedleVariant]] = {
    "niah_single_1": NeedleVariant("repeat"),
    "niah_single_2": NeedleVariant("essay"),
    "niah_single_3": NeedleVariant("essay", values="uuids"),
    "niah_multikey_1": NeedleVariant("essay", needles=4),
    "niah_multikey_2": NeedleVariant("needles"),
    "niah_multikey_3": NeedleVariant("needles", keys="uuids", values="uuids"),
    "niah_multivalue": NeedleVariant("essay", per_key=4),
    "niah_multiquery": NeedleVariant("essay", needles=4, asked=4),
}


def needle_question(
    name: str,
    seed: int,
    *,
    count: TokenCounter,
    length: int = 4096,
    chunk_tokens: int = CHUNK_TOKENS,
    overlap: int = OVERLAP,
) -> Question:
    """Hide needles in a text of `length` tokens, cut it into chunks, and ask for them.

    Args:
        name: One of `VARIANTS`.
        seed: Decides everything else.
        count: Number of tokens of a text.
        length: As RULER counts: instruction, text and question, and 128 tokens for the answer, are
            together at most so many, and one sentence more would be too many.  What chunks share
            and what the prompt template adds is not counted.
        chunk_tokens: Most tokens of a chunk.
        overlap: Most tokens that a chunk shares with the one before.

    Returns:
        A question whose `answers` are all wanted, and whose `relevant` chunks are those with a
        whole needle that is asked for.

    Raises:
        InvalidInputError: If there is no such variant, or `length` is too small for its needles.
    """
    variant = VARIANTS.get(name)
    if variant is None:
        raise InvalidInputError(
            f"there is no needle task {name!r}; choose from {', '.join(VARIANTS)}"
        )
    rng = random.Random(f"niah/{name}/{length}/{seed}")
    draw = _Draw(rng)
    hidden = {
        draw.one(variant.keys): [draw.one(variant.values) for _ in range(variant.per_key)]
        for _ in range(variant.needles)
    }
    asked = rng.sample(list(hidden), variant.asked)
    needles = [_needle(variant, key, value) for key in hidden for value in hidden[key]]
    rng.shuffle(needles)
    question = variant.ask(asked)
    room = length - ANSWER_TOKENS - count(variant.instruction) - count(question)
    text = _haystack(variant, draw, needles, room, count)
    if text is None:
        raise InvalidInputError(
            f"{name} does not fit into {length} tokens; choose a greater length, such as 4096"
        )
    chunks = tuple(split_text(text, count, tokens=chunk_tokens, overlap=overlap))
    wanted = [_needle(variant, key, value) for key in asked for value in hidden[key]]
    return Question(
        id=f"{name}-{length}-{seed}",
        question=question,
        chunks=chunks,
        answers=tuple(value for key in asked for value in hidden[key]),
        relevant=tuple(
            index for index, chunk in enumerate(chunks) if any(one in chunk for one in wanted)
        ),
    )


class _Draw:
    """Draws keys, values and hay; no key and no value twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._drawn: dict[Thing, set[str]] = {"words": set(), "numbers": set(), "uuids": set()}

    def one(self, thing: Thing) -> str:
        make: dict[Thing, Callable[[], str]] = {
            "words": lambda: self.rng.choice(key_words()),
            "numbers": lambda: str(self.rng.randint(_LOWEST, _HIGHEST)),
            "uuids": lambda: str(uuid.UUID(int=self.rng.getrandbits(128), version=4)),
        }
        drawn = self._drawn[thing]
        if thing == "words" and len(drawn) > len(key_words()) // 2:
            raise InvalidInputError(
                "the text is so long that key words run out; choose a smaller length"
            )
        while (found := make[thing]()) in drawn:
            pass
        drawn.add(found)
        return found

    def hay(self, variant: NeedleVariant) -> Iterator[str]:
        if variant.hay == "essay":
            yield from essay_sentences(self.rng)
        while True:
            if variant.hay == "repeat":
                yield _NOISE
            else:
                yield _needle(variant, self.one(variant.keys), self.one(variant.values))


def _needle(variant: NeedleVariant, key: str, value: str) -> str:
    return _NEEDLE.format(things=variant.values, key=key, value=value)


def _haystack(
    variant: NeedleVariant, draw: _Draw, needles: list[str], room: int, count: TokenCounter
) -> str | None:
    """The longest text of at most `room` tokens, or None if the needles alone are too long."""
    endless, hay, tokens = draw.hay(variant), list[str](), 0
    while tokens <= 1.2 * room + 100:  # sentences together can be fewer tokens than apart
        more = list(islice(endless, 8))
        hay += more
        tokens += count("\n".join(more))
    # Where each needle goes is drawn once, as a share of the text, so that length changes nothing.
    depths = _depths(variant, draw.rng, len(needles))

    def text(sentences: int) -> str:
        return _with_needles(variant, hay[:sentences], needles, depths)

    least = 1 if variant.hay == "essay" else len(needles)
    if count(text(least)) > room:
        return None
    low, high = least, len(hay)
    while high - low > 1:
        middle = (low + high) // 2
        if count(text(middle)) <= room:
            low = middle
        else:
            high = middle
    return text(low)


def _depths(variant: NeedleVariant, rng: random.Random, needles: int) -> list[float]:
    if variant.hay == "essay":  # one of RULER's 40 depths each
        return sorted(depth / 100 for depth in rng.sample(_DEPTHS, needles))
    return sorted(rng.random() for _ in range(needles))


def _with_needles(
    variant: NeedleVariant, hay: list[str], needles: list[str], depths: list[float]
) -> str:
    sentences = list(hay)
    for needle, depth in reversed(list(zip(needles, depths, strict=True))):
        sentences.insert(int(len(hay) * depth), needle)
    return (" " if variant.hay == "essay" else "\n").join(sentences)
