"""Forty short articles about the real world, and questions with what right answers say.

For the demonstration, `bench --quick`, the notebooks and tests.  They were written before any model
was asked (`CHANGES.txt`).  Importing this module loads nothing heavy.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOLDER: Final = Path(__file__).parent

# Of a normalised text, so without apostrophes: "don't" is "don t".
_REFUSAL: Final = re.compile(
    r"\b(?:do|does|did|is|are|was|were|could|would|have|has)(?: not|n t)\b"
    r"(?: \w+){0,2}? (?:know|known|say|said|tell|told|mention|mentioned|state|stated|specify"
    r"|specified|provide|provided|give|given|contain|include|included|available|find|found"
    r"|answer|answered|recorded|sure|clear)\b"
    r"|\b(?:cannot|can not|can t|unable to)(?: be)?(?: \w+)? (?:answer|answered|tell|say|find|found"
    r"|determine|determined)\b"
    r"|\bno (?:\w+ )?(?:information|mention|answer|record|details?)\b"
    r"|\b(?:not (?:mentioned|known|found|stated|specified|given|provided|available)|unknown)\b"
)


@dataclass(frozen=True)
class Article:
    """One article.

    Attributes:
        name: Of its file.
        text: Heading and paragraphs, in Markdown.
    """

    name: str
    text: str


@dataclass(frozen=True)
class ArticleQuestion:
    """A question about articles.

    Attributes:
        text: As it is asked.
        answers: The parts of a right answer, each in the spellings that count; none if no article
            tells.
        articles: Names of those that tell, or that it is about.
    """

    text: str
    answers: tuple[tuple[str, ...], ...]
    articles: tuple[str, ...]

    @property
    def is_answerable(self) -> bool:
        """Whether the articles tell."""
        return bool(self.answers)

    def is_met_by(self, answer: str) -> bool:
        """Whether an answer is right: it names every part, or refuses where no article tells."""
        return names_all(answer, self.answers) if self.answers else is_refusal(answer)


def read_articles() -> list[Article]:
    """All articles, by name."""
    paths = sorted(_FOLDER.glob("*.md"))
    return [Article(path.stem, path.read_text(encoding="utf-8").strip()) for path in paths]


def read_questions() -> list[ArticleQuestion]:
    """All questions: those with an answer first."""
    lines = (_FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        ArticleQuestion(
            row["question"], tuple(tuple(part) for part in row["answers"]), tuple(row["articles"])
        )
        for row in map(json.loads, lines)
    ]


def names_all(answer: str, parts: Sequence[Sequence[str]]) -> bool:
    """Whether an answer names every part of the right one, each in one of its spellings.

    Case, accents and punctuation do not count.  A spelling is looked for from the beginning of a
    word on, and the word may go on: "Bell Lab" is in "Bell Laboratories", "iron" not in
    "environment".
    """
    said = f" {_normalised(answer)}"
    return all(any(f" {_normalised(one)}" in said for one in spellings) for spellings in parts)


def is_refusal(answer: str) -> bool:
    """Whether an answer says that it does not know, or that the documents do not tell.

    Such as "I do not know", "is not mentioned", "the documents do not say", "there is no
    information", "cannot be determined".  What else the answer says does not count.
    """
    return _REFUSAL.search(_normalised(answer)) is not None


def _normalised(text: str) -> str:
    """Words in lower case and without accents, one space between them."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return " ".join(re.findall(r"[^\W_]+", plain))
