"""Question sets in files: one JSON object a line.

    {"id": "...", "question": "...", "answers": ["..."],
     "documents": [{"id": "...", "text": "...", "relevant": true}]}

`answers`: any one counts.  `answer_groups`, a list of lists, may stand beside it: then every group
has to be met by one of its strings.  A caching workload is a pair of files: `{"id", "title",
"text"}` a document, and `{"id", "question", "answers", "gold"}` a question, `gold` naming the
document that answers it.  A file that cannot be read is refused with its line, never repaired.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.evaluation.question import Question

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvcache_rag.evaluation.question import Language


@dataclass(frozen=True)
class CorpusQuery:
    """One question to a corpus.

    Attributes:
        id: Name of the row.
        question: The question.
        answers: Right answers; any one counts.
        gold: Id of the document that answers it.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold: str


@dataclass(frozen=True)
class CachingWorkload:
    """Documents, and the questions asked about them in order: to measure hits, not answers.

    Attributes:
        documents: Text by id, in the order of the file.
        queries: The questions; each `gold` is in `documents`.
    """

    documents: Mapping[str, str]
    queries: tuple[CorpusQuery, ...]


def read_questions(path: Path, language: Language = "en") -> list[Question]:
    """Read a question set.

    Args:
        path: A file of lines as above.
        language: Of its texts.

    Raises:
        InvalidInputError: If there is no such file, or a line is not of that form: file, line and
            what is wrong.
    """
    questions = []
    for row in _rows(path):
        documents = row.list("documents")
        if not documents:
            raise row.error("has no documents")
        texts = [_Row(row.where, item, "a document").text("text") for item in documents]
        flags = [item.get("relevant") for item in documents]
        if not all(isinstance(flag, bool) for flag in flags):
            raise row.error('has a document whose "relevant" is neither true nor false')
        answers, groups = row.answers()
        questions.append(
            Question(
                id=row.text("id"),
                question=row.text("question"),
                chunks=tuple(texts),
                answers=answers,
                answer_groups=groups,
                relevant=tuple(index for index, flag in enumerate(flags) if flag),
                language=language,
            )
        )
    return questions


def read_workload(corpus: Path, queries: Path) -> CachingWorkload:
    """Read a caching workload.

    Args:
        corpus: The documents.
        queries: The questions.

    Raises:
        InvalidInputError: If a file is missing or a line is not of the form above, or a question
            names a document that the corpus does not have.
    """
    documents = {row.text("id"): row.text("text") for row in _rows(corpus)}
    asked = []
    for row in _rows(queries):
        gold = row.text("gold")
        if gold not in documents:
            raise row.error(f"names the document {gold!r}, which {corpus} does not have")
        asked.append(CorpusQuery(row.text("id"), row.text("question"), row.answers()[0], gold))
    return CachingWorkload(documents, tuple(asked))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line; blank lines are skipped.

    Raises:
        InvalidInputError: If there is no such file, or a line is not a JSON object.
    """
    return [content for _, content in _objects(path)]


class _Row:
    """A line being read; its errors say where it stands."""

    def __init__(self, where: str, content: Any, what: str = "the row") -> None:
        self.where, self._what = where, what
        if not isinstance(content, dict):
            raise self.error("is not a JSON object")
        self._content: dict[str, Any] = content

    def error(self, wrong: str) -> InvalidInputError:
        return InvalidInputError(f"{self.where}: {self._what} {wrong}; correct or remove it")

    def text(self, name: str) -> str:
        value = self._content.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f'needs a text as "{name}"')
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(f'has half of a surrogate pair in "{name}"') from error
        return value

    def list(self, name: str) -> list[Any]:
        value = self._content.get(name)
        if not isinstance(value, list):
            raise self.error(f'needs a list as "{name}"')
        return value

    def answers(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        answers = self._strings("answers", self.list("answers"))
        if "answer_groups" not in self._content:
            return answers, ()
        groups = self.list("answer_groups")
        if not groups:
            raise self.error('has empty "answer_groups"')
        return answers, tuple(self._strings("answer_groups", group) for group in groups)

    def _strings(self, name: str, values: Any) -> tuple[str, ...]:
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(value, str) and value for value in values)
        ):
            raise self.error(f'needs one text or more in "{name}"')
        return tuple(values)


def _rows(path: Path) -> Iterator[_Row]:
    """Rows of a file, with different ids."""
    seen: dict[str, str] = {}
    for where, content in _objects(path):
        row = _Row(where, content)
        name = row.text("id")
        if name in seen:
            raise row.error(f"has the id {name!r} of {seen[name]}")
        seen[name] = where
        yield row


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; name the folder that holds it")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                content = json.loads(line.decode("utf-8-sig"))  # Windows marks the first
            except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
                raise InvalidInputError(
                    f"{where}: this is not JSON in UTF-8 ({error}); correct or remove it"
                ) from None
            if not isinstance(content, dict):
                raise _Row(where, {}).error("is not a JSON object")
            yield where, content
