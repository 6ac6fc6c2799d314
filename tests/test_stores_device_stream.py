"""What a CUDA lane tells the device, in which order; the device itself is a journal here."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvcache_rag.stores import MemoryBytes, StoredChunks
from kvcache_rag.stores import device as lane_module
from kvcache_rag.stores.device import CudaLane, Done, lane_to

if TYPE_CHECKING:
    from collections.abc import Iterator

Journal = list[tuple[str, ...]]


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Everything that torch.cuda is told."""
    told: Journal = []

    class Stream:
        def __init__(self, device: object = None, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            told.append((self.name, "waits for", other.name))

        def wait_event(self, event: Event) -> None:
            assert isinstance(event, Event)
            told.append((self.name, "waits for", "event"))

    class Event:
        def record(self, stream: Stream) -> None:
            told.append((stream.name, "records", "event"))

        def synchronize(self) -> None:
            told.append(("host", "waits for", "event"))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append(("begin", stream.name))
        yield
        told.append(("end", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name="current"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return told


class OnDevice:
    """A tensor of a device."""

    is_cuda = True

    def __init__(self, told: Journal) -> None:
        self.told = told

    def record_stream(self, stream: Any) -> None:
        self.told.append(("memory", "used by", stream.name))


def test_work_runs_beside_and_behind_what_came_before(journal: Journal) -> None:
    lane = CudaLane(torch.device("cuda", 0))
    touched: list[Any] = [torch.zeros(1), OnDevice(journal)]
    event = lane.send(lambda: journal.append(("work",)), touched)
    assert journal == [
        ("side", "waits for", "current"),  # memory that is still in use is not overwritten
        ("begin", "side"),
        ("work",),
        ("side", "records", "event"),
        ("end", "side"),
        ("memory", "used by", "side"),
    ]
    journal.clear()
    lane.follow(event)
    lane.follow(Done())
    assert journal == [("current", "waits for", "event")]


@pytest.mark.usefixtures("journal")
def test_only_pinned_memory_crosses_without_waiting() -> None:
    asked: list[bool] = []

    class Host:
        is_cpu = True

        def __init__(self, pinned: bool) -> None:
            self.pinned = pinned

        def is_pinned(self) -> bool:
            return self.pinned

        def to(self, device: torch.device, *, non_blocking: bool) -> None:
            assert device.type == "cuda"
            asked.append(non_blocking)

    lane: Any = CudaLane(torch.device("cuda", 0))
    lane.fetch(Host(pinned=True))
    lane.fetch(Host(pinned=False))
    assert asked == [True, False]


@pytest.mark.usefixtures("journal")
@pytest.mark.parametrize("pins", [True, False])
def test_memory_that_cannot_be_pinned_is_plain(
    monkeypatch: pytest.MonkeyPatch, *, pins: bool
) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def asking(size: int, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory and not pins:
            raise RuntimeError("cannot pin")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", asking)
    assert CudaLane(torch.device("cuda", 0)).memory(10).nbytes == 10
    assert asked == ([True] if pins else [True, False])


def test_a_deleted_namespace_leaves_no_bytes_in_pinned_memory(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lane = StoredChunks(MemoryBytes()), CudaLane(torch.device("cuda", 0))
    monkeypatch.setattr(lane_module, "_lanes", {})
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", lambda: journal.append(("emptied",)), raising=False
    )
    store.delete_namespace("")
    assert journal == [], "without a lane to a device there is none"
    lane_module._lanes[lane.device] = lane
    lane.backlog.add(lane.send(lambda: None, []), 10)
    journal.clear()
    store.delete_namespace("")
    assert journal == [("host", "waits for", "event"), ("emptied",)]


def test_pinned_memory_is_emptied_by_older_versions_too(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = CudaLane(torch.device("cuda", 0))
    monkeypatch.setattr(lane_module, "_lanes", {lane.device: lane})
    monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    lane_module.wipe()
    assert journal == [], "with nothing that empties it"
    monkeypatch.setattr(
        torch._C, "_host_emptyCache", lambda: journal.append(("emptied",)), raising=False
    )
    lane_module.wipe()
    assert journal == [("emptied",)]


@pytest.mark.usefixtures("journal")
@pytest.mark.parametrize("pinned", [True, False])
def test_pageable_memory_is_overwritten(monkeypatch: pytest.MonkeyPatch, *, pinned: bool) -> None:
    memory = torch.ones(9, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
    CudaLane(torch.device("cuda", 0)).forget(memory)
    assert bool(memory.any()) is pinned, "the device may still read what is pinned"


@pytest.mark.usefixtures("journal")
def test_the_current_device_is_meant_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "_lanes", {})
    found = lane_to(torch.device("cuda"))
    assert isinstance(found, CudaLane)
    assert found is lane_to(torch.device("cuda", 3))
    assert found is not lane_to(torch.device("cuda", 0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_lanes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "_lanes", {})
    mine = lane_to(torch.device("cpu"))
    with lane_module._lock:  # as if another thread held it
        child = os.fork()
        if child == 0:
            os._exit(int(lane_to(torch.device("cpu")) is mine))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
