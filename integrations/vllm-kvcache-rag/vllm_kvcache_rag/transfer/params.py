"""Where a prompt's prefix and chunks end, in a request's `kv_transfer_params`.

    "kv_transfer_params": {"kvcache_rag": {"prefix": 31, "chunks": [200, 180], "grant": "..."}}

Numbers are tokens of the prompt, from its first on; what follows them is the question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import canonical_json, digest, packed_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

FIELD: Final = "kvcache_rag"

TransferMode = Literal["reuse", "store", "law"]
"""Stitch stored chunks; compute one chunk and store it; check how the engine rotates its keys."""

TransferPositions = Literal["reordered", "composite"]

# Chunks of a prompt at most: each is a look into the store while other requests wait.
MOST_CHUNKS: Final = 1024


@dataclass(frozen=True)
class TransferParams:
    """What the front end asks of the engine.

    Attributes:
        prefix: Tokens that every chunk saw; may be 0.
        chunks: Tokens of each chunk, in the order of the prompt.
        positions: Whether keys are rotated to where their chunk stands ("reordered") or stay.
        mode: What is wanted.
        grant: Who may ask for it (`GrantKey`).
    """

    prefix: int
    chunks: tuple[int, ...]
    positions: TransferPositions = "reordered"
    mode: TransferMode = "reuse"
    grant: str = ""

    @property
    def context(self) -> int:
        """Tokens of prefix and chunks."""
        return self.prefix + sum(self.chunks)

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None, tokens: int) -> Self | None:
        """What a request's `kv_transfer_params` say; None if they say nothing to us.

        Args:
            params: The field of the request.
            tokens: Of its prompt.

        Raises:
            InvalidInputError: If they do not fit the prompt, or each other.
        """
        given = (params or {}).get(FIELD)
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise InvalidInputError(
                f"{FIELD} is an object with prefix and chunks; see docs/vllm.md"
            )
        unknown = sorted(map(str, {*given} - {*cls.__dataclass_fields__}))
        if unknown:
            raise InvalidInputError(f"{FIELD} has no field {unknown[0][:40]!r}; see docs/vllm.md")
        grant = given.get("grant", "")
        found = cls(
            _count("prefix", given.get("prefix")),
            _counts("chunks", given.get("chunks")),
            _choice("positions", given.get("positions", "reordered"), TransferPositions),
            _choice("mode", given.get("mode", "reuse"), TransferMode),
            grant if isinstance(grant, str) else "",
        )
        found._check(tokens)
        return found

    def _check(self, tokens: int) -> None:
        if self.context > tokens or (self.mode == "reuse" and self.context == tokens):
            raise InvalidInputError(
                f"prefix and chunks have {self.context} tokens, the prompt {tokens}: a question "
                "follows them"
            )
        if self.mode != "reuse" and len(self.chunks) > 1:
            raise InvalidInputError(f'mode "{self.mode}" takes one chunk, not {len(self.chunks)}')

    def body(self) -> dict[str, Any]:
        """The field `kv_transfer_params` of a request."""
        return {
            FIELD: {
                "prefix": self.prefix,
                "chunks": list(self.chunks),
                "positions": self.positions,
                "mode": self.mode,
                "grant": self.grant,
            }
        }

    def digest(self, ids: Sequence[int]) -> str:
        """SHA-256 of all that is asked, the grant left out, and of the prompt's token ids."""
        asked = {
            "prefix": self.prefix,
            "chunks": list(self.chunks),
            "positions": self.positions,
            "mode": self.mode,
        }
        return digest("kvcache-rag-transfer", canonical_json(asked), packed_ids(ids))


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _count(name: str, value: Any) -> int:
    if not _is_count(value, 0):
        raise InvalidInputError(f"{FIELD}.{name} is a whole number of tokens, 0 or more")
    return int(value)


def _counts(name: str, values: Any) -> tuple[int, ...]:
    is_list = isinstance(values, (list, tuple)) and 0 < len(values) <= MOST_CHUNKS
    if not is_list or not all(_is_count(value, 1) for value in values):
        raise InvalidInputError(
            f"{FIELD}.{name} lists the tokens of each chunk, 1 or more, of {MOST_CHUNKS} at most"
        )
    return tuple(values)


def _choice(name: str, value: object, kind: Any) -> Any:
    choices = get_args(kind)
    if value not in choices:
        raise InvalidInputError(f"{FIELD}.{name} is one of {', '.join(choices)}")
    return value
