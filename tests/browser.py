"""Chromium without a window, for tests of what people look at."""

from __future__ import annotations

import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDED = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def start(profile: Path) -> Any:
    """A browser with a new profile in a folder; `quit()` ends it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(300)  # axe-core takes its time over a long page on a busy machine
    return driver


def barriers(driver: Any, looked_at: set[str]) -> list[str]:
    """What axe-core finds fault with in the page that is open; some rules must have passed."""
    driver.execute_script(_axe())
    script = "axe.run(document).then((found) => arguments[0](JSON.stringify(found)))"
    found = json.loads(driver.execute_async_script(script))
    assert looked_at <= {rule["id"] for rule in found["passes"]}
    return [
        f"{rule['id']} ({rule['help']}): {node['html']} {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


@cache
def _axe() -> str:
    """The script of axe-core; the package around it is not imported, as it needs Playwright."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        pytest.skip("axe-core is not installed: pip install --no-deps axe-playwright-python")
    return (Path(found.submodule_search_locations[0]) / "axe.min.js").read_text("utf-8")
