"""Two processes that prefetch into one directory compute every key once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.reliability import record

PATIENCE = 180.0
PROCESS = """
import asyncio, json, sys
sys.path.insert(0, {tests!r})
from serve_works import answer_of, make_work, reader
from kvcache_rag import DiskStore
from kvcache_rag_server.local import LocalBackend

async def main():
    store = DiskStore({folder!r})
    backend = LocalBackend(reader(store=store), prefetch="cpu", prefetch_after=0.0)
    put, kept = store.put, []
    store.put = lambda key, *rest: (kept.append([key.digest, key.start]), put(key, *rest))[1]
    assert await backend.ready()
    print("ready", flush=True)
    sys.stdin.readline()
    texts = ["The house number %d is painted blue." % number for number in range(12)]
    works = [
        make_work(n, chunks=tuple(texts[n % 9 : n % 9 + 4]), max_new_tokens=1) for n in range(18)
    ]
    await asyncio.gather(*(answer_of(backend, work) for work in works))
    await backend.close()
    print(json.dumps(kept), flush=True)

asyncio.run(main())
"""


def test_two_processes_on_one_directory_compute_every_key_once(tmp_path: Path) -> None:
    code = PROCESS.format(tests=str(Path(__file__).parent.parent), folder=str(tmp_path))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        outputs = [one.communicate("go\n", timeout=PATIENCE)[0] for one in go(running)]
    finally:
        for one in running:
            one.kill()
            one.wait()
    kept = Counter(digest for one in outputs for digest, start in json.loads(one) if start)
    assert len(kept) == 12
    assert set(kept.values()) == {1}
    tried = "requests to 2 processes that prefetch into one folder"
    record("processes-prefetch", "processes", tried, 36, chunks=len(kept), computed_twice=0)


def go(running: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """Let all begin before the first one is waited for."""
    for one in running[1:]:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    return running
