"""Metrics against cases worked by hand; each comment shows the working."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import MissingExtraError
from kvcache_rag_lab.scoring import metrics
from kvcache_rag_lab.scoring.metrics import (
    best,
    containment,
    exact_match,
    f1,
    f1_chinese,
    f1_longbench,
    is_rejection,
    normalised,
    reference_coverage,
    rgb_accuracy,
    rouge_l,
    rouge_l_chinese,
    substring_match,
    wrong_document,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat, a dog & AN owl!", "cat dog owl"),
        ("U.S.", "us"),  # punctuation goes, nothing takes its place
        ("the-end", "theend"),  # so an article may vanish into a word before it is looked for
        ("  two\t words\n", "two words"),
        ("Théâtre à Paris", "théâtre à paris"),  # "à" is no article
        ("«the» 'a'", "« »"),  # punctuation is ASCII's alone; letters in it are whole words
        ("an", ""),
        ("", ""),
    ],
)
def test_normalised_as_squad_does(text: str, expected: str) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "groups", "expected"),
    [
        ("It is the Eiffel Tower, in Paris.", [["eiffel tower"]], 1),
        ("It is the Eiffel Towers.", [["Eiffel Tower"]], 0),  # whole words
        ("It is so because of him.", [["U.S."]], 0),  # "us" is no word of it
        ("In the U.S. it is.", [["London", "US"]], 1),  # any answer of a group
        ("Rome and Oslo", [["Rome"], ["Oslo", "Bergen"]], 1),
        ("Rome alone", [["Rome"], ["Oslo", "Bergen"]], 0),  # every group
        ("The sign is a &.", [["&"]], 1),  # nothing is left of it when normalised
        ("The sign is missing.", [["&"]], 0),
        ("", [["Rome"]], 0),
        ("Yes, both are.", [["yes"]], 1),
        ("The answer: yes", [["yes"]], 0),  # not the first word
        ("No. Yes is wrong.", [["Yes"]], 0),
        ("yesterday", [["yes"]], 0),
        ("", [["no"]], 0),
        ("I say no to Rome", [["no", "Rome"]], 1),  # not only yes or no is right
    ],
)
def test_containment(answer: str, groups: list[list[str]], expected: float) -> None:
    assert containment(answer, groups) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The key is kept by Bo Lund.", 1),  # bo, lund: both in the second document alone
        ("The key is kept by Ada Holt.", 0),  # both in the first, which is relevant
        ("The key is kept by Ada Lund.", 0),  # 1/2 in the first, 1/2 in the second
        ("Cy", 0),  # in no document
        ("Bolund", 0),  # whole words
        ("Who keeps the key? They do not.", 0),  # nothing but the question's and function words
        ("In Oslo", 0),  # oslo: in both
        ("bo bo bo lund CY", 0),  # bo, lund, cy: 2/3 of the different ones
        ("Bo Lund keeps a boat and a map, he was there since 1999", 1),  # 5/6, without since: 83 %
        ("Bo Lund keeps a boat there since Tuesday", 0),  # bo, lund, boat of 5: 60 %
        ("", 0),
    ],
)
def test_an_answer_may_be_taken_from_a_wrong_document(answer: str, expected: float) -> None:
    asked = "Who is the key kept by? Who keeps it?"
    documents = (
        "Ada Holt of Oslo keeps the key.",
        "In 1999, Bo Lund of Oslo got a boat and a map.",
    )
    assert wrong_document(answer, asked, documents, {0}) == expected
    assert wrong_document(answer, "?", documents, {0, 1}) == 0
    assert wrong_document(answer, "?", documents, ()) is None


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("The  Eiffel Tower.", "eiffel tower", 1),
        ("Eiffel Towers", "Eiffel Tower", 0),
        ("", "Paris", 0),
        ("", "the", 1),  # both are nothing when normalised
        ("yes", "Yes.", 1),
        ("yes, it is", "yes", 0),
        ("12,000", "12000", 1),
        ("Ångström", "ångström", 1),
    ],
)
def test_exact_match(answer: str, reference: str, expected: float) -> None:
    assert exact_match(answer, reference) == expected


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        # said: in paris france (3), wanted: paris (1), common 1: P 1/3, R 1, F 2/3 / (4/3) = 1/2
        ("in Paris, France", "Paris", 1 / 2),
        # said: red red red blue (4), wanted: red red blue blue green (5); in common, with
        # repetition, red min(3, 2) + blue min(1, 2) = 3: P 3/4, R 3/5, F = 2 * 9/20 / (27/20) = 2/3
        ("red red red blue", "red red blue blue green", 2 / 3),
        # articles do not count: said cat, wanted cat
        ("the cat", "a cat", 1),
        ("", "Paris", 0),
        ("Rome", "Paris", 0),
        # SQuAD gives 0 where one side is empty; both empty is nothing in common, too
        ("the", "a", 0),
        ("Ünlü, ÇAY", "ünlü çay", 1),
    ],
)
def test_f1(answer: str, reference: str, expected: float) -> None:
    assert f1(answer, reference) == pytest.approx(expected)
    assert f1_longbench(answer, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reference", "longbench"),
    [
        # HotpotQA: not the same word, so nothing; LongBench: P 1/3, R 1, F 1/2
        ("yes it was", "yes", 1 / 2),
        # the same from the other side: P 1, R 1/2, F 2/3
        ("no", "no answer", 2 / 3),
        ("noanswer", "noanswer given", 2 / 3),
    ],
)
def test_yes_and_no_are_all_or_nothing_for_hotpotqa(
    answer: str, reference: str, longbench: float
) -> None:
    assert f1(answer, reference) == 0
    assert f1_longbench(answer, reference) == pytest.approx(longbench)
    assert f1("Yes.", "yes") == 1
    assert f1("no way", "no way") == 1  # only the bare words are closed answers


def test_the_best_of_several_references_counts() -> None:
    # against "big apple": common 0; against "new york city": P 2/2, R 2/3, F 4/5
    assert best(f1, "New York", ["Big Apple", "New York City"]) == pytest.approx(4 / 5)
    assert best(exact_match, "New York", ["NYC", "new york"]) == 1


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        # jieba: 北京 | 是 | 中国 | 的 | 首都 and 中国 | 首都: common 2, P 2/5, R 1, F = 4/7
        ("北京是中国的首都", "中国首都", 4 / 7),
        # punctuation of both kinds and spaces leave no words: 北京 and 北京
        ("北京。！ ,", "「北京」", 1),
        # LongBench's list has 》 but lacks 《: 北京 and 《 | 北京: P 1, R 1/2, F 2/3
        ("北京", "《北京》", 2 / 3),
        # one word differs: 今天天气 | 很 | 好 and 今天天气 | 不好: common 1, P 1/3, R 1/2, F 2/5
        ("今天天气很好。", "今天天气不好。", 2 / 5),
        # latin letters are words and lower-cased: gpt | 模型 and gpt: P 1/2, R 1, F 2/3
        ("GPT模型", "gpt", 2 / 3),
        ("", "北京", 0),
        ("。", "北京", 0),
    ],
)
def test_f1_chinese_over_words_of_jieba(answer: str, reference: str, expected: float) -> None:
    assert f1_chinese(answer, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        # LCS "police the gunman" of 4 words each: P = R = 3/4 = F
        ("police ended the gunman", "police killed the gunman", 3 / 4),
        # order matters: LCS of "a b c" and "c b a" is one word: P = R = 1/3
        ("a b c", "c b a", 1 / 3),
        # different words count once: said {a, b}, wanted {a, b, c}, LCS "a a b" = {a, b}:
        # P 2/2, R 2/3, F 4/5
        ("a a b", "a a b c", 4 / 5),
        # sentences are joined: reference "w1 w2 w3 w4 w5" against "w1 w2 w6 w7 w8" (w1 w2) and
        # "w1 w3 w8 w9 w5" (w1 w3 w5): union {w1 w2 w3 w5} = 4; R 4/5, P 4/8 of the 8 different
        # words w1 w2 w3 w5 w6 w7 w8 w9; F = 2 * 0.4 / 1.3 = 8/13
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 8 / 13),
        # case and punctuation count as they are: nothing in common
        ("Paris,", "paris", 0),
        ("", "paris", 0),
        ("paris", "", 0),
        ("...", "paris", 0),
    ],
)
def test_rouge_l(answer: str, reference: str, expected: float) -> None:
    # The package adds 1e-8 to the denominator.
    assert rouge_l(answer, reference) == pytest.approx(expected, abs=2e-8)


def test_rouge_l_chinese_cuts_words_first() -> None:
    # 今天天气 | 很 | 好 | 。 and 今天天气 | 不好 | 。: LCS 今天天气 。 = 2; P 2/4, R 2/3, F 4/7
    assert rouge_l_chinese("今天天气很好。", "今天天气不好。") == pytest.approx(4 / 7, abs=2e-8)
    # as one string without spaces, nothing would be shared
    assert rouge_l("今天天气很好。", "今天天气不好。") == 0


def test_without_jieba_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_jieba", metrics._jieba.__wrapped__)  # not what is kept
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(MissingExtraError, match=r"kvcache-rag\[eval\]"):
        f1_chinese("北京", "北京")


@pytest.mark.parametrize(
    ("answer", "groups", "expected"),
    [
        ("It was JULES VERNE.", [["Jules Verne"]], 1),
        ("It was Verne.", [["Jules Verne", "verne"]], 1),  # any string of the group
        ("in 1969 by Armstrong", [["Armstrong", "Neil"], ["1969"]], 1),  # every group
        ("in 1969", [["Armstrong", "Neil"], ["1969"]], 0),
        ("", [["x"]], 0),
        ("catalogue", [["cat"]], 1),  # substrings, not words
    ],
)
def test_substring_match(answer: str, groups: list[list[str]], expected: float) -> None:
    assert substring_match(answer, groups) == expected


def test_rgb_counts_a_rejection_as_wrong_unless_all_is_noise() -> None:
    rejection = "I can not answer because of the insufficient information in documents: Paris."
    assert is_rejection(rejection)
    assert not is_rejection("Insufficient Information")  # RGB looks before it lowers the case
    assert is_rejection("信息 不足", "zh")
    assert not is_rejection("信息 不足", "en")
    assert rgb_accuracy(rejection, [["Paris"]]) == 0  # although Paris occurs
    assert rgb_accuracy(rejection, [["Paris"]], only_noise=True) == 1
    assert rgb_accuracy("Paris", [["Paris"]], only_noise=True) == 1
    assert rgb_accuracy("Rome", [["Paris"]], only_noise=True) == 0
    assert rgb_accuracy("由于文档信息不足", [["巴黎"]], "zh") == 0
    assert rgb_accuracy("巴 黎", [["巴黎"], ["巴"]], "zh") == 1


def test_reference_coverage_is_rulers_share_of_references() -> None:
    said = "The numbers are 1234567, 7654321 and ABC."
    # 1234567 and abc of three
    assert reference_coverage(said, ["1234567", "abc", "999"]) == pytest.approx(2 / 3)
    # a number cut short is not there, a longer one holds it
    assert reference_coverage("566362", ["5663623"]) == 0
    assert reference_coverage("56636231", ["5663623"]) == 1


def test_chinese_answers_are_found_without_their_spaces() -> None:
    assert containment("在 北 京。", [["北京"]], "zh") == 1
    assert substring_match("答案是 北 京", [["北京"]], "zh") == 1
    assert substring_match("答案是 北 京", [["北京"]], "en") == 0


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (lambda: containment("x", []), "no right answer"),
        (lambda: substring_match("x", []), "no right answer"),
        (lambda: reference_coverage("x", []), "no references"),
        (lambda: best(f1, "New York", []), "no references"),
    ],
    ids=["containment", "substring", "coverage", "best"],
)
def test_without_a_right_answer_nothing_is_scored(score: Callable[[], float], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        score()
