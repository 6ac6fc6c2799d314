"""End what is still running before the interpreter does."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Closing(Protocol):
    """Something with threads of its own."""

    def close(self) -> None:
        """Stop them and wait for their end."""
        ...


_LIVING: weakref.WeakSet[Closing] = weakref.WeakSet()


def close_at_exit(living: Closing) -> None:
    """Close it when the process ends: a thread inside torch would abort the interpreter's end."""
    _LIVING.add(living)


@atexit.register
def _close_all() -> None:
    for living in list(_LIVING):
        living.close()
