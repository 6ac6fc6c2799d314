"""Keep rows and KV in step: prefill what is written, delete what is gone."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache_rag.errors import ContextTooLongError, InvalidInputError
from kvcache_rag.integration.references import Reference
from kvcache_rag.integration.rows import NewRow, Row, is_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.integration.rows import Rows
    from kvcache_rag.kv.chunk import ChunkKey


_AnyRow = TypeVar("_AnyRow", Row, NewRow)
_Got = TypeVar("_Got")


@contextmanager
def beside(prefill: Callable[[threading.Event], _Got]) -> Iterator[Future[_Got]]:
    """Prefill in a thread while the block embeds; the block ends when both have.

    An embedding stays in the thread of its caller, whose own it may need (an event loop, a
    database), and Ctrl-C reaches it at once.  If it fails, prefilling stops before its next batch.
    Where both compute on all the same cores they take as long as one after the other.

    Args:
        prefill: Takes the event that stops it.

    Yields:
        What prefilling gives; its errors are raised when the block ends.
    """
    cancelled = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="kvcache-rag-ingest") as pool:
        # Of the caller's context, or a notebook would not know which cell the bar belongs to.
        prefilling = pool.submit(copy_context().run, prefill, cancelled)
        try:
            yield prefilling
            prefilling.result()
        finally:
            cancelled.set()


@dataclass(frozen=True)
class RowPrefiller:
    """The KV side of one collection.

    Attributes:
        rows: The collection.
        engine: What prefills; without one, rows get no reference.
    """

    rows: Rows
    engine: Engine | None

    def prefill(
        self,
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> list[Reference | None]:
        """Compute what is missing; a reference per text, None for a blank one.

        For a model whose chunks cannot be stitched nothing is computed, with one warning.

        Raises:
            concurrent.futures.CancelledError: If `cancelled` stopped it.
            ContextTooLongError: If a text does not fit the context window; nothing is computed
                then.
        """
        engine = self.engine
        if engine is None:
            return [None] * len(texts)
        keys = _prefilled(engine, texts, show_progress=show_progress, cancelled=cancelled)
        return [
            None if key is None else Reference.of(key, text, engine)
            for text, key in zip(texts, keys, strict=True)
        ]

    def write(
        self,
        rows: Sequence[NewRow],
        texts: Sequence[str],
        *,
        embed: Callable[[list[str]], Sequence[Sequence[float]]] | None = None,
        show_progress: bool = False,
        select: Callable[[Sequence[NewRow]], Sequence[NewRow]] = list,
    ) -> None:
        """Prefill, write rows with their references, and delete the KV of what they replaced.

        If that fails, what was prefilled stays, for the next try.

        Args:
            rows: Rows of different ids, without references.
            texts: The text of each, as it will stand in prompts.
            embed: Gives the vectors of documents, while these are prefilled; None if the rows have
                theirs, or the collection embeds.
            show_progress: Whether to show a bar while prefilling.
            select: Chooses, when they are prefilled, which are still to be written.

        Raises:
            ContextTooLongError: If a text does not fit the context window; nothing is written then.
            InvalidInputError: If `embed` gives not one vector per row; nothing is written then.
        """
        prefill = partial(self._prefilled, rows, texts, show_progress=show_progress)
        if embed is None or not rows:
            self._check(rows)
            prefilled = prefill()
        else:
            prefilled = self._embedded(rows, embed, prefill)
        replaced: list[Row] = []
        with self.rows.writing():
            try:
                self.rows.put(select(prefilled), replaced)
            except BaseException:
                with suppress(Exception):
                    self.drop(replaced)
                raise
            self.drop([*prefilled, *replaced])

    def _check(self, rows: Sequence[NewRow]) -> None:
        if rows and self.engine is not None:
            self.rows.check(rows[0])  # prefilling may take hours

    def _prefilled(
        self, rows: Sequence[_AnyRow], texts: Sequence[str], **options: Any
    ) -> list[_AnyRow]:
        """Prefill rows; they and their references."""
        return list(map(_referring, rows, self._prefill(rows, texts, **options)))

    def _embedded(
        self,
        rows: Sequence[NewRow],
        embed: Callable[[list[str]], Sequence[Sequence[float]]],
        prefill: Callable[..., list[NewRow]],
    ) -> list[NewRow]:
        """What `prefill` gives, with vectors that are computed meanwhile."""
        self.rows.get(limit=1, metadata_only=True)  # fails where the collection is gone
        with beside(lambda cancelled: prefill(cancelled=cancelled)) as prefilling:
            vectors = embed([row.document for row in rows])
            if len(vectors) != len(rows):
                raise InvalidInputError(
                    f"the embedding gave {len(vectors)} vectors for {len(rows)} texts"
                )
            self._check([replace(rows[0], embedding=vectors[0])])
        pairs = zip(prefilling.result(), vectors, strict=True)
        return [replace(row, embedding=vector) for row, vector in pairs]

    def _prefill(
        self, rows: Sequence[Row | NewRow], texts: Sequence[str], **options: Any
    ) -> list[Reference | None]:
        with _naming(self.engine, [row.id for row in rows], texts):
            return self.prefill(texts, **options)

    def delete(self, rows: Sequence[Row]) -> None:
        """Delete rows and their KV; if that fails midway, the KV of those that are gone."""
        try:
            self.rows.delete([row.id for row in rows])
        except BaseException:
            # What kept the rows from being deleted may keep them from being looked for as well.
            with suppress(Exception):
                self.drop(rows)
            raise
        self.drop(rows)

    def drop(self, rows: Sequence[Row | NewRow]) -> None:
        """Delete the KV of rows that are gone or replaced, unless another row has it."""
        references = {reference.key: reference for reference in _references(rows)}
        if self.rows.leaving is None:
            self.drop_references(references)
        elif self.engine is not None:
            self.rows.leaving.update(references)

    def drop_references(self, references: Mapping[str, Reference]) -> None:
        """Delete the KV of references, by key, that no row has."""
        engine = self.engine
        if engine is None:
            return
        gone = self._unused(references)
        keys = [reference.resolve(engine) for reference in gone.values()]
        # What another model computed is another engine's to delete; its store ages it out.
        engine.delete([key for key in keys if key is not None])

    def _unused(self, references: Mapping[str, Reference]) -> dict[str, Reference]:
        try:
            used = {row.metadata["kv_key"] for row in self.rows.holding("kv_key", [*references])}
        except Exception as error:
            if not is_gone(error):
                raise
            used = set()
        return {key: reference for key, reference in references.items() if key not in used}

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
        prefilled_rows = list(map(_referring, rows, references))
        changed = {
            row.id: reference
            for row, reference in zip(rows, references, strict=True)
            if reference is not None and reference != Reference.from_metadata(row.metadata)
        }
        prefilled = dict(zip((row.id for row in rows), texts, strict=True))
        with self.rows.writing():
            # Rows that were replaced in the meantime have references of their own.
            now = self.rows.get(ids=list(changed))
            unchanged = {
                row.id: changed[row.id] for row in now if text_of(row) == prefilled[row.id]
            }
            self.rows.update({id_: reference.to_metadata() for id_, reference in unchanged.items()})
            # Rows may have gone since they were read, and then nobody else deletes their KV.
            self.drop([*prefilled_rows, *rows])
        return len(unchanged)


def prefill_texts(
    engine: Engine,
    ids: Sequence[str],
    texts: Sequence[str],
    *,
    show_progress: bool = False,
    cancelled: threading.Event | None = None,
) -> list[ChunkKey | None]:
    """Compute and store what is missing, for rows of a vector store of any kind.

    For a model whose chunks cannot be stitched nothing is computed, with one warning.

    Args:
        engine: Prefills.
        ids: Of the rows, to name one that is too long.
        texts: Of the rows, as they will stand in prompts.
        show_progress: Whether to show a bar.
        cancelled: Stops it before the next batch.

    Returns:
        The key of each text, None for a blank one.

    Raises:
        concurrent.futures.CancelledError: If `cancelled` stopped it.
        ContextTooLongError: If a text does not fit the context window; nothing is computed then.
    """
    with _naming(engine, ids, texts):
        return _prefilled(engine, texts, show_progress=show_progress, cancelled=cancelled)


def _prefilled(engine: Engine, texts: Sequence[str], **options: Any) -> list[ChunkKey | None]:
    """What `Engine.add` gives, but None for a blank text, and for a refused model all are None."""
    if engine.refusal:
        engine._warn_refused()
        return [None] * len(texts)
    # A chunk without a single letter cannot be reused, and an image without a caption is none.
    keys = iter(engine.add([text for text in texts if text.strip()], **options))
    return [next(keys) if text.strip() else None for text in texts]


@contextmanager
def _naming(engine: Engine | None, ids: Sequence[str], texts: Sequence[str]) -> Iterator[None]:
    """Have an error name its row by id: texts that are counted nobody could find among rows."""
    try:
        yield
    except ContextTooLongError as error:
        pairs = zip(ids, texts, strict=True)
        id_ = next((id_ for id_, text in pairs if _is_too_long(engine, text)), "?")
        raise ContextTooLongError(f"row {id_!r}: {error}") from error


def _is_too_long(engine: Engine | None, text: str) -> bool:
    try:
        if engine is not None and text.strip():
            engine.keys([text])
    except ContextTooLongError:
        return True
    return False


def _referring(row: _AnyRow, reference: Reference | None) -> _AnyRow:
    if reference is None:
        return row
    return replace(row, metadata={**row.metadata, **reference.to_metadata()})


def _references(rows: Sequence[Row | NewRow]) -> list[Reference]:
    """Those of the rows that have one."""
    references = (Reference.from_metadata(row.metadata) for row in rows)
    return [reference for reference in references if reference is not None]
