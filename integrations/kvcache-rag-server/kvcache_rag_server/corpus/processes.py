"""Workers on this machine, each a process with an engine, that may die at any moment.

Whoever hands out work here knows what each worker is at.  One that dies, by a signal or for want of
memory, is replaced, and its texts are given out again, one by one, so that a text that kills
workers is found, named and left out.  Workers end with the process that started them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import KVCacheRagError
from kvcache_rag_server.corpus.worker import BatchReport, Failure

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from multiprocessing.connection import Connection

    from kvcache_rag_server.corpus.texts import Text
    from kvcache_rag_server.corpus.worker import BuildSettings


DEATHS_OF_A_TEXT: Final = 2  # alone with its worker, before it is left out

DEATHS_AT_START: Final = 3  # in a row, before any worker was ready

DEATHS_IN_A_ROW: Final = 12  # without a single report in between

LOOKS: Final = 64  # reports of one worker after which the others help it to look up

PATIENCE: Final = 5.0  # seconds for a worker to end by itself


class WorkersDiedError(KVCacheRagError):
    """Workers die again and again, whatever they are given."""


# ---------------------------------------------------------------------- in the worker
@dataclass(frozen=True)
class _Ready:
    """The model is loaded."""


@dataclass(frozen=True)
class _Missing:
    """Something is to be computed."""


def _work(pipe: Connection, settings: BuildSettings, threads: int) -> None:
    """Build what comes through the pipe until it is closed."""
    # The terminal's Ctrl-C goes to all; only who handed out the work decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="kvcache-rag-parent", daemon=True).start()
    import torch

    from kvcache_rag_server.corpus.worker import Worker

    torch.set_num_threads(threads)
    try:
        worker = Worker(settings)
    except Exception as error:  # the parent shall say it, once
        kind = "" if isinstance(error, KVCacheRagError) else f"{type(error).__name__}: "
        pipe.send(BatchReport(refusal=f"{kind}{error}"))
        return
    with suppress(EOFError, OSError):  # the parent went away
        pipe.send(_Ready())
        while True:
            texts = pipe.recv()
            with _leaving_tidily():
                report = worker.build(texts, lambda: pipe.send(_Missing()))
            pipe.send(report)


@contextmanager
def _leaving_tidily() -> Iterator[None]:
    """SIGTERM leaves every `with` and `finally` block meanwhile, so that no torso stays."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


# ---------------------------------------------------------------------- in the parent
@dataclass(frozen=True)
class Assignment:
    """Texts for one worker.

    Attributes:
        texts: The texts.
        deaths: Workers that died of them.
    """

    texts: tuple[Text, ...]
    deaths: int = 0


class Assignments:
    """What is to be handed out: first what came back, then what is read."""

    def __init__(self, batches: Iterator[Sequence[Text]]) -> None:
        self._batches = batches
        self._again: deque[Assignment] = deque()
        self.is_read = False

    def next(self) -> Assignment | None:
        """The next ones, None when there is none now."""
        if self._again:
            return self._again.popleft()
        if not self.is_read:
            for texts in self._batches:
                return Assignment(tuple(texts))
            self.is_read = True
        return None

    @property
    def are_done(self) -> bool:
        """Whether there will be none, unless one comes back."""
        return self.is_read and not self._again

    def give_back(self, assignment: Assignment, cause: str) -> BatchReport | None:
        """Take back the texts of a worker that died; a report where that was the last attempt."""
        if len(assignment.texts) > 1:
            self._again += [Assignment((text,)) for text in assignment.texts]
            return None
        deaths = assignment.deaths + 1
        if deaths < DEATHS_OF_A_TEXT:
            self._again.append(replace(assignment, deaths=deaths))
            return None
        (text,) = assignment.texts
        failure = Failure.from_text(text, f"was left out: its worker died {deaths} times ({cause})")
        return BatchReport(indices=(text.index,), failures=(failure,))


@dataclass
class _Member:
    """A worker, as its parent sees it.

    Attributes:
        number: Its place, from 0.
        process: The process.
        pipe: To and from it.
        assignment: What it is at.
        is_ready: Whether its model is loaded.
    """

    number: int
    process: Any
    pipe: Connection
    assignment: Assignment | None = None
    is_ready: bool = False


