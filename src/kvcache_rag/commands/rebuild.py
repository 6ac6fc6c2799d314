"""`kvcache-rag rebuild DIR`: new model, codec or template, while the old one goes on serving.

New keys stand beside the old ones.  The chunks of every row are computed while the old ones still
answer, then the rows are pointed to them, and what the collection claimed before is released.  A
run that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.commands import garbage
from kvcache_rag.commands.collections import add_place, open_client, open_collections
from kvcache_rag.commands.listing import (
    ADAPTER,
    MODEL,
    add_signing_key,
    add_weight_format,
    duration,
    model_name,
    size,
)
from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from kvcache_rag.progress import plural

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.integration import Row, RowPrefiller
    from kvcache_rag.integration.rows import RowText
    from kvcache_rag.stores.disk.folders import SpecFolder

HELP = "compute a collection's chunks for another model, codec or template, then retire the old"
_LOOKED_AT = 50  # rows by which the form of texts is told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the store, the collections and what shall serve them from now on."""
    parser.add_argument("folder", metavar="DIR", help="folder of the store")
    parser.add_argument("--model", required=True, help=MODEL)
    parser.add_argument("--adapter", metavar="NAME", help=ADAPTER)
    add_weight_format(parser)
    parser.add_argument("--revision", help="commit, branch or tag of a model on the hub")
    parser.add_argument("--dtype", help="such as bfloat16 (default: as it was saved)")
    parser.add_argument(
        "--codec", choices=("native", "int8", "int4"), default="native", help="form on disk"
    )
    parser.add_argument("--system-prompt", help="instruction, instead of the template's own")
    parser.add_argument("--ttl", type=float, help="the one that the store is opened with, if any")
    parser.add_argument("--namespace", default="", metavar="NAME", help="tenant (default: '')")
    parser.add_argument(
        "--collection", action="append", required=True, metavar="NAME", help="repeatable"
    )
    add_place(parser)
    garbage.add_remote(parser)
    add_signing_key(parser)
    parser.add_argument(
        "--text",
        metavar="FORM",
        help="what of a row stands in prompts: document, or a form that an installed package "
        "brings, such as llama-index (default: the one that the rows' references were made of)",
    )
    parser.add_argument(
        "--keep-old", action="store_true", help="release nothing; run again without it to retire"
    )
    parser.add_argument("--yes", action="store_true", help="do it; without this it is only shown")


def run(arguments: argparse.Namespace) -> int:
    """Show what would be computed and retired, or do it; 0."""
    from pathlib import Path

    from kvcache_rag.integration import RowPrefiller, Rows

    if not Path(arguments.folder).is_dir():
        raise InvalidInputError(f"there is no folder {arguments.folder}; name that of a DiskStore")
    collections = open_collections(open_client(arguments), arguments.collection)
    engine = _open(arguments)
    print(f"new spec {engine.spec[:16]}: {arguments.model}, {arguments.codec}")
    for collection in collections:
        _rebuild(
            arguments, RowPrefiller(Rows(collection), engine, str(collection.id)), collection.name
        )
    if not arguments.yes:
        print("nothing was changed; say --yes to do it")
    return 0


def _open(arguments: argparse.Namespace) -> Engine:
    from kvcache_rag.integration.engine import EngineSettings, open_store
    from kvcache_rag.stores import TieredStore

    settings = EngineSettings.of(arguments, system_prompt=arguments.system_prompt or None)
    common = {"codec": arguments.codec, "signing_key": arguments.signing_key}
    store = open_store(arguments.folder, ttl=arguments.ttl, **common)
    if arguments.remote is not None:
        store = TieredStore(store, open_store(arguments.remote, **common))
    engine = settings.open(store)
    if engine.refusal:
        raise UnsupportedModelError(f"{engine.refusal}, and stored chunks would be of no use")
    return engine


@dataclass(frozen=True)
class Outdated:
    """What of one collection is to be computed and written anew.

    Attributes:
        rows: Rows with text.
        missing: Different chunks that are not stored yet.
        tokens: Their tokens.
        nbytes: Bytes of their keys and values, before the codec.
        stale: Rows whose reference is missing or another.
        specs: Rows per spec that they refer to now, by its first 16 digits.
    """

    rows: int
    missing: int
    tokens: int
    nbytes: int
    stale: int
    specs: Counter[str]


