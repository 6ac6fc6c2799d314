"""How large stored chunks are: bytes per chunk and per million tokens, by model and codec.

After Table II of Shared RAG-DCache (arXiv 2504.11765), which lists the sizes of stored caches, for
the shapes that this repository measures with.  Nothing is loaded: the sizes follow from the shapes
and the file format, and one of them is checked against a file that is really written.

Run from the repository root: `python benchmarks/sizes.py [--tokens 512] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcache_rag.codecs import CODECS, Codec, by_name
from kvcache_rag.kv.chunk import ChunkKV, ChunkLayout, GroupLayout, chunk_key, spec_digest
from kvcache_rag.stores import DiskStore
from kvcache_rag.stores.disk.file import file_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

MILLION: Final = 1_000_000


@dataclass(frozen=True)
class Shape:
    """Keys and values of a model: layers, KV heads, and the width of a head."""

    layers: int
    heads: int
    width: int

    @property
    def layout(self) -> ChunkLayout:
        """As stored in bfloat16."""
        slot = (self.heads, self.width)
        return ChunkLayout((GroupLayout(tuple(range(self.layers)), slot, slot),), torch.bfloat16)


SHAPES: Final = {
    "tiny": Shape(4, 4, 32),
    "Qwen2.5-0.5B": Shape(24, 2, 64),
    "Qwen2-7B": Shape(28, 4, 128),
    "Llama-3.1-8B": Shape(32, 8, 128),
}


def sizes(tokens: int) -> list[dict[str, Any]]:
    """One row per shape and codec.

    Args:
        tokens: Length of a chunk.
    """
    rows = []
    for name, shape in SHAPES.items():
        plain = shape.layout.nbytes(tokens)
        for codec in CODECS:
            nbytes = file_bytes(shape.layout, by_name(codec), tokens)
            rows.append(
                {
                    "model": name,
                    "codec": codec,
                    "tokens": tokens,
                    "tensor_bytes": plain,
                    "file_bytes": nbytes,
                    "ratio": plain / nbytes,
                    "bytes_per_million_tokens": round(nbytes * MILLION / tokens),
                }
            )
    return rows


def written_bytes(shape: Shape, codec: Codec, tokens: int) -> int:
    """Size of the file of a chunk of random numbers that a store really wrote.

    Raises:
        RuntimeError: If it could not be written.
    """
    layout = shape.layout
    ids = torch.arange(tokens, dtype=torch.int32)
    tensors = tuple(tuple(one.normal_() for one in group) for group in layout.empty(tokens))
    key = chunk_key(ids.tolist(), prefix_ids=(), spec=spec_digest({}), namespace="")
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder, durable=False, codec=codec)
        if not store.put(key, ChunkKV(layout, ids, 0, tensors)):
            raise RuntimeError(store.stats().last_failure)
        return store.path(key).stat().st_size


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a written file has another size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="length of a chunk")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows there")
    arguments = parser.parse_args(words)
    if arguments.tokens < 1:
        parser.error("--tokens must be at least 1")
    rows = sizes(arguments.tokens)
    print(f"{'model':<14}{'codec':<8}{'one chunk':>14}{'ratio':>8}{'1M tokens':>14}")
    for row in rows:
        print(
            f"{row['model']:<14}{row['codec']:<8}{row['file_bytes']:>14,}{row['ratio']:>8.2f}"
            f"{row['bytes_per_million_tokens'] / 1e9:>11.2f} GB"
        )
    print(
        f"chunks of {arguments.tokens} tokens; bytes of the file; ratio to the tensors in bfloat16"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return _check(rows, "Qwen2.5-0.5B", arguments.tokens)


def _check(rows: list[dict[str, Any]], name: str, tokens: int) -> int:
    wrong = [
        f"{row['codec']} has {found}, not {row['file_bytes']} bytes"
        for row in rows
        if row["model"] == name
        and (found := written_bytes(SHAPES[name], by_name(row["codec"]), tokens))
        != row["file_bytes"]
    ]
    print("; ".join(wrong) if wrong else f"checked: files written in {name}'s shape are so large")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
