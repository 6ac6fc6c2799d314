"""A LangChain chat model over local transformers models that answers from cached chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from kvcache_rag import cancellable, in_thread
from langchain_kvcache_rag import batching, structured
from langchain_kvcache_rag.calls import Call, call_options, for_asked
from langchain_kvcache_rag.messages import PASTED_CHARACTERS, Conversation, read_messages
from langchain_kvcache_rag.responses import AsyncChunks, chunks, result
from langchain_kvcache_rag.settings import ChatSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableConfig


class ChatKVCache(ChatSettings):
    """A local transformers chat model whose documents are prefilled once.

        llm = ChatKVCache(model="Qwen/Qwen2.5-0.5B-Instruct", temperature=0, kv_dir="./kv")
        llm.invoke([HumanMessage([document_block(document), "What does it say?"])])

    Documents reach it as text-plain content blocks (`document_block`), in any message; `KVCacheRAG`
    writes them.  They stand before the conversation, each as a chunk of its own, and what is cached
    of them is not computed again: `usage_metadata["input_token_details"]["cache_read"]` counts it,
    `response_metadata["kv_cache"]` says what it cost.  Without documents it is an ordinary chat
    model.  Keywords of a call or of `bind` win over the settings: those that concern an answer,
    `json_schema`, and every argument of transformers' `generate()`.

    Tools are not supported, so `bind_tools` raises: model families write tool calls differently,
    and nothing in a checkpoint says how to read them.  Structured output works with every model,
    because decoding is held to the schema (`with_structured_output`).

    The constructor takes `engine=`, or `model=`, with the settings of `ChatSettings`.  The model is
    loaded when it is first needed; copies share it, and what a copy with another model or template
    loads is kept for the next such copy (a config's `configurable` makes one for each call).
    """

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, kwargs)
        answer = batching.answered_together(call)
        return result(call.run() if answer is None else answer, self.model)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await in_thread(self._call, messages, stop, kwargs)
        answer = await batching.aanswered_together(call)
        if answer is None:
            answer = await cancellable(call.run)
        return result(answer, self.model)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # The base class reports each chunk's text to callbacks.
        return chunks(self._call(messages, stop, kwargs).open(), self.model)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        return AsyncChunks(lambda: self._call(messages, stop, kwargs).open(), self.model)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer several prompts; those with documents in padded `generate()`s, not one by one.

        At most `max_batch_size`, and the config's `max_concurrency`, stand in one.  An answer
        equals that of `invoke`; what cannot be answered together is answered one by one.
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

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NoReturn:
        """Not supported.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "ChatKVCache does not support tools, because a checkpoint does not say how its tool "
            "calls are read; retrieve in a step of the chain or graph and pass the documents, or "
            "use with_structured_output"
        )

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """A chain that answers with an object of a schema, which decoding is held to.

        Args:
            schema: A pydantic class, a TypedDict, or a JSON schema.
            include_raw: Whether to give `{"raw", "parsed", "parsing_error"}`.
            kwargs: `method` and `strict`, as for other models; they change nothing here, because
                every token is held to the schema.  Others go to each call, such as `max_tokens`.

        Raises:
            MissingExtraError: If llguidance is not installed.
            InvalidInputError: If the schema cannot be used.
        """
        return structured.structured_output(self, schema, include_raw, kwargs)

    def _call(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> Call:
        """Read messages and settings for the engine, loading it if need be."""
        options = call_options(self, stop, kwargs)
        engine, shared = self.engine, self._shared
        schema = options.pop("json_schema", None)
        suffix = "" if schema is None else structured.instruction(schema)
        asked = read_messages(messages, engine.template.system, suffix)
        if schema is not None:
            options = structured.constrained(options, schema, engine, shared)
        if isinstance(asked, Conversation):
            asked = asked.opened(self.system_prompt)
            if asked.is_pasted:
                shared.warn_once(
                    "pasted",
                    f"a message of more than {PASTED_CHARACTERS} characters came without document "
                    "blocks, so nothing of it can be reused; hand documents over with KVCacheRAG, "
                    "or as document_block(document) in a message's content",
                )
        elif asked.prefix_mismatch:
            shared.warn_once(
                "system",
                "the system message is not the instruction that the chunks were prefilled behind, "
                "so it stands behind them, before the question; give it as "
                "ChatKVCache(system_prompt=...) to have it first",
            )
        return Call(engine, shared.references, asked, for_asked(asked, options))
