"""A recorder for what LlamaIndex reports, and when a model has come to rest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler

if TYPE_CHECKING:
    from llama_index.core.instrumentation.events.base import BaseEvent


class Recorder(BaseEventHandler):
    """Remembers every event of LlamaIndex's instrumentation."""

    events: list[Any]

    def handle(self, event: BaseEvent, **_: Any) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.events]

    def of(self, name: str) -> list[Any]:
        return [event for event in self.events if event.class_name() == name]


def settled(forwards: list[int]) -> int:
    """How many forward passes there have been when no more come."""
    count = -1
    while count != len(forwards):
        count = len(forwards)
        time.sleep(0.1)
    return count
