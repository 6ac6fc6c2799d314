"""`kvcache-rag store gc`: release chunks that no row of the named collections refers to any more.

What a Chroma collection refers to, its rows say.  Only claims of the named owners are touched, in
all tiers, so no other collection can lose a chunk.  A claim younger than the
grace time is left alone, because a row may still be on its way, and what was released by mistake is
claimed again when a row turns up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_rag.commands.collections import (
    add_place,
    all_collections,
    is_placed,
    open_client,
    open_collections,
    referenced,
)
from kvcache_rag.commands.listing import model_name, size
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.progress import plain, plural

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvcache_rag.stores import ChunkStore
    from kvcache_rag.stores.disk.folders import (
        Leftover,
        NamespaceFolder,
        SpecFolder,
        StoredFile,
    )


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
    from kvcache_rag.stores.disk.folders import owner_mark

    rows = Rows(collection)

    def still_used(keys: list[str]) -> set[str]:
        return {str(row.metadata["kv_key"]) for row in rows.holding("kv_key", keys)}

    owner, used = str(collection.id), frozenset(referenced(collection))
    return Owner(plain(f"collection {collection.name}"), owner_mark(owner), still_used, used, owner)


@dataclass
class Unused:
    """Claims without a row, in one spec.

    Attributes:
        spec: The spec.
        files: What may be released.
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
        from kvcache_rag.kv.chunk import ChunkKey

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
        surplus = Unused(spec)
        for file in spec.chunks():
            claimed = file.owners.get(owner.mark)
            if claimed is None or file.digest in owner.used:
                continue
            if claimed > latest:
                surplus.young += 1
            else:
                surplus.files.append(file)
        used = owner.still_used([file.digest for file in surplus.files]) if surplus.files else set()
        surplus.files = [file for file in surplus.files if file.digest not in used]
        yield surplus


def release(found: Unused, owner: Owner, remote: Remote | None = None) -> int:
    """Release what is unused, unless a row of it was written meanwhile; how many."""
    files = [file for file in found.files if file.release(owner.mark)]
    used = owner.still_used([file.digest for file in files]) if files else set()
    for file in files:
        if file.digest in used:
            file.restore(owner.mark)
    released = [file.digest for file in files if file.digest not in used]
    if remote is not None:
        remote.release(found.spec, released, owner.id)
    return len(released)


LEFTOVER_AGE = 3600.0  # seconds; as of `DiskStore.temp_age`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare whose claims to look at, and whether to do it."""
    parser.add_argument(
        "--collection", action="append", default=[], metavar="NAME", help="a collection; repeatable"
    )
    add_place(parser)
    parser.add_argument(
        "--owner",
        action="append",
        default=[],
        metavar="ID",
        help="release all that a deleted collection claimed: its id, or as `store ls` prints it",
    )
    parser.add_argument(
        "--leftovers", action="store_true", help="unfinished and quarantined files of an hour ago"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="leave claims and released chunks younger than this alone (default: 600)",
    )
    add_remote(parser)
    parser.add_argument("--yes", action="store_true", help="do it; without this it is only shown")


def run(arguments: argparse.Namespace) -> int:
    """Show what would be released, or release it; 0."""
    if not (arguments.collection or arguments.owner or arguments.leftovers):
        raise InvalidInputError("say what to look at: --collection, --owner or --leftovers")
    if not arguments.grace >= 0:  # NaN, too
        raise InvalidInputError("--grace must be at least 0 seconds")
    remote = open_remote(arguments, grace=arguments.grace)
    for owner in _owners(arguments):
        _collect(arguments, owner, remote)
    if arguments.leftovers:
        _tidy(arguments)
    _sweep(arguments, remote)
    if not arguments.yes:
        print("nothing was changed; say --yes to do it")
    return 0


def is_default(namespace: NamespaceFolder) -> bool:
    """Whether it is the namespace of those who name none."""
    from kvcache_rag.stores.disk.folders import namespace_digest

    return namespace.name == namespace_digest("")


