"""`kvcache-rag store gc`: mark what the rows of named collections use, and let go of the rest.

Only claims of the named owners are touched, so no other collection can lose a chunk.  A claim
younger than the grace time is left alone, because a row may still be on its way, and what was let
go by mistake is claimed again when a row turns up.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from kvcache_rag.commands.claims import (
    Owner,
    Remote,
    add_remote,
    collection_owner,
    open_remote,
    release,
    unused,
)
from kvcache_rag.commands.collections import (
    add_place,
    all_collections,
    is_placed,
    open_client,
    open_collections,
)
from kvcache_rag.commands.listing import model_name, plural, size
from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvcache_rag.stores.inventory import Leftover, NamespaceFolder

DEFAULT = hashlib.sha256(b"").hexdigest()[:32]
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
    """Show what would go, or let go of it; 0."""
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
    return namespace.name == DEFAULT


def chosen(arguments: argparse.Namespace) -> Iterator[NamespaceFolder]:
    """The namespaces that the arguments name: one, or all."""
    from kvcache_rag.stores.inventory import namespaces

    name = arguments.namespace
    if name is None and getattr(arguments, "remote", None) is not None:
        name = ""  # a folder tells no more than the digest of its tenant
    wanted = None if name is None else hashlib.sha256(name.encode()).hexdigest()[:32]
    return (one for one in namespaces(arguments.folder) if wanted in (None, one.name))


def _owners(arguments: argparse.Namespace) -> Iterator[Owner]:
    from kvcache_rag.stores.upkeep import owner_mark

    client = open_client(arguments) if arguments.collection or is_placed(arguments) else None
    if client is not None:
        alive = {owner_mark(str(one.id)): str(one.name) for one in all_collections(client)}
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
    specs = (spec for one in chosen(arguments) for spec in one.specs())
    total, kept = 0, f"{plural(len(owner.used), 'chunk')} in use"
    print(f"{owner.name}: {kept}")
    for found in unused(specs, owner, latest):
        if not found.files and not found.young:
            continue
        count = release(found, owner, remote) if arguments.yes else len(found.files)
        total += count
        young = f", {found.young} claimed too recently" if found.young else ""
        done = "released" if arguments.yes else "would be released"
        told = f"{plural(count, 'chunk')} ({size(found.nbytes)}) {done}{young}"
        print(f"  {found.spec.name} {model_name(found.spec.manifest)}: {told}")
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
    from kvcache_rag.stores.upkeep import discard

    latest = time.time() - LEFTOVER_AGE
    old = [one for one in _leftovers(arguments) if one.written <= latest]
    if arguments.yes:
        old = [one for one in old if discard(one)]
    done = "removed" if arguments.yes else "would be removed"
    nbytes = sum(one.nbytes for one in old)
    print(f"leftovers: {plural(len(old), 'file')} ({size(nbytes)}) {done}")


def _leftovers(arguments: argparse.Namespace) -> Iterator[Leftover]:
    from kvcache_rag.stores.inventory import Leftover

    for namespace in chosen(arguments):
        yield from namespace.quarantined()
        for spec in namespace.specs():
            yield from (one for one in spec.entries() if isinstance(one, Leftover))