def _outdated(prefiller: RowPrefiller, engine: Engine, text_of: RowText) -> Outdated:
    from kvcache_rag.integration import Reference

    rows = [row for row in prefiller.rows.get() if text_of(row).strip()]
    keys = engine.keys([text_of(row) for row in rows])
    references = [Reference.from_metadata(row.metadata) for row in rows]
    missing = {key for key in keys if not engine.store.contains(key)}
    return Outdated(
        rows=len(rows),
        missing=len(missing),
        tokens=sum(key.tokens for key in missing),
        nbytes=sum(engine.nbytes(key) for key in missing),
        stale=sum(
            reference is None or reference.key != key.digest
            for reference, key in zip(references, keys, strict=True)
        ),
        specs=Counter(reference.spec[:16] for reference in references if reference is not None),
    )


def _rebuild(arguments: argparse.Namespace, prefiller: RowPrefiller, name: str) -> None:
    engine = prefiller.engine
    if engine is None:
        return
    text_of = _form(arguments.text, prefiller, engine)
    outdated = _outdated(prefiller, engine, text_of)
    there = ", ".join(f"{count} refer to {spec}" for spec, count in outdated.specs.items())
    print(f"collection {name}: {plural(outdated.rows, 'row')}, {there or 'none refers to a chunk'}")
    missing = plural(outdated.missing, "chunk")
    print(f"  {missing} to prefill, {outdated.tokens} tokens, {size(outdated.nbytes)}")
    if arguments.yes:
        started = time.perf_counter()
        written = prefiller.fill(text_of, show_progress=True)
        took = duration(time.perf_counter() - started)
        print(f"  filled in {took}, {plural(written, 'row')} now refer to the new spec")
        _check_kept(engine, prefiller, text_of)
    else:
        print(f"  {plural(outdated.stale, 'row')} would refer to the new spec")
    if not arguments.keep_old:
        _retire(arguments, prefiller, engine)


def _check_kept(engine: Engine, prefiller: RowPrefiller, text_of: RowText) -> None:
    """Refuse to retire the old chunks when the new ones are not there.

    Raises:
        InvalidInputError: If some could not be stored.
    """
    lost = _outdated(prefiller, engine, text_of).missing
    if lost:
        reason = engine.store.stats().last_failure or "they were dropped to stay within the limit"
        raise InvalidInputError(
            f"{plural(lost, 'chunk')} could not be kept ({reason}); nothing old was released"
        )


def _retire(arguments: argparse.Namespace, prefiller: RowPrefiller, engine: Engine) -> None:
    """Release what the collection claims in other specs of its namespace."""
    remote = garbage.open_remote(arguments)
    owner = garbage.collection_owner(prefiller.rows.collection)
    if not arguments.yes:
        # The rows still refer to the old chunks, and will not.
        owner = garbage.Owner(owner.name, owner.mark, lambda _: set())
    for unused in garbage.unused(_others(arguments, engine), owner, time.time()):
        if not unused.files:
            continue
        count = garbage.release(unused, owner, remote) if arguments.yes else len(unused.files)
        done = "released" if arguments.yes else "would be released"
        name = f"{unused.spec.name} {model_name(unused.spec.manifest)}"
        print(f"  {name}: {plural(count, 'chunk')} ({size(unused.nbytes)}) {done}")
    if remote is not None:
        remote.check()


def _others(arguments: argparse.Namespace, engine: Engine) -> Iterator[SpecFolder]:
    for namespace in garbage.chosen(arguments):
        for spec in namespace.specs():
            if spec.name != engine.spec[:16]:
                yield spec


# ---------------------------------------------------------------------- texts
def _form(name: str | None, prefiller: RowPrefiller, engine: Engine) -> RowText:
    """How to read the text of a collection's rows.

    Raises:
        InvalidInputError: If there is no form of that name, or the rows do not tell which.
    """
    from kvcache_rag.integration.rows import installed_forms, row_text

    if name:
        return row_text(name, engine.template)
    forms = installed_forms()
    rows = prefiller.rows.get(limit=_LOOKED_AT)
    fitting = [form for form in forms.values() if _fits(form, rows, engine)]
    if not fitting:
        raise InvalidInputError(
            f"the references of {prefiller.rows.collection.name!r} do not tell what of its rows "
            f"stands in prompts; say --text {' or '.join(forms)}"
        )
    return fitting[0]


def _fits(text_of: RowText, rows: Sequence[Row], engine: Engine) -> bool:
    """Whether the rows' references were made of these texts."""
    from kvcache_rag.integration import Reference, text_digest

    references = [(Reference.from_metadata(row.metadata), row) for row in rows]
    digests = [
        (reference.text, text_of(row)) for reference, row in references if reference is not None
    ]
    return bool(digests) and all(digest == text_digest(text, engine) for digest, text in digests)
