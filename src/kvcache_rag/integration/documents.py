"""How a document that somebody hands over reads as a chunk.

One text is one chunk, wherever it comes from: only what is written here stands in prompts, so that
a server, an ingestion and a build of the same documents share their keys and values.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def document_text(text: str, title: str | None = None) -> str:
    """The chunk of a text with a title: the text alone.

    Args:
        text: As it is.
        title: Carried along for whoever shows the document; it does not stand in the prompt.
    """
    del title
    return text


def fields_text(fields: Mapping[str, Any]) -> str:
    """The chunk of named fields: a line `name: value` for each, sorted by name.

    Values that are no text are written as JSON with sorted names.  A text alone, `{"text": ...}`,
    is that text.

    Args:
        fields: Values as JSON knows them.
    """
    if set(fields) == {"text"} and isinstance(fields["text"], str):
        return document_text(fields["text"])
    return "\n".join(f"{name}: {_written(fields[name])}" for name in sorted(fields))


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
