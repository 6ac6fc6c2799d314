"""The rules by which turns become a prompt, one by one; `test_conversations` has the front ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvcache_rag import InvalidInputError
from kvcache_rag.prompt.conversation import (
    foreign_instructions,
    in_two_roles,
    instructed,
    joined,
    opened,
    rendered,
    said,
)

CALL: dict[str, Any] = {**said("assistant", ""), "tool_calls": [{"id": "a"}]}
RESULT: dict[str, Any] = {**said("tool", "2"), "tool_call_id": "a"}


def test_neighbours_of_one_role_are_one_and_silence_is_none() -> None:
    turns = [said("user", "a"), said("user", "  "), said("user", "b"), said("assistant", "c")]
    assert joined(turns) == [said("user", "a\n\nb"), said("assistant", "c")]
    assert joined([said("user", " ")]) == []


def test_calls_and_results_stay_what_they_are() -> None:
    turns = [CALL, RESULT, RESULT, said("assistant", "It is 2."), CALL, said("assistant", "c")]
    assert joined(turns) == turns
    assert joined([said("tool", "1"), said("tool", "2")]) == [said("tool", "1"), said("tool", "2")]


def test_thousands_of_turns_are_joined_once() -> None:
    text = "x" * 2000
    started = time.monotonic()
    assert joined([said("user", text)] * 4000) == [said("user", "\n\n".join([text] * 4000))]
    assert time.monotonic() - started < 5, "not copied for every turn"


def test_an_instruction_of_somebody_else_goes_before_what_the_user_said_last() -> None:
    turns = [
        *(said("system", " Own. "), said("user", "a"), said("assistant", "b")),
        *(said("system", "Be brief."), said("user", "c"), said("system", "Be brief.")),
    ]
    expected = [said("user", "a"), said("assistant", "b"), said("user", "Be brief.\n\nc")]
    assert instructed(turns, "Own.\n") == (expected, True)
    assert instructed(turns[:3], "Own.", "other") == (expected[:2], False)
    assert foreign_instructions(turns, "Own.") == ["Be brief."]
    assert instructed([said("system", "Be brief."), RESULT], "Own.") == (
        [said("user", "Be brief."), RESULT],
        True,
    )


def test_a_conversation_begins_with_an_instruction_unless_it_has_one() -> None:
    asked, own = said("user", "a"), said("system", "b")
    assert opened([asked], "Read.") == [said("system", "Read."), asked]
    assert opened([asked, own], "Read.") == [asked, own]
    assert opened([asked], None) == [asked]


def in_users_words(turns: Any, **_: Any) -> str:
    if any(turn["role"] == "system" for turn in turns):
        raise InvalidInputError("no system")
    return "|".join(turn["content"] for turn in turns)


def test_a_template_that_knows_two_roles_gets_two() -> None:
    turns = [said("system", "Read."), said("user", "a"), said("assistant", "b")]
    assert in_two_roles(turns) == [said("user", "Read.\n\na"), said("assistant", "b")]
    assert rendered(in_users_words, turns) == "Read.\n\na|b"
    with pytest.raises(InvalidInputError, match="no system"):
        rendered(in_users_words, [said("system", "Read."), CALL, RESULT])
    with pytest.raises(InvalidInputError, match="ask something"):
        rendered(in_users_words, [])
