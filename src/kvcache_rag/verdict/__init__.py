"""A verdict: how far each policy is from full prefill on one model, as a file.

`kvcache-rag verify` measures and writes it; an engine with `gate=` reads it.  It is JSON of a fixed
shape, the same bytes for the same verdict, and holds neither questions nor texts.  Numbers that are
not known are null in the file and NaN here; a NaN never passes a gate.
"""

from kvcache_rag.verdict.document import WEAK_BELOW, Verdict
from kvcache_rag.verdict.rows import AuxiliaryAgreement, Identity, NumericsCheck, PolicyScore
from kvcache_rag.verdict.setting import THRESHOLD, Gate

__all__ = [
    "THRESHOLD",
    "WEAK_BELOW",
    "AuxiliaryAgreement",
    "Gate",
    "Identity",
    "NumericsCheck",
    "PolicyScore",
    "Verdict",
]
