"""Which tokens of a chunk keep their keys and values when it is stored (KV pruning).

A press scores the tokens of a chunk while it is prefilled; those with the highest scores are kept,
one set for all layers and heads.
"""

from kvcache_rag.presses.base import LayerStates, Press
from kvcache_rag.presses.expected_attention import ExpectedAttention
from kvcache_rag.presses.knorm import Knorm
from kvcache_rag.presses.named import PRESSES, press_by_name
from kvcache_rag.presses.snapkv import SnapKV

__all__ = [
    "PRESSES",
    "ExpectedAttention",
    "Knorm",
    "LayerStates",
    "Press",
    "SnapKV",
    "press_by_name",
]
