"""The settings of `ChatKVCache`, and the engine that they describe."""

from __future__ import annotations

import copy
import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from langchain_core.globals import get_llm_cache
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages.utils import count_tokens_approximately
from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, SecretStr, ValidationError

from kvcache_rag import InvalidInputError
from kvcache_rag.generation import in_thread
from kvcache_rag.integration import (
    DeviceOption,
    EngineOptions,
    StoreOptions,
    answer_state,
    check_spelling,
    first_problem,
    given_policy,
    open_engine,
    refuse_unknown,
    remote_engine,
    said_options,
    written,
)
from kvcache_rag.integration.engine import refuse_beside_engine, refuse_beside_server
from kvcache_rag.policies import ReusePolicy  # noqa: TC001  # pydantic reads it
from langchain_kvcache_rag.messages import documents_of
from langchain_kvcache_rag.retrieved import watch
from langchain_kvcache_rag.shared import Shared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import LLMResult
    from typing_extensions import Self

    from kvcache_rag import Engine
    from kvcache_rag.integration import References

PROVIDER: Final = "kvcache-rag"
"""Name of this integration in traces and in `response_metadata`."""
INTERNAL: Final = ("ls_structured_output_format", "stream", "structured_output_format")
"""Arguments of calls that LangChain uses internally."""
# Only a new engine could use them, so they are refused beside `engine=`.
_OF_THE_ENGINE: Final = (
    *("base_url", *DeviceOption.model_fields),
    *(*EngineOptions.model_fields, *StoreOptions.model_fields),
)
# Beside `base_url=`: changes answers, and a server has its own.
_OF_THE_SERVER: Final = ("adapter", "auxiliary", "backend", "gate", "none_below", "template")
# What of the settings changes no word of an answer, and why; whatever else there is does.
NO_ANSWER: Final = {
    "cache": "where answers are kept",
    "callbacks": "who is told of a call",
    "custom_get_token_ids": "counts tokens for others",
    "disable_streaming": "how an answer comes",
    "engine_source": "what is in it is asked itself",
    "kv_dir": "where chunks are kept",
    "kv_max_bytes": "how many are kept; what is missing is computed, and is the same",
    "kv_ttl": "how long they are kept; as above",
    "max_batch_size": "an answer of a batch is that of a single question",
    "max_retries": "how often a server is asked that did not answer",
    "metadata": "what traces say of a call",
    "name": "what traces call it",
    "profile": "what a model says of itself",
    "rate_limiter": "when a call is made",
    "signing_key": "whose chunks are taken; those of others are computed, and are the same",
    "streaming": "how an answer comes",
    "tags": "what traces say of a call",
    "verbose": "what is printed",
}
_SECRETS: Final = ("token", "use_auth_token")
# What of the settings changes an answer, and is plain.
_NAMED: Final = (
    "model",
    "base_url",
    "temperature",
    "max_tokens",
    "stop",
    "timeout",
    "top_p",
    "top_k",
    "overflow",
    "adapter",
    "device",
    "context_window",
    "system_prompt",
    "gate",
)
# Likewise, where it is not as ever.
_SAID: Final = ("backend", "weight_format", "auxiliary")

# How what other packages and parts of this one call so is said here.
_ELSEWHERE: Final = {
    "codec": "kv_codec=",
    "ttl": "kv_ttl=",
    "device_map": "device=",
    "max_new_tokens": "max_tokens=",
    "do_sample": "temperature=",
}


