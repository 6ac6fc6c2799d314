"""Keep rows and KV in step: prefill what is written, release what is gone."""

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
        owner: In whose name chunks are claimed and released.
    """

    rows: Rows
    engine: Engine | None
    owner: str

    def prefill(
        self,
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> list[Reference | None]:
        """Compute and claim what is missing; a reference per text, None for a blank one.

        For a model whose chunks cannot be stitched nothing is computed, with one warning.

        Raises:
            concurrent.futures.CancelledError: If `cancelled` stopped it; nothing is claimed then.
            ContextTooLongError: If a text does not fit the context window; nothing is computed
                then.
        """
        engine = self.engine
        if engine is None:
            return [None] * len(texts)
        keys = _prefilled(
            engine, texts, owner=self.owner, show_progress=show_progress, cancelled=cancelled
        )
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
        """Prefill, write rows with their references, and release what they replaced.

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
        claim = partial(self._claimed, rows, texts, show_progress=show_progress)
        if embed is None or not rows:
            self._check(rows)
            claimed = claim()
        else:
            claimed = self._embedded(rows, embed, claim)
        replaced: list[Row] = []
        with self.rows.writing(), self._releasing(claimed, replaced):
            written = select(claimed)
            self.rows.put(written, replaced)
            # A row of the same text may have been deleted, and the text released, since it was
            # claimed.
            self._claim(_references(written))

    def _check(self, rows: Sequence[NewRow]) -> None:
        if rows and self.engine is not None:
            self.rows.check(rows[0])  # prefilling may take hours

    def _claimed(
        self, rows: Sequence[_AnyRow], texts: Sequence[str], **options: Any
    ) -> list[_AnyRow]:
        """Prefill rows; they and their references."""
        return list(map(_referring, rows, self._prefill(rows, texts, **options)))

    def _embedded(
        self,
        rows: Sequence[NewRow],
        embed: Callable[[list[str]], Sequence[Sequence[float]]],
        claim: Callable[..., list[NewRow]],
    ) -> list[NewRow]:
        """What `claim` gives, with vectors that are computed meanwhile."""
        self.rows.get(limit=1, metadata_only=True)  # fails where the collection is gone
        claimed: list[NewRow] = []
        try:
            with beside(lambda cancelled: claimed.extend(claim(cancelled=cancelled))):
                vectors = embed([row.document for row in rows])
                if len(vectors) != len(rows):
                    raise InvalidInputError(
                        f"the embedding gave {len(vectors)} vectors for {len(rows)} texts"
                    )
                self._check([replace(rows[0], embedding=vectors[0])])
        except BaseException:
            # Prefilling may have come to its end before.
            with suppress(Exception):
                self.release(claimed)
            raise
        return [
            replace(row, embedding=vector) for row, vector in zip(claimed, vectors, strict=True)
        ]

    def _prefill(
        self, rows: Sequence[Row | NewRow], texts: Sequence[str], **options: Any
    ) -> list[Reference | None]:
        with _naming(self.engine, [row.id for row in rows], texts):
            return self.prefill(texts, **options)

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
        prefilled = dict(zip((row.id for row in rows), texts, strict=True))
        # Rows may have gone since they were read, and then nobody else releases what was claimed.
        with self.rows.writing(), self._releasing(claimed, rows):
            # Rows that were replaced in the meantime have references of their own.
            now = self.rows.get(ids=list(changed))
            unchanged = {
                row.id: changed[row.id] for row in now if text_of(row) == prefilled[row.id]
            }
            self.rows.update({id_: reference.to_metadata() for id_, reference in unchanged.items()})
            self._claim(list(unchanged.values()))
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
