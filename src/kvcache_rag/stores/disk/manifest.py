"""`spec.json`: which model a folder of chunks belongs to, for the people who look after a store.

The folder's name is a digest, which tells a machine everything and a person nothing.  No reader of
chunks looks at this file, and a store without it works as well.  It names model, revision, codec
and shapes; texts and names of tenants are not in it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcache_rag.kv.chunk import digest
from kvcache_rag.stores.disk.folders import READ, TEMPORARY, opened

if TYPE_CHECKING:
    from collections.abc import Mapping


NAME = "spec.json"

MAX_BYTES = 64 << 10


class Manifests:
    """The manifests that this process may have to write, by folder."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[str, Mapping[str, Any]] = {}

    def note(self, folder: str, description: Mapping[str, Any]) -> None:
        """Remember what the chunks of `folder` depend on; nothing is written."""
        self._known[folder] = description

    def publish(self, folder: str) -> None:
        """Write the manifest of an existing folder unless it is there or unknown; best effort."""
        description = self._known.get(folder)
        if description is None or os.path.lexists(f"{folder}/{NAME}"):
            return
        temporary = f"{folder}/{TEMPORARY}-{secrets.token_hex(16)}"
        with suppress(OSError, TypeError, ValueError):  # the last two: it is no JSON
            try:
                _write(temporary, {**description, "created": int(time.time())})
                os.replace(temporary, f"{folder}/{NAME}")
            finally:
                with suppress(OSError):
                    os.unlink(temporary)


def _write(path: str, values: Mapping[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
        json.dump(values, file, indent=1, sort_keys=True)
        file.write("\n")


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest of a folder of chunks; empty if there is none or it cannot be read."""
    try:
        with opened(f"{folder}/{NAME}", READ) as descriptor:
            found = json.loads(os.read(descriptor, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def summary(spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What of a spec a person wants to know.

    Args:
        spec: The dictionary that `spec_digest` is taken of, as `Prefiller.of` makes it.
        name: What the model was loaded as; of a folder only the last two parts are kept, since
            where it lies on one machine is nobody's business on another.
    """
    model = spec.get("model", {})
    prefix = spec.get("prefix", [])
    folder = "/".join(name.replace("\\", "/").split("/")[-2:])
    kept = ("codec", "compute_dtype", "stored_dtype", "format")
    return {
        **{field: spec[field] for field in kept if field in spec},
        "model": model.get("id") or folder or model.get("type"),
        "revision": model.get("revision") or model.get("weights"),
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
