"""What became of texts: of a few, as a worker says, and of all."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_rag.building.corpus import NAMED

if TYPE_CHECKING:
    from kvcache_rag.building.corpus import Text


@dataclass(frozen=True)
class Failure:
    """A text that is not in the store.

    Attributes:
        index: Number of the text.
        name: Where it stands.
        reason: Why, as the rest of a sentence.
    """

    index: int
    name: str
    reason: str

    @classmethod
    def of(cls, text: Text, reason: str) -> Failure:
        """Why `text` is not in the store."""
        return cls(text.index, text.name, reason)


@dataclass(frozen=True)
class Report:
    """What became of the texts of one task; can be pickled and written as JSON.

    Attributes:
        indices: Numbers of the texts that need no more work, failures included.
        prefilled: Chunks that were computed and stored.
        there: Chunks that the store held already.
        tokens: Tokens of all of them, prefix not counted.
        prefilled_tokens: Tokens of those that were computed.
        nbytes: Bytes written to the store.
        failures: Texts that are not in the store.
        spec: Digest of what the chunks depend on.
        refusal: Why the whole build makes no sense, "" if it does.
    """

    indices: tuple[int, ...] = ()
    prefilled: int = 0
    there: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    nbytes: int = 0
    failures: tuple[Failure, ...] = ()
    spec: str = ""
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """The inverse of `to_json`."""
        failures = tuple(Failure(**one) for one in values["failures"])
        return cls(**{**values, "indices": tuple(values["indices"]), "failures": failures})


@dataclass
class Tally:
    """The sum of all reports.

    Attributes:
        prefilled: Chunks that were computed and stored.
        there: Chunks that the store held already.
        failed: Texts that are not in the store.
        tokens: Tokens of all chunks, prefix not counted.
        prefilled_tokens: Tokens of those that were computed.
        nbytes: Bytes written to the store.
        spec: Digest of what the chunks depend on; "" while unknown.
        failures: The first `NAMED` failures.
        started: `time.perf_counter()` when the build began.
    """

    prefilled: int = 0
    there: int = 0
    failed: int = 0
    tokens: int = 0
    prefilled_tokens: int = 0
    nbytes: int = 0
    spec: str = ""
    failures: list[Failure] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def add(self, report: Report) -> None:
        """Count a report."""
        for name in ("prefilled", "there", "tokens", "prefilled_tokens", "nbytes"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        self.spec = report.spec or self.spec
        self.failed += len(report.failures)
        self.failures += report.failures[: NAMED - len(self.failures)]

    @property
    def done(self) -> int:
        """Texts that need no more work."""
        return self.prefilled + self.there + self.failed

    @property
    def seconds(self) -> float:
        """Since the build began."""
        return time.perf_counter() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed per second of the whole build; 0 when none were."""
        return self.prefilled_tokens / self.seconds if self.prefilled_tokens else 0.0
