"""A chat engine's streamed answer that stops when nobody reads it.

LlamaIndex's own writes the answer to memory from a separate thread or task, which goes on when the
reader leaves and keeps the model busy.  Here reading drives the stream, and the answer is
remembered when it ends.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.chat_engine import (
    StreamChatDeltaReceivedEvent,
    StreamChatEndEvent,
    StreamChatErrorEvent,
    StreamChatStartEvent,
)

from kvcache_rag import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator

dispatcher = get_dispatcher(__name__)


@dataclass
class KVCacheChatResponse(StreamingAgentChatResponse):
    """A streamed answer.

    Read `response_gen` or `async_response_gen()`.  Closing it, breaking out of its loop,
    cancellation, `close()` or `aclose()` stop generation at the next token.  The turn goes into
    memory when the answer has ended, or is stopped after its first piece; a failed turn is not
    remembered.

    Attributes:
        metadata: Metadata of the nodes by their ids, and the metrics under "kv_cache" once the
            answer has ended.
    """

    is_writing_to_memory: bool = False
    metadata: dict[str, Any] | None = None
    # A generator that is closed while it runs for somebody else raises.
    _turns_of_threads: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _turns_of_tasks: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _left: bool = field(default=False, repr=False)

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            "a streamed answer is read by one reader, where it was asked for, and is neither "
            "copied nor pickled; hand on its pieces, or its text, metadata and source_nodes"
        )

    @property
    def response_gen(self) -> Generator[str, None, None]:
        """Pieces of the answer; a second reader gets all of it at once."""
        if self.chat_stream is None:
            raise InvalidInputError("the answer of astream_chat is read by async_response_gen()")
        return self._read()

    async def async_response_gen(self) -> AsyncGenerator[str, None]:
        """Pieces of the answer; a second reader gets all of it at once."""
        if self.achat_stream is None:
            raise InvalidInputError("the answer of stream_chat is read by response_gen")
        if self._is_over():
            yield self.response
            return
        try:
            while True:
                async with self._turns_of_tasks:
                    chat = await anext(self.achat_stream, None)
                if chat is None:
                    return
                self.unformatted_response += chat.delta or ""
                yield chat.delta or ""
        except Exception as error:
            self.exception = error
            raise
        finally:
            await self.aclose()

    def close(self) -> None:
        """Stop the answer of `stream_chat`; its reader, in any thread, ends."""
        if self.chat_stream is None:
            return
        with self._turns_of_threads:
            self._left = True
            # An event handler that closes the stream is called by it; its reader then ends it.
            if inspect.getgeneratorstate(self.chat_stream) == inspect.GEN_RUNNING:
                return
            try:
                self.chat_stream.close()
            finally:
                self._end()

    async def aclose(self) -> None:
        """Stop the answer of `astream_chat`; its reader, in any task, ends."""
        if self.achat_stream is not None:
            async with self._turns_of_tasks:
                try:
                    await self.achat_stream.aclose()
                finally:
                    self._end()

    def _read(self) -> Generator[str, None, None]:
        if self.chat_stream is None or self._is_over():
            yield self.response
            return
        try:
            while not self._left:
                with self._turns_of_threads:
                    chat = next(self.chat_stream, None)
                if chat is None:
                    return
                self.unformatted_response += chat.delta or ""
                yield chat.delta or ""
        except Exception as error:
            self.exception = error
            raise
        finally:
            self.close()

    def _is_over(self) -> bool:
        if self.exception is not None:
            raise self.exception
        return self.is_done

    def _end(self) -> None:
        self.response = self.unformatted_response
        self.is_done = True


def speak(
    pieces: Generator[str, None, None], remember: Callable[[str], None]
) -> Generator[ChatResponse, None, None]:
    """Chat responses from pieces of text.

    It is started already, so that closing it stops generation even before anything was read.

    Args:
        pieces: Of the answer.
        remember: Takes the whole answer, or what there is of it when it is stopped.
    """
    speaking = _speak(pieces, remember)
    next(speaking)
    return speaking


async def aspeak(
    pieces: AsyncGenerator[str, None], remember: Callable[[str], Awaitable[None]]
) -> AsyncGenerator[ChatResponse, None]:
    """`speak` for an event loop."""
    speaking = _aspeak(pieces, remember)
    await anext(speaking)
    return speaking


@contextmanager
def _told() -> Iterator[None]:
    """Events of beginning and end."""
    dispatcher.event(StreamChatStartEvent())
    try:
        yield
    except Exception as error:
        dispatcher.event(StreamChatErrorEvent(exception=error))
        raise
    except BaseException:  # somebody left
        dispatcher.event(StreamChatEndEvent())
        raise
    dispatcher.event(StreamChatEndEvent())


def _speak(
    pieces: Generator[str, None, None], remember: Callable[[str], None]
) -> Generator[ChatResponse, None, None]:
    text = ""
    with _told():
        try:
            with closing(pieces):
                yield _said(text, "")
                for piece in pieces:
                    text += piece
                    dispatcher.event(StreamChatDeltaReceivedEvent(delta=piece))
                    yield _said(text, piece)
        except GeneratorExit:
            if text:
                remember(text)
            raise
        remember(text)


async def _aspeak(
    pieces: AsyncGenerator[str, None], remember: Callable[[str], Awaitable[None]]
) -> AsyncGenerator[ChatResponse, None]:
    text = ""
    with _told():
        try:
            async with aclosing(pieces):
                yield _said(text, "")
                async for piece in pieces:
                    text += piece
                    dispatcher.event(StreamChatDeltaReceivedEvent(delta=piece))
                    yield _said(text, piece)
        except (GeneratorExit, asyncio.CancelledError):
            if text:
                await remember(text)
            raise
        await remember(text)


def _said(text: str, piece: str) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=piece)
