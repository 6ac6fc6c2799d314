"""How the code is laid out, as far as a test can hold it; `tools/shape.py` reports the rest."""

from __future__ import annotations

from typing import Any

import pytest

from tools.shape import figures


@pytest.fixture(scope="module")
def shape() -> dict[str, Any]:
    return figures()


def test_a_class_name_of_the_core_means_one_thing(shape: dict[str, Any]) -> None:
    assert shape["class_names"] == {}, "public classes of two modules share a name; rename one"


def test_who_lists_the_package_reads_the_pipeline(shape: dict[str, Any]) -> None:
    assert shape["modules_at_top"] <= 12
    assert shape["folders_at_top"] <= 18
