"""A whole build: hand texts out, count what comes back, tidy up."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from kvcache_rag.building.corpus import Reading, Text
from kvcache_rag.building.processes import Processes
from kvcache_rag.building.progress import Progress
from kvcache_rag.building.report import Report, Tally
from kvcache_rag.building.tidying import tidy
from kvcache_rag.building.worker import Worker
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.stores import DiskStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from kvcache_rag.building.corpus import Corpus
    from kvcache_rag.building.settings import BuildSettings


class Workers(Protocol):
    """Who computes."""

    def run(
        self, settings: BuildSettings, reading: Reading, batch: int
    ) -> Generator[Report, None, None]:
        """Build every text of a reading; closing the generator ends the workers.

        Args:
            settings: What is built, and where it goes.
            reading: A way through the corpus that is not begun; it says what was met.
            batch: Texts that a worker gets at a time.

        Yields:
            What became of the texts, as it becomes known.

        Raises:
            KVCacheRagError: If the build cannot go on.
        """
        ...


class InProcess:
    """This process is the only worker."""

    def run(
        self, settings: BuildSettings, reading: Reading, batch: int
    ) -> Generator[Report, None, None]:
        """See `Workers`; the model is loaded when there is a text."""
        worker: Worker | None = None
        for texts in batches(reading.texts(), batch):
            worker = worker or Worker(settings)
            yield worker.build(texts)


@dataclass(frozen=True)
class ProcessPool:
    """Processes of this machine, which may die.

    Attributes:
        workers: How many at most.
        devices: Where they put their models, in turn; empty for what the settings say.
    """

    workers: int
    devices: tuple[str, ...] = ()

    def run(
        self, settings: BuildSettings, reading: Reading, batch: int
    ) -> Generator[Report, None, None]:
        """See `Workers`."""
        pool = Processes(settings, self.workers, self.devices)
        with closing(pool.run(batches(reading.texts(), batch))) as reports:
            yield from reports


def batches(texts: Iterator[Text], size: int) -> Iterator[list[Text]]:
    """Lists of at most `size` texts, read when they are asked for."""
    while found := list(islice(texts, size)):
        yield found


@dataclass
class Build:
    """A build, while it runs and when it is over.

    Attributes:
        settings: What is built, and where it goes.
        corpus: What it is built from.
        workers: Who computes.
        batch: Texts that a worker gets at a time.
        tally: What became of the texts.
        reading: What was met in the corpus.
        tidied: Unfinished files of killed workers that were removed.
    """

    settings: BuildSettings
    corpus: Corpus
    workers: Workers
    batch: int = 16
    tally: Tally = field(default_factory=Tally)
    reading: Reading = field(init=False)
    tidied: int = 0

    def __post_init__(self) -> None:
        self.reading = Reading(self.corpus)

    @property
    def is_whole(self) -> bool:
        """Whether every text of the corpus is in the store."""
        return not self.tally.failed and not self.reading.unreadable

    def run(self) -> None:
        """Do it; whatever happens, what is stored stays and no worker is left.

        Raises:
            InvalidInputError: If the corpus has no text, or nothing can be stored.
            KVCacheRagError: If the model cannot be used, or workers die and die.
        """
        progress = Progress(self.tally)
        try:
            with closing(self.workers.run(self.settings, self.reading, self.batch)) as reports:
                for report in reports:
                    self.tally.add(report)
                    progress.update()
                    if report.refusal:
                        raise InvalidInputError(report.refusal)
        finally:
            progress.close()
            self._tidy()
        if not self.tally.done and not self.reading.unreadable:
            raise InvalidInputError("there is no text in the corpus; nothing was built")

    def _tidy(self) -> None:
        if self.settings.is_remote or not self.tally.spec:
            return
        store = DiskStore(self.settings.store, namespace=self.settings.namespace)
        self.tidied = tidy(store, self.tally.spec, self.settings.namespace)
