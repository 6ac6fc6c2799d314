"""Engines of one loaded model: one for each form in which chunks are kept.

A codec is tested through files: one engine writes them, another one, which did not compute the
chunks, reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from kvcache_rag.codecs import by_name
from kvcache_rag.engine import Engine
from kvcache_rag.stores import DiskStore

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kvcache_rag.chunk import ChunkKey
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.stores import ChunkStore

Model: TypeAlias = "str | os.PathLike[str] | Engine | Callable[[], Engine]"
"""A folder, a hub name, "tiny", an engine, or what makes one when its turn comes."""


@dataclass(frozen=True)
class Workplace:
    """Where one kind of cell is answered.

    Attributes:
        writer: Prefills chunks.
        reader: Answers; the same engine unless chunks go through files.
    """

    writer: Engine
    reader: Engine

    def prepare(self, texts: Iterable[str]) -> list[ChunkKey]:
        """Prefill and store chunks; returns their keys."""
        return self.writer.add(list(dict.fromkeys(texts)))

    def clear(self, keys: Iterable[ChunkKey]) -> None:
        """Drop files; memory has a limit of its own."""
        if self.writer is not self.reader:
            for key in keys:
                self.writer.store.delete(key)


class Workplaces:
    """All workplaces of one model, made when they are first needed.

    Attributes:
        auxiliary: Scores chunks for policies that have no scorer of their own.
    """

    def __init__(self, base: Engine, folder: Path, auxiliary: Scorer | None = None) -> None:
        """Share the model of `base`.

        Args:
            base: An engine of the model.
            folder: An empty folder for files.
            auxiliary: Scores chunks for policies that have no scorer of their own.
        """
        self._base, self._folder, self.auxiliary = base, folder, auxiliary
        self._places: dict[tuple[str, str], Workplace] = {}

    def get(self, codec: str, instruction: str) -> Workplace:
        """The workplace of a codec and an instruction.

        Args:
            codec: Name of a codec, "" for memory.
            instruction: What stands before the chunks, "" for what the model brings along.
        """
        place = (codec, instruction)
        if place not in self._places:
            self._places[place] = self._make(codec, instruction)
        return self._places[place]

    def _make(self, codec: str, instruction: str) -> Workplace:
        if not codec:
            one = self._engine(None, instruction)
            return Workplace(one, one)
        folder = self._folder / f"{codec}-{len(self._places)}"

        def opened() -> Engine:
            store = DiskStore(folder, durable=False, codec=by_name(codec))
            return self._engine(store, instruction)

        writer = opened()
        writer.add(["."])  # writes the prefix, too
        return Workplace(writer, opened())

    def _engine(self, store: ChunkStore | None, instruction: str) -> Engine:
        base, template = self._base, self._base.template
        return Engine(
            base.model,
            base.tokenizer,
            store=store,
            template=replace(template, system=instruction) if instruction else template,
            context_window=base.context_window,
            cost_aware=False,
            auxiliary=self.auxiliary,
        )


def open_model(model: Model) -> Engine:
    """The engine itself, or a new one."""
    if isinstance(model, Engine):
        return model
    return model() if callable(model) else Engine.from_pretrained(model)
