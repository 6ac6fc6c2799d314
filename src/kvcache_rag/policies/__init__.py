"""What to reuse and what to compute again."""

from kvcache_rag.policies.base import ReusePolicy
from kvcache_rag.policies.fixed import FullRecompute, Reuse

__all__ = ["FullRecompute", "Reuse", "ReusePolicy"]
