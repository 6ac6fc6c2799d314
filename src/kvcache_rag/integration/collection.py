"""A Chroma collection whose rows are prefilled, for stock stores that know nothing of KV.

A stock store uses it like any other collection, with Chroma's own calls.  References to KV are kept
with the metadata of rows; a framework's subclass decides what a store sees of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvcache_rag.errors import InvalidInputError, check_unicode
from kvcache_rag.integration.prefiller import RowPrefiller, standing
from kvcache_rag.integration.references import REFERENCE_KEYS, Reference
from kvcache_rag.integration.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.integration.rows import NewRow, Row

_T = TypeVar("_T")


class EngineHolder(Protocol):
    """What prefills, once it is needed."""

    @property
    def engine(self) -> Engine | None:
        """Loaded when it is first asked for; None for a collection that only stores."""


class PrefilledCollection(ABC):
    """A Chroma collection with references to KV in its rows' metadata.

    Calls may have any size; empty ones do nothing.  All other attributes are Chroma's own.
    """

    def __init__(
        self, collection: Any, holder: EngineHolder | None, *, show_progress: bool = False
    ) -> None:
        """Wrap `collection`, which stays usable itself."""
        self._rows = Rows(collection)
        self._holder, self._show_progress = holder, show_progress

    @property
    def collection(self) -> Any:
        """Chroma's own collection, as in `Rows.collection`."""
        return self._rows.collection

    def __getattr__(self, name: str) -> Any:
        if name == "_rows":  # asked for before there is anything
            raise AttributeError(name)
        return behind(self, "collection", name)

    @property  # type: ignore[misc]  # nobody sets it
    def __class__(self) -> Any:
        """Makes `isinstance` take it for a Chroma collection, too."""
        return self._rows.kind

    @property
    def prefiller(self) -> RowPrefiller:
        """The KV side of the rows."""
        engine = None if self._holder is None else self._holder.engine
        return RowPrefiller(self._rows, engine)

    # ------------------------------------------------------------------ a framework's
    @abstractmethod
    def text(self, row: Row | NewRow) -> str:
        """The text of a row in prompts."""

    @abstractmethod
    def shown(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """What a stock store sees of a row's metadata."""

    # ------------------------------------------------------------------ writing
    def write(
        self, rows: Sequence[NewRow], *, show_progress: bool | None = None, **options: Any
    ) -> None:
        """Prefill rows and write them; existing rows are replaced, metadata included.

        Args:
            rows: The last of equal ids wins.
            show_progress: Whether to show a bar; None for the collection's setting.
            options: See `RowPrefiller.write`, also for errors.
        """
        last = list({row.id: row for row in rows}.values())
        if last:
            texts = [*map(self.text, last)]
            shows = self._shows(show_progress)
            prefiller = RowPrefiller(self._rows, None)
            with standing([row.id for row in last]):  # a model that cannot be loaded
                prefiller = self.prefiller
            prefiller.write(last, texts, show_progress=shows, **options)

    def prefill_missing(self, *, show_progress: bool | None = None) -> int:
        """Prefill every row whose KV is not stored; returns how many references were written."""
        return self.prefiller.fill(self.text, show_progress=self._shows(show_progress))

    def _shows(self, show_progress: bool | None) -> bool:
        return self._show_progress if show_progress is None else show_progress

    # ------------------------------------------------------------------ deleting
    def delete(
        self, ids: Any = None, where: Any = None, where_document: Any = None, **options: Any
    ) -> dict[str, int]:
        """Delete rows and their KV, by id, conditions or both.

        Returns:
            As Chroma does: how many were `deleted`.

        Raises:
            InvalidInputError: If nothing says which; `clear` deletes all.
        """
        if where is None and where_document is None:
            if ids is None:
                raise InvalidInputError("say which rows to delete by ids, where or where_document")
            if options.get("limit") is not None:
                raise InvalidInputError("limit= needs where= or where_document=; ids are the limit")
        which = {"where": where, "where_document": where_document, **options}
        wanted = None if ids is None else listed(ids)
        return self._drop(lambda: self._rows.get(ids=wanted, metadata_only=True, **which))

    def delete_holding(self, key: str, values: Sequence[str], keep: Container[str] = ()) -> None:
        """Delete rows whose metadata `key` is one of `values`, in few calls.

        Args:
            key: Key of the metadata.
            values: Any number of values.
            keep: Ids of rows that stay.
        """
        self._drop(lambda: [row for row in self._rows.holding(key, values) if row.id not in keep])

    def clear(self) -> None:
        self._drop(lambda: self._rows.get(metadata_only=True))

    def _drop(self, select: Callable[[], Sequence[Row]]) -> dict[str, int]:
        with self._rows.writing():
            rows = select()
            prefiller = self._prefiller_of(rows)
            if prefiller is None:
                self._rows.delete([row.id for row in rows])
            else:
                prefiller.delete(rows)
        return {"deleted": len(rows)}

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Keep the KV of deleted rows until the block ends, for rows that are written again.

        Of several such blocks, nested or in other threads, the first one counts.
        """
        with self._rows.writing():
            is_first = self._rows.leaving is None
            if is_first:
                self._rows.leaving = {}
        if not is_first:
            yield
            return
        try:
            yield
        finally:
            with self._rows.writing():
                leaving, self._rows.leaving = self._rows.leaving, None
                if leaving:  # else no model is needed, and none is loaded
                    self.prefiller.drop_references(leaving)

    def drop_by(self, delete: Callable[[], None]) -> None:
        """Run `delete`, which drops the collection, and delete the KV of its rows."""
        with self._rows.writing():
            rows = self._rows.get(metadata_only=True)
            prefiller = self._prefiller_of(rows)
            delete()
        engine = None if prefiller is None else prefiller.engine
        if engine is not None:
            held = {Reference.from_metadata(row.metadata) for row in rows}
            keys = [one.resolve(engine) for one in held if one is not None]
            engine.delete([key for key in keys if key is not None])

    def replace_by(self, ids: Sequence[str], write: Callable[[], _T]) -> _T:
        """Run `write`, which may replace rows without prefilling, and delete the KV they had."""
        with self._rows.writing():
            rows = self._rows.get(ids=ids, metadata_only=True)
            prefiller = self._prefiller_of(rows)
            written = write()
            if prefiller is not None:
                prefiller.drop(rows)
        return written

    def _prefiller_of(self, rows: Sequence[Row]) -> RowPrefiller | None:
        """What deletes the rows' KV, loaded before they go; None if there is none.

        So a model that cannot be loaded is known before anything is deleted, and none is loaded for
        rows without references.
        """
        held = any(Reference.from_metadata(row.metadata) for row in rows)
        return self.prefiller if held else None

    # ------------------------------------------------------------------ reading
    def get(self, ids: Any = None, **options: Any) -> Any:
        """Like Chroma's `get`; an empty list of ids gives no rows."""
        wanted = None if ids is None else listed(ids)
        for id_ in wanted or ():
            check_unicode(f"the id {id_!r}", id_)
        found = self._rows.columns(wanted, **options)
        if found["metadatas"] is not None:
            found["metadatas"] = [self._shown(one) for one in found["metadatas"]]
        return found

    def query(self, *args: Any, **options: Any) -> Any:
        """Like Chroma's `query`, without rows that another process deleted."""
        found: Any = self.collection.query(*args, **options)
        if found["metadatas"] is None:
            return found
        if found["documents"] is not None:
            found = _without_ghosts(found)
        found["metadatas"] = [[self._shown(one) for one in column] for column in found["metadatas"]]
        return found

    def _shown(self, metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
        return None if metadata is None else self.shown(metadata) or None


def behind(proxy: Any, attribute: str, name: str) -> Any:
    """An attribute of the object that a proxy wraps."""
    # Copying asks a proxy for its magic methods before it has anything behind it.
    if name.startswith("__") or name == attribute:
        raise AttributeError(name)
    return getattr(getattr(proxy, attribute), name)


def listed(values: Any) -> list[Any]:
    """One value or many as a list, as Chroma takes them."""
    return [values] if isinstance(values, (str, dict)) else list(values)


def of_user(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A row's metadata without its reference to KV; if there is none, all keys are the user's."""
    if Reference.from_metadata(metadata) is None:
        return dict(metadata)
    return {key: value for key, value in metadata.items() if key not in REFERENCE_KEYS}


def _without_ghosts(found: dict[str, Any]) -> dict[str, Any]:
    """Query results without hits whose row is gone: neither document nor metadata."""
    kept = [
        [at for at, row in enumerate(zip(*columns, strict=True)) if row != (None, None)]
        for columns in zip(found["documents"], found["metadatas"], strict=True)
    ]
    if all(len(ats) == len(ids) for ats, ids in zip(kept, found["ids"], strict=True)):
        return found
    columns = ("ids", "documents", "metadatas", "distances", "embeddings", "uris", "data")
    return {
        **found,
        **{
            name: [[hits[at] for at in ats] for hits, ats in zip(found[name], kept, strict=True)]
            for name in columns
            if found.get(name) is not None
        },
    }
