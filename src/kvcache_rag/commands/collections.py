"""Chroma collections for commands: where they are, and opening one without making it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError, MissingExtraError, expanded

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_PAGE = 1000


def add_place(parser: argparse.ArgumentParser) -> None:
    """Declare where the Chroma database is."""
    parser.add_argument(
        "--persist-dir", type=expanded, metavar="CHROMA", help="folder of the Chroma database"
    )
    parser.add_argument("--host", help="host of a Chroma server")
    parser.add_argument("--port", type=int, default=8000, help="its port (default: 8000)")
    parser.add_argument("--ssl", action="store_true", help="reach it by https")


def is_placed(arguments: argparse.Namespace) -> bool:
    """Whether it is said where the database is."""
    return arguments.persist_dir is not None or arguments.host is not None


def open_client(arguments: argparse.Namespace) -> Any:
    """A client of the database that the arguments name; nothing is made.

    Raises:
        InvalidInputError: If it is not said where, said twice, or there is none.
        MissingExtraError: If chromadb is not installed.
    """
    if (arguments.persist_dir is None) == (arguments.host is None):
        raise InvalidInputError("say where the collections are: --persist-dir or --host")
    try:
        import chromadb
    except ImportError as error:
        raise MissingExtraError("chromadb", "chroma") from error
    if arguments.persist_dir is not None:
        folder = Path(arguments.persist_dir)
        if not (folder / "chroma.sqlite3").is_file():
            raise InvalidInputError(f"there is no Chroma database in {folder}; check --persist-dir")
        return chromadb.PersistentClient(path=str(folder.absolute()))
    try:
        return chromadb.HttpClient(arguments.host, arguments.port, ssl=arguments.ssl)
    except Exception as error:  # whatever the client raises for a server that is not there
        place = f"{arguments.host}:{arguments.port}"
        raise InvalidInputError(f"there is no Chroma server at {place}; start it") from error


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