class ChatSettings(StoreOptions, EngineOptions, DeviceOption, BaseChatModel):
    """Settings of `ChatKVCache`.

    `StoreOptions`, `EngineOptions` and `DeviceOption` (`kvcache_rag.settings`) say where chunks are
    kept and how the model is loaded.  To use your own `Gate` pass `engine=`, for an `Auxiliary`
    `policy=CacheClip(auxiliary)`.

    Attributes:
        model: Hub id, folder, GGUF file, "smollm2", or "tiny" for the small reader that comes with
            kvcache-rag; also `model_name`.  With `engine=` it is only a label, with `base_url` the
            server's name for it.
        base_url: URL of a `kvcache-rag serve`, such as "http://rag.example.org:8000", that answers
            instead of a local model.  Then neither torch nor a tokenizer is loaded, vector stores
            prefill there, and `kv_dir` and `device` have no effect.
        temperature: Above 0, tokens are sampled; with 0 or None they are not.
        max_tokens: Most tokens of an answer.
        stop: Strings before which an answer ends.
        timeout: Seconds after which an answer is cut.
        top_p: Probability of the nucleus to sample from.
        top_k: How many tokens to sample from.
        generate_kwargs: Further arguments of `generate()`.
        chat_template_kwargs: Values of the chat template's variables, such as `{"enable_thinking":
            False}`; values that change the text before the documents belong in
            `PromptTemplate(chat_template_kwargs=...)`.
        overflow: What to do with documents that do not fit the context window: "refine" answers in
            several rounds, "drop_lowest" leaves out the worst, "error" raises.
        policy: A policy, or its name such as "cacheblend:0.2"; None for the engine's: what the
            model was trained for.
        max_batch_size: Most prompts in one padded `generate()` of `batch` and `abatch`.
        streaming: As in LangChain: True streams `invoke` too, False streams nothing.
        match_chunks: Whether texts from a retriever in this process that a tool's result contains
            whole are chunks.
        max_retries: How often to ask an unreachable or busy server again; a local model has nothing
            to retry.
        api_key: Key for that server; a local model needs none.
        engine_source: The loaded engine, passed on to copies; not for callers.
    """

    model: str = ""
    base_url: str | None = None
    temperature: float | None = Field(default=None, ge=0)
    max_tokens: int = Field(default=256, gt=0)
    stop: list[str] | None = None
    timeout: float | None = Field(default=None, gt=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, gt=0)
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    overflow: Literal["refine", "drop_lowest", "error"] = "refine"
    policy: Annotated[InstanceOf[ReusePolicy] | None, BeforeValidator(given_policy)] = Field(
        default=None, exclude=True
    )
    max_batch_size: int = Field(default=16, gt=0)
    streaming: bool | None = None
    match_chunks: bool = True
    max_retries: int | None = Field(default=None, exclude=True)
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    engine_source: Any = Field(default=None, exclude=True, repr=False)

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    def __init__(self, *, engine: Engine | None = None, **fields: Any) -> None:
        """Take an engine, or a model's name.

        Args:
            engine: Answers; then nothing is loaded, and its own store and template apply.
            fields: Attributes of this class and of every LangChain chat model (`cache`,
                `callbacks`, `tags`, `metadata`, `rate_limiter`, `disable_streaming`, ...).

        Raises:
            InvalidInputError: If an argument is unknown or cannot be used, no model is named, or
                `engine` comes with options for a new engine.
        """
        if "model_name" in fields:
            named = fields.pop("model_name")
            if fields.setdefault("model", named) != named:
                raise InvalidInputError("model and model_name differ; give one of them")
        known = {*type(self).model_fields, "engine"}
        refuse_unknown(fields, known, "argument of ChatKVCache", _ELSEWHERE)
        if engine is not None:
            refuse_beside_engine({name: fields.get(name) for name in _OF_THE_ENGINE})
        # Code for other models often hands on None for "nothing said".
        given = {name: one for name, one in fields.items() if one is not None}
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise first_problem(error.errors()) from error
        if self.engine_source is None:
            if engine is None and self.base_url is None:
                if not self.model:
                    raise _no_model()
                check_spelling(self.model)
            self.engine_source = Shared(engine)
        watch()
        if engine is not None and not self.model:
            loaded = engine.model
            self.model = str(getattr(loaded, "name_or_path", "") or type(loaded).__name__)

    @property
    def engine(self) -> Engine:
        """The engine, loaded on first use.

        Raises:
            InvalidInputError: If no model is named, it cannot be loaded, or a copy of a chat model
                with `engine=` was given options for a new engine.
        """
        shared = self._shared
        if shared.is_given:
            refuse_beside_engine({name: getattr(self, name) for name in _OF_THE_ENGINE})
        return shared.engine(self._open_engine)

    @property
    def model_name(self) -> str:
        """`model`, by the name that other chat models use."""
        return self.model

    @property
    def references(self) -> References:
        """References of texts that a vector store has prefilled, for looking up documents."""
        return self._shared.references

    @property
    def _shared(self) -> Shared:
        shared: Shared = self.engine_source
        names = ("model", *_OF_THE_ENGINE)
        key = "" if self.api_key is None else self.api_key.get_secret_value()
        # Not the key itself, and yet no copy with another one asks in its name.
        whose = hashlib.sha256(key.encode()).hexdigest() if key else ""
        return shared.for_settings(repr([*(getattr(self, name) for name in names), whose]))

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        # For traces, so without a key for the hub.
        kwargs = {name: str(one) for name, one in self.model_kwargs.items() if name not in _SECRETS}
        named = {name: getattr(self, name) for name in _NAMED}
        policy, template, values = self.policy, self.template, self.chat_template_kwargs
        if self._shared.is_given:
            engine = self.engine
            policy, template = policy or engine.policy, engine.template
            named["context_window"] = engine.context_window
        return {
            **named,
            "model_name": self.model,
            **({"chat_template_kwargs": repr(values)} if values else {}),
            **said_options({name: getattr(self, name) for name in _SAID}),
            "generate_kwargs": {name: str(one) for name, one in self.generate_kwargs.items()},
            "model_kwargs": kwargs,
            "policy": repr(policy),
            "template": repr(template),
        }

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """What LangChain's caches of answers tell models and calls apart by, beside the messages.

        Loads the model, as the weights, the tokenizer and what comes with the model are part of it.
        """
        settings = {
            name: getattr(self, name) for name in type(self).model_fields if name not in NO_ANSWER
        }
        settings["model_kwargs"] = {
            name: one for name, one in self.model_kwargs.items() if name not in _SECRETS
        }
        call = {name: one for name, one in kwargs.items() if name not in INTERNAL}
        state = written([answer_state(self.engine), settings, stop, call])
        digest = hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{PROVIDER} {self.model} {digest}"

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Like LangChain's, but loads the model outside the event loop."""
        if self.cache is not False and (self.cache or get_llm_cache() is not None):
            with suppress(Exception):  # which is told where the model is asked
                await in_thread(self._get_llm_string)
        return await super().agenerate(*args, **kwargs)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text from the model's tokenizer, for everything that counts tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        if self.base_url is not None:
            raise InvalidInputError(
                f"the server at {self.base_url} has the tokenizer; count by custom_get_token_ids= "
                'or token_counter="approximate"'
            )
        return list(self.engine.brought_ids(text))

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of messages, including their documents, which LangChain leaves out.

        With `base_url` they are estimated, unless `custom_get_token_ids` counts them.
        """
        if self.base_url is not None and self.custom_get_token_ids is None:
            return count_tokens_approximately(messages, tools=list(tools or ()) or None)
        texts = [text for message in messages for text in documents_of(message)]
        spoken = super().get_num_tokens_from_messages(messages, tools)
        if self.custom_get_token_ids is not None:
            return spoken + sum(map(self.get_num_tokens, texts))
        return spoken + sum(map(len, self.engine.tokenize("?", texts).chunks))

    def _open_engine(self) -> Engine:
        if self.base_url is not None:
            return self._ask_server(self.base_url)
        if not self.model:
            raise _no_model()
        names = _OF_THE_ENGINE
        named = {name: getattr(self, name) for name in names if name != "base_url"}
        if self.policy is not None:  # so that ingestion prefills for its scorer
            named["auxiliary"] = self.auxiliary or self.policy.auxiliary
        device = named.pop("device")
        return open_engine(self.model, device_map=device, policy=self.policy, **named)

    def _ask_server(self, base_url: str) -> Engine:
        own = {name: getattr(self, name) for name in _OF_THE_SERVER}
        refuse_beside_server(own, self.weight_format)
        key, retries = self.api_key, self.max_retries
        return remote_engine(
            base_url,
            api_key=None if key is None else key.get_secret_value(),
            model=self.model,
            system_prompt=self.system_prompt,
            window=self.context_window,
            **({} if retries is None else {"retries": retries}),
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Settings of its own, the same engine: a model is not copied by accident."""
        held = {k: copy.copy(one) for k, one in vars(self).items() if isinstance(one, (dict, list))}
        return self.model_copy(update=held)

    def __getstate__(self) -> dict[Any, Any]:
        """Settings only; the model is loaded again by its name where it is needed."""
        if self._shared.is_given:
            raise InvalidInputError(
                "a ChatKVCache with engine= cannot be pickled; give it model= and the settings"
            )
        given = self.model_fields_set - {"engine_source"}
        return {name: one for name, one in self.__dict__.items() if name in given}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Without an engine; it is loaded with the first use."""
        type(self).__init__(self, **state)


def _no_model() -> InvalidInputError:
    return InvalidInputError(
        'ChatKVCache needs a model: give model= (such as "smollm2"), base_url= or engine='
    )
