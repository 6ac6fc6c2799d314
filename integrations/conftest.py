"""What a process has to meet that collects nothing, as xdist's controller: no conftest below."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "langchain-kvcache-rag" / "tests"))

from standard_outcomes import pytest_configure  # noqa: F401  # pytest calls it
