"""A file to fine-tune on: facts that the packaged reader reads, and questions for each of them."""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcache_rag_lab.finetune import JsonlData
from kvcache_rag_lab.reader import collection

if TYPE_CHECKING:
    from kvcache_rag_lab.reader import ReaderQuestion

_FOLDER: Final = tempfile.TemporaryDirectory(prefix="reader-file-")


@cache
def reader_data(documents: int = 2, questions: int = 14) -> JsonlData:
    """Contexts of so many documents of one sentence, each of which is asked for."""
    path = Path(_FOLDER.name, f"{documents}.jsonl")
    asked = collection().questions
    lines = []
    for start in range(0, len(asked) - documents + 1, documents):
        together = asked[start : start + documents]
        for place, question in enumerate(together):
            texts = [
                {"text": _fact(one), "relevant": number == place}
                for number, one in enumerate(together)
            ]
            row = {"question": question.text, "answers": [question.answer]}
            # Rows of equal texts become one context, whichever of them a row calls relevant.
            lines.append(json.dumps({**row, "documents": texts}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return JsonlData(path, questions)


def _fact(question: ReaderQuestion) -> str:
    """The sentence that answers a question."""
    (place,) = question.documents
    sentences = re.findall(r"[^.]+\.", collection().documents[place])
    words = set(re.findall(r"\w+", question.text))

    def fits(sentence: str) -> tuple[bool, int]:
        held = set(re.findall(r"\w+", sentence))
        return question.answer in sentence, len(words & held)

    return max(sentences, key=fits).strip()
