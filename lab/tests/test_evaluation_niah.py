"""Needles in haystacks: RULER's format, lengths by a tokenizer."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from small import make_tokenizer

from kvcache_rag import InvalidInputError
from kvcache_rag_lab.evaluation.niah import ANSWER_TOKENS, VARIANTS, key_words, needle_question
from kvcache_rag_lab.evaluation.tasks import task_by_name
from kvcache_rag_lab.reader import KINDS

if TYPE_CHECKING:
    from kvcache_rag_lab.scoring.question import Question

NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NUMBER = re.compile(r"[1-9]\d{6}")
WORD = re.compile(r"[a-z]+-[a-z]+")


def words(text: str) -> int:
    return len(text.split())


def letters(text: str) -> int:
    """By a tokenizer of one token per character."""
    return len(make_tokenizer()(text, add_special_tokens=False)["input_ids"])


def whole(name: str, seed: int = 0, length: int = 1500) -> tuple[Question, str]:
    """A question over one chunk, and its text."""
    question = needle_question(name, seed, count=words, length=length, chunk_tokens=10**6)
    (text,) = question.chunks
    return question, text


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("count", "length"), [(words, 700), (words, 4096), (letters, 6000)])
def test_lengths_are_rulers(name: str, count: Any, length: int) -> None:
    question = needle_question(name, 3, count=count, length=length, chunk_tokens=10**6)
    (text,) = question.chunks
    instruction = VARIANTS[name].instruction
    used = count(instruction) + count(text) + count(question.question) + ANSWER_TOKENS
    lines = text.split("\n") if "\n" in text else re.findall(r"[^.;]+[.;]", text)
    assert used <= length
    assert used + 1.5 * max(map(count, lines)) > length  # no room for a sentence more


@pytest.mark.parametrize("name", VARIANTS)
def test_a_seed_decides_everything(name: str) -> None:
    assert whole(name, 5) == whole(name, 5)
    first, second = whole(name, 5)[0], whole(name, 6)[0]
    assert (first.id, first.question) != (second.id, second.question)
    assert not set(first.answers) & set(second.answers)


@pytest.mark.parametrize(
    ("name", "keys", "per_key", "asked", "key", "value"),
    [
        ("niah_single_1", 1, 1, 1, "words", "numbers"),
        ("niah_single_2", 1, 1, 1, "words", "numbers"),
        ("niah_single_3", 1, 1, 1, "words", "uuids"),
        ("niah_multikey_1", 4, 1, 1, "words", "numbers"),
        ("niah_multivalue", 1, 4, 1, "words", "numbers"),
        ("niah_multiquery", 4, 1, 4, "words", "numbers"),
    ],
)
def test_as_many_needles_as_rulers_settings_say(
    name: str, keys: int, per_key: int, asked: int, key: str, value: str
) -> None:
    question, text = whole(name)
    found = NEEDLE.findall(text)
    assert Counter(Counter(one for _, one, _ in found).values()) == {per_key: keys}
    assert {things for things, _, _ in found} == {value}
    assert all(_is(key, one) and _is(value, said) for _, one, said in found)
    named = [one for _, one, _ in found if one in question.question]
    assert len(set(named)) == asked
    # Wanted are all values of the keys that are asked for, and nothing else.
    assert sorted(question.answers) == sorted(said for _, one, said in found if one in named)
    assert len(set(question.answers)) == asked * per_key


def _is(thing: str, text: str) -> bool:
    if thing == "uuids":
        return str(uuid.UUID(text)) == text and uuid.UUID(text).version == 4
    return bool({"words": WORD, "numbers": NUMBER}[thing].fullmatch(text))


def test_hay_is_noise_an_essay_or_other_needles() -> None:
    noise = [line for line in whole("niah_single_1")[1].split("\n") if not NEEDLE.match(line)]
    assert set(noise) == {NOISE}
    essay = NEEDLE.sub("", whole("niah_multikey_1")[1])
    assert not re.search(r"\d|magic", essay)
    sentences = re.findall(r"[^.]+\.", essay)
    assert len(set(sentences)) > 0.8 * len(sentences)
    for name, key, value in (("2", "words", "numbers"), ("3", "uuids", "uuids")):
        # So many that keys drawn blindly would repeat.
        question, text = whole(f"niah_multikey_{name}", length=20_000)
        needles = [NEEDLE.fullmatch(line) for line in text.split("\n")]
        parts = [needle.groups() for needle in needles if needle is not None]
        assert len(parts) == len(needles) > 1000
        assert len({one for _, one, _ in parts}) == len({said for *_, said in parts}) == len(parts)
        assert all(_is(key, one) and _is(value, said) for _, one, said in parts)
        assert sum(one in question.question for _, one, _ in parts) == 1


def test_wording_is_rulers() -> None:
    hidden = "hidden within the following text. Make sure to memorize it. I will quiz you about"
    asked = "mentioned in the provided text?"
    one, several = VARIANTS["niah_single_1"], VARIANTS["niah_multivalue"]
    assert one.instruction == f"A special magic number is {hidden} the number afterwards."
    assert several.instruction == f"Some special magic numbers are {hidden} the numbers afterwards."
    uuid = VARIANTS["niah_single_3"].ask(["a-b"])
    assert uuid == f"What is the special magic uuid for a-b {asked}"
    numbers = VARIANTS["niah_multiquery"].ask(["a-b", "c-d", "e-f"])
    assert numbers == f"What are all the special magic numbers for a-b, c-d, and e-f {asked}"


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_hold_needles_whole_and_relevant_ones_are_named(name: str) -> None:
    question = needle_question(name, 1, count=words, length=1200, chunk_tokens=100, overlap=15)
    assert len(question.chunks) > 8
    assert all(words(chunk) <= 100 for chunk in question.chunks)
    for value in question.answers:
        holding = [
            index
            for index, chunk in enumerate(question.chunks)
            if any(said == value for _, _, said in NEEDLE.findall(chunk))
        ]
        assert holding
        assert set(holding) <= set(question.relevant)
    for index, chunk in enumerate(question.chunks):
        told = any(said in question.answers for _, _, said in NEEDLE.findall(chunk))
        assert told == (index in question.relevant)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_needles_are_anywhere(name: str) -> None:
    places = []
    for seed in range(60):
        question, text = whole(name, seed, 800)
        places.append(text.index(f"is: {question.answers[0]}") / len(text))
    assert Counter(int(5 * place) for place in places).keys() == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("name", "length", "says"),
    [
        ("niah_single_1", 150, "does not fit into 150 tokens"),
        ("niah_9", 4096, "no needle task 'niah_9'"),
        ("niah_multikey_2", 10**6, "key words run out"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, length: int, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        needle_question(name, 0, count=words, length=length)


def test_key_words_are_many_and_different() -> None:
    assert len(set(key_words())) == len(key_words()) > 20_000
    assert all(WORD.fullmatch(word) for word in key_words())


def test_answers_are_scored_by_the_share_of_values_named() -> None:
    task = task_by_name("niah_multivalue", count=words, length=700)
    (question,) = task.questions(1)
    first, second, third, fourth = question.answers
    assert task.score(f"{first} and {fourth}, {second}.", question) == {"reference_coverage": 0.75}
    assert task.score(third[:-1], question) == {"reference_coverage": 0}
    assert (task.max_new_tokens, task.instruction) == (128, VARIANTS["niah_multivalue"].instruction)


@pytest.mark.parametrize("kind", KINDS)
def test_the_readers_kinds_are_tasks(kind: str) -> None:
    task = task_by_name(f"reader_{kind}")
    few, more = task.questions(5), task.questions(9)
    assert {one.id for one in few} < {one.id for one in more}
    assert len({one.id for one in more}) == 9
    assert [task.score(", ".join(one.answers), one)[task.metric] for one in more] == [1] * 9
    assert task.questions(5, 1) != few
    fewer = task.questions(9, k=2)
    assert [one.id for one in fewer] == [one.id for one in more]
    for narrow, wide in zip(fewer, more, strict=True):
        assert set(narrow.chunks) <= set(wide.chunks)
        assert len(narrow.chunks) == 2
    assert {len(one.chunks) for one in task.questions(2, k=8)} == {6}
