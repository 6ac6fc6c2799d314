"""A LangChain chat model over local transformers models that answers from cached chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from kvcache_rag import InvalidInputError
from kvcache_rag.generation import cancellable, in_thread
from kvcache_rag.integration import Reference, ToolChoice, prefill_texts
from langchain_kvcache_rag import batching, structured
from langchain_kvcache_rag.blocks import checked_document, document_text
from langchain_kvcache_rag.calls import described_tools, read_call, with_policy
from langchain_kvcache_rag.responses import AsyncChunks, chunks, result
from langchain_kvcache_rag.settings import ChatSettings

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.prompts import StringPromptTemplate
    from langchain_core.runnables import Runnable, RunnableConfig
    from langchain_core.tools import BaseTool

    from kvcache_rag import Engine
    from kvcache_rag.kv import ChunkKey


class ChatKVCache(ChatSettings):
    """A local transformers chat model whose documents are prefilled once.

        llm = ChatKVCache(model="Qwen/Qwen2.5-0.5B-Instruct", temperature=0, kv_dir="./kv")
        llm.invoke([HumanMessage([document_block(document), "What does it say?"])])

    Documents reach it as text-plain content blocks (`document_block`), in any message; `KVCacheRAG`
    writes them.  They are placed before the conversation, each as a chunk, and cached ones are not
    computed again.  `usage_metadata["input_token_details"]["cache_read"]` counts their tokens,
    `response_metadata["kv_cache"]` has the cost, and its `answered_from` and `answered_from_ids`
    the documents used.  Without documents it is an ordinary chat model.  Keywords of a call or
    `bind` override the settings: those about an answer, `json_schema`, and every argument of
    transformers' `generate()`.  Keywords of a chain's call only reach its first step;
    `config={"configurable": {"policy": ...}}` reaches every step.

    Tools are called in the model's own form if its chat and response templates define one, else in
    JSON held by a grammar (`response_metadata["tool_form"]`).  Documents in a tool's result are
    chunks too: blocks in its message, its `artifact`, or retrieved texts that it contains whole.  A
    model's reasoning is in `additional_kwargs["reasoning_content"]`.  Structured output works with
    every model, because decoding is held to the schema (`with_structured_output`).

    The constructor takes `engine=` or `model=`, with the settings of `ChatSettings`.  The model is
    loaded on first use and shared by copies.  What a copy with another model or template loads is
    kept for the next such copy (a config's `configurable` makes one for each call).
    """

    if TYPE_CHECKING:
        # Else type checkers make one of the fields alone, as of a dataclass.
        def __init__(self, *, engine: Engine | None = None, **fields: Any) -> None: ...

    def prefill(
        self,
        documents: Iterable[Document | str],
        *,
        document_prompt: StringPromptTemplate | None = None,
        show_progress: bool = False,
    ) -> list[ChunkKey | None]:
        """Compute and store the KV of documents, for any vector store.

        Questions find it by the documents' text, so their rows need no reference.

        Args:
            documents: Documents as added to the store, or texts as written in prompts.
            document_prompt: See `KVCacheRAG`.
            show_progress: Whether to show a bar.

        Returns:
            The key of each document's chunk; None for one without text, or one that does not fit
            the model's context window, which a warning names.

        Raises:
            InvalidInputError: If something is not a document, or lacks metadata that
                `document_prompt` names.
        """
        return self._prefill(documents, document_prompt, show_progress)

    async def aprefill(
        self,
        documents: Iterable[Document | str],
        *,
        document_prompt: StringPromptTemplate | None = None,
        show_progress: bool = False,
    ) -> list[ChunkKey | None]:
        """`prefill` that does not block the event loop; cancelling it stops the model."""
        return await cancellable(self._prefill, documents, document_prompt, show_progress)

    def _prefill(
        self,
        documents: Iterable[Document | str],
        document_prompt: StringPromptTemplate | None,
        show_progress: bool,
        cancelled: threading.Event | None = None,
    ) -> list[ChunkKey | None]:
        if isinstance(documents, (str, Document)):
            raise InvalidInputError("prefill() takes a list of documents; put the one into a list")
        given = [Document(one) if isinstance(one, str) else one for one in documents]
        texts = [document_text(checked_document(one), document_prompt) for one in given]
        ids = [one.id or str(at) for at, one in enumerate(given)]
        engine = self.engine
        keys = prefill_texts(engine, ids, texts, show_progress=show_progress, cancelled=cancelled)
        for text, key in zip(texts, keys, strict=True):
            if key is not None:
                self.references.note(Reference.of(key, text, engine))
        return keys

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return super().invoke(input, config, stop=stop, **with_policy(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return await super().ainvoke(input, config, stop=stop, **with_policy(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, config, stop=stop, **with_policy(config, kwargs))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, config, stop=stop, **with_policy(config, kwargs))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = read_call(self, messages, stop, kwargs)
        answer = batching.ready_answer(call)
        return result(call.run() if answer is None else answer, call)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await in_thread(read_call, self, messages, stop, kwargs)
        answer = batching.ready_answer(call)
        if answer is None:
            answer = await cancellable(call.run)
        return result(answer, call)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # The base class reports each chunk's text to callbacks.
        call = read_call(self, messages, stop, kwargs)
        return chunks(call.open(), call)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        return AsyncChunks(lambda: read_call(self, messages, stop, kwargs))

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer several prompts, those with documents together in padded `generate()` calls.

        Each call has at most `max_batch_size` prompts, or the config's lower `max_concurrency`.  An
        answer equals that of `invoke`; prompts that cannot be answered together are answered one by
        one.  Callbacks are called when the answer is ready, so a trace does not show how long it
        took.
        """
        return batching.batch(self, inputs, config, return_exceptions, kwargs)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """`batch` that does not block the event loop; cancelling it stops generation."""
        return await batching.abatch(self, inputs, config, return_exceptions, kwargs)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that its answers may call.

        Args:
            tools: Tools, functions, pydantic classes, TypedDicts or descriptions of functions.
            tool_choice: "auto" or None leaves it to the model; "any", "required" or True demands a
                call, "none" or False forbids it; the name of a tool demands that one.  Demanded
                calls are JSON held by a grammar, whatever the model's own form.
            parallel_tool_calls: Whether one answer may have several calls; False limits answers in
                JSON to one, and has no effect if a model calls in its own form.
            strict: Accepted as by other models; has no effect.
            kwargs: Passed to each call, such as `max_tokens`.

        Raises:
            InvalidInputError: If a tool cannot be described, or `tool_choice` is none of these.
        """
        described = described_tools(tools)
        ToolChoice.of(described, tool_choice, parallel_tool_calls)
        return self.bind(
            tools=described,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            **kwargs,
        )

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """A chain whose answers are objects of a schema, to which decoding is held.

        Args:
            schema: A pydantic class, a TypedDict, or a JSON schema.
            include_raw: Whether to return `{"raw", "parsed", "parsing_error"}`.
            kwargs: `method` and `strict`, as for other models, have no effect, because every token
                is held to the schema.  Others are passed to each call, such as `max_tokens`.

        Raises:
            MissingExtraError: If llguidance is not installed.
            InvalidInputError: If the schema cannot be used.
        """
        return structured.structured_output(self, schema, include_raw, kwargs)
