"""Every bit of a header, and very many of a payload."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from kvcache_rag.stores import DiskStore
from tests.damage import filled, header_size, is_refused
from tests.reliability import record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.soak.conftest import Amount

pytestmark = pytest.mark.timeout(2400)
PAYLOAD_FLIPS, PAYLOAD_FLIPS_LONG = 10_000, 70_000


def test_no_flipped_header_bit_serves_a_wrong_tensor(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False)
    key, raw = filled(store)
    size = header_size(raw)
    kept = 0
    for index in range(size):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[index] ^= 1 << bit
            kept += not is_refused(store, key, bytes(damaged))
    # Only the name of the writer may change unseen.
    provenance = json.loads(raw[8:size])["__metadata__"]["provenance"]
    assert kept <= 8 * len(provenance)
    assert store.stats().corrupt == 8 * size - kept
    tried = "files with one bit of the header flipped: every bit there is"
    seen = {"refused and put aside": 8 * size - kept, "only the name of the writer differs": kept}
    record("damage-header", "damage", tried, 8 * size, **seen, wrong_tensors=0)


def test_no_flipped_payload_bit_serves_a_wrong_tensor(tmp_path: Path, amount: Amount) -> None:
    flips = amount(PAYLOAD_FLIPS, PAYLOAD_FLIPS_LONG)
    store = DiskStore(tmp_path, durable=False)
    key, raw = filled(store)
    chance = random.Random(3)
    for _ in range(flips):
        damaged = bytearray(raw)
        damaged[chance.randrange(header_size(raw), len(raw))] ^= 1 << chance.randrange(8)
        assert is_refused(store, key, bytes(damaged))
    tried, seen = "files with one bit of the payload flipped", {"refused and put aside": flips}
    record("damage-payload", "damage", tried, flips, **seen, wrong_tensors=0)
