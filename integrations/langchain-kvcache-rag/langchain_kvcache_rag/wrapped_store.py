"""Any vector store of LangChain, whose documents are prefilled when they are added."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_core.documents import Document
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import IngestedText, Reference, TextPrefiller
from langchain_kvcache_rag.blocks import checked_document
from langchain_kvcache_rag.client import source_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from langchain_core.embeddings import Embeddings
    from typing_extensions import Self

    from kvcache_rag import ChunkKey, Engine
    from langchain_kvcache_rag.collection import KVSource


def prefill(
    documents: Iterable[Document | str],
    llm: KVSource | None = None,
    *,
    engine: Engine | None = None,
    name: str = "",
    show_progress: bool = False,
) -> int:
    """Compute and store the KV of documents, for a vector store of any kind; what is there stays.

    Args:
        documents: As they are added to the store, or texts as they will stand in prompts.
        llm: The `ChatKVCache` that will answer.
        engine: Prefills, if there is no `llm`.
        name: Of the vector store: chunks of documents with an id are claimed under it, until they
            are deleted through `KVCacheVectorStore.wrap(store, name=...)` or found to be unused by
            `kvcache-rag store gc`.  "": chunks go when the limit `kv_max_bytes` drops them.
        show_progress: Whether to show a bar.

    Returns:
        Number of different chunks that the documents have.

    Raises:
        ContextTooLongError: If a text does not fit the model's context window; nothing is computed
            then.
        InvalidInputError: If it is not said once, by `llm` or by `engine`, what prefills, or
            something is no document.
    """
    if isinstance(documents, (str, Document)):
        raise InvalidInputError("prefill() takes a list of documents, not one; put it into a list")
    given = [Document(one) if isinstance(one, str) else checked_document(one) for one in documents]
    prefilling = _Prefilling(_needed(llm, engine), name)
    keys = prefilling.compute([one.page_content for one in given], show_progress=show_progress)
    prefilling.claim([one.id or "" for one in given], [one.page_content for one in given], keys)
    return len({key for key in keys if key is not None})


class KVCacheVectorStore(VectorStore):
    """A vector store of any kind that prefills what is added.

        store = KVCacheVectorStore.wrap(QdrantVectorStore(...), llm=llm, name="docs")
        store.add_documents(splits)

    Questions go to the store as they are, and what is not defined here is the store's own.
    """

    def __init__(
        self,
        store: VectorStore,
        *,
        llm: KVSource | None = None,
        engine: Engine | None = None,
        name: str = "",
        show_progress: bool = False,
    ) -> None:
        """As `wrap`."""
        if not isinstance(store, VectorStore):
            raise InvalidInputError(
                f"wrap() takes a vector store of LangChain, not a {type(store).__name__}"
            )
        if isinstance(store, KVCacheVectorStore) or hasattr(store, "prefill_missing"):
            raise InvalidInputError(f"a {type(store).__name__} prefills already; use it as it is")
        self.store, self.name, self.show_progress = store, name, show_progress
        self._prefilling = _Prefilling(_needed(llm, engine), name)

    @classmethod
    def wrap(
        cls,
        store: VectorStore,
        *,
        llm: KVSource | None = None,
        engine: Engine | None = None,
        name: str = "",
        show_progress: bool = False,
    ) -> Self:
        """A store that prefills what is added to it.

        Args:
            store: An open store of any kind; it stays usable beside.
            llm: The `ChatKVCache` that will answer; it prefills with its engine, which is loaded
                when it is first needed.
            engine: Prefills, if there is no `llm`.
            name: Of the store, the same whenever it is opened.  Under it chunks are claimed, those
                of deleted documents are released, and `kvcache-rag store gc --name` finds what
                nobody uses.  "": nothing is claimed; chunks go when the limit `kv_max_bytes` drops
                them.
            show_progress: Whether to show a bar while prefilling.

        Raises:
            InvalidInputError: If it is no vector store, or one that prefills already, or it is not
                said once what prefills.
        """
        return cls(store, llm=llm, engine=engine, name=name, show_progress=show_progress)

    @classmethod
    def from_texts(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Not possible: the store that is wrapped is made first.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            "make the store first, then KVCacheVectorStore.wrap(store, llm=...), and add the texts"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "store":
            raise AttributeError(name)  # copying asks before there is a store
        return getattr(self.store, name)

    @property
    def embeddings(self) -> Embeddings | None:
        return self.store.embeddings

    @property
    def engine(self) -> Engine:
        """What prefills, loaded when it is first needed."""
        return self._prefilling.source.engine

    # ------------------------------------------------------------------ writing
    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Prefill texts and add them.

        Raises:
            ContextTooLongError: If a text does not fit the model's context window; nothing is added
                then.
        """
        given = list(texts)
        keys = self._compute(given)
        ids = self.store.add_texts(given, metadatas, **kwargs)
        self._prefilling.claim(ids, given, keys)
        return ids

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Prefill documents and add them; raises what `add_texts` does."""
        texts = [one.page_content for one in documents]
        keys = self._compute(texts)
        ids = self.store.add_documents(documents, **kwargs)
        self._prefilling.claim(ids, texts, keys)
        return ids

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """`add_texts` that does not block the event loop."""
        given = list(texts)
        keys = await run_in_executor(None, self._compute, given)
        ids = await self.store.aadd_texts(given, metadatas, **kwargs)
        await run_in_executor(None, self._prefilling.claim, ids, given, keys)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """`add_documents` that does not block the event loop."""
        texts = [one.page_content for one in documents]
        keys = await run_in_executor(None, self._compute, texts)
        ids = await self.store.aadd_documents(documents, **kwargs)
        await run_in_executor(None, self._prefilling.claim, ids, texts, keys)
        return ids

    def _compute(self, texts: Sequence[str]) -> list[ChunkKey | None]:
        return self._prefilling.compute(texts, show_progress=self.show_progress)

    # ------------------------------------------------------------------ deleting
    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete by id (without ids, what the store deletes then), and release the chunks."""
        done = self.store.delete(ids, **kwargs)
        self._deleted(ids, done, kwargs)
        return done

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """`delete` that does not block the event loop."""
        done = await self.store.adelete(ids, **kwargs)
        await run_in_executor(None, self._deleted, ids, done, kwargs)
        return done

    def _deleted(self, ids: list[str] | None, done: bool | None, kwargs: dict[str, Any]) -> None:
        # Stores without a result return None; what else a deletion depends on nobody tells.
        if done is not False and ids is not None and not kwargs:
            self._prefilling.texts.drop(ids=map(str, ids))

    # ------------------------------------------------------------------ reading
    # Every way is handed on: what the base class makes of others would not be the store's own.
    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return self.store.get_by_ids(ids)

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        return await self.store.aget_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self.store.similarity_search(query, k, **kwargs)

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return await self.store.asimilarity_search(query, k, **kwargs)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        return self.store.similarity_search_by_vector(embedding, k, **kwargs)

    async def asimilarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        return await self.store.asimilarity_search_by_vector(embedding, k, **kwargs)

    def similarity_search_with_score(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return self.store.similarity_search_with_score(*args, **kwargs)

    async def asimilarity_search_with_score(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return await self.store.asimilarity_search_with_score(*args, **kwargs)

    def similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return self.store.similarity_search_with_relevance_scores(query, k, **kwargs)

    async def asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return await self.store.asimilarity_search_with_relevance_scores(query, k, **kwargs)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        return self.store.max_marginal_relevance_search(query, k, fetch_k, lambda_mult, **kwargs)

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        return await self.store.amax_marginal_relevance_search(
            query, k, fetch_k, lambda_mult, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        return self.store.max_marginal_relevance_search_by_vector(
            embedding, k, fetch_k, lambda_mult, **kwargs
        )

    async def amax_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        return await self.store.amax_marginal_relevance_search_by_vector(
            embedding, k, fetch_k, lambda_mult, **kwargs
        )


class _Prefilling:
    """Prefills texts, and has the chat model know their references.

    LangChain documents have no place for a reference that nobody else would see.
    """

    def __init__(self, source: KVSource, name: str) -> None:
        self.source, self.name = source, name

    @property
    def texts(self) -> TextPrefiller:
        """What prefills, with the engine that is loaded by now."""
        return TextPrefiller(self.source.engine, self.name)

    def compute(self, texts: Sequence[str], *, show_progress: bool) -> list[ChunkKey | None]:
        rows = [IngestedText(str(at), text) for at, text in enumerate(texts)]
        keys = self.texts.prefill(rows, show_progress=show_progress)
        for text, key in zip(texts, keys, strict=True):
            if key is not None:
                self.source.references.note(Reference.of(key, text, self.source.engine))
        return keys

    def claim(
        self, ids: Sequence[str], texts: Sequence[str], keys: Sequence[ChunkKey | None]
    ) -> None:
        """Claim chunks for rows; those without an id could not be told apart later."""
        named = chain(map(str, ids), repeat(""))
        pairs = [
            (IngestedText(id_, text), key)
            for id_, text, key in zip(named, texts, keys, strict=False)
            if id_
        ]
        self.texts.claim([row for row, _ in pairs], [key for _, key in pairs])


def _needed(llm: KVSource | None, engine: Engine | None) -> KVSource:
    source = source_of(llm, engine)
    if source is None:
        raise InvalidInputError("say what prefills: llm= a ChatKVCache, or engine=")
    return source
