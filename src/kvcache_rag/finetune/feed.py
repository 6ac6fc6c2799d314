"""Which samples make up each forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag.finetune.config import FinetuneConfig
    from kvcache_rag.finetune.samples import Encoded, PlainSample, QASample
    from kvcache_rag.finetune.sources import Data

Kind = Literal["block", "full", "plain"]
# Samples in a row that do not fit before this is called a mistake.
MAX_SKIPS = 1000


class SampleEncoder(Protocol):
    """Gives ids, or None for a sample from which nothing can be learned."""

    def qa(self, sample: QASample) -> Encoded | None:
        """Ids of a context with its questions."""

    def plain(self, sample: PlainSample, longest: int) -> Encoded | None:
        """Ids of a text, cut at `longest`."""


@dataclass(frozen=True)
class Portion:
    """Samples of one forward pass.

    Attributes:
        kind: "block" and "full" are document questions under one mask or the other.
        samples: As ids; of "full" already joined.
    """

    kind: Kind
    samples: tuple[Encoded, ...]


class Feed:
    """Deals out portions in an order that depends on settings and data alone.

    Kinds are spread evenly by their shares.  A portion takes samples until another one would make
    it larger than the limit; a sample that is too long by itself is skipped and counted.

    Attributes:
        state: Numbers of portions dealt and samples drawn; put back to go on from there.
    """

    def __init__(
        self, config: FinetuneConfig, data: Data, encoder: SampleEncoder, window: int
    ) -> None:
        """Start at the beginning.

        Args:
            config: Shares and limits.
            data: Sources.
            encoder: Gives ids.
            window: Longest prompt of the model, in tokens.
        """
        self._config, self._data, self._encoder = config, data, encoder
        self._window = window
        self.state = {"portions": 0, "asked": 0, "qa": 0, "qa_before": 0, "plain": 0, "skipped": 0}

    def next(self) -> Portion:
        """The next portion."""
        state, config = self.state, self._config
        number = state["portions"]
        state["portions"] += 1
        if _is_turn(number, config.plain_batches):
            return Portion("plain", self._fill("plain", self._plain))
        asked = state["asked"]
        state["asked"] += 1
        blocked = _is_turn(asked, config.block_share)
        if config.both_masks:
            blocked = asked % 2 == 0
            if not blocked:  # the samples of the portion before
                state["qa"] = state["qa_before"]
        state["qa_before"] = state["qa"]
        samples = self._fill("qa", self._qa)
        if blocked:
            return Portion("block", samples)
        return Portion("full", tuple(sample.joined for sample in samples))

    def fits(self, sample: Encoded) -> bool:
        """Whether a sample can be run at all."""
        return (
            sample.row_tokens <= self._config.batch_tokens and sample.prompt_tokens <= self._window
        )

    def _fill(
        self, source: Literal["qa", "plain"], draw: Callable[[int], Encoded | None]
    ) -> tuple[Encoded, ...]:
        state, longest, skips = self.state, 0, 0
        found: list[Encoded] = []
        while True:
            sample = draw(state[source])
            if sample is None or not self.fits(sample):
                state[source] += 1
                state["skipped"] += 1
                skips += 1
                if skips == MAX_SKIPS:
                    raise InvalidInputError(
                        f"{MAX_SKIPS} {source} samples in a row do not fit into "
                        f"{min(self._config.batch_tokens, self._window)} tokens; raise batch_tokens"
                    )
                continue
            # Sized under the block mask either way, so that both masks see the same samples.
            longest = max(longest, sample.row_tokens)
            if found and longest * (len(found) + 1) > self._config.batch_tokens:
                return tuple(found)
            state[source] += 1
            found.append(sample)

    def _qa(self, number: int) -> Encoded | None:
        return self._encoder.qa(self._data.qa.draw(number))

    def _plain(self, number: int) -> Encoded | None:
        limit = min(self._config.batch_tokens, self._window)
        return self._encoder.plain(self._data.plain.draw(number), limit)


def _is_turn(number: int, share: float) -> bool:
    """True for `share` of all numbers, evenly spread."""
    return int((number + 1) * share + 1e-9) != int(number * share + 1e-9)
