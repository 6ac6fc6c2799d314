"""LlamaIndex's condense-plus-context chat with the history after the chunks.

The stock engine packs the retrieved text into a system message before the history.  Here the chunks
come first, so that their caches serve every turn, however long the conversation is.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import trace_method
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse
from llama_index.core.settings import Settings

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import NamedArguments
from llama_index.kvcache_rag.chat_memory import new_memory
from llama_index.kvcache_rag.chat_response import KVCacheChatResponse, aspeak, speak
from llama_index.kvcache_rag.defaults import kv_llm
from llama_index.kvcache_rag.options import of_retriever, refuse_others
from llama_index.kvcache_rag.synthesizer import FURTHER, KVCacheSynthesizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.llms.llm import LLM
    from llama_index.core.memory import BaseMemory
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.schema import NodeWithScore
    from llama_index.core.tools.types import ToolOutput
    from typing_extensions import Self

    from llama_index.kvcache_rag.llm import KVCacheLLM


class KVCacheChatEngine(NamedArguments, CondensePlusContextChatEngine):
    """Condenses the question, retrieves, and answers from the stored KV of the chunks.

    Every prompt has the engine's instruction, the chunks, the history and the question, in this
    order.  `response.metadata["kv_cache"]` has the metrics of an answer, for a stream once it has
    ended.  Memory takes whole turns only: a question whose answer failed is not in it.

    One engine is one conversation.  Make another engine over the same LLM and index for every other
    one: even if each call passes `chat_history`, simultaneous calls mix theirs up.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        synthesizer: KVCacheSynthesizer,
        memory: BaseMemory,
        *,
        llm: KVCacheLLM,
        system_prompt: str | None = None,
        condense_prompt: str | PromptTemplate | None = None,
        skip_condense: bool = False,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
    ) -> None:
        """Put the parts together; `from_defaults` makes missing ones.

        Args:
            retriever: Finds the nodes.
            synthesizer: Answers from them.
            memory: Keeps the conversation.
            llm: Condenses questions.
            system_prompt: See `from_defaults`.
            condense_prompt: See `from_defaults`.
            skip_condense: See `from_defaults`.
            node_postprocessors: See `from_defaults`.
            callback_manager: Traces the calls.
            verbose: See `from_defaults`.
        """
        super().__init__(
            retriever=retriever,
            llm=llm,
            memory=memory,
            system_prompt=system_prompt,
            condense_prompt=condense_prompt,
            skip_condense=skip_condense,
            node_postprocessors=node_postprocessors,
            callback_manager=callback_manager,
            verbose=verbose,
        )
        self._synthesizer = synthesizer

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        llm: LLM | None = None,
        chat_history: list[ChatMessage] | None = None,
        memory: BaseMemory | None = None,
        system_prompt: str | None = None,
        context_prompt: str | PromptTemplate | None = None,
        context_refine_prompt: str | PromptTemplate | None = None,
        condense_prompt: str | PromptTemplate | None = None,
        skip_condense: bool = False,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        verbose: bool = False,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> Self:
        """Make an engine for a retriever.

        Args:
            retriever: Finds the nodes.
            llm: A `KVCacheLLM`; None for `Settings.llm`.
            chat_history: Earlier messages, for a new memory.
            memory: Keeps the conversation; None for a buffer that forgets the oldest messages to
                leave half the context window for the chunks (this loads the model).
            system_prompt: An instruction.  Chunks are computed after that of
                `KVCacheLLM(system_prompt=...)`; another one is put at the beginning of each
                question.
            context_prompt: Not supported; see `text_qa_template` of `KVCacheSynthesizer`.
            context_refine_prompt: Not supported.
            condense_prompt: Template with `chat_history` and `question` for a standalone question.
            skip_condense: Whether to retrieve by the question as asked.
            node_postprocessors: Run between retrieval and answer; chunks whose text they change are
                computed again.
            verbose: Whether to print the condensed question.
            callback_manager: None for `Settings.callback_manager`.
            options: Arguments of `KVCacheSynthesizer` (`policy`, `overflow`, `generate_kwargs`,
                `text_qa_template`, ...).

        Raises:
            InvalidInputError: If the LLM is not a `KVCacheLLM`, or caches cannot serve an option of
                the stock engine.
        """
        makers = (cls.from_defaults, KVCacheSynthesizer)
        refuse_others(options, cls, *makers, known=FURTHER)
        if options.get("output_cls") is not None:
            raise InvalidInputError(
                "a chat answers in text; leave output_cls out, or give it to a KVCacheQueryEngine"
            )
        if context_prompt is not None or context_refine_prompt is not None:
            raise InvalidInputError(
                "context_prompt and context_refine_prompt have no use here: say what stands before "
                "the chunks in KVCacheLLM(system_prompt=...), and what behind them in "
                "text_qa_template="
            )
        found = kv_llm(llm)
        given: dict[str, Any] = (
            {} if callback_manager is None else {"callback_manager": callback_manager}
        )
        synthesizer = KVCacheSynthesizer(found, **given, **options)
        if memory is None:
            memory = new_memory(found, chat_history, options.get("generate_kwargs") or {})
        elif chat_history:
            raise InvalidInputError("give chat_history= or memory=, not both")
        return cls(
            retriever,
            synthesizer,
            memory,
            llm=found,
            system_prompt=system_prompt,
            condense_prompt=condense_prompt,
            skip_condense=skip_condense,
            node_postprocessors=node_postprocessors,
            callback_manager=callback_manager or Settings.callback_manager,
            verbose=verbose,
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
            options: See `from_defaults`.
        """
        makers = (cls.from_index, cls.from_defaults, KVCacheSynthesizer)
        refuse_others(options, cls, *makers, known=FURTHER)
        found = {**(retriever_kwargs or {}), **of_retriever(options)}
        retriever = index.as_retriever(similarity_top_k=similarity_top_k, **found)
        return cls.from_defaults(retriever, llm, **options)

    # ------------------------------------------------------------------ the four ways to ask
    @trace_method("chat")
    def chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Answer a message; `chat_history` replaces the memory's content."""
        synthesizer, source, nodes = self._run_c3(message, _own(chat_history))
        response: Any = synthesizer.synthesize(message, nodes)
        text = response.response or ""
        self._remember(message, text)
        return AgentChatResponse(text, [source], nodes, metadata=response.metadata or {})

    @trace_method("chat")
    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """`chat` that does not block the event loop; cancelling it stops generation."""
        synthesizer, source, nodes = await self._arun_c3(message, _own(chat_history))
        response: Any = await synthesizer.asynthesize(message, nodes)
        text = response.response or ""
        await self._aremember(message, text)
        return AgentChatResponse(text, [source], nodes, metadata=response.metadata or {})

    @trace_method("chat")
    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> KVCacheChatResponse:
        """`chat`, answered piece by piece."""
        synthesizer, source, nodes = self._run_c3(message, _own(chat_history), streaming=True)
        response: Any = synthesizer.synthesize(message, nodes)
        return KVCacheChatResponse(
            chat_stream=speak(response.response_gen, partial(self._remember, message)),
            sources=[source],
            source_nodes=nodes,
            metadata=response.metadata or {},
        )

    @trace_method("chat")
    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> KVCacheChatResponse:
        """`stream_chat` that does not block the event loop; cancelling it stops generation."""
        synthesizer, source, nodes = await self._arun_c3(
            message, _own(chat_history), streaming=True
        )
        response: Any = await synthesizer.asynthesize(message, nodes)
        return KVCacheChatResponse(
            achat_stream=await aspeak(response.response_gen, partial(self._aremember, message)),
            sources=[source],
            source_nodes=nodes,
            metadata=response.metadata or {},
        )

    # ------------------------------------------------------------------ parts of a turn
    def _run_c3(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        streaming: bool = False,
    ) -> tuple[Any, ToolOutput, list[NodeWithScore]]:
        return super()._run_c3(_asked(message), chat_history, streaming)

    async def _arun_c3(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        streaming: bool = False,
    ) -> tuple[Any, ToolOutput, list[NodeWithScore]]:
        return await super()._arun_c3(_asked(message), chat_history, streaming)

    def _get_response_synthesizer(  # type: ignore[override]  # packs nothing, so it is no CompactAndRefine
        self, chat_history: Sequence[ChatMessage], streaming: bool = False
    ) -> KVCacheSynthesizer:
        said = list(chat_history)
        if self._system_prompt:
            said.insert(0, ChatMessage(role=MessageRole.SYSTEM, content=self._system_prompt))
        return self._synthesizer.with_history(said, streaming=streaming)

    def _condense_question(self, chat_history: list[ChatMessage], latest_message: str) -> str:
        # Some models answer nothing at all, and nothing cannot be searched for.
        condensed = super()._condense_question(chat_history, latest_message)
        return condensed if condensed.strip() else latest_message

    async def _acondense_question(
        self, chat_history: list[ChatMessage], latest_message: str
    ) -> str:
        condensed = await super()._acondense_question(chat_history, latest_message)
        return condensed if condensed.strip() else latest_message

    def _remember(self, message: str, answer: str) -> None:
        self._memory.put_messages(_turn(message, answer))

    async def _aremember(self, message: str, answer: str) -> None:
        # Whoever waits may be cancelled, by some frameworks at every await; half a turn would be
        # worse than one that nobody waited for.
        turn = self._memory.aput_messages(_turn(message, answer))
        await asyncio.shield(asyncio.ensure_future(turn))


def _asked(message: str) -> str:
    """A message that can be searched for."""
    if not isinstance(message, str) or not message.strip():
        raise InvalidInputError("the question is empty; ask something")
    return message


def _own(chat_history: list[ChatMessage] | None) -> list[ChatMessage] | None:
    """A copy: some memories keep the very list that they are given, and append to it."""
    return None if chat_history is None else list(chat_history)


def _turn(message: str, answer: str) -> list[ChatMessage]:
    return [
        ChatMessage(role=MessageRole.USER, content=message),
        ChatMessage(role=MessageRole.ASSISTANT, content=answer),
    ]
