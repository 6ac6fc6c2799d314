"""kill -9 in the middle of `add`: what was stored stays, and nothing is computed twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.reliability import record

CHUNKS = 120
KILLS = 8
WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from zoo import byte_tokenizer, build
from kvcache_rag import DiskStore, Engine, PromptTemplate
import kvcache_rag.prefill as prefill
prefill.BATCH_TOKENS = 512

engine = Engine(build("qwen2"), byte_tokenizer(), store=DiskStore(sys.argv[2]),
                template=PromptTemplate(system="Read.", chunk_start="", chunk_end=""))
compute = engine._bound.prefiller.compute

def counted(ids):
    chunks = compute(ids)
    with open(sys.argv[3], "a") as log:
        for one in ids:
            log.write(engine._bound.prefiller.key(one).digest + "\\n")
    return chunks

engine._bound.prefiller.compute = counted
texts = [f"chunk number {i}: " + "abcdefgh " * (4 + i % 9) for i in range(int(sys.argv[4]))]
print("started", flush=True)
engine.add(texts)
answer = engine.generate("Who?", texts[:5], max_new_tokens=4)
print(engine.store.stats().corrupt, answer.metrics.misses, answer.token_ids, flush=True)
"""


def start(store: Path, log: Path) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", WORKER, tests, str(store), str(log), str(CHUNKS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "started"
    return process


def computed_in(log: Path) -> int:
    return len(set(log.read_text("ascii").split())) if log.exists() else 0


def test_a_killed_add_goes_on_where_it_was(tmp_path: Path) -> None:
    store, log = tmp_path / "kv", tmp_path / "computed"
    moments = random.Random(0)
    progress = [0]
    for _ in range(KILLS):
        wanted = progress[-1] + moments.randrange(CHUNKS // KILLS)
        process = start(store, log)
        while computed_in(log) < wanted and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        progress.append(computed_in(log))
    assert any(0 < count < CHUNKS for count in progress), progress
    process = start(store, log)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.startswith("0 0 "), output
    computed = log.read_text(encoding="ascii").split()
    assert len(set(computed)) == CHUNKS
    # A kill between computing a batch and storing it costs that batch, never more.
    largest_batch = 512 // len("chunk number 0: abcdefgh abcdefgh abcdefgh abcdefgh ")
    assert len(computed) <= CHUNKS + KILLS * largest_batch
    again = start(store, log)
    assert again.communicate(timeout=120)[0] == output, "the same files gave another answer"
    assert log.read_text(encoding="ascii").split() == computed, (
        "a complete store was computed again"
    )
    tried, twice = "`kill -9` of a process in `Engine.add`", len(computed) - CHUNKS
    seen = {"chunks lost": 0, "computed again": twice, "other answers": 0}
    record("kills-add", "kills", tried, KILLS, **seen)
