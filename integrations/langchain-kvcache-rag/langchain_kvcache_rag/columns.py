"""Turn the columns that Chroma's collections take into rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chromadb.api.types import validate_metadata

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import REFERENCE_KEYS, NewRow, check_unicode, listed, of_user


def new_rows(ids: Any, embeddings: Any, metadatas: Any, documents: Any) -> list[NewRow]:
    """Columns as rows, with the metadata of their user alone.

    Raises:
        InvalidInputError: If columns differ in length, or Chroma cannot store an id, a document or
            a metadata.
    """
    ids, texts = listed(ids), listed(documents)
    vectors = [None] * len(ids) if embeddings is None else list(embeddings)
    values = [None] * len(ids) if metadatas is None else listed(metadatas)
    if not len(ids) == len(texts) == len(vectors) == len(values):
        raise InvalidInputError(
            f"{len(ids)} ids, {len(texts)} documents, {len(vectors)} embeddings and {len(values)} "
            "metadatas do not make rows; give one of each per row"
        )
    for id_, text in zip(ids, texts, strict=True):
        if not isinstance(id_, str) or not id_:
            raise InvalidInputError(f"an id must be a text that is not empty, not {id_!r}")
        if not isinstance(text, str):
            raise InvalidInputError(f"the document of {id_!r} must be a text, not {text!r}")
        check_unicode(f"the id {id_!r}", id_)
        check_unicode(f"the document of {id_!r}", text)
    return [
        NewRow(id_, text, _checked(id_, metadata), vector)
        for id_, text, metadata, vector in zip(ids, texts, values, vectors, strict=True)
    ]


def _checked(id_: str, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(metadata or {}, Mapping):
        raise InvalidInputError(f"the metadata of {id_!r} must be a dictionary, not {metadata!r}")
    own = of_user(metadata or {})
    taken = sorted(set(own) & set(REFERENCE_KEYS))
    if taken:
        raise InvalidInputError(
            f"the metadata of {id_!r} has {taken[0]!r}, which is where a reference to KV is "
            "written; rename it"
        )
    try:
        if own:
            validate_metadata(own)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{error} in the metadata of {id_!r}; leave it out, for example by "
            "langchain_community.vectorstores.utils.filter_complex_metadata"
        ) from error
    # Chroma finds out about these only when it writes.
    for key, value in own.items():
        if not key or not all(map(_is_unicode, _texts(key, value))):
            raise InvalidInputError(
                f"{key!r}: {value!r} in the metadata of {id_!r} cannot be stored: keys must not be "
                "empty, and texts must be valid Unicode"
            )
    return own


def _texts(*values: Any) -> list[str]:
    flat = (one for value in values for one in (value if isinstance(value, list) else [value]))
    return [one for one in flat if isinstance(one, str)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False  # a lone surrogate, as some PDF readers make them
    return True
