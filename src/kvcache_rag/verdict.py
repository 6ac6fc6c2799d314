"""A verdict: how far each policy is from full prefill on one model, as a file.

`kvcache-rag verify` measures and writes it; an engine with `gate=` (a `Gate`: when a policy may
answer) reads it.  It is JSON of a fixed shape, the same bytes for the same verdict, and holds
neither questions nor texts.  Unknown numbers are null in the file and NaN here; a NaN never passes
a gate.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from kvcache_rag.errors import FingerprintMismatchError, InvalidInputError, NamedArguments, expanded
from kvcache_rag.progress import plural

__all__ = ["Gate", "Verdict"]

VERSION: Final = 1

FORMAT: Final = "kvcache-rag-verdict"

MAX_BYTES: Final = 4 << 20

WEAK_BELOW: Final = 30
"""With fewer questions a verdict is weak and says so."""

THRESHOLD: Final = 0.95
"""Share of full prefill's score that `verify` asks a policy to keep by default."""

LEAST_FULL_SCORE: Final = 0.6
"""Below it, full prefill itself scores too low for shares of its score to say much."""

# Files written before these fields were there lack them; they are left out where not known.
_ADDED: Final = frozenset(
    {
        "same_answer",
        "needed",
        "right",
        "wrong_document",
        "first_layer_divergence",
        "first_layer_divergence_low",
        "first_layer_divergence_high",
    }
)


@dataclass(frozen=True)
class Identity:
    """What a verdict was measured on; every attribute affects answers.

    Attributes:
        model: Name of the model, for people.
        revision: Its commit or a digest of its weights.
        codec: How chunks are stored.
        dtype: In which the model computes and keeps keys and values.
        prefix: Digest of the text before the chunks (the instruction).
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
        exact_match: Mean exact match, if the questions have answers.
        f1: Mean token F1, if the questions have answers.
        agreement: Share of answers identical to full prefill's.
        first_divergence: Mean divergence at the answer's first token.
        answer_divergence: Mean over the tokens of full prefill's answer, each given the
            tokens before it.
        top1: Share of these tokens that the policy also ranks first.
        recomputed: Share of context tokens computed again.
        ttft: Median seconds to the first token.
        ttft_ratio: Median over the questions of its ratio to full prefill's.
        same_answer: Share of answers that equal full prefill's except for case, punctuation and
            articles.
        needed: How many questions like these would prove the verdict's threshold; NaN if no number
            would.  For full prefill: how many a policy that loses none would need.
        right: Share of answers that contain a right one, if the questions have answers.
        wrong_document: Share of answers that are wrong and come from a document other than the
            relevant ones, if the questions name these.
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
    same_answer: float = field(default=math.nan, repr=False)
    needed: float = field(default=math.nan, repr=False)
    right: float = field(default=math.nan, repr=False)
    wrong_document: float = field(default=math.nan, repr=False)


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
        """Whether both agree up to rounding; never for NaN."""
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
        jaccard: Jaccard index of both models' top 20 % of the chunk tokens.
        jaccard_low: Lower end.
        jaccard_high: Upper end.
        random_jaccard: The same for a random choice of as many tokens.
        first_layer_divergence: KL of the main model's first layer from its last, in nats, the basis
            of choosing by early layers.  The auxiliary should be below it.
        first_layer_divergence_low: Lower end.
        first_layer_divergence_high: Upper end.
    """

    name: str
    divergence: float = math.nan
    divergence_low: float = math.nan
    divergence_high: float = math.nan
    jaccard: float = math.nan
    jaccard_low: float = math.nan
    jaccard_high: float = math.nan
    random_jaccard: float = math.nan
    first_layer_divergence: float = math.nan
    first_layer_divergence_low: float = math.nan
    first_layer_divergence_high: float = math.nan


_Row = TypeVar("_Row", Identity, PolicyScore, NumericsCheck, AuxiliaryAgreement)

_SIMPLE: Final[dict[str, type | tuple[type, ...]]] = {"str": str, "int": int, "float": (int, float)}