def chosen(arguments: argparse.Namespace) -> Iterator[NamespaceFolder]:
    """The namespaces that the arguments name: one, or all."""
    from kvcache_rag.stores.disk.folders import namespace_digest, namespaces

    name = arguments.namespace
    if name is None and getattr(arguments, "remote", None) is not None:
        name = ""  # a folder tells no more than the digest of its tenant
    wanted = None if name is None else namespace_digest(name)
    return (folder for folder in namespaces(arguments.folder) if wanted in (None, folder.name))


def _owners(arguments: argparse.Namespace) -> Iterator[Owner]:
    from kvcache_rag.stores.disk.folders import owner_mark

    client = open_client(arguments) if arguments.collection or is_placed(arguments) else None
    if client is not None:
        alive = {
            owner_mark(str(collection.id)): str(collection.name)
            for collection in all_collections(client)
        }
        for owner in arguments.owner:
            if owner_mark(owner) in alive:
                name = alive[owner_mark(owner)]
                raise InvalidInputError(
                    f"--owner {owner} is the collection {name!r}, which exists; "
                    f"say --collection {name} to keep what its rows use"
                )
        yield from map(collection_owner, open_collections(client, arguments.collection))
    for owner in arguments.owner:
        mark = owner_mark(owner)
        if arguments.remote is not None and mark == owner:
            raise InvalidInputError("with --remote, --owner needs the whole id of the collection")
        yield Owner(f"owner {owner}", mark, lambda _: set(), id=owner)


def _collect(arguments: argparse.Namespace, owner: Owner, remote: Remote | None) -> None:
    latest = time.time() - arguments.grace
    specs = (spec for folder in chosen(arguments) for spec in folder.specs())
    total, kept = 0, f"{plural(len(owner.used), 'chunk')} in use"
    print(f"{owner.name}: {kept}")
    for surplus in unused(specs, owner, latest):
        if not surplus.files and not surplus.young:
            continue
        count = release(surplus, owner, remote) if arguments.yes else len(surplus.files)
        total += count
        young = f", {surplus.young} claimed too recently" if surplus.young else ""
        done = "released" if arguments.yes else "would be released"
        amount = f"{plural(count, 'chunk')} ({size(surplus.nbytes)}) {done}{young}"
        print(f"  {surplus.spec.name} {model_name(surplus.spec.manifest)}: {amount}")
    if not total:
        print("  nothing to release")


def _sweep(arguments: argparse.Namespace, remote: Remote | None) -> None:
    """Drop what was released long enough ago, by whomever."""
    from kvcache_rag.stores import DiskStore

    latest = time.time() - arguments.grace
    if arguments.yes:
        store = DiskStore(
            arguments.folder, namespace=arguments.namespace, release_grace=arguments.grace
        )
        dropped = plural(store.sweep(), "chunk")
        if remote is not None:
            dropped += f" and {remote.store.sweep()} in {arguments.remote}"
            remote.check()
        print(f"{dropped} dropped, released {arguments.grace:.0f} s ago or before")
        return
    due = [
        file.nbytes
        for namespace in chosen(arguments)
        for spec in namespace.specs()
        for file in spec.chunks()
        if file.is_held and file.is_released(latest)
    ]
    print(f"{plural(len(due), 'chunk')} ({size(sum(due))}) released before would be dropped")


def _tidy(arguments: argparse.Namespace) -> None:
    latest = time.time() - LEFTOVER_AGE
    old = [leftover for leftover in _leftovers(arguments) if leftover.written <= latest]
    if arguments.yes:
        old = [leftover for leftover in old if leftover.remove()]
    done = "removed" if arguments.yes else "would be removed"
    nbytes = sum(leftover.nbytes for leftover in old)
    print(f"leftovers: {plural(len(old), 'file')} ({size(nbytes)}) {done}")


def _leftovers(arguments: argparse.Namespace) -> Iterator[Leftover]:
    for namespace in chosen(arguments):
        yield from namespace.quarantined()
        for spec in namespace.specs():
            yield from spec.unfinished()
