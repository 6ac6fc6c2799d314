"""`kvcache-rag eval` that knows `random:RATIO`, too: a choice by nothing, to compare others with.

As in `python -m benchmarks.answers_eval --task niah_single_1 --policies full random:0.2`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.answers_candidates import RandomTokens
from kvcache_rag import cli
from kvcache_rag.policies.named import listed

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with its own arguments."""
    listed(RandomTokens)
    return cli.main(["eval", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
