"""Calls of the chat model that wait for each other and are answered in one `generate()`."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcache_rag import KVCacheRagError, cancellable
from langchain_kvcache_rag.messages import Asked, Grounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag import Answer
    from langchain_kvcache_rag.calls import Call


class Table:
    """Prompts that wait for each other, each at a seat."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = tuple(asked)
        self._guard = threading.Lock()
        self._missing = set(range(len(asked)))
        self._calls: dict[int, Call] = {}
        self._answers: dict[int, Answer] | BaseException = {}
        self._stopped = threading.Event()
        self.answered = threading.Event()
        self.aanswered = asyncio.Event()

    def arrive(self, seat: int, call: Call) -> bool | None:
        """Take a seat.

        Returns:
            Whether the caller is to answer for all; None if its question is not this table's.
        """
        with self._guard:
            if seat not in self._missing or call.asked != self._asked[seat]:
                return None
            self._calls[seat] = call
            self._missing.discard(seat)
            return not self._missing

    def leave(self, seat: int) -> bool:
        """Go away for good; whether the caller is to answer for the others first."""
        with self._guard:
            if seat not in self._missing:
                return False
            self._missing.discard(seat)
            return not self._missing and bool(self._calls)

    def stop(self) -> None:
        """Nobody wants the answers any more; who still waits for one gets an error."""
        self._stopped.set()

    def answer(self, cancelled: threading.Event | None = None) -> None:
        """Answer every call that has arrived."""
        try:
            if self._stopped.is_set():
                raise RuntimeError("the batch was interrupted")
            self._answers = _together(self._calls, cancelled or self._stopped)
        except KVCacheRagError:
            # Each is answered alone then, and gets its own error or its own rounds.
            self._answers = {}
        except BaseException as error:
            self._answers = error
        finally:
            self.answered.set()

    async def aanswer(self) -> None:
        """`answer` that does not block the event loop."""
        try:
            await cancellable(self.answer)
        finally:
            self.aanswered.set()

    def take(self, seat: int) -> Answer | None:
        """What was answered to a seat; None if it has to be answered alone."""
        if isinstance(self._answers, BaseException):
            raise self._answers
        return self._answers.get(seat)


def _together(calls: Mapping[int, Call], cancelled: threading.Event) -> dict[int, Answer]:
    rows = {
        seat: (call, call.asked) for seat, call in calls.items() if isinstance(call.asked, Grounded)
    }
    if len(rows) < 2:
        return {}
    first, _ = next(iter(rows.values()))
    # Configs may say other policies, row by row.
    rows = {seat: row for seat, row in rows.items() if row[0].options == first.options}
    questions = [
        (question, call.chunks(asked), history, call.scores(asked))
        for call, asked in rows.values()
        for question, history in [call.question]
    ]
    answers = first.engine.generate_batch(questions, cancelled=cancelled, **first.options)
    return {
        seat: replace(
            answer, metrics=replace(answer.metrics, prefix_mismatch=asked.prefix_mismatch)
        )
        for answer, (seat, (_, asked)) in zip(answers, rows.items(), strict=True)
    }
