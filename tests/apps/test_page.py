"""The page of the docs lists the apps that are tested."""

from __future__ import annotations

from tools.apps_page import PAGE, page


def test_the_page_is_of_these_apps() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tools/apps_page.py"
