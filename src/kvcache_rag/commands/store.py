"""`kvcache-rag store ACTION DIR`: look after a folder of chunks, without a model."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_rag.commands import garbage, permissions
from kvcache_rag.commands.collections import add_place, is_placed
from kvcache_rag.commands.listing import duration, model_name, moment, plain, plural, size, table
from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from kvcache_rag.stores.disk.folders import NamespaceFolder, SpecFolder, StoredFile

HELP = "list, measure, check and clean a folder of chunks"
WHOLE, DAMAGED = 0, 1


@dataclass
class Summary:
    """A spec's chunks in numbers.

    Attributes:
        chunks: Files of chunks.
        nbytes: Their size.
        used: When the last of them was used, 0.0 without any.
        owners: Chunks held per owner's id.
        unowned: Chunks without any claim or tombstone, which only the limit drops.
        released: Chunks whose last owner released them.
        missing: Claims of chunks that are not there.
        unfinished: Files that were never finished.
        unfinished_bytes: Their size.
        sample: One of the chunks, None without any.
    """

    chunks: int = 0
    nbytes: int = 0
    used: float = 0.0
    owners: Counter[str] = field(default_factory=Counter)
    unowned: int = 0
    released: int = 0
    missing: int = 0
    unfinished: int = 0
    unfinished_bytes: int = 0
    sample: StoredFile | None = None

    @classmethod
    def of(cls, spec: SpecFolder) -> Summary:
        """Count what lies in a spec's folder."""
        summary = cls()
        for stripe in spec.stripes():
            summary.unfinished += len(stripe.unfinished)
            summary.unfinished_bytes += sum(leftover.nbytes for leftover in stripe.unfinished)
            for file in stripe.files:
                summary.add(file)
        return summary

    def add(self, file: StoredFile) -> None:
        """Count one chunk, or the claims of one that is not there."""
        if not file.is_held:
            self.missing += bool(file.owners)
            return
        self.chunks += 1
        self.nbytes += file.nbytes
        self.used = max(self.used, file.used)
        self.owners.update(file.owners.keys())
        self.released += bool(file.released) and not file.owners
        self.unowned += not file.released and not file.owners
        self.sample = file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    names = "ls|du|verify|gc|fix-permissions"
    actions = parser.add_subparsers(dest="action", required=True, metavar=names)
    ls = actions.add_parser("ls", help="what is there, by namespace and model")
    add_place(ls)
    ls.add_argument("--chunks", action="store_true", help="every chunk, one per line")
    ls.add_argument("--json", action="store_true", help="one JSON object; per chunk with --chunks")
    du = actions.add_parser("du", help="how much room is taken by what")
    du.add_argument("--json", action="store_true", help="print one JSON object")
    verify = actions.add_parser("verify", help="read every file and check it; 1 if one is damaged")
    verify.add_argument("--delete", action="store_true", help="move damaged files to quarantine")
    gc = actions.add_parser("gc", help="release what no row refers to any more")
    garbage.add_arguments(gc)
    restrict = actions.add_parser(
        "fix-permissions", help="make files 0600 and folders 0700; 1 if one was left as it is"
    )
    for action in (ls, du, verify, gc, restrict):
        action.add_argument("folder", metavar="DIR", help="folder of the store")
        action.add_argument(
            "--namespace", metavar="NAME", help="only this tenant; '' is the default"
        )


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked; 0, or 1 if `verify` found a damaged file."""
    if not Path(arguments.folder).is_dir():
        raise InvalidInputError(f"there is no folder {arguments.folder}; name that of a DiskStore")
    actions = {
        "ls": _list,
        "du": _measure,
        "verify": _verify,
        "gc": garbage.run,
        "fix-permissions": permissions.run,
    }
    return actions[arguments.action](arguments)


# ---------------------------------------------------------------------- ls
def _list(arguments: argparse.Namespace) -> int:
    names = _owner_names(arguments)
    if arguments.chunks:
        for namespace in garbage.chosen(arguments):
            for spec in namespace.specs():
                _list_chunks(arguments, namespace, spec, names)
        return WHOLE
    descriptions = [_described(namespace, names) for namespace in garbage.chosen(arguments)]
    if arguments.json:
        print(
            json.dumps({"store": str(Path(arguments.folder).resolve()), "namespaces": descriptions})
        )
        return WHOLE
    for description in descriptions:
        print("\n".join(_lines(description)))
    if not descriptions:
        print(f"{arguments.folder} holds no chunks")
    return WHOLE


def _owner_names(arguments: argparse.Namespace) -> dict[str, str]:
    """Names of collections by the id under which files know them."""
    if not is_placed(arguments):
        return {}
    from kvcache_rag.commands.collections import all_collections, open_client
    from kvcache_rag.stores.disk.folders import owner_mark

    collections = all_collections(open_client(arguments))
    return {owner_mark(str(collection.id)): str(collection.name) for collection in collections}


def _described(namespace: NamespaceFolder, names: Mapping[str, str]) -> dict[str, Any]:
    aside, deleted = list(namespace.quarantined()), list(namespace.deleted())
    return {
        "namespace": namespace.name,
        "is_default": garbage.is_default(namespace),
        "quarantined": len(aside),
        "quarantined_bytes": sum(file.nbytes for file in aside),
        "deleted": len(deleted),
        "deleted_bytes": sum(file.nbytes for file in deleted),
        "specs": [_described_spec(spec, Summary.of(spec), names) for spec in namespace.specs()],
    }


def _described_spec(spec: SpecFolder, found: Summary, names: Mapping[str, str]) -> dict[str, Any]:
    fields = ("chunks", "nbytes", "used", "unowned", "released", "missing")
    return {
        "spec": spec.name,
        **{name: spec.manifest.get(name) for name in ("model", "revision", "compute_dtype")},
        "codec": str(spec.manifest.get("codec") or _codec_of(found.sample)),
        "prefix_tokens": spec.manifest.get("prefix_tokens"),
        "created": spec.manifest.get("created"),
        **{name: getattr(found, name) for name in fields},
        "unfinished": found.unfinished,
        "unfinished_bytes": found.unfinished_bytes,
        "owners": {names.get(mark, mark): count for mark, count in found.owners.most_common()},
    }


def _codec_of(sample: StoredFile | None) -> str:
    """What a file says of itself, where a store was filled before there were manifests."""
    from kvcache_rag.errors import CorruptChunkError
    from kvcache_rag.stores.disk.file import file_facts

    if sample is None:
        return "?"
    try:
        return file_facts(sample.path, sample.digest).codec
    except (CorruptChunkError, OSError):
        return "?"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    quarantined = found["quarantined"]
    aside = f", {quarantined} quarantined" if quarantined else ""
    yield f"namespace {_namespace_name(found['namespace'], found['is_default'])}{aside}"
    rows = [("spec", "model", "codec", "chunks", "size", "last used (UTC)", "owners")]
    for spec in found["specs"]:
        owners = [f"{name}: {count}" for name, count in spec["owners"].items()]
        counts = ("unowned", "released", "missing", "unfinished")
        owners += [f"({name}: {spec[name]})" for name in counts if spec[name]]
        rows.append(
            (
                spec["spec"],
                model_name(spec),
                spec["codec"],
                str(spec["chunks"]),
                size(spec["nbytes"]),
                moment(spec["used"]),
                " ".join(owners) or "nobody",
            )
        )
    yield from (f"  {line}" for line in table(rows, frozenset({3, 4})))


def _namespace_name(name: str, is_default: bool) -> str:
    return f"{name} (default)" if is_default else name


def _list_chunks(
    arguments: argparse.Namespace,
    namespace: NamespaceFolder,
    spec: SpecFolder,
    names: Mapping[str, str],
) -> None:
    for chunk in spec.chunks():
        values: dict[str, Any] = {
            "namespace": namespace.name,
            "spec": spec.name,
            "digest": chunk.digest,
            "is_held": chunk.is_held,
            "bytes": chunk.nbytes,
            "tokens": _tokens(chunk),
            "used": chunk.used,
            "owners": [names.get(mark, mark) for mark in sorted(chunk.owners)],
            "released": {names.get(mark, mark): when for mark, when in chunk.released.items()},
        }
        if arguments.json:
            print(json.dumps(values))
            continue
        owners = ",".join([*values["owners"], *(f"-{name}" for name in values["released"])])
        tokens = "?" if values["tokens"] is None else values["tokens"]
        columns = (f"{chunk.nbytes:>12}", f"{tokens:>7}", moment(chunk.used), owners or "nobody")
        print(chunk.digest, *map(plain, columns), sep="  ")


def _tokens(chunk: StoredFile) -> int | None:
    from kvcache_rag.errors import CorruptChunkError
    from kvcache_rag.stores.disk.file import file_facts

    try:
        return file_facts(chunk.path, chunk.digest).tokens
    except (CorruptChunkError, OSError):
        return None


# ---------------------------------------------------------------------- du
def _measure(arguments: argparse.Namespace) -> int:
    descriptions = [_described(namespace, {}) for namespace in garbage.chosen(arguments)]
    rows = [row for description in descriptions for row in _parts(description)]
    total = sum(nbytes for _, nbytes, _ in rows)
    if arguments.json:
        parts = [{"part": part, "bytes": nbytes, "files": files} for part, nbytes, files in rows]
        print(json.dumps({"bytes": total, "parts": parts}))
        return WHOLE
    written = [(size(nbytes), plural(files, "file"), part) for part, nbytes, files in rows]
    files = sum(files for *_, files in rows)
    print("\n".join(table([*written, (size(total), plural(files, "file"), "total")], _FIRST_TWO)))
    return WHOLE


_FIRST_TWO = frozenset({0, 1})


def _parts(found: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    name = found["namespace"]
    for spec in found["specs"]:
        place = f"{name}/{spec['spec']}"
        yield f"{place}  {model_name(spec)} {spec['codec']}", spec["nbytes"], spec["chunks"]
        if spec["unfinished"]:
            yield f"{place}  unfinished files", spec["unfinished_bytes"], spec["unfinished"]
    for part in ("quarantined", "deleted"):
        if found[part]:
            yield f"{name}  {part} files", found[f"{part}_bytes"], found[part]


# ---------------------------------------------------------------------- verify
def _verify(arguments: argparse.Namespace) -> int:
    import time

    from kvcache_rag.progress import progress_bar

    checked = nbytes = damaged = 0
    total = sum(
        chunk.is_held
        for namespace in garbage.chosen(arguments)
        for spec in namespace.specs()
        for chunk in spec.chunks()
    )
    started = time.perf_counter()
    with progress_bar(total, "verify", "file", show=sys.stderr.isatty()) as bar:
        for namespace in garbage.chosen(arguments):
            for spec in namespace.specs():
                for chunk in spec.chunks():
                    if not chunk.is_held:
                        continue
                    checked, nbytes = checked + 1, nbytes + chunk.nbytes
                    damaged += _is_damaged(chunk, delete=arguments.delete)
                    bar.update(1)
    took = duration(time.perf_counter() - started)
    aside = ", moved to quarantine" if arguments.delete else ""
    verdict = f"{damaged} damaged{aside}" if damaged else "all whole"
    print(f"{plural(checked, 'file')}, {size(nbytes)}, read in {took}: {verdict}")
    return DAMAGED if damaged else WHOLE


def _is_damaged(chunk: StoredFile, *, delete: bool) -> bool:
    from kvcache_rag.errors import CorruptChunkError
    from kvcache_rag.stores.disk.file import verify_file
    from kvcache_rag.stores.disk.folders import quarantine

    try:
        status = os.lstat(chunk.path)
        verify_file(chunk.path, chunk.digest)
    except FileNotFoundError:
        return False  # it was dropped meanwhile
    except OSError as error:
        print(f"{plain(chunk.path)}: cannot be read: {error.strerror}", flush=True)
        return True
    except CorruptChunkError as error:
        print(plain(f"{chunk.path}: {error}"), flush=True)
        if delete:
            quarantine(chunk.stem, status)
        return True
    return False
