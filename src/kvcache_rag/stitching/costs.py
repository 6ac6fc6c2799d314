"""Load a chunk or prefill it again, whichever this machine's measured rates say is sooner.

A cached chunk is no gain where it comes slowly: a remote tier may take longer than the model does.
Nothing is assumed about tiers or devices.  Until both sides were measured a chunk is loaded; a
prefill is first judged by what is measured anyway, the forward passes of questions and misses, and
where these are too short to tell, by a trial that takes no longer than the load in question.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


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

# Tokens computed again in one pass with the query that are looked back at.
RECOMPUTES = 7

# What such a token costs more than one of a prefill, until it is measured: it attends over the
# whole prompt, and so on average over more.
DEARER = 1.5

# Of so many chunks of a tier to be declined, one is loaded all the same, to see whether it is still
# slow; after so many slow loads, one old prefill is forgotten, which may have been held up.
RETRY = 16

# Sizes this much apart tell latency from bandwidth.
APART = 1.25

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
        self._loads: dict[str, deque[tuple[int, float]]] = {}
        self._prefills: dict[int, deque[float]] = {}
        self._passes: dict[int, deque[float]] = {}
        self._turns: deque[tuple[int, float]] = deque(maxlen=LOADS)
        self._recomputes: deque[tuple[int, float]] = deque(maxlen=RECOMPUTES)
        self._longest = 0
        self._slow_loads = 0
        self._declined: Counter[str] = Counter()
        self._retried: set[str] = set()

    def loaded(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note that `tier` gave a chunk of `nbytes` after `seconds`."""
        loads = self._loads.setdefault(tier, deque(maxlen=LOADS))
        expected = self.load_seconds(tier, nbytes)
        if tier in self._retried and expected is not None and seconds < expected / 2:
            loads.clear()  # it has recovered: what was measured before says nothing any more
        self._retried.discard(tier)
        loads.append((nbytes, seconds))
        self._slow_loads += self.is_noticed(seconds)
        if self.is_noticed(seconds) and self._slow_loads % RETRY == 0:
            for prefills in filter(None, self._prefills.values()):
                prefills.popleft()

    def is_noticed(self, seconds: float) -> bool:
        """Whether so long a wait matters, also for a chunk that did not come in the end."""
        return seconds > SMALLEST_SAVING

    def prefilled(self, lengths: Sequence[int], seconds: float) -> None:
        """Note that chunks of `lengths` tokens were prefilled together in `seconds`."""
        tokens = sum(lengths)
        # One pass is one measurement, however many chunks it computed.
        for length in {length.bit_length(): length for length in lengths}.values():
            _note(self._prefills, length, seconds / tokens)
        self.passed(tokens, seconds)

    def passed(self, tokens: int, seconds: float) -> None:
        """Note that a pass over `tokens` tokens took at most `seconds`, whatever else it did."""
        if tokens > 0:
            _note(self._passes, tokens, seconds / tokens)
            self._longest = max(self._longest, tokens)

    def load_seconds(self, tier: str, nbytes: int) -> float | None:
        """How long a load will take: latency and bandwidth of the last ones; None if unknown."""
        loads = self._loads.get(tier, ())
        if len(loads) < FEWEST_LOADS:
            return None
        latency, slope = _line(loads)
        return latency + slope * nbytes

    def prefill_seconds(self, tokens: int) -> float | None:
        """How long a prefill will take, by chunks of about that length; None if unknown.

        Attention grows faster than the length, so a length is judged by its own power of two once
        that was measured, and until then by what other passes took per token.
        """
        exact = self._prefills.get(tokens.bit_length(), ())
        rates = [*exact]
        if len(exact) < PREFILLS:
            rates += [rate for passes in self._passes.values() for rate in passes]
        return tokens * min(rates) if rates else None

    def turned(self, nbytes: int, seconds: float) -> None:
        """Note that turning chunks of `nbytes`, and copying those in memory, took `seconds`."""
        self._turns.append((nbytes, seconds))

    def turn_seconds(self, nbytes: int) -> float:
        """How long turning chunks of `nbytes` will take; 0 if unknown."""
        if not self._turns:
            return 0.0
        latency, slope = _line(self._turns)
        return latency + slope * nbytes

    def recomputed(self, tokens: int, seconds: float) -> None:
        """Note that `tokens` tokens of a stitched prompt, query included, took `seconds` again."""
        self._recomputes.append((tokens, seconds))

    def affordable(self, seconds: float) -> int | None:
        """How many tokens of a stitched prompt can be computed again in `seconds`.

        By the last such passes, which were over prompts as long as they were; before the first one,
        by what prefills took.  None if nothing is known.
        """
        if self._recomputes:
            latency, slope = _line(self._recomputes)
        else:
            # A pass of few tokens takes as long as one of many, so the best rate counts.
            known = [*self._prefills.values(), *self._passes.values()]
            rates = [rate for found in known for rate in found]
            if not rates:
                return None
            latency, slope = 0.0, DEARER * min(rates)
        return max(int(min((seconds - latency) / max(slope, 1e-12), sys.maxsize)), 0)

    def trial(self, nbytes: int, tokens: int) -> int:
        """How many tokens to prefill for the measurement alone; 0 for no trial.

        A short pass may take as long as a long one, so that what is known of short ones hides that
        a prefill would be sooner than a load.  A trial takes at most the time of that load.
        """
        prefill = self.prefill_seconds(tokens)
        slow = [self.load_seconds(tier, nbytes) or 0.0 for tier in self._waited()]
        if not slow or not prefill or self._prefills.get(tokens.bit_length()):
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
        self._declined[tier] += 1
        if self._declined[tier] % RETRY == 0:
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
        return [
            tier
            for tier, loads in self._loads.items()
            if self.enabled and any(seconds > SMALLEST_SAVING for _, seconds in loads)
        ]

    def _saving(self, tier: str, nbytes: int, tokens: int) -> float:
        """Seconds that declining saves beyond what would be noise."""
        load, prefill = self.load_seconds(tier, nbytes), self.prefill_seconds(tokens)
        if load is None or prefill is None:
            return 0.0
        return load - prefill - max(SMALLEST_SAVING, SAVING * load)


def _line(samples: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Seconds for size 0, and seconds more per unit of size, of some `(size, seconds)`."""
    known = list(samples)
    slopes = [
        (later[1] - first[1]) / (later[0] - first[0])
        for first, later in combinations(known, 2)
        if not 1 / APART < (later[0] + 1) / (first[0] + 1) < APART
    ]
    if not slopes:
        return 0.0, median(seconds / max(size, 1) for size, seconds in known)
    slope = max(median(slopes), 0.0)  # Theil and Sen
    return max(median(seconds - slope * size for size, seconds in known), 0.0), slope


def _note(rates: dict[int, deque[float]], tokens: int, rate: float) -> None:
    rates.setdefault(tokens.bit_length(), deque(maxlen=PREFILLS)).append(rate)