def finite(value: Any) -> Any:
    """Plain values with None for what is not a finite number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
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
    arguments = {
        member.name: simple(str(member.type), member.name, values[member.name])
        for member in fields(cls)
        if member.name in values
    }
    return cls(**arguments)


def check_names(cls: type[Any], values: Any) -> None:
    """Raise `TypeError` or `KeyError` unless `values` has exactly the fields of a dataclass.

    Those that were added later may be missing.
    """
    if not isinstance(values, dict):
        raise TypeError(f"{cls.__name__} is not an object")
    names = {member.name for member in fields(cls)}
    wrong = (names ^ set(values)) - (names & _ADDED)
    if wrong:
        raise KeyError(f"{cls.__name__}.{min(wrong)} is missing or unknown")


@dataclass(frozen=True)
class Verdict:
    """What `kvcache-rag verify` found.

    Attributes:
        identity: What it was measured on.
        created: Date, ISO 8601.
        source: File or task of the questions.
        source_digest: Digest of their texts and answers.
        questions: How many.
        measure: What `score` means: "f1", "exact_match" or another metric against the file's
            answers; "agreement_f1" against full prefill's answers where the file has none.
        threshold: Share of full prefill's score that a policy has to keep.
        full: Full prefill itself.
        policies: The policies, in the order requested.
        recommended: The recommended policy, as it can be pasted back.
        checks: Whether plain numerics agree.
        auxiliary: How an auxiliary model agrees, if one was compared.
        packages: Versions that were used.
        notes: Caveats, one sentence each.
    """

    identity: Identity
    created: str
    source: str
    source_digest: str
    questions: int
    measure: str
    threshold: float
    full: PolicyScore
    policies: tuple[PolicyScore, ...]
    recommended: str
    checks: tuple[NumericsCheck, ...] = ()
    auxiliary: AuxiliaryAgreement | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_weak(self) -> bool:
        """Whether there are too few questions to rely on."""
        return self.questions < WEAK_BELOW

    @property
    def is_blurred(self) -> bool:
        """Whether full prefill scores too low to judge policies with this number of questions.

        Even a policy that keeps the whole score could not have proved the threshold: full prefill
        gets too few questions right, or chance changes answers as much as that.  False if a policy
        passes, or all of them surely fail.
        """
        if self.full.score >= LEAST_FULL_SCORE:
            return False  # then it is the questions that are too few
        if any(row.kept_low >= self.threshold for row in self.policies):
            return False
        if self.questions < self.full.needed or all(math.isnan(r.kept_low) for r in self.policies):
            return True
        undecided = [row for row in self.policies if row.kept_high >= self.threshold]
        return bool(undecided) and all(
            row.kept - row.kept_low > 1 - self.threshold for row in undecided
        )

    def objection(self, policy: str, threshold: float | None = None, auxiliary: str = "") -> str:
        """Why a policy does not pass, or "".

        A policy passes by its own row alone; a higher ratio need not be better.

        Args:
            policy: `repr` of the policy.
            threshold: Share of full prefill's score to keep; None for the verdict's own.
            auxiliary: Name of its auxiliary model, "" for none.
        """
        asked = self.threshold if threshold is None else threshold
        failed = [check for check in self.checks if not check.passed]
        if failed:
            return (
                f"this model's caches do not stitch: {failed[0].name} differ by "
                f"{failed[0].error:.2g} standard deviations, more than {failed[0].tolerance:.2g}"
            )
        rows = [row for row in self.policies if row.policy == policy]
        if not rows:
            return f"the verdict does not cover {policy}; run `kvcache-rag verify` with it"
        if rows[0].auxiliary != auxiliary:
            return (
                f"the verdict covers {policy} with the auxiliary model "
                f"{rows[0].auxiliary or 'none'}, not {auxiliary or 'none'}; run `kvcache-rag "
                "verify` with it"
            )
        row = rows[0]
        if row.kept_low >= asked:
            return ""
        if math.isnan(row.kept_low):
            return f"the verdict has no score of {policy}, as full prefill itself scores nothing"
        reason = f"{policy} kept {100 * row.kept:.1f} % of full prefill's score"
        if row.kept >= asked:
            asked_of = plural(self.questions, "question", "proves", "prove")
            reason += f", but {asked_of} only {100 * row.kept_low:.1f} %"
        return f"{reason}, below {100 * asked:g} %"

    def to_json(self) -> str:
        """Canonical JSON: the same text for the same verdict."""
        values = finite({"format": FORMAT, "version": VERSION, **asdict(self)})
        for part in (values["full"], *values["policies"], values["auxiliary"] or {}):
            for name in _ADDED & part.keys():
                if part[name] is None:
                    del part[name]
        return json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        target = Path(expanded(path))
        temporary = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
        try:
            temporary.write_text(self.to_json(), encoding="ascii")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Verdict:
        """Read the file; nothing in it is executed.

        Raises:
            InvalidInputError: If it cannot be read, or is not a verdict of this version.
        """
        name = expanded(path)
        try:
            with open(name, "rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise InvalidInputError(
                f"the verdict {name} cannot be read ({error.strerror or error}); write one with "
                "`kvcache-rag verify`"
            ) from error
        if len(content) > MAX_BYTES:
            raise InvalidInputError(f"{name} is too large for a verdict; check the path")
        return cls.from_json(content, str(name))

    @classmethod
    def from_json(cls, content: str | bytes, name: str = "the verdict") -> Verdict:
        """Read a verdict from JSON; `name` is for messages.

        Raises:
            InvalidInputError: If it is not a verdict of this version.
        """
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"{name} is not JSON; write a verdict with `kvcache-rag verify`"
            ) from error
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise InvalidInputError(f"{name} is not a verdict; write one with `kvcache-rag verify`")
        if values.get("version") != VERSION:
            raise InvalidInputError(
                f"{name} is a verdict of version {values.get('version')!r} and this package reads "
                f"version {VERSION}; run `kvcache-rag verify` again"
            )
        try:
            return _verdict({k: v for k, v in values.items() if k not in ("format", "version")})
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{name} is damaged ({' '.join(str(error).split())}); run `kvcache-rag verify` "
                "again"
            ) from error


def _verdict(values: dict[str, Any]) -> Verdict:
    check_names(Verdict, values)
    texts = ("created", "source", "source_digest", "measure", "recommended")
    for name in ("policies", "checks", "notes"):
        if not isinstance(values[name], list):
            raise TypeError(f"{name} is not a list")
    packages = values["packages"]
    if not isinstance(packages, dict):
        raise TypeError("packages is not an object")
    auxiliary = values["auxiliary"]
    return Verdict(
        **{name: simple("str", name, values[name]) for name in texts},
        identity=row(Identity, values["identity"]),
        questions=simple("int", "questions", values["questions"]),
        threshold=simple("float", "threshold", values["threshold"]),
        full=row(PolicyScore, values["full"]),
        policies=tuple(row(PolicyScore, item) for item in values["policies"]),
        checks=tuple(row(NumericsCheck, item) for item in values["checks"]),
        auxiliary=None if auxiliary is None else row(AuxiliaryAgreement, auxiliary),
        packages={name: simple("str", name, item) for name, item in packages.items()},
        notes=tuple(simple("str", "notes", item) for item in values["notes"]),
    )


@dataclass(frozen=True)
class Gate(NamedArguments):
    """When an engine lets a policy answer.

    Attributes:
        verdict: What `kvcache-rag verify` found, or the path of its file.
        threshold: Share of full prefill's score that a policy must surely keep; None for the
            verdict's own (0.95 unless `verify` got another).
        below: "full" answers with `FullRecompute()` instead, "error" raises.
    """

    verdict: Verdict | str | os.PathLike[str]
    threshold: float | None = None
    below: Literal["full", "error"] = "full"

    def __post_init__(self) -> None:
        if not isinstance(self.verdict, (Verdict, str, os.PathLike)):
            raise InvalidInputError(
                "a gate needs a Verdict or the path of its file, not a "
                f"{type(self.verdict).__name__}"
            )
        threshold = self.threshold
        is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if threshold is not None and not (is_number and 0 <= threshold <= 1):
            raise InvalidInputError(
                f"the threshold of a gate must be between 0 and 1, not {threshold!r}"
            )
        if self.below not in ("full", "error"):
            raise InvalidInputError(f'below must be "full" or "error", not {self.below!r}')

    def loaded(self) -> Verdict:
        """The verdict, read from its file if necessary."""
        return self.verdict if isinstance(self.verdict, Verdict) else Verdict.load(self.verdict)
