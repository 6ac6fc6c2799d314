"""The playground in a real browser, over a real server with the packaged reader."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import browser
import pytest
from serve_fakes import DEADLINE, Scripted, answer, running, settings, tiny_backend

from kvcache_rag import (
    BestLast,
    CacheClip,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    MemoryStore,
    Reuse,
)
from kvcache_rag.generation.explain import TokenState
from kvcache_rag.models.names import PACKAGED
from kvcache_rag.policies import POLICY_NAMES, policy_by_name
from kvcache_rag.policies.default import reuse_warning
from kvcache_rag_server.app import build_app
from kvcache_rag_server.backend import Finished, Piece, Started
from kvcache_rag_server.keys import new_key
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator

    from kvcache_rag_server.backend import BackendRequest, Event

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

    def barriers(self) -> list[str]:
        """What axe-core finds fault with."""
        return browser.barriers(self.driver, {"color-contrast", "label", "region"})

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
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_it_opens_with_two_bars_and_a_question(page: Page, url: str, size: tuple[int, int]) -> None:
    page.size(size)
    page.open(url)
    lanes = [page.find(f"#{side}-lane") for side in ("full", "stitched")]
    assert [lane.text for lane in lanes] == ["Full prefill\n\u2013", "Reuse\n\u2013"]
    assert max(lane.rect["y"] + lane.rect["height"] for lane in lanes) < size[1], "at once"
    assert page.find("#question").get_attribute("value")
    page.ask()
    page.ask()
    shown = [lane.find_element(By.CSS_SELECTOR, ".length").rect["width"] for lane in lanes]
    most = lanes[0].find_element(By.CSS_SELECTOR, ".track").rect["width"]
    times = [in_seconds(page.text(f"#{side}-lane b")) for side in ("full", "stitched")]
    for length, time in zip(shown, times, strict=True):
        assert length == pytest.approx(most * time / max(times), rel=0.05, abs=2)


def in_seconds(told: str) -> float:
    """A time as the page writes it."""
    number, unit = told.split()
    return float(number) / {"ms": 1000, "s": 1}[unit]


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


def test_counts_are_those_of_the_server(page: Page, url: str) -> None:
    page.open(url)
    page.dial("legolink", 8)
    assert page.count("recomputed") == 5 * 8, "of every chunk but the first"
    page.ask()
    page.ask()
    cached, computed = page.figures()
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


def test_where_answers_differ_is_said_and_marked(page: Page, url: str) -> None:
    page.open(url)
    Select(page.find("#sample")).select_by_index(2)
    page.settled()
    page.dial("reuse")
    page.ask()
    differ = "full prefill has \u201cTolmi\u201d, the stitched answer \u201cnot found\u201d."
    assert page.text("#agreement") == f"The answers differ: {differ}"
    marks = {side: page.all(f"#{side} mark") for side in ("full", "stitched")}
    assert {side: [one.text for one in found] for side, found in marks.items()} == {
        "full": ["Tolmi"],
        "stitched": ["not found"],
    }
    line = marks["full"][0].value_of_css_property("text-decoration-line")
    assert line == "underline", "not by colour alone"
    page.dial("legolink", 12)
    assert page.text("#agreement") == "Same answer."
    assert not page.all("mark")


def test_an_answer_that_was_cut_says_so(page: Page) -> None:
    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        told = answer("one two", policy=repr(work.policy), hits={"memory": 1}, ttft=1.0)
        reason: Any = "length" if name_of(work) == "full" else "stop"
        yield Finished(replace(told, finish_reason=reason))

    backend = Scripted(script)
    backend.explain = explained  # as if it knew the model
    with running(build_app(backend, settings())) as url, left(page):
        page.open(url)
        page.ask()
        cut = "Cut after 7 tokens; the model had more to say."
        assert page.text("#full [data-part=cut]") == cut
        assert not page.find("#stitched [data-part=cut]").is_displayed()
        assert page.text("#agreement") == "Same answer."


def test_a_heading_is_of_the_policy_that_answered(page: Page) -> None:
    """Whatever the dial says meanwhile, and where another policy answered than was asked."""
    answers = {"LegoLink": FullRecompute()}

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        policy = answers.get(type(work.policy).__name__, work.policy)
        yield Started(0.0)
        yield Finished(answer(policy=repr(policy), hits={"memory": 1}, ttft=1.0))

    backend = Scripted(script)
    backend.explain = explained  # as if it knew the model
    with running(build_app(backend, settings())) as url, left(page):
        page.open(url)
        page.find("#live").click()
        page.ask()
        for _ in range(2):
            assert page.text("#answers-title") == "Reuse against full prefill"
            assert page.text("#stitched-lane .name") == "Reuse"
            assert page.text("#stitched-title").startswith("Reuse")
            page.dial("legolink")
        page.ask()
        assert page.text("#answers-title") == "Full prefill, twice"
        assert page.text("#stitched-title") == page.text("#stitched-lane .name") == "Full prefill"


def test_policies_are_named_as_answers_say_them(page: Page, url: str) -> None:
    page.open(url)
    policies = [policy_by_name(name) for name in POLICY_NAMES if name != "cacheclip"]
    policies += [CacheClip(ratio=0.3), LegoLink(3), BestLast(0.29), Reuse("composite")]
    told = page.driver.execute_async_script(
        "const [said, done] = arguments;"
        "import('/playground/dial.js').then(({named, inWords}) =>"
        " done(said.map((one) => inWords(named(one)))))",
        [repr(policy) for policy in policies],
    )
    assert told[-4:] == ["CacheClip 30 %", "LegoLink 3", "Best last 29 %", "Composite"]
    assert not [one for one in told if "(" in one]


def test_the_best_chunk_is_computed_with_the_question(page: Page, url: str) -> None:
    page.open(url)
    page.dial("bestlast")
    assert page.text("#amount-value") == "20 %"
    page.ask()
    page.ask()
    assert page.text("#prompt-note").startswith("Best last 20 %: ")
    assert page.text("#prompt-note").endswith(" before the question are computed with it.")
    assert page.text("#spans").count("computed with the question") == 1
    assert page.count("computed") == page.figures()[1]
    last = page.all("#spans .chunk")[-1]
    assert {
        one.get_attribute("class") for one in last.find_elements(By.CSS_SELECTOR, ".token")
    } == {"token computed"}


def test_documents_that_are_not_used_are_shown_as_such(page: Page, url: str) -> None:
    page.open(url)
    page.dial("bestfew")
    page.ask()
    page.ask()
    assert page.text("#stitched [data-part=text]") == "Sarn"
    found = re.match(r"Best few from documents? ([\d, ]+) of 6: ", page.text("#prompt-note"))
    assert found
    used = found[1].split(", ")
    assert "4" in used, "which says where Lispan lies"
    assert [label.endswith(", not used") for label in page.sources()] == [
        str(number) not in used for number in range(1, 7)
    ]
    heads = [head.text.split(" \u00b7 ")[0] for head in page.all("#spans .chunk .span-head")]
    assert heads == [f"Document {number}" for number in used]
    unused = page.text("#spans .unused").rpartition(" \u00b7 ")[2]
    assert re.findall(r"\d", unused) == [one for one in "123456" if one not in used]
    assert page.text("#warmth") == "Warm: the first document came from the cache."
    assert page.text("#stitched dl").splitlines()[-1].startswith("document")
    assert page.text("#full dl").splitlines()[-1] == "all documents"
    page.dial("reuse")
    assert not [label for label in page.sources() if "not used" in label]
    assert not page.all("#spans .unused")


def test_the_dial_starts_at_the_servers_policy(page: Page) -> None:
    with (
        tiny_backend() as backend,
        running(build_app(backend, settings(policy="bestlast:0.4"))) as url,
        left(page),
    ):
        page.open(url)
        assert page.text("#amount-value") == "40 %"
        assert page.find("#policy").get_attribute("value") == "bestlast"


def test_reuse_is_what_a_trained_model_starts_at_without_a_warning(page: Page, url: str) -> None:
    page.open(url)
    assert page.find("#policy").get_attribute("value") == "reuse"
    assert not page.find("#warning").is_displayed()


def test_the_dial_starts_at_what_was_measured(page: Page, url: str) -> None:
    page.open(url)
    for policy, shown in (("legolink", "16"), ("cacheblend", "20 %"), ("reuse", "")):
        page.dial(policy)
        assert page.text("#amount-value") == shown


@pytest.mark.parametrize("auxiliary", [None, "small"])
def test_cacheclip_wants_an_auxiliary_model(page: Page, auxiliary: str | None) -> None:
    backend = Scripted()
    backend.explain = explained  # as if it knew the model
    with running(build_app(backend, settings(auxiliary=auxiliary))) as url, left(page):
        page.open(url)
        option = page.find("#policy [value=cacheclip]")
        assert option.is_enabled() == bool(auxiliary)
        says = "tokens that matter" if auxiliary else "start with --auxiliary MODEL"
        assert option.text == f"CacheClip \u2013 {says}"


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


@pytest.fixture(scope="module")
def smollm2_url() -> Iterator[str]:
    """A server of SmolLM2 without an adapter, whose package may be absent."""
    try:
        importlib.metadata.version(PACKAGED["smollm2"].package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(PACKAGED["smollm2"].install)
    # In float32 its answers do not hang on how a CPU adds up bfloat16, which some do very slowly.
    options: Any = {"adapter": "none", "device": "cpu", "dtype": "float32"}
    engine = Engine.from_pretrained("smollm2", store=MemoryStore(), **options)
    backend = LocalBackend(engine, name="smollm2")
    with running(build_app(backend, settings(model="smollm2"))) as url:
        yield url
    asyncio.run(backend.close())


def test_where_the_dial_starts_smollm2_answers(page: Page, smollm2_url: str) -> None:
    page.open(smollm2_url)
    warned, right = reuse_warning(Reuse(), trained=False), "180 kilograms"
    assert page.find("#policy").get_attribute("value") == "bestfew"
    assert page.text("#warning") == ""
    Select(page.find("#sample")).select_by_index(3)  # which shows what reuse alone loses
    page.settled()
    assert page.text("#warning") == warned
    assert page.find("#policy").get_attribute("value") == "reuse"
    page.ask()
    assert right in page.text("#full [data-part=text]")
    assert right not in page.text("#stitched [data-part=text]")
    for policy in ("bestfew", "bestlast", "prophetkv"):
        page.dial(policy)
        assert right in page.text("#stitched [data-part=text]"), policy
        assert page.text("#warning") == ""
    page.find("#live").click()
    page.dial("reuse")
    assert re.search(r"^Reuse: 0 of 1,\d{3} tokens", page.text("#prompt-note"))
    assert page.text("#warning") == warned
    assert page.barriers() == []


def test_the_dial_may_only_show(page: Page, url: str) -> None:
    page.open(url)
    page.find("#live").click()
    page.ask()
    page.dial("legolink", 30)
    assert page.count("recomputed") == 5 * 30
    assert page.text("#stitched-title") == "Reuse"
    assert "stale" in page.find("#stitched").get_attribute("class")


def name_of(work: BackendRequest) -> str:
    """How the page writes the policy of a request."""
    return "full" if work.policy == FullRecompute() else "reuse"


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
            "answered_from": [],
        }

    backend.explain = explain  # type: ignore[method-assign]  # nothing to explain
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
        assert [name_of(work) for work in backend.works] == ["full", "reuse"], "not at once"
        page.find("#ask").click()
        page.settled()
        assert backend.was_taken_back.wait(DEADLINE)
        assert (page.text("#ask"), page.text("#verdict")) == ("Ask", "Stopped.")
        assert not page.find("#error").is_displayed()


def test_enter_asks_what_is_new_and_stops_what_is_not(page: Page) -> None:
    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        yield Started(0.0)
        if work.question == "One?":
            await asyncio.Event().wait()
        yield Piece(work.question)
        yield Finished(answer(work.question))

    backend = Scripted(script)
    backend.explain = explained  # as if it knew the model
    with running(build_app(backend, settings())) as url, left(page):
        page.open(url)
        question = page.find("#question")

        def has_begun(number: int) -> None:
            page.until(lambda: len(backend.works) == number)

        for number in (1, 2):
            page.fill("#question", "One?")
            question.send_keys(Keys.ENTER)
            has_begun(number)
            question.send_keys(Keys.ENTER)
            page.settled()
            assert (page.text("#ask"), page.text("#verdict")) == ("Ask", "Stopped.")
        page.find("#ask").click()
        has_begun(3)
        page.fill("#question", "Two?")
        question.send_keys(Keys.ENTER)
        page.settled()
        assert page.text("#full [data-part=text]") == "Two?"
        assert page.text("#stitched [data-part=text]") == "Two?"
        assert page.text("#ask") == "Ask"
        page.fill("#question", "One?")
        question.send_keys(Keys.ENTER)
        has_begun(6)
        page.fill("#question", "Two?")
        page.find("#ask").click()
        page.settled()
        assert page.text("#verdict") == "Stopped.", "as the button says"


def chosen(page: Page) -> str:
    """The sample that its field names."""
    return str(Select(page.find("#sample")).first_selected_option.text)


def test_a_sample_can_be_had_back(page: Page, url: str, tmp_path: Path) -> None:
    file = tmp_path / "facts.txt"
    file.write_text("Kelo is based in Bran.")
    page.open(url)
    edits = (
        lambda: page.find("#clear").click(),
        lambda: page.give(file),
        lambda: page.find("#documents .remove").click(),
        lambda: page.fill("#document-1", "Kelo is based in Bran."),
        lambda: page.fill("#question", "Where is Kelo based?"),
    )
    for edit in edits:
        edit()
        page.settled()
        assert chosen(page) == "Your own"
        Select(page.find("#sample")).select_by_index(0)
        page.settled()
        assert chosen(page) == "A fact in one document"
        assert len(page.all("#documents li")) == 6
        assert page.find("#question").get_attribute("value") == "On which river does Lispan lie?"
        assert not page.find("#files-note").is_displayed()


def test_without_documents_nothing_else_is_claimed(page: Page, url: str, tmp_path: Path) -> None:
    file = tmp_path / "facts.txt"
    file.write_text("Kelo is based in Bran.")
    page.open(url)
    page.give(file)
    page.ask()
    page.find("#clear").click()
    page.settled()
    none = "There are no documents, so nothing is stitched."
    assert page.text("#prompt-note") == none
    assert not page.find("#files-note").is_displayed()
    page.ask()
    assert page.text("#prompt-note") == none
    assert page.text("#verdict") == "Nothing was stitched, so there is nothing to compare."
    assert page.text("#warmth") == ""
    assert page.figures()[0] == page.count("reused") == 0


# ---------------------------------------------------------------------- what goes wrong
def test_a_blank_question_leaves_nothing_said_of_the_one_before(page: Page, url: str) -> None:
    page.open(url)
    page.ask()
    assert page.text("#warmth") != ""
    page.ask("  ")
    assert page.text("#error") == "The question is empty; ask something."
    assert (page.text("#verdict"), page.text("#warmth")) == ("There is no answer.", "")
    assert page.all(".answer.stale") == page.all(".answer")


def test_an_error_of_a_position_leaves_nothing_said_of_the_one_before(page: Page) -> None:
    backend = Scripted()

    async def explain(work: BackendRequest) -> dict[str, Any]:
        if work.policy == LegoLink(16):
            raise InvalidInputError("there is no such position")
        return await explained(work)

    backend.explain = explain  # as if it knew the model
    with running(build_app(backend, settings())) as url, left(page):
        page.open(url)
        page.ask()
        page.dial("legolink")
        assert page.text("#error") == "there is no such position"
        assert (page.text("#verdict"), page.text("#warmth")) == ("There is no answer.", "")
        assert "stale" in page.find("#stitched").get_attribute("class")
        assert all("status of 400" in one for one in page.complaints())


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


# ---------------------------------------------------------------------- what was measured
def test_only_warm_answers_are_costs_of_their_policy(page: Page) -> None:
    costs = iter([(8.0, 4.0), (6.0, 1.0), (6.0, 1.5), (9.0, 8.5)])
    times: list[float] = []

    async def script(work: BackendRequest) -> AsyncGenerator[Event, None]:
        if name_of(work) == "full":
            times[:] = next(costs)
        found: dict[str, Any] = {"hits": {"memory": 1}}
        if times == [4.0]:  # cold
            found = {"misses": 1}
        if not work.chunks or name_of(work) == "full":
            found = {}
        yield Started(0.0)
        yield Finished(answer(policy=repr(work.policy), ttft=times.pop(0), total=10.0, **found))

    backend = Scripted(script)
    backend.explain = explained  # as if it knew the model
    with running(build_app(backend, settings())) as url, left(page):
        page.open(url)
        page.ask()
        assert page.text("#verdict") == "The stitched answer began 2.0\u00d7 sooner."
        rows = [row.text for row in page.all("#costs tr")]
        assert rows == ["Reuse 0 \u2013 \u2013", "Full prefill 3 8.00 s (1) \u2013"]
        for _ in range(2):
            page.ask()
        assert page.text("#cost") == (
            "Computes 0 of 3 tokens before the question again; first token after 1.25 s on this "
            "machine (median of 2 answers)."
        ), "the cold one is no cost of the policy"
        rows = [row.text for row in page.all("#costs tr")]
        assert rows == ["Reuse 0 1.25 s (2) 4.8\u00d7", "Full prefill 3 6.00 s (3) \u2013"]
        page.documents("Another document.")
        page.ask()
        assert page.text("#verdict") == "Both answers began about as soon."
        assert next(row.text for row in page.all("#costs tr")) == "Reuse 0 8.50 s (1) 1.1\u00d7"


async def explained(work: BackendRequest) -> dict[str, Any]:
    """A prompt of four tokens."""
    state = "computed" if name_of(work) == "full" else "reused"
    tokens = [
        {"id": at, "text": "a", "position": at, "state": state if at < 3 else "computed"}
        for at in range(4)
    ]
    spans = [
        {"kind": "prefix", "start": 0, "stop": 1, "tier": ""},
        {"kind": "chunk", "start": 1, "stop": 3, "tier": "memory"},
        {"kind": "query", "start": 3, "stop": 4, "tier": ""},
    ]
    counts = {"query_tokens": 1, "recomputed_tokens": 0, "fresh_tokens": 0}
    counts |= {"unused_chunks": 0}
    return {
        "tokens": tokens,
        "spans": spans,
        "policy": repr(work.policy),
        "gate": "",
        **counts,
        "answered_from": [*range(len(work.chunks))],
    }


def test_each_position_of_the_dial_says_what_it_costs(page: Page, url: str) -> None:
    page.open(url)
    page.ask()
    page.ask()
    page.find("#live").click()
    page.dial("legolink", 4)
    before = sum(map(page.count, ("reused", "recomputed")))
    assert page.text("#cost") == (
        f"Computes 20 of {before} tokens before the question again; its time to the first token "
        "was not measured yet."
    )
    page.ask()
    assert re.search(
        r"first token after [\d.]+ (ms|s) on this machine \(median of 1 answer\)",
        page.text("#cost"),
    )
    rows = [row.text.rpartition("(")[0].split()[:-2] for row in page.all("#costs tr")]
    assert rows == [["Reuse", "0"], ["LegoLink", "4", "20"], ["Full", "prefill", str(before)]]
    assert page.text("#costs [aria-current]").startswith("LegoLink 4")
    assert page.text("#answers-title") == "LegoLink 4 against full prefill"
    page.find("#clear").click()
    page.settled()
    assert [row.text.split()[0] for row in page.all("#costs tr")] == ["Reuse", "Full"]
    assert "\u2013" in page.text("#costs"), "other documents were not measured"


def test_a_real_model_is_asked_about_a_handbook(page: Page) -> None:
    backend = Scripted()
    backend.explain = explained  # as if it knew the model
    app = build_app(backend, settings(model="smollm2", served_name="tiny"))
    with running(app) as url, left(page):
        page.open(url)
        assert len(page.all("#documents li")) == 8
        assert not page.find("#reader-note").is_displayed()
        assert "herring" in page.find("#question").get_attribute("value")
        Select(page.find("#sample")).select_by_index(2)
        page.settled()
        assert len(page.all("#documents li")) == 4


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
    assert fields[0] == TEXT
    assert fields[1] == "# Drenko\n\nDrenko is based in Lispan."
    assert fields[2] == "The Mobrit is made by Drenko.\n\nThe Mobrit costs 412 euros."
    page.ask("How much does the Mobrit cost?")
    assert page.text("#full [data-part=text]") == "412"
    assert page.text("#stitched [data-part=text]") == "412"
    page.give(plain)
    assert len(page.all("#documents li")) == 4, "beside one's own"


def test_files_are_dropped_anywhere(page: Page, url: str) -> None:
    page.open(url)
    drop = (
        "const files = new DataTransfer(); files.items.add(new File([arguments[0]], 'a.txt'));"
        "for (const type of ['dragover', 'drop']) document.querySelector('h1').dispatchEvent("
        "new DragEvent(type, {dataTransfer: files, bubbles: true, cancelable: true}));"
    )
    page.script(drop, TEXT)
    page.until(lambda: page.text("#files-note") == "Added a.txt: 1 document.")
    page.settled()
    assert page.sources() == ["Document 1 of a.txt, 1/1"]
    assert page.driver.current_url.startswith(url)


def test_a_long_file_is_cut_at_paragraphs_sentences_and_words(
    page: Page, url: str, tmp_path: Path
) -> None:
    sentence = "The harbour is closed in winter because of the ice. "
    file = tmp_path / "long.txt"
    file.write_text(f"First.\n\nSecond.\n\n{sentence * 30}\n\n{'word ' * 300}\n\n{'x' * 1300}")
    page.open(url)
    page.give(file)
    parts = [field.get_attribute("value") for field in page.all("#documents textarea")]
    assert [len(part) <= 1200 for part in parts] == [True] * len(parts)
    assert parts[0] == "First.\n\nSecond."
    assert parts[1].endswith("of the ice.")
    assert "".join(" ".join(parts).split()) == "".join(file.read_text().split()), "nothing is lost"
    assert page.sources()[0] == f"Document 1 of long.txt, 1/{len(parts)}"
    page.complaints()  # so much does not fit the reader's window, as the server says


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


def test_more_than_a_model_reads_is_not_added(page: Page, url: str, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("word " * 10000)
    page.open(url)
    before = page.sources()
    page.give(file)
    assert "letters of documents, more than the 4,096 tokens that tiny reads" in page.text(
        "#files-error"
    )
    assert page.sources() == before, "the sample is still there"


# ---------------------------------------------------------------------- for everybody
def test_the_legend_explains_every_state(page: Page, url: str) -> None:
    page.open(url)
    entries = page.all("#legend li")
    assert {entry.text.split()[0] for entry in entries} == set(get_args(TokenState))
    assert all(len(entry.find_element(By.CSS_SELECTOR, ".quiet").text) > 20 for entry in entries)
    looks = page.script(
        "return [...document.querySelectorAll('#legend .token')].map((one) => {"
        "const style = getComputedStyle(one);"
        "return `${style.borderBottomStyle} ${style.borderBottomWidth} ${style.textDecorationLine}`"
        "})"
    )
    assert len(set(looks)) == len(looks), "told by more than colour"


@pytest.mark.parametrize(
    ("size", "on"), [(WIDE, False), (NARROW, True)], ids=["wide-light", "narrow-dark"]
)
def test_axe_core_finds_no_barrier(page: Page, url: str, size: tuple[int, int], on: bool) -> None:
    page.size(size)
    page.dark(on=on)
    page.open(url)
    assert page.barriers() == [], "before the first question"
    page.dial("cacheblend", 30)
    page.ask()
    page.find("#files").send_keys(str(Path(__file__)))
    page.until(lambda: page.find("#files-error").is_displayed())
    assert page.barriers() == [], "after an answer and a refused file"
    page.find("#live").click()
    page.dial("legolink", 4)
    assert "stale" in page.find("#stitched").get_attribute("class")
    assert page.barriers() == [], "where an answer is of before"


FOCUSABLE = (
    "return [...document.querySelectorAll('a[href], button, input, select, textarea, [tabindex]')]"
    ".filter((one) => !one.disabled && one.getClientRects().length)"
)
FOCUSED = (
    "const one = document.activeElement; const label = one.closest('label') ?? one;"
    "const outlined = (some) => getComputedStyle(some).outlineStyle !== 'none'"
    " && parseFloat(getComputedStyle(some).outlineWidth) >= 2;"
    "return [one, outlined(one) || outlined(label)]"
)


def test_everything_is_reached_by_tab_and_shows_its_focus(page: Page, url: str) -> None:
    page.open(url)
    page.dial("legolink", 8)  # whose slider is not disabled
    wanted = page.script(FOCUSABLE)
    page.find("h1").click()  # where Tab begins
    reached = []
    for _ in wanted:
        webdriver.ActionChains(page.driver).send_keys(Keys.TAB).perform()
        one, is_seen = page.script(FOCUSED)
        assert is_seen, one.get_attribute("outerHTML")
        reached.append(one)
    assert reached == wanted, "in the order of the page"


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
    page.dial("legolink")
    page.ask()
    token = page.all("#spans .token.recomputed")[0]
    webdriver.ActionChains(page.driver).move_to_element(token).perform()
    place = int(token.get_attribute("data-at"))
    page.until(lambda: f"recomputed, position {place}, Document 2" in page.text("#readout"))


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
