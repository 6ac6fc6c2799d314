"""Chroma collections for commands: where they are, and opening one without creating it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvcache_rag.errors import InvalidInputError, MissingExtraError, expanded

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_PAGE = 1000


def add_chroma(parser: argparse._ActionsContainer) -> None:
    """Declare where the Chroma database is."""
    parser.add_argument(
        "--chroma",
        type=expanded,
        metavar="PLACE",
        help="folder of the Chroma database, or the URL of its server (http://localhost:8000)",
    )


def open_client(place: str) -> Any:
    """A client of a database; nothing is made.

    Args:
        place: Its folder, or the URL of a server.

    Raises:
        InvalidInputError: If there is none.
        MissingExtraError: If chromadb is not installed.
    """
    if "://" not in place and not (Path(place) / "chroma.sqlite3").is_file():
        raise InvalidInputError(f"there is no Chroma database in {place}; check --chroma")
    server = _server(place) if "://" in place else None
    try:
        import chromadb
    except ImportError as error:
        raise MissingExtraError("chromadb", "chroma") from error
    if server is None:
        return chromadb.PersistentClient(path=os.path.abspath(place))
    host, port, ssl = server
    try:
        return chromadb.HttpClient(host, port, ssl=ssl)
    except Exception as error:  # whatever the client raises for a server that is not there
        raise InvalidInputError(f"there is no Chroma server at {place}; start it") from error


def _server(place: str) -> tuple[str, int, bool]:
    """Host, port, and whether it is asked by TLS."""
    url = urlsplit(place)
    with suppress(ValueError):
        port = url.port or (443 if url.scheme == "https" else 8000)
        if url.scheme in ("http", "https") and url.hostname and url.path in ("", "/"):
            host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
            return host, port, url.scheme == "https"
    raise InvalidInputError(
        f"--chroma {place} is no server's; say it as http://localhost:8000, or name a folder"
    )


def all_collections(client: Any) -> list[Any]:
    """Every collection of a database; servers give a limited number at once."""
    collections: list[Any] = []
    while page := client.list_collections(limit=_PAGE, offset=len(collections)):
        collections += page
    return collections


def open_collections(client: Any, names: list[str]) -> list[Any]:
    """Existing collections by their names.

    Raises:
        InvalidInputError: If one does not exist.
    """
    known = {str(collection.name) for collection in all_collections(client)}
    missing = [name for name in names if name not in known]
    if missing:
        there = ", ".join(sorted(known)) or "none"
        raise InvalidInputError(f"there is no collection {missing[0]!r}, only {there}")
    # Vectors are not needed; Chroma's default embedding would download a model.
    return [client.get_collection(name, embedding_function=None) for name in names]


def referenced(collection: Any) -> Iterator[str]:
    """Keys of the chunks that the rows of a collection refer to, row by row."""
    offset = 0
    while True:
        page = collection.get(limit=_PAGE, offset=offset, include=["metadatas"])
        for metadata in page["metadatas"] or []:
            if metadata and "kv_key" in metadata:
                yield str(metadata["kv_key"])
        if len(page["ids"]) < _PAGE:
            return
        offset += _PAGE
