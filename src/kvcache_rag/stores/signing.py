"""Authenticate a chunk's file with a keyed MAC over every byte, for folders that others can write.

A file's checksum detects damage, but whoever changes the file can compute it anew.  A MAC can only
be computed with the key.  It is GMAC: AES-256-GCM over the whole file as associated data (NIST SP
800-38D), the fastest that was measured.  It is at the end of the header's `provenance`, so that
readers without a key, older ones included, read the file as any other:

    "provenance": "kvcache-rag 0.1.0 gmac-<key id>-<nonce>-<tag>"

Tag and nonce are hexadecimal; the tag is over the file with zeros ("0") in place of the tag.  The
nonce is 12 random bytes for each file, so one key is good for 2**32 files.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from kvcache_rag.errors import InvalidInputError, MissingExtraError, UntrustedChunkError, expanded
from kvcache_rag.stores.filesystem import READ, NotAFileError, opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.stores.bytes import Buffer

ENVIRONMENT: Final = "KVCACHE_RAG_SIGNING_KEY"

LEAST_BYTES: Final = 32

_MOST_BYTES: Final = 4096

_NONCE: Final = 12  # bytes; what GCM is made for

_PIECE: Final = 1 << 20  # OpenSSL counts what it is given at a time in 31 bits

_FORM = re.compile(r".* (gmac-([0-9a-f]{16})-([0-9a-f]{24})-([0-9a-f]{32}))")

_NO_TAG: Final = "0" * 32

_HOW: Final = "make one by: (umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True)
class Mac:
    """What a file says of its MAC.

    Attributes:
        key: Id of the key.
        nonce: 24 hexadecimal digits.
        tag: 32 hexadecimal digits, zeros while it is not known.
    """

    key: str
    nonce: str
    tag: str = _NO_TAG

    def __str__(self) -> str:
        """As it stands in the file."""
        return f"gmac-{self.key}-{self.nonce}-{self.tag}"

    @classmethod
    def in_provenance(cls, provenance: str) -> Mac | None:
        """What is at the end of a header's `provenance`; None if the file has no MAC."""
        match = _FORM.fullmatch(provenance)
        return None if match is None else cls(*match.groups()[1:])

    def covered(self, head: Buffer) -> bytes:
        """The bytes before the payload as the tag is over them: with zeros in its place.

        Raises:
            UntrustedChunkError: If the MAC does not stand there exactly once.
        """
        written = str(self).encode("ascii")
        if bytes(head).count(written) != 1:
            raise UntrustedChunkError("its MAC is not written as a key writes it")
        return bytes(head).replace(written, str(replace(self, tag=_NO_TAG)).encode("ascii"))


class Authenticator:
    """Takes in the bytes of one file, in order.

    Attributes:
        update: Take in the next bytes, fewer than 2**31.
    """

    update: Callable[[Buffer], None]

    def __init__(self, gmac: Any, mac: Mac, head: Buffer) -> None:
        """Begin with what stands before the payload; `mac` is what it says of itself."""
        self._gmac, self._mac = gmac, mac
        self.update = gmac.authenticate_additional_data
        self.update(mac.covered(head))

    def update_long(self, data: memoryview) -> None:
        """Take in the next bytes, however many."""
        for begin in range(0, len(data), _PIECE):
            self.update(data[begin : begin + _PIECE])

    def signed(self) -> Mac:
        """The MAC with its tag, once everything was taken in."""
        self._gmac.finalize()
        return replace(self._mac, tag=self._gmac.tag.hex())

    def is_right(self) -> bool:
        """Whether the file says the tag that it must have, once everything was taken in."""
        return hmac.compare_digest(self.signed().tag, self._mac.tag)


