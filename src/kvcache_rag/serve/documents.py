"""Documents of a request: each is one chunk, whatever form it comes in."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
)
from pydantic_core import PydanticCustomError

from kvcache_rag.integration.documents import document_text, fields_text


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "it is not valid Unicode") from error
    return text


def _written(fields: dict[str, Any]) -> dict[str, Any]:
    _whole(fields_text(fields))
    return fields


Text = Annotated[str, AfterValidator(_whole)]
"""A text that can be read and sent; JSON can also hold halves of characters."""

SomeText = Annotated[str, Field(min_length=1), AfterValidator(_whole)]
"""A text that is not empty."""


class TextDocument(BaseModel):
    """A text with a name.

    Attributes:
        id: Named by the caller; it does not stand in the prompt.
        title: Carried along; it does not stand in the prompt either, as in the integrations, so
            that one text is one chunk wherever it comes from.
        text: The chunk.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"id": "b", "title": "Harbours", "text": "Rotterdam …"}]},
    )

    id: str | None = Field(None, description="The caller's name of it; not part of the prompt.")
    title: str | None = Field(None, description="Carried along; not part of the prompt.")
    text: Text = Field(description="The chunk.")


class DataDocument(BaseModel):
    """A document as Cohere's API writes it.

    Attributes:
        id: Named by the caller; it does not stand in the prompt.
        data: The chunk, or fields that are written as one (see `fields_text`).
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"id": "c", "data": {"title": "Harbours", "snippet": "Rotterdam …"}}]
        },
    )

    id: str | None = Field(None, description="The caller's name of it; not part of the prompt.")
    data: Annotated[
        Annotated[Text, Tag("(string)")]
        | Annotated[dict[str, JsonValue], AfterValidator(_written), Tag("(mapping)")],
        Discriminator(lambda given: "(string)" if isinstance(given, str) else "(mapping)"),
    ] = Field(
        description="The chunk; of a mapping, one line `name: value` per field, sorted by name."
    )


def _form(given: Any) -> str:
    if isinstance(given, str):
        return "(string)"
    has_data = "data" in given if isinstance(given, Mapping) else hasattr(given, "data")
    return "(data)" if has_data else "(text)"


Document = Annotated[
    Annotated[Text, Tag("(string)")]
    | Annotated[TextDocument, Tag("(text)")]
    | Annotated[DataDocument, Tag("(data)")],
    Discriminator(_form),
]
"""A chunk: a string, `{text}`, `{id, title, text}` or `{id, data}`."""


def texts(documents: Sequence[str | TextDocument | DataDocument]) -> tuple[str, ...]:
    """Chunks of documents in their order; equal ones once, empty ones left out.

    Args:
        documents: As they came.
    """
    return tuple(dict.fromkeys(text for text in map(text_of, documents) if text.strip()))


def text_of(document: str | TextDocument | DataDocument) -> str:
    """The text that stands in the prompt for a document."""
    if isinstance(document, str):
        return document_text(document)
    if isinstance(document, TextDocument):
        return document_text(document.text, document.title)
    data = document.data
    return document_text(data) if isinstance(data, str) else fields_text(data)
