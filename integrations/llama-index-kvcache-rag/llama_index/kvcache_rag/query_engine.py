"""The usual query engine with a `KVCacheSynthesizer` inside, in one call."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.ingestion import run_transformations
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.settings import Settings

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import NamedArguments
from llama_index.kvcache_rag.options import of_retriever, refuse_others
from llama_index.kvcache_rag.synthesizer import FURTHER, KVCacheSynthesizer
from llama_index.kvcache_rag.vector_store import KVCacheVectorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.callbacks.base import CallbackManager
    from llama_index.core.embeddings.utils import EmbedType
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.llms.llm import LLM
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.response_synthesizers.base import BaseSynthesizer
    from llama_index.core.schema import Document, TransformComponent
    from typing_extensions import Self

    from llama_index.kvcache_rag.llm import KVCacheLLM

# What the stock engine takes and this one has no use for, with the values that change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_mode": ("compact", "refine"),
    "use_async": (False, True),
    "verbose": (False, True),
}
# What it has for these, `PromptTemplate` says here.
_TEMPLATES = (
    *("refine_template", "summary_template", "simple_template"),
    *("chat_content_qa_template", "chat_content_refine_template"),
)


class KVCacheQueryEngine(NamedArguments, RetrieverQueryEngine):
    """Retrieves nodes and answers from the stored KV of their chunks.

    `query`, `aquery` and streaming work as in every LlamaIndex query engine, and so does everything
    built on one (tools, chat engines, query transforms).  `Settings.llm` is only used if no LLM is
    given.
    """

    @classmethod
    def from_args(  # type: ignore[override]  # the other modes of the stock engine have no meaning here
        cls,
        retriever: BaseRetriever,
        llm: LLM | None = None,
        response_synthesizer: BaseSynthesizer | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> Self:
        """Make an engine for a retriever.

        Args:
            retriever: Finds the nodes.
            llm: A `KVCacheLLM`; None for `Settings.llm`.
            response_synthesizer: Replaces a new `KVCacheSynthesizer`.
            node_postprocessors: Run between retrieval and answer; chunks whose text they change are
                computed again.
            callback_manager: None for `Settings.callback_manager`.
            options: Arguments of `KVCacheSynthesizer` (`streaming`, `policy`, `overflow`,
                `text_qa_template`, ...).

        Raises:
            InvalidInputError: If caches cannot serve an option of the stock engine.
        """
        cls._refuse_others(options, cls.from_args)
        for name, values in _HARMLESS.items():
            if options.pop(name, values[0]) not in values:
                allowed = " or ".join(map(repr, values))
                raise InvalidInputError(f"{name} must be {allowed} here: chunks are never packed")
        return cls(
            retriever,
            response_synthesizer=response_synthesizer or KVCacheSynthesizer(llm, **_known(options)),
            callback_manager=callback_manager or Settings.callback_manager,
            node_postprocessors=node_postprocessors,
        )

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        llm: LLM | None = None,
        similarity_top_k: int = 2,
        retriever_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Make an engine for an index.

        Args:
            index: Over any vector store; with a `KVCacheVectorStore` its chunks are already
                prefilled.
            llm: A `KVCacheLLM`; None for `Settings.llm`.
            similarity_top_k: Nodes per question.
            retriever_kwargs: Further arguments of `index.as_retriever`; usual ones, such as
                `filters`, may also be in `options`.
            options: See `from_args`.
        """
        cls._refuse_others(options, cls.from_index, cls.from_args)
        found = {**(retriever_kwargs or {}), **of_retriever(options)}
        retriever = index.as_retriever(similarity_top_k=similarity_top_k, **found)
        return cls.from_args(retriever, llm, **options)

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Document],
        llm: KVCacheLLM,
        *,
        embed_model: EmbedType | None = None,
        persist_dir: str | PathLike[str] | None = None,
        kv_dir: str | PathLike[str] | None = None,
        collection_name: str = "docs",
        transformations: list[TransformComponent] | None = None,
        show_progress: bool = False,
        **options: Any,
    ) -> Self:
        """Embed, store and prefill documents, and make an engine for them.

        Documents with an id that the collection has are replaced, once the new ones are in it; only
        changed text is prefilled again.

        Args:
            documents: Documents to answer from.
            llm: Prefills and answers.
            embed_model: None for `Settings.embed_model`.
            persist_dir: Folder of the Chroma collection; None to keep it in memory.
            kv_dir: Folder of the KV; None for the LLM's.
            collection_name: Name of the collection.
            transformations: None for `Settings.transformations`.
            show_progress: Whether to show bars.
            options: See `from_index`.

        Raises:
            InvalidInputError: If an argument is unknown, or there is no embedding.
        """
        import chromadb

        cls._refuse_others(options, cls.from_documents, cls.from_index, cls.from_args)
        embed_model = _embedding(embed_model)
        place: dict[str, Any] = {"persist_dir": persist_dir}
        if persist_dir is None:
            # Collections in memory are shared by the whole process, so this one gets a name of its
            # own.
            place = {"client": chromadb.EphemeralClient()}
            collection_name = f"{collection_name}-{uuid.uuid4().hex}"
        store = KVCacheVectorStore.from_params(collection_name, llm=llm, kv_dir=kv_dir, **place)
        steps = transformations or Settings.transformations
        nodes = run_transformations(list(documents), steps, show_progress=show_progress)
        index = VectorStoreIndex(
            nodes,
            storage_context=StorageContext.from_defaults(vector_store=store),
            embed_model=embed_model,
            show_progress=show_progress,
        )
        written = {node.node_id for node in nodes}
        store.delete_documents([document.doc_id for document in documents], keep=written)
        return cls.from_index(index, llm, **options)

    @classmethod
    def _refuse_others(cls, options: dict[str, Any], *makers: Callable[..., Any]) -> None:
        known = (*FURTHER, *_HARMLESS, *_TEMPLATES)
        refuse_others(options, cls, *makers, KVCacheSynthesizer, known=known)


def _embedding(given: EmbedType | None) -> EmbedType:
    try:
        return given or Settings.embed_model
    except (ImportError, ValueError) as error:  # not installed, or without a key
        raise InvalidInputError(
            "LlamaIndex's own embedding is OpenAI's, which cannot be used here; say embed_model=, "
            "such as HashEmbedding() of llama_index.kvcache_rag or one of yours"
        ) from error


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Options without those of the stock engine that were left at None."""
    for name in _TEMPLATES:
        if options.pop(name, None) is not None:
            raise InvalidInputError(
                f"{name} has no use here: the engine's PromptTemplate says how prompts are written"
            )
    return options
