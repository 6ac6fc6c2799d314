"""Chunks that overlap in position, weighed against the rest (APE)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.policies.base import AttentionScaling, PlainReuse
from kvcache_rag.policies.policy_registry import PolicySyntax

if TYPE_CHECKING:
    from kvcache_rag.kv.mask import PositionScheme


@dataclass(frozen=True)
class Ape(PlainReuse):
    """Adaptive parallel encoding (APE, arXiv 2502.05431, section 4): recomputes nothing.

    All chunks start right after the prefix; the query follows the longest of them.  Query and
    generated tokens attend to the chunks at `temperature`.  The weight of that attention against
    prefix, query and generated tokens is `scale` times `temperature` times its log-sum-exp.  The
    paper tunes both per model on development data, between 0.6 and 1; `Ape(1, 1)` is plain
    attention.

    Attributes:
        temperature: Divides the scores of chunk tokens; below 1 attends to fewer of them.
        scale: Multiplies the weight of the chunks, as an exponent.

    Raises:
        InvalidInputError: If one of them is not a positive number.
    """

    name: ClassVar[str] = "ape"
    _forms = (
        PolicySyntax("ape[:TEMPERATURE,SCALE]", lambda words: Ape(*words.numbers(float, float))),
    )
    temperature: float = 0.9
    scale: float = 0.9
    adjacent_query: bool = field(default=True, init=False, repr=False)
    positions: PositionScheme = field(default="composite", init=False, repr=False)
    scaling: AttentionScaling | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("temperature", "scale"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise InvalidInputError(
                    f"{name} must be a positive number such as 0.9, not {value!r}"
                )
        # The one way to set a field of a frozen dataclass.
        scaling = AttentionScaling(float(self.temperature), float(self.scale))
        object.__setattr__(self, "scaling", scaling)
