"""The articles, their questions, and how an answer to one is judged."""

from __future__ import annotations

import pytest

from kvcache_rag_lab.articles import is_refusal, names_all, read_articles, read_questions


def test_every_answer_stands_in_the_articles_that_are_named() -> None:
    texts = {article.name: article.text for article in read_articles()}
    assert len(texts) == 40
    assert all(text.startswith("# ") and 150 <= len(text.split()) <= 400 for text in texts.values())
    questions = read_questions()
    for question in questions:
        together = "\n".join(texts[name] for name in question.articles)
        assert not question.is_met_by(question.text), question.text
        if question.is_answerable:
            assert question.is_met_by(together), question.text
    assert [question.is_answerable for question in questions] == [True] * 24 + [False] * 6
    assert sum(len(question.articles) > 1 for question in questions[:24]) >= 4


@pytest.mark.parametrize(
    ("answer", "parts", "right"),
    [
        ("It opened in 1937.", [["1937"]], True),
        ("It opened in 1938.", [["1937"]], False),
        ("", [["1937"]], False),
        ("IRON, mostly", [["wrought iron", "iron"]], True),
        ("the environment", [["wrought iron", "iron"]], False),
        ("At Bell Laboratories, in 1947", [["Bell Lab"]], True),
        (
            "At St Mary\N{RIGHT SINGLE QUOTATION MARK}s Hospital",
            [["St Mary's", "St. Mary's"]],
            True,
        ),
        ("St. Mary's", [["St Mary's"]], True),
        ("Pachacútec or Pachacuti", [["Pachacuti"]], True),
        ("1990 and 1969", [["1969"], ["1990"]], True),
        ("1969", [["1969"], ["1990"]], False),
        ("11969", [["1969"]], False),
        ("deep\nblue", [["Deep Blue"]], True),
    ],
)
def test_an_answer_names_every_part_in_one_of_its_spellings(
    answer: str, parts: list[list[str]], right: bool
) -> None:
    assert names_all(answer, parts) is right


REFUSALS = """
I do not know.
I don't know the answer.
I don\N{RIGHT SINGLE QUOTATION MARK}t know
It is not known.
The documents do not mention the price.
The document doesn't explicitly say who that was.
The price is not mentioned in the documents.
There is no information about the price.
No information is given.
There is no mention of a dog.
The name was not recorded.
This cannot be determined from the documents.
I cannot answer that.
I'm unable to answer this question.
not found
Unknown.
The text does not contain the answer.
His dog's name is not stated.
I'm sorry, but the documents do not provide any details.
"""
ANSWERS = """
The dog was called Rex.
It cost 400 yen.
The architect was well known.
Beethoven drank no coffee.
He is known for sixty beans.
The stone was not sold.
It was found in 1799.
The ticket was not cheap: 5,000 yen.
"""


def test_a_refusal_is_known() -> None:
    assert [one for one in REFUSALS.strip().splitlines() if not is_refusal(one)] == []
    assert [one for one in ["", *ANSWERS.splitlines()] if is_refusal(one)] == []


def test_where_no_article_tells_only_a_refusal_is_right() -> None:
    question = read_questions()[-1]
    assert not question.is_answerable
    assert question.is_met_by("I do not know.")
    assert not question.is_met_by("It was sold for two pounds.")
