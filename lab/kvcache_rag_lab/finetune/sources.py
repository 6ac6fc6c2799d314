"""Training data, as texts and as the token ids that the engine itself would use.

`open_data` opens the files of a run: sample number `n` of a source never changes, so a run can go
on.  An `Encoder` turns samples into ids.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvcache_rag.prompt.renderer import PromptRenderer
    from kvcache_rag_lab.finetune.config import JsonlData

T = TypeVar("T", covariant=True)

Row = Mapping[str, Any]

_MARK = "@@kvcache-rag-answer@@"


@dataclass(frozen=True)
class QAPair:
    """A question about a context.

    Attributes:
        question: Its text.
        answer: The text to learn.
        relevant: Indices of the documents that hold the answer, empty if not known.
    """

    question: str
    answer: str
    relevant: tuple[int, ...] = ()


@dataclass(frozen=True)
class QASample:
    """Documents, in prompt order, and the questions about them; no documents: chunk-free."""

    documents: tuple[str, ...]
    questions: tuple[QAPair, ...]


@dataclass(frozen=True)
class PlainSample:
    """A text, or a dialogue that ends with the assistant's turn."""

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()


class SampleSource(Protocol[T]):
    """Samples without end."""

    def draw(self, number: int) -> T:
        """Sample `number`, counted from 0; always the same one."""


@dataclass(frozen=True)
class Listed(Generic[T]):
    """A list, shuffled anew in each round."""

    samples: tuple[T, ...]
    seed: int

    def draw(self, number: int) -> T:
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

    qa: SampleSource[QASample]
    plain: SampleSource[PlainSample]
    held_qa: tuple[QASample, ...]
    held_free: tuple[QASample, ...]
    held_plain: tuple[PlainSample, ...]
    digest: str
    described: str


def open_data(data: JsonlData, plain: Path | None, *, seed: int, holdout: int) -> Data:
    """Open the sources of a run.

    Args:
        data: Document questions.
        plain: File of plain data, None for the documents of `data`.
        seed: Of order and of what is drawn.
        holdout: Contexts, and texts, kept out of training; of a file a fifth at most.

    Raises:
        InvalidInputError: If a file cannot be read or a line of it cannot be used.
    """
    held_contexts, learned = _split(_contexts(data.path), data.path, seed, holdout)
    held_qa, learned = _cut(held_contexts, data.questions), _cut(learned, data.questions)
    qa, digest, described = Listed(learned, seed), _digest(data.path), data.path.name
    free = tuple(QASample((), sample.questions) for sample in held_qa)
    if plain is None:
        texts: SampleSource[PlainSample] = Drawn(lambda number: _text(qa.draw(number)))
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
    count = min(holdout, max(1, len(order) // 5))
    return tuple(order[:count]), tuple(order[count:])


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
    grouped: dict[tuple[str, ...], list[QAPair]] = {}
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


def _question(row: Row, where: str) -> tuple[tuple[str, ...], QAPair]:
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
    plain = [
        document if isinstance(document, Mapping) else {"text": document} for document in documents
    ]
    if not all(_is_text(document.get("text")) for document in plain):
        raise InvalidInputError(f"{where} has a document without a text")
    relevant = tuple(
        index for index, document in enumerate(plain) if document.get("relevant") is True
    )
    return tuple(str(document["text"]) for document in plain), QAPair(
        str(question), str(answers[0]), relevant
    )


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


@dataclass(frozen=True)
class TargetSpan:
    """What follows a context.

    Attributes:
        prompt: Ids that are read only.
        target: Ids that are learned, each from everything before it.
    """

    prompt: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """A sample as token ids.

    Attributes:
        prefix: The shared prefix, before every chunk.
        chunks: Ids of each chunk.
        spans: Do not see each other.
    """

    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    spans: tuple[TargetSpan, ...]

    @property
    def context_tokens(self) -> int:
        """Tokens of prefix and chunks."""
        return len(self.prefix) + sum(map(len, self.chunks))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest single prompt with its target."""
        longest = max(len(span.prompt) + len(span.target) for span in self.spans)
        return self.context_tokens + longest

    @property
    def row_tokens(self) -> int:
        """Tokens of the packed forward pass under the block mask, copies of the prefix included."""
        copies = len(self.prefix) * max(0, len(self.chunks) - 1)
        packed = sum(len(span.prompt) + len(span.target) for span in self.spans)
        return self.context_tokens + copies + packed

    @property
    def joined(self) -> Encoded:
        """The same under full attention: one causal context."""
        context = self.prefix + tuple(token for chunk in self.chunks for token in chunk)
        return Encoded(context, (), self.spans)


class Encoder:
    """Turns samples into ids.

    Prompts are rendered by the engine's own renderer; an answer is tokenised apart and ends with
    the token at which generation stops.
    """

    def __init__(self, renderer: PromptRenderer, tokenizer: Any) -> None:
        """Bind a renderer and its tokenizer.

        Raises:
            InvalidInputError: If the tokenizer has no end-of-sequence token.
        """
        self.renderer, self._tokenizer = renderer, tokenizer
        self._has_chat = bool(renderer.chat_template)
        self._end = self._end_of_turn()

    def qa(self, sample: QASample) -> Encoded:
        """Ids of a context with its questions."""
        spans = tuple(
            TargetSpan(
                self.renderer.query_ids(asked.question),
                self._answer(asked.answer),
            )
            for asked in sample.questions
        )
        chunks = tuple(map(self.renderer.chunk_ids, sample.documents))
        return Encoded(self.renderer.prefix_ids, chunks, spans)

    def plain(self, sample: PlainSample, longest: int) -> Encoded | None:
        """Ids of a text or dialogue, cut at `longest`; None if fewer than two are left."""
        if sample.messages:
            opened = self.renderer.render_chat(sample.messages[:-1])
            ids = self.renderer.text_ids(opened) + self._answer(sample.messages[-1]["content"])
        else:
            ids = self.renderer.document_ids(sample.text)
        if len(ids) < 2:
            return None
        return Encoded((), (), (TargetSpan(ids[:1], ids[1:longest]),))

    def _answer(self, text: str) -> tuple[int, ...]:
        # Behind "Answer:" a word begins with a space; a chat template leaves none to be written.
        written = text if self._has_chat else f" {text}"
        return (*self.renderer.brought_ids(written), self._end)

    def _end_of_turn(self) -> int:
        """The token that ends the assistant's turn: the chat template's, else end of sequence."""
        if self._has_chat:
            behind = self._behind_an_answer()
            special = set(self._tokenizer.all_special_ids)
            ids = [token for token in self.renderer.encoder.encode(behind) if token in special]
            if ids:
                return ids[0]
        end = self._tokenizer.eos_token_id
        if end is None:
            raise InvalidInputError(
                "the tokenizer has no end-of-sequence token, so an answer could not be told to "
                "end; set tokenizer.eos_token"
            )
        return int(end)

    def _behind_an_answer(self) -> str:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tokenize=False, chat_template=self.renderer.template.chat_template
            )
        except Exception:  # a template refuses in its own way; the end of sequence does then
            return ""
        return text.partition(_MARK)[2]
