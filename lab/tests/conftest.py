"""Tests of the lab share helpers with each other and with those of the core."""

from __future__ import annotations

import sys
from pathlib import Path

# Tests are imported without packages, so that two `tests` folders can have equal file names.
sys.path.insert(0, str(Path(__file__).parent))
