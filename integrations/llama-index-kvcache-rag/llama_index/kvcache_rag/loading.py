"""Make an engine from the arguments of LlamaIndex's `HuggingFaceLLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvcache_rag import InvalidInputError
from kvcache_rag.integration import (
    EngineOptions,
    StoreOptions,
    check_spelling,
    open_engine,
    remote_engine,
    said_options,
)

if TYPE_CHECKING:
    from kvcache_rag import Engine
    from kvcache_rag.policies import ReusePolicy
    from llama_index.kvcache_rag.llm import KVCacheLLM

# Of a new engine, as `open_engine` takes them.
_SETTINGS: Final = (*StoreOptions.model_fields, *EngineOptions.model_fields, "device_map")

# Without effect beside `engine=`, and taken all the same, as `HuggingFaceLLM` takes them beside a
# loaded model; a `context_window` is what LlamaIndex is told.
_HARMLESS: Final = ("context_window", "device_map", "model_kwargs", "tokenizer_kwargs")

# Changes answers, and a server has its own.  Where keys and values lie, and on which device they
# are computed, is taken beside `base_url=` and means nothing, so that an app can move by it alone.
_OF_THE_MODEL: Final = (
    *("adapter", "auxiliary", "backend", "gate", "none_below", "stopping_ids"),
    "tokenizer_name",
)


def load_engine(
    llm: KVCacheLLM,
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


def refuse_without_model(llm: KVCacheLLM, *, model: Any, tokenizer: Any) -> None:
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


def refuse_beside_engine(llm: KVCacheLLM, **given: Any) -> None:
    """Refuse what only a new engine could use, of settings and of `given`.

    Raises:
        InvalidInputError: Naming it.
    """
    settings = {name: getattr(llm, name) for name in _SETTINGS if name not in _HARMLESS}
    clash = [*said_options({**settings, **given})]
    if clash:
        raise InvalidInputError(
            f"with engine=, {' and '.join(clash)} belong to the engine; leave them out"
        )


def _remote(llm: KVCacheLLM, **given: Any) -> Engine:
    """An engine of another machine; where one of this process would be, it is not asked."""
    if llm.has_own_form:
        given["messages_to_prompt or completion_to_prompt"] = True
    for name in _OF_THE_MODEL:
        given[name] = getattr(llm, name)
    if llm.weight_format in ("int8", "int4"):
        given["weight_format"] = llm.weight_format
    clash = [*said_options(given)]
    if clash:
        raise InvalidInputError(
            f"with base_url=, {' and '.join(clash)} {'are' if len(clash) > 1 else 'is'} the "
            "server's to say; leave it out"
        )
    key = llm.api_key
    return remote_engine(
        str(llm.base_url),
        api_key=None if key is None else key.get_secret_value(),
        model=llm.model_name,
        system_prompt=llm.system_prompt,
        window=llm.context_window,
    )
