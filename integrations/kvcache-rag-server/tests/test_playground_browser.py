"""The playground in a real browser, over a real server with the packaged reader."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import browser
import pytest
from serve_fakes import DEADLINE, Scripted, answer, running, settings, tiny_backend

from kvcache_rag import FullRecompute, Reuse
from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import Finished, Piece, Started
from kvcache_rag_server.keys import new_key
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from kvcache_rag_server.backend import BackendRequest, Event
    from kvcache_rag_server.local import LocalBackend

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402  # may be absent
from selenium.webdriver.common.by import By  # noqa: E402  # skips above without it
from selenium.webdriver.common.keys import Keys  # noqa: E402  # skips above without it
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402  # as above

pytestmark = browser.NEEDED
WIDE, NARROW = (1300, 900), (400, 740)
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
        self.settled()

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
        self.find("#clear").click()
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
        told = int(self.text(f"#legend [data-state={state}]").replace(",", ""))
        assert len(self.all(f"#spans .token.{state}")) == told
        return told

    def figures(self) -> tuple[int, int]:
        """Tokens of the stitched answer: cached and computed."""
        figures = self.text("#stitched dl").splitlines()
        found = dict(zip(figures[::2], figures[1::2], strict=True))
        cached, computed = (found[f"{kind} tokens"] for kind in ("cached", "computed"))
        return int(cached.replace(",", "")), int(computed.replace(",", ""))

    def give(self, *files: Path) -> None:
        """Choose files, as their picker does."""
        self.find("#files").send_keys("\n".join(map(str, files)))
        self.settled()

    def sources(self) -> list[str]:
        return [label.text for label in self.all("#documents label")]

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = browser.start(tmp_path_factory.mktemp("chromium"))
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
        assert page.text("#prompt-note").startswith("Not cached yet: 6 of 6 documents.")
        before = page.count("prefilled")
        assert before > 200
        assert page.count("reused") == 0
        page.ask()
        for side in ("full", "stitched"):
            assert page.text(f"#{side} [data-part=text]") == "Sarn"
            assert re.fullmatch(r"[\d.]+ (ms|s)", page.text(f"#{side}-lane b"))
            figures = page.text(f"#{side} dl").splitlines()
            assert re.fullmatch(r"[\d.]+ (ms|s)", figures[1]), "as the page saw it"
            assert re.fullmatch(r"[\d.]+", figures[3]), "tokens a second"
        assert re.search(r"[\d.]+\u00d7 (sooner|later)|as soon", page.text("#verdict"))
        assert page.text("#warmth").startswith("Cold: 6 chunks were prefilled just now")
        assert "6 not cached" in page.text("#stitched dl")
        assert page.text("#spans").count("prefilled just now") == 6
        assert page.count("prefilled") == before
        assert page.count("recomputed") == page.count("reused") == 0
        assert page.figures() == (0, before + page.count("computed"))
        page.ask()
        assert page.text("#warmth") == "Warm: all 6 chunks came from the cache."
        assert "6 in memory" in page.text("#stitched dl")
        assert page.count("prefilled") == 0
        assert page.text("#spans").count("from memory") == 6


def test_the_dial_is_live_and_where_answers_differ_is_said_and_marked(page: Page, url: str) -> None:
    page.open(url)
    Select(page.find("#sample")).select_by_index(2)
    page.settled()
    page.dial("reuse")
    page.ask()
    differ = "full prefill has \u201cTolmi\u201d, the stitched answer \u201cnot found\u201d."
    assert page.text("#agreement") == f"The answers differ: {differ}"
    for side, said in (("full", "Tolmi"), ("stitched", "not found")):
        assert page.text(f"#{side} [data-part=text]") == said
        (mark,) = page.all(f"#{side} mark")
        assert mark.text == said
        assert mark.value_of_css_property("text-decoration-line") == "underline", "no colour alone"
    assert page.count("recomputed") == 0
    assert not page.find("#amount").is_enabled()
    page.dial("legolink", 12)
    assert page.text("#stitched [data-part=text]") == "Tolmi"
    assert page.text("#agreement") == "Same answer."
    assert not page.all("mark")
    assert page.count("recomputed") == 3 * 12
    assert page.text("#prompt-note").startswith("LegoLink 12: 36 of ")
    page.dial("cacheblend", 50)
    half = page.count("recomputed")
    chunks = sum(map(page.count, ("reused", "recomputed"))) - len(page.all(".prefix .token"))
    assert half == chunks // 2
    page.dial("cacheblend", 10)
    assert 0 < page.count("recomputed") < half / 4
    assert page.text("#stitched-title") == "CacheBlend 10 %"
    page.dial("full")
    assert page.count("computed") == len(page.all("#spans .token"))
    assert page.text("#prompt-note") == "Full prefill: everything is computed."
    assert page.text("#verdict") == "Nothing was stitched, so there is nothing to compare."


class Explained(Scripted):
    """A scripted backend whose prompts have no tokens to show."""

    async def explain(self, work: BackendRequest) -> dict[str, Any]:
        empty: dict[str, Any] = {"tokens": [], "spans": [], "answered_from": [], "gate": ""}
        return {**empty, "policy": repr(work.policy), "query_tokens": 0}


def test_answers_come_piece_by_piece_and_can_be_stopped(page: Page) -> None:
    gate = threading.Event()

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        is_full = work.policy == FullRecompute()
        yield Started(0.0)
        yield Piece("one ")
        while is_full and not gate.is_set():
            await asyncio.sleep(0.01)
        yield Piece("two")
        if not is_full:
            await asyncio.Event().wait()
        yield Finished(answer("one two", ttft=0.5, total=1.0))

    backend = Explained(script)
    with running(build_app(backend, settings())) as url, left(page):
        page.open(url)
        page.find("#ask").click()
        page.until(lambda: page.text("#full [data-part=text]") == "one")
        assert page.text("#ask") == "Stop"
        assert re.fullmatch(r"[\d.]+ (ms|s)", page.text("#full-lane b")), "as soon as seen"
        assert page.text("#stitched [data-part=text]") == ""
        gate.set()
        page.until(lambda: page.text("#stitched [data-part=text]") == "one two")
        assert page.text("#full-lane b") == "500 ms"
        full, stitched = (work.policy for work in backend.works)
        assert (full, stitched) == (FullRecompute(), Reuse()), "not at once"
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


# ---------------------------------------------------------------------- files
TEXT = "Kelo is based in Bran.\n\nKelo was opened in 1962."


def test_files_become_documents(page: Page, url: str, tmp_path: Path) -> None:
    plain, marked, more = (tmp_path / name for name in ("facts.txt", "facts.md", "more.txt"))
    plain.write_text(TEXT)
    marked.write_bytes(b"\xef\xbb\xbf# Drenko\r\n\r\nDrenko is based in Lispan.\r\n")
    more.write_text("The Mobrit is made by Drenko.\n\nThe Mobrit costs 412 euros.")
    page.open(url)
    page.give(plain, marked, more)
    assert page.text("#files-note") == (
        "Added facts.txt: 1 document, facts.md: 1 document, more.txt: 1 document."
    )
    assert not page.find("#files-error").is_displayed()
    assert page.sources() == [
        f"Document {number} of {name}, 1/1"
        for number, name in enumerate(("facts.txt", "facts.md", "more.txt"), start=1)
    ], "instead of the sample"
    fields = [field.get_attribute("value") for field in page.all("#documents textarea")]
    assert fields == [TEXT, "# Drenko\n\nDrenko is based in Lispan.", more.read_text()]
    page.ask("How much does the Mobrit cost?")
    assert page.text("#stitched [data-part=text]") == "412"
    page.give(plain)
    assert len(page.all("#documents li")) == 4, "beside one's own"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.docx", b"PK", "a.docx is no .txt or .md file; save its text as one."),
        ("empty.md", b" \n", "empty.md has no text in it."),
        ("latin.txt", b"caf\xe9", "latin.txt is not written in UTF-8; save it as UTF-8 and add it"),
        ("big.txt", b"a " * 3000, "big.txt has 0.0 MiB, and a file may have 0.0 MiB; give a part"),
        ("many.txt", b"one.\n\n" + b"a " * 1300, "many.txt makes 4 documents, and a question may"),
    ],
    ids=["type", "empty", "encoding", "size", "documents"],
)
def test_a_file_that_cannot_be_used_is_told(
    page: Page, reader: LocalBackend, tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    refused, good = tmp_path / name, tmp_path / "good.txt"
    refused.write_bytes(content)
    good.write_text(TEXT)
    limits = RequestLimits(max_documents=3, max_body_bytes=5000, max_document_bytes=5000)
    with running(build_app(reader, settings(limits=limits))) as url, left(page):
        page.open(url)
        page.complaints()  # the sample has more documents than that
        page.give(refused, good)
        assert page.text("#files-error").startswith(told)
        assert page.text("#files-note") == "Added good.txt: 1 document."
        assert page.sources() == ["Document 1 of good.txt, 1/1"]
        assert all("status of 400" in one for one in page.complaints())


# ---------------------------------------------------------------------- for everybody
@pytest.mark.parametrize(
    ("size", "on"), [(WIDE, False), (NARROW, True)], ids=["wide-light", "narrow-dark"]
)
def test_axe_core_finds_no_barrier(page: Page, url: str, size: tuple[int, int], on: bool) -> None:
    def barriers() -> list[str]:
        return browser.barriers(page.driver, {"color-contrast", "label", "region"})

    page.size(size)
    page.dark(on=on)
    page.open(url)
    assert barriers() == [], "before the first question"
    page.dial("cacheblend", 30)
    page.ask()
    page.find("#files").send_keys(str(Path(__file__)))
    page.until(lambda: page.find("#files-error").is_displayed())
    assert barriers() == [], "after an answer and a refused file"
    page.find("#live").click()
    page.dial("legolink", 4)
    assert "stale" in page.find("#stitched").get_attribute("class")
    assert barriers() == [], "where an answer is of before"


def test_a_run_by_the_keyboard_alone(page: Page, url: str) -> None:
    def press(*keys: str) -> None:
        webdriver.ActionChains(page.driver).send_keys(*keys).perform()

    def go_to(selector: str) -> None:
        wanted = page.find(selector)
        for _ in range(60):
            if page.driver.switch_to.active_element == wanted:
                return
            press(Keys.TAB)
        raise AssertionError(f"{selector} is not reached by Tab")

    page.open(url)
    page.script("document.activeElement.blur()")
    go_to("#question")
    press(Keys.ENTER)
    page.until(lambda: page.text("#stitched [data-part=text]") == "Sarn")
    page.settled()
    go_to("#policy")
    press("l")  # the first of that letter
    page.settled()
    assert page.text("#answers-title") == "LegoLink 16 against full prefill"
    go_to("#amount")
    press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.settled()
    assert page.count("recomputed") == 5 * 18
    go_to("#clear")
    press(Keys.SPACE)
    page.script("document.activeElement.blur()")
    go_to("#add")
    press(Keys.ENTER, "Kelo is based in Bran.")
    page.settled()
    assert page.driver.switch_to.active_element.get_attribute("id") == "document-1"
    page.script("document.activeElement.blur()")
    go_to("#question")
    chain = webdriver.ActionChains(page.driver)
    chain.key_down(Keys.CONTROL).send_keys("a").key_up(Keys.CONTROL).perform()
    press("Where is Kelo based?", Keys.TAB, Keys.TAB, Keys.SPACE)
    page.until(lambda: page.text("#stitched [data-part=text]") == "Bran")
    page.settled()
    go_to("#documents .remove")
    press(Keys.ENTER)
    page.settled()
    assert page.driver.switch_to.active_element == page.find("#add"), "focus is not lost"
