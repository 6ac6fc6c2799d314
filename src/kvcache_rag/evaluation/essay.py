"""Text that means nothing and reads like an essay: the hay in which needles are hidden.

RULER uses published essays, which we may not copy; this text is drawn from sentence patterns of our
own, never twice the same, without digits and without the words of needles.  It is plainer than an
essay: full prefill should find needles in it a little more easily.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvcache_rag.reader.language import words

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


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

_ADJECTIVES: Final = words(
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
_NOUNS: Final = words(
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
