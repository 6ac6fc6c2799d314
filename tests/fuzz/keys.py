"""The file of API keys.

Law: a file is refused by `InvalidInputError`, which never says a key, or each line that a reader of
its own finds in it is one key, of the namespace that stands there, and nobody else is known.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_server.keys import ApiKeys

_FOLDER = tempfile.TemporaryDirectory()
_PATH = Path(_FOLDER.name, "keys")
_LINE = re.compile(
    r"(?P<key>\S+)\s+(?P<namespace>@metrics|[A-Za-z0-9][\w.-]{0,62})"
    r"(?:\s+(?P<name>[A-Za-z0-9][\w.-]{0,62}))?",
    re.ASCII,
)
_DIGEST = "sha256:"


def seeds() -> list[bytes]:
    """Keys in clear and as digests, with names, comments and several ends of lines."""
    digest = hashlib.sha256(b"another-key-in-clear").hexdigest()
    return [
        f"a-key-in-clear-0123456 acme acme-web # note\n\nsha256:{digest} globex\n".encode(),
        f"\ufeff# keys\r\nsha256:{digest}\t@metrics\r\n".encode(),
    ]


def check(data: bytes) -> bool:
    """Whether the file is accepted."""
    _write(data)
    try:
        keys = ApiKeys.load(_PATH)
    except InvalidInputError as error:
        _check_message(str(error), data)
        return False
    expected: dict[bytes, tuple[str, str]] = {}
    for line in data.decode("utf-8-sig").split("\n"):
        words = line.partition("#")[0].strip()
        if words:
            _expect(" ".join(words.split()), expected)
    found = {key.digest: (key.caller.namespace, key.caller.key_id) for key in keys.known}
    assert found == expected
    return True


def _check_message(message: str, data: bytes) -> None:
    if "another namespace" in message:  # it says a name, and names are shown in metrics, too
        return
    for word in data.decode("utf-8", "replace").split():
        assert len(word) < 16 or word not in message, "an error may say a key"


def _write(data: bytes) -> None:
    # Emptied first, some file systems would write it to the disk each time.
    handle = os.open(_PATH, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.write(handle, data)
        os.ftruncate(handle, len(data))
    finally:
        os.close(handle)


def _expect(line: str, expected: dict[bytes, tuple[str, str]]) -> None:
    match = _LINE.fullmatch(line)
    assert match, "a line that is no key was accepted"
    key, namespace = match["key"], match["namespace"]
    if key.lower().startswith(_DIGEST):
        assert re.fullmatch("sha256:[0-9a-f]{64}", key), "what looks like a digest is a key"
        digest = bytes.fromhex(key.removeprefix(_DIGEST))
    else:
        assert len(key) >= 16, "a key that can be guessed"
        digest = hashlib.sha256(key.encode()).digest()
    assert digest not in expected, "one key twice"
    expected[digest] = (namespace, match["name"] or f"key-{digest.hex()[:8]}")
