"""Notice that a stream goes on only to be written into a trace.

When the consumer of `chain.stream(...)` closes it, every `Runnable.transform` of LangChain (1.x,
the sync form) reads what is left of its input to the end, to tell tracers what its whole input was.
A model would go on to the last token of an answer that nobody reads.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from langchain_core.runnables import Runnable
from langchain_core.utils import iter as streams

if TYPE_CHECKING:
    from types import FrameType

_TRANSFORM: Final = Runnable._transform_stream_with_config.__code__
_TEE: Final = streams.tee_peer.__code__
# Set between the first piece, which is fetched the same way, and the loop over the pieces.
_STARTED: Final = "iterator"


def is_drained() -> bool:
    """Whether whoever asks for the next piece only wants to have it traced.

    The pieces of a step go two ways: through its transformer, and straight to its trace.  A piece
    asked for by the trace itself, once the step runs, is one that the transformer did not want.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        above = frame.f_back
        if frame.f_code is _TEE and above is not None and _is_running(above):
            return True
        frame = above
    return False


def _is_running(frame: FrameType) -> bool:
    return frame.f_code is _TRANSFORM and _STARTED in frame.f_locals
