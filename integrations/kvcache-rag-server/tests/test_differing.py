"""Where two answers differ: by the words that scores of answers compare, and by no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_rag_lab.scoring.metrics import exact_match
from kvcache_rag_server.differing import difference

WORDS = ("a", "the", "Red", "red,", "blue.", "blue-ish", "-", "\n", "U.S.", "us")
ANSWERS = st.lists(st.sampled_from(WORDS)).map(" ".join)


def marked(parts: object) -> list[str]:
    return [part.text for part in parts if part.differs]  # type: ignore[attr-defined]  # parts of an answer


@given(ANSWERS | st.text(), ANSWERS | st.text())
def test_law_parts_are_the_text_and_marks_are_what_scores_see(first: str, second: str) -> None:
    found = difference(first, second)
    assert "".join(part.text for part in found.first) == first
    assert "".join(part.text for part in found.second) == second
    assert found.same == bool(exact_match(first, second))
    assert difference(first, first).same


@given(ANSWERS, ANSWERS)
def test_law_what_is_the_same_has_no_mark_and_nothing_else_has_none(
    first: str, second: str
) -> None:
    found = difference(first, second)
    assert found.same == (not marked(found.first) and not marked(found.second))


@pytest.mark.parametrize(
    ("first", "second", "here", "there"),
    [
        ("Osha Grell", "the osha grell.", [], []),
        ("Tolmi", "not found", ["Tolmi"], ["not found"]),
        ("It costs 412 euros.", "It costs 77 euros", ["412"], ["77"]),
        ("one two three four", "one 2 three", ["two", "four"], ["2"]),
        ("", "not found", [], ["not found"]),
        ("red \n lamp", "red lamp", [], []),
    ],
)
def test_words_that_differ_are_marked(
    first: str, second: str, here: list[str], there: list[str]
) -> None:
    found = difference(first, second)
    assert (marked(found.first), marked(found.second)) == (here, there)
