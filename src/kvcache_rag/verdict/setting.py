"""When an engine lets a policy answer: the setting `gate=`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.verdict.document import Verdict

THRESHOLD: Final = 0.95
"""Share of full prefill's score that `verify` asks a policy to keep, unless it is told another."""


@dataclass(frozen=True)
class Gate:
    """When an engine lets a policy answer.

    Attributes:
        verdict: What `kvcache-rag verify` found, or the path of its file.
        threshold: Share of full prefill's score that has to be kept for sure; None for the
            verdict's own (0.95 unless `verify` was told otherwise).
        below: "full" answers with `FullRecompute()` instead, "error" refuses.
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
        given = self.threshold
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if given is not None and not (is_number and 0 <= given <= 1):
            raise InvalidInputError(
                f"the threshold of a gate must be between 0 and 1, not {given!r}"
            )
        if self.below not in ("full", "error"):
            raise InvalidInputError(f'below must be "full" or "error", not {self.below!r}')

    def loaded(self) -> Verdict:
        """The verdict, read from its file if need be."""
        return self.verdict if isinstance(self.verdict, Verdict) else Verdict.load(self.verdict)
