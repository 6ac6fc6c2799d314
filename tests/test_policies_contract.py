"""Every policy keeps the laws of policies."""

from __future__ import annotations

from typing import ClassVar

from kvcache_rag import CacheBlend, CacheClip, ProphetKV
from kvcache_rag.policies import POLICY_NAMES
from tests.contracts_policies import PolicyContract


class TestReuse(PolicyContract):
    written = ("Reuse()", "Reuse(positions='composite')")
    names: ClassVar = {
        "reuse": "Reuse()",
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
    )
    names: ClassVar = {"bestlast": "BestLast()", "bestlast:0.4": "BestLast(0.4)"}
    wrong = (
        "BestLast(-0.1)",
        "BestLast(1.5)",
        "BestLast(0.2, 'local')",
    )


class TestBestFew(PolicyContract):
    written = ("BestFew()", "BestFew(count=2)")
    names: ClassVar = {"bestfew": "BestFew()", "bestfew:2": "BestFew(2)"}
    wrong = ("BestFew(0)", "BestFew(-1)", "BestFew(True)", "BestFew(1.5)", "BestFew('2')")


class TestBestRead(PolicyContract):
    written = ("BestRead()", "BestRead(count=2)")
    names: ClassVar = {"bestread": "BestRead()", "bestread:2": "BestRead(2)"}
    wrong = ("BestRead(0)", "BestRead(-1)", "BestRead(True)", "BestRead(1.5)", "BestRead('2')")


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
    )
    names: ClassVar = {
        "cacheblend": "CacheBlend()",
        "cacheblend:0.3": "CacheBlend(0.3)",
    }
    wrong = (
        "CacheBlend(2)",
        "CacheBlend(True)",
        "CacheBlend(check_layer=0)",
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


def test_every_name_belongs_to_a_policy_that_keeps_them() -> None:
    named = {name for kind in PolicyContract.__subclasses__() for name in kind.names}
    assert {*POLICY_NAMES} == {name for name in named if name.isalpha()}
