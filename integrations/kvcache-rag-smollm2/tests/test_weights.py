"""The adapter that this package brings: whole, found by its name, and what its card says."""

from __future__ import annotations

import hashlib
import json
import math
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

PLACE = Path(str(files("kvcache_rag_smollm2"))) / "block"
WEIGHTS = PLACE / "adapter_model.safetensors"


@pytest.fixture(scope="module")
def card() -> str:
    return str(distribution("kvcache-rag-smollm2").metadata.get_payload())


def test_its_name_leads_to_its_folder() -> None:
    (point,) = distribution("kvcache-rag-smollm2").entry_points
    assert (point.group, point.name) == ("kvcache_rag.adapters", "block")
    assert [Path(one) for one in point.load().__path__] == [PLACE]


def test_the_weights_are_those_of_the_card(card: str) -> None:
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() in card
    rank = json.loads((PLACE / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    with safe_open(WEIGHTS, "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  # no mapping
    assert f"LoRA of rank {rank}, {sum(map(torch.numel, tensors)):,} parameters" in card
    assert {one.dtype for one in tensors} == {torch.bfloat16}
    assert all(rank in one.shape and math.isfinite(one.float().norm()) for one in tensors)


def test_its_base_is_named(card: str) -> None:
    base = json.loads((PLACE / "base.json").read_text(encoding="utf-8"))
    assert base["sha256"] in card


def test_nothing_in_it_is_code() -> None:
    assert sorted(one.name for one in PLACE.parent.rglob("*.py")) == ["__init__.py"]
