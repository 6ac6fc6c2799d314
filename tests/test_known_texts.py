"""Retrieved texts found again in prompts."""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_rag.integration import KnownTexts, Reference, known_texts
from kvcache_rag.integration.known_texts import FEWEST_BYTES

MOON = "The moon has no air, so there is no sound."
SEA = "The sea is salt because rivers bring minerals."
REFERENCE = Reference("a" * 64, "b" * 64, 3, 4, "c" * 64)


def known(*texts: str) -> KnownTexts:
    found = KnownTexts()
    for text in texts:
        found.note(text)
    return found


def texts(where: KnownTexts, prompt: str) -> list[str]:
    return [one.text for one in where.find(prompt)]


def test_white_space_at_the_ends_does_not_count() -> None:
    given = f"\n  {SEA} \n"
    assert texts(known(given), f"a\n \t{SEA}\t\r\nb") == [given]


@pytest.mark.parametrize("letter", ["x", "é", "猫", "𝄞"])
def test_a_short_text_is_left_alone(letter: str) -> None:
    """Eight Chinese characters say as much as two dozen letters."""
    least = FEWEST_BYTES // len(letter.encode())
    short, enough = letter * (least - 1), letter * least
    assert texts(known(short), short) == []
    assert texts(known(enough), f"top\n{enough}") == [enough]


def test_what_fills_a_text_is_as_many_as_there_may_be() -> None:
    where = known(MOON, SEA)
    text = f"{MOON}\n\n{SEA}\n{MOON}"
    assert [one.text for one in where.filling(text, 3)] == [MOON, SEA, MOON]
    assert where.filling(text, 2) == []
    assert where.filling(f"{MOON}\nand", 3) == []


def test_many_texts_that_begin_alike_are_not_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["x" * 30] * 200
    where = known(*("\n".join(lines[:count]) + "y" for count in range(1, 200)))
    looked: list[int] = []
    real = known_texts.bisect_right

    def counted(*given: Any, **options: Any) -> int:
        looked.append(1)
        return real(*given, **options)

    monkeypatch.setattr(known_texts, "bisect_right", counted)
    assert where.find("\n".join([*lines, "z"])) == []
    assert len(looked) <= len(lines) * (known_texts._TRIES + 1)


def test_a_reference_is_kept_until_another_comes() -> None:
    where = KnownTexts()
    where.note(SEA, REFERENCE)
    where.note(SEA)
    assert [one.reference for one in where.find(SEA)] == [REFERENCE]


def test_the_longest_unused_are_forgotten() -> None:
    where = KnownTexts(limit=len(MOON) + len(SEA))
    for text in (MOON, SEA, MOON, SEA[::-1]):
        where.note(text)
    assert len(where) == 2
    assert texts(where, f"{MOON}\n{SEA}\n{SEA[::-1]}") == [MOON, SEA[::-1]]


# What only looks like a text: joined to other words on its line, spaced otherwise, in capitals.
WORDS = st.lists(
    st.sampled_from(["alpha", "beta", "ALPHA", "alpha  beta", "猫", "猫在睡", "\n", "."]),
    min_size=4,
    max_size=12,
)
JOINS = st.lists(st.sampled_from(["\n", "\n\n", " ", "  \n\t", ". "]), min_size=6, max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=8), st.lists(st.integers(0, 7), max_size=5), JOINS)
def test_law_a_prompt_is_cut_as_by_trying_every_text(
    lists: list[list[str]], order: list[int], joins: list[str]
) -> None:
    every = [" ".join(words).strip() for words in lists]
    parts = [every[index % len(every)] for index in order]
    prompt = "top" + "".join(map("".join, zip(joins, [*parts, "end alpha"], strict=False)))
    found = known(*every).find(prompt)
    assert [one.text for one in found] == slowly(every, prompt)
    assert [prompt[one.start : one.end] for one in found] == [one.text for one in found]


def slowly(every: list[str], prompt: str) -> list[str]:
    """The specification: at every line, every text, the longest first."""
    usable = sorted(
        {one for one in every if len(one.encode()) >= FEWEST_BYTES}, key=len, reverse=True
    )
    found, start = [], 0
    while start < len(prompt):
        line = len(prompt) - len(prompt[start:].lstrip(" \t"))
        for one in usable:
            end = line + len(one)
            if prompt.startswith(one, line) and not prompt[end:].partition("\n")[0].strip():
                found.append(one)
                start = end
                break
        start = prompt.find("\n", start) + 1 or len(prompt)
    return found


def test_many_texts_of_one_beginning_are_searched_by_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work for a prompt does not grow with what is known: comparisons are counted."""
    shuffled = [f"file_path: /documents/{number:06}\n\n{SEA}" for number in range(20_000)]
    random.Random(0).shuffle(shuffled)
    where = known(*shuffled)
    looked: list[int] = []

    def counted(*arguments: Any, **options: Any) -> int:
        looked.append(1)
        return bisect_right(*arguments, **options)

    monkeypatch.setattr(known_texts, "bisect_right", counted)
    prompt = "\n\n".join(shuffled[:10])
    assert texts(where, prompt) == shuffled[:10]
    assert len(looked) == 10
