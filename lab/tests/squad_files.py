"""Files of the shape of SQuAD's, of paragraphs written here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ARTICLES = 12
PARAGRAPHS = 6
WORDS = ("How high", "How tall", "How big")


def text_of(article: int, paragraph: int) -> str:
    return f"Town {article} has in its part {paragraph} a tower of {article}x{paragraph} feet."


def name_of(article: int, paragraph: int) -> str:
    return f"A{article}-p{paragraph}"


def question_of(word: str, article: int, paragraph: int) -> str:
    return f"{word} is the tower in part {paragraph} of town {article}?"


def write_squad(folder: Path) -> Path:
    """Both halves, in `folder`; three questions a paragraph."""
    places = [(a, p) for a in range(ARTICLES) for p in range(PARAGRAPHS)]
    corpus = [
        {"id": name_of(*place), "title": f"A{place[0]}", "text": text_of(*place)}
        for place in places
    ]
    asked = []
    for article, paragraph in places:
        gold = name_of(article, paragraph)
        documents = [gold] + [
            name_of((article + step) % ARTICLES, (paragraph + 1) % PARAGRAPHS)
            for step in (0, 1, 2, 3)
        ]
        asked += [
            {
                "id": f"{gold}-{number}",
                "question": question_of(word, article, paragraph),
                "answers": [f"{article}x{paragraph}", f"{article}x{paragraph} feet"],
                "gold": gold,
                "documents": documents,
            }
            for number, word in enumerate(WORDS)
        ]
    (folder / "train").mkdir()
    for path, rows in (
        ("train/squad_train_corpus.jsonl", corpus),
        ("train/squad_train_questions.jsonl", asked),
        ("squad_corpus.jsonl", corpus),
        ("squad_queries.jsonl", asked),
    ):
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
