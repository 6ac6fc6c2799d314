"""Rank texts by how likely they make a question, each read alone from its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.generation.question import ChunkInput


def check_most(most: int | None) -> None:
    """Refuse a number of texts below 1."""
    if most is not None and most < 1:
        raise InvalidInputError(f"top_n must be at least 1, not {most}")


def ranked(
    engine: Engine,
    question: str,
    texts: Sequence[str],
    chunk: Callable[[int], ChunkInput],
    *,
    most: int | None = None,
    cancelled: threading.Event | None = None,
) -> list[tuple[int, float | None]]:
    """Numbers of texts, the likeliest first, with their `Engine.read` results in nats.

    Blank ones are not read and come last, in their order; equal ones also keep theirs.

    Args:
        engine: Reads the texts.
        question: The question.
        texts: Texts of documents.
        chunk: Gives the engine's input for a text's number.
        most: How many to keep; None for all.
        cancelled: Once set, stops reading.
    """
    read = [number for number, text in enumerate(texts) if text.strip()]
    found: list[tuple[int, float | None]] = []
    if read:
        nats = engine.read(question, [*map(chunk, read)], cancelled=cancelled).relevance
        pairs = sorted(zip(read, nats, strict=True), key=lambda pair: -pair[1])
        found = [*pairs]
    silent = ((number, None) for number, text in enumerate(texts) if not text.strip())
    return [*found, *silent][:most]
