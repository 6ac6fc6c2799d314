"""Nodes, what an answer cost, what LlamaIndex reports, and models that fail or come to rest."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import NodeWithScore, TextNode
from small import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llama_index.core.instrumentation.events.base import BaseEvent


def nodes(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]


def cost(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response.metadata["kv_cache"]
    return found


@contextmanager
def failing_at_the_third_token() -> Iterator[None]:
    """For so long the model does, counted from now on."""
    forward, calls = make_model().forward, [0]

    def fail(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            raise RuntimeError("out of memory")
        return forward(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_model(), "forward", fail)
        yield


class Recorder(BaseEventHandler):
    """Remembers every event of LlamaIndex's instrumentation."""

    events: list[Any]

    def handle(self, event: BaseEvent, **_: Any) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.events]

    def named(self, name: str) -> list[Any]:
        return [event for event in self.events if event.class_name() == name]


def settled(forwards: list[int]) -> int:
    """How many forward passes there have been when no more come."""
    count = -1
    while count != len(forwards):
        count = len(forwards)
        time.sleep(0.1)
    return count
