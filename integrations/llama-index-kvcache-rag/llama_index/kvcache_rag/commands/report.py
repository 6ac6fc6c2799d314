"""What the commands print: chunks on disk, times, one answer in a line, where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.integration import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from llama_index.kvcache_rag import KVCacheVectorStore


def chunk_files(kv: str) -> dict[str, int]:
    """Digest and size in bytes of every chunk file under a folder."""
    return {path.stem: path.stat().st_size for path in Path(kv).rglob("*.safetensors")}


def stored_chunks(store: KVCacheVectorStore) -> set[str]:
    """Digests of the chunks that a collection's rows refer to."""
    rows = store.client.get(include=["metadatas"])["metadatas"] or []
    return {str(row["kv_key"]) for row in rows if row and "kv_key" in row}


def size(count: int) -> str:
    """Bytes for people."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def milliseconds(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """What an answer cost, in one line, and by which policy."""
    hits = " + ".join(f"{count} from {tier}" for tier, count in metrics["hits"].items())
    parts = [
        f"first token after {milliseconds(metrics['ttft'])}",
        tokens_line(metrics),
        f"chunks: {hits or 'none'} cached, {metrics['misses']} missing",
        plural(metrics["generated_tokens"], "token") + " written",
    ]
    if metrics["rounds"] > 1:
        parts.append(plural(metrics["rounds"], "round"))
    return ", ".join([*parts, f"policy {metrics['policy']}"])


def tokens_line(metrics: Mapping[str, Any]) -> str:
    """Tokens reused and computed; the question is among these."""
    reused = plural(metrics["reused_tokens"], "token")
    said = f"{reused} reused, {metrics['computed_tokens']} computed"
    fresh = metrics["fresh_tokens"]
    return f"{said} ({fresh} of chunks computed with the question)" if fresh else said


def source(found: Any) -> dict[str, Any]:
    """A retrieved node: its file, score and text."""
    node = found.node
    name = node.metadata.get("file_path") or node.ref_doc_id or node.node_id
    return {"file": str(name), "score": float(found.score or 0.0), "text": node.get_content()}


def source_lines(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each."""
    for number, one in enumerate(sources, start=1):
        yield f"[{number}] {plain(one['file'])} ({one['score']:.3f}): {_shortened(one['text'])}"


def _shortened(text: str, width: int = 60) -> str:
    line = plain(" ".join(text.split()))
    return line if len(line) <= width else f"{line[: width - 3]}..."
