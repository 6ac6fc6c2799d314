"""LangChain's Chroma store that prefills documents when they are added."""

from __future__ import annotations

import inspect
import uuid
from typing import TYPE_CHECKING, Any, Final, cast

from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.runnables.config import run_in_executor

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import arguments_of, expanded
from kvcache_rag.integration import Reopened, refuse_unknown
from langchain_kvcache_rag.blocks import checked_prompt
from langchain_kvcache_rag.client import PrefilledClient, source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from chromadb.api import CreateCollectionConfiguration
    from chromadb.config import Settings
    from langchain_core.embeddings import Embeddings
    from langchain_core.prompts import StringPromptTemplate
    from typing_extensions import Self

    from kvcache_rag import Engine
    from kvcache_rag.integration import References
    from langchain_kvcache_rag.collection import DocumentCollection, KVSource

# What names a collection's place for another process, too.
_PLACES: Final = ("persist_directory", "host", "chroma_cloud_api_key")


class KVCacheChroma(Reopened, Chroma):
    """`langchain_chroma.Chroma` that prefills documents when they are added.

    Everything works as in the stock store, over the same collections: either can open what the
    other wrote (`prefill_missing` fills the stock store's).  Each row has a reference to its keys
    and values, which is not part of a document's metadata; the chat model knows documents that were
    read by their text.

        llm = ChatKVCache(model="Qwen/Qwen2.5-1.5B-Instruct", kv_dir="./kv")
        store = KVCacheChroma("docs", embeddings, persist_directory="./chroma", llm=llm)
        store.add_documents(splits)

    It differs where the stock store fails or forgets: calls may have any size, even none; an
    existing id is replaced with its metadata, not merged; of equal ids in one call the last wins;
    `delete()` deletes all rows, as LangChain defines it.  Metadata must not use the keys of a
    reference (`kvcache_rag.integration.REFERENCE_KEYS`).  One process owns a persistent directory;
    several share a collection through a Chroma server and `host=`.

    A copy is the same store; a pickle opens the collection again, with the chat model as pickled.
    """

    def __init__(
        self,
        collection_name: str = Chroma._LANGCHAIN_DEFAULT_COLLECTION_NAME,
        embedding_function: Embeddings | None = None,
        persist_directory: str | None = None,
        host: str | None = None,
        port: int | None = None,
        headers: dict[str, str] | None = None,
        chroma_cloud_api_key: str | None = None,
        tenant: str | None = None,
        database: str | None = None,
        client_settings: Settings | None = None,
        collection_metadata: dict[str, Any] | None = None,
        collection_configuration: CreateCollectionConfiguration | None = None,
        client: Any = None,
        relevance_score_fn: Callable[[float], float] | None = None,
        create_collection_if_not_exists: bool | None = True,
        *,
        ssl: bool = False,
        llm: KVSource | None = None,
        engine: Engine | None = None,
        show_progress: bool = False,
        document_prompt: StringPromptTemplate | None = None,
        **options: Any,
    ) -> None:
        """Open a collection; other arguments are those of the stock store.

        Args:
            collection_name: Its name; created if it does not exist.
            embedding_function: Embeds documents and questions.
            persist_directory: Folder of a local database.
            host: Chroma server, with `port`, `headers` and `ssl`.
            port: Port of the server.
            headers: HTTP headers for the server.
            chroma_cloud_api_key: Key for Chroma Cloud, with `tenant` and `database`.
            tenant: Tenant of the database.
            database: Name of the database.
            client_settings: Settings of Chroma's client.
            collection_metadata: Metadata of a new collection.
            collection_configuration: Configuration of a new collection, such as `{"hnsw": {"space":
                "cosine"}}`.
            client: An open Chroma client, instead of the above.
            relevance_score_fn: Turns a distance into a score; None for that of the space.
            create_collection_if_not_exists: Whether to create the collection.
            ssl: Whether to use HTTPS for the server.
            llm: The `ChatKVCache` that will answer; its engine prefills, loaded on first use.
            engine: Prefills, if there is no `llm`.  With neither, nothing is prefilled.
            show_progress: Show a bar while prefilling, unless a call says otherwise.
            document_prompt: Writes the text that is prefilled, as `KVCacheRAG` does with the same
                one; None for the text alone.  Rows keep text and metadata.
            options: Further arguments of a newer `langchain_chroma.Chroma`.

        Raises:
            InvalidInputError: If `llm` is not a `ChatKVCache` or `engine` not an `Engine`, both are
                given, or `document_prompt` is not a PromptTemplate.
        """
        known = arguments_of(KVCacheChroma, Chroma)
        refuse_unknown(options, known, f"argument of {type(self).__name__}")
        self._source = source_of(llm, engine)
        if document_prompt is not None:
            checked_prompt(document_prompt)
        self._document_prompt = document_prompt
        super().__init__(
            collection_name=collection_name,
            embedding_function=embedding_function,
            persist_directory=persist_directory and expanded(persist_directory),
            host=host,
            port=port,
            headers=headers,
            chroma_cloud_api_key=chroma_cloud_api_key,
            tenant=tenant,
            database=database,
            client_settings=client_settings,
            collection_metadata=collection_metadata,
            collection_configuration=collection_configuration,
            client=client,
            relevance_score_fn=relevance_score_fn,
            create_collection_if_not_exists=create_collection_if_not_exists,
            ssl=ssl,
            **options,
        )
        wrapped: Any = PrefilledClient(
            self._client,
            self._source,
            show_progress=show_progress,
            document_prompt=document_prompt,
        )
        self._client = wrapped
        self._chroma_collection = wrapped.wrap(self._chroma_collection)

    @property
    def engine(self) -> Engine | None:
        """The engine that prefills: the one given, or `llm`'s, loaded on first use."""
        return None if self._source is None else self._source.engine

    @property
    def references(self) -> References | None:
        """References of the rows that were read; `llm`'s, if there is one."""
        return None if self._source is None else self._source.references

    @property
    def _prefilled(self) -> DocumentCollection:
        return cast("DocumentCollection", self._collection)

    def __reduce__(self) -> tuple[Any, ...]:
        """What a store in another process is opened from.

        Raises:
            InvalidInputError: If that process could not find the collection.
        """
        opener, (kind, arguments, options) = super().__reduce__()
        given = inspect.signature(kind).bind(*arguments, **options).arguments
        settings = given.get("client_settings")
        is_placed = any(given.get(name) for name in _PLACES) or (
            settings is not None and (settings.is_persistent or settings.chroma_server_host)
        )
        if not is_placed or given.get("client") is not None:
            raise InvalidInputError(
                "a store in memory or over an open client cannot be pickled; open it with "
                "persist_directory= or host="
            )
        return opener, (kind, arguments, options)

    # ------------------------------------------------------------------ writing
    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
        *,
        show_progress: bool | None = None,
        **_: Any,
    ) -> list[str]:
        """Embed and prefill texts at the same time, and write them; existing ids are replaced.

        The embedding runs in the caller's thread, prefilling in another.  If the embedding fails,
        nothing is written, and what was prefilled until then stays cached.  A text that cannot be
        prefilled, because it does not fit the model's context window or the model cannot be loaded,
        is written without a reference to KV, and one warning names it.

        Args:
            texts: Any number of texts.
            metadatas: At most one per text; the rest have none.
            ids: One per text; those that are None, or all without `ids`, are generated.
            show_progress: Whether to show a bar while prefilling; None for the store's setting.

        Returns:
            The id of each text.

        Raises:
            InvalidInputError: If Chroma cannot store an id or metadata (such as a nested
                dictionary), there are not as many ids as texts, or a text lacks metadata that
                `document_prompt` names; nothing is prefilled then.
        """
        given = list(texts)
        wanted = [None] * len(given) if ids is None else ids
        named = [str(uuid.uuid4()) if one is None else one for one in wanted]
        values = [*(metadatas or []), *[{}] * (len(given) - len(metadatas or []))]
        embedding = self._embedding_function
        self._prefilled.upsert(
            named,
            None,
            values,
            given,
            embed=None if embedding is None else embedding.embed_documents,
            show_progress=show_progress,
        )
        return named

    def add_images(
        self,
        uris: list[str],
        metadatas: list[dict[str, Any]] | None = None,
        ids: list[str] | None = None,
    ) -> list[str]:
        """Like the stock store's; a text model cannot prefill images."""
        client: Any = PrefilledClient(self._client, None)
        storing = Chroma(self._collection.name, self._embedding_function, client=client)
        known = [one for one in ids or [] if one is not None]
        return self._prefilled.replace_by(known, lambda: storing.add_images(uris, metadatas, ids))

    def update_documents(self, ids: list[str], documents: list[Document]) -> None:
        """Replace existing rows, metadata included; missing ids are ignored.

        Raises:
            InvalidInputError: If there are not as many ids as documents.
            ValueError: If the store has no embedding function.
        """
        if ids or documents:
            super().update_documents(ids, documents)

    async def aupdate_document(self, document_id: str, document: Document) -> None:
        """`update_document` that does not block the event loop."""
        await self.aupdate_documents([document_id], [document])

    async def aupdate_documents(self, ids: list[str], documents: list[Document]) -> None:
        """`update_documents` that does not block the event loop."""
        await run_in_executor(None, self.update_documents, ids, documents)

    def prefill_missing(self, *, show_progress: bool | None = None) -> int:
        """Prefill every row whose KV is not stored, and write missing or outdated references.

        Args:
            show_progress: Whether to show a bar; None for the store's setting.

        Returns:
            Number of rows whose reference was written.

        Raises:
            InvalidInputError: If the store has neither `llm` nor `engine`.
        """
        return self._prefilled.prefill_missing(show_progress=show_progress)

    async def aprefill_missing(self, *, show_progress: bool | None = None) -> int:
        """`prefill_missing` that does not block the event loop."""
        return await run_in_executor(None, self.prefill_missing, show_progress=show_progress)

    def fork(self, new_name: str) -> Self:
        """Like the stock store's; `prefill_missing` computes KV that is gone."""
        forked = self._collection.fork(new_name=new_name)
        # An engine is handed on as its source, so that both stores know the same references.
        return type(self)(
            forked.name,
            self._embedding_function,
            client=self._client,
            llm=self._source,
            document_prompt=self._document_prompt,
        )

    # ------------------------------------------------------------------ deleting
    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> None:
        """Delete rows and their KV, unless another row has the same text.

        Args:
            ids: Ids of the rows; missing ids are ignored.
            kwargs: `where` and `where_document`, which rows must also meet.  Without any condition,
                all rows are deleted.
        """
        if ids is None and all(value is None for value in kwargs.values()):
            self._prefilled.clear()
        else:
            self._prefilled.delete(ids, **kwargs)

    # ------------------------------------------------------------------ reading
    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Documents by id, in no particular order; missing ids are left out."""
        found = self.get(ids=[*ids])
        columns = zip(found["ids"], found["documents"], found["metadatas"], strict=True)
        return [
            Document(page_content=text, metadata=metadata or {}, id=id_)
            for id_, text, metadata in columns
            if text is not None
        ]
