"""The documentation site in a real browser, opened as files: `make docs` builds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import browser
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # skips above without it
from selenium.webdriver.support.ui import WebDriverWait  # as above

SITE = Path(__file__).parent.parent / "build" / "site"
PAGES = sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html"))
PAGES = [page for page in PAGES if page != "404.html"]  # which only a server shows
pytestmark = [
    browser.NEEDED,
    pytest.mark.skipif(not PAGES, reason="there is no site: make docs builds it"),
]
SIZES = {"wide": (1300, 900), "narrow": (400, 740)}
# One of each kind.
LOOKED_AT = (
    *("index.html", "quality.html", "cli.html"),
    *("reference/policies.html", "notebooks/llamaindex.html"),
)
SEARCHES = {
    "signing key": "Security",
    "first token late": "Troubleshooting",
    "which policy": "Which policy",
    "KVCacheLLM": "LlamaIndex",
    "ChatKVCache": "LangChain",
    "vllm connector": "vLLM computes, kvcache-rag stitches",
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = browser.start(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()


def show(driver: Any, page: str, size: str) -> None:
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.get_log("browser")
    driver.get((SITE / page).as_uri())


@pytest.mark.parametrize(
    ("page", "size"),
    [*((page, "narrow") for page in PAGES), *((page, "wide") for page in LOOKED_AT)],
)
def test_a_page_fits_and_asks_nobody_for_anything(driver: Any, page: str, size: str) -> None:
    show(driver, page, size)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= SIZES[size][0]
    asked = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    assert [url for url in driver.execute_script(asked) if not url.startswith("file:")] == []
    lost = "return [...document.images].filter((one) => !one.naturalWidth).map((one) => one.src)"
    assert driver.execute_script(lost) == []
    assert [entry["message"] for entry in driver.get_log("browser")] == []


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("narrow", "dark")])
@pytest.mark.parametrize("page", LOOKED_AT)
def test_axe_core_finds_no_barrier_of_ours(driver: Any, page: str, size: str, scheme: str) -> None:
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    show(driver, page, size)
    dark = driver.execute_script("return document.body.dataset.mdColorScheme") == "slate"
    assert dark == (scheme == "dark")
    # Of the theme: a closed part of its navigation has the name of the one around it.
    found = browser.barriers(driver, {"color-contrast", "scrollable-region-focusable"})
    assert [one for one in found if not one.startswith("landmark-unique")] == []


@pytest.mark.parametrize(("query", "found"), SEARCHES.items())
def test_the_search_works_without_a_server(driver: Any, query: str, found: str) -> None:
    show(driver, "index.html", "wide")
    driver.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]").send_keys(query)

    def titles(_: Any) -> list[str]:
        seen = driver.find_elements(By.CSS_SELECTOR, ".md-search-result h1")
        texts = [title.text for title in seen]
        return texts if all(texts[:5]) else []  # some are not drawn yet

    assert found in WebDriverWait(driver, 20).until(titles)[:5]
