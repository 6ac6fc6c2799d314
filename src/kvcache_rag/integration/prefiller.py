"""Keep rows and KV in step: prefill what is written, release what is gone."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.integration.references import Reference
from kvcache_rag.integration.rows import NewRow, Row, is_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.integration.rows import Rows


_AnyRow = TypeVar("_AnyRow", Row, NewRow)


@dataclass(frozen=True)
class RowPrefiller:
    """The KV side of one collection.

    Attributes:
        rows: The collection.
        engine: What prefills; without one, rows get no reference.
        owner: In whose name chunks are claimed and released.
    """

    rows: Rows
    engine: Engine | None
    owner: str

    def prefill(
        self, texts: Sequence[str], *, show_progress: bool = False
    ) -> list[Reference | None]:
        """Compute and claim what is missing; a reference per text, None for a blank one.

        Raises:
            ContextTooLongError: If a text does not fit the context window; nothing is computed
                then.
        """
        engine = self.engine
        if engine is None:
            return [None] * len(texts)
        # A chunk without a single letter cannot be reused, and an image without a caption is none.
        prefillable = [text for text in texts if text.strip()]
        keys = iter(engine.add(prefillable, owner=self.owner, show_progress=show_progress))
        return [Reference.of(next(keys), text, engine) if text.strip() else None for text in texts]

    def write(
        self,
        rows: Sequence[NewRow],
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        select: Callable[[Sequence[NewRow]], Sequence[NewRow]] = list,
    ) -> None:
        """Prefill, write rows with their references, and release what they replaced.

        Args:
            rows: Rows of different ids, without references.
            texts: The text of each, as it will stand in prompts.
            show_progress: Whether to show a bar while prefilling.
            select: Chooses, when they are prefilled, which are still to be written.

        Raises:
            ContextTooLongError: If a text does not fit the context window; nothing is written then.
        """
        if rows and self.engine is not None:
            self.rows.check(rows[0])  # prefilling may take hours
        references = self._prefill(rows, texts, show_progress=show_progress)
        claimed = list(map(_referring, rows, references))
        replaced: list[Row] = []
        with self.rows.writing(), self._releasing(claimed, replaced):
            written = select(claimed)
            self.rows.put(written, replaced)
            # A row of the same text may have been deleted, and the text released, since it was
            # claimed.
            self._claim(_references(written))

    def _prefill(
        self, rows: Sequence[Row | NewRow], texts: Sequence[str], *, show_progress: bool
    ) -> list[Reference | None]:
        try:
            return self.prefill(texts, show_progress=show_progress)
        except ContextTooLongError as error:
            # The engine counts texts, which nobody could find again among rows.
            pairs = zip(rows, texts, strict=True)
            id_ = next((row.id for row, text in pairs if self._is_too_long(text)), "?")
            raise ContextTooLongError(f"row {id_!r}: {error}") from error

    def _is_too_long(self, text: str) -> bool:
        try:
            if self.engine is not None and text.strip():
                self.engine.keys([text])
        except ContextTooLongError:
            return True
        return False

    def delete(self, rows: Sequence[Row]) -> None:
        """Delete rows and release their KV; if that fails midway, the KV of those that are gone."""
        with self._releasing(rows):
            self.rows.delete([row.id for row in rows])

    @contextmanager
    def _releasing(self, *changed: Sequence[Row | NewRow]) -> Iterator[None]:
        """Release in the end what of `changed` is not, or no longer, in the collection."""
        try:
            yield
        except BaseException:
            # What kept the rows from being written may keep them from being looked for as well.
            with suppress(Exception):
                self.release([row for rows in changed for row in rows])
            raise
        self.release([row for rows in changed for row in rows])

    def release(self, rows: Sequence[Row | NewRow]) -> None:
        """Release the KV of rows that are deleted or replaced, unless another row uses it."""
        engine = self.engine
        if engine is None:
            return
        gone = self._unused({reference.key: reference for reference in _references(rows)})
        keys = [reference.resolve(engine) for reference in gone.values()]
        # What another model computed is another engine's to release; its store ages it out.
        engine.release([key for key in keys if key is not None], self.owner)
        # A row of the same text may have been written since it was looked for.
        unused = self._unused(gone)
        self._claim([reference for key, reference in gone.items() if key not in unused])

    def _unused(self, references: Mapping[str, Reference]) -> dict[str, Reference]:
        try:
            used = {row.metadata["kv_key"] for row in self.rows.holding("kv_key", [*references])}
        except Exception as error:
            if not is_gone(error):
                raise
            used = set()
        return {key: reference for key, reference in references.items() if key not in used}

    def _claim(self, references: Sequence[Reference]) -> None:
        engine = self.engine
        if engine is None:
            return
        for reference in references:
            key = reference.resolve(engine)
            if key is not None:
                engine.store.claim(key, self.owner)

    def fill(self, text_of: Callable[[Row], str], *, show_progress: bool = False) -> int:
        """Prefill every row and write missing or outdated references.

        Args:
            text_of: The text of a row, as it will stand in prompts.
            show_progress: Whether to show a bar.

        Returns:
            Number of rows whose reference was written.

        Raises:
            InvalidInputError: If there is no engine.
        """
        if self.engine is None:
            raise InvalidInputError("prefill_missing needs a store made with llm= or engine=")
        rows = self.rows.get()
        texts = [text_of(row) for row in rows]
        references = self._prefill(rows, texts, show_progress=show_progress)
        claimed = list(map(_referring, rows, references))
        changed = {
            row.id: reference
            for row, reference in zip(rows, references, strict=True)
            if reference is not None and reference != Reference.from_metadata(row.metadata)
        }
        documents = {row.id: row.document for row in rows}
        # Rows may have gone since they were read, and then nobody else releases what was claimed.
        with self.rows.writing(), self._releasing(claimed, rows):
            # Rows that were replaced in the meantime have references of their own.
            now = self.rows.get(ids=list(changed))
            unchanged = {
                row.id: changed[row.id] for row in now if row.document == documents[row.id]
            }
            self.rows.update({id_: reference.to_metadata() for id_, reference in unchanged.items()})
            self._claim(list(unchanged.values()))
        return len(unchanged)


def _referring(row: _AnyRow, reference: Reference | None) -> _AnyRow:
    if reference is None:
        return row
    return replace(row, metadata={**row.metadata, **reference.to_metadata()})


def _references(rows: Sequence[Row | NewRow]) -> list[Reference]:
    """Those of the rows that have one."""
    references = (Reference.from_metadata(row.metadata) for row in rows)
    return [reference for reference in references if reference is not None]
