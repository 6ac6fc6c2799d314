"""What `benchmarks.serving` drives: a model and documents, requests, servers, and a client.

The model has random weights in a shape of our own: small enough for one thread of a CPU, and with
so many tokens of documents before a question that prefilling them takes most of an answer, as it
does on a GPU with a model of its size.  The client is one process, one thread, plain sockets: a
library would cost more processor time than the rest of it, on a machine whose cores the servers
need.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray


def read_rows(file: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; each has to have the fields `names`.

    Raises:
        ValueError: If the file is missing or a line is not of that form.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}; the data are not part of the project")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not set(names) <= row.keys():
            raise ValueError(f"{file}, line {number} lacks one of {', '.join(names)}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} holds no line")
    return rows


Found = list["NDArray[np.int64]"]
"""Per question the documents retrieved, best first; fewer than asked for where nothing matches."""


ZIPF: Final = 1.0
STREAMS: Final = {"zipf": ZIPF, "uniform": 0.0}
"""Exponents of the popularity of documents, by the name of a stream; both are synthetic."""


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        at: Seconds from the start of the stream to its arrival.
        documents: Which documents, best first, all different.
        question: A text of its own.
    """

    at: float
    documents: tuple[int, ...]
    question: str


def draw_requests(
    stream: str, count: int, rate: float, documents: int, top_k: int, seed: int = 0
) -> list[Asked]:
    """Open-loop arrivals (Poisson) of questions over documents of given popularity.

    The documents asked for do not depend on the rate, nor do the arrivals but for its scale; fewer
    requests are the first ones of more.

    Args:
        stream: A name of `STREAMS`.
        count: How many.
        rate: Per second.
        documents: How many there are; which of them are popular is drawn.
        top_k: Of each request.
        seed: Of everything.

    Raises:
        ValueError: If there are fewer documents than a request needs.
    """
    if documents < top_k:
        raise ValueError(f"{documents} documents are too few for {top_k} per request")
    order, picks, gaps = (np.random.default_rng([seed, which]) for which in range(3))
    ranked = order.permutation(documents)
    weights = np.arange(1, documents + 1, dtype=np.float64) ** -STREAMS[stream]
    weights /= weights.sum()
    asked: list[Asked] = []
    at = 0.0
    for number in range(count):
        at += float(gaps.exponential()) / rate
        ranks = picks.choice(documents, top_k, replace=False, p=weights)
        found = tuple(ranked[ranks].tolist())
        asked.append(Asked(at, found, question_of(number)))
    return asked


def question_of(number: int) -> str:
    """A question of some twenty tokens, different for every request."""
    return f"Request {number:05d}: what do these documents say, and which of them says it first?"


VOCABULARY: Final = 4096
LEAST: Final = 1200  # characters of a document that is joined from paragraphs
_SYLLABLES: Final = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class Shape:
    """Of a Qwen2 model.

    Attributes:
        hidden: Width.
        inner: Width of the feed-forward layers.
        layers: How many.
        heads: Of queries, 64 wide.
        kv_heads: Of keys and values.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


MAIN_SHAPE: Final = Shape(512, 1792, 4, 8, 2)
TINY_SHAPE: Final = Shape(128, 256, 1, 2, 1)  # of `--quick`


def save_model(shape: Shape, documents: Sequence[str], folder: Path) -> PreTrainedTokenizerFast:
    """Write a model and a tokenizer trained on the documents, as `from_pretrained` reads them.

    There is no end-of-sequence token: every answer is as long as it may be.

    Returns:
        The tokenizer.
    """
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = train_tokenizer(documents)
    tokenizer.save_pretrained(folder)
    return tokenizer


def train_tokenizer(documents: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte pairs, as many as the vocabulary holds, of which every text is made."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def generated(count: int, characters: int = LEAST, seed: int = 0) -> list[str]:
    """Documents of words that mean nothing, common ones and rare ones as in a language."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 5, 3000)
    lexicon = ["".join(generator.choice(_SYLLABLES, size)) for size in sizes.tolist()]
    weights = 1 / np.arange(1, len(lexicon) + 1)
    documents = []
    for _ in range(count):
        picks = generator.choice(len(lexicon), characters // 2, p=weights / weights.sum())
        words = " ".join(lexicon[pick] for pick in picks)
        documents.append(words[: words.index(" ", characters)] + ".")
    return documents


def joined(file: Path, characters: int = LEAST) -> list[str]:
    """Documents of at least so many characters: consecutive paragraphs of one title, joined.

    Raises:
        ValueError: If the file cannot be read (see `read_rows`), or holds no document that long.
    """
    documents: list[str] = []
    held: list[str] = []
    title = ""
    for row in read_rows(file, ("text",)):
        if row.get("title", "") != title:
            held, title = [], row.get("title", "")
        held.append(row["text"])
        if sum(map(len, held)) >= characters:
            documents.append("\n".join(held))
            held = []
    if not documents:
        raise ValueError(f"{file} holds no {characters} characters under one title")
    return documents


NO_CACHE, OWN, SHARED, AHEAD = "no cache", "per instance", "shared", "shared + prefetch"
ARMS: Final = (NO_CACHE, OWN, SHARED, AHEAD)
HOST: Final = "127.0.0.1"
PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True)
class Outcome:
    """What became of a request.  Times are seconds since it arrived, in the queue or not.

    Attributes:
        number: Its place in the stream.
        instance: Which one answered.
        status: HTTP status; 0 where the connection broke.
        sent: When it was handed to its instance.
        first: When the first text of the answer came; nan without an answer.
        total: When the answer was complete; nan without one.
        waited: Seconds in the instance's queue, as it says; nan where it does not.
        prompt_tokens: Of the prompt, as the server counts them.
        cached_tokens: Of these, reused; chunks that were made while it waited are.
        answer_tokens: Of the answer.
        hits: Chunks that were cached.
        misses: Chunks that were not.
        prefetched: Whether chunks were computed or loaded while it waited.
        batch: Requests answered together with it, itself included.
        message: What the server said, where it failed.
    """

    number: int
    instance: int
    status: int
    sent: float
    first: float = float("nan")
    total: float = float("nan")
    waited: float = float("nan")
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    hits: int = 0
    misses: int = 0
    prefetched: bool = False
    batch: int = 1
    message: str = ""

    @property
    def answered(self) -> bool:
        """Whether there is a whole answer."""
        return self.status == 200 and self.total == self.total


