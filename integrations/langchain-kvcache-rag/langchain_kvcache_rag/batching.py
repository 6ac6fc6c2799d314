"""Answer the prompts of `batch` and `abatch` together, in one padded `generate()`.

Each prompt runs through LangChain's own `invoke`, in a thread or task of its own, so callbacks,
tags, metadata and run ids are what they are for a single call.  At the point where a single call
would generate, the prompts of a group wait for each other; whoever comes last answers for all.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from langchain_core.caches import BaseCache
from langchain_core.globals import get_llm_cache
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list

from kvcache_rag import in_thread
from langchain_kvcache_rag.messages import Asked, Grounded, read_messages
from langchain_kvcache_rag.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage
    from langchain_core.runnables import RunnableConfig

    from kvcache_rag import Answer
    from langchain_kvcache_rag.calls import Call
    from langchain_kvcache_rag.chat_model import ChatKVCache

# They belong to one prompt, or watch one.
_SINGLE: Final = frozenset(
    (
        "generation_config",
        "json_schema",
        "logits_processor",
        "num_beams",
        "prefix_allowed_tokens_fn",
        "scores",
        "stopping_criteria",
        "stream",
        "streamer",
        "tools",
    )
)


# Where the running call of the chat model sits, if it is one of a group.
_SEAT: ContextVar[tuple[Table, int] | None] = ContextVar("kvcache_rag_seat", default=None)


def answered_together(call: Call) -> Answer | None:
    """The answer to a call that belongs to a group; None if it has to be answered alone."""
    sitting = _SEAT.get()
    if sitting is None:
        return None
    table, seat = sitting
    is_last = table.arrive(seat, call)
    if is_last is None:
        return None
    if is_last:
        table.answer()
    table.answered.wait()
    return table.take(seat)


async def aanswered_together(call: Call) -> Answer | None:
    """`answered_together` that does not block the event loop."""
    sitting = _SEAT.get()
    if sitting is None:
        return None
    table, seat = sitting
    is_last = table.arrive(seat, call)
    if is_last is None:
        return None
    if is_last:
        await table.aanswer()
    await table.aanswered.wait()
    return table.take(seat)


def batch(
    llm: ChatKVCache,
    inputs: Sequence[LanguageModelInput],
    config: RunnableConfig | list[RunnableConfig] | None,
    return_exceptions: bool,
    kwargs: Mapping[str, Any],
) -> list[AIMessage]:
    """`Runnable.batch` of a chat model, with prompts over documents answered together."""
    job = _Job.of(llm, inputs, config, kwargs)
    results: dict[int, Any] = {}
    groups = job.groups()
    for group in groups:
        table = Table(list(group.values()))
        with ContextThreadPoolExecutor(max_workers=len(group)) as pool:
            run = job.seated(table)
            try:
                found = list(pool.map(run, group, range(len(group))))
            except BaseException:  # an interrupt; the pool waits for its threads
                table.stop()
                raise
        results.update(job.checked(group, found, return_exceptions))
    alone = job.others(results)
    answers = BaseChatModel.batch(
        llm,
        [job.inputs[index] for index in alone],
        [job.configs[index] for index in alone],
        return_exceptions=return_exceptions,
        **kwargs,
    )
    results.update(zip(alone, answers, strict=True))
    return [results[index] for index in range(len(job.inputs))]


async def abatch(
    llm: ChatKVCache,
    inputs: Sequence[LanguageModelInput],
    config: RunnableConfig | list[RunnableConfig] | None,
    return_exceptions: bool,
    kwargs: Mapping[str, Any],
) -> list[AIMessage]:
    """`batch` that does not block the event loop."""
    job = _Job.of(llm, inputs, config, kwargs)
    results: dict[int, Any] = {}
    for group in await in_thread(job.groups):
        table = Table(list(group.values()))
        rows = (job.aseated(table, index, seat) for seat, index in enumerate(group))
        found = await asyncio.gather(*rows)
        results.update(job.checked(group, found, return_exceptions))
    alone = job.others(results)
    answers = await BaseChatModel.abatch(
        llm,
        [job.inputs[index] for index in alone],
        [job.configs[index] for index in alone],
        return_exceptions=return_exceptions,
        **kwargs,
    )
    results.update(zip(alone, answers, strict=True))
    return [results[index] for index in range(len(job.inputs))]


@dataclass(frozen=True)
class _Job:
    """The inputs of a batch with their configs."""

    llm: ChatKVCache
    inputs: list[LanguageModelInput]
    configs: list[RunnableConfig]
    kwargs: dict[str, Any]

    @classmethod
    def of(
        cls,
        llm: ChatKVCache,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None,
        kwargs: Mapping[str, Any],
    ) -> _Job:
        return cls(llm, list(inputs), get_config_list(config, len(inputs)), dict(kwargs))

    def groups(self) -> list[dict[int, Asked]]:
        """Which inputs are answered together, and what they ask; the others stand in no group."""
        if len(self.inputs) < 2 or not self._can_share():
            return []
        rows = self.llm.max_batch_size
        rows = min(rows, self.configs[0].get("max_concurrency") or rows)
        found = [
            (index, asked) for index, asked in enumerate(map(self._read, self.inputs)) if asked
        ]
        groups = [dict(found[start : start + rows]) for start in range(0, len(found), rows)]
        return [group for group in groups if len(group) > 1]

    def seated(self, table: Table) -> Callable[[int, int], Any]:
        """What answers input `index` at seat `seat` of a table: a message or an error."""

        def run(index: int, seat: int) -> Any:
            _SEAT.set((table, seat))  # in the thread's own copy of the context
            try:
                return self.llm.invoke(self.inputs[index], self.configs[index], **self.kwargs)
            except Exception as error:
                return error
            finally:
                if table.leave(seat):
                    table.answer()

        return run

    async def aseated(self, table: Table, index: int, seat: int) -> Any:
        """Answer input `index` at seat `seat` of a table, with a message or an error."""
        _SEAT.set((table, seat))  # in the task's own copy of the context
        try:
            return await self.llm.ainvoke(self.inputs[index], self.configs[index], **self.kwargs)
        except Exception as error:
            return error
        except asyncio.CancelledError:
            table.stop()  # a row is cancelled with the whole batch
            raise
        finally:
            if table.leave(seat):
                await table.aanswer()

    def checked(
        self, group: Mapping[int, Asked], found: Sequence[Any], return_exceptions: bool
    ) -> dict[int, Any]:
        """What was found for each input of a group; raises its first error unless told not to."""
        if not return_exceptions:
            for one in found:
                if isinstance(one, Exception):
                    raise one
        return dict(zip(group, found, strict=True))

    def others(self, results: Mapping[int, Any]) -> list[int]:
        """The inputs without a result."""
        return [index for index in range(len(self.inputs)) if index not in results]

    def _can_share(self) -> bool:
        llm = self.llm
        given = {**llm.generate_kwargs, **self.kwargs}
        if llm.streaming or any(given.get(name) is not None for name in _SINGLE):
            return False
        # With a cache of answers, what LangChain does for one call is what counts.
        caching = isinstance(llm.cache, BaseCache) or llm.cache or get_llm_cache() is not None
        return llm.cache is False or not caching

    def _read(self, given: LanguageModelInput) -> Asked | None:
        try:
            messages = self.llm._convert_input(given).to_messages()
            asked = read_messages(messages, self.llm.engine.template.system)
        except Exception:  # LangChain refuses messages with errors of many types
            return None  # it will say so when it is asked
        return asked if isinstance(asked, Grounded) else None
