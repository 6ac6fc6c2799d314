"""Workers that Ray Data places: actors with an engine each, on one machine or many.

One task reads the corpus as a stream of small blocks, actors build them, and reports stream back.
Ray Data restarts an actor that dies and hands its batch out again; a batch that kills one actor
after another is given up, and its texts are built one by one, so that the one to blame is found.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import KVCacheRagError
from kvcache_rag_server.corpus.processes import DEATHS_OF_A_TEXT, WorkersDiedError
from kvcache_rag_server.corpus.texts import CorpusReader, Text
from kvcache_rag_server.corpus.worker import BatchReport, Failure
from kvcache_rag_server.ray_session import ray_session

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from kvcache_rag_server.corpus.texts import Corpus
    from kvcache_rag_server.corpus.worker import BuildSettings, Worker


BLOCK_BYTES: Final = 8 << 10  # of text: several make a batch, which is what an actor may lose

OBJECT_STORE_BYTES: Final = 256 << 20  # of a Ray started here; texts are small

_QUIET: Final = {"RAY_DATA_LOG_LEVEL": "ERROR", "RAY_BACKEND_LOG_LEVEL": "fatal"}

_COLUMNS: Final = ("index", "name", "text")

_COUNTS: Final = -1  # index of the row that says what was met while reading


@dataclass(frozen=True)
class Reader:
    """Reads a corpus in a task of Ray Data.

    Attributes:
        corpus: What is read.
        batch: Texts per yielded batch.
    """

    corpus: Corpus
    batch: int

    def __call__(self, _: Any) -> Iterator[Any]:
        """Tables of some texts at a time, and at the end what was met."""
        reading = CorpusReader(self.corpus)
        texts: list[Text] = []
        for text in reading.texts():
            texts.append(text)
            if len(texts) == self.batch:
                yield _table(texts)
                texts = []
        yield _table([*texts, Text(_COUNTS, "", json.dumps(reading.counts()))])


def _table(texts: list[Text]) -> Any:
    """An Arrow table: arrays of NumPy would cut zeros off the end of a text."""
    columns = {name: [getattr(text, name) for text in texts] for name in _COLUMNS}
    return import_module("pyarrow").table(columns)


class Attempts:
    """Counts how often each block was begun, where no death of an actor can make it forget."""

    def __init__(self) -> None:
        self._begun: Counter[int] = Counter()

    def begin(self, first: int) -> int:
        """Note that the block whose first text is `first` is begun; how often that makes."""
        self._begun[first] += 1
        return self._begun[first]


class Actor:
    """Builds blocks in an actor of Ray Data, which repeats what an actor dies of for ever."""

    def __init__(self, settings: BuildSettings, threads: int, attempts: Any = None) -> None:
        """Load the model; why it cannot be loaded is said by the first report.

        Args:
            settings: What is built, and where it goes.
            threads: Of the model.
            attempts: Handle of an actor `Attempts`; None to give nothing up.
        """
        import torch

        from kvcache_rag_server.corpus.worker import Worker

        torch.set_num_threads(threads)
        self._attempts = attempts
        self._refusal = ""
        self._worker: Worker | None = None
        try:
            self._worker = Worker(settings)
        except KVCacheRagError as error:
            self._refusal = str(error)

    def __call__(self, batch: Any) -> dict[str, list[str]]:
        """One report per table, as JSON."""
        columns = (batch.column(name).to_pylist() for name in _COLUMNS)
        texts = [Text(*row) for row in zip(*columns, strict=True)]
        counts_said = [text.text for text in texts if text.index == _COUNTS]
        to_build = [text for text in texts if text.index != _COUNTS]
        report = BatchReport() if self._is_given_up(to_build) else self.build(to_build)
        counts = counts_said[0] if counts_said else ""
        return {"report": [json.dumps(report.to_json())], "counts": [counts]}

    def _is_given_up(self, texts: list[Text]) -> bool:
        """Whether too many actors died of these texts; they are then built one by one."""
        if self._attempts is None or not texts:
            return False
        import ray

        return int(ray.get(self._attempts.begin.remote(texts[0].index))) > DEATHS_OF_A_TEXT

    def build(self, texts: list[Text]) -> BatchReport:
        if self._worker is None:
            return BatchReport(refusal=self._refusal)
        return self._worker.build(texts) if texts else BatchReport()


@dataclass(frozen=True)
class RayCluster:
    """Where actors run, and how many.

    Attributes:
        workers: Actors.
        address: `host:port` of a running cluster; None starts one on this machine.
        gpus: GPUs of each actor, may be a part of one; None to share them evenly, one each at most.
        cpus: Cores of this machine; an actor's model uses its share of them.
    """

    workers: int
    address: str | None = None
    gpus: float | None = None
    cpus: int = 1

    def run(
        self, settings: BuildSettings, reading: CorpusReader, batch: int
    ) -> Generator[BatchReport, None, None]:
        """Build everything; reports come as they come.  Closing the iterator ends all actors.

        Args:
            settings: What the actors do.
            reading: Takes over what is met while the corpus is read.
            batch: Texts per report.

        Raises:
            InvalidInputError: If Ray cannot be started or reached, or the corpus cannot be read.
            MissingExtraError: If Ray is not installed.
            WorkersDiedError: If Ray gives up.
        """
        # Actors take one place each, and reading takes none.
        options: dict[str, Any] = {"cpus": self.workers}
        if self.address is None:
            options["object_store_memory"] = OBJECT_STORE_BYTES
        with ray_session(address=self.address, environment=_QUIET, **options) as ray:
            seen = bytearray()
            try:
                for report in self._stream(ray, settings, reading, batch):
                    _mark(seen, report.indices)
                    yield report
            except ray.exceptions.RayError as error:
                reason = " ".join(str(error).split())[-300:]
                raise WorkersDiedError(f"Ray gave up: {reason}; what is stored stays") from error
            if not reading.is_complete or seen.count(1) < reading.texts_found:
                yield from self._rest(ray, settings, reading, seen)

    def _gpus(self, ray: Any) -> float:
        if self.gpus is not None:
            return self.gpus
        available = ray.cluster_resources().get("GPU", 0)
        return 1 / ceil(self.workers / available) if available else 0.0

    def _options(self, ray: Any, settings: BuildSettings) -> dict[str, Any]:
        gpus = 0.0 if settings.device == "cpu" else self._gpus(ray)
        return {"num_cpus": 1, "num_gpus": gpus}

    @property
    def _threads(self) -> int:
        return max(1, self.cpus // self.workers)

    def _stream(
        self, ray: Any, settings: BuildSettings, reading: CorpusReader, batch: int
    ) -> Iterator[BatchReport]:
        from ray.data import ActorPoolStrategy, DataContext

        context = DataContext.get_current()
        context.target_max_block_size = BLOCK_BYTES
        context.enable_progress_bars = False
        # A block that kills actors is not to end the others' work.
        context.max_errored_blocks = -1
        attempts = ray.remote(Attempts).options(num_cpus=0).remote()
        reports = (
            ray.data.from_items([0])
            .map_batches(Reader(reading.corpus, batch), batch_size=None, num_cpus=0)
            .map_batches(
                Actor,
                fn_constructor_args=(settings, self._threads, attempts),
                compute=ActorPoolStrategy(size=self.workers),
                batch_size=batch,
                batch_format="pyarrow",
                **self._options(ray, settings),
            )
        )
        with warnings.catch_warnings():
            # That a small corpus does not keep all actors busy.
            warnings.filterwarnings("ignore", "The minimum number of concurrent actors")
            for row in reports.iter_rows():
                if row["counts"]:
                    reading.take(json.loads(row["counts"]))
                yield BatchReport.from_json(json.loads(row["report"]))

    def _rest(
        self, ray: Any, settings: BuildSettings, reading: CorpusReader, seen: bytearray
    ) -> Iterator[BatchReport]:
        """Build one by one what no report came of."""
        again = CorpusReader(reading.corpus)
        lonely = _SoleActor(ray, settings, self._options(ray, settings), self._threads)
        for text in again.texts():
            if text.index >= len(seen) or not seen[text.index]:
                yield lonely.build(text)
        reading.take(again.counts())


class _SoleActor:
    """One actor that is replaced when it dies."""

    def __init__(
        self, ray: Any, settings: BuildSettings, options: Mapping[str, Any], threads: int
    ) -> None:
        self._ray = ray
        self._make = ray.remote(Actor).options(max_restarts=0, **options)
        self._arguments = (settings, threads)
        self._actor: Any = None

    def build(self, text: Text) -> BatchReport:
        cause = ""
        for _ in range(DEATHS_OF_A_TEXT):
            if self._actor is None:
                self._actor = self._make.remote(*self._arguments)
            try:
                report: BatchReport = self._ray.get(self._actor.build.remote([text]))
            except self._ray.exceptions.RayError as error:  # it died, or was short of memory
                self._actor, cause = None, type(error).__name__
                continue
            return report
        reason = f"was left out: its worker died {DEATHS_OF_A_TEXT} times ({cause})"
        return BatchReport(indices=(text.index,), failures=(Failure.from_text(text, reason),))


def _mark(seen: bytearray, indices: tuple[int, ...]) -> None:
    if indices:
        seen.extend(bytes(max(0, max(indices) + 1 - len(seen))))
    for index in indices:
        seen[index] = 1
