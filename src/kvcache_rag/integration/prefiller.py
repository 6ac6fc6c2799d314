"""Keep rows and KV in step: prefill what is written, delete what is gone."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvcache_rag.errors import ContextTooLongError, InvalidInputError, KVCacheRagError
from kvcache_rag.integration.references import Reference
from kvcache_rag.integration.rows import NewRow, Row, is_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.integration.rows import Rows
    from kvcache_rag.kv.chunk import ChunkKey


_NAMED = 3  # rows in a warning

_AnyRow = TypeVar("_AnyRow", Row, NewRow)
_Got = TypeVar("_Got")


@contextmanager
def beside(prefill: Callable[[threading.Event], _Got]) -> Iterator[Future[_Got]]:
    """Prefill in a thread while the block embeds; the block ends when both have ended.

    The embedding stays in its caller's thread, whose event loop or database it may need, and Ctrl-C
    reaches it at once.  If it fails, prefilling stops before its next batch.  If both compute on
    all cores, this takes as long as one after the other.

    Args:
        prefill: Takes the event that stops it.

    Yields:
        The future of prefilling; its errors are raised when the block ends.
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

    A row is worth more than its KV: a caller that replaces a document may have deleted its old rows
    already.  So rows that cannot be prefilled are written without a reference, with one warning;
    questions over them report problems themselves.  Likewise rows are deleted even if their KV
    cannot be.

    Attributes:
        rows: The collection.
        engine: Prefills; without one, rows get no reference.
    """

    rows: Rows
    engine: Engine | None

    def prefill(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> list[Reference | None]:
        """Compute missing KV; a reference per text, None where `prefill_texts` gives no key.

        Raises:
            concurrent.futures.CancelledError: If `cancelled` stopped it.
        """
        engine = self.engine
        if engine is None:
            return [None] * len(texts)
        keys = prefill_texts(engine, ids, texts, show_progress=show_progress, cancelled=cancelled)
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

        On failure, prefilled KV stays for the next try.

        Args:
            rows: Rows of different ids, without references.
            texts: The text of each, as in prompts.
            embed: Computes the vectors of documents during prefilling; None if the rows have
                theirs, or the collection embeds.
            show_progress: Whether to show a bar while prefilling.
            select: Chooses, after prefilling, which rows are still to be written.

        Raises:
            InvalidInputError: If `embed` does not give one vector per row; nothing is written then.
        """
        self.rows.check_texts(rows)
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
        """Prefill rows as far as it is possible; they and their references."""
        ids = [row.id for row in rows]
        references: list[Reference | None] = [None] * len(rows)
        with standing(ids):
            references = self.prefill(ids, texts, **options)
        return list(map(_referring, rows, references))

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

    def delete(self, rows: Sequence[Row]) -> None:
        """Delete rows and their KV; if that fails midway, the KV of the rows that are gone."""
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
        """Delete the KV of references, given by key, that no row has."""
        engine = self.engine
        if engine is None:
            return
        try:
            gone = self._unused(references)
            keys = [reference.resolve(engine) for reference in gone.values()]
            # What another model computed is another engine's to delete; its store ages it out.
            engine.delete([key for key in keys if key is not None])
        except Exception as error:
            _warn(
                f"the KV of up to {len(references)} rows that are gone was not deleted "
                f"({_said(error)}); its store drops it by its limits, or by `kvcache-rag store gc`"
            )

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
            text_of: The text of a row, as in prompts.
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
        ids = [row.id for row in rows]
        references = self.prefill(ids, texts, show_progress=show_progress)
        prefilled_rows = list(map(_referring, rows, references))
        changed = {
            row.id: reference
            for row, reference in zip(rows, references, strict=True)
            if reference is not None and reference != Reference.from_metadata(row.metadata)
        }
        prefilled = dict(zip(ids, texts, strict=True))
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
    """Compute and store missing KV for rows of any vector store.

    If stored chunks are of no use (`Engine.why_useless`) nothing is computed, with one warning.  A
    text that does not fit the context window is skipped, with a warning that names it.

    Args:
        engine: Prefills the texts.
        ids: Ids of the rows.
        texts: Texts of the rows, as in prompts.
        show_progress: Whether to show a bar.
        cancelled: Once set, stops before the next batch.

    Returns:
        The key of each text; None for a blank or skipped one.

    Raises:
        concurrent.futures.CancelledError: If it was stopped.
    """
    keys: list[ChunkKey | None] = [None] * len(texts)
    if engine.why_useless:
        engine._bound.guard.warn_refused()
        return keys
    options: dict[str, Any] = {"show_progress": show_progress, "cancelled": cancelled}
    # A chunk without a single letter cannot be reused, and an image without a caption is none.
    wanted = [at for at, text in enumerate(texts) if text.strip()]
    try:
        found = engine.add([texts[at] for at in wanted], **options)
    except ContextTooLongError:
        errors = {at: error for at in wanted if (error := _too_long(engine, texts[at]))}
        if not errors:
            raise
        _warn_standing([ids[at] for at in errors], next(iter(errors.values())))
        wanted = [at for at in wanted if at not in errors]
        found = engine.add([texts[at] for at in wanted], **options)
    for at, key in zip(wanted, found, strict=True):
        keys[at] = key
    return keys


def _too_long(engine: Engine, text: str) -> ContextTooLongError | None:
    try:
        engine.keys([text])
    except ContextTooLongError as error:
        return ContextTooLongError("it" + str(error).removeprefix("chunk 0"))
    return None


@contextmanager
def standing(ids: Sequence[str]) -> Iterator[None]:
    """Turn errors of prefilling in the block into one warning, so that rows are written anyway.

    Ctrl-C and cancellation are still raised.
    """
    try:
        yield
    except CancelledError:
        raise
    except Exception as error:
        _warn_standing(ids, error)


def _warn_standing(ids: Sequence[str], error: Exception) -> None:
    named = ", ".join(map(repr, ids[:_NAMED])) + (", ..." if len(ids) > _NAMED else "")
    rows = f"row {named}" if len(ids) == 1 else f"{len(ids)} rows ({named})"
    _warn(f"{rows} written without a reference to KV: {_said(error)}")


def _said(error: Exception) -> str:
    """What an error says, in one line; what is not ours is named."""
    words = " ".join(str(error).split())
    return words if isinstance(error, KVCacheRagError) else f"{type(error).__name__}: {words}"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _referring(row: _AnyRow, reference: Reference | None) -> _AnyRow:
    if reference is None:
        return row
    return replace(row, metadata={**row.metadata, **reference.to_metadata()})


def _references(rows: Sequence[Row | NewRow]) -> list[Reference]:
    """Those of the rows that have one."""
    references = (Reference.from_metadata(row.metadata) for row in rows)
    return [reference for reference in references if reference is not None]
