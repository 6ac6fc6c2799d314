"""What to reuse and what to compute again."""

from kvcache_rag.policies.ape import Ape
from kvcache_rag.policies.base import ReusePolicy, Scorer
from kvcache_rag.policies.bestfew import BestFew
from kvcache_rag.policies.bestlast import BestLast
from kvcache_rag.policies.bestread import BestRead
from kvcache_rag.policies.cacheblend import CacheBlend
from kvcache_rag.policies.cacheclip import CacheClip
from kvcache_rag.policies.fixed import Combination, FullRecompute, Reuse
from kvcache_rag.policies.legolink import LegoLink
from kvcache_rag.policies.policy_registry import policy_by_name, register
from kvcache_rag.policies.prophetkv import ProphetKV

__all__ = [
    "POLICY_NAMES",
    "Ape",
    "BestFew",
    "BestLast",
    "BestRead",
    "CacheBlend",
    "CacheClip",
    "Combination",
    "FullRecompute",
    "LegoLink",
    "ProphetKV",
    "Reuse",
    "ReusePolicy",
    "Scorer",
    "policy_by_name",
]

POLICY_NAMES = register(
    *(FullRecompute, Reuse, BestFew, BestLast, BestRead, ProphetKV, LegoLink, CacheBlend),
    *(CacheClip, Ape, Combination),
)
"""The names that `policy_by_name` knows, in the order that messages list them."""
