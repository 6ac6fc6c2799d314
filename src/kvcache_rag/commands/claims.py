"""Claims on chunks that no row refers to any more: finding them and letting go, in all tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_rag.commands.collections import referenced
from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvcache_rag.stores import ChunkStore
    from kvcache_rag.stores.inventory import SpecFolder, StoredFile


def add_remote(parser: argparse.ArgumentParser) -> None:
    """Declare the tier behind the folder."""
    parser.add_argument(
        "--remote", metavar="URL", help="the remote tier behind the folder, such as s3://bucket/kv"
    )


@dataclass(frozen=True)
class Owner:
    """Somebody whose claims are looked at.

    Attributes:
        name: For people.
        mark: The id in names of files.
        still_used: Which of some keys rows refer to now.
        id: What the mark is a digest of, "" if only the mark is known.
        used: Keys that rows referred to when it was looked.
    """

    name: str
    mark: str
    still_used: Callable[[list[str]], set[str]]
    used: frozenset[str] = frozenset()
    id: str = ""


def collection_owner(collection: Any) -> Owner:
    """The claims of a collection that exists."""
    from kvcache_rag.integration import Rows
    from kvcache_rag.stores.upkeep import owner_mark

    rows = Rows(collection)

    def still_used(keys: list[str]) -> set[str]:
        return {str(row.metadata["kv_key"]) for row in rows.holding("kv_key", keys)}

    owner, used = str(collection.id), frozenset(referenced(collection))
    return Owner(f"collection {collection.name}", owner_mark(owner), still_used, used, owner)


@dataclass
class Unused:
    """Claims without a row, in one spec.

    Attributes:
        spec: The spec.
        files: What may be let go.
        young: How many were claimed too recently.
    """

    spec: SpecFolder
    files: list[StoredFile] = field(default_factory=list)
    young: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True)
class Remote:
    """The tier behind the folder, where the same owners claim the same chunks.

    Attributes:
        store: The store there.
        namespace: The tenant whose chunks are looked at; a folder tells only its digest.
    """

    store: ChunkStore
    namespace: str

    def release(self, spec: SpecFolder, digests: list[str], owner: str) -> None:
        """Release there what was released here."""
        from kvcache_rag.chunk import ChunkKey

        for digest in digests:
            # Of a spec a path has the first digits only, and a release needs no more than a path.
            key = ChunkKey(digest, spec.name.ljust(64, "0"), self.namespace, 0, 0)
            self.store.release(key, owner)

    def check(self) -> None:
        """Say that the remote failed, which a store only counts.

        Raises:
            InvalidInputError: If it did.
        """
        failure = self.store.stats().last_failure
        if failure:
            raise InvalidInputError(f"the remote tier failed ({failure}); run this again")


def open_remote(arguments: argparse.Namespace, *, grace: float = 600.0) -> Remote | None:
    """The remote tier that the arguments name, if they do.

    Raises:
        InvalidInputError: If there is none of that name.
        MissingExtraError: If its driver is not installed.
    """
    if arguments.remote is None:
        return None
    from kvcache_rag.stores import RemoteStore

    return Remote(RemoteStore(arguments.remote, release_grace=grace), arguments.namespace or "")


def unused(specs: Iterator[SpecFolder], owner: Owner, latest: float) -> Iterator[Unused]:
    """What an owner claimed at `latest` or before and no row refers to, per spec."""
    for spec in specs:
        found = Unused(spec)
        for file in spec.chunks():
            claimed = file.owners.get(owner.mark)
            if claimed is None or file.digest in owner.used:
                continue
            if claimed > latest:
                found.young += 1
            else:
                found.files.append(file)
        used = owner.still_used([file.digest for file in found.files]) if found.files else set()
        found.files = [file for file in found.files if file.digest not in used]
        yield found


def release(found: Unused, owner: Owner, remote: Remote | None = None) -> int:
    """Let go of what is unused, unless a row of it was written meanwhile; how many."""
    from kvcache_rag.stores.upkeep import let_go, take_back

    gone = [file for file in found.files if let_go(file, owner.mark)]
    used = owner.still_used([file.digest for file in gone]) if gone else set()
    for file in gone:
        if file.digest in used:
            take_back(file, owner.mark)
    let = [file.digest for file in gone if file.digest not in used]
    if remote is not None:
        remote.release(found.spec, let, owner.id)
    return len(let)
