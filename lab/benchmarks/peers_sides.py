"""One side of the peers' benchmark in a process of its own: ours, stock transformers or KVBoost.

    python -m benchmarks.peers_sides ours-int8 --threads 1 --folder DIR --system TEXT

Reads one job per line (JSON, see `peers.Job`) and writes one result per line; the first line says
that the model is loaded, and facts about the side.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import tarfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch

from benchmarks.jobs import folder_bytes, result
from benchmarks.stock import cache_copy, prefilled, timed_generate
from benchmarks.when_not import articles
from kvcache_rag import DiskStore, Engine, FullRecompute, Reuse
from kvcache_rag.models.names import resolve
from kvcache_rag.models.pretrained import load
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag.prompt.template import PromptTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


PREFIX: Final = 128
CHUNK: Final = 256
QUERY: Final = 40
LONGEST: Final = 4096
QUESTIONS: Final = 24
_FILLERS: Final = ("and", "so", "on", "as", "it", "is")
_SYSTEM: Final = """Answer the question using only the documents below. If they do not contain the
answer, say that you do not know. Every document stands by itself, and their order says nothing
about what they are worth. Where two documents disagree, name both and say where they differ. Keep
names, numbers and years as they are written there. Do not add what you remember from elsewhere, and
do not repeat the question. Write in full sentences, in the language of the question, and begin with
the answer itself. A short answer is better than a long one, but leave out nothing that was asked
for, in whatever words it was asked."""
_ASKED: Final = (
    "What do the documents say about the year in which this began, and who was there to see it?",
    "Which of the places that the documents name is the oldest one, and how do they know of it?",
    "Who is said to have changed most of what these documents describe, and what did it cost them?",
    "How many people, ships, houses or years are counted in the documents, and which are guesses?",
)


@dataclass(frozen=True)
class Material:
    """What prompts are made of.

    Attributes:
        system: The template's instruction.
        prefix: Ids of everything before the first chunk.
        texts: Of the chunks.
        chunks: Ids of each chunk in its wrapper.
        questions: As they are asked.
        queries: Ids of everything behind the chunks, per question.
    """

    system: str
    prefix: tuple[int, ...]
    texts: tuple[str, ...]
    chunks: tuple[tuple[int, ...], ...]
    questions: tuple[str, ...]
    queries: tuple[tuple[int, ...], ...]

    def prompt(self, context: int, order: int, question: int) -> dict[str, Any]:
        """One prompt, as text and as ids.

        Args:
            context: Tokens of its chunks.
            order: Which of their orders, 0 for the first one.
            question: Which question.
        """
        chosen = order_of(context // CHUNK, order)
        return {
            "texts": [self.texts[index] for index in chosen],
            "question": self.questions[question],
            "prefix": list(self.prefix),
            "context": [*self.prefix, *(token for one in chosen for token in self.chunks[one])],
            "query": list(self.queries[question]),
        }


def order_of(chunks: int, order: int) -> list[int]:
    """Numbers of the chunks in an order: 0 is their own one, the others begin with another chunk.

    Orders next to each other never begin alike, so that what they share is the instruction alone.
    """
    if order == 0 or chunks < 2:
        return list(range(chunks))
    first = 1 + (order - 1) % (chunks - 1)
    rest = [index for index in range(chunks) if index != first]
    random.Random(1000 * chunks + order).shuffle(rest)
    return [first, *rest]


def fitted(count: Callable[[str], int], words: Sequence[str], tokens: int) -> str:
    """The first words, and fillers, as a text of exactly so many tokens.

    Args:
        count: Tokens of a text.
        words: Enough of them.
        tokens: How many are wanted.

    Raises:
        ValueError: If no such text was found.
    """
    low, high = 0, len(words)
    while low < high:  # the most words that fit
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if count(" ".join(words[:middle])) <= tokens else (low, middle - 1)
        )
    for kept in range(low, max(low - 8, 0), -1):
        filling = words[:kept]
        for filler in islice(cycle(_FILLERS), tokens):
            found = count(" ".join(filling))
            if found >= tokens:
                break
            filling = [*filling, filler]
        if count(" ".join(filling)) == tokens:
            return " ".join(filling)
    raise ValueError(f"no text of {tokens} tokens was found")


def template_of(system: str) -> PromptTemplate:
    """The template of all sides."""
    return PromptTemplate(system=system)


def material(tokenizer: Any, longest: int = LONGEST) -> Material:
    """Everything that is asked, for contexts up to `longest` tokens of chunks."""

    def prefix_tokens(text: str) -> int:
        return len(PromptRenderer(template_of(f"{text}\n\n"), tokenizer).prefix_ids)

    system = fitted(prefix_tokens, _SYSTEM.split(), PREFIX) + "\n\n"
    renderer = PromptRenderer(template_of(system), tokenizer)
    texts, words = [], " ".join(articles()).split()
    for _ in range(longest // CHUNK):
        text = fitted(lambda text: len(renderer.chunk_ids(text)), words[: 2 * CHUNK], CHUNK)
        texts.append(text)
        words = words[len(text.split()) :]
    questions = []
    for number in range(QUESTIONS):
        asked = f"{_ASKED[number % len(_ASKED)]} Think of document {number % 9 + 1} first."
        words_of = [*asked.split(), *_FILLERS[: number % len(_FILLERS)]]
        questions.append(fitted(lambda text: len(renderer.query_ids(text)), words_of, QUERY))
    return Material(
        system,
        renderer.prefix_ids,
        tuple(texts),
        tuple(map(renderer.chunk_ids, texts)),
        tuple(questions),
        tuple(map(renderer.query_ids, questions)),
    )


MODEL: Final = "smollm2"
# Tokens that KVBoost keeps together; its default.
BLOCK: Final = 128


class Handler(Protocol):
    """One side."""

    def facts(self) -> dict[str, Any]:
        """What is to be known about it, measured once."""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt, in the state of the cache that its kind wants."""


