"""Which tenant a request to the engine is for, signed by the front end, which alone has the key.

A client of the engine could write any namespace into its request, so it is never read from there:
a grant is bound to one request and expires.

    grant = base64url(namespace, expiry) "." base64url(HMAC-SHA256(key, namespace, expiry, request))
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import struct
import time
from typing import TYPE_CHECKING, Final, NoReturn

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import digest
from kvcache_rag.stores.signing import LEAST_BYTES, secret_in_file, secret_in_text

if TYPE_CHECKING:
    from collections.abc import Callable

ENVIRONMENT: Final = "KVCACHE_RAG_ENGINE_KEY"

# Seconds for which a grant is good: a request may wait in the engine's queue.
SECONDS: Final = 900

_MOST_TEXT: Final = 1024


class GrantKey:
    """The secret of a front end and its engines; in no message, `repr`, log or pickle."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        """Take a key of at least 32 random bytes.

        Raises:
            InvalidInputError: If it is shorter.
        """
        if len(secret) < LEAST_BYTES:
            raise InvalidInputError(
                f"the key of an engine has at least {LEAST_BYTES} bytes, not {len(secret)}; "
                "make one by: (umask 077; openssl rand -hex 32 > FILE)"
            )
        self._secret, self._clock = secret, clock

    @classmethod
    def from_file(cls, file: str | os.PathLike[str] | None = None) -> GrantKey:
        """The key in a file that its owner alone can read; without one, that of the environment.

        Raises:
            InvalidInputError: If there is none, or it cannot be used.
        """
        if file is not None:
            return cls(secret_in_file(file, "the file of the engine's key"))
        text = os.environ.get(ENVIRONMENT)
        if not text:
            raise InvalidInputError(
                "the front end and its engines share a key: name its file, or set "
                f"{ENVIRONMENT}; make one by: (umask 077; openssl rand -hex 32 > FILE)"
            )
        return cls(secret_in_text(os.fsencode(text), f"the variable {ENVIRONMENT}"))

    def __repr__(self) -> str:
        """Nothing of it."""
        return "GrantKey()"

    def __reduce__(self) -> NoReturn:
        """Refuse: what is pickled is sent and stored."""
        raise InvalidInputError(
            "the key of an engine is not pickled; name its file where it is needed"
        )

    def issue(self, namespace: str, request: str, seconds: float = SECONDS) -> str:
        """A grant for one request.

        Args:
            namespace: The tenant, "" for none.
            request: `TransferParams.digest` of the request.
            seconds: For how long it is good.
        """
        said = struct.pack("<d", self._clock() + seconds) + namespace.encode()
        return f"{_text(said)}.{_text(self._mac(said, request))}"

    def salt(self, namespace: str) -> str:
        """What keeps a tenant's ordinary requests apart in the engine's prefix cache."""
        message = digest("kvcache-rag-salt", namespace.encode())
        return hmac.digest(self._secret, message.encode(), hashlib.sha256).hex()

    def namespace(self, grant: str, request: str) -> str:
        """The tenant of a request.

        Raises:
            InvalidInputError: If the grant is not for this request, not of this key or too old.
        """
        said, _, mac = grant.partition(".")
        try:
            known, tag = _bytes(said), _bytes(mac)
            expiry = struct.unpack_from("<d", known)[0]
            namespace = known[8:].decode()
        except (binascii.Error, struct.error, UnicodeDecodeError, ValueError):
            raise InvalidInputError("the request has no grant that can be read") from None
        if not hmac.compare_digest(tag, self._mac(known, request)):
            raise InvalidInputError(
                "the request's grant is not of this engine's key, or not for it"
            )
        if not self._clock() < expiry:
            raise InvalidInputError("the request's grant has expired; compare the clocks")
        return namespace

    def _mac(self, said: bytes, request: str) -> bytes:
        message = digest("kvcache-rag-grant", said, request.encode("ascii"))
        return hmac.digest(self._secret, message.encode(), hashlib.sha256)


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode("ascii").rstrip("=")


def _bytes(text: str) -> bytes:
    if len(text) > _MOST_TEXT or not text.isascii():
        raise ValueError
    value = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _text(value) != text:  # bits that no byte has
        raise ValueError
    return value
