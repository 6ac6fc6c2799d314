"""Who is asked what, how often and in which order, in the peers' benchmark.

Each kind of job needs a state of the cache, and a round visits the kinds so that most sides are in
it already:

- `cold`      nothing is known
- `prefix`    the same chunks in the same order were asked before, with another question
- `long`      the same, with a long answer
- `shift`     (llama.cpp) a new order, equal runs of the last prompt shifted (`--cache-reuse`)
- `reorder`   the chunks are known, in another order
- `full`      (ours) a full prefill, which nothing is kept of
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

OURS: Final = ("ours-auto", "ours-int8", "ours-int4")
LLAMA: Final = ("llama-BF16", "llama-F16", "llama-Q8_0", "llama-Q4_1")
SIDES: Final = (*OURS, *LLAMA, "stock", "kvboost")
# Not measured unless it is asked for: weights in the order in which torch loads them.
MORE_SIDES: Final = ("ours-plain",)
NEW: Final = 32
LONG: Final = 256


@dataclass(frozen=True)
class Rounds:
    """How often a context is asked.

    Attributes:
        full: Rounds over all kinds.
        repeats: Of what is cheap, in each of them.
        long: Of the long answers, in all of them together.
        without: Sides that are left out, for want of time.
        once: Sides that have the first full round only.
    """

    full: int
    repeats: int
    long: int
    without: tuple[str, ...] = ()
    once: tuple[str, ...] = ()


# By threads and tokens of context.
PLAN: Final = {
    (1, 1024): Rounds(3, 3, 1),
    (1, 2048): Rounds(2, 4, 1),
    (1, 4096): Rounds(2, 4, 1, without=("llama-F16",), once=("llama-Q4_1", "kvboost")),
    (2, 1024): Rounds(2, 4, 0),
    (2, 2048): Rounds(1, 6, 0, without=("llama-F16", "kvboost")),
    (2, 4096): Rounds(1, 6, 0, without=("llama-F16", "kvboost")),
}
QUICK: Final = {(1, 1024): Rounds(1, 2, 1)}


@dataclass(frozen=True)
class Job:
    """One prompt for one side.

    Attributes:
        side: Of `SIDES`.
        kind: See above.
        threads: Of the side.
        context: Tokens of the chunks.
        round: From 0.
        repeat: From 0, within the round.
        order: Of the chunks (see `peers_prompts.order_of`).
        question: Which one.
        new: Tokens to generate.
    """

    side: str
    kind: str
    threads: int
    context: int
    round: int
    repeat: int
    order: int
    question: int
    new: int

    @property
    def name(self) -> str:
        """What a record of it is found by."""
        parts = (self.threads, self.context, self.side, self.kind, self.round, self.repeat)
        return "/".join(map(str, parts))


def jobs(threads: int, context: int, rounds: Rounds, sides: Sequence[str]) -> Iterator[Job]:
    """All jobs of a context, in the order in which they are asked.

    A side's `cold` of one round is the exact answer to its `prefix` of the round before, and
    llama.cpp's `reorder` to its `shift`; `full` and stock's `reorder` are to `reorder` of their
    round.
    """
    sides = [side for side in sides if side not in rounds.without]

    def turn(kind: str, number: int, repeat: int, order: int, question: int) -> Iterator[Job]:
        start = (number + repeat) % max(len(sides), 1)
        new = LONG if kind == "long" else NEW
        for side in (*sides[start:], *sides[:start]):
            if number and side in rounds.once:
                continue
            if asks(side, kind) and (repeat == 0 or is_cheap(side, kind)):
                at = (order, question)
                if kind == "reorder" and side.startswith("llama"):
                    at = (1 + after, after)
                yield Job(side, kind, threads, context, number, repeat, *at, new)

    for number in range(rounds.full):
        # The next round's, and the first one's behind the last; alone, a round has no such.
        after = (number + 1) % rounds.full if rounds.full > 1 else 1
        yield from turn("cold", number, 0, 0, number)
        for repeat in range(rounds.repeats):
            question = after if repeat == 0 else rounds.full + repeat
            yield from turn("prefix", number, repeat, 0, question)
        if number < rounds.long:
            yield from turn("long", number, 0, 0, 2 * rounds.full + rounds.repeats)
        yield from turn("shift", number, 0, 1 + number, number)
        for repeat in range(rounds.repeats):
            order = 1 + number if repeat == 0 else rounds.full + number * rounds.repeats + repeat
            question = number if repeat == 0 else rounds.full + repeat
            yield from turn("reorder", number, repeat, order, question)
        yield from turn("full", number, 0, 1 + number, number)


def asks(side: str, kind: str) -> bool:
    """Whether a kind is asked of a side."""
    if kind == "shift":
        return side.startswith("llama")
    return kind != "full" or side.startswith("ours")


def is_cheap(side: str, kind: str) -> bool:
    """Whether a job of a side takes no prefill of the context."""
    return (kind == "prefix" and side != "kvboost") or (
        kind == "reorder" and side.startswith("ours")
    )


def wanted(
    plan: dict[tuple[int, int], Rounds],
    threads: Sequence[int],
    contexts: Sequence[int],
    rounds: int | None,
) -> dict[tuple[int, int], Rounds]:
    """The part of a plan that is asked for, with so many full rounds if that is said."""
    found: dict[tuple[int, int], Rounds] = {}
    for (number, context), planned in plan.items():
        if number in threads and context in contexts:
            full = rounds or planned.full
            found[number, context] = replace(planned, full=full, long=min(planned.long, full))
    return found


def prompt_key(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """What two records of equal prompts have in common."""
    return record["context"], record["order"], record["question"]