class Ours:
    """This project, over files in the page cache."""

    def __init__(self, weight_format: str, folder: Path, system: str) -> None:
        """Load the model with its weights in a form."""
        self._folder = folder
        self.engine = Engine.from_pretrained(
            MODEL,
            adapter="none",
            store=DiskStore(folder),
            template=template_of(system),
            device="cpu",
            weight_format=cast("Any", weight_format),
        )
        # Answers have the length that was asked for, on every side.
        self.engine.model.generation_config.eos_token_id = None

    def facts(self) -> dict[str, Any]:
        """Bytes per token that a stored chunk takes, in its file and in memory."""
        # The store's own files come with a first chunk; what a second one adds is measured.
        texts = [" ".join(map(str, range(start, start + CHUNK // 2))) for start in (0, CHUNK)]
        first = self.engine.add(texts[:1])
        before = folder_bytes(self._folder)
        key = self.engine.add(texts[1:])[0]
        size = folder_bytes(self._folder) - before
        for one in (*first, key):
            self.engine.store.delete(one)
        return {
            "disk_bytes_per_token": size / key.tokens,
            "memory_bytes_per_token": self.engine.nbytes(key) / key.tokens,
        }

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The chunks are unknown (`cold`), not used (`full`), or known in whatever order."""
        engine, texts, question = self.engine, job["texts"], job["question"]
        ids = engine.tokenize(question, texts)
        if [*ids.context, *ids.query] != [*job["context"], *job["query"]]:
            raise RuntimeError("the prompt is not the one that the others are asked")
        if job["kind"] == "cold":
            for key in engine.keys(texts):
                engine.store.delete(key)
        elif job["kind"] != "full":
            engine.add(texts)
        policy = FullRecompute() if job["kind"] == "full" else Reuse()
        gc.collect()
        began = time.perf_counter()
        answer = engine.generate(question, texts, policy=policy, max_new_tokens=job["new"])
        total, cost = time.perf_counter() - began, answer.metrics
        if job["kind"] not in ("cold", "full") and cost.prefilled_tokens:
            raise RuntimeError("chunks were prefilled that should have been read")
        # The instruction's keys and values are in memory, unless everything is computed.
        reused = cost.reused_tokens + (cost.prefix_tokens if cost.rotation else 0)
        found = result(cost.ttft, total, answer.token_ids, reused)
        return {**found, "rotation": cost.rotation}


class Stock:
    """transformers by itself; what it reuses is its own cache of an equal beginning."""

    def __init__(self) -> None:
        """Load the model."""
        self.model = stock_model()
        self._held: Any = None
        self._context: list[int] = []

    def facts(self) -> dict[str, Any]:
        """Bytes per token of a `DynamicCache`."""
        cache = prefilled(self.model, torch.arange(CHUNK)[None])
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return {"memory_bytes_per_token": size / CHUNK}

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Nothing is known (`cold`), the context (`prefix`), or the instruction (`reorder`)."""
        context, kind = job["context"], job["kind"]
        ids = torch.tensor([[*context, *job["query"]]])
        if kind in ("prefix", "long") and self._context != context:
            self._held, self._context = prefilled(self.model, ids[:, : len(context)]), context
        if kind == "reorder" and self._held is None:
            self._held = prefilled(self.model, ids[:, :PREFIX])
        gc.collect()
        began = time.perf_counter()
        cache, reused = None, 0
        if kind == "reorder":
            cache, reused = cache_copy(self._held, PREFIX), PREFIX
        elif kind != "cold":
            _crop(self._held, len(context))
            cache, reused = self._held, len(context)
        sample = timed_generate(self.model, ids, job["new"], cache, began)
        total = sample.ttft + sample.step * (len(sample.tokens) - 1)
        self._held, self._context = sample.cache, context
        _crop(self._held, len(context))
        return result(sample.ttft, total, sample.tokens, reused)


class _Ids:
    """Stands for a tokenizer: prompts are ids written as text, and nothing ends an answer."""

    eos_token_id: Final = -1
    pad_token_id: Final = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        """The ids that a text spells; punctuation that KVBoost asks for is none of ours."""
        return [int(word) for word in text.split() if word.isdigit()]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The other way round."""
        return " ".join(map(str, ids))


class KVBoost:
    """KVBoost's engine as it is by default, around the model of stock transformers."""

    def __init__(self) -> None:
        """Load model and engine."""
        # In an environment of its own, which mypy does not see.
        import kvboost  # type: ignore[import-not-found,unused-ignore]

        self.model = stock_model()
        self.engine = kvboost.KVBoost(
            self.model, _Ids(), max_cache_bytes=2**30, chunk_size=BLOCK, device="cpu"
        )
        self._warm: list[int] = []

    def facts(self) -> dict[str, Any]:
        """Bytes per token that it keeps."""
        self.engine.warm(_Ids().decode(range(CHUNK)))
        manager = self.engine.cache_manager
        size = manager._bytes_used
        self.engine.reset_cache()
        return {"memory_bytes_per_token": size / CHUNK}

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Nothing is known (`cold`), the context, or the same chunks in their first order."""
        kind, context = job["kind"], job["context"]
        known = {"cold": [], "reorder": job["before"]}.get(kind, context)
        if kind == "cold" or self._warm != known:
            self.engine.reset_cache()
            if known:
                self.engine.warm(_Ids().decode(known))
        self._warm = []
        times: list[float] = []
        gc.collect()
        began = time.perf_counter()
        tokens: list[int] = []

        def on_token(token: int) -> None:
            times.append(time.perf_counter() - began)
            tokens.append(token)

        answer = self.engine.generate(
            _Ids().decode([*context, *job["query"]]),
            max_new_tokens=job["new"],
            cacheable_prefix_len=len(context),
            on_token=on_token,
        )
        returned = time.perf_counter() - began
        if kind != "reorder":
            self._warm = context
        # What it is timed to is the last token: it keeps the prompt's blocks only then.
        found = result(times[0], times[-1], tokens, answer.cached_tokens)
        return {**found, "kept": returned - times[-1]}


def _crop(cache: Any, tokens: int) -> None:
    """Keep the first tokens of a stock cache; a newer transformers counts what is taken away."""
    excess = cache.get_seq_length() - tokens
    if excess:
        cache.crop(-excess)


def stock_model() -> Any:
    """The model as transformers has it, whose answers end at their length alone."""
    model, _, _ = load(MODEL, dtype="auto", device="cpu", options={}, weight_format="plain")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def handler(side: str, folder: Path, system: str) -> Handler:
    """A side by its name."""
    kind, _, form = side.partition("-")
    if kind == "ours":
        return Ours(form, folder, system)
    return Stock() if kind == "stock" else KVBoost()


def answered(side: Handler, job: dict[str, Any]) -> dict[str, Any]:
    """What a side says; a part that a peer cannot do is a finding, too."""
    try:
        return side.ask(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main(words: Sequence[str] | None = None) -> int:
    """Answer jobs until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("side")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--system", required=True)
    parsed = parser.parse_args(words)
    # Libraries may print; the lines of the answers have the output to themselves.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(parsed.threads)

    def say(line: dict[str, Any]) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()

    try:
        side = handler(parsed.side, parsed.folder, parsed.system)
        say({"facts": side.facts()})
    except Exception as error:  # a peer that does not run here is a finding
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    for line in sys.stdin:
        say(answered(side, json.loads(line)))
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
