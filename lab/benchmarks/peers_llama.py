"""llama.cpp on this machine: compiled here, its weights made of ours, asked over HTTP.

The sources are those in llama-cpp-python's sdist, so that a package index is all that is needed.
What is in the work folder already is not made again.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import tarfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.peers_prompts import CHUNK, PREFIX
from benchmarks.peers_worker import result
from kvcache_rag.models.pretrained import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

WEIGHTS: Final = ("BF16", "F16", "Q8_0", "Q4_1")
# Tokens that a run of equal ones must have before it is shifted: `--cache-reuse` of the server.
SHORTEST_RUN: Final = 64
WINDOW: Final = 5120
FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
)
_STARTING: Final = 120.0  # seconds
_ASKING: Final = 600.0


@dataclass(frozen=True)
class Llama:
    """Programs and weights of llama.cpp.

    Attributes:
        programs: Folder of `llama-server` and `llama-quantize`.
        weights: A file per name in `WEIGHTS`.
        version: Of the sources, as the server says it, and of the sdist.
    """

    programs: Path
    weights: dict[str, Path]
    version: str


def prepared(work: Path, programs: Path | None) -> Llama:
    """llama.cpp, fetched, compiled and its weights converted, as far as that is to be done.

    Args:
        work: Folder for sources, programs and weights.
        programs: A folder that has the programs already, or None.

    Raises:
        RuntimeError: If a program fails.
        FileNotFoundError: If one is not there.
    """
    found = programs or work / "build" / "bin"
    if programs is None and not (found / "llama-server").is_file():
        _compile(_sources(work), work / "build")
    original, weights = Path(resolve("smollm2")), {}
    for name in WEIGHTS:
        weights[name] = original if name == "Q4_1" else work / f"smollm2-{name}.gguf"
        if not weights[name].is_file():
            print(f"llama.cpp: weights in {name}", flush=True)
            fresh = weights[name].with_suffix(".part")
            program = str(found / "llama-quantize")
            _run([program, "--allow-requantize", str(original), str(fresh), name])
            fresh.replace(weights[name])
    said = subprocess.run([found / "llama-server", "--version"], capture_output=True, text=True)
    build = re.search(r"version: *(.+)", said.stdout + said.stderr)
    sdists = sorted(folder.name for folder in work.glob("llama_cpp_python-*") if folder.is_dir())
    names = ["llama.cpp", *([build.group(1).strip()] if build else []), *sdists[-1:]]
    return Llama(found, weights, " ".join(names))


def _sources(work: Path) -> Path:
    """The folder of llama.cpp in llama-cpp-python's sdist."""
    folders = sorted(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not folders:
        print("llama.cpp: fetching the sources", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
        _run([*pip, "--no-deps", "--no-binary", ":all:", "llama-cpp-python", "-d", str(work)])
        archive = sorted(work.glob("llama_cpp_python-*.tar.gz"))[-1]
        with tarfile.open(archive) as opened:
            opened.extractall(work, filter="data")
        folders = sorted(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    return folders[-1]


def _compile(sources: Path, build: Path) -> None:
    print("llama.cpp: compiling (about 8 minutes on two cores)", flush=True)
    _run(["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(build), *FLAGS])
    _run(["cmake", "--build", str(build), "--target", "llama-server", "llama-quantize"])


def _run(command: Sequence[str]) -> None:
    """Run a program; what it says is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        raise RuntimeError(f"{command[0]} failed with exit status {done.returncode}")


class LlamaSide:
    """A `llama-server` with one slot, whose cache is the last prompt."""

    def __init__(self, llama: Llama, weights: str, threads: int, flash: str, work: Path) -> None:
        """Start the server on a free port of this machine.

        Args:
            llama: Programs and weights.
            weights: A name in `WEIGHTS`.
            threads: For prompts and for decoding.
            flash: "on" or "off".
            work: For the log, and for the slot when it is saved.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._slots = work / "slots"
        self._slots.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [llama.programs / "llama-server", "-m", llama.weights[weights]]
        command += ["-t", str(threads), "-c", str(WINDOW), "-np", "1", "-fa", flash, "--no-ui"]
        # Another prompt's cache is not kept beside the slot: memory is that of one prompt.
        command += ["--cache-ram", "0", "--slot-save-path", self._slots]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        with (work / f"llama-{weights}-{threads}.log").open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.pid = self._process.pid
        self._weights, self._flash = llama.weights[weights], flash
        self._context: list[int] = []
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + _STARTING
        while time.monotonic() < until and self._process.poll() is None:
            # At first it does not listen, and then it says that it is loading.
            with suppress(OSError, http.client.HTTPException, ValueError):
                if self._call("GET", "/health", None).get("status") == "ok":
                    return
            time.sleep(0.2)
        raise RuntimeError("llama-server did not start; its log is in the work folder")

    def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        # A connection each: the server ends those that are idle for a while.
        with closing(
            http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ASKING)
        ) as connection:
            said = None if body is None else json.dumps(body)
            connection.request(method, path, said, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        if not isinstance(answer, dict):
            raise ValueError("llama-server gave no JSON object")
        if "error" in answer and path != "/health":
            raise RuntimeError(str(answer["error"]))
        return answer

    def _complete(self, prompt: list[int], new: int, *, reuse: bool, run: int) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n_predict": new,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": reuse,
            "n_cache_reuse": run,
        }
        return self._call("POST", "/completion", body)

    def facts(self) -> dict[str, Any]:
        """Bytes per token of the cache, as the server writes it to a file."""
        self._complete([7] * CHUNK, 1, reuse=False, run=0)
        saved = self._call("POST", "/slots/0?action=save", {"filename": "slot.bin"})
        (self._slots / "slot.bin").unlink(missing_ok=True)
        size = saved["n_written"] / saved["n_saved"]
        return {
            "disk_bytes_per_token": size,
            "memory_bytes_per_token": size,
            "weights_bytes": self._weights.stat().st_size,
            "flash_attention": self._flash,
        }

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Nothing is used (`cold`); the last prompt's beginning; with `shift`, its runs as well."""
        kind, context = job["kind"], job["context"]
        # What the slot has to hold: any other order of these chunks does for `reorder`.
        before = {"prefix": context, "long": context, "shift": job["before"]}.get(kind)
        if kind == "reorder" and self._context[:PREFIX] != context[:PREFIX]:
            before = job["before"]
        if before is not None and self._context != before:
            self._complete([*before, *job["query"]], 1, reuse=True, run=0)
        run = SHORTEST_RUN if kind == "shift" else 0
        began = time.perf_counter()
        answer = self._complete(
            [*context, *job["query"]], job["new"], reuse=kind != "cold", run=run
        )
        total = time.perf_counter() - began
        self._context = context
        timings = answer["timings"]
        # The server's clock of decoding starts when the first token is known; HTTP is in the rest.
        ttft = total - timings["predicted_ms"] / 1e3
        found = result(ttft, total, answer["tokens"], timings["cache_n"])
        return {**found, "server_ttft": timings["prompt_ms"] / 1e3}

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
