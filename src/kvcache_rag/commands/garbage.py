"""`kvcache-rag store gc`: drop the chunks that no row of the named collections refers to.

What a Chroma collection refers to, its rows say.  A chunk that was written or used within the least
age is left alone, because a row may be on its way to it.  What goes by mistake is a miss.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvcache_rag.commands.collections import add_chroma, open_client, open_collections, referenced
from kvcache_rag.commands.listing import model_name, size
from kvcache_rag.commands.options import number
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.progress import plural

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvcache_rag.stores import ChunkStore
    from kvcache_rag.stores.listing import NamespaceFolder, SpecFolder, StoredFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare whose chunks stay, and whether to do it."""
    parser.add_argument(
        "--collection",
        action="append",
        default=[],
        metavar="NAME",
        help="a collection whose chunks stay; repeatable, and name all that use the folder",
    )
    add_chroma(parser)
    parser.add_argument(
        "--min-age",
        type=number(),
        default=600.0,
        metavar="SECONDS",
        help="leave alone what was written or used within them (default: 600)",
    )
    parser.add_argument(
        "--remote", metavar="URL", help="drop the same there, in a tier such as s3://bucket/kv"
    )
    parser.add_argument("--yes", action="store_true", help="do it; without this it is only shown")


def run(arguments: argparse.Namespace) -> int:
    """Show what would go, or drop it; 0."""
    if not arguments.collection:
        raise InvalidInputError("say whose chunks stay: --collection, once for each collection")
    if arguments.chroma is None:
        raise InvalidInputError("say where the collections are: --chroma FOLDER or URL")
    arguments.namespace = arguments.namespace or ""  # rows do not tell those of other tenants
    collections = open_collections(open_client(arguments.chroma), arguments.collection)
    used = {key for collection in collections for key in referenced(collection)}
    print(f"{plural(len(used), 'chunk')} in use")
    from kvcache_rag.stores import DiskStore, RemoteStore

    disk = DiskStore(arguments.folder, namespace=arguments.namespace)
    stores: list[ChunkStore] = [disk]
    if arguments.remote is not None:
        stores.append(RemoteStore(arguments.remote))
    latest = time.time() - arguments.min_age
    for namespace in chosen(arguments):
        for spec in namespace.specs():
            files = [file for file in spec.chunks() if file.digest not in used]
            old = [file for file in files if max(file.written, file.used) <= latest]
            if arguments.yes:
                _drop(spec, old, arguments.namespace, stores)
            if files:
                _tell(spec, old, len(files) - len(old), done=arguments.yes)
    if not arguments.yes:
        print("nothing was changed; say --yes to do it")
        return 0
    disk.sweep()  # what killed writers left
    if arguments.remote is not None and (failure := stores[-1].stats().last_failure):
        raise InvalidInputError(f"the remote tier failed ({failure}); run this again")
    return 0


def _drop(
    spec: SpecFolder, files: list[StoredFile], namespace: str, stores: list[ChunkStore]
) -> None:
    from kvcache_rag.kv.chunk import ChunkKey

    for file in files:
        # Of a spec a path has the first digits only, and a deletion needs no more than a path.
        key = ChunkKey(file.digest, spec.name.ljust(64, "0"), namespace, 0, 0)
        for store in reversed(stores):
            store.delete(key)


def _tell(spec: SpecFolder, files: list[StoredFile], young: int, *, done: bool) -> None:
    what = "dropped" if done else "would be dropped"
    amount = f"{plural(len(files), 'chunk')} ({size(sum(file.nbytes for file in files))}) {what}"
    left = f", {young} used too recently" if young else ""
    print(f"  {spec.name} {model_name(spec.manifest)}: {amount}{left}")


def is_default(namespace: NamespaceFolder) -> bool:
    """Whether it is the namespace of those who name none."""
    from kvcache_rag.stores.object_names import namespace_digest

    return namespace.name == namespace_digest("")


def chosen(arguments: argparse.Namespace) -> Iterator[NamespaceFolder]:
    """The namespaces that the arguments name: one, or all."""
    from kvcache_rag.stores.listing import namespaces
    from kvcache_rag.stores.object_names import namespace_digest

    name = arguments.namespace
    wanted = None if name is None else namespace_digest(name)
    return (folder for folder in namespaces(arguments.folder) if wanted in (None, folder.name))
