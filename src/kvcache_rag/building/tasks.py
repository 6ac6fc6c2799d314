"""What workers are given, and what becomes of the texts of one that died."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvcache_rag.building.report import Failure, Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_rag.building.corpus import Text

DEATHS_OF_A_TEXT: Final = 2  # alone with its worker, before it is left out


@dataclass(frozen=True)
class Task:
    """Texts for one worker.

    Attributes:
        texts: The texts.
        deaths: Workers that died of them.
    """

    texts: tuple[Text, ...]
    deaths: int = 0


class Tasks:
    """What is to be handed out: first what came back, then what is read."""

    def __init__(self, batches: Iterator[Sequence[Text]]) -> None:
        self._batches = batches
        self._again: deque[Task] = deque()
        self.is_read = False

    def next(self) -> Task | None:
        """The next task, None when there is none now."""
        if self._again:
            return self._again.popleft()
        if not self.is_read:
            for texts in self._batches:
                return Task(tuple(texts))
            self.is_read = True
        return None

    @property
    def are_done(self) -> bool:
        """Whether there will be none, unless one comes back."""
        return self.is_read and not self._again

    def give_back(self, task: Task, cause: str) -> Report | None:
        """Take the task of a worker that died; a report where that was the last attempt."""
        if len(task.texts) > 1:
            self._again += [Task((text,)) for text in task.texts]
            return None
        deaths = task.deaths + 1
        if deaths < DEATHS_OF_A_TEXT:
            self._again.append(replace(task, deaths=deaths))
            return None
        (text,) = task.texts
        failure = Failure.of(text, f"was left out: its worker died {deaths} times ({cause})")
        return Report(indices=(text.index,), failures=(failure,))
