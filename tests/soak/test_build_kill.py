"""kill -9 of a worker in the middle of a build: processes of this machine, and Ray's actors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from corpus_traps import alive, computed, saved_model, wait_for, write_lines

from kvcache_rag import DiskStore, Engine
from tests.reliability import record

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # several starts of Ray and of models, perhaps side by side
TEXTS = [f"chunk {number} of a corpus about {number * 7} rivers " * 8 for number in range(120)]
NEW = [f"chunk {number} that was written later" for number in range(12)]

# Arguments: crew, model, store, notes, corpus, what kills, how often.  Writes the tally to stdout.
BUILD = """
import json, sys
from corpus_traps import Trapped
from kvcache_rag_server.corpus.texts import JsonLines
from kvcache_rag_server.corpus.ray_data import RayCluster
from kvcache_rag_server.corpus.run import Build, ProcessPool

if __name__ == "__main__":
    crew, model, store, notes, corpus, fatal, times = sys.argv[1:]
    workers = {"ray": RayCluster(2), "processes": ProcessPool(2)}[crew]
    settings = Trapped(model=model, kv_dir=store, notes=notes, slow=0.2, fatal=fatal,
                       times=int(times), together=2)
    build = Build(settings, JsonLines(corpus), workers, 4)
    build.run()
    found = {name: getattr(build.tally, name) for name in ("prefilled", "there", "failed")}
    print(json.dumps({**found, "names": [one.name for one in build.tally.failures],
                      "read": build.reading.texts_found, "tidied": build.tidied}))
"""


class Place:
    """A model, a corpus, a store and the notes of workers."""

    def __init__(self, folder: Path) -> None:
        self.model = saved_model(folder / "model")
        self.store, self.notes, self.corpus = folder / "kv", folder / "notes", folder / "c.jsonl"
        self.script = folder / "build.py"
        self.script.write_text(BUILD)
        self.notes.mkdir()
        write_lines(self.corpus, TEXTS)

    def start(self, crew: str, fatal: str = "", times: int = 0) -> subprocess.Popen[str]:
        words = [crew, self.model, str(self.store), str(self.notes), str(self.corpus), fatal]
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        return subprocess.Popen(
            [sys.executable, str(self.script), *words, str(times)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> dict[str, object]:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0
        found: dict[str, object] = json.loads(output.splitlines()[-1])
        return found

    def missing(self, texts: list[str]) -> list[str]:
        engine = Engine.from_pretrained(self.model, store=DiskStore(self.store))
        held = zip(engine.keys(texts), texts, strict=True)
        return [text for key, text in held if not engine.store.contains(key)]

    def torsos(self) -> list[Path]:
        return list(self.store.rglob(".tmp*"))

    def workers(self) -> set[int]:
        return {int(log.stem) for log in self.notes.glob("*.log")}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("crew", ["processes", "ray"])
def test_a_killed_worker_loses_nothing(place: Place, crew: str) -> None:
    process = place.start(crew)
    wait_for(lambda: len(place.workers()) == 2, "second worker")
    before = place.workers()
    (victim, *_) = [pid for pid in sorted(before) if alive(pid)]
    os.kill(victim, signal.SIGKILL)
    found = place.end(process)
    assert place.missing(TEXTS) == []
    assert not place.torsos()
    assert (found["failed"], found["read"]) == (0, len(TEXTS))
    assert int(str(found["prefilled"])) + int(str(found["there"])) == len(TEXTS)
    assert len(place.workers()) >= 2
    # A raylet ends its actors a moment after their driver.
    wait_for(lambda: not any(map(alive, place.workers())), "end of all workers")
    twice = len(computed(place.notes)) - len(set(computed(place.notes)))
    assert twice <= 4, "more than the batch of the killed one was computed again"

    for log in place.notes.glob("*.log"):
        log.unlink()
    write_lines(place.corpus, [*TEXTS, *NEW])
    again = place.end(place.start(crew))
    assert (again["prefilled"], again["there"]) == (len(NEW), len(TEXTS))
    assert sorted(computed(place.notes)) == sorted(NEW), "exactly the new ones"
    tried = f"`kill -9` of a worker of `build` ({crew})"
    record(f"kills-build-{crew}", "kills", tried, 1, texts_lost=0, computed_again=twice)


@pytest.mark.parametrize("crew", ["processes", "ray"])
def test_a_text_that_kills_every_worker_is_left_out(place: Place, crew: str) -> None:
    found = place.end(place.start(crew, "chunk 50 ", times=1 << 20))
    assert found["names"] == ["line 51"]
    assert place.missing(TEXTS) == [TEXTS[50]]
    assert not place.torsos()


def test_a_build_that_is_killed_again_and_again_gets_done(place: Place) -> None:
    for round_ in range(1, 4):
        process = place.start("processes")
        wait_for(lambda count=round_: len(place.workers()) >= count, "worker")
        process.kill()
        process.communicate()
        wait_for(lambda: not any(map(alive, place.workers())), "end of the workers")
    assert place.missing(TEXTS) != []
    place.end(place.start("processes"))
    assert place.missing(TEXTS) == []
    assert not place.torsos()
    lines = computed(place.notes)
    assert len(lines) <= len(TEXTS) + 3 * 2 * 4, "a kill costs at most the batches in flight"
    again = len(lines) - len(TEXTS)
    record(
        "kills-build", "kills", "`kill -9` of all of `build`", 3, texts_lost=0, computed_again=again
    )
