"""A Chroma client whose collections prefill."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import References, behind
from langchain_kvcache_rag.collection import DocumentCollection

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from langchain_core.prompts import StringPromptTemplate

    from kvcache_rag import Engine
    from langchain_kvcache_rag.collection import KVSource


@dataclass(frozen=True)
class EngineSource:
    """An engine without a chat model."""

    engine: Engine
    references: References = field(default_factory=References)


def source_of(llm: KVSource | None, engine: Engine | None) -> KVSource | None:
    """What prefills, if it is said once and can."""
    if llm is not None and engine is not None:
        raise InvalidInputError("give llm= or engine=, not both; a chat model has its engine")
    if llm is not None and not hasattr(llm, "references"):
        raise InvalidInputError(
            f"llm= must be a ChatKVCache, not a {type(llm).__name__}, which has no KV caches"
        )
    if engine is not None and not hasattr(type(engine), "delete"):
        raise InvalidInputError(
            f"engine= must be a kvcache_rag.Engine, not a {type(engine).__name__}; "
            'make one by Engine.from_pretrained("...")'
        )
    return llm if engine is None else EngineSource(engine)


class PrefilledClient:
    """A Chroma client whose collections prefill."""

    def __init__(
        self,
        client: ClientAPI | PrefilledClient,
        source: KVSource | None,
        *,
        show_progress: bool = False,
        document_prompt: StringPromptTemplate | None = None,
    ) -> None:
        """Wrap `client`; without a source, collections only store."""
        # That of another store of this kind prefills for that store.
        self.client: ClientAPI = client.client if isinstance(client, PrefilledClient) else client
        self._source, self._show_progress = source, show_progress
        self._document_prompt = document_prompt

    def __getattr__(self, name: str) -> Any:
        return behind(self, "client", name)

    @property  # type: ignore[misc]  # nobody sets it
    def __class__(self) -> Any:
        """For `isinstance`, which asks for the type first: it is a client of Chroma's, too."""
        return type(self.client)

    def wrap(self, collection: Collection | DocumentCollection) -> DocumentCollection:
        """The collection as one that prefills for this client's store."""
        inner: Any = collection
        return DocumentCollection(
            inner.collection if isinstance(inner, DocumentCollection) else inner,
            self._source,
            show_progress=self._show_progress,
            document_prompt=self._document_prompt,
        )

    def get_or_create_collection(self, *args: Any, **options: Any) -> DocumentCollection:
        return self.wrap(self.client.get_or_create_collection(*args, **options))

    def create_collection(self, *args: Any, **options: Any) -> DocumentCollection:
        return self.wrap(self.client.create_collection(*args, **options))

    def get_collection(self, *args: Any, **options: Any) -> DocumentCollection:
        return self.wrap(self.client.get_collection(*args, **options))

    def delete_collection(self, name: str) -> None:
        """Delete a collection and its KV."""
        collection = self.get_collection(name, embedding_function=None)
        collection.drop_by(lambda: self.client.delete_collection(name))

    def get_max_batch_size(self) -> int:
        """No limit: collections split a call themselves, so that it fails as a whole."""
        return sys.maxsize
