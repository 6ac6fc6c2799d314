"""Stop a stream that LlamaIndex has wrapped, whoever remembers how it ended.

LlamaIndex's callbacks wrap an LLM's generator and never close it: it ends when it is dropped.  But
they also hand the `GeneratorExit` of a reader who leaves to every event handler, and one that keeps
its events keeps its traceback, the wrapper's frame and so the generator, which would go on
generating.  So the exception comes from here, and its traceback is taken away afterwards.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator

_Item = TypeVar("_Item")


@contextmanager
def stopping(items: Generator[_Item, Any, Any]) -> Iterator[Generator[_Item, Any, Any]]:
    """`contextlib.closing` that also ends what the generator reads from."""
    try:
        yield items
    finally:
        leaving = GeneratorExit()
        with suppress(GeneratorExit):
            items.throw(leaving)
        leaving.__traceback__ = None


@asynccontextmanager
async def astopping(items: AsyncGenerator[_Item, Any]) -> AsyncIterator[AsyncGenerator[_Item, Any]]:
    """`contextlib.aclosing` that also ends what the generator reads from."""
    try:
        yield items
    finally:
        leaving = GeneratorExit()
        with suppress(GeneratorExit, StopAsyncIteration):
            await items.athrow(leaving)
        leaving.__traceback__ = None
