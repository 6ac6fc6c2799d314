"""The API key file: who may call, and as which tenant.

    # key                                namespace  [name shown in metrics and logs]
    sha256:9f86d081884c7d659a2feaa0c5...  acme       acme-web
    a-key-in-clear-of-16-or-more-letters  globex

It has one key per line, with fields separated by blanks; `#` starts a comment.  A key is given as
its SHA-256 (what `new_key` writes) or in clear.  Several keys may have the same namespace, and then
the same name too.  A server reads the file when it starts, and at SIGHUP. Keys are never logged;
metrics know a key by the name in its line, or the first digits of its digest.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


METRICS_NAMESPACE: Final = "@metrics"
"""A key of this namespace only reads `/metrics`."""

LEAST_LETTERS: Final = 16

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

# What the system lacks is 0: a link is then followed, as there were no private modes either.
_NO_LINK: Final[int] = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """Who calls, according to the server's authentication, never to a body.

    Attributes:
        namespace: Tenant whose chunks are seen; "" without keys.
        key_id: Name of the API key, for limits, logs and metrics; never the key itself.
    """

    namespace: str = ""
    key_id: str = "anonymous"


@dataclass(frozen=True)
class ApiKey:
    """One line of the file.

    Attributes:
        digest: SHA-256 of the key, 32 bytes; the key itself is not kept.
        caller: Who calls with it.
    """

    digest: bytes = field(repr=False)
    caller: Caller


@dataclass(frozen=True)
class ApiKeys:
    """The keys that a server accepts."""

    known: tuple[ApiKey, ...] = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read a key file.

        The log reports a file that others than its owner may read.

        Raises:
            InvalidInputError: If it cannot be read, holds no key, or has a line that is not a key.
        """
        try:
            text = path.read_bytes().decode("utf-8-sig")
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(
                f"the file of API keys {path} cannot be read ({error}); make it by "
                "`kvcache-rag serve --api-keys FILE --new-key NAMESPACE`"
            ) from error
        if os.name == "posix" and mode & 0o077:
            _LOG.warning(
                "others may read the API keys in %s; restrict it by: chmod 600 %s", path, path
            )
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> ApiKeys:
        """The keys in a file's text; errors name `path`.

        Raises:
            InvalidInputError: If it holds no key, or has a line that is not a key.
        """
        keys: dict[bytes, ApiKey] = {}
        # Only "\n" ends a line: behind what else some programs end one at, a key could hide in what
        # others show as a comment.
        for number, line in enumerate(text.split("\n"), start=1):
            fields = line.split("#", 1)[0].split()
            if not fields:
                continue
            key = _parse(fields, f"{path}, line {number}")
            if key.digest in keys:
                raise InvalidInputError(f"{path}, line {number}: this key stands there already")
            _check_name(key.caller, keys.values(), f"{path}, line {number}")
            keys[key.digest] = key
        if not keys:
            raise InvalidInputError(
                f"there is no key in {path}; add one by --api-keys {path} --new-key NAMESPACE"
            )
        return cls(tuple(keys.values()))

    def caller(self, key: str) -> Caller | None:
        """Who calls with a key; None if it is unknown.

        The time taken reveals nothing about known keys.
        """
        digest = _digest(key)
        caller = None
        for api_key in self.known:
            if hmac.compare_digest(api_key.digest, digest):
                caller = api_key.caller
        return caller


def new_key(path: Path, namespace: str) -> str:
    """Add a key to a file, which is created (for its owner only) if missing.

    Args:
        path: The file.
        namespace: Tenant that calls with the key, or `METRICS_NAMESPACE`.

    Returns:
        The key; the file holds only its digest.

    Raises:
        InvalidInputError: If the namespace's name is not allowed, or the file cannot be written, is
            a link, or may be read or written by others.
    """
    _check_namespace(namespace, "--new-key")
    key = f"kv-{secrets.token_urlsafe(32)}"
    line = f"sha256:{_digest(key).hex()} {namespace}\n"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o600)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            _check_private(path, os.fstat(file.fileno()).st_mode)
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(line.encode())
    except OSError as error:
        if path.is_symlink():
            raise InvalidInputError(
                f"{path} is a link, which may lead to a file of somebody else's; name the file"
            ) from error
        raise InvalidInputError(f"cannot write API keys to {path}: {error.strerror}") from error
    return key


def _check_private(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise InvalidInputError(f"{path} is no ordinary file, so it keeps no keys; name another")
    if os.name == "posix" and mode & 0o077:
        raise InvalidInputError(
            f"others than its owner may use {path}, so no key is added; restrict it by: "
            f"chmod 600 {path}"
        )


def _parse(fields: list[str], place: str) -> ApiKey:
    if len(fields) not in (2, 3):
        raise InvalidInputError(
            f"{place}: write a key, its namespace and optionally a name, divided by blanks"
        )
    key, namespace = fields[:2]
    _check_namespace(namespace, place)
    match = _DIGEST.fullmatch(key)
    if key.lower().startswith("sha256:") and match is None:
        raise InvalidInputError(
            f"{place}: sha256: is followed by 64 hexadecimal digits; write all of it in lower case"
        )
    if match is None and len(key) < LEAST_LETTERS:
        raise InvalidInputError(
            f"{place}: a key of less than {LEAST_LETTERS} letters can be guessed; use a longer one"
        )
    digest = bytes.fromhex(match[1]) if match else _digest(key)
    name = fields[2] if len(fields) == 3 else f"key-{digest.hex()[:8]}"
    if not _NAMESPACE.fullmatch(name):
        raise InvalidInputError(
            f"{place}: the name {_shown(name)} may have letters, digits, '.', '_' and '-' only"
        )
    return ApiKey(digest, Caller(namespace, name))


def _check_name(caller: Caller, before: Iterable[ApiKey], place: str) -> None:
    """Metrics and logs know keys by their names: one name is of one namespace."""
    for other in before:
        if other.caller.key_id == caller.key_id and other.caller.namespace != caller.namespace:
            raise InvalidInputError(
                f"{place}: the name {caller.key_id!r} is that of a key of another namespace; give "
                "this one a name of its own"
            )


def _check_namespace(namespace: str, place: str) -> None:
    if namespace != METRICS_NAMESPACE and not _NAMESPACE.fullmatch(namespace):
        raise InvalidInputError(
            f"{place}: the namespace {_shown(namespace)} must be 1 to 63 letters, digits, '.', '_' "
            f"and '-', the first a letter or digit, or {METRICS_NAMESPACE}"
        )


def _shown(word: str) -> str:
    """A word for messages; only the beginning of one that is long enough to be a misplaced key."""
    return repr(word if len(word) < LEAST_LETTERS else f"{word[:4]}...")


def _digest(key: str) -> bytes:
    # Keys are random, so a plain digest cannot be turned back.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
