"""Workers in processes of their own: together, killed, and left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from corpus_traps import Trapped, alive, computed, saved_model, wait_for, write_lines
from forks import forkserver

from kvcache_rag import DiskStore, Engine
from kvcache_rag.errors import InvalidInputError
from kvcache_rag_server.corpus import processes
from kvcache_rag_server.corpus.processes import Processes, WorkersDiedError
from kvcache_rag_server.corpus.run import Build, InProcess, ProcessPool, batches
from kvcache_rag_server.corpus.texts import CorpusReader, JsonLines

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXTS = [f"chunk {number} of a corpus about {number * 7} rivers" for number in range(24)]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_model(tmp_path_factory.mktemp("model"))


class Place:
    """A corpus, a store and the notes of workers."""

    def __init__(self, folder: Path, model: str) -> None:
        self.model, self.store, self.notes = model, folder / "kv", folder / "notes"
        self.notes.mkdir()
        self.corpus = folder / "c.jsonl"
        write_lines(self.corpus, TEXTS)

    def settings(self, **traps: Any) -> Trapped:
        place = {"kv_dir": str(self.store), "notes": str(self.notes)}
        return Trapped(model=self.model, **place, **traps)

    def build(self, settings: Trapped, workers: int = 0, batch: int = 4) -> Build:
        """With so many processes, or in this one."""
        crew = ProcessPool(workers) if workers else InProcess()
        build = Build(settings, JsonLines(str(self.corpus)), crew, batch)
        build.run()
        return build

    def missing(self, texts: Sequence[str] = TEXTS) -> list[str]:
        engine = Engine.from_pretrained(self.model, store=DiskStore(self.store))
        held = zip(engine.keys(texts), texts, strict=True)
        return [text for key, text in held if not engine.store.contains(key)]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that import nothing anew; those of the first test begin as a user's do."""
    monkeypatch.setattr(processes.multiprocessing, "get_context", forkserver)


@pytest.fixture
def place(tmp_path: Path, model: str) -> Place:
    return Place(tmp_path, model)


def test_several_workers_share_a_corpus_and_compute_each_text_once(place: Place) -> None:
    build = place.build(place.settings(together=2), workers=2)
    assert (build.tally.prefilled, build.tally.there, build.is_whole) == (24, 0, True)
    assert sorted(computed(place.notes)) == sorted(TEXTS)
    assert len(list(place.notes.glob("*.log"))) == 2, "one worker did it all"
    assert place.missing() == []
    engine = Engine.from_pretrained(place.model, store=DiskStore(place.store))
    assert engine.spec == build.tally.spec
    answer = engine.generate("Which?", TEXTS[:3], max_new_tokens=1)
    assert (answer.metrics.misses, answer.metrics.prefilled_tokens) == (0, 0)


@pytest.mark.usefixtures("forked")
def test_a_text_that_kills_workers_is_named_and_the_rest_is_built(place: Place) -> None:
    build = place.build(place.settings(fatal="chunk 5 "), workers=1)
    (failure,) = build.tally.failures
    assert failure.name == "line 6"
    assert failure.reason == "was left out: its worker died 2 times (signal 9)"
    assert (build.tally.prefilled + build.tally.there, build.is_whole) == (23, False)
    assert place.missing() == [TEXTS[5]]
    again = place.build(place.settings())
    assert (again.tally.prefilled, again.tally.there) == (1, 23)


@pytest.mark.usefixtures("forked")
def test_workers_that_die_of_everything_or_have_no_model_end_the_build(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "DEATHS_IN_A_ROW", 2)
    with pytest.raises(WorkersDiedError, match=r"2 workers in a row died \(signal 9\)"):
        place.build(place.settings(fatal="chunk"), workers=1)
    place.model = str(place.notes)
    with pytest.raises(InvalidInputError, match="cannot load the model"):
        place.build(place.settings(), workers=2)


@pytest.mark.usefixtures("forked")
def test_nothing_to_do_takes_one_worker(place: Place) -> None:
    place.build(place.settings())
    pool = Processes(place.settings(), 4)
    seen: set[int] = set()
    reading = CorpusReader(JsonLines(str(place.corpus)))
    with closing(pool.run(batches(reading.texts(), 4))) as reports:
        for report in reports:
            seen.update(pool.pids)
            assert (report.prefilled, report.there) == (0, 4)
    assert len(seen) == 1
    assert pool.pids == []
    assert not any(map(alive, seen))


COMMAND = """
import signal, sys
sys.path[:0] = sys.argv[1].split(":")
from corpus_traps import Trapped
from forks import forkserver
from kvcache_rag_server.corpus import processes
from kvcache_rag_server.corpus.texts import JsonLines
from kvcache_rag_server.corpus.run import Build, ProcessPool

if __name__ == "__main__":
    processes.multiprocessing.get_context = forkserver
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    model, store, notes, corpus = sys.argv[2:]
    settings = Trapped(model=model, kv_dir=store, notes=notes, slow=1.0, together=2)
    try:
        Build(settings, JsonLines(corpus), ProcessPool(2), 2).run()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_a_stopped_build_leaves_no_process_and_goes_on(place: Place, how: signal.Signals) -> None:
    script = place.notes / "main.py"
    script.write_text(COMMAND)
    paths = f"{ROOT}:{ROOT / 'tests'}"
    words = [paths, place.model, str(place.store), str(place.notes), str(place.corpus)]
    process = subprocess.Popen(
        [sys.executable, str(script), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: len(list(place.notes.glob("*.log"))) == 2, "second worker")
    pids = [int(log.stem) for log in place.notes.glob("*.log")]
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does it: to all of them
    else:
        process.send_signal(how)
    output, errors = process.communicate(timeout=60)
    wait_for(lambda: not any(map(alive, pids)), "end of the workers")
    if how == signal.SIGINT:
        assert output.strip() == "interrupted"
        assert "Traceback" not in errors
    assert not list(place.store.rglob(".tmp*"))
    rest = place.missing()
    assert 0 < len(rest) < len(TEXTS)
    for log in place.notes.glob("*.log"):
        log.unlink()
    build = place.build(place.settings())
    assert build.tally.prefilled == len(rest)
    assert sorted(computed(place.notes)) == sorted(rest)
    assert place.missing() == []
