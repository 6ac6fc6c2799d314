"""A drop-in for LlamaIndex's `HuggingFaceLLM` that also answers over cached chunks.

The async methods run UNDECORATED implementations in threads: LlamaIndex's own async defaults block
the event loop, and wrapping the decorated methods would fire every event twice.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM

from kvcache_rag.generation import cancellable
from kvcache_rag.integration import ConversationForms
from llama_index.kvcache_rag.matching import Ask, writing
from llama_index.kvcache_rag.options import ending_with
from llama_index.kvcache_rag.prefilling import prefill_nodes
from llama_index.kvcache_rag.responses import (
    Prompt,
    Stream,
    aresponses,
    open_stream,
    respond,
    responses,
)
from llama_index.kvcache_rag.stopping import spanned, stoppable
from llama_index.kvcache_rag.structured import StructuredOutput, choosing, refuse_cut
from llama_index.kvcache_rag.tools import (
    Speaking,
    Spoken,
    achat_responses,
    chat_responses,
    selections,
    spoken,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.schema import BaseNode
    from llama_index.core.tools.types import BaseTool
    from llama_index.core.types import TokenAsyncGen, TokenGen
    from typing_extensions import Self

    from kvcache_rag import Engine
    from kvcache_rag.kv import ChunkKey
    from kvcache_rag.policies import ReusePolicy


class KVCacheLLM(StructuredOutput, FunctionCallingLLM):
    """A local transformers model whose retrieved chunks are prefilled once.

    The model is loaded on first use.  Keywords of a call override `generate_kwargs`.  Both take
    arguments of transformers' `generate()`, and `json_schema`, which holds decoding to a JSON
    schema.  A `temperature` above 0 samples.

    `StoreOptions` and `EngineOptions` (`kvcache_rag.settings`) say where chunks are kept and how
    the model is loaded.  To use your own `Gate` pass `engine=`, for an `Auxiliary`
    `policy=CacheClip(auxiliary)`.

    `LLMSettings` lists all settings.
    """

    if TYPE_CHECKING:
        # Else type checkers make one of the fields alone, as of a dataclass.
        def __init__(
            self,
            *,
            engine: Engine | None = None,
            model: Any = None,
            tokenizer: Any = None,
            policy: ReusePolicy | str | None = None,
            **fields: Any,
        ) -> None: ...

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "KVCacheLLM"

    def prefill(
        self, nodes: Sequence[BaseNode], *, show_progress: bool = False
    ) -> list[ChunkKey | None]:
        """Compute and store the KV of nodes, for any vector store.

        Questions find it by the nodes' text, so their rows need no reference.

        Args:
            nodes: Nodes as added to the store; their LLM text counts.
            show_progress: Whether to show a bar.

        Returns:
            The key of each node's chunk; None for a node without text, or one that does not fit the
            model's context window, which a warning names.
        """
        return self._prefill(nodes, show_progress)

    async def aprefill(
        self, nodes: Sequence[BaseNode], *, show_progress: bool = False
    ) -> list[ChunkKey | None]:
        """`prefill` that does not block the event loop; cancelling it stops the model."""
        return await cancellable(self._prefill, nodes, show_progress)

    def _prefill(
        self,
        nodes: Sequence[BaseNode],
        show_progress: bool,
        cancelled: threading.Event | None = None,
    ) -> list[ChunkKey | None]:
        return prefill_nodes(self.engine, nodes, show_progress=show_progress, cancelled=cancelled)

    # ------------------------------------------------------------------ templates
    def predict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """Answer a template; retrieved parts of its context are answered from cached chunks."""
        with writing(self, prompt, prompt_args):
            return super().predict(prompt, **prompt_args)

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """`predict` that does not block the event loop."""
        with writing(self, prompt, prompt_args):
            return await super().apredict(prompt, **prompt_args)

    def stream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenGen:
        """`predict`, piece by piece."""
        with writing(self, prompt, prompt_args):
            return super().stream(prompt, **prompt_args)

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        """`stream` that does not block the event loop."""
        with writing(self, prompt, prompt_args):
            return await super().astream(prompt, **prompt_args)

    # ------------------------------------------------------------------ texts and messages
    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._complete(Ask.now(), prompt, formatted, kwargs)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete` that does not block the event loop."""
        return await cancellable(self._complete, Ask.now(), prompt, formatted, kwargs)

    @stoppable(llm_completion_callback())
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """`complete`, as a generator; its last item carries usage and metrics."""
        ask = Ask.now()
        return responses(
            self._open(self._completion(ask, prompt, formatted), kwargs),
            self._last(kwargs, ask.note),
        )

    @stoppable(llm_completion_callback())
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` that does not block the event loop."""
        ask = Ask.now()
        stream = await asyncio.to_thread(
            lambda: self._open(self._completion(ask, prompt, formatted), kwargs)
        )
        return aresponses(stream, self._last(kwargs, ask.note))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, written by the tokenizer's chat template or by `messages_to_prompt`."""
        return self._chat(Ask.now(), messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` that does not block the event loop."""
        return await cancellable(self._chat, Ask.now(), messages, kwargs)

    @stoppable(llm_chat_callback())
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat`, as a generator; its last item carries usage and metrics."""
        ask = Ask.now()
        asked = self._spoken(ask, messages, kwargs)
        stream = self._open(asked.prompt, asked.options)
        return chat_responses(responses(stream, self._last(asked.options, ask.note)), asked)

    @stoppable(llm_chat_callback())
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` that does not block the event loop."""
        ask = Ask.now()

        def start() -> tuple[Spoken, Stream]:
            asked = self._spoken(ask, messages, kwargs)
            return asked, self._open(asked.prompt, asked.options)

        asked, stream = await asyncio.to_thread(start)
        completions = aresponses(stream, self._last(asked.options, ask.note))
        del stream  # whoever drops the responses drops it
        return achat_responses(completions, asked)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        messages = [*(chat_history or ()), *([user_msg] if user_msg else ())]
        described = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        for tool, one in zip(tools, described, strict=True):
            choices = choosing(tool.metadata.fn_schema, messages)
            one["function"]["parameters"] = choices or one["function"]["parameters"]
        return {
            "messages": messages,
            "tools": described,
            "tool_choice": tool_choice or ("required" if tool_required and described else None),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tool calls in a response.

        Raises:
            InvalidInputError: If there are none, unless `error_on_no_tool_call` is False.
        """
        return selections(response, error_on_no_tool_call)

    # `prompt` is for callbacks; `request` comes by position because keywords end up in events.
    @spanned(llm_completion_callback())
    def answer(self, prompt: str, request: Prompt, **kwargs: Any) -> CompletionResponse:
        """Answer a question over chunks; LlamaIndex sees a completion of `prompt`."""
        return self._answer(request, kwargs)

    @spanned(llm_completion_callback())
    async def aanswer(self, prompt: str, request: Prompt, **kwargs: Any) -> CompletionResponse:
        """`answer` that does not block the event loop."""
        return await cancellable(self._answer, request, kwargs)

    @spanned(stoppable(llm_completion_callback()))
    def stream_answer(self, prompt: str, request: Prompt, **kwargs: Any) -> CompletionResponseGen:
        """`answer`, as a generator; its last item carries usage and metrics."""
        return responses(self._open(request, kwargs), self._last(kwargs))

    @spanned(stoppable(llm_completion_callback()))
    async def astream_answer(
        self, prompt: str, request: Prompt, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_answer` that does not block the event loop."""
        return aresponses(await asyncio.to_thread(self._open, request, kwargs), self._last(kwargs))

    def _answer(self, asked: Prompt, kwargs: Mapping[str, Any], **more: Any) -> CompletionResponse:
        response = respond(self.engine, self._chosen(asked), {**self._options(kwargs), **more})
        self._last(kwargs)(response)
        return response

    def _open(self, request: Prompt, kwargs: Mapping[str, Any]) -> Stream:
        return open_stream(self.engine, self._chosen(request), self._options(kwargs))

    def _complete(
        self,
        ask: Ask,
        prompt: str,
        formatted: bool,
        kwargs: Mapping[str, Any],
        **more: Any,
    ) -> CompletionResponse:
        return ask.note(self._answer(self._completion(ask, prompt, formatted), kwargs, **more))

    def _chat(
        self,
        ask: Ask,
        messages: Sequence[ChatMessage],
        kwargs: Mapping[str, Any],
        **more: Any,
    ) -> ChatResponse:
        asked = self._spoken(ask, messages, kwargs)
        response = ask.note(self._answer(asked.prompt, asked.options, **more))
        return Speaking(asked).whole(response)

    def _completion(self, ask: Ask, prompt: str, formatted: bool) -> Prompt:
        said = () if formatted else (ChatMessage(role=MessageRole.USER, content=prompt),)
        return ask.prompt(self, said, lambda: self._formatted(prompt, formatted))

    def _spoken(
        self, ask: Ask, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]
    ) -> Spoken:
        def plain(chat: Mapping[str, Any]) -> Prompt:
            return ask.prompt(self, messages, lambda: self.chat_prompt(messages, **chat))

        return spoken(self, messages, kwargs, plain, ask.nodes)

    def _formatted(self, prompt: str, formatted: bool) -> str:
        if formatted or self.completion_to_prompt is None:
            return prompt
        form = self.completion_to_prompt
        return self.engine.compose(lambda cover: form(cover(prompt)))

    def with_schema(self, schema: dict[str, Any]) -> Self:
        """A copy of the LLM whose every answer fits a JSON schema.

        Raises:
            MissingExtraError: If llguidance is not installed.
            InvalidInputError: If decoding cannot be held to the schema.
        """
        ConversationForms.of(self.engine).grammars.processor(schema)
        options = {**self.generate_kwargs, "json_schema": schema}
        # A prompt that asks for objects stays as it is.
        return self.model_copy(update={"generate_kwargs": options, "match_chunks": False})

    def _chosen(self, asked: Prompt) -> Prompt:
        """What is asked, under the policy of the LLM where it has none."""
        question = asked.question
        if question.is_completion or question.options.get("policy") is not None:
            return asked
        options = {**question.options, "policy": self._policy}
        return replace(asked, question=replace(question, options=options))

    def _options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = {"max_new_tokens": self.max_new_tokens, **self.generate_kwargs, **kwargs}
        if self.stopping_ids:
            given.setdefault("eos_token_id", ending_with(self.stopping_ids, self.engine.model))
        schema = given.pop("json_schema", None)
        return (
            given
            if schema is None
            else ConversationForms.of(self.engine).grammars.held(schema, given)
        )

    def _last(
        self, kwargs: Mapping[str, Any], note: Callable[[CompletionResponse], object] | None = None
    ) -> Callable[[CompletionResponse], None]:
        """What the last response of a call goes through: `note`, and whether its JSON is whole."""
        given = {"max_new_tokens": self.max_new_tokens, **self.generate_kwargs, **kwargs}

        def check(response: CompletionResponse) -> None:
            if note is not None:
                note(response)
            if given.get("json_schema") is not None:
                refuse_cut(response, given["max_new_tokens"])

        return check
