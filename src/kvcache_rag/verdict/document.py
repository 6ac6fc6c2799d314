"""A verdict as a whole, and its file."""

from __future__ import annotations

import json
import math
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.verdict.rows import (
    AuxiliaryAgreement,
    Identity,
    NumericsCheck,
    PolicyScore,
    check_names,
    finite,
    row,
    simple,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = 1
FORMAT: Final = "kvcache-rag-verdict"
MAX_BYTES: Final = 4 << 20
WEAK_BELOW: Final = 30
"""With fewer questions a verdict is weak, and says so."""


@dataclass(frozen=True)
class Verdict:
    """What `kvcache-rag verify` found.

    Attributes:
        identity: What it was measured on.
        created: Date, ISO 8601.
        source: Which questions: name of the file or task.
        source_digest: Digest of their texts and answers.
        questions: How many.
        measure: What `score` means: "f1", "exact_match" or another metric against the file's
            answers; "agreement_f1" against full prefill's answers where the file has none.
        threshold: Share of full prefill's score that a policy has to keep.
        full: Full prefill itself.
        policies: The policies, in the order in which they were asked for.
        recommended: The recommended policy, as it can be pasted back.
        checks: Whether plain numerics agree.
        auxiliary: Of the auxiliary model, if one was compared.
        packages: Versions that were used.
        notes: What to bear in mind, a sentence each.
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
        """Whether there were too few questions to rely on it."""
        return self.questions < WEAK_BELOW

    def objection(self, policy: str, threshold: float | None = None, auxiliary: str = "") -> str:
        """Why a policy does not pass, or "".

        A policy passes by its own row alone: a higher ratio is not known to be better, so none
        vouches for another.

        Args:
            policy: `repr` of the policy.
            threshold: Share of full prefill's score to keep; None for the verdict's own.
            auxiliary: Name of the auxiliary model that it uses, "" for none.
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
        said = f"{policy} kept {100 * row.kept:.1f} % of full prefill's score"
        if row.kept >= asked:
            said += f", but {self.questions} questions prove only {100 * row.kept_low:.1f} %"
        return f"{said}, below {100 * asked:g} %"

    def to_json(self) -> str:
        """Canonical JSON: the same text for the same verdict."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(finite(values), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        target = Path(path)
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
        name = os.fspath(path)
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
        """Read a verdict from JSON; `name` stands in messages.

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
        policies=tuple(row(PolicyScore, one) for one in values["policies"]),
        checks=tuple(row(NumericsCheck, one) for one in values["checks"]),
        auxiliary=None if auxiliary is None else row(AuxiliaryAgreement, auxiliary),
        packages={name: simple("str", name, one) for name, one in packages.items()},
        notes=tuple(simple("str", "notes", one) for one in values["notes"]),
    )
