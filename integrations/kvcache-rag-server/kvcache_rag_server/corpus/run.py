"""A whole build: give texts to workers, count and show results, tidy up after killed workers."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import ChunkKey
from kvcache_rag.progress import progress_bar
from kvcache_rag.stores import DiskStore
from kvcache_rag.stores.filesystem import unlink
from kvcache_rag.stores.listing import namespaces
from kvcache_rag.stores.object_names import namespace_digest
from kvcache_rag_server.corpus.processes import Processes
from kvcache_rag_server.corpus.texts import NAMED, CorpusReader, Text
from kvcache_rag_server.corpus.worker import BatchReport, Worker

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from kvcache_rag_server.corpus.texts import Corpus
    from kvcache_rag_server.corpus.worker import BuildSettings, Failure


class Workers(Protocol):
    """Who computes."""

    def run(
        self, settings: BuildSettings, reading: CorpusReader, batch: int
    ) -> Generator[BatchReport, None, None]:
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
        self, settings: BuildSettings, reading: CorpusReader, batch: int
    ) -> Generator[BatchReport, None, None]:
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
        self, settings: BuildSettings, reading: CorpusReader, batch: int
    ) -> Generator[BatchReport, None, None]:
        pool = Processes(settings, self.workers, self.devices)
        with closing(pool.run(batches(reading.texts(), batch))) as reports:
            yield from reports


def batches(texts: Iterator[Text], size: int) -> Iterator[list[Text]]:
    """Lists of at most `size` texts, read when they are asked for."""
    while batch := list(islice(texts, size)):
        yield batch


@dataclass
class Tally:
    """The sum of all reports.

    Attributes:
        prefilled: Chunks that were computed and stored.
        there: Chunks that the store held already.
        failed: Texts that are not in the store.
        tokens: Tokens of all chunks, prefix not counted.
        prefilled_tokens: Tokens of those that were computed.
        nbytes: Bytes written to the store.
        spec: Digest of what the chunks depend on; "" while unknown.
        failures: The first `NAMED` failures.
        started: `time.perf_counter()` when the build began.
    """

    prefilled: int = 0
    there: int = 0
    failed: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    nbytes: int = 0
    spec: str = ""
    failures: list[Failure] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def add(self, report: BatchReport) -> None:
        for name in ("prefilled", "there", "tokens", "prefilled_tokens", "nbytes"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        self.spec = report.spec or self.spec
        self.failed += len(report.failures)
        self.failures += report.failures[: NAMED - len(self.failures)]

    @property
    def done(self) -> int:
        """Texts that need no more work."""
        return self.prefilled + self.there + self.failed

    @property
    def seconds(self) -> float:
        """Since the build began."""
        return time.perf_counter() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed per second of the whole build; 0 when none were."""
        return self.prefilled_tokens / self.seconds if self.prefilled_tokens else 0.0


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
    reading: CorpusReader = field(init=False)
    tidied: int = 0

    def __post_init__(self) -> None:
        self.reading = CorpusReader(self.corpus)

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
        tally = self.tally
        running = closing(self.workers.run(self.settings, self.reading, self.batch))
        # How many texts there are is known at the end only.
        bar: Any = progress_bar(None, "build", " chunks", show=True)
        try:
            with bar, running as reports:
                for report in reports:
                    tally.add(report)
                    bar.set_postfix_str(
                        f"{tally.there} there, {tally.tokens_per_second:.0f} tokens/s",
                        refresh=False,
                    )
                    bar.update(tally.done - bar.n)
                    if report.refusal:
                        raise InvalidInputError(report.refusal)
        finally:
            self._tidy()
        if not tally.done and not self.reading.unreadable:
            raise InvalidInputError("there is no text in the corpus; nothing was built")

    def _tidy(self) -> None:
        if self.settings.is_remote or not self.tally.spec:
            return
        store = DiskStore(self.settings.place, namespace=self.settings.namespace)
        self.tidied = tidy(store, self.tally.spec, self.settings.namespace)


def tidy(store: DiskStore, spec: str, namespace: str) -> int:
    """Remove what killed workers left half written in a spec's folder.

    Chunks are written under the lock of their stripe, so what lies unfinished while that lock is
    held belongs to nobody (on this machine: an unlucky writer of another one computes its chunk
    again).

    Returns:
        How many files were removed.
    """
    leftovers = [
        leftover
        for folder in namespaces(store.root)
        if folder.name == namespace_digest(namespace)
        for spec_folder in folder.specs()
        if spec_folder.name == spec[:16]
        for leftover in spec_folder.unfinished()
    ]
    removed = 0
    for leftover in leftovers:
        stripe = os.path.basename(os.path.dirname(leftover.path))
        if len(stripe) != 2:
            continue  # a manifest, which is written without a lock
        with store.locked([ChunkKey(stripe * 32, spec, namespace, 1, 0)]):
            removed += unlink(leftover.path)
    return removed
