"""Needles in a haystack: facts hidden in long texts, in RULER's format.

"One of the special magic numbers for brave-otter is: 1234567." stands somewhere in a long text, and
the question asks for it (arXiv 2404.06654, section 3 and appendix B).  The eight variants are
RULER's: what the hay is, what keys and values are, how many keys, values per key and keys asked
for.  Three things differ from RULER's program: a key or value never occurs twice, the instruction
stands in the prefix, the question behind the documents, with nothing put into the model's mouth,
and the essays are our own.  RULER uses published ones, which we may not copy; this text is drawn
from sentence patterns, never twice the same, without digits and without the words of needles.  It
is plainer than an essay: full prefill should find needles in it a little more easily.  The text is
cut into chunks for retrieval (CacheClip, arXiv 2510.10129: 1000 tokens, overlap 50).
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_lab.evaluation.datasets import CHUNK_TOKENS, OVERLAP, split_text
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag_lab.scoring.question import TokenCounter


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
            index for index, chunk in enumerate(chunks) if any(needle in chunk for needle in wanted)
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
        while (value := make[thing]()) in drawn:
            pass
        drawn.add(value)
        return value

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


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_SUBJECTS: Final = _phrases(
    "a patient reader|an honest critic|the careful builder|a young company|"
    "the average committee|a good teacher|the curious traveller|an old craftsman|"
    "the busy editor|a small team|the quiet majority|a stubborn inventor|the local council|"
    "a clever student|the night shift|an anxious manager|the amateur painter|"
    "a retired engineer|the new recruit|a reluctant expert"
)

_THINGS: Final = _phrases(
    "the first draft|a difficult habit|the shape of the problem|a long conversation|"
    "the cost of waiting|an unfinished plan|the value of silence|a borrowed idea|"
    "the weight of custom|a simple question|the edge of the map|an early mistake|"
    "the work of others|a narrow view|the rhythm of the week|a better tool|"
    "the limits of advice|an open window|the memory of a failure|a promise made in haste|"
    "the taste of success|a crowded market|the patience of friends|an awkward truth"
)

_VERBS: Final = _phrases(
    "learns to respect|forgets to examine|returns to|quietly avoids|seldom understands|"
    "prefers to discuss|is surprised by|slowly discovers|tends to overlook|cannot ignore|"
    "keeps a record of|makes room for|is shaped by|argues against|finds comfort in|"
    "has little use for|pays attention to|measures everything by"
)

_REASONS: Final = _phrases(
    "because nobody else will|although the season is short|when the noise has settled|"
    "before the meeting begins|as long as the weather holds|unless the rules change|"
    "once the excitement fades|while the kettle boils|if only to learn something|"
    "until the money runs out|whenever the subject comes up|after everyone has gone home|"
    "even though the evidence is thin|since the alternative is worse"
)

_OPENINGS: Final = _phrases(
    "In most towns,|On reflection,|It is often said that|Looking back,|In practice,|"
    "For many years,|Strangely enough,|By and large,|From a distance,|Sooner or later,|"
    "In my experience,|As a rule,|To be fair,|Over a long winter,|At first glance,|"
    "More than once,"
)

_REMARKS: Final = _phrases(
    "That is not a complaint.|The difference is larger than it looks.|Few people notice.|"
    "This takes more courage than skill.|There is no shortcut.|The reverse is just as common.|"
    "It would be easy to blame luck.|Nothing about this is new.|"
    "The lesson is not a comfortable one.|One can live with that.|I used to think otherwise.|"
    "Habits are patient."
)

_PATTERNS: Final = (
    "{opening} {subject} {verb} {thing} {reason}.",
    "{opening} {subject} {verb} {thing}, and {subject2} {verb2} {thing2}.",
    "{Subject} {verb} {thing} {reason}.",
    "{Subject} {verb} {thing}; {subject2}, however, {verb2} {thing2} {reason}.",
    "What {subject} wants from {thing} is not what {subject2} wants from {thing2}.",
    "Between {thing} and {thing2} there is less distance than {subject} supposes.",
    "{Reason}, {subject} {verb} {thing}.",
    "Nobody asks why {subject} {verb} {thing} {reason}.",
)

# One sentence in so many is a short remark.
_REMARK_SHARE: Final = 0.15

_ADJECTIVES: Final = _words(
    "amber ancient arctic autumn bold brave bright brisk broad calm candid cheerful chilly "
    "clever cobalt copper coral crimson crisp curly dainty dapper daring dusty eager earnest "
    "ebony elder emerald fabled faint fancy feral fleet fluffy frosty gentle giddy gilded "
    "glossy golden graceful grand hardy hazel hearty hollow humble icy idle indigo ivory jaunty "
    "jolly keen kindly lanky lavish lively lofty lone lucid lunar lush mellow merry mighty "
    "misty modest mossy muddy nimble noble novel odd olive opal orderly ornate pale patient "
    "pearly placid plucky polite proud quaint quick quiet rapid rare ripe robust rosy rugged "
    "rustic sandy scarlet serene sharp silent sleek slender snowy solar solemn spicy stark "
    "steady stout subtle sunny supple swift tall tame tawny tidy timid tiny tranquil velvet "
    "vivid warm wary wild windy wise witty woolly young zesty"
)

_NOUNS: Final = _words(
    "acorn anchor anvil apron arrow badger banner barrel basin basket beacon beaver bell birch "
    "bonnet bottle bramble bridge bucket button cabin candle canoe canyon carpet castle cedar "
    "cellar cherry chisel clover comet compass cottage cradle cricket crown curtain cymbal "
    "dagger daisy dome dragon drum eagle easel elm ember falcon feather fern ferry fiddle finch "
    "flask flute forest fountain fox gander garden garnet gazelle glacier glove goblet goose "
    "granite grove hammer harbor harp hatchet hawk heron hill hive iguana island jacket jaguar "
    "jar kettle kite ladder lagoon lamp lantern lark lemon lily lizard loom lynx magnet mango "
    "maple marble meadow mitten moth mountain napkin needle nettle oak oasis orchard otter owl "
    "oyster paddle panther parrot pebble pelican pepper piano pigeon pillow pine plum pocket "
    "pony puzzle quail quilt rabbit raft raven ribbon robin rocket saddle sail salmon saucer "
    "shovel spade sparrow spoon stork sundial swan tablet teapot thimble thistle tiger trumpet "
    "tulip tunnel turtle umbrella valley violin wagon walnut walrus whistle willow window yak "
    "zebra"
)


@lru_cache(maxsize=1)
def key_words() -> tuple[str, ...]:
    """Every "adjective-noun" there is, as RULER makes its words; more than twenty thousand."""
    return tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS)


def essay_sentences(rng: random.Random) -> Iterator[str]:
    """Endless sentences; the same `rng` gives the same ones."""
    while True:
        if rng.random() < _REMARK_SHARE:
            yield rng.choice(_REMARKS)
            continue
        subject, subject2 = rng.sample(_SUBJECTS, 2)
        thing, thing2 = rng.sample(_THINGS, 2)
        verb, verb2 = rng.sample(_VERBS, 2)
        reason = rng.choice(_REASONS)
        yield rng.choice(_PATTERNS).format(
            opening=rng.choice(_OPENINGS),
            subject=subject,
            Subject=subject[0].upper() + subject[1:],
            subject2=subject2,
            verb=verb,
            verb2=verb2,
            thing=thing,
            thing2=thing2,
            reason=reason,
            Reason=reason[0].upper() + reason[1:],
        )
