"""Settings of builds whose workers note what they compute, wait, or die; they reach any process."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag import PromptTemplate
from kvcache_rag_server.corpus.worker import BuildSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache_rag import Engine

TEMPLATE = PromptTemplate(system="Read.\n", chunk_start="[", chunk_end="]")
DEADLINE = 120.0


def saved_model(folder: Path) -> str:
    """The small model and its tokenizer as a folder, with a template of their own."""
    from small import make_model, make_tokenizer

    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    names = ("system", "chunk_start", "chunk_end")
    values = {name: getattr(TEMPLATE, name) for name in names}
    (folder / "prompt_template.json").write_text(json.dumps(values))
    return str(folder)


class Trapped(BuildSettings):
    """A worker's settings with traps.

    Attributes:
        notes: Folder where texts are noted when they are computed, by process id.
        fatal: Whoever is to compute a text that holds this is killed; "" for nobody.
        times: How often at most, over all workers.
        slow: Seconds that each call takes at least.
        together: Workers that have to be there before the first goes on.
    """

    notes: str = ""
    fatal: str = ""
    times: int = 1 << 30
    slow: float = 0.0
    together: int = 1

    def open(self, **loaded: Any) -> Engine:
        engine = super().open(**loaded)
        add, folder = engine.add, Path(self.notes)

        def watched(texts: Sequence[str], **options: Any) -> Any:
            if self.fatal and any(self.fatal in text for text in texts):
                deaths = len(list(folder.glob("death-*")))
                if deaths < self.times:
                    (folder / f"death-{deaths}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            (folder / f"here-{os.getpid()}").touch()
            wait_for(lambda: len(list(folder.glob("here-*"))) >= self.together, "other worker")
            time.sleep(self.slow)
            keys = add(texts, **options)
            with (folder / f"{os.getpid()}.log").open("a") as log:
                log.writelines(json.dumps(text) + "\n" for text in texts)
            return keys

        engine.add = watched  # type: ignore[method-assign]  # a trap
        return engine


def computed(notes: Path) -> list[str]:
    """Texts that workers computed, in no order."""
    lines = [line for log in notes.glob("*.log") for line in log.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def wait_for(condition: Any, what: str) -> None:
    """Wait until something is so, and say what was not."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE:.0f} s"
        time.sleep(0.02)


def write_lines(path: Path, texts: Sequence[str]) -> str:
    """A corpus of JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not asked for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
