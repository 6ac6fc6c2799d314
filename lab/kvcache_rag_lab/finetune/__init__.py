"""Fine-tune a model under the block mask, so that stitched chunks read like a full prefill.

TurboRAG's recipe (arXiv 2410.07590, section 3.3) for any model whose chunks can be moved: the
training forward is the stitched computation itself, in one pass of the stock transformers model, or
one per chunk if layers are recurrent.

- `FinetuneConfig`, `JsonlData`: the settings.
- `finetune`: runs it; `Report`: its results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_rag_lab.finetune.config import FinetuneConfig as FinetuneConfig
    from kvcache_rag_lab.finetune.config import JsonlData as JsonlData
    from kvcache_rag_lab.finetune.report import Change as Change
    from kvcache_rag_lab.finetune.report import Measure as Measure
    from kvcache_rag_lab.finetune.report import Report as Report
    from kvcache_rag_lab.finetune.run import finetune as finetune
else:
    from kvcache_rag.exports import lazy_names

    __getattr__, __dir__ = lazy_names(__name__)
