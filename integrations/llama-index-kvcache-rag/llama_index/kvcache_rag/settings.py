"""The settings of `KVCacheLLM`, and the engine that they describe."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.bridge.pydantic import (
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_serializer,
)
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.llm import default_completion_to_prompt

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import expanded
from kvcache_rag.integration import (
    ConversationForms,
    EngineOptions,
    MetadataWatch,
    StoreOptions,
    check_spelling,
    first_problem,
    given_policy,
    is_remote,
    joined,
    open_engine,
    refuse_unknown,
    remote_engine,
    rendered,
)
from kvcache_rag.integration.engine import refuse_beside_engine, refuse_beside_server
from llama_index.kvcache_rag.options import plain, turn
from llama_index.kvcache_rag.watching import watch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from kvcache_rag import Engine
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
# Of a new engine, as `open_engine` takes them.
_SETTINGS: Final = (*StoreOptions.model_fields, *EngineOptions.model_fields, "device_map")

# Without effect beside `engine=`, and taken all the same, as `HuggingFaceLLM` takes them beside a
# loaded model; a `context_window` is what LlamaIndex is told.
_HARMLESS: Final = ("context_window", "device_map", "model_kwargs", "tokenizer_kwargs")

# Changes answers, and a server has its own.
_OF_THE_MODEL: Final = (
    *("adapter", "auxiliary", "backend", "gate", "none_below", "stopping_ids"),
    "tokenizer_name",
)


class LLMSettings(StoreOptions, EngineOptions, CustomLLM):
    """Settings of `KVCacheLLM`.

    `StoreOptions` and `EngineOptions` (`kvcache_rag.settings`) say where chunks are kept and how
    the model is loaded.  To use your own `Gate` pass `engine=`, for an `Auxiliary`
    `policy=CacheClip(auxiliary)`.

    Attributes:
        model_name: Hub id, folder, GGUF file, "smollm2", or "tiny" for the small reader that comes
            with kvcache-rag; with `base_url` the server's name for it.
        base_url: URL of a `kvcache-rag serve`, such as "http://rag.example.org:8000", that answers
            instead of a local model.  Then neither torch nor a tokenizer is loaded, vector stores
            prefill there, and `kv_dir` and `device_map` have no effect.
        api_key: Key for that server; never saved with the settings.
        tokenizer_name: Tokenizer, if not the model's own.
        device_map: "cpu", "cuda", "auto", or a transformers device map over one device.
        max_new_tokens: Most tokens of an answer, unless a call sets it.
        generate_kwargs: Further arguments of `generate()`.
        stopping_ids: Token ids that end an answer, besides the model's own.
        is_chat_model: Whether LlamaIndex sends messages; None for True with `base_url`, else
            whether the tokenizer has a chat template.
        match_chunks: Whether texts of retrieved nodes are found in prompts that LlamaIndex packed
            itself, and answered from their cached KV. LlamaIndex's evaluators and structured
            outputs are unaffected; for your own judge set it to False.
        chat_template_kwargs: Values of the chat template's variables, such as `{"enable_thinking":
            False}`; values that change the text before the chunks belong in
            `PromptTemplate(chat_template_kwargs=...)`.  A call may pass its own.
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
        """Take an engine, a loaded model, or a model's name.

        Args:
            engine: Answers; then nothing is loaded, and its own `kv_dir` and `system_prompt` apply.
            model: A loaded transformers model, with `tokenizer`.
            tokenizer: Tokenizer of `model`, or one to replace that of `model_name`.
            policy: A policy, or its name such as "cacheblend:0.2"; None for the engine's: what the
                model was trained for.
            fields: Attributes of this class, `StoreOptions`, `EngineOptions` and every LlamaIndex
                LLM.

        Raises:
            InvalidInputError: If an argument is unknown or cannot be used, no model is named, or
                `engine` comes with options for a new engine.
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
            names = [name for name in _SETTINGS if name not in _HARMLESS]
            settings = {name: getattr(self, name) for name in ("base_url", *names)}
            refuse_beside_engine({**settings, "model": model, "tokenizer": tokenizer})
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

    @field_serializer("model_kwargs", "tokenizer_kwargs", "generate_kwargs")
    def _serialise(self, value: dict[str, Any]) -> dict[str, Any]:
        return plain(value)

    @property
    def engine(self) -> Engine:
        """The engine, loaded on first use."""
        with self._loading:
            if self._engine is None:
                self._engine = load_engine(self, *self._given, policy=self._policy)
        engine: Engine = self._engine
        return engine

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks before it writes prompts; loads the model for values not given."""
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
        """Whether its settings suffice to load the same engine elsewhere."""
        return self._loads and self._given == (None, None) and self.template is None

    @property
    def chunks_of(self) -> tuple[Any, ...]:
        """What its chunks depend on besides its settings; loads the model if these do not say."""
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

    def chat_prompt(self, messages: Sequence[ChatMessage], **chat: Any) -> str:
        """Messages as one text that ends with the beginning of the answer.

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

    @property
    def has_own_form(self) -> bool:
        """Whether the user's own functions write prompts, which are then left as they are."""
        own = (self.messages_to_prompt, self.completion_to_prompt, self.query_wrapper_prompt)
        return any(
            form not in (None, default) for form, default in zip(own, _OF_LLAMA_INDEX, strict=True)
        )

    def warn_once(self, text: str) -> None:
        """Warn, unless this LLM did so before."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

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
        # A subclass may have an `__init__` that takes other arguments.
        LLMSettings.__init__(self, policy=state["policy"], **state["fields"])


def _check_generation(generate_kwargs: Mapping[str, Any]) -> None:
    from kvcache_rag.integration import checked_generation  # with torch

    options = {name: one for name, one in generate_kwargs.items() if name not in _OF_ENGINE}
    checked_generation(options, streaming=False)


def _covered(message: ChatMessage, cover: Callable[[str], str]) -> ChatMessage:
    """A message whose text is covered; without any it stays as it is."""
    text = message.content
    if not text or cover(text) == text:
        return message
    return ChatMessage(
        role=message.role, content=cover(text), additional_kwargs=message.additional_kwargs
    )


def load_engine(
    llm: LLMSettings,
    model: Any,
    tokenizer: Any,
    *,
    policy: ReusePolicy | None = None,
) -> Engine:
    """Load what `llm` describes.

    Args:
        llm: The settings.
        model: A loaded model, None to load `llm.model_name`.
        tokenizer: Its tokenizer; None for the model's own or `llm.tokenizer_name`.
        policy: What will be reused: if it brings a scorer, that is the engine's, so that ingestion
            prefills for it; and what it cuts chunks behind (`EngineSettings.open_engine`).

    Raises:
        InvalidInputError: If the model cannot be loaded; with a `base_url`, if something is said
            that a server is not told.
    """
    if llm.base_url is not None:
        return _remote(llm, model=model, tokenizer=tokenizer, template=llm.template)
    settings = {name: getattr(llm, name) for name in _SETTINGS}
    if policy is not None:
        settings["auxiliary"] = settings["auxiliary"] or policy.auxiliary
    return open_engine(
        llm.model_name if model is None else model,
        tokenizer or llm.tokenizer_name,
        policy=policy,
        **settings,
    )


def refuse_without_model(llm: LLMSettings, *, model: Any, tokenizer: Any) -> None:
    """Refuse settings of which no engine can be made.

    Raises:
        InvalidInputError: If it is not said what answers.
    """
    if llm.base_url is not None:
        return
    if model is None and not llm.model_name:
        raise InvalidInputError(
            'KVCacheLLM needs a model: give model_name= (such as "smollm2"), model= and '
            "tokenizer=, base_url= or engine="
        )
    if model is None:
        check_spelling(llm.model_name)
    if model is not None and tokenizer is None:
        raise InvalidInputError("KVCacheLLM with model= needs its tokenizer= too")


def _remote(llm: LLMSettings, **given: Any) -> Engine:
    """An engine of another machine; where one of this process would be, it is not asked."""
    if llm.has_own_form:
        given["messages_to_prompt or completion_to_prompt"] = True
    for name in _OF_THE_MODEL:
        given[name] = getattr(llm, name)
    refuse_beside_server(given, llm.weight_format)
    key = llm.api_key
    return remote_engine(
        str(llm.base_url),
        api_key=None if key is None else key.get_secret_value(),
        model=llm.model_name,
        system_prompt=llm.system_prompt,
        window=llm.context_window,
    )
