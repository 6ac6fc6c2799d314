"""Texts to build: read as a stream, each once; unreadable ones are named."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.integration.rows import document_text, fields_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


NAMED = 1000  # problems that are kept by name; beyond that they are counted


@dataclass(frozen=True)
class Item:
    """One entry of a corpus.

    Attributes:
        name: Where it stands, for people.
        text: What becomes a chunk.
        problem: Why there is no text, "" if there is.
    """

    name: str
    text: str = ""
    problem: str = ""


class Corpus(Protocol):
    """Where texts come from; it can be pickled, because workers elsewhere may read it."""

    def items(self) -> Iterator[Item]:
        """Every entry, in an order that is the same each time.

        Raises:
            InvalidInputError: If the corpus as a whole cannot be read.
        """
        ...


@dataclass(frozen=True)
class Text:
    """A text to be built.

    Attributes:
        index: Its number among the different texts of the corpus.
        name: Where it stands, for people.
        text: What becomes a chunk.
    """

    index: int
    name: str
    text: str


@dataclass
class CorpusReader:
    """One way through a corpus, and what was met on it.

    Attributes:
        corpus: What is read.
        texts_found: Different texts.
        repeated: Texts that were there before.
        empty: Entries without a letter.
        unreadable: Entries that could not be read.
        problems: Name and reason of the first `NAMED` of them.
        is_complete: Whether the end was reached.
    """

    corpus: Corpus
    texts_found: int = 0
    repeated: int = 0
    empty: int = 0
    unreadable: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)
    is_complete: bool = False

    def texts(self) -> Iterator[Text]:
        """Every different text once; 16 bytes of each are remembered."""
        seen: set[bytes] = set()
        for item in self.corpus.items():
            digest = self._digest(item)
            if digest is None:
                continue
            if digest in seen:
                self.repeated += 1
                continue
            seen.add(digest)
            self.texts_found += 1
            yield Text(self.texts_found - 1, item.name, item.text)
        self.is_complete = True

    def _digest(self, item: Item) -> bytes | None:
        problem = item.problem
        if not problem and not item.text.strip():
            self.empty += 1
            return None
        if not problem:
            try:
                return blake2b(item.text.encode(), digest_size=16).digest()
            except UnicodeEncodeError:
                problem = "it holds half of a surrogate pair, which is no character"
        self.unreadable += 1
        if len(self.problems) < NAMED:
            self.problems.append((item.name, problem))
        return None

    def counts(self) -> dict[str, Any]:
        """What was met, as plain JSON values."""
        names = ("texts_found", "repeated", "empty", "unreadable", "problems", "is_complete")
        return {name: getattr(self, name) for name in names}

    def take(self, counts: Mapping[str, Any]) -> None:
        """Take over what another reading of the same corpus met."""
        for name, value in counts.items():
            setattr(self, name, value)
        self.problems = [(str(name), str(reason)) for name, reason in self.problems]


@dataclass(frozen=True)
class JsonLines:
    """A file with one JSON object per line: `{"text": ...}`, or `{"documents": [...]}`.

    A document is a text, an object with one, or `{"data": ...}` with a text or named fields, which
    read as they do where documents come with a request.  An `id` names it in messages; all else, a
    title beside a text too, is not part of the chunk, as there.

    Attributes:
        path: The file, UTF-8.
    """

    path: str

    def items(self) -> Iterator[Item]:
        """The texts, line by line; a line that cannot be read is an item with a problem."""
        try:
            with Path(self.path).open("rb") as file:
                for number, line in enumerate(file, start=1):
                    # A byte-order mark, as editors of one system write it.
                    bare = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                    if bare.strip():
                        yield from _line_items(f"line {number}", bare)
        except OSError as error:
            raise InvalidInputError(
                f"the corpus {self.path} cannot be read ({error.strerror})"
            ) from error


def _line_items(name: str, line: bytes) -> Iterator[Item]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        yield Item(name, problem="it is not UTF-8 text")
        return
    except (ValueError, RecursionError) as error:
        yield Item(name, problem=f"it is not JSON: {' '.join(str(error).split())[:120]}")
        return
    documents = record.get("documents") if isinstance(record, dict) else None
    if documents is None:
        yield _document(name, record)
    elif isinstance(documents, list):
        for number, document in enumerate(documents, start=1):
            yield _document(f"{name}, document {number}", document)
    else:
        yield Item(name, problem="its documents are not a list")


def _document(name: str, document: object) -> Item:
    if isinstance(document, str) and ", document " in name:
        return Item(name, document_text(document))
    if not isinstance(document, dict):
        return Item(name, problem='it is not an object with a "text" or "data"')
    id_ = document.get("id")
    if isinstance(id_, (str, int)):
        name = f"{name} ({str(id_)[:80]})"
    text, data = document.get("text"), document.get("data")
    if isinstance(text, str):
        return Item(name, document_text(text))
    if "text" in document or "data" not in document:
        return Item(name, problem='it has no "text", or one that is not a string')
    if isinstance(data, str):
        return Item(name, document_text(data))
    if isinstance(data, dict):
        return Item(name, fields_text(data))
    return Item(name, problem='its "data" is neither a string nor an object')
