"""What the commands print: chunks on disk, times, one answer per line, its sources."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.commands.collections import referenced
from kvcache_rag.integration import Rows, plain
from llama_index.kvcache_rag.commands.corpus import FILE_DIGEST
from llama_index.kvcache_rag.commands.settings import Settings, this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from llama_index.core.schema import NodeWithScore

    from llama_index.kvcache_rag import KVCacheVectorStore

NEAR: Final = {"minilm": 0.28}
"""Score from which on a chunk is near enough to a question to answer it, by embedding.

`minilm`: 0.28 is a cosine of 0.36. On the articles of the demo the 24 questions that they answer
have 0.319 and more, of 40 about other things 34 have less than 0.28; on the 40 of
`tests/test_near.py` it is right: those that are answered begin at 0.325, the others end at 0.274.
Nearer to the latter, as a chunk about several things is farther from each (0.292 was seen), and a
right answer that is called a guess is worse than the other mistake. Who asks what a near text does
not say is not told so; nor do scores tell in German, which it does not read (0.30 to 0.45 with an
answer, 0.27 to 0.38 without).
`hash` has none, as letters of "what" and "the" count as much: of the same 40 questions those that
are answered have 0.19 to 0.47, the others 0.17 to 0.35.
"""

LIKELY: Final = dict.fromkeys(
    ("smollm2", "smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"), 4.0
)
"""How much likelier a chunk makes a question that it answers than no chunk does, in nats, by model.

On the 40 questions of `tests/test_near.py`, four chunks each by `hash`, both models say of all 20
that have no answer that they have none, and of those with one only where `hash` found other chunks
(two by SmolLM2 with `block`, three by the other); by `minilm` of 19 of the 20, and of none that is
answered. Over six notes in German (docs/quality.md) Qwen2.5-Coder-0.5B says it of six of ten
questions about other things and wrongly of two of twenty, SmolLM2 of none. Who asks what a text
about the same thing does not say is hardly ever told so.
"""
_QUANTISED: Final = re.compile(r"([-.](q\d\w*|b?f16|f32))?\.gguf$")

_LONG: Final = 2.0  # seconds of writing behind the first token that are worth a hint

# Of a row's node, as LlamaIndex numbers them: its document, the chunk before it, the one behind.
_SOURCE, _NEIGHBOURS = "1", ("2", "3")


def chunk_files(kv: str) -> dict[str, int]:
    """Digest and size in bytes of every chunk file under a folder."""
    return {path.stem: path.stat().st_size for path in Path(kv).rglob("*.safetensors")}


def stored_chunks(store: KVCacheVectorStore) -> set[str]:
    """Digests of the chunks that a collection's rows refer to."""
    return {*referenced(store.client)}


@dataclass(frozen=True)
class Ingested:
    """A document as it is in a collection.

    Attributes:
        hash: Of its text and metadata, as LlamaIndex has it.
        file_digest: Of the file that it was read from; "" where that was not noted.
    """

    hash: str
    file_digest: str


def whole_documents(store: KVCacheVectorStore) -> dict[str, Ingested]:
    """The documents that were ingested, by their ids.

    One whose writing was stopped is not among them: a chunk's neighbour is missing there.
    """
    rows = Rows(store.client).get(metadata_only=True)
    ids, found, broken = {row.id for row in rows}, {}, set()
    for row in rows:
        related = json.loads(str(row.metadata.get("_node_content", "{}"))).get("relationships", {})
        if _SOURCE not in related:
            continue
        source = related[_SOURCE]
        name, metadata = source["node_id"], source.get("metadata") or {}
        found[name] = Ingested(source["hash"], str(metadata.get(FILE_DIGEST, "")))
        if any(one in related and related[one]["node_id"] not in ids for one in _NEIGHBOURS):
            broken.add(name)
    return {name: one for name, one in found.items() if name not in broken}


