"""Answer the prompts of `batch` and `abatch` together, in padded `generate()` calls.

The prompts over documents are answered first.  Then each runs through LangChain's own `invoke`, so
callbacks, tags, metadata and run ids are what they are for a single call; where a single call would
generate, its answer lies ready.  What has none is answered one by one.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from langchain_core.caches import BaseCache
from langchain_core.globals import get_llm_cache
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables.config import get_config_list

from kvcache_rag import KVCacheRagError
from kvcache_rag.forks import new_lock
from kvcache_rag.generation import cancellable
from langchain_kvcache_rag.calls import read_call, with_policy

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage
    from langchain_core.runnables import RunnableConfig

    from kvcache_rag import Answer
    from langchain_kvcache_rag.calls import EngineCall
    from langchain_kvcache_rag.settings import ChatSettings

# They belong to one prompt, or watch one.
_SINGLE: Final = frozenset(
    (
        "generation_config",
        "json_schema",
        "logits_processor",
        "num_beams",
        "prefix_allowed_tokens_fn",
        "response_format",
        "scores",
        "stopping_criteria",
        "stream",
        "streamer",
        "tools",
    )
)
_OF_A_ROW: Final = ("history", "scores", "asked")


@dataclass(frozen=True)
class _Ready:
    """What was answered ahead of a call; an error if generation broke."""

    call: EngineCall
    answer: Answer | BaseException

    def is_of(self, call: EngineCall) -> bool:
        return self.call.asked == call.asked and self.call.options == call.options


_READY: ContextVar[list[_Ready]] = ContextVar("kvcache_rag_ready")
_TAKING: Final = new_lock()  # the calls of one `batch` run in threads


def ready_answer(call: EngineCall) -> Answer | None:
    """Take the answer to a call of a batch; None if it has to be answered alone.

    Each is given once: equal prompts of a batch get a sample each.
    """
    left = _READY.get([])
    with _TAKING:
        at = next((at for at, ready in enumerate(left) if ready.is_of(call)), None)
        if at is None:
            return None
        answer = left.pop(at).answer
    if isinstance(answer, BaseException):
        raise answer
    return answer


def batch(
    llm: ChatSettings,
    inputs: Sequence[LanguageModelInput],
    config: RunnableConfig | list[RunnableConfig] | None,
    return_exceptions: bool,
    kwargs: Mapping[str, Any],
) -> list[AIMessage]:
    """`Runnable.batch` of a chat model, with prompts over documents answered together."""
    token = _READY.set(_answers(llm, inputs, config, kwargs))
    try:
        return BaseChatModel.batch(
            llm, [*inputs], config, return_exceptions=return_exceptions, **kwargs
        )
    finally:
        _READY.reset(token)


async def abatch(
    llm: ChatSettings,
    inputs: Sequence[LanguageModelInput],
    config: RunnableConfig | list[RunnableConfig] | None,
    return_exceptions: bool,
    kwargs: Mapping[str, Any],
) -> list[AIMessage]:
    """`batch` that does not block the event loop."""
    token = _READY.set(await cancellable(_answers, llm, inputs, config, kwargs))
    try:
        return await BaseChatModel.abatch(
            llm, [*inputs], config, return_exceptions=return_exceptions, **kwargs
        )
    finally:
        _READY.reset(token)


def _answers(
    llm: ChatSettings,
    inputs: Sequence[LanguageModelInput],
    config: RunnableConfig | list[RunnableConfig] | None,
    kwargs: Mapping[str, Any],
    cancelled: threading.Event | None = None,
) -> list[_Ready]:
    """What can be answered together, at most `max_batch_size` prompts at a time."""
    if len(inputs) < 2 or not _can_share(llm, kwargs):
        return []
    configs = get_config_list(config, len(inputs))
    read = (_read(llm, *one, kwargs) for one in zip(inputs, configs, strict=True))
    calls = [call for call in read if call is not None]
    rows = min(llm.max_batch_size, configs[0].get("max_concurrency") or llm.max_batch_size)
    groups = (calls[start : start + rows] for start in range(0, len(calls), rows))
    return [ready for group in groups for ready in _together(group, cancelled)]


def _can_share(llm: ChatSettings, kwargs: Mapping[str, Any]) -> bool:
    given = {**llm.generate_kwargs, **kwargs}
    if llm.streaming or any(given.get(name) is not None for name in _SINGLE):
        return False
    # With a cache of answers, what LangChain does for one call is what counts.
    caching = isinstance(llm.cache, BaseCache) or llm.cache or get_llm_cache() is not None
    return llm.cache is False or not caching


def _read(
    llm: ChatSettings, given: LanguageModelInput, config: RunnableConfig, kwargs: Mapping[str, Any]
) -> EngineCall | None:
    options = with_policy(config, kwargs)
    try:
        messages = llm._convert_input(given).to_messages()
        call = read_call(llm, messages, options.pop("stop", None), options)
    except Exception:  # LangChain refuses messages with errors of many types
        return None  # it will say so when it is asked
    return None if call.asked.question.is_completion else call


def _together(calls: Sequence[EngineCall], cancelled: threading.Event | None) -> list[_Ready]:
    # Configs may say other policies, row by row.
    calls = [call for call in calls if call.options == calls[0].options]
    if len(calls) < 2:
        return []
    questions: list[Any] = []
    for call in calls:
        asked, own = call.asked.question, {**call.asked.question.options, **call.options}
        questions.append((asked.text, asked.chunks, *(own[name] for name in _OF_A_ROW)))
    first = calls[0]
    try:
        answers = first.engine.generate_batch(questions, cancelled=cancelled, **first.options)
    except KVCacheRagError:
        return []  # each is answered alone then, and gets its own error or its own rounds
    except Exception as error:
        return [_Ready(call, error) for call in calls]
    return [
        _Ready(call, _of_call(call, answer)) for call, answer in zip(calls, answers, strict=True)
    ]


def _of_call(call: EngineCall, answer: Answer) -> Answer:
    mismatch = call.asked.question.options["prefix_mismatch"]
    return replace(answer, metrics=replace(answer.metrics, prefix_mismatch=mismatch))
