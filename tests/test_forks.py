"""A forked child has the locks of threads that it does not have, and answers all the same."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forks
import pytest

import kvcache_rag
from kvcache_rag.forks import new_condition, new_lock, new_rlock, new_slots

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing forks there")

IN_THE_MIDDLE = """
import faulthandler, os, select, sys, threading
faulthandler.dump_traceback_later(100, exit=True)
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from laws import QUESTION, TEMPLATE, TEXTS
from zoo import build, byte_tokenizer
from kvcache_rag import DiskStore, Engine, MemoryStore, Reuse, TieredStore

model = build("qwen2")
model.set_attn_implementation({attention!r})
store = TieredStore(MemoryStore(), DiskStore("kv"))
engine = Engine(model, byte_tokenizer(), template=TEMPLATE, store=store, policy=Reuse(),
                rotation={rotation!r})
middle, goes_on = threading.Event(), threading.Event()

def ask(other=None, **options):
    if other == "stream":
        return "".join(engine.stream(QUESTION, TEXTS, max_new_tokens=8, **options))
    return engine.generate(QUESTION, TEXTS, max_new_tokens=8, **options).text

def held(*arguments):
    middle.set()
    goes_on.wait(90)
    return arguments[-1]

expected = ask()
work = {{
    "a question": lambda: ask(emit=held),
    "a question by generate()": lambda: ask(
        repetition_penalty=9.0, no_repeat_ngram_size=1, logits_processor=[held]),
    "an ingestion": lambda: engine.add(["Another text of some length."] * 3),
}}[{work!r}]
if {work!r} == "an ingestion":
    model.model.layers[0].register_forward_hook(lambda module, given, output: held(output))
asking = threading.Thread(target=work)
asking.start()
assert middle.wait(60)
for _ in range(2):  # and a child of the child
    reading, writing = os.pipe()
    if child := os.fork():
        ready, _, _ = select.select([reading], [], [], 60)
        found = os.read(reading, 1000).decode() if ready else "nothing"
        os.kill(child, 9)
        os.waitpid(child, 0)
        break
    goes_on.set()
    if {work!r} == "an ingestion":
        model.model.layers[0]._forward_hooks.clear()
    said = ask() + "|" + ask("stream") + "|" + str(engine.add(["More."])[0].tokens)
    said += "|" + model.config._attn_implementation + "|" + str(model.training)
    os.write(writing, said.encode())
    reading = None
if reading is None:
    os._exit(0)
goes_on.set()
asking.join()
tokens = engine.add(["More."])[0].tokens
assert found == f"{{expected}}|{{expected}}|{{tokens}}|{attention}|False", (found, expected)
"""


@pytest.mark.parametrize(
    ("work", "rotation", "attention"),
    [
        ("a question", "copied", "sdpa"),
        ("a question", "deferred", "eager"),
        ("a question by generate()", "copied", "sdpa"),
        ("an ingestion", "copied", "sdpa"),
    ],
)
def test_a_child_forked_in_the_middle_answers_as_its_parent(
    work: str, rotation: str, attention: str, tmp_path: Path
) -> None:
    code = IN_THE_MIDDLE.format(
        tests=str(Path(__file__).parent), work=work, rotation=rotation, attention=attention
    )
    status, output, errors = forks.run(code, tmp_path)
    assert status == 0, f"{output}\n{errors}"


CHILD = """
import os, threading
from kvcache_rag import forks
from kvcache_rag.errors import InvalidInputError

made = [forks.new_lock(), forks.new_rlock(), forks.new_condition(), forks.new_slots(1)]
mine = forks.new_rlock()

def hold():
    for one in made:
        one.acquire()
    ready.set()
    threading.Event().wait()

ready = threading.Event()
threading.Thread(target=hold, daemon=True).start()
ready.wait()
with mine:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    free = all(one.acquire(timeout=5) for one in made)
os._exit(0 if free else 3)
"""


def test_locks_of_other_threads_are_free_in_a_child_and_its_own_are_held(tmp_path: Path) -> None:
    status, output, errors = forks.run(CHILD, tmp_path)
    assert status == 0, f"{output}\n{errors}"


@pytest.mark.parametrize("make", [new_lock, new_rlock, new_condition, lambda: new_slots(1)])
def test_they_are_those_of_threads(make: Callable[[], Any]) -> None:
    stock = (threading.Lock, threading.RLock, threading.Condition, threading.BoundedSemaphore)
    assert type(make()) in {type(one()) for one in stock}


def test_no_lock_is_made_elsewhere() -> None:
    made = re.compile(r"threading\.(R?Lock|Condition|(Bounded)?Semaphore)\(|register_at_fork\(")
    core = Path(kvcache_rag.__file__).parent
    found = [
        path.name
        for path in sorted(core.rglob("*.py"))
        if path != core / "forks.py" and made.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, "make it by kvcache_rag.forks, or a forked child may wait for it for ever"
