"""The playground in a real browser, over a real server with the packaged reader."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import DEADLINE, Scripted, answer, running, settings, tiny_backend

from kvcache_rag import FullRecompute, LegoLink
from kvcache_rag.serve.app import build_app
from kvcache_rag.serve.backend import Finished, Piece, RetrievedText, Started
from kvcache_rag.serve.keys import new_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path

    from kvcache_rag.serve.backend import BackendRequest, Event
    from kvcache_rag.serve.local import LocalBackend

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402  # may be absent
from selenium.webdriver.common.by import By  # noqa: E402  # skips above without it
from selenium.webdriver.common.keys import Keys  # noqa: E402  # skips above without it
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402  # as above

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, NARROW = (1200, 900), (360, 740)
ATTACK = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> is a text."


class Page:
    """The page in a browser, as a user sees it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.driver.execute_script("sessionStorage.clear()")
        self.driver.get(url)
        self.settled()

    def find(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def text(self, selector: str) -> str:
        return str(self.find(selector).text).strip()

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def until(self, holds: Callable[[], Any]) -> None:
        waiting = WebDriverWait(
            self.driver, DEADLINE, 0.02, ignored_exceptions=[StaleElementReferenceException]
        )
        waiting.until(lambda _: holds())

    def settled(self) -> None:
        """Wait until everything that was touched has been answered."""
        self.until(lambda: self.find("#main").get_attribute("aria-busy") == "false")

    def ask(self, question: str = "") -> None:
        if question:
            self.fill("#question", question)
        self.find("#ask").click()
        self.until(lambda: self.find("#main").get_attribute("aria-busy") == "false")

    def fill(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        if len(text) < 200:
            field.send_keys(text)
        else:  # pasted
            self.script(
                "arguments[0].value = arguments[1];"
                "arguments[0].dispatchEvent(new Event('input', {bubbles: true}))",
                field,
                text,
            )

    def documents(self, *texts: str) -> None:
        while buttons := self.all("#documents .remove"):
            buttons[0].click()
        for number, text in enumerate(texts, start=1):
            self.find("#add").click()
            self.fill(f"#document-{number}", text)
        self.settled()

    def dial(self, policy: str, amount: int | None = None) -> None:
        Select(self.find("#policy")).select_by_value(policy)
        if amount is not None:
            self.script(
                "const dial = document.getElementById('amount'); dial.value = arguments[0];"
                "dial.dispatchEvent(new Event('input'))",
                amount,
            )
        self.settled()

    def size(self, size: tuple[int, int]) -> None:
        width, height = size
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )

    def dark(self, *, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def count(self, state: str) -> int:
        """What the legend says, which is as many tokens as are coloured so."""
        told = int(self.text(f"#legend [data-state={state}]"))
        assert len(self.all(f"#spans .token.{state}")) == told
        return told

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: Any) -> Iterator[Page]:
    """A browser that has nothing to complain about afterwards."""
    page = Page(driver)
    page.size(WIDE)
    page.dark(on=False)
    page.complaints()
    yield page
    driver.get("about:blank")  # closes what is still open to the server
    assert page.complaints() == []


@contextmanager
def left(page: Page) -> Iterator[None]:
    """The page is left at the end, so that a server that still answers it can stop."""
    try:
        yield
    finally:
        page.driver.get("about:blank")


@pytest.fixture(scope="module")
def reader() -> Iterator[LocalBackend]:
    with tiny_backend() as backend:
        yield backend


@pytest.fixture(scope="module")
def url(reader: LocalBackend) -> Iterator[str]:
    with running(build_app(reader, settings())) as url:
        yield url


# ---------------------------------------------------------------------- asking
def test_a_cold_question_and_then_a_warm_one(page: Page) -> None:
    with tiny_backend() as backend, running(build_app(backend, settings())) as url:
        page.open(url)
        assert page.text("#model") == "tiny"
        assert page.text("#prompt-note").startswith("Nothing was computed yet: 6 of 6")
        before = page.count("prefilled")
        assert before > 200
        page.ask()
        for side in ("full", "stitched"):
            assert page.text(f"#{side} [data-part=text]") == "Sarn"
            assert re.fullmatch(r"[\d.]+ (ms|s)", page.text(f"#{side} [data-part=ttft]"))
            figures = page.text(f"#{side} dl").splitlines()
            assert re.fullmatch(r"[\d.]+ (ms|s)", figures[1]), "as the page saw it"
            assert re.fullmatch(r"[\d.]+", figures[3]), "tokens a second"
        assert re.search(r"[\d.]+\u00d7 (sooner|later)", page.text("#verdict"))
        assert page.text("#warmth").startswith("Cold: 6 chunks were prefilled just now")
        assert "6 not cached" in page.text("#stitched dl")
        assert page.text("#spans").count("prefilled just now") == 6
        assert page.count("prefilled") + page.count("recomputed") == before
        assert page.count("recomputed") == 5 * 8, "of every chunk but the first"
        page.ask()
        assert page.text("#warmth") == "Warm: all 6 chunks came from the cache."
        assert "6 in memory" in page.text("#stitched dl")
        assert page.count("prefilled") == 0
        assert page.text("#spans").count("from memory") == 6


def test_counts_are_those_of_the_server(page: Page, url: str) -> None:
    page.open(url)
    page.ask()
    page.ask()
    figures = page.text("#stitched dl").splitlines()
    found = dict(zip(figures[::2], figures[1::2], strict=True))
    cached, computed = (int(found[name]) for name in ("cached tokens", "computed tokens"))
    assert cached == page.count("reused") + page.count("recomputed")
    assert computed == page.count("computed") + page.count("recomputed")
    shown = page.script(
        "return [...document.querySelectorAll('#spans .token')].map(t => t.textContent).join('')"
    )
    assert "<doc>Lispan lies on the river Sarn. Lispan has" in shown


def test_the_dial_is_live(page: Page, url: str) -> None:
    page.open(url)
    Select(page.find("#sample")).select_by_index(2)
    page.settled()
    page.dial("reuse")
    page.ask()
    assert page.text("#full [data-part=text]") == "Tolmi"
    assert page.text("#stitched [data-part=text]") == "not found"
    assert page.count("recomputed") == 0
    assert not page.find("#amount").is_enabled()
    page.dial("legolink", 12)
    assert page.text("#stitched [data-part=text]") == "Tolmi"
    assert page.count("recomputed") == 3 * 12
    assert "LegoLink(tokens=12" in page.text("#prompt-note")
    page.dial("cacheblend", 50)
    half = page.count("recomputed")
    chunks = sum(map(page.count, ("reused", "recomputed"))) - len(page.all(".prefix .token"))
    assert half == chunks // 2
    page.dial("cacheblend", 10)
    assert 0 < page.count("recomputed") < half / 4
    page.dial("full")
    assert page.count("computed") == len(page.all("#spans .token"))


@pytest.mark.parametrize(
    ("sample", "full", "stitched"),
    [
        (0, "Sarn", "Sarn"),
        (1, "Drenko; Osha Grell", "Drenko; Osha Grell"),
        (2, "Tolmi", "not found"),
        (3, "Rusta", "Rusta"),
    ],
)
def test_samples_are_answered(page: Page, url: str, sample: int, full: str, stitched: str) -> None:
    page.open(url)
    Select(page.find("#sample")).select_by_index(sample)
    page.settled()
    page.ask()
    assert page.text("#full [data-part=text]") == full
    assert page.text("#stitched [data-part=text]") == stitched
    assert len(page.all("#spans .chunk")) == len(page.all("#documents li"))


def test_the_dial_may_only_show(page: Page, url: str) -> None:
    page.open(url)
    page.find("#live").click()
    page.ask()
    page.dial("legolink", 30)
    assert page.count("recomputed") == 5 * 30
    assert page.text("#stitched .mode") == "policy legolink:8"
    assert "stale" in page.find("#stitched").get_attribute("class")


def name_of(work: BackendRequest) -> str:
    """How the page writes the policy of a request."""
    return {FullRecompute(): "full", LegoLink(8): "legolink:8"}[work.policy]


def test_answers_come_piece_by_piece_and_can_be_stopped(page: Page) -> None:
    gate = threading.Event()

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        yield Piece("one ")
        while name_of(work) == "full" and not gate.is_set():
            await asyncio.sleep(0.01)
        yield Piece("two")
        if name_of(work) != "full":
            await asyncio.Event().wait()
        yield Finished(answer("one two", ttft=0.5, total=1.0))

    backend = Scripted(script)

    async def explain(work: BackendRequest) -> dict[str, Any]:
        return {
            "tokens": [],
            "spans": [],
            "policy": repr(work.policy),
            "gate": "",
            "query_tokens": 0,
        }

    backend.explain = explain  # type: ignore[method-assign]  # nothing to explain
    with running(build_app(backend, settings())) as url, left(page):
        page.open(url)
        page.find("#ask").click()
        page.until(lambda: page.text("#full [data-part=text]") == "one")
        assert page.text("#ask") == "Stop"
        assert re.fullmatch(r"[\d.]+ (ms|s)", page.text("#full [data-part=ttft]")), (
            "as soon as seen"
        )
        assert page.text("#stitched [data-part=text]") == ""
        gate.set()
        page.until(lambda: page.text("#stitched [data-part=text]") == "one two")
        assert page.text("#full [data-part=ttft]") == "500 ms"
        assert [name_of(work) for work in backend.works] == ["full", "legolink:8"], "not at once"
        page.find("#ask").click()
        page.settled()
        assert backend.was_taken_back.wait(DEADLINE)
        assert (page.text("#ask"), page.text("#verdict")) == ("Ask", "Stopped.")
        assert not page.find("#error").is_displayed()


# ---------------------------------------------------------------------- what goes wrong
def test_the_servers_sentence_is_shown(page: Page, url: str) -> None:
    page.open(url)
    page.documents("long " * 4500)
    assert "chunk 0 has" in page.text("#error")
    page.ask()
    assert "split it into smaller chunks" in page.text("#error")
    assert (page.text("#ask"), page.text("#verdict")) == ("Ask", "There is no answer.")
    refused = page.complaints()
    assert refused
    assert all("status of 400" in one for one in refused), "the browser's own note of the refusal"
    page.documents("The Mobrit is made by Drenko.")
    page.ask("Which company makes the Mobrit?")
    assert not page.find("#error").is_displayed()
    assert page.text("#stitched [data-part=text]") == "Drenko"


def test_a_server_that_is_gone_is_told(page: Page) -> None:
    with running(build_app(Scripted(), settings())) as url:
        page.driver.get(url)
        page.settled()
    page.ask()
    assert page.text("#error") == "The server does not answer; is it still running?"
    assert any("ERR_CONNECTION_REFUSED" in one for one in page.complaints())


def test_a_document_is_never_markup(page: Page, url: str) -> None:
    page.open(url)
    page.documents(ATTACK, "Kelo is based in Bran.")
    page.ask(f"{ATTACK} Where is Kelo based?")
    assert ATTACK in page.script("return document.getElementById('spans').textContent")
    assert page.script("return window.hacked") is None
    assert page.all("img, body script") == []


def test_a_key_is_asked_for_and_kept_in_the_tab(
    page: Page, reader: LocalBackend, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    key = new_key(keys, "tests")
    with running(build_app(reader, settings(api_keys=keys))) as url:
        page.driver.get(url)
        page.script("sessionStorage.clear()")
        page.driver.get(url)
        page.settled()
        assert "API key" in page.text("#prompt-note")
        page.fill("#key", "wrong\n")
        page.until(lambda: "not known here" in page.text("#error"))
        assert all("status of 401" in one for one in page.complaints())
        page.fill("#key", f"{key}\n")
        page.until(lambda: page.text("#model") == "tiny")
        page.settled()
        page.ask()
        assert page.text("#stitched [data-part=text]") == "Sarn"
        assert page.script("return [localStorage.length, document.cookie]") == [0, ""]
        assert key not in page.driver.current_url


class Shelf:
    """Two documents, whatever is asked."""

    texts = ("Kelo is based in Bran.", "Drenko is based in Lispan.")

    def retrieve(self, query: str, top_k: int, namespace: str) -> list[RetrievedText]:
        found = [RetrievedText(f"row {at}", text, 0.5) for at, text in enumerate(self.texts)]
        return found[:top_k]


def test_documents_can_be_retrieved(page: Page) -> None:
    shelf = Shelf()
    with (
        tiny_backend(retriever=shelf) as backend,
        running(build_app(backend, settings(), retriever=shelf)) as url,
    ):
        page.open(url)
        page.find("#retrieve").click()
        page.settled()
        assert page.all("#documents li") == []
        page.fill("#top", "2")
        page.ask("Where is Kelo based?")
        assert page.text("#full [data-part=text]") == "Bran"
        assert page.text("#stitched [data-part=text]") == "Bran"
        fields = [field.get_attribute("value") for field in page.all("#documents textarea")]
        assert fields == [*Shelf.texts]
        assert len(page.all("#spans .chunk")) == 2
        page.dial("legolink", 3)
        assert page.count("recomputed") == 3


# ---------------------------------------------------------------------- for everybody
def test_it_works_with_the_keyboard(page: Page, url: str) -> None:
    page.open(url)
    page.find("#question").send_keys(Keys.ENTER)
    page.until(lambda: page.text("#stitched [data-part=text]") == "Sarn")
    page.settled()
    spans = page.find("#spans")
    spans.send_keys(Keys.END)
    assert "Question" in page.text("#readout")
    spans.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert "Answer" in page.text("#readout")
    assert "reused, position 1, Instruction" in page.text("#readout")
    assert len(page.all(".token.active")) == 1


def test_pointing_at_a_token_tells_its_state_and_place(page: Page, url: str) -> None:
    page.open(url)
    page.ask()
    token = page.all("#spans .token.recomputed")[0]
    webdriver.ActionChains(page.driver).move_to_element(token).perform()
    place = int(token.get_attribute("data-at"))
    page.until(lambda: f"recomputed, position {place}, Document 2" in page.text("#readout"))


def test_every_field_has_a_label(page: Page, url: str) -> None:
    page.open(url)
    nameless = page.script(
        "return [...document.querySelectorAll('input, textarea, select, button')]"
        ".filter(one => !(one.labels?.length || one.ariaLabel || one.textContent.trim()))"
        ".map(one => one.outerHTML)"
    )
    assert nameless == []


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_fits_and_does_not_jump(page: Page, url: str, size: tuple[int, int]) -> None:
    page.size(size)
    page.open(url)
    place = "return document.querySelector('#prompt-title').getBoundingClientRect().top + scrollY"
    before = page.script(place)
    page.ask()
    assert page.script(place) == before
    assert page.script("return document.documentElement.scrollWidth") <= size[0]


def test_it_follows_a_dark_screen(page: Page, url: str) -> None:
    page.open(url)
    colour = "return getComputedStyle(document.body)[arguments[0]]"
    light = [page.script(colour, name) for name in ("backgroundColor", "color")]
    page.dark(on=True)
    dark = [page.script(colour, name) for name in ("backgroundColor", "color")]

    def brightness(given: str) -> int:
        return sum(map(int, re.findall(r"\d+", given)[:3]))

    assert brightness(light[0]) > brightness(light[1])
    assert brightness(dark[0]) < brightness(dark[1])
