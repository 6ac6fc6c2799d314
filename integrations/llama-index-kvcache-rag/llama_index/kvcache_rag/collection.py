"""Open the Chroma collection that settings describe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import chromadb
from chromadb.errors import ChromaError

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import expanded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection


def open_collection(
    name: str,
    *,
    client: ClientAPI | None = None,
    persist_dir: str | None = None,
    host: str | None = None,
    port: int | None = None,
    ssl: bool = False,
    headers: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Collection:
    """Get or create a collection; an existing one keeps its configuration.

    Raises:
        InvalidInputError: If it is not said where the collection is, or twice, or if Chroma
            refuses its name or cannot be reached.
    """
    given = [place for place in (client, persist_dir, host) if place is not None]
    if len(given) != 1:
        raise InvalidInputError(
            "say where the Chroma collection is by exactly one of persist_dir=, host= and client="
        )
    try:
        if persist_dir is not None:
            # Chroma keeps one client per path for the whole process, also after a chdir.
            client = chromadb.PersistentClient(path=os.path.abspath(expanded(persist_dir)))
        elif host is not None:
            client = chromadb.HttpClient(host, port or 8000, ssl=ssl, headers=dict(headers or {}))
        if client is None:
            raise InvalidInputError("client= must be a Chroma client")
        # Vectors come from LlamaIndex; Chroma's default embedding would download a model.
        return client.get_or_create_collection(name, embedding_function=None, **(options or {}))
    except (ValueError, ChromaError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"cannot open the collection {name!r}: {reason}") from error
