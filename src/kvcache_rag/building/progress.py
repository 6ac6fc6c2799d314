"""How far a build is, for whoever watches: a bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from kvcache_rag.building.report import Tally

PAUSE: Final = 30.0  # seconds between two lines


class Progress:
    """Shows a tally while it grows, on the stream of errors.

    Attributes:
        tally: What is shown.
    """

    def __init__(self, tally: Tally) -> None:
        """Show nothing yet; how many texts there are is known at the end only."""
        self.tally = tally
        self._is_terminal = sys.stderr.isatty()
        self._said = time.monotonic()
        self._bar: Any = tqdm(desc="build", unit=" chunks", disable=not self._is_terminal)

    def update(self) -> None:
        """Show what the tally says now."""
        tally = self.tally
        if self._is_terminal:
            self._bar.set_postfix_str(
                f"{tally.there} there, {tally.tokens_per_second:.0f} tokens/s", refresh=False
            )
            self._bar.update(tally.done - self._bar.n)
            return
        now = time.monotonic()
        if now - self._said >= PAUSE:
            self._said = now
            sys.stderr.write(
                f"build: {tally.done} chunks, {tally.prefilled} prefilled, {tally.there} there, "
                f"{tally.tokens_per_second:.0f} tokens/s\n"
            )

    def close(self) -> None:
        """Leave the last state standing."""
        self._bar.close()
