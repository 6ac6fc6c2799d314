"""Rank nodes by how likely the question is after each, read alone from its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle  # pydantic reads it

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import NamedArguments
from kvcache_rag.generation import cancellable
from kvcache_rag.integration.ranking import check_most, ranked
from llama_index.kvcache_rag.defaults import kv_llm
from llama_index.kvcache_rag.llm import KVCacheLLM  # noqa: TC001  # pydantic reads it
from llama_index.kvcache_rag.references import llm_text, source_of

if TYPE_CHECKING:
    import threading

_DISPATCHER = get_dispatcher(__name__)


class KVCacheRerank(NamedArguments, BaseNodePostprocessor):
    """Puts the nodes first that make the question likeliest, for any LLM to answer from.

        rerank = KVCacheRerank(llm=KVCacheLLM(model_name="smollm2"), top_n=3)
        index.as_query_engine(similarity_top_k=20, node_postprocessors=[rerank])

    No reranking model is needed: the language model itself reads the question after each node
    (`Engine.read`).  A prefilled node costs the question's tokens.  A node's score is how much
    likelier it makes the question than no node, in nats: above 0 it is about the question.  Nodes
    without text keep their scores and come last.

    Attributes:
        llm: The `KVCacheLLM` that reads; None for `Settings.llm`.
        top_n: How many nodes to keep; None for all.
    """

    llm: KVCacheLLM | None = None
    top_n: int | None = None

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "KVCacheRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return self._ranked(nodes, query_bundle)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return await cancellable(self._ranked, nodes, query_bundle)

    def _ranked(
        self,
        nodes: list[NodeWithScore],
        query: QueryBundle | None,
        cancelled: threading.Event | None = None,
    ) -> list[NodeWithScore]:
        if query is None:
            raise InvalidInputError(
                "KVCacheRerank reads a question behind nodes; give query_bundle= or query_str="
            )
        check_most(self.top_n)
        llm, question = kv_llm(self.llm), query.query_str
        _DISPATCHER.event(
            ReRankStartEvent(
                query=query,
                nodes=nodes,
                top_n=self.top_n or len(nodes),
                model_name=str(llm.model_name or ""),
            )
        )
        texts = [llm_text(one.node) for one in nodes]
        engine = llm.engine
        numbers = ranked(
            engine,
            question,
            texts,
            lambda number: source_of(nodes[number].node, texts[number]).chunk(engine),
            most=self.top_n,
            cancelled=cancelled,
        )
        found = [
            nodes[number] if score is None else NodeWithScore(node=nodes[number].node, score=score)
            for number, score in numbers
        ]
        _DISPATCHER.event(ReRankEndEvent(nodes=found))
        return found
