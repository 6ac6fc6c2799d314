"""The packaged reader's texts: documents in controlled English, questions, and the exact answers.

The reader is a tiny model that reads nothing else, but it really reads: it never learned these
names and numbers, so answers can only come from the documents.  That makes it a test bench for
reuse policies that needs no download and no GPU. Importing this package does not import torch.

- `examples`: contexts of six documents, by the kind of their questions.
- `collection`: forty documents to retrieve from, each question answered by one of them.
- `model_path`: the packaged model, for `AutoModelForCausalLM.from_pretrained`.

All of it is in `corpus.json`, which was written once; the code that wrote it and trained the reader
is at commit 00c4d022.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

__all__ = [
    "KINDS",
    "REFUSAL",
    "ReaderExample",
    "ReaderQuestion",
    "collection",
    "examples",
    "model_path",
]

KINDS: Final = (
    *("single", "same_relation", "unanswerable", "two_hop", "multi_value", "two_hop_direct"),
    *("noise_20", "noise_40", "noise_60", "noise_80", "pronoun", "alias", "unit"),
)
"""Kinds of questions.

`same_relation`: every document states the asked relation, each for another entity; `two_hop`: the
answer names the bridge first; `two_hop_direct`: it does not; `noise_40`: 40 % of the documents
state the relation for another entity, the others state the answer.  `pronoun`, `alias` and `unit`:
the last sentence of a document says what the first of the next needs.
"""

REFUSAL: Final = "not found"
"""What the reader says if no document has the answer."""


@dataclass(frozen=True)
class ReaderQuestion:
    """A question about the documents of a `ReaderExample`.

    Attributes:
        text: The question.
        answer: The exact answer; "bridge; final" for two hops, "A, B" for several values,
            `REFUSAL` if the documents do not say.
        kind: One of `KINDS`.
        documents: Indices of the documents that state the facts; empty for a refusal.
    """

    text: str
    answer: str
    kind: str
    documents: tuple[int, ...]


@dataclass(frozen=True)
class ReaderExample:
    """Documents and the questions about them."""

    documents: tuple[str, ...]
    questions: tuple[ReaderQuestion, ...]


def examples(kind: str) -> tuple[ReaderExample, ...]:
    """All contexts with questions of a kind.

    Raises:
        ValueError: If `kind` is not in `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}, choose from {', '.join(KINDS)}")
    return tuple(_example(kind, *row) for row in _corpus()["examples"][kind])


def collection() -> ReaderExample:
    """Documents to retrieve from; none contradicts another."""
    return _example("single", *_corpus()["collection"])


def model_path() -> Path:
    """Return the directory of the packaged model.

    Raises:
        FileNotFoundError: If the package was installed without its data.
    """
    path = Path(str(files("kvcache_rag") / "reader" / "model"))
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"the reader's model is missing: {path} has no config.json")
    return path


@cache
def _corpus() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files(__name__) / "corpus.json").read_text("utf-8"))
    return found


def _example(kind: str, documents: list[str], questions: list[Any]) -> ReaderExample:
    asked = (ReaderQuestion(text, said, kind, tuple(where)) for text, said, where in questions)
    return ReaderExample(tuple(documents), tuple(asked))
