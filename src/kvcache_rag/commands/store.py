"""`kvcache-rag store ACTION DIR`: look after a folder of chunks, without a model."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvcache_rag.commands import garbage, permissions
from kvcache_rag.commands.listing import duration, model_name, moment, size
from kvcache_rag.commands.options import add_json, add_options
from kvcache_rag.errors import InvalidInputError, expanded
from kvcache_rag.progress import plain, plural, progress_bar, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvcache_rag.stores.bytes import Blob
    from kvcache_rag.stores.listing import NamespaceFolder, SpecFolder, StoredFile
    from kvcache_rag.stores.signing import SigningKey

HELP = "list, measure, check and clean a folder of chunks"
WHOLE, DAMAGED = 0, 1

Outcome: TypeAlias = Literal["right", "damaged", "unreadable", "untrusted"]


@dataclass
class Summary:
    """A spec's chunks in numbers.

    Attributes:
        chunks: Files of chunks.
        nbytes: Their size.
        used: When the last of them was used, 0.0 without any.
        unfinished: Files that were never finished.
        unfinished_bytes: Their size.
        sample: One of the chunks, None without any.
    """

    chunks: int = 0
    nbytes: int = 0
    used: float = 0.0
    unfinished: int = 0
    unfinished_bytes: int = 0
    sample: StoredFile | None = None

    @classmethod
    def from_spec(cls, spec: SpecFolder) -> Summary:
        """Count what lies in a spec's folder."""
        summary = cls()
        for leftover in spec.unfinished():
            summary.unfinished += 1
            summary.unfinished_bytes += leftover.nbytes
        for file in spec.chunks():
            summary.chunks += 1
            summary.nbytes += file.nbytes
            summary.used = max(summary.used, file.used)
            summary.sample = file
        return summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    from kvcache_rag.settings import StoreOptions

    names = "ls|du|check|gc|fix-permissions"
    actions = parser.add_subparsers(dest="action", required=True, metavar=names)
    ls = actions.add_parser("ls", aliases=["list"], help="what is there, by namespace and model")
    ls.add_argument("--chunks", action="store_true", help="every chunk, one per line")
    add_json(ls, "; per chunk with --chunks")
    du = actions.add_parser("du", help="how much room is taken by what")
    add_json(du)
    check = actions.add_parser("check", help="read every file and check it; 1 if one is damaged")
    check.add_argument("--delete", action="store_true", help="move damaged files to quarantine")
    add_options(check, StoreOptions, "signing_key")
    gc = actions.add_parser("gc", help="drop what no row of the named collections refers to")
    garbage.add_arguments(gc)
    restrict = actions.add_parser(
        "fix-permissions", help="make files 0600 and folders 0700; 1 if one was left as it is"
    )
    for action in (ls, du, check, gc, restrict):
        action.add_argument("folder", type=expanded, metavar="KV_DIR", help="folder of the chunks")
        action.add_argument(
            "--namespace", metavar="NAME", help="only this tenant; '' is the default"
        )


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked; 0, or 1 if `check` found a file that is not right."""
    from kvcache_rag.stores.listing import is_store

    if not Path(arguments.folder).is_dir():
        raise InvalidInputError(f"there is no folder {arguments.folder}; name that of a DiskStore")
    if not is_store(arguments.folder):
        raise InvalidInputError(
            f"{arguments.folder} is no folder of a store, nothing in it is a DiskStore's; name the "
            "one that was given as --kv-dir or kv_dir="
        )
    actions = {
        "ls": _list,
        "list": _list,
        "du": _measure,
        "check": _check,
        "gc": garbage.run,
        "fix-permissions": permissions.run,
    }
    return actions[arguments.action](arguments)


# ---------------------------------------------------------------------- ls
def _list(arguments: argparse.Namespace) -> int:
    if arguments.chunks:
        for namespace in garbage.chosen(arguments):
            for spec in namespace.specs():
                _list_chunks(arguments, namespace, spec)
        return WHOLE
    descriptions = [_described(namespace) for namespace in garbage.chosen(arguments)]
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


def _described(namespace: NamespaceFolder) -> dict[str, Any]:
    aside, deleted = list(namespace.quarantined()), list(namespace.deleted())
    return {
        "namespace": namespace.name,
        "is_default": garbage.is_default(namespace),
        "quarantined": len(aside),
        "quarantined_bytes": sum(file.nbytes for file in aside),
        "deleted": len(deleted),
        "deleted_bytes": sum(file.nbytes for file in deleted),
        "specs": [_described_spec(spec, Summary.from_spec(spec)) for spec in namespace.specs()],
    }


def _described_spec(spec: SpecFolder, found: Summary) -> dict[str, Any]:
    return {
        "spec": spec.name,
        **{name: spec.manifest.get(name) for name in ("model", "revision", "compute_dtype")},
        "codec": str(spec.manifest.get("codec") or _codec_of(found.sample)),
        "prefix_tokens": spec.manifest.get("prefix_tokens"),
        "created": spec.manifest.get("created"),
        **{name: getattr(found, name) for name in ("chunks", "nbytes", "used")},
        "unfinished": found.unfinished,
        "unfinished_bytes": found.unfinished_bytes,
    }


def _codec_of(sample: StoredFile | None) -> str:
    """What a file says of itself, where a store was filled before there were manifests."""
    from kvcache_rag.errors import CorruptChunkError
    from kvcache_rag.stores.file import file_header

    if sample is None:
        return "?"
    try:
        return file_header(sample.path, sample.digest).codec
    except (CorruptChunkError, OSError):
        return "?"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    quarantined = found["quarantined"]
    aside = f", {quarantined} quarantined" if quarantined else ""
    yield f"namespace {_namespace_name(found['namespace'], found['is_default'])}{aside}"
    rows = [("spec", "model", "codec", "chunks", "size", "last used (UTC)", "")]
    for spec in found["specs"]:
        unfinished = spec["unfinished"]
        rows.append(
            (
                spec["spec"],
                model_name(spec),
                spec["codec"],
                str(spec["chunks"]),
                size(spec["nbytes"]),
                moment(spec["used"]),
                f"({unfinished} unfinished)" if unfinished else "",
            )
        )
    yield from (f"  {line}" for line in table(rows, frozenset({3, 4})))


def _namespace_name(name: str, is_default: bool) -> str:
    return f"{name} (default)" if is_default else name


def _list_chunks(
    arguments: argparse.Namespace, namespace: NamespaceFolder, spec: SpecFolder
) -> None:
    for chunk in spec.chunks():
        values: dict[str, Any] = {
            "namespace": namespace.name,
            "spec": spec.name,
            "digest": chunk.digest,
            "bytes": chunk.nbytes,
            "tokens": _tokens(chunk),
            "used": chunk.used,
        }
        if arguments.json:
            print(json.dumps(values))
            continue
        tokens = "?" if values["tokens"] is None else values["tokens"]
        columns = (f"{chunk.nbytes:>12}", f"{tokens:>7}", moment(chunk.used))
        print(chunk.digest, *map(plain, columns), sep="  ")


def _tokens(chunk: StoredFile) -> int | None:
    from kvcache_rag.errors import CorruptChunkError
    from kvcache_rag.stores.file import file_header

    try:
        return file_header(chunk.path, chunk.digest).tokens
    except (CorruptChunkError, OSError):
        return None


# ---------------------------------------------------------------------- du
def _measure(arguments: argparse.Namespace) -> int:
    descriptions = [_described(namespace) for namespace in garbage.chosen(arguments)]
    rows = [row for description in descriptions for row in _parts(description)]
    total = sum(nbytes for _, nbytes, _ in rows)
    if arguments.json:
        parts = [{"part": part, "bytes": nbytes, "files": files} for part, nbytes, files in rows]
        print(json.dumps({"bytes": total, "parts": parts}))
        return WHOLE
    written = [(size(nbytes), plural(files, "file"), part) for part, nbytes, files in rows]
    files = sum(files for *_, files in rows)
    written.append((size(total), plural(files, "file"), "total"))
    print("\n".join(table(written, _FIRST_TWO, heads=False)))
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


# ---------------------------------------------------------------------- check
def _check(arguments: argparse.Namespace) -> int:
    from kvcache_rag.stores.signing import SigningKey

    key = SigningKey.of(arguments.signing_key)
    outcomes = Outcomes()
    for chunk in outcomes.over(arguments):
        outcomes.note(_checked(chunk, key, delete=arguments.delete))
    aside = ", moved to quarantine" if arguments.delete else ", computed anew when they are needed"
    verdicts = [f"{outcomes.damaged} damaged{aside}"] if outcomes.damaged else []
    verdicts += [f"{outcomes.untrusted} not signed by the key"] if outcomes.untrusted else []
    print(f"{outcomes.read}: {', '.join(verdicts) or 'all whole'}")
    return DAMAGED if verdicts else WHOLE


def _checked(chunk: StoredFile, key: SigningKey | None, *, delete: bool) -> Outcome:
    from kvcache_rag.stores.file import verify_file
    from kvcache_rag.stores.filesystem import READ, NotAFileError, open_file
    from kvcache_rag.stores.folder import Folder
    from kvcache_rag.stores.runs import close

    seen: Blob = b""
    with _reported(chunk) as failed:
        with suppress(NotAFileError):
            seen = FileIO(open_file(chunk.path, READ)[0])
        verify_file(chunk.path, chunk.digest, key)
    if failed == ["damaged"] and delete:
        with suppress(OSError):
            Folder(chunk.root).delete([chunk.name], damaged=seen)
    close(seen)
    return failed[0] if failed else "right"


# ---------------------------------------------------------------------- reading every file
@dataclass
class Outcomes:
    """What was found in a walk over all files.

    Attributes:
        checked: Files that were read.
        nbytes: Their size.
        damaged: Files that cannot be read, or are not what they should be.
        untrusted: Files that a key did not sign.
        seconds: What it took.
    """

    checked: int = 0
    nbytes: int = 0
    damaged: int = 0
    untrusted: int = 0
    seconds: float = 0.0

    @property
    def read(self) -> str:
        """How much was read, for people."""
        took = duration(self.seconds)
        return f"{plural(self.checked, 'file')}, {size(self.nbytes)}, read in {took}"

    def over(self, arguments: argparse.Namespace) -> Iterator[StoredFile]:
        """Every chunk's file that the arguments name."""
        import time

        total, started = sum(1 for _ in _held(arguments)), time.perf_counter()
        with progress_bar(total, "check", "file", show=True) as bar:
            for chunk in _held(arguments):
                self.checked, self.nbytes = self.checked + 1, self.nbytes + chunk.nbytes
                yield chunk
                bar.update(1)
        self.seconds = time.perf_counter() - started

    def note(self, outcome: Outcome) -> None:
        """Count what became of one file."""
        self.damaged += outcome in ("damaged", "unreadable")
        self.untrusted += outcome == "untrusted"


def _held(arguments: argparse.Namespace) -> Iterator[StoredFile]:
    for namespace in garbage.chosen(arguments):
        for spec in namespace.specs():
            yield from spec.chunks()


@contextmanager
def _reported(chunk: StoredFile) -> Iterator[list[Outcome]]:
    """Print what is wrong with a file, and note it; what was dropped meanwhile is not wrong."""
    from kvcache_rag.errors import CorruptChunkError, UntrustedChunkError

    failed: list[Outcome] = []
    try:
        yield failed
    except FileNotFoundError:
        return
    except OSError as error:
        print(f"{plain(chunk.path)}: cannot be read: {error.strerror or error}", flush=True)
        failed.append("unreadable")
    except (CorruptChunkError, UntrustedChunkError) as error:
        print(plain(f"{chunk.path}: {error}"), flush=True)
        failed.append("damaged" if isinstance(error, CorruptChunkError) else "untrusted")