class Dispatcher:
    """Gives a request to the instance with the fewest requests; of equals, to the next in turn."""

    def __init__(self, instances: int) -> None:
        """No instance has any."""
        self.held = [0] * instances
        self._last = instances - 1

    def take(self) -> int:
        """The instance for the next request, which has one more from now on."""
        turn = [(self._last + 1 + step) % len(self.held) for step in range(len(self.held))]
        self._last = min(turn, key=lambda one: self.held[one])
        self.held[self._last] += 1
        return self._last

    def give_back(self, instance: int) -> None:
        """One of its requests is done."""
        self.held[instance] -= 1


@dataclass(frozen=True)
class Load:
    """Requests and how they are asked.

    Attributes:
        asked: In the order of their arrival.
        documents: Texts that they refer to.
        answer_tokens: Of every answer.
        policy: What is reused, as `policy_by_name` reads it.
        model: Its name at the servers.
    """

    asked: Sequence[Asked]
    documents: Sequence[str]
    answer_tokens: int
    policy: str
    model: str

    def body(self, asked: Asked) -> bytes:
        """The request as an OpenAI client would send it."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked.question}],
            "documents": [self.documents[index] for index in asked.documents],
            "max_tokens": self.answer_tokens,
            "kvcache": {"policy": self.policy},
        }
        return json.dumps(body).encode()


async def run_load(ports: Sequence[int], load: Load) -> list[Outcome]:
    """Send every request when it arrives, whatever became of those before; wait for all answers."""
    dispatcher = Dispatcher(len(ports))
    bodies = [load.body(asked) for asked in load.asked]
    started = time.perf_counter()

    async def one(number: int, asked: Asked) -> Outcome:
        due = started + asked.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        instance = dispatcher.take()
        try:
            outcome = await ask(ports[instance], bodies[number], due)
        finally:
            dispatcher.give_back(instance)
        return replace(outcome, number=number, instance=instance)

    return list(await asyncio.gather(*(one(*pair) for pair in enumerate(load.asked))))


async def ask(port: int, body: bytes, due: float) -> Outcome:
    """One request to one server.

    Args:
        port: On loopback.
        body: JSON.
        due: Moment of `time.perf_counter` from which its times are counted.
    """
    outcome = Outcome(-1, -1, 0, time.perf_counter() - due)
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError as error:
        return replace(outcome, message=str(error))
    try:
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return await _read(reader, outcome, due)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return replace(outcome, status=0, message=f"{type(error).__name__}: {error}")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, outcome: Outcome, due: float) -> Outcome:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = int(head.split(" ", 2)[1])
    outcome = replace(outcome, status=status)
    whole = await reader.read(-1)  # a body that ends with the connection
    if status != 200:
        return replace(outcome, message=whole.decode(errors="replace")[:300])
    now = time.perf_counter() - due
    answer = json.loads(whole)
    # The server says how long it went on behind the first token; all else came before.
    behind = answer["kvcache"]["total"] - answer["kvcache"]["ttft"]
    return replace(_costs(outcome, answer), first=now - behind, total=now)


def _costs(outcome: Outcome, answer: Mapping[str, Any]) -> Outcome:
    """The outcome with what an answer says about its cost."""
    usage, cost = answer.get("usage"), answer.get("kvcache")
    if usage:
        outcome = replace(
            outcome,
            prompt_tokens=usage["prompt_tokens"],
            answer_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )
    if cost:
        outcome = replace(
            outcome,
            waited=cost["queue_wait"],
            hits=sum(cost["hits"].values()),
            misses=cost["misses"],
            prefetched=cost["prefetched"],
            batch=cost["batch"],
        )
    return outcome


INSTANCES: Final = 2
REUSE, FULL = "reuse", "full"
_START: Final = 120.0  # seconds that a server may take until it answers
_STOP: Final = 20.0
# The queue is the measurement: nothing is turned away.
_WAITING: Final = 100_000
_PREFETCH_AFTER: Final = 0.05


@dataclass(frozen=True)
class Arm:
    """One way to serve.

    Attributes:
        name: One of `ARMS`.
        policy: Of every request.
        caches: What is cached where: "none", "own" (a folder per instance), "shared" (one for all).
        prefetch: Whether chunks of waiting requests are computed or loaded ahead.
    """

    name: str
    policy: str
    caches: Literal["none", "own", "shared"]
    prefetch: bool


WAYS: Final = {
    NO_CACHE: Arm(NO_CACHE, FULL, "none", prefetch=False),
    OWN: Arm(OWN, REUSE, "own", prefetch=False),
    SHARED: Arm(SHARED, REUSE, "shared", prefetch=False),
    AHEAD: Arm(AHEAD, REUSE, "shared", prefetch=True),
}


@dataclass(frozen=True)
class Place:
    """Where an arm runs.

    Attributes:
        model: Folder of model and tokenizer.
        work: Empty folder for the caches and the servers' logs.
        cache_bytes: Of all caches of the arm together.
        instances: Servers.
    """

    model: Path
    work: Path
    cache_bytes: int
    instances: int = INSTANCES

    def cache(self, arm: Arm, instance: int) -> tuple[Path, int] | None:
        """The folder of an instance's cache, and the most bytes that it may hold."""
        if arm.caches == "none":
            return None
        if arm.caches == "shared":
            return self.work / "store-0", self.cache_bytes
        return self.work / f"store-{instance}", self.cache_bytes // self.instances

    def held(self) -> int:
        """Bytes of the cached chunks on disk now."""
        total = 0
        for file in self.work.glob("store-*/**/*.safetensors"):
            with suppress(FileNotFoundError):  # evicted since
                total += file.stat().st_size
        return total


