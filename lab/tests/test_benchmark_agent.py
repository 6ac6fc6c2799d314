"""The agent's benchmark: what its steps reuse, counted by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from scripted import NATIVE, RESPONSE, scripted

from benchmarks import agent
from kvcache_rag import Engine

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_later_steps_reuse_what_earlier_ones_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, **options: object) -> Engine:
        del name, options["device"], options["adapter"]
        return Engine(*scripted(lambda _: "So.", NATIVE, RESPONSE), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "from_pretrained", load)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    path = tmp_path / "agent.json"
    assert agent.main(["--tokens", "16", "--rounds", "1", "--json", str(path)]) == 0
    steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5]
    documents = [one["document_tokens"] for one in steps]
    assert [one["reused_tokens"]["warm"] for one in steps] == documents
    assert [one["reused_tokens"]["cold"] for one in steps] == [0, 0, *documents[1:-1]]
    assert not any(one["reused_tokens"]["full"] for one in steps)
    assert documents == sorted(set(documents)), "every search finds something new"
