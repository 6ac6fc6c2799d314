"""Write docs/apps.md, what ordinary apps keep of their caches, from the apps that are tested.

python tools/apps_page.py            # write it
python tools/apps_page.py --check    # exit 1 if it is not what would be written
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]
PAGE = ROOT / "docs" / "apps.md"
BEFORE = """\
# What keeps its caches

Which apps find their chunks cached when they ask again: patterns as the documentation of
LlamaIndex and LangChain writes them, around the LLM or the chat model of this project. Each is a
function in [tests/apps](../tests/apps), asked the same question twice by `make test`. "Every
chunk": the second time all chunk tokens were loaded and none was computed, and the answer is the
same. Written by `python tools/apps_page.py`.
"""


def page() -> str:
    """The page, from the lists of both frameworks."""
    catalogue = import_module("apps.catalogue")
    parts = [BEFORE]
    for module in ("apps.llama_index_apps", "apps.langchain_apps"):
        framework: str = import_module(module).FRAMEWORK
        parts.append(f"## {framework}\n\n{catalogue.listed(framework)}")
    return "\n".join(parts)


def main() -> int:
    """Write the page, or compare it."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    is_same = PAGE.read_text(encoding="utf-8") == page()
    if not is_same:
        sys.stderr.write("docs/apps.md is stale: python tools/apps_page.py\n")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
