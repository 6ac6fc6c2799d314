"""Where samples come from.  Sample number `n` of a source never changes, so a run can go on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.finetune.config import JsonlData, ReaderData
from kvcache_rag.finetune.reader_source import reader_data
from kvcache_rag.finetune.samples import Asked, PlainSample, QASample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T", covariant=True)
Row = Mapping[str, Any]


class Source(Protocol[T]):
    """Samples without end."""

    def draw(self, number: int) -> T:
        """Sample `number`, counted from 0; always the same one."""


@dataclass(frozen=True)
class Listed(Generic[T]):
    """A list, shuffled anew in each round."""

    samples: tuple[T, ...]
    seed: int

    def draw(self, number: int) -> T:
        """Sample `number`."""
        rounds, place = divmod(number, len(self.samples))
        return self.samples[_order(self.seed, rounds, len(self.samples))[place]]


@lru_cache(maxsize=4)  # of hundreds of thousands of samples, and asked for by each of them
def _order(seed: int, rounds: int, count: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(f"finetune/{seed}/{rounds}").shuffle(order)
    return order


@dataclass(frozen=True)
class Drawn(Generic[T]):
    """Made by a function of the number."""

    make: Callable[[int], T]

    def draw(self, number: int) -> T:
        """Sample `number`."""
        return self.make(number)


@dataclass(frozen=True)
class Data:
    """What a run learns from and is measured with.

    Attributes:
        qa: Documents and questions.
        plain: Texts.
        held_qa: Kept out of training.
        held_free: Questions without documents, for what the model knows and how it refuses.
        held_plain: Kept out of training.
        digest: Differs when the data differ.
        described: Where it came from, in words.
    """

    qa: Source[QASample]
    plain: Source[PlainSample]
    held_qa: tuple[QASample, ...]
    held_free: tuple[QASample, ...]
    held_plain: tuple[PlainSample, ...]
    digest: str
    described: str


def open_data(data: JsonlData | ReaderData, plain: Path | None, *, seed: int, holdout: int) -> Data:
    """Open the sources of a run.

    Args:
        data: Document questions.
        plain: File of plain data, None for the documents of `data`.
        seed: Of order and of what is drawn.
        holdout: Contexts, and texts, kept out of training; of a file a fifth at most.

    Raises:
        InvalidInputError: If a file cannot be read or a line of it cannot be used.
    """
    qa: Source[QASample]
    if isinstance(data, ReaderData):
        make, held_qa, refusal = reader_data(data, seed, holdout)
        qa, digest, described = Drawn(make), repr(data), "the reader's generator"
        free = tuple(
            QASample((), tuple(Asked(one.question, refusal) for one in sample.questions))
            for sample in held_qa
        )
    else:
        held, learned = _split(_contexts(data.path), data.path, seed, holdout)
        held_qa, learned = _cut(held, data.questions), _cut(learned, data.questions)
        qa, digest, described = Listed(learned, seed), _digest(data.path), data.path.name
        free = tuple(QASample((), sample.questions) for sample in held_qa)
    if plain is None:
        texts: Source[PlainSample] = Drawn(lambda number: _text(qa.draw(number)))
        held_plain = tuple(map(_text, held_qa))
        described += "; plain data: its documents"
    else:
        held_plain, known = _split([_plain(*row) for row in _rows(plain)], plain, seed, holdout)
        texts = Listed(known, seed + 1)
        digest += _digest(plain)
        described += f"; plain data: {plain.name}"
    return Data(qa, texts, held_qa, free, held_plain, digest, described)


def _text(sample: QASample) -> PlainSample:
    return PlainSample("\n".join(sample.documents))


def _split(
    samples: Sequence[T], path: Path, seed: int, holdout: int
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    if len(samples) < 2:
        raise InvalidInputError(
            f"{path} has too few samples: {len(samples)}, where rows over the same documents are "
            "one; at least 2 are needed, as some are kept out of training to measure with"
        )
    order = list(samples)
    random.Random(f"holdout/{seed}").shuffle(order)
    held = min(holdout, max(1, len(order) // 5))
    return tuple(order[:held]), tuple(order[held:])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _rows(path: Path) -> Iterator[tuple[Row, str]]:
    """Rows of a JSONL file with the place of each, for messages."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows marks the beginning
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInputError(f"cannot read {path}: {reason}") from error
    # Not splitlines: a JSON text may hold other line ends of Unicode as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InvalidInputError(f"{where} is not a JSON object")
        yield row, where


def _contexts(path: Path) -> list[QASample]:
    """Rows of equal documents joined, in order of their first row."""
    grouped: dict[tuple[str, ...], list[Asked]] = {}
    for row, where in _rows(path):
        documents, asked = _question(row, where)
        grouped.setdefault(documents, []).append(asked)
    return [QASample(documents, tuple(asked)) for documents, asked in grouped.items()]


def _cut(samples: Sequence[QASample], size: int) -> tuple[QASample, ...]:
    """Contexts with at most `size` questions; cut behind the split, so none is on both sides."""
    return tuple(
        QASample(sample.documents, sample.questions[start : start + size])
        for sample in samples
        for start in range(0, len(sample.questions), size)
    )


def _question(row: Row, where: str) -> tuple[tuple[str, ...], Asked]:
    question, answers, documents = (row.get(n) for n in ("question", "answers", "documents"))
    groups = row.get("answer_groups")
    if groups and isinstance(groups, list) and all(isinstance(g, list) and g for g in groups):
        answers = [", ".join(str(group[0]) for group in groups)]
    if not _is_text(question):
        raise InvalidInputError(f"{where} needs a question: a text that is not empty")
    if not isinstance(answers, list) or not answers or not _is_text(answers[0]):
        raise InvalidInputError(f"{where} needs answers: a list of texts that are not empty")
    if not isinstance(documents, list) or not documents:
        raise InvalidInputError(f"{where} needs documents: a list that is not empty")
    plain = [one if isinstance(one, Mapping) else {"text": one} for one in documents]
    if not all(_is_text(one.get("text")) for one in plain):
        raise InvalidInputError(f"{where} has a document without a text")
    relevant = tuple(index for index, one in enumerate(plain) if one.get("relevant") is True)
    return tuple(str(one["text"]) for one in plain), Asked(str(question), str(answers[0]), relevant)


def _plain(row: Row, where: str) -> PlainSample:
    text, messages = row.get("text"), row.get("messages")
    if _is_text(text):
        return PlainSample(str(text))
    if not isinstance(messages, list) or not messages or not all(map(_is_turn, messages)):
        raise InvalidInputError(
            f'{where} needs a text, or messages: a list of {{"role", "content"}}'
        )
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise InvalidInputError(f"{where}: the last message must be the assistant's answer")
    turns = tuple({"role": turn["role"], "content": turn["content"]} for turn in messages)
    return PlainSample(messages=turns)


def _is_turn(turn: object) -> bool:
    return (
        isinstance(turn, Mapping) and _is_text(turn.get("role")) and _is_text(turn.get("content"))
    )


def _is_text(value: object) -> bool:
    """Whether something can be learned; half of a surrogate pair is no text."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)