class Processes:
    """Hands texts to processes of this machine.

    The first worker starts alone.  The others start when something is to be computed, so that
    looking up a corpus that is stored already costs one start.

    Attributes:
        settings: What the workers do.
        workers: How many there are at most.
        devices: Where they put their models, in turn; empty for what the settings say.
    """

    def __init__(self, settings: BuildSettings, workers: int, devices: Sequence[str] = ()) -> None:
        self.settings = settings
        self.workers = workers
        self.devices = tuple(devices)
        self._members: dict[int, _Member] = {}
        self._context = multiprocessing.get_context("spawn")
        self._threads = max(1, available_cores() // workers)
        self._wanted = 1
        self._reports = 0
        self._deaths = 0
        self._limit = DEATHS_AT_START

    @property
    def pids(self) -> list[int]:
        """Processes that run now."""
        return [member.process.pid for member in self._members.values()]

    def run(self, batches: Iterator[Sequence[Text]]) -> Generator[BatchReport, None, None]:
        """Build everything; reports come as they come.  Closing the iterator ends all workers.

        Raises:
            InvalidInputError: If model or store cannot be used.
            WorkersDiedError: If workers die and die.
        """
        assignments = Assignments(batches)
        try:
            while self._hand_out(assignments):
                yield from self._news(assignments)
        finally:
            self._stop()

    def _hand_out(self, assignments: Assignments) -> bool:
        """Give everybody something to do; False when everything is done."""
        for number in range(self._wanted):
            if number not in self._members and not assignments.are_done:
                self._start(number)
        for member in list(self._members.values()):
            if member.is_ready and member.assignment is None:
                self._give(member, assignments)
        return not assignments.are_done or any(
            member.assignment for member in self._members.values()
        )

    def _give(self, member: _Member, assignments: Assignments) -> None:
        assignment = assignments.next()
        if assignment is None:
            return
        member.assignment = assignment
        with suppress(OSError):  # it died: its end is noticed where news are read
            member.pipe.send(assignment.texts)

    def _start(self, number: int) -> None:
        device = self.devices[number % len(self.devices)] if self.devices else self.settings.device
        mine, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work,
            args=(theirs, self.settings.model_copy(update={"device": device}), self._threads),
            name=f"kvcache-rag-build-{number}",
            daemon=True,
        )
        with _no_interrupts():
            process.start()
        theirs.close()
        self._members[number] = _Member(number, process, mine)

    def _news(self, assignments: Assignments) -> Iterator[BatchReport]:
        pipes = {member.pipe: member for member in self._members.values()}
        for ready in connection.wait(list(pipes)):
            member = pipes[ready]  # type: ignore[index]  # only pipes are waited for
            try:
                message = member.pipe.recv()
            except (EOFError, OSError):
                yield from self._bury(member, assignments)
                continue
            yield from self._read(member, message)

    def _read(self, member: _Member, message: object) -> Iterator[BatchReport]:
        if isinstance(message, _Ready):
            member.is_ready = True
            self._limit = DEATHS_IN_A_ROW
        elif isinstance(message, _Missing):
            self._wanted = self.workers
        elif isinstance(message, BatchReport):
            member.assignment = None
            self._deaths = 0
            self._reports += 1
            if self._reports >= LOOKS:
                self._wanted = self.workers
            yield message

    def _bury(self, member: _Member, assignments: Assignments) -> Iterator[BatchReport]:
        """Take the work of a worker that died; who takes its place is started later."""
        member.pipe.close()
        member.process.join(PATIENCE)
        cause = _cause(member.process.exitcode)
        _end(member.process)
        del self._members[member.number]
        self._deaths += 1
        last = assignments.give_back(member.assignment, cause) if member.assignment else None
        if last is not None:
            yield last
        if self._deaths >= self._limit:
            raise WorkersDiedError(
                f"{self._deaths} workers in a row died ({cause}); is there enough memory for "
                f"{self.workers}?  What is stored stays: run it again with fewer --workers"
            )

    def _stop(self) -> None:
        """End every worker: an idle one by its closed pipe, others by SIGTERM, then by SIGKILL."""
        members, self._members = list(self._members.values()), {}
        for member in members:
            member.pipe.close()
            if member.assignment or not member.is_ready:
                member.process.terminate()
        deadline = time.monotonic() + PATIENCE
        for member in members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            _end(member.process)


def _end(process: Any) -> None:
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _cause(code: int | None) -> str:
    if code is None:
        return "it no longer answered"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """What is started meanwhile ignores Ctrl-C from its first moment on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
