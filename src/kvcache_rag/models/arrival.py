"""Layers of a context that are still being loaded while the forward pass has begun."""

from __future__ import annotations

from typing import Protocol


class Arrivals(Protocol):
    """Tells a cache layer when the context it holds is in its place."""

    def wait(self, layer: int) -> None:
        """Return once the keys and values of `layer` lie in the buffer, turned to their places.

        Called from the thread of the forward pass, before the layer's first use; calling it again
        is cheap.  For the last layer that keeps keys and values it returns only once everything
        that was loaded is verified, so that nothing unverified ever yields a token.

        Args:
            layer: Index of the layer in the model.

        Raises:
            ChunkNotFoundError: If a chunk was not there; a `CorruptChunkError` if it was damaged.
            OSError: If it could not be read.
        """


class Loading(Arrivals, Protocol):
    """A context on its way; whoever asked for it closes it, whatever happens."""

    @property
    def waited(self) -> float:
        """Seconds for which the forward pass had to wait."""

    @property
    def error(self) -> BaseException | None:
        """What went wrong, or None."""

    def close(self) -> None:
        """Let nothing more be written to the buffer by the time it is used again."""
