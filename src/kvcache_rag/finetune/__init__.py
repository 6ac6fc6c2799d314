"""Fine-tune a model under the block mask, so that stitched chunks read like a full prefill.

TurboRAG's recipe (arXiv 2410.07590, section 3.3) for any model whose chunks can be moved: the
training forward is the stitched computation itself, in one pass of the stock transformers model.
Also CacheClip's (arXiv 2510.10129): an auxiliary model that learns where to look.

- `FinetuneConfig`, `JsonlData`, `ReaderData`: the settings.
- `finetune`: runs it; `Report`: what it did.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache_rag.finetune.config import FinetuneConfig, JsonlData, ReaderData
    from kvcache_rag.finetune.report import Change, Measure, Report
    from kvcache_rag.finetune.run import finetune

__all__ = [
    "Change",
    "FinetuneConfig",
    "JsonlData",
    "Measure",
    "ReaderData",
    "Report",
    "finetune",
]

_HOMES = {
    "config": ("FinetuneConfig", "JsonlData", "ReaderData"),
    "report": ("Change", "Measure", "Report"),
    "run": ("finetune",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
