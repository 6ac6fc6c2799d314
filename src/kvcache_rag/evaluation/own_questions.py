"""Questions of one's own: a file of one JSON object a line, and how answers to them are scored.

    {"question": "...", "documents": ["...", "..."], "answers": ["..."]}

is enough.  The form of published sets (`datasets`) is read, too: documents as objects with a
"text", "id", "answer_groups".  Answers may be left out; then all that can be asked is whether a
policy answers as full prefill does.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.evaluation.metrics import best, exact_match, f1, f1_chinese, substring_match
from kvcache_rag.evaluation.question import Question

if TYPE_CHECKING:
    from pathlib import Path

_CHINESE: Final = re.compile("[\u3400-\u9fff]")


def read_own_questions(path: Path) -> list[Question]:
    """Read a file of questions.

    Raises:
        InvalidInputError: If it cannot be read or is empty, or a line is not of the form above;
            file, line and what is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInputError(
            f"the questions {path} cannot be read ({error.strerror}); check the path"
        ) from error
    found, seen = [], set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        question = _question(line, f"{path}, line {number}", number)
        if question.id in seen:
            raise InvalidInputError(
                f"{path}, line {number}: another line has the id {question.id!r}; make it unique"
            )
        seen.add(question.id)
        found.append(question)
    if not found:
        raise InvalidInputError(
            f"{path} has no questions; write one JSON object a line, with question, documents and "
            "answers"
        )
    return found


def own_score(answer: str, question: Question) -> dict[str, float]:
    """`exact_match` and `f1` (SQuAD's, LongBench's for Chinese) against the best right answer.

    Where there are groups of answers, both are whether every group is met (RGB's rule).
    """
    if question.answer_groups:
        met = substring_match(answer, question.answer_groups, question.language)
        return {"f1": met, "exact_match": met}
    overlap = f1_chinese if question.language == "zh" else f1
    return {
        "f1": best(overlap, answer, question.answers),
        "exact_match": best(exact_match, answer, question.answers),
    }


def _question(line: bytes, where: str, number: int) -> Question:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: this is not JSON in UTF-8; correct it") from error
    if not isinstance(row, dict):
        raise InvalidInputError(f'{where}: this is not an object {{"question": ...}}; correct it')
    documents = row.get("documents")
    if not isinstance(documents, list) or not documents:
        raise InvalidInputError(
            f'{where}: "documents" must be a list of at least one text; add what the retriever '
            "found"
        )
    chunks = tuple(_document(one, where) for one in documents)
    answers = _texts(row.get("answers"), "answers", where)
    given = row.get("answer_groups") or []
    if not isinstance(given, list):
        raise InvalidInputError(f'{where}: "answer_groups" must be a list of lists; correct it')
    groups = tuple(_texts(group, "answer_groups", where) for group in given)
    if not all(groups):
        raise InvalidInputError(f'{where}: a group of "answer_groups" is empty; leave it out')
    question = _text(row.get("question"), "question", where)
    joined = "".join((question, *answers, *(text for group in groups for text in group)))
    return Question(
        id=str(row.get("id", f"line {number}")),
        question=question,
        chunks=chunks,
        answers=answers,
        answer_groups=groups,
        language="zh" if _CHINESE.search(joined) else "en",
    )


def _document(given: Any, where: str) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    return _text(text, "documents", where)


def _text(given: Any, name: str, where: str) -> str:
    if not isinstance(given, str) or not given.strip():
        raise InvalidInputError(f'{where}: "{name}" needs a text that is not empty; add it')
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f'{where}: "{name}" holds half of a surrogate pair, which is no text; correct it'
        ) from error
    return given


def _texts(given: Any, name: str, where: str) -> tuple[str, ...]:
    """A list of texts; one text is a list of itself, nothing an empty list."""
    if given is None:
        return ()
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        raise InvalidInputError(f'{where}: "{name}" must be a list of texts; correct it')
    return tuple(_text(one, name, where) for one in given)
