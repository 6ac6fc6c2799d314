"""Whatever a file is, it ends in a text or in one sentence, soon and in little memory."""

from __future__ import annotations

import pytest

from tests.hostile import SEEDS, read_all

COUNT = 200  # thousands in soak/
LEVELS = 10_000


@pytest.mark.parametrize("kind", SEEDS)
def test_a_damaged_file_ends_in_text_or_one_sentence(kind: str) -> None:
    done = read_all(kind, 1, COUNT, LEVELS)
    assert done.faults == ()
    assert done.texts + done.refused == COUNT
    assert done.texts > COUNT // 10