class SigningKey:
    """A secret that only a folder's readers and writers share.

    It never appears in a message, `repr`, log or pickle.

    Attributes:
        id: 16 hexadecimal digits by which files name their key; they reveal nothing else of it.
    """

    def __init__(self, secret: bytes) -> None:
        """Take a key of at least 32 random bytes.

        Raises:
            InvalidInputError: If it is shorter, or not bytes.
            MissingExtraError: If `cryptography` is not installed.
        """
        if not isinstance(secret, bytes):
            raise InvalidInputError(
                f"a signing key is bytes, or the path of its file, not {type(secret).__name__}"
            )
        if len(secret) < LEAST_BYTES:
            raise InvalidInputError(
                f"a signing key has at least {LEAST_BYTES} bytes, not {len(secret)}; {_HOW}"
            )
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise MissingExtraError("cryptography", "auth") from error
        aes = algorithms.AES(_derived(secret, b"gmac key", 32))
        self.id = _derived(secret, b"key id", 8).hex()

        def gmac(nonce: bytes) -> Any:
            return Cipher(aes, modes.GCM(nonce)).encryptor()

        self._gmac = gmac

    @classmethod
    def of(cls, source: KeySource) -> SigningKey | None:
        """The key that `source` is or names; for None the environment's, if set.

        Raises:
            InvalidInputError: If it cannot be used.
            MissingExtraError: If `cryptography` is not installed.
        """
        if source is None:
            return cls.from_environment()
        if isinstance(source, (str, os.PathLike)):
            return cls.from_file(source)
        return source if isinstance(source, cls) else cls(source)  # type: ignore[arg-type]  # bytes by now

    @classmethod
    def from_environment(cls) -> SigningKey | None:
        """The key in `KVCACHE_RAG_SIGNING_KEY`; None if that is empty or not set.

        Raises:
            InvalidInputError: If it cannot be used.
        """
        text = os.environ.get(ENVIRONMENT)
        what = f"the variable {ENVIRONMENT}"
        return cls(secret_in_text(os.fsencode(text), what)) if text else None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> SigningKey:
        """The key in a file that only its owner can read.

        Raises:
            InvalidInputError: If it cannot be read, is a link or no file, others may read or write
                it, or it holds no key.
        """
        return cls(secret_in_file(path, "the file of the signing key"))

    def __repr__(self) -> str:
        """Its id only."""
        return f"SigningKey(id={self.id!r})"

    def __reduce__(self) -> NoReturn:
        """Refuse: what is pickled is sent and stored."""
        raise InvalidInputError(
            "a signing key is not pickled; name its file, or set the environment variable "
            f"{ENVIRONMENT} where it is needed"
        )

    def new_mac(self) -> Mac:
        """A MAC for one file, with a fresh nonce and no tag yet."""
        return Mac(self.id, secrets.token_hex(_NONCE))

    def mac_in(self, provenance: str) -> Mac:
        """The MAC of a file that names this key.

        Raises:
            UntrustedChunkError: If it has none, or names another key.
        """
        mac = Mac.in_provenance(provenance)
        if mac is None:
            raise UntrustedChunkError("it is not signed")
        if mac.key != self.id:
            raise UntrustedChunkError(f"it is signed by another key, {mac.key}")
        return mac

    def authenticator(self, mac: Mac, head: Buffer) -> Authenticator:
        """An authenticator for the payload of a file that begins with `head`, which contains `mac`.

        Raises:
            UntrustedChunkError: If `mac` does not occur there exactly once.
        """
        return Authenticator(self._gmac(bytes.fromhex(mac.nonce)), mac, head)


KeySource: TypeAlias = "SigningKey | bytes | str | os.PathLike[str] | None"
"""A key: itself, its bytes, or the path of its file; None for the environment's, if set."""


def _derived(secret: bytes, use: bytes, size: int) -> bytes:
    # Of a random key of any length; the two uses tell nothing of each other.
    return hashlib.blake2b(secret, digest_size=size, person=use).digest()


def secret_in_file(path: str | os.PathLike[str], what: str) -> bytes:
    """The secret in a file that its owner alone can read; `what` names the file in messages.

    Raises:
        InvalidInputError: If it cannot be read, is a link or no file, others may read or write it,
            or what it holds is no secret.
    """
    # A path that is not there may be a secret by mistake, so no path is repeated.
    try:
        with opened(expanded(path), READ) as descriptor:
            if os.name == "posix" and os.fstat(descriptor).st_mode & 0o077:
                raise InvalidInputError(
                    f"others may read or write {what}; restrict it by: chmod 600 FILE"
                )
            content = os.read(descriptor, _MOST_BYTES + 1)
    except OSError as error:
        reason = error.strerror
        if isinstance(error, NotAFileError):
            reason = "it is a link or no file"
        raise InvalidInputError(
            f"{what} cannot be read: {reason}; name one that its owner alone can read"
        ) from None
    return secret_in_text(content, what)


def secret_in_text(content: bytes, what: str) -> bytes:
    """The secret that a text holds, one line without blanks; `what` names it in messages.

    Raises:
        InvalidInputError: If it is none.
    """
    key = content.rstrip(b"\r\n")
    if len(content) > _MOST_BYTES or not re.fullmatch(rb"[!-~]+", key):
        raise InvalidInputError(
            f"{what} holds one line of at least {LEAST_BYTES} letters, digits or signs; {_HOW}"
        )
    return key
