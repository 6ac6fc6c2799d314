"""Every policy keeps the laws of policies."""

from __future__ import annotations

from importlib import import_module
from typing import ClassVar

import pytest

from kvcache_rag import CacheBlend, CacheClip, ProphetKV
from kvcache_rag.policies import POLICY_NAMES
from tests.contracts_policies import PolicyContract


class TestReuse(PolicyContract):
    written = ("Reuse()", "Reuse(positions='composite')")
    names: ClassVar = {
        "reuse": "Reuse()",
        "reordered": "Reuse()",
        "composite": "Reuse('composite')",
    }
    wrong = ("Reuse('local')",)


class TestFullRecompute(PolicyContract):
    written = ("FullRecompute()",)
    names: ClassVar = {"full": "FullRecompute()"}
    computes_everything = True


class TestCombination(PolicyContract):
    written = ("Combination()",)
    names: ClassVar = {"combination": "Combination()"}


class TestBestLast(PolicyContract):
    written = (
        "BestLast()",
        "BestLast(share=0.4, positions='composite')",
        "BestLast() | ProphetKV(0.1)",
        "LegoLink(4) | BestLast(0)",
    )
    names: ClassVar = {"bestlast": "BestLast()", "bestlast:0.4": "BestLast(0.4)"}
    wrong = (
        "BestLast(-0.1)",
        "BestLast(1.5)",
        "BestLast(0.2, 'local')",
        "BestLast() | Ape()",
        "BestLast() | Combination()",
        "BestLast() | LegoLink(4, 'composite')",
    )


class TestProphetKV(PolicyContract):
    written = (
        "ProphetKV()",
        "ProphetKV(ratio=0.3, positions='composite')",
        "ProphetKV(0)",
        "ProphetKV(1)",
    )
    names: ClassVar = {"prophetkv": "ProphetKV()", "prophetkv:0.3": "ProphetKV(0.3)"}
    wrong = (
        "ProphetKV(-0.1)",
        "ProphetKV(True)",
        "ProphetKV('0.2')",
        "ProphetKV(0.2, 'local')",
        "ProphetKV() | Ape()",
        "ProphetKV() | ProphetKV(positions='composite')",
    )
    at_ratio = ProphetKV
    computes_everything = True


class TestLegoLink(PolicyContract):
    written = ("LegoLink()", "LegoLink(tokens=4, positions='composite')", "LegoLink(0)")
    names: ClassVar = {"legolink": "LegoLink()", "legolink:4": "LegoLink(4)"}
    wrong = ("LegoLink(-1)", "LegoLink(True)", "LegoLink(1.5)", "LegoLink(4, 'local')")


class TestCacheBlend(PolicyContract):
    written = (
        "CacheBlend()",
        "CacheBlend(ratio=0.3, check_layer=2, positions='composite')",
        "CacheBlend(0)",
        "CacheBlend(ratio=0.2, check_layers=(1, 2, 3))",
    )
    names: ClassVar = {
        "cacheblend": "CacheBlend()",
        "cacheblend:0.3": "CacheBlend(0.3)",
        "cacheblend:0.3,1,2": "CacheBlend(0.3, check_layers=(1, 2))",
    }
    wrong = (
        "CacheBlend(2)",
        "CacheBlend(True)",
        "CacheBlend(check_layer=0)",
        "CacheBlend(check_layers=2)",
        "CacheBlend(check_layers=(0, 1))",
        "CacheBlend(check_layers=(2, 1))",
        "CacheBlend(check_layer=2, check_layers=(1, 2))",
        "CacheBlend(0.1, check_layers=(1, 2)) | LegoLink(4)",
    )
    at_ratio = CacheBlend


class TestCacheClip(PolicyContract):
    written = (
        "CacheClip()",
        "CacheClip(ratio=0.4, window=4, threshold=None)",
        "CacheClip(ratio=0.3, ratio_of='recomputed')",
        "CacheClip(ratio=0)",
    )
    names: ClassVar = {
        "cacheclip": "CacheClip()",
        "cacheclip:0.3": "CacheClip(ratio=0.3)",
        "cacheclip:0.3,4": "CacheClip(ratio=0.3, threshold=4)",
        "cacheclip:0.3,mean": "CacheClip(ratio=0.3, threshold=None)",
        "cacheclip:0.3,4,recomputed": "CacheClip(ratio=0.3, threshold=4, ratio_of='recomputed')",
    }
    wrong = ("CacheClip(ratio=-1)", "CacheClip(window=0)", "CacheClip(threshold=8)")
    at_ratio = staticmethod(lambda ratio: CacheClip(ratio=ratio, window=1, threshold=0))


class TestApe(PolicyContract):
    written = ("Ape()", "Ape(temperature=0.7, scale=1.1)")
    names: ClassVar = {"ape": "Ape()", "ape:0.8,0.7": "Ape(0.8, 0.7)"}
    wrong = ("Ape(0)", "Ape(scale=float('inf'))", "Ape(True)")


class TestUnion(PolicyContract):
    written = (
        "Union(LegoLink(tokens=4), CacheBlend(ratio=0.1))",
        "LegoLink(4) | CacheBlend(0.1) | Reuse()",
        "Union(Reuse())",
    )
    names: ClassVar = {"legolink:4|cacheblend:0.1": "Union(LegoLink(4), CacheBlend(0.1))"}
    wrong = ("Union()", "Union(4)", "Union(Ape(), LegoLink(4, 'composite'))")


class TestAuto(PolicyContract):
    @pytest.fixture(autouse=True)
    def _still(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No time passes while it chooses."""
        module = import_module("kvcache_rag.policies.auto")  # behind the function of its name
        monkeypatch.setattr(module, "perf_counter", lambda: 0.0)

    written = ("auto(0.5)", "auto(0.25, LegoLink(2) | CacheBlend(0.1))", "auto(0)", "auto(0.01)")
    names: ClassVar = {
        "auto:0.5": "auto(0.5)",
        "auto:0.5,cacheclip:0.3": "auto(0.5, CacheClip(ratio=0.3))",
    }
    wrong = ("auto(-1)", "auto('1')", "auto(1, LegoLink(4))")


def test_every_name_belongs_to_a_policy_that_keeps_them() -> None:
    named = {name for kind in PolicyContract.__subclasses__() for name in kind.names}
    assert {*POLICY_NAMES} - {"auto"} == {name for name in named if name.isalpha()}
    assert any(name.startswith("auto:") for name in named)
