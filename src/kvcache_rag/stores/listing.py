"""What is in the folder of a store on disk, for people who maintain it."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvcache_rag.stores.bytes import Entry
from kvcache_rag.stores.filesystem import READ, opened
from kvcache_rag.stores.folder import QUARANTINE, Folder
from kvcache_rag.stores.limits import kind_of
from kvcache_rag.stores.object_names import MANIFEST, SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_MANIFEST = 64 << 10  # bytes

_NAMESPACE = re.compile(r"[0-9a-f]{32}")

_SPEC = re.compile(r"[0-9a-f]{16}")

# Names in a store's own folder, those of remotes of 0.1.0 too.
_OF_A_STORE = re.compile(rf"{_NAMESPACE.pattern}(\.epoch)?|sweep\.lock|used|\.tmp.*")


@dataclass(frozen=True)
class StoredFile(Entry):
    """A file of a store.

    Attributes:
        root: Folder of the store.
    """

    root: str

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{self.root}/{self.name}"

    @property
    def digest(self) -> str:
        """Of the chunk, if it is one's."""
        return os.path.basename(self.name).removesuffix(SUFFIX)


def _files(root: str, prefix: str, kind: str) -> Iterator[StoredFile]:
    for entry in Folder(root).list(prefix):
        if kind_of(entry.name) == kind:
            yield StoredFile(**vars(entry), root=root)


@dataclass(frozen=True)
class SpecFolder:
    """The chunks of one model, dtype, codec and prefix.

    Attributes:
        name: First 16 digits of the spec's digest.
        root: Folder of the store.
        namespace: First 32 digits of the digest of the tenant's name.
    """

    name: str
    root: str
    namespace: str

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What `spec.json` says; empty if there is none or it cannot be read."""
        try:
            path = f"{self.root}/{self.namespace}/{self.name}/{MANIFEST}"
            with opened(path, READ) as descriptor:
                manifest = json.loads(os.read(descriptor, MAX_MANIFEST))
        except (OSError, ValueError, RecursionError):
            return {}
        return manifest if isinstance(manifest, dict) else {}

    def chunks(self) -> Iterator[StoredFile]:
        return _files(self.root, f"{self.namespace}/{self.name}/", "chunk")

    def unfinished(self) -> Iterator[StoredFile]:
        """Files that were never finished."""
        return _files(self.root, f"{self.namespace}/{self.name}/", "unfinished")


@dataclass(frozen=True)
class NamespaceFolder:
    """The chunks of one tenant.

    Attributes:
        name: First 32 digits of the digest of the tenant's name.
        root: Folder of the store.
    """

    name: str
    root: str

    @property
    def path(self) -> str:
        """The folder."""
        return f"{self.root}/{self.name}"

    def specs(self) -> list[SpecFolder]:
        """Its specs, by name."""
        return [SpecFolder(name, self.root, self.name) for name in _subfolders(self.path, _SPEC)]

    def quarantined(self) -> list[StoredFile]:
        """Files that were put aside because they were not what they should be."""
        return [*_files(self.root, f"{self.name}/{QUARANTINE}/", "aside")]

    def deleted(self) -> list[StoredFile]:
        """What an interrupted deletion of the namespace left; the next sweep drops it."""
        return [*_files(self.root, f"{self.name}/", "deleted")]


def namespaces(root: str | os.PathLike[str]) -> Iterator[NamespaceFolder]:
    """The namespaces of a store's folder, by name; none if there is no such folder."""
    real = os.path.realpath(root)
    for name in _subfolders(real, _NAMESPACE):
        yield NamespaceFolder(name, real)


def is_store(root: str) -> bool:
    """Whether a folder is empty, or something in it is of a store."""
    names = os.listdir(root)
    return not names or any(map(_OF_A_STORE.fullmatch, names))


def _subfolders(path: str, name: re.Pattern[str]) -> list[str]:
    with suppress(OSError):
        if not os.path.islink(path):  # which would lead out of the store
            with os.scandir(path) as items:
                return sorted(
                    item.name
                    for item in items
                    if name.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
                )
    return []


def manifest_of(spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What of a spec a person wants to know.

    Args:
        spec: The dictionary that `spec_digest` is taken of, as `Prefiller.from_model` makes it.
        name: What the model was loaded as; of a folder only the last two parts are kept, since
            where it lies on one machine is nobody's business on another.
    """
    model = spec.get("model", {})
    prefix = spec.get("prefix", [])
    folder = "/".join(name.replace("\\", "/").split("/")[-2:])
    from kvcache_rag.kv.chunk import digest  # loads torch, which who lists does not want

    kept = ("codec", "compute_dtype", "stored_dtype", "format")
    return {
        **{field: spec[field] for field in kept if field in spec},
        "model": model.get("id") or folder or model.get("type"),
        "revision": model.get("revision") or model.get("weights") or model.get("gguf"),
        "type": model.get("type"),
        "quantization": model.get("quantization"),
        "groups": [
            {
                "layers": len(group["layers"]),
                "key_shape": group["key_shape"],
                "value_shape": group["value_shape"],
            }
            for group in spec.get("groups", [])
        ],
        "prefix_tokens": len(prefix),
        "prefix_digest": digest("kvcache-rag-prefix", json.dumps(prefix).encode())[:16],
    }
