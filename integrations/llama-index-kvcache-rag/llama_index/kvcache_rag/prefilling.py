"""Keep rows and KV in step: prefill what is written, release what is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag.references import Reference, llm_text, text_digest, without_reference
from llama_index.kvcache_rag.rows import to_node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from llama_index.core.schema import BaseNode

    from kvcache_rag import ChunkKey, Engine
    from llama_index.kvcache_rag.collection import NewRow, Row, Rows


@dataclass(frozen=True)
class Prefilling:
    """The KV side of one collection.

    Attributes:
        rows: The collection.
        engine: What prefills; without one, rows get no reference.
        owner: In whose name chunks are claimed and released.
    """

    rows: Rows
    engine: Engine | None
    owner: str

    def prefill(self, nodes: Sequence[BaseNode], *, show_progress: bool) -> list[Reference | None]:
        """Compute and claim what is missing; a reference per node, None for one without text."""
        if self.engine is None:
            return [None] * len(nodes)
        texts = [llm_text(without_reference(node)) for node in nodes]
        return self._prefill_texts(self.engine, texts, show_progress)

    def _prefill_texts(
        self, engine: Engine, texts: Sequence[str], show_progress: bool
    ) -> list[Reference | None]:
        # A chunk without a single letter cannot be reused, and an image without a caption is no
        # chunk.
        given = [text for text in texts if text.strip()]
        keys = iter(engine.add(given, owner=self.owner, show_progress=show_progress))
        return [_reference(engine, next(keys), text) if text.strip() else None for text in texts]

    def release(self, rows: Sequence[Row | NewRow]) -> None:
        """Let go of the KV of rows that are deleted or replaced, unless another row uses it."""
        engine = self.engine
        if engine is None:
            return
        held = (Reference.from_metadata(row.metadata) for row in rows)
        gone = {one.key: one for one in held if one is not None}
        used = {row.metadata["kv_key"] for row in self.rows.holding("kv_key", list(gone))}
        keys = (one.resolve(engine) for digest, one in gone.items() if digest not in used)
        # What another model computed is another engine's to release; its store ages it out.
        engine.release([key for key in keys if key is not None], self.owner)

    def fill(self, *, show_progress: bool) -> int:
        """Prefill every row and write missing or outdated references; returns how many."""
        if self.engine is None:
            raise InvalidInputError("prefill_missing needs a store made with llm= or engine=")
        rows = self.rows.get()
        nodes = [to_node(row) for row in rows]
        references = self.prefill(nodes, show_progress=show_progress)
        changed = {
            row.id: reference
            for row, reference in zip(rows, references, strict=True)
            if reference is not None and reference != Reference.from_metadata(row.metadata)
        }
        self.rows.update({id_: reference.to_metadata() for id_, reference in changed.items()})
        self.release([row for row in rows if row.id in changed])
        return len(changed)


def shows_progress(kwargs: Mapping[str, Any], caller: FrameType) -> bool:
    """Whether the ingestion that calls `add` shows bars.

    LlamaIndex does not hand its `show_progress` on to vector stores, so it is read where it stands:
    in the frame of the index or pipeline that calls.
    """
    if "show_progress" in kwargs:
        return bool(kwargs["show_progress"])
    ingests = str(caller.f_globals.get("__name__", "")).startswith("llama_index.core.")
    return ingests and caller.f_locals.get("show_progress") is True


def _reference(engine: Engine, key: ChunkKey, text: str) -> Reference:
    return Reference(
        key=key.digest,
        spec=key.spec,
        tokens=key.tokens,
        nbytes=engine.nbytes(key),
        text=text_digest(text, engine),
    )
