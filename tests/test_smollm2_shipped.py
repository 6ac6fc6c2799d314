"""The adapter that this checkout carries: whole, on its base, and what its card says."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path

import pytest

from kvcache_rag import Engine, Reuse
from kvcache_rag.models.adapters import WEIGHTS, AdapterBase
from kvcache_rag.models.gguf import quantised_dtype
from kvcache_rag.models.model_names import PACKAGED
from kvcache_rag.models.pretrained import load
from kvcache_rag.policies.default import UNTRAINED
from training.smollm2.card import model_card
from training.smollm2.publish import LIMIT, PLACE, TRAINING

PROJECT = Path(__file__).resolve().parent.parent / "integrations" / "kvcache-rag-smollm2"
SHIPPED = PROJECT / PLACE / WEIGHTS
RESULTS = Path(__file__).resolve().parent.parent / "lab" / "benchmarks" / "results"
CONFIRMED = RESULTS / "smollm2_confirmation.json"


@pytest.mark.skipif(not SHIPPED.is_file(), reason="this checkout has no trained adapter")
def test_the_adapter_of_this_checkout_is_whole() -> None:
    try:
        importlib.metadata.version(PACKAGED["smollm2"].package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(PACKAGED["smollm2"].install)
    place = SHIPPED.parent
    facts = json.loads((place / TRAINING).read_text(encoding="utf-8"))
    assert sum(path.stat().st_size for path in place.iterdir()) <= LIMIT
    assert hashlib.sha256(SHIPPED.read_bytes()).hexdigest() == facts["sha256"]
    assert AdapterBase.read(place) == AdapterBase("smollm2", PACKAGED["smollm2"].sha256)
    assert (PROJECT / "README.md").read_text(encoding="utf-8") == model_card(facts)
    confirmed = json.loads(CONFIRMED.read_text(encoding="utf-8"))
    assert confirmed["adapters"]["block"] == facts["sha256"], "what was asked is what is shipped"
    assert confirmed["bars"]["a"]["holds"], "else it is not shipped"
    shown = facts["confirmation"]["tables"]["Differences in points of F1"]
    for row, bar in zip(shown, confirmed["bars"].values(), strict=True):
        assert row["points"].startswith(f"{100 * bar['f1'][0]:+.2f} (")
    by_name = Engine.from_pretrained("smollm2", adapter="block")
    assert by_name.spec == Engine.from_pretrained("smollm2", adapter=place).spec
    assert by_name.policy == Reuse()
    # It is what the model gets by itself, wherever it is installed.
    assert Engine.from_pretrained("smollm2").spec == by_name.spec
    bare = Engine.from_pretrained("smollm2", adapter="none")
    assert bare.spec != by_name.spec
    assert bare.policy == UNTRAINED
    model, _, _ = load("smollm2", dtype="auto", device="cpu", options={})
    assert {value.dtype for value in model.parameters()} == {quantised_dtype()}
