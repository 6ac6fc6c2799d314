"""Streams of text as it is generated.

Generation runs in a separate thread.  Its errors reach the consumer, and a consumer that goes away
stops it at the next token.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeVar

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.forks import in_child
from kvcache_rag.metrics import Answer, Metrics

Emit = Callable[[str], None]

Run = Callable[[Emit, threading.Event], Answer]
"""Generates, passes on pieces of text, and stops early once the event is set."""

# Questions wait for the model here and not in asyncio's own few threads, in which the rest of the
# application (name look-ups, files) would then wait too.
_WAITING = ThreadPoolExecutor(64, thread_name_prefix="kvcache-rag-wait")


@in_child
def _wait_anew() -> None:
    global _WAITING
    _WAITING = ThreadPoolExecutor(64, thread_name_prefix="kvcache-rag-wait")


_NOT_COPIED: Final = (
    "a stream is read by one reader, where it was opened, and is neither copied nor pickled; hand "
    "on its pieces, or its answer once it has ended"
)

_Got = TypeVar("_Got")


async def in_thread(call: Callable[..., _Got], *arguments: Any, **options: Any) -> _Got:
    """`asyncio.to_thread` with this package's own threads."""
    within = contextvars.copy_context()
    task = functools.partial(within.run, call, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_WAITING, task)


_running: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@atexit.register
def _stop_all() -> None:
    """A thread inside torch while the interpreter ends would abort the process."""
    running = list(_running.items())
    for _, cancelled in running:
        cancelled.set()
    for thread, _ in running:
        thread.join(timeout=10)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # nor cancelled
        woken.set_result(None)


class _Bell:
    """Is rung for each piece; calls who waits for one, once."""

    call: Callable[[], object] | None = None

    def ring(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call()


class AnswerStream(Iterator[str]):
    """Pieces of an answer, as an iterator of strings.

    `metrics`, `text` and `answer` are known when it has ended.  Closing or dropping it stops
    generation.
    """

    def __init__(self, run: Run) -> None:
        """Start generating in a thread."""
        self._pieces: queue.SimpleQueue[str | Answer | BaseException] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._answer: Answer | None = None
        self._ended = False
        self._process = os.getpid()
        self._bell = _Bell()
        pieces, cancelled, bell = self._pieces, self._cancelled, self._bell

        def put(piece: str | Answer | BaseException) -> None:
            pieces.put(piece)
            bell.ring()

        def work() -> None:
            # No reference to the stream itself: it can be dropped, and `__del__` then stops this
            # thread.
            try:
                put(run(put, cancelled))
            except BaseException as error:
                put(error)

        # In the caller's context, by which tracers and loggers know whose work it is.
        within = contextvars.copy_context()
        self._thread = threading.Thread(
            target=within.run, args=(work,), name="kvcache-rag-generate", daemon=True
        )
        _running[self._thread] = cancelled
        self._thread.start()

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        if self._process != os.getpid():  # a fork has none of the threads
            raise InvalidInputError(
                "the stream was begun by the process that forked this one; ask again here"
            )
        piece = self._pieces.get()
        if isinstance(piece, str):
            return piece
        self._ended = True
        if isinstance(piece, BaseException):
            raise piece
        self._answer = piece
        raise StopIteration

    async def _there(self) -> None:
        """Wait for the next piece in no thread, of which the streams of others may have need."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_wake, woken)

        self._bell.call = wake  # before one looks, so that no piece is missed
        if self._pieces.empty() and not self._ended and self._process == os.getpid():
            await woken

    def close(self) -> None:
        """Stop generating at the next token and wait until the model is free."""
        self._cancelled.set()
        self._ended = True
        self._thread.join()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._cancelled.set()

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(_NOT_COPIED)

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            InvalidInputError: If the stream has not ended yet.
        """
        if self._answer is None:
            raise InvalidInputError(
                "the stream has not ended; read it to its end before its metrics"
            )
        return self._answer

    @property
    def metrics(self) -> Metrics:
        """Cost of the answer, once the stream has ended."""
        return self.answer.metrics

    @property
    def text(self) -> str:
        """Text of the answer, once the stream has ended."""
        return self.answer.text


class AsyncAnswerStream(AsyncIterator[str]):
    """An `AnswerStream` that never blocks the event loop; its first piece starts it."""

    def __init__(self, start: Callable[[], AnswerStream]) -> None:
        """Take what starts the stream; it may block, so it runs in a thread."""
        self._start = start
        self._stream: AnswerStream | None = None
        self._closed = False

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(_NOT_COPIED)

    async def __anext__(self) -> str:
        if self._closed:
            raise StopAsyncIteration
        try:
            stream = self._stream
            if stream is None:
                stream = await in_thread(self._open)
            await stream._there()
            piece = next(stream, None)
        except asyncio.CancelledError:
            self._closed = True
            if self._stream is not None:
                self._stream._cancelled.set()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _open(self) -> AnswerStream:
        self._stream = stream = self._start()
        if self._closed:  # while it was being started
            stream._cancelled.set()
        return stream

    async def aclose(self) -> None:
        """Stop generating at the next token."""
        self._closed = True
        if self._stream is not None:
            self._stream._cancelled.set()  # now; its end may have to wait for a thread
            await in_thread(self._stream.close)

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has ended."""
        if self._stream is None:
            raise InvalidInputError(
                "the stream has not ended; read it to its end before its metrics"
            )
        return self._stream.answer

    @property
    def metrics(self) -> Metrics:
        """Cost of the answer, once the stream has ended."""
        return self.answer.metrics

    @property
    def text(self) -> str:
        """Text of the answer, once the stream has ended."""
        return self.answer.text


async def cancellable(run: Callable[..., _Got], *arguments: Any, **options: Any) -> _Got:
    """Run `run` in a thread with an event `cancelled`; cancelling the caller sets the event.

    Args:
        run: Takes `cancelled=` and stops at its next token once that is set.
        arguments: Of `run`.
        options: Of `run`; a `cancelled` among them is the event that is set.
    """
    cancelled = options.pop("cancelled", None) or threading.Event()
    try:
        return await in_thread(run, *arguments, cancelled=cancelled, **options)
    except asyncio.CancelledError:
        cancelled.set()
        raise
