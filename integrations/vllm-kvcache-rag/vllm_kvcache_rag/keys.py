"""Keys of a prompt's pieces, and salts that keep stitched blocks apart from all others."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache_rag.kv.chunk import FORMAT_VERSION, ChunkKey, chunk_key, digest, spec_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_kvcache_rag.transfer.params import TransferParams


def specs(engine: Mapping[str, Any], codec: str, ranks: int) -> tuple[str, ...]:
    """Digest of all that stored tensors depend on, for each tensor-parallel rank.

    Args:
        engine: What computes: its version, weights, dtypes, quantisation, rotation.
        codec: Name of the form in which chunks are stored.
        ranks: Each stores heads of its own.
    """
    shared = {**engine, "format": FORMAT_VERSION, "codec": codec, "ranks": ranks}
    return tuple(spec_digest({**shared, "rank": rank}) for rank in range(ranks))


@dataclass(frozen=True)
class Piece:
    """The prefix or a chunk of a prompt.

    Attributes:
        keys: Address of what each rank stored of it.
        ids: Its token ids.
        start: Place of its first token in the prompt, and the position to which it is rotated.
        old: Position at which its first key stands.
    """

    keys: tuple[ChunkKey, ...]
    ids: tuple[int, ...]
    start: int
    old: int

    @property
    def stop(self) -> int:
        """Place behind its last token."""
        return self.start + len(self.ids)


def pieces_of(
    params: TransferParams, ids: Sequence[int], namespace: str, specs: Sequence[str]
) -> tuple[Piece, ...]:
    """The prefix, if there is one, and the chunks of a prompt, in their order."""
    prefix, found = tuple(ids[: params.prefix]), []
    if prefix:
        found.append(Piece(_keys(prefix, (), namespace, specs), prefix, 0, 0))
    start = params.prefix
    for tokens in params.chunks:
        chunk = tuple(ids[start : start + tokens])
        # A chunk is computed behind the prefix; composite positions leave its keys there.
        old = start if params.positions == "composite" else params.prefix
        found.append(Piece(_keys(chunk, prefix, namespace, specs), chunk, start, old))
        start += tokens
    return tuple(found)


def _keys(
    ids: Sequence[int], prefix: Sequence[int], namespace: str, specs: Sequence[str]
) -> tuple[ChunkKey, ...]:
    return tuple(
        chunk_key(ids, prefix_ids=prefix, spec=spec, namespace=namespace) for spec in specs
    )


class Salts:
    """What vLLM's prefix cache hashes besides tokens.

    Blocks are found by requests of the same salt alone.  A salt is a MAC with a secret of this
    process, so no client can write one, whatever it sends.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        """Take a secret, by default a random one."""
        self._secret = secret or secrets.token_bytes(32)

    def plain(self, client: str | None, namespace: str | None = None) -> str:
        """Of a request that vLLM computes whole.

        Args:
            client: The client's own salt.
            namespace: The tenant, where a grant says it.
        """
        tenant = (b"", b"") if namespace is None else (b"tenant", namespace.encode())
        return self._salt(b"plain", *tenant, *_client(client))

    def stitched(
        self, client: str | None, namespace: str, positions: str, pieces: Sequence[Piece]
    ) -> str:
        """Of a request whose pieces come from the store."""
        places = (f"{key.digest}@{piece.start}" for piece in pieces for key in piece.keys)
        tenant = (namespace.encode(), positions.encode())
        return self._salt(b"stitched", *tenant, *_client(client), *map(str.encode, places))

    def lone(self) -> str:
        """Of a request that finds nothing and whose blocks nobody finds."""
        return self._salt(b"lone", secrets.token_bytes(16))

    def _salt(self, *fields: bytes) -> str:
        message = digest("kvcache-rag-blocks", *fields)
        return hmac.digest(self._secret, message.encode(), hashlib.sha256).hex()


def _client(salt: str | None) -> tuple[bytes, ...]:
    # None and "" are different salts for vLLM.
    return (b"", b"") if salt is None else (b"salt", salt.encode("utf-8", "surrogatepass"))
