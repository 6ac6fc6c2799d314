"""What to reuse and what to compute again."""

from kvcache_rag.policies.base import ReusePolicy
from kvcache_rag.policies.fixed import FullRecompute, Reuse
from kvcache_rag.policies.joint import Combination

__all__ = ["Combination", "FullRecompute", "Reuse", "ReusePolicy"]
