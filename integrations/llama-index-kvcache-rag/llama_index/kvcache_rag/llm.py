"""A drop-in for LlamaIndex's `HuggingFaceLLM` that also answers over cached chunks.

The async methods run UNDECORATED implementations in threads: LlamaIndex's own async defaults block
the event loop, and wrapping the decorated methods would fire every event twice.
"""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.base.llms.generic_utils import (
    astream_completion_response_to_chat_response,
    completion_response_to_chat_response,
    messages_to_prompt,
    stream_completion_response_to_chat_response,
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
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM

from kvcache_rag import InvalidInputError, cancellable
from kvcache_rag.integration import refuse_unknown
from llama_index.kvcache_rag.loading import load_engine, refuse_beside_engine
from llama_index.kvcache_rag.options import AdapterText, PathText, ending_with, plain, turn
from llama_index.kvcache_rag.responses import (
    Grounded,
    Prompt,
    answer,
    aresponses,
    open_stream,
    responses,
)
from llama_index.kvcache_rag.stopping import spanned, stoppable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from kvcache_rag import AnswerStream, Engine, PromptTemplate, ReusePolicy


class KVCacheLLM(CustomLLM):
    """A local transformers model whose retrieved chunks are prefilled once.

    The model is loaded when it is first needed.  Keywords of a call win over `generate_kwargs`;
    both are those of transformers' `generate()`.  A `temperature` above 0 samples.

    Attributes:
        model_name: Hub id, folder, GGUF file, "smollm2", or "tiny" for the small reader that comes
            with kvcache-rag.
        tokenizer_name: If it is not the model's own.
        device_map: "cpu", "cuda", "auto", or a transformers device map over one device.
        context_window: Lower it to keep prompts short; None for the model's own.
        max_new_tokens: Of an answer, if a call does not say.
        generate_kwargs: Further arguments of `generate()`.
        model_kwargs: Further arguments of the model's `from_pretrained`, such as `dtype`.
        tokenizer_kwargs: Further arguments of the tokenizer's `from_pretrained`.
        stopping_ids: Token ids that end an answer, besides the model's own.
        is_chat_model: Whether LlamaIndex sends messages; None: if the tokenizer has a chat
            template.
        kv_dir: Folder of the chunks' KV, None to keep it in memory only.
        kv_max_bytes: Limit of that folder; the least recently used chunks go first.
        gate: File that `kvcache-rag verify` wrote; for a `Gate` of your own give `engine=`.
        rotation: "copied" or "deferred"; None lets measured times decide (see `Engine`).
        adapter: PEFT adapter to put into the model, a folder or an installed name.
    """

    model_name: str = ""
    tokenizer_name: str | None = None
    device_map: str | dict[str, Any] | None = None
    context_window: int | None = Field(default=None, gt=0)
    max_new_tokens: int = Field(default=256, gt=0)
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    stopping_ids: list[int] = Field(default_factory=list)
    is_chat_model: bool | None = None
    kv_dir: PathText | None = None
    kv_max_bytes: int | None = Field(default=None, gt=0)
    gate: PathText | None = None
    rotation: Literal["auto", "copied", "deferred"] | None = None
    adapter: AdapterText | None = None

    _engine: Any = PrivateAttr(default=None)
    _given: Any = PrivateAttr(default=(None, None, None))
    _policy: Any = PrivateAttr(default=None)
    _loading: Any = PrivateAttr(default_factory=threading.Lock)

    def __init__(
        self,
        *,
        engine: Engine | None = None,
        model: Any = None,
        tokenizer: Any = None,
        template: PromptTemplate | None = None,
        policy: ReusePolicy | None = None,
        **fields: Any,
    ) -> None:
        """Take an engine, a loaded model, or the name of one.

        Args:
            engine: Answers; then nothing is loaded, and `kv_dir` and `system_prompt` are its own.
            model: A loaded transformers model, with `tokenizer`.
            tokenizer: Of `model`, or instead of the one of `model_name`.
            template: How prompts are written; None for the model's own or the default.
            policy: What is reused of cached chunks; None for the engine's policy.
            fields: The attributes of the class, and those of every LlamaIndex LLM.

        Raises:
            InvalidInputError: If an argument is unknown, or `engine` comes with what only a new
                engine could use.
        """
        fields.pop("tokenizer_outputs_to_remove", None)  # `HuggingFaceLLM`'s; ids alone count here
        own = ("engine", "model", "tokenizer", "template", "policy")
        refuse_unknown(
            fields, {*type(self).model_fields, *own}, f"argument of {type(self).__name__}"
        )
        # `HuggingFaceLLM` takes None for "nothing"; pydantic would refuse it.
        super().__init__(**{name: value for name, value in fields.items() if value is not None})
        if engine is not None:
            refuse_beside_engine(self, model=model, tokenizer=tokenizer, template=template)
        self._engine, self._policy = engine, policy
        self._given = (model, tokenizer, template)
        loaded = model if engine is None else engine.model
        if not self.model_name and loaded is not None:
            self.model_name = str(getattr(loaded, "name_or_path", "") or type(loaded).__name__)

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
                self._engine = load_engine(self, *self._given)
        engine: Engine = self._engine
        return engine

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks before it writes prompts; loads the model for what is not given."""
        is_chat = self.is_chat_model
        if is_chat is None:
            is_chat = bool(getattr(self.engine.tokenizer, "chat_template", None))
        return LLMMetadata(
            context_window=self.context_window or self.engine.context_window,
            num_output=self.max_new_tokens,
            is_chat_model=is_chat,
            model_name=self.model_name,
        )

    def keep_in(self, kv_dir: str | os.PathLike[str]) -> None:
        """Keep the chunks' KV in a folder.

        Raises:
            InvalidInputError: If the KV is kept elsewhere already.
        """
        if os.fspath(kv_dir) == self.kv_dir:
            return
        with self._loading:
            if self._engine is not None or self.kv_dir is not None:
                place = "elsewhere" if self.kv_dir is None else f"in {self.kv_dir}"
                raise InvalidInputError(
                    f"the LLM keeps its KV {place} already; give kv_dir= to the KVCacheLLM only"
                )
            self.kv_dir = os.fspath(kv_dir)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._answer(self._formatted(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete` that does not block the event loop."""
        return await cancellable(self._answer, self._formatted(prompt, formatted), kwargs)

    @stoppable(llm_completion_callback())
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """`complete`, as a generator; its last item carries usage and metrics."""
        return responses(self._open(self._formatted(prompt, formatted), kwargs))

    @stoppable(llm_completion_callback())
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` that does not block the event loop."""
        text = self._formatted(prompt, formatted)
        return aresponses(await asyncio.to_thread(self._open, text, kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages, written by the tokenizer's chat template or by `messages_to_prompt`."""
        return self._chat(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` that does not block the event loop."""
        return await cancellable(self._chat, messages, kwargs)

    @stoppable(llm_chat_callback())
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat`, as a generator; its last item carries usage and metrics."""
        return stream_completion_response_to_chat_response(
            responses(self._open(self.chat_prompt(messages), kwargs))
        )

    @stoppable(llm_chat_callback())
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` that does not block the event loop."""
        stream = await asyncio.to_thread(lambda: self._open(self.chat_prompt(messages), kwargs))
        return astream_completion_response_to_chat_response(aresponses(stream))

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> str:
        """Messages as one text, with the beginning of the answer."""
        own = self.messages_to_prompt
        if own is not None and own is not messages_to_prompt:
            return self.engine.compose(
                lambda cover: own([_covered(message, cover) for message in messages])
            )
        return self.engine.render_chat([turn(message) for message in messages])

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
        return responses(self._open(request, kwargs))

    @spanned(stoppable(llm_completion_callback()))
    async def astream_answer(
        self, prompt: str, request: Prompt, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_answer` that does not block the event loop."""
        return aresponses(await asyncio.to_thread(self._open, request, kwargs))

    def _answer(self, asked: Prompt, kwargs: Mapping[str, Any], **more: Any) -> CompletionResponse:
        return answer(self.engine, self._chosen(asked), {**self._options(kwargs), **more})

    def _open(self, request: Prompt, kwargs: Mapping[str, Any]) -> AnswerStream:
        return open_stream(self.engine, self._chosen(request), self._options(kwargs))

    def _chat(
        self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any], **more: Any
    ) -> ChatResponse:
        prompt = self.chat_prompt(messages)
        return completion_response_to_chat_response(self._answer(prompt, kwargs, **more))

    def _formatted(self, prompt: str, formatted: bool) -> str:
        if formatted or self.completion_to_prompt is None:
            return prompt
        form = self.completion_to_prompt
        return self.engine.compose(lambda cover: form(cover(prompt)))

    def _chosen(self, request: Prompt) -> Prompt:
        if isinstance(request, Grounded) and request.policy is None and self._policy is not None:
            return replace(request, policy=self._policy)
        return request

    def _options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = {"max_new_tokens": self.max_new_tokens, **self.generate_kwargs, **kwargs}
        if self.stopping_ids:
            given.setdefault("eos_token_id", ending_with(self.stopping_ids, self.engine.model))
        return given

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Settings of its own, the same engine: a model is not copied by accident."""
        return self.model_copy()

    def __getstate__(self) -> dict[str, Any]:
        """Settings only; the model is loaded again by its name where it is needed."""
        return {"fields": dict(self.__dict__), "policy": self._policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Without an engine; it is loaded with the first use."""
        KVCacheLLM.__init__(self, policy=state["policy"], **state["fields"])


def _covered(message: ChatMessage, cover: Callable[[str], str]) -> ChatMessage:
    """A message whose text is covered; without any it stays as it is."""
    text = message.content
    if not text or cover(text) == text:
        return message
    return ChatMessage(
        role=message.role, content=cover(text), additional_kwargs=message.additional_kwargs
    )
