"""The parts of a verdict, and how they are read from plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from kvcache_rag.errors import FingerprintMismatchError


@dataclass(frozen=True)
class Identity:
    """What a verdict was measured on; everything in it changes answers.

    Attributes:
        model: Name of the model, for people.
        revision: Its commit or a digest of its weights.
        codec: How chunks are stored.
        dtype: In what the model computes keys and values, and keeps them.
        prefix: Digest of what stands before the chunks (the instruction).
        template: Digest of how chunks and questions are written.
        spec: Digest of everything about model, prefix and storage that cached chunks depend on.
    """

    model: str
    revision: str
    codec: str
    dtype: str
    prefix: str
    template: str
    spec: str

    def ensure_same(self, engine: Identity) -> None:
        """Raise `FingerprintMismatchError` saying what differs unless `engine` is the same."""
        if (self.spec, self.template) == (engine.spec, engine.template):
            return
        changes = {
            "revision": f"the model {self.model} ({self.revision[:12]}), not for {engine.model} "
            f"({engine.revision[:12]})",
            "codec": f"chunks stored as {self.codec}, not as {engine.codec}",
            "dtype": f"the dtype {self.dtype}, not {engine.dtype}",
            "prefix": "another instruction before the chunks",
            "template": "another form of chunks or questions",
        }
        differing = (
            text for name, text in changes.items() if getattr(self, name) != getattr(engine, name)
        )
        raise FingerprintMismatchError(
            f"the verdict was made for {next(differing, 'other settings of this model')}; run "
            "`kvcache-rag verify` with the model, template and codec of this engine"
        )


@dataclass(frozen=True)
class PolicyScore:
    """How one policy did, paired with full prefill on the same questions.

    Shares are between 0 and 1; divergences are Kullback-Leibler in nats, full prefill first.

    Attributes:
        policy: The policy as it can be pasted back.
        auxiliary: Name of the auxiliary model that chose tokens, "" without one.
        score: Mean of the verdict's measure.
        kept: `score` over full prefill's.
        kept_low: Lower end of its 95 % interval (paired bootstrap of the difference).
        kept_high: Upper end.
        exact_match: Mean exact match, where the questions have answers.
        f1: Mean token F1, where the questions have answers.
        agreement: Share of answers that equal full prefill's to the letter.
        first_divergence: Mean divergence at the answer's first token.
        answer_divergence: Mean over the tokens of full prefill's answer, each behind the right ones
            before it.
        top1: Share of these tokens that the policy ranks first, too.
        recomputed: Share of context tokens computed again.
        ttft: Median seconds to the first token.
        ttft_ratio: Median over the questions of that to full prefill's.
    """

    policy: str
    auxiliary: str = ""
    score: float = math.nan
    kept: float = math.nan
    kept_low: float = math.nan
    kept_high: float = math.nan
    exact_match: float = math.nan
    f1: float = math.nan
    agreement: float = math.nan
    first_divergence: float = math.nan
    answer_divergence: float = math.nan
    top1: float = math.nan
    recomputed: float = math.nan
    ttft: float = math.nan
    ttft_ratio: float = math.nan


@dataclass(frozen=True)
class NumericsCheck:
    """Two ways to compute the same logits.

    Attributes:
        name: What was compared.
        error: Largest difference over the standard deviation of the reference.
        tolerance: What rounding in the model's dtype explains.
    """

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether both are the same but for rounding; never for NaN."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class AuxiliaryAgreement:
    """How well an auxiliary model sees what the main model sees (CacheClip, arXiv 2510.10129).

    Means over the questions, with 95 % intervals.

    Attributes:
        name: The auxiliary model.
        divergence: KL of its attention over the chunks from the main model's, in nats.
        divergence_low: Lower end.
        divergence_high: Upper end.
        jaccard: Of both models' top 20 % of the chunk tokens.
        jaccard_low: Lower end.
        jaccard_high: Upper end.
        random_jaccard: Jaccard of a random choice of as many tokens, for comparison.
    """

    name: str
    divergence: float = math.nan
    divergence_low: float = math.nan
    divergence_high: float = math.nan
    jaccard: float = math.nan
    jaccard_low: float = math.nan
    jaccard_high: float = math.nan
    random_jaccard: float = math.nan


_Row = TypeVar("_Row", Identity, PolicyScore, NumericsCheck, AuxiliaryAgreement)
_SIMPLE: Final[dict[str, type | tuple[type, ...]]] = {"str": str, "int": int, "float": (int, float)}


def finite(value: Any) -> Any:
    """Plain values with None for what is not a finite number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value


def simple(kind: str, name: str, value: Any) -> Any:
    """A text ("str"), an "int" or a "float" (null is NaN); raises `ValueError` if it is not one."""
    if kind == "float" and value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, _SIMPLE[kind]):
        raise ValueError(f"{name} is not a {kind}")
    if isinstance(value, (int, float)) and not math.isfinite(value):
        raise ValueError(f"{name} is not finite")
    return float(value) if isinstance(value, (int, float)) and kind == "float" else value


def row(cls: type[_Row], values: Any) -> _Row:
    """One of the dataclasses above from plain values.

    Raises:
        KeyError, TypeError, ValueError: If a field is missing, unknown or of another type.
    """
    check_names(cls, values)
    found = {one.name: simple(str(one.type), one.name, values[one.name]) for one in fields(cls)}
    return cls(**found)


def check_names(cls: type[Any], values: Any) -> None:
    """Raise `TypeError` or `KeyError` unless `values` has exactly the fields of a dataclass."""
    if not isinstance(values, dict):
        raise TypeError(f"{cls.__name__} is not an object")
    wrong = {one.name for one in fields(cls)} ^ set(values)
    if wrong:
        raise KeyError(f"{cls.__name__}.{min(wrong)} is missing or unknown")
