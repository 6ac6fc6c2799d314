"""Processes forked from one that has imported the package: for each, five seconds of imports less.

For what needs a process of its own and says nothing of how one begins or ends: `atexit` is not run.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

IMPORTS = (
    "kvcache_rag.engine",
    "kvcache_rag_server.corpus.worker",
    "kvcache_rag.models.pretrained",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
PATIENCE = 300.0
_CONTEXT = multiprocessing.get_context("forkserver")  # before anybody replaces `get_context`
_CONTEXT.set_forkserver_preload(list(IMPORTS))


def forkserver(_: str = "") -> Any:
    """In the place of `multiprocessing.get_context`; processes have the first one's environment."""
    return _CONTEXT


def run(code: str, folder: Path) -> tuple[int, str, str]:
    """Run a script in a folder; its exit status, what it printed, and its errors."""
    pipes = [folder.with_name(f"{folder.name}.{name}") for name in ("stdout", "stderr")]
    process = _CONTEXT.Process(target=_script, args=(code, folder, *pipes))
    process.start()
    process.join(PATIENCE)
    status, output, errors = process.exitcode, *(pipe.read_text() for pipe in pipes)
    if status is None:
        process.kill()
        raise TimeoutError(f"it runs on after {PATIENCE:.0f} s\n{output}\n{errors}")
    return status, output, errors


def _script(code: str, folder: Path, *pipes: Path) -> None:
    os.chdir(folder)
    for number, pipe in enumerate(pipes, start=1):
        os.dup2(os.open(pipe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
