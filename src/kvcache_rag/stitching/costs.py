"""What this machine was measured to take, and whether a chunk is loaded or prefilled again.

A cached chunk is no gain where it comes slowly: a remote tier may take longer than the model does.
Nothing is assumed about tiers or devices.  Until both sides were measured a chunk is loaded; a
prefill is first judged by what is measured anyway, the forward passes of questions and misses, and
where these are too short to tell, by a trial that takes no longer than the load in question.

`Timings`, `Retry` and `saving` are how whoever decides by measured times keeps them, whatever the
decision: here, whether keys are copied (`generation.rotation_mode`), how many requests are answered
together (`serve.scheduler`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


@dataclass(eq=False)
class Timings:
    """The last times that one thing took, by how much of it there was.

    Not thread-safe.

    Attributes:
        last: How many are looked back at.
        fewest: How many must be known before anything is said.
    """

    last: int
    fewest: int = 1
    _samples: tuple[tuple[int, float], ...] = field(default=(), init=False)

    # Sizes this much apart tell latency from bandwidth.
    APART: ClassVar[float] = 1.25

    def note(self, size: int, seconds: float) -> None:
        """Note that `size` (bytes, tokens, answers) took `seconds`."""
        self._samples = (*self._samples, (size, seconds))[-self.last :]

    def forget(self) -> None:
        """Know nothing any more."""
        self._samples = ()

    def forget_oldest(self) -> None:
        """Know one less, if there is one."""
        self._samples = self._samples[1:]

    @property
    def rates(self) -> list[float]:
        """Seconds per unit of size of each."""
        return [seconds / max(size, 1) for size, seconds in self._samples]

    @property
    def slowest(self) -> float:
        """Seconds that the slowest took; 0 without any."""
        return max([seconds for _, seconds in self._samples], default=0.0)

    def rate(self) -> float | None:
        """Seconds per unit of size: the median, in which one that was held up decides nothing."""
        return median(self.rates) if len(self._samples) >= self.fewest else None

    def line(self) -> tuple[float, float] | None:
        """Seconds for size 0 and seconds more per unit of size; None if too few are known.

        By medians (Theil and Sen), so that here, too, one that was held up decides nothing.
        """
        if len(self._samples) < self.fewest:
            return None
        slopes = [
            (later[1] - first[1]) / (later[0] - first[0])
            for first, later in combinations(self._samples, 2)
            if not 1 / self.APART < (later[0] + 1) / (first[0] + 1) < self.APART
        ]
        if not slopes:
            return 0.0, median(self.rates)
        slope = max(median(slopes), 0.0)
        return max(median([seconds - slope * size for size, seconds in self._samples]), 0.0), slope

    def seconds(self, size: int) -> float | None:
        """How long `size` will take: latency and bandwidth; None if too few are known."""
        line = self.line()
        return None if line is None else line[0] + line[1] * size


class Retry:
    """Of so many chances that were not taken, one is: what was slow may have recovered.

    Not thread-safe.
    """

    def __init__(self, after: int) -> None:
        """Count for every `what` by itself; each `after`th time is due."""
        self._after = after
        self._passed: Counter[Hashable] = Counter()

    def is_due(self, what: Hashable = None) -> bool:
        """Pass over `what` once more; whether it is to be taken this time."""
        self._passed[what] += 1
        return self._passed[what] % self._after == 0


def saving(slower: float, sooner: float, *, share: float, least: float = 0.0) -> float:
    """Seconds that the sooner of two saves beyond what would be noise.

    Args:
        slower: Seconds of the one.
        sooner: Seconds of the other.
        share: Part of `slower` that is noise.
        least: Seconds that are noise, however short both are.
    """
    return min(slower * (1 - share), slower - least) - sooner


# Loads of a tier that are looked back at, and that must be known before one is declined: with their
# median, one that was held up decides nothing.
LOADS = 7

FEWEST_LOADS = 3

# Prefills of one length that are looked back at.  Others on the machine only ever add time, so the
# shortest counts.
PREFILLS = 4

# What declining must save at least, of the load and in seconds; less is noise.
SAVING = 0.2

SMALLEST_SAVING = 0.02

# Of so many chunks of a tier to be declined, one is loaded all the same, to see whether it is still
# slow; after so many slow loads, one old prefill is forgotten, which may have been held up.
RETRY = 16

# A trial is worth its time only if it is so much longer than every pass before it.
LONGER = 1.5


class Costs:
    """Rates of this machine, and what follows from them.

    Not thread-safe: used by whoever holds the model.

    Attributes:
        clock: Seconds, growing; the time that everything is measured by.
        enabled: Whether anything is ever declined.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, enabled: bool = True
    ) -> None:
        """Know nothing yet; without `enabled` every cached chunk is loaded."""
        self.clock, self.enabled = clock, enabled
        self._loads: dict[str, Timings] = defaultdict(partial(Timings, LOADS, FEWEST_LOADS))
        # By the power of two of their lengths.
        self._prefills: dict[int, Timings] = defaultdict(partial(Timings, PREFILLS))
        self._passes: dict[int, Timings] = defaultdict(partial(Timings, PREFILLS))
        self._turns = Timings(LOADS)
        self._longest = 0
        self._slow_loads, self._declined = Retry(RETRY), Retry(RETRY)
        self._retried: set[str] = set()

    def loaded(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note that `tier` gave a chunk of `nbytes` after `seconds`."""
        loads = self._loads[tier]
        if tier in self._retried:
            expected = loads.seconds(nbytes)
            if expected is not None and seconds < expected / 2:
                loads.forget()  # it has recovered: what was measured before says nothing any more
            self._retried.discard(tier)
        loads.note(nbytes, seconds)
        if seconds > SMALLEST_SAVING and self._slow_loads.is_due():
            for prefills in self._prefills.values():
                prefills.forget_oldest()

    def is_noticed(self, seconds: float) -> bool:
        """Whether so long a wait matters, also for a chunk that did not come in the end."""
        return seconds > SMALLEST_SAVING

    def prefilled(self, lengths: Sequence[int], seconds: float) -> None:
        """Note that chunks of `lengths` tokens were prefilled together in `seconds`."""
        tokens = sum(lengths)
        # One pass is one measurement, however many chunks it computed.
        for power in {length.bit_length() for length in lengths}:
            self._prefills[power].note(tokens, seconds)
        self.passed(tokens, seconds)

    def passed(self, tokens: int, seconds: float) -> None:
        """Note that a pass over `tokens` tokens took at most `seconds`, whatever else it did."""
        if tokens > 0:
            self._passes[tokens.bit_length()].note(tokens, seconds)
            self._longest = max(self._longest, tokens)

    def load_seconds(self, tier: str, nbytes: int) -> float | None:
        """How long a load will take: latency and bandwidth of the last ones; None if unknown."""
        loads = self._loads.get(tier)
        return None if loads is None else loads.seconds(nbytes)

    def prefill_seconds(self, tokens: int) -> float | None:
        """How long a prefill will take, by chunks of about that length; None if unknown.

        Attention grows faster than the length, so a length is judged by its own power of two once
        that was measured, and until then by what other passes took per token.
        """
        rates = self._prefill_rates(tokens)
        if len(rates) < PREFILLS:
            rates += [rate for passes in self._passes.values() for rate in passes.rates]
        return tokens * min(rates) if rates else None

    def _prefill_rates(self, tokens: int) -> list[float]:
        """Seconds per token of the last prefills of about that length."""
        prefills = self._prefills.get(tokens.bit_length())
        return [] if prefills is None else prefills.rates

    def rotated(self, nbytes: int, seconds: float) -> None:
        """Note that rotating chunks of `nbytes`, and copying those in memory, took `seconds`."""
        self._turns.note(nbytes, seconds)

    def rotation_seconds(self, nbytes: int) -> float:
        """How long rotating chunks of `nbytes` will take; 0 if unknown."""
        return self._turns.seconds(nbytes) or 0.0

    def trial(self, nbytes: int, tokens: int) -> int:
        """How many tokens to prefill for the measurement alone; 0 for no trial.

        A short pass may take as long as a long one, so that what is known of short ones hides that
        a prefill would be sooner than a load.  A trial takes at most the time of that load.
        """
        slow = [self.load_seconds(tier, nbytes) or 0.0 for tier in self._waited()]
        prefill = self.prefill_seconds(tokens) if slow else None
        if not prefill or self._prefill_rates(tokens):
            return 0
        fitting = min(int(tokens * max(slow) / prefill), tokens)
        return fitting if fitting >= LONGER * self._longest else 0

    def is_slow(self, nbytes: int, tokens: int) -> bool:
        """Whether any tier is slow enough that it matters where such a chunk lies."""
        return any(self._saving(tier, nbytes, tokens) > 0 for tier in self._waited())

    def verdict(self, tier: str, nbytes: int, tokens: int) -> str:
        """Why a chunk that `tier` holds is rather prefilled, or "" to load it."""
        if self._saving(tier, nbytes, tokens) <= 0:
            return ""
        if self._declined.is_due(tier):
            self._retried.add(tier)
            return ""
        load = self.load_seconds(tier, nbytes) or 0.0
        prefill = self.prefill_seconds(tokens) or 0.0
        return f"{tier}: load {load:.2g} s > prefill {prefill:.2g} s"

    @property
    def waits(self) -> bool:
        """Whether loads from any tier took long."""
        return bool(self._waited())

    def _waited(self) -> list[str]:
        """Tiers of which a load took long; for others, nothing has to be worked out."""
        if not self.enabled:
            return []
        return [tier for tier, loads in self._loads.items() if loads.slowest > SMALLEST_SAVING]

    def _saving(self, tier: str, nbytes: int, tokens: int) -> float:
        """Seconds that declining saves beyond what would be noise."""
        load, prefill = self.load_seconds(tier, nbytes), self.prefill_seconds(tokens)
        if load is None or prefill is None:
            return 0.0
        return saving(load, prefill, share=SAVING, least=SMALLEST_SAVING)
