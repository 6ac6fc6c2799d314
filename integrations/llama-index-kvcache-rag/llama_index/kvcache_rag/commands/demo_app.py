"""The RAG app that `kvcache-rag demo` is: Chroma, a retriever, and two query engines.

One answers by full prefill, the other from cached chunks; both see the same nodes and the same
model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_index.core.postprocessor.types import BaseNodePostprocessor

from kvcache_rag.integration import parameter_count
from llama_index.kvcache_rag.commands.corpus import embedding, open_store
from llama_index.kvcache_rag.commands.report import chunk_files, stored_chunks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llama_index.core.schema import NodeWithScore, QueryBundle

    from kvcache_rag.policies import ReusePolicy
    from llama_index.kvcache_rag.commands.settings import Settings


@dataclass(frozen=True)
class Reply:
    """One answer to one question.

    Attributes:
        text: What the model said.
        metrics: What it cost (`kvcache_rag.Metrics`).
    """

    text: str
    metrics: Mapping[str, Any]

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return float(self.metrics["ttft"])


@dataclass(frozen=True)
class Exchange:
    """One question, answered both ways over the same nodes.

    Attributes:
        question: As it was asked.
        nodes: Ids of the retrieved nodes, as they stand in the prompt: the best one last.
        full: By full prefill.
        cached: From cached chunks.
    """

    question: str
    nodes: tuple[str, ...]
    full: Reply
    cached: Reply

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came from cached chunks."""
        return self.full.ttft / self.cached.ttft

    @property
    def context_tokens(self) -> int:
        """Tokens before the question."""
        metrics = self.full.metrics
        return int(metrics["prompt_tokens"] - metrics["query_tokens"])


@dataclass(frozen=True)
class Filling:
    """What is stored, and what of it this run computed.

    Attributes:
        chunks: How many there are.
        prefilled: How many of them had no cache before.
        seconds: It took to bring collection and caches up to date.
        nbytes: Of the chunks' KV.
    """

    chunks: int
    prefilled: int
    seconds: float
    nbytes: int


class _WorstFirst(BaseNodePostprocessor):
    """Turns the order round, so that the best node stands beside the question.

    Cached chunks are cached wherever they stand, so another order costs nothing.
    """

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return nodes[::-1]


class DemoApp:
    """Texts in Chroma, their KV beside them, and both query engines over them."""

    def __init__(
        self,
        settings: Settings,
        *,
        top_k: int,
        max_new_tokens: int,
        policy: ReusePolicy | None = None,
    ) -> None:
        """Load the models and open what an earlier run left.

        Args:
            settings: Who is asked, and where everything is kept.
            top_k: Nodes per question.
            max_new_tokens: Longest answer.
            policy: What is reused of cached chunks; None for the LLM's default.

        Raises:
            KVCacheRagError: If a model cannot be loaded.
        """
        from llama_index.core import VectorStoreIndex

        from kvcache_rag import FullRecompute
        from llama_index.kvcache_rag import KVCacheLLM, KVCacheQueryEngine

        self.settings, self.top_k = settings, top_k
        # Without a memory of prompts: each question is timed as if it were the first.
        self.llm = KVCacheLLM(
            **self.settings.of_llm, max_new_tokens=max_new_tokens, prompt_memory=0
        )
        self.parameters = parameter_count(self.llm.engine.model)
        self._embed_model = embedding(settings.embed)
        self._store = open_store(self.settings, self.llm)
        index = VectorStoreIndex.from_vector_store(self._store, embed_model=self._embed_model)
        common: dict[str, Any] = {
            "similarity_top_k": top_k,
            "streaming": True,
            "node_postprocessors": [_WorstFirst()],
        }
        self._cached = KVCacheQueryEngine.from_index(index, self.llm, policy=policy, **common)
        self._full = KVCacheQueryEngine.from_index(
            index, self.llm, policy=FullRecompute(), **common
        )

    @property
    def model(self) -> str:
        """The model for people."""
        return f"{self.llm.model_name} ({self.parameters / 1e6:.2f} M parameters)"

    def fill(self, texts: Mapping[str, str], *, show_progress: bool) -> Filling:
        """Embed, store and prefill what is not there yet.

        Args:
            texts: By the ids of their nodes.
            show_progress: Whether to show bars.
        """
        from llama_index.core.schema import TextNode

        before = chunk_files(self.settings.kv_dir)
        there = {node.node_id: node.get_content() for node in self._store.get_nodes()}
        if gone := [name for name in there if name not in texts]:  # an earlier version's
            self._store.delete_nodes(gone)
        missing = [
            TextNode(id_=name, text=text) for name, text in texts.items() if there.get(name) != text
        ]
        vectors = self._embed_model.get_text_embedding_batch([node.text for node in missing])
        for node, vector in zip(missing, vectors, strict=True):
            node.embedding = vector
        started = time.perf_counter()
        if missing:
            self._store.add(missing, show_progress=show_progress)
        # Also what another model of the same name, or an eviction, left without a cache.
        self._store.prefill_missing(show_progress=show_progress)
        seconds = time.perf_counter() - started
        chunks, after = stored_chunks(self._store), chunk_files(self.settings.kv_dir)
        return Filling(
            chunks=len(chunks),
            prefilled=len(chunks - before.keys()),
            seconds=seconds,
            nbytes=sum(after.get(digest, 0) for digest in chunks),
        )

    def ask(self, question: str, *, cached_first: bool = False) -> Exchange:
        """Retrieve once, answer twice.

        Args:
            question: What to ask.
            cached_first: Which side goes first: they take turns, so that neither always finds warm
                processor caches.
        """
        from llama_index.core.schema import QueryBundle

        bundle = QueryBundle(question)
        nodes = self._cached.retrieve(bundle)

        def reply(engine: Any) -> Reply:
            response: Any = engine.synthesize(bundle, nodes)
            text = "".join(response.response_gen)
            return Reply(text, response.metadata["kv_cache"])

        early = reply(self._cached) if cached_first else None
        full = reply(self._full)
        ids = tuple(node.node.node_id for node in nodes)
        return Exchange(question, ids, full, early or reply(self._cached))
