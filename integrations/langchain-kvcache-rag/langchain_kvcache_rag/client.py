"""A Chroma client whose collections prefill."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_rag.integration import References
from langchain_kvcache_rag.collection import PrefilledCollection, behind

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection

    from kvcache_rag import Engine
    from langchain_kvcache_rag.collection import KVSource


@dataclass(frozen=True)
class EngineSource:
    """An engine without a chat model."""

    engine: Engine
    references: References = field(default_factory=References)


class PrefilledClient:
    """A Chroma client whose collections prefill."""

    def __init__(
        self, client: ClientAPI | PrefilledClient, source: KVSource | None, *, show_progress: bool
    ) -> None:
        """Wrap `client`; without a source, collections only store."""
        # That of another store of this kind prefills for that store.
        self.client: ClientAPI = client.client if isinstance(client, PrefilledClient) else client
        self._source, self._show_progress = source, show_progress

    def __getattr__(self, name: str) -> Any:
        return behind(self, "client", name)

    def wrap(self, collection: Collection | PrefilledCollection) -> PrefilledCollection:
        """The collection as one that prefills for this client's store."""
        if isinstance(collection, PrefilledCollection):
            collection = collection.collection
        return PrefilledCollection(collection, self._source, show_progress=self._show_progress)

    def get_or_create_collection(self, *args: Any, **options: Any) -> PrefilledCollection:
        return self.wrap(self.client.get_or_create_collection(*args, **options))

    def create_collection(self, *args: Any, **options: Any) -> PrefilledCollection:
        return self.wrap(self.client.create_collection(*args, **options))

    def get_collection(self, *args: Any, **options: Any) -> PrefilledCollection:
        return self.wrap(self.client.get_collection(*args, **options))

    def delete_collection(self, name: str) -> None:
        """Delete a collection and release what it claimed."""
        collection = self.get_collection(name, embedding_function=None)
        collection.drop_by(lambda: self.client.delete_collection(name))

    def get_max_batch_size(self) -> int:
        """No limit: collections split a call themselves, so that it fails as a whole."""
        return sys.maxsize
