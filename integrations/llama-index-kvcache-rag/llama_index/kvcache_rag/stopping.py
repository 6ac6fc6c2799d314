"""How the streams of an LLM are called, so that they stop when their reader leaves.

LlamaIndex's callbacks wrap an LLM's generator and never close it: it ends when it is dropped.  But
they also hand the `GeneratorExit` of a reader who leaves to every event handler, and one that keeps
its events keeps its traceback, the wrapper's frame and so the generator, which would go on
generating.  So what the wrapper reads from is closed here, before the wrapper itself.
"""

from __future__ import annotations

import inspect
from contextlib import aclosing, closing
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.instrumentation import get_dispatcher

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

dispatcher = get_dispatcher(__name__)

_Item = TypeVar("_Item")


def stoppable(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A callback of LlamaIndex, for methods that return a generator.

    Args:
        callback: `llm_completion_callback()` or `llm_chat_callback()`.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> tuple[Any, list[Any]]:
            """What the callback makes of a call, and what the method itself returned."""
            own: list[Any] = []

            def note(*given: Any, **named: Any) -> Any:
                own.append(method(*given, **named))
                return own[0]

            async def anote(*given: Any, **named: Any) -> Any:
                own.append(await method(*given, **named))
                return own[0]

            noted = anote if inspect.iscoroutinefunction(method) else note
            return callback(noted)(*arguments, **options), own

        @wraps(method)
        def opened(*arguments: Any, **options: Any) -> Generator[Any, None, None]:
            items, own = called(*arguments, **options)
            return _read(items, own[0])

        @wraps(method)
        async def aopened(*arguments: Any, **options: Any) -> AsyncGenerator[Any, None]:
            items, own = called(*arguments, **options)
            return _aread(await items, own[0])

        return aopened if inspect.iscoroutinefunction(method) else opened

    return decorate


def spanned(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A callback for methods of which LlamaIndex does not know, and which it gives no span.

    Args:
        callback: As for `stoppable`, or what that makes of one.
    """
    return lambda method: dispatcher.span(callback(method))


def _read(
    items: Generator[_Item, None, None], own: Generator[_Item, None, None]
) -> Generator[_Item, None, None]:
    with closing(items), closing(own):
        for item in items:  # noqa: UP028  # `yield from` would close `items` first
            yield item


async def _aread(
    items: AsyncGenerator[_Item, None], own: AsyncGenerator[_Item, None]
) -> AsyncGenerator[_Item, None]:
    async with aclosing(items), aclosing(own):
        async for item in items:
            yield item
