"""A drop-in for LlamaIndex's `HuggingFaceLLM` that also answers over cached chunks.

The async methods run UNDECORATED implementations in threads: LlamaIndex's own async defaults block
the event loop, and wrapping the decorated methods would fire every event twice.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import (
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_serializer,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import default_completion_to_prompt

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import expanded
from kvcache_rag.generation import cancellable
from kvcache_rag.integration import (
    ConversationForms,
    EngineOptions,
    JsonGrammars,
    MetadataWatch,
    StoreOptions,
    first_problem,
    given_policy,
    is_remote,
    joined,
    refuse_unknown,
    rendered,
)
from llama_index.kvcache_rag.loading import load_engine, refuse_beside_engine, refuse_without_model
from llama_index.kvcache_rag.matching import Ask, watch, writing
from llama_index.kvcache_rag.options import ending_with, plain, turn
from llama_index.kvcache_rag.prefilling import prefill_nodes
from llama_index.kvcache_rag.responses import (
    Grounded,
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
    import os
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


# What an LLM of LlamaIndex has where its user wrote no form of his own.
_OF_LLAMA_INDEX: Final = (messages_to_prompt, default_completion_to_prompt, None)
# Of `generate_kwargs`, what is no argument of transformers' `generate()`.
_OF_ENGINE: Final = (
    *("max_new_tokens", "stop", "skip_special_tokens", "json_schema"),
    *("chat_template_kwargs", "emit", "cancelled"),
)
# How what other packages and parts of this one call so is said here.
_ELSEWHERE: Final = {
    "temperature": 'generate_kwargs={"temperature": ...}',
    "top_p": 'generate_kwargs={"temperature": ..., "top_p": ...}',
    "top_k": 'generate_kwargs={"temperature": ..., "top_k": ...}',
    "do_sample": 'generate_kwargs={"temperature": ...}',
    "max_tokens": "max_new_tokens=",
    "device": "device_map=",
    "codec": "kv_codec=",
    "ttl": "kv_ttl=",
    "overflow": "KVCacheSynthesizer(overflow=...) or KVCacheQueryEngine.from_index(overflow=...)",
}


class KVCacheLLM(StoreOptions, EngineOptions, StructuredOutput, FunctionCallingLLM):
    """A local transformers model whose retrieved chunks are prefilled once.

    The model is loaded when it is first needed.  Keywords of a call win over `generate_kwargs`;
    both are those of transformers' `generate()`, and `json_schema`, which holds decoding to a JSON
    schema.  A `temperature` above 0 samples.

    Where chunks are kept and how the model is loaded is said as `StoreOptions` and `EngineOptions`
    have it (`kvcache_rag.settings`); for a `Gate` of your own give `engine=`, for an `Auxiliary`
    `policy=CacheClip(auxiliary)`.

    Attributes:
        model_name: Hub id, folder, GGUF file, "smollm2", or "tiny" for the small reader that comes
            with kvcache-rag; beside `base_url` the name under which the server has it.
        base_url: Of a `kvcache-rag serve`, such as "http://rag.example.org:8000", that answers
            instead of a model of this process; then neither torch nor a tokenizer is loaded, vector
            stores prefill there, and `kv_dir` and `device_map` mean nothing.
        api_key: For that server; never written down with the settings.
        tokenizer_name: If it is not the model's own.
        device_map: "cpu", "cuda", "auto", or a transformers device map over one device.
        max_new_tokens: Of an answer, if a call does not say.
        generate_kwargs: Further arguments of `generate()`.
        stopping_ids: Token ids that end an answer, besides the model's own.
        is_chat_model: Whether LlamaIndex sends messages; None: if the tokenizer has a chat
            template.
        match_chunks: Whether texts of retrieved nodes are found again in prompts that LlamaIndex
            packed by itself, and answered from their cached KV.  LlamaIndex's evaluators and
            structured outputs are asked as they are; for a judge of your own set it off.
        chat_template_kwargs: Values of the chat template's variables, such as `{"enable_thinking":
            False}`; what changes the text before the chunks belongs into
            `PromptTemplate(chat_template_kwargs=...)`.  A call may bring its own.
    """

    model_name: str = ""
    base_url: str | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    tokenizer_name: str | None = None
    device_map: str | dict[str, Any] | None = None
    max_new_tokens: int = Field(default=256, gt=0)
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    stopping_ids: list[int] = Field(default_factory=list)
    is_chat_model: bool | None = None
    match_chunks: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    _engine: Any = PrivateAttr(default=None)
    _given: Any = PrivateAttr(default=(None, None))
    _policy: Any = PrivateAttr(default=None)
    _loads: bool = PrivateAttr(default=True)
    _loading: Any = PrivateAttr(default_factory=threading.Lock)
    _warned: set[str] = PrivateAttr(default_factory=set)
    _grammars: JsonGrammars | None = PrivateAttr(default=None)
    _watch: Any = PrivateAttr(default_factory=MetadataWatch)

    def __init__(
        self,
        *,
        engine: Engine | None = None,
        model: Any = None,
        tokenizer: Any = None,
        policy: ReusePolicy | str | None = None,
        **fields: Any,
    ) -> None:
        """Take an engine, a loaded model, or the name of one.

        Args:
            engine: Answers; then nothing is loaded, and `kv_dir` and `system_prompt` are its own.
            model: A loaded transformers model, with `tokenizer`.
            tokenizer: Of `model`, or instead of the one of `model_name`.
            policy: What is reused of cached chunks, or the name of that, such as
                "cacheblend:0.2"; None for the engine's: what the model was trained for.
            fields: The attributes of the class, those of `StoreOptions` and `EngineOptions`, and
                those of every LlamaIndex LLM.

        Raises:
            InvalidInputError: If an argument is unknown or cannot be used, nothing says which model
                answers, or `engine` comes with what only a new engine could use.
        """
        fields.pop("tokenizer_outputs_to_remove", None)  # `HuggingFaceLLM`'s; ids alone count here
        own = ("engine", "model", "tokenizer", "policy")
        name = type(self).__name__
        known = {*type(self).model_fields, *own}
        refuse_unknown(fields, known, f"argument of {name}", _ELSEWHERE)
        if isinstance(model, str):
            raise InvalidInputError(
                f"model= takes a loaded model; name one by KVCacheLLM(model_name={model!r})"
            )
        # `HuggingFaceLLM` takes None for "nothing"; pydantic would refuse it.
        given = {field: value for field, value in fields.items() if value is not None}
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise first_problem(error.errors()) from error
        if engine is not None:
            refuse_beside_engine(self, model=model, tokenizer=tokenizer, base_url=self.base_url)
        else:
            refuse_without_model(self, model=model, tokenizer=tokenizer)
        self._engine, self._policy, self._loads = engine, given_policy(policy), engine is None
        self._given = (model, tokenizer)
        if self.generate_kwargs and self.base_url is None:  # a server checks what it is told
            _check_generation(self.generate_kwargs)
        loaded = model if engine is None else engine.model
        if not self.model_name and loaded is not None:
            self.model_name = str(getattr(loaded, "name_or_path", "") or type(loaded).__name__)
        watch()

    @classmethod
    def class_name(cls) -> str:
        """Name in serialised settings."""
        return "KVCacheLLM"

    @field_serializer("model_kwargs", "tokenizer_kwargs", "generate_kwargs")
    def _serialise(self, value: dict[str, Any]) -> dict[str, Any]:
        return plain(value)

    @property
    def engine(self) -> Engine:
        """The engine, loaded with the first use."""
        with self._loading:
            if self._engine is None:
                self._engine = load_engine(self, *self._given, policy=self._policy)
        engine: Engine = self._engine
        return engine

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks before it writes prompts; loads the model for what is not given."""
        is_chat = self.is_chat_model
        if is_chat is None and self.base_url is not None:
            is_chat = True  # the server writes prompts of messages
        if is_chat is None:
            is_chat = ConversationForms.of(self.engine).has_chat_template
        return LLMMetadata(
            context_window=self.context_window or self.engine.context_window,
            num_output=self.max_new_tokens,
            is_chat_model=is_chat,
            is_function_calling_model=self.base_url is None,
            model_name=self.model_name or str(getattr(self.engine, "name", "")),
        )

    @property
    def is_settings(self) -> bool:
        """Whether its settings are enough to load the same engine again, elsewhere."""
        return self._loads and self._given == (None, None) and self.template is None

    @property
    def chunks_of(self) -> tuple[Any, ...]:
        """Whose chunks it computes, beside its settings; loads the model where these do not say."""
        scorer = None if self._policy is None else self._policy.auxiliary
        if self.is_settings:
            return (scorer,)
        engine = self.engine
        is_known = not (is_remote(engine) or engine.why_useless)
        return (scorer, engine.spec if is_known else None, engine.namespace)

    @property
    def watch(self) -> MetadataWatch:
        """Notices metadata that changes in what the model reads."""
        watch: MetadataWatch = self._watch
        return watch

    def keep_in(self, kv_dir: str | os.PathLike[str]) -> None:
        """Keep the chunks' KV in a folder.

        Raises:
            InvalidInputError: If the KV is kept elsewhere already.
        """
        kv_dir = expanded(kv_dir)
        if kv_dir == self.kv_dir or self.base_url is not None:
            return
        with self._loading:
            if self._engine is not None or self.kv_dir is not None:
                place = "elsewhere" if self.kv_dir is None else f"in {self.kv_dir}"
                raise InvalidInputError(
                    f"the LLM keeps its KV {place} already; give kv_dir= to the KVCacheLLM only"
                )
            self.kv_dir = kv_dir

    def prefill(
        self, nodes: Sequence[BaseNode], *, show_progress: bool = False
    ) -> list[ChunkKey | None]:
        """Compute and store the KV of nodes, for a vector store of any kind.

        Questions find it by the nodes' text, so nothing has to stand in their rows.

        Args:
            nodes: As they are added to the store; what counts is their LLM text.
            show_progress: Whether to show a bar.

        Returns:
            The key of each node's chunk; None for a node without text, and for one that does not
            fit the model's context window, which a warning names.
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
        """Answer a template; what of its context was retrieved is answered from cached chunks."""
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
        ask, given = Ask.now(), dict(kwargs)
        asked = self._spoken(ask, messages, given)
        stream = self._open(asked.prompt, _both(given, asked.options))
        return chat_responses(responses(stream, self._last(given, ask.note)), asked)

    @stoppable(llm_chat_callback())
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` that does not block the event loop."""
        ask, given = Ask.now(), dict(kwargs)

        def start() -> tuple[Spoken, Stream]:
            asked = self._spoken(ask, messages, given)
            return asked, self._open(asked.prompt, _both(given, asked.options))

        asked, stream = await asyncio.to_thread(start)
        completions = aresponses(stream, self._last(given, ask.note))
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
        """The calls in a response.

        Raises:
            InvalidInputError: If there is none, unless `error_on_no_tool_call` is off.
        """
        return selections(response, error_on_no_tool_call)

    def chat_prompt(self, messages: Sequence[ChatMessage], **chat: Any) -> str:
        """Messages as one text, with the beginning of the answer.

        Args:
            messages: Oldest first.
            chat: Arguments of `Engine.render_chat`.
        """
        own = self.messages_to_prompt
        if own is not None and own is not messages_to_prompt:
            return self.engine.compose(
                lambda cover: own([_covered(message, cover) for message in messages])
            )
        return rendered(self.engine.render_chat, joined(map(turn, messages)), **chat)

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
        given = dict(kwargs)
        asked = self._spoken(ask, messages, given)
        response = ask.note(self._answer(asked.prompt, _both(given, asked.options), **more))
        return Speaking(asked).whole(response)

    def _completion(self, ask: Ask, prompt: str, formatted: bool) -> Prompt:
        said = () if formatted else (ChatMessage(role=MessageRole.USER, content=prompt),)
        return ask.prompt(self, said, lambda: self._formatted(prompt, formatted))

    def _spoken(self, ask: Ask, messages: Sequence[ChatMessage], given: dict[str, Any]) -> Spoken:
        def plain(chat: Mapping[str, Any]) -> Prompt:
            return ask.prompt(self, messages, lambda: self.chat_prompt(messages, **chat))

        return spoken(self, messages, given, plain, ask.nodes)

    @property
    def has_own_form(self) -> bool:
        """Whether the user writes prompts in a form of his own, in which they then stay."""
        own = (self.messages_to_prompt, self.completion_to_prompt, self.query_wrapper_prompt)
        return any(
            form not in (None, default) for form, default in zip(own, _OF_LLAMA_INDEX, strict=True)
        )

    def warn_once(self, text: str) -> None:
        """Warn, unless this LLM did so before."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    def _formatted(self, prompt: str, formatted: bool) -> str:
        if formatted or self.completion_to_prompt is None:
            return prompt
        form = self.completion_to_prompt
        return self.engine.compose(lambda cover: form(cover(prompt)))

    def _chosen(self, request: Prompt) -> Prompt:
        if isinstance(request, Grounded) and request.policy is None and self._policy is not None:
            return replace(request, policy=self._policy)
        return request

    def with_schema(self, schema: dict[str, Any]) -> Self:
        """The same LLM, whose every answer fits a JSON schema.

        Raises:
            MissingExtraError: If llguidance is not installed.
            InvalidInputError: If decoding cannot be held to the schema.
        """
        self._json_grammars.processor(schema)
        options = {**self.generate_kwargs, "json_schema": schema}
        # A prompt that asks for objects stays as it is.
        return self.model_copy(update={"generate_kwargs": options, "match_chunks": False})

    @property
    def _json_grammars(self) -> JsonGrammars:
        engine = self.engine
        with self._loading:
            if self._grammars is None:
                self._grammars = JsonGrammars(engine.model, engine.tokenizer)
            return self._grammars

    def _options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = {"max_new_tokens": self.max_new_tokens, **self.generate_kwargs, **kwargs}
        if self.stopping_ids:
            given.setdefault("eos_token_id", ending_with(self.stopping_ids, self.engine.model))
        schema = given.pop("json_schema", None)
        return given if schema is None else self._json_grammars.held(schema, given)

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

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Settings of its own, the same engine: a model is not copied by accident."""
        held = {k: copy.copy(one) for k, one in vars(self).items() if isinstance(one, (dict, list))}
        return self.model_copy(update=held)

    def __getstate__(self) -> dict[str, Any]:
        """Settings only; the model is loaded again by its name where it is needed.

        Raises:
            InvalidInputError: If the engine or the model was handed in.
        """
        if not self._loads or self._given != (None, None):
            raise InvalidInputError(
                "a KVCacheLLM with engine=, model= or tokenizer= cannot be pickled; give it "
                "model_name= and the settings"
            )
        return {"fields": dict(self.__dict__), "policy": self._policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Without an engine; it is loaded with the first use."""
        KVCacheLLM.__init__(self, policy=state["policy"], **state["fields"])


def _check_generation(generate_kwargs: Mapping[str, Any]) -> None:
    from kvcache_rag.integration import checked_generation  # with torch

    options = {name: one for name, one in generate_kwargs.items() if name not in _OF_ENGINE}
    checked_generation(options, streaming=False)


def _both(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call and what its messages add to them."""
    processors = [one for part in (given, options) for one in part.get("logits_processor") or ()]
    return {**given, **options, **({"logits_processor": processors} if processors else {})}


def _covered(message: ChatMessage, cover: Callable[[str], str]) -> ChatMessage:
    """A message whose text is covered; without any it stays as it is."""
    text = message.content
    if not text or cover(text) == text:
        return message
    return ChatMessage(
        role=message.role, content=cover(text), additional_kwargs=message.additional_kwargs
    )
