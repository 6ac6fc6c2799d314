"""Which rows of a vector store use which chunks, for stores whose rows do not say it themselves.

Rows of a Chroma collection have a reference in their metadata, so the collection itself tells which
chunks it still wants.  Of any other store this record tells it: it lies beside the chunks, is
written by whoever prefills under the store's name, and knows what a deletion leaves without a row.
It has ids as digests only, and no text.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvcache_rag.stores import ChunkStore

# A row that two models prefill has a use for each; dropping the row drops both.
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS uses (
    row TEXT, document TEXT, chunk TEXT, spec TEXT, tokens INTEGER, PRIMARY KEY (row, spec)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunks ON uses (chunk);
CREATE INDEX IF NOT EXISTS documents ON uses (document);
"""

_COLUMNS: Final = "chunk, spec, tokens"

_WAIT: Final = 60.0  # seconds for another process that writes


class Use(NamedTuple):
    """A chunk that a row uses.

    Attributes:
        chunk: Digest of the chunk, 64 hexadecimal digits.
        spec: What its tensors depend on.
        tokens: Its length.
    """

    chunk: str
    spec: str
    tokens: int


class OwnerRecord:
    """What the rows of one named store use, for all models that prefill them.

    Thread-safe, and shared by processes where it is a file.  Every method raises `sqlite3.Error` or
    `OSError` where the file cannot be read or written.

    Attributes:
        path: The file, made by the first write; None for a record in the memory of this process.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._memory = _connected(":memory:") if path is None else None

    @classmethod
    def beside(cls, store: ChunkStore, namespace: str, name: str) -> OwnerRecord:
        """That of the vector store `name`: in the folder of the chunks, if they lie in one."""
        from kvcache_rag.stores import DiskStore
        from kvcache_rag.stores.disk import folders

        for tier in getattr(store, "tiers", (store,)):
            if isinstance(tier, DiskStore):
                folder = folders.namespace_folder(str(tier.root), namespace)
                return cls(folders.record_path(folder, folders.identity(name)))
        records = _IN_MEMORY.setdefault(store, {})
        return records.setdefault((namespace, name), cls())

    def put(self, rows: Mapping[str, tuple[str, Use]]) -> list[Use]:
        """Note what rows use now.

        Args:
            rows: By id the document ("" for none) and the chunk; what is known of an id is
                replaced.

        Returns:
            What no row uses any more, now that these were replaced.
        """
        values = [(_digest(id_), _digest(document), *use) for id_, (document, use) in rows.items()]
        with self._writing() as database:
            before = [
                use
                for row, _, _, spec, _ in values
                for use in _uses(database, "row = ? AND spec = ?", (row, spec))
            ]
            database.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?, ?)", values)
            return _unused(database, before)

    def drop(self, *, ids: Iterable[str] = (), documents: Iterable[str] = ()) -> list[Use]:
        """Forget rows by id, and all rows of documents.

        Returns:
            What no row uses any more.
        """
        return self._forget(
            [("row = ?", _digest(id_)) for id_ in ids]
            + [("document = ?", _digest(document)) for document in documents if document]
        )

    def forget(self, chunks: Iterable[str]) -> None:
        """Forget the rows that use chunks, given by digest."""
        self._forget([("chunk = ?", chunk) for chunk in chunks])

    def clear(self) -> list[Use]:
        """Forget all rows.

        Returns:
            What they used.
        """
        with self._writing() as database:
            before = _uses(database)
            database.execute("DELETE FROM uses")
        return list(dict.fromkeys(before))

    def chunks(self) -> set[str]:
        """Digests of the chunks that rows use."""
        with self._opened() as database:
            return {use.chunk for use in _uses(database)}

    def using(self, chunks: Iterable[str]) -> set[str]:
        """Which chunks, given by digest, a row uses."""
        with self._opened() as database:
            return {chunk for chunk in chunks if _is_used(database, chunk)}

    def _forget(self, conditions: Sequence[tuple[str, str]]) -> list[Use]:
        with self._writing() as database:
            before: list[Use] = []
            for condition, value in conditions:
                before += _uses(database, condition, (value,))
                database.execute(f"DELETE FROM uses WHERE {condition}", (value,))
            return _unused(database, before)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._opened() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                database.execute("ROLLBACK")
                raise

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._memory is not None:
                yield self._memory
                return
            # Opened anew each time: the namespace may have been deleted, and the file with it.
            path = str(self.path)
            _make_file(path)
            with closing(_connected(path)) as database:
                yield database


_IN_MEMORY: Final[WeakKeyDictionary[ChunkStore, dict[tuple[str, str], OwnerRecord]]] = (
    WeakKeyDictionary()
)


def known_record(folder: str, owner: str) -> OwnerRecord | None:
    """The record of an owner, known by its mark, in a namespace's folder; None if there is none.

    Raises:
        InvalidInputError: If it cannot be read.
    """
    from kvcache_rag.stores.disk import folders

    path = folders.record_path(folder, owner)
    if not os.path.lexists(path):
        return None
    record = OwnerRecord(path)
    try:
        record.using(())
    except (OSError, sqlite3.Error) as error:
        raise InvalidInputError(
            f"what the rows of owner {owner} use cannot be read ({error}); remove {path}, and "
            "prefill the store's rows again"
        ) from error
    return record


def _connected(path: str) -> sqlite3.Connection:
    # No isolation level: transactions begin and end where it is said.
    database = sqlite3.connect(path, _WAIT, isolation_level=None, check_same_thread=False)
    try:
        database.executescript(_TABLE)
    except sqlite3.Error:
        database.close()
        raise
    return database


def _make_file(path: str) -> None:
    """Make sure that there is a file of this user, and no link, where SQLite will open one."""
    from kvcache_rag.stores.disk import folders

    folder = os.path.dirname(path)
    root = os.path.dirname(os.path.dirname(folder))
    folders.make_folder(root, folder)
    with folders.opened(path, folders.APPEND):
        pass


def _uses(
    database: sqlite3.Connection, condition: str = "TRUE", values: Sequence[str] = ()
) -> list[Use]:
    found = database.execute(f"SELECT {_COLUMNS} FROM uses WHERE {condition}", values)
    return [Use(*row) for row in found]


def _unused(database: sqlite3.Connection, uses: Iterable[Use]) -> list[Use]:
    return [use for use in dict.fromkeys(uses) if not _is_used(database, use.chunk)]


def _is_used(database: sqlite3.Connection, chunk: str) -> bool:
    found = database.execute("SELECT 1 FROM uses WHERE chunk = ? LIMIT 1", (chunk,))
    return found.fetchone() is not None


def _digest(id_: str) -> str:
    if not id_:
        return ""
    return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[:32]