def size(count: int) -> str:
    """Bytes for people."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def without_cache(misses: int) -> str:
    """The sentence about chunks that had to be computed; "" where there was none."""
    return f"{plural(misses, 'chunk')} had no stored cache" if misses else ""


def milliseconds(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def figures(metrics: Mapping[str, Any], settings: Settings, nearest: float) -> dict[str, Any]:
    """Those of an answer that matter.

    Args:
        metrics: Of `response.metadata["kv_cache"]`.
        settings: How the collection was made.
        nearest: Score of the best chunk.
    """
    tokens, full = metrics["prompt_tokens"], settings.full
    is_known = full is not None and metrics["reused_tokens"] > 0
    without = full.seconds_for(tokens, this_machine()) if full and is_known else None
    return {
        "ttft": metrics["ttft"],
        "ttft_without_cache": without,
        "total": metrics["total"],
        "prompt_tokens": metrics["prompt_tokens"],
        "reused_tokens": metrics["reused_tokens"],
        "computed_tokens": metrics["computed_tokens"],
        "prefix_tokens": metrics["prefix_tokens"],
        "generated_tokens": metrics["generated_tokens"],
        "hits": sum(metrics["hits"].values()),
        "misses": metrics["misses"],
        "unused_chunks": metrics["unused_chunks"],
        "dropped_chunks": metrics["dropped_chunks"],
        "nearest": nearest,
    }


def cost_line(figures: Mapping[str, Any]) -> str:
    """What an answer gained, in a line."""
    without, missing = figures["ttft_without_cache"], figures["misses"]
    beside = "" if without is None else f" (about {_seconds(without)} without the cache)"
    parts = [
        f"{_seconds(figures['ttft'])} to the first token{beside}",
        f"{figures['reused_tokens']} of {figures['prompt_tokens']} tokens reused",
        *([f"{plural(missing, 'chunk')} computed anew"] if missing else []),
    ]
    return ", ".join(parts)


def sooner_line(figures: Mapping[str, Any], settings: Settings) -> str | None:
    """Where the same file's answers are written several times sooner (docs/peers.md), if they are.

    Args:
        figures: See `figures`.
        settings: How the collection was made.
    """
    import torch  # which has answered

    from kvcache_rag.models.gguf import quantised_dtype
    from kvcache_rag.models.model_names import SUFFIX, resolve

    written = figures["total"] - figures["ttft"]
    if settings.backend != Settings.backend or not resolve(settings.model).endswith(SUFFIX):
        return None
    if written < _LONG or quantised_dtype() != torch.float32:
        return None
    return (
        f"what followed took {_seconds(written)}; llama.cpp writes several times sooner on this "
        "CPU: ingest again with --backend llama.cpp"
    )


def _seconds(value: float) -> str:
    """A time with two digits that count."""
    return f"{value:.2g} s" if value < 99 else f"{value:.0f} s"


def likely(model: str) -> float | None:
    """Nats that make a chunk likely to answer, by a model; None where nobody measured that."""
    return LIKELY.get(_QUANTISED.sub("", Path(model).name.lower()))


def is_near(sources: Sequence[Mapping[str, Any]], settings: Settings) -> bool | None:
    """Whether a question can be answered from what was found; None where nobody measured that.

    By what the model read or by scores: a right answer that is called a guess is worse than the
    other mistake, so what either finds near is near.

    Args:
        sources: As `source` describes them.
        settings: Of the collection.
    """
    least = likely(settings.model)
    read = [one["relevance"] for one in sources if one.get("relevance") is not None]
    found = [bool(max(read) >= least)] if least is not None and read else []
    least = NEAR.get(settings.embed)
    if least is not None:
        found.append(any(one["score"] >= least for one in sources))
    return any(found) if found else None


def far_line(sources: Sequence[Mapping[str, Any]], settings: Settings) -> str:
    """What to say where nothing is near."""
    read = [one["relevance"] for one in sources if one.get("relevance") is not None]
    if read:
        return (
            "no document makes the question much likelier (the best one by "
            f"{max(0.0, *read):.1f} nats, {likely(settings.model):.0f} would be enough): "
            "the answer may be a guess"
        )
    nearest = max(one["score"] for one in sources)
    return (
        f"no document is near enough to the question (the nearest has {nearest:.3f}, "
        f"{NEAR[settings.embed]} would be): the answer may be a guess"
    )


def sources(
    found: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Any] | None,
    relevance: Sequence[float | None] = (),
) -> list[dict[str, Any]]:
    """What was retrieved, that first which an answer was computed from, in its prompt's order.

    Args:
        found: File, score and text of each, as they were retrieved.
        metrics: Of the answer; None where it was stopped, and nobody knows.
        relevance: How much likelier each makes the question, in nats; empty if nothing was read.
    """
    used = range(len(found)) if metrics is None else metrics["answered_from"]
    places = [*used, *(at for at in range(len(found)) if at not in used)]
    return [
        {
            **found[at],
            "relevance": relevance[at] if relevance else None,
            "used": at in used,
        }
        for at in places
    ]


def source(found: NodeWithScore) -> dict[str, Any]:
    """A retrieved node: its file, score and text."""
    node = found.node
    name = node.metadata.get("file_path") or node.ref_doc_id or node.node_id
    return {"file": str(name), "score": float(found.score or 0.0), "text": node.get_content()}


def source_lines(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each, and one before those that were only retrieved."""
    was_used = True
    for number, one in enumerate(sources, start=1):
        if was_used and not one["used"]:
            yield "retrieved, not used:"
        was_used = one["used"]
        nats = "" if one["relevance"] is None else f", {one['relevance']:+.1f} nats"
        file, text = plain(one["file"]), _shortened(one["text"])
        yield f"[{number}] {file} ({one['score']:.3f}{nats}): {text}"


def _shortened(text: str, width: int = 60) -> str:
    line = plain(" ".join(text.split()))
    return line if len(line) <= width else f"{line[: width - 3]}..."