@dataclass(frozen=True)
class Instances:
    """Servers that run.

    Attributes:
        ports: On loopback.
        pids: Their processes.
    """

    ports: tuple[int, ...]
    pids: tuple[int, ...]

    def processor_seconds(self) -> float:
        """What all of them have used so far, nan where the system has no `/proc`."""
        ticks = 0
        for pid in self.pids:
            file = Path("/proc") / str(pid) / "stat"
            if not file.is_file():
                return float("nan")
            # Behind the name, which may hold anything: user and system time are fields 14 and 15.
            fields = file.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def command_of(arm: Arm, place: Place, instance: int, port: int) -> list[str]:
    """The command line of one instance."""
    words = ["-m", "kvcache_rag.cli", "serve", str(place.model), "--host", HOST]
    words += ["--port", str(port), "--max-waiting", str(_WAITING)]
    words += ["--max-concurrency", str(_WAITING), "--max-total-concurrency", str(_WAITING)]
    words += ["--memory-bytes", "1"]  # one tier, the folder, so that bytes are equal
    cache = place.cache(arm, instance)
    if cache is not None:
        words += ["--kv-dir", str(cache[0]), "--kv-max-bytes", str(cache[1])]
    words += ["--prefetch", "same" if arm.prefetch else "off"]
    if arm.prefetch:
        words += ["--prefetch-after", str(_PREFETCH_AFTER)]
    return [sys.executable, *words]


@contextmanager
def running(arm: Arm, place: Place) -> Iterator[Instances]:
    """Start the instances of an arm, give them when all are ready, stop them at the end.

    Raises:
        RuntimeError: If one of them ends, or is not ready in time; with the end of its log.
    """
    with ExitStack() as stack:
        started = []
        for instance in range(place.instances):
            port = _free_port()
            log = place.work / f"instance-{instance}.log"
            command = command_of(arm, place, instance, port)
            started.append((stack.enter_context(_process(command, log)), port, log))
        for process, port, log in started:
            _await_ready(process, port, log)
        ports = tuple(port for _, port, _ in started)
        yield Instances(ports, tuple(process.pid for process, *_ in started))
        for process, *_ in started:  # all at once, then each is waited for
            process.send_signal(signal.SIGTERM)


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    settings = {**dict.fromkeys(threads, "1"), "HF_HUB_OFFLINE": "1"}
    settings["TOKENIZERS_PARALLELISM"] = "false"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **settings},
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        port: int = one.getsockname()[1]
    return port


def _await_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"a server ended with code {process.returncode}: {_end_of(log)}")
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(HOST, port, timeout=5)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            finally:
                connection.close()
        time.sleep(0.1)
    raise RuntimeError(f"a server was not ready within {_START:.0f} s: {_end_of(log)}")


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(lines[-5:]) or "it printed nothing"
