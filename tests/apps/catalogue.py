"""What ordinary apps keep of their caches: each a short function, with what is to be seen.

An app is built as its framework's documentation builds it, and asked twice.  What it keeps is told
by the engine, which counts what its prompts cost.  `docs/apps.md` is written of this list by
`python tools/apps_page.py`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from scripted import NATIVE, RESPONSE, scripted

from kvcache_rag import Engine, PromptTemplate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_rag import Answer, Metrics

EVERY: Final = "every chunk"
PART: Final = "the chunks that are the same again"
NONE: Final = "nothing"

QUESTION: Final = "Where does the keeper of the lighthouse live?"
TEXTS: Final = (
    "The keeper of the lighthouse is called Marlow. He lives in the tower by the sea.",
    "The lamp of the lighthouse burns oil at night. It can be seen from thirty miles.",
    "The village has a harbour and a school. Its boats go out before the sun is up.",
    "The school was built of stones of the old church. It has one room and a bell.",
)


@dataclass(frozen=True)
class App:
    """One pattern.

    Attributes:
        framework: Whose it is.
        pattern: What users call it.
        keeps: Of the chunks of a question that is asked again.
        remark: Why, or what to do; "" where nothing has to be said.
        warning: Pattern of the warning that says so; "" for none.
        build: Makes the app, and gives what asks it.
    """

    framework: str
    pattern: str
    keeps: str
    remark: str
    warning: str
    build: Callable[..., Callable[[], Any]]


APPS: Final[list[App]] = []


def app(
    framework: str, pattern: str, keeps: str = EVERY, remark: str = "", warning: str = ""
) -> Callable[[Callable[..., Callable[[], Any]]], Callable[..., Callable[[], Any]]]:
    """Put an app on the list."""

    def enlist(build: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
        APPS.append(App(framework, pattern, keeps, remark, warning, build))
        return build

    return enlist


class CountingEngine(Engine):
    """An engine that remembers what each answer cost."""

    costs: list[Metrics]

    def _answer(self, *asked: Any) -> Callable[..., list[Answer]]:
        answer = super()._answer(*asked)

        def counted(*given: Any) -> list[Answer]:
            answers = answer(*given)
            self.costs += [one.metrics for one in answers]
            return answers

        return counted


def scripted_engine(costs: list[Metrics], *answers: str) -> CountingEngine:
    """An engine whose model says `answers` in turn, over and over; it counts into `costs`."""
    left = cycle(answers)

    def script(prompt: str) -> str:
        return next(left) if prompt.endswith("<assistant>") else ""  # a chunk

    template = PromptTemplate(system="Read.\n")
    model = scripted(script, NATIVE, RESPONSE)
    engine = CountingEngine(*model, template=template, prompt_memory=0)
    engine.costs = costs
    return engine


@dataclass(frozen=True)
class Cost:
    """What a question cost, over all prompts that it took.

    Attributes:
        reused: Chunk tokens that were loaded.
        prefilled: Chunk tokens that were computed.
    """

    reused: int
    prefilled: int

    @classmethod
    def since(cls, engine: CountingEngine, start: int) -> Cost:
        """Of the answers of an engine from number `start` on."""
        new = engine.costs[start:]
        prefilled = sum(one.prefilled_tokens for one in new)
        return cls(sum(one.reused_tokens for one in new), prefilled)

    def shows(self, keeps: str) -> bool:
        """Whether it is the cost of an app that keeps so much."""
        if keeps == EVERY:
            return self.reused > 0 == self.prefilled
        return self.reused > 0 if keeps == PART else self.reused == 0


def check(one: App, ask: Callable[[], Any], engine: CountingEngine) -> None:
    """Ask an app twice; it keeps what the list says, answers, and warns as the list says."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = str(ask())
        start = len(engine.costs)
        again = str(ask())
    cost = Cost.since(engine, start)
    assert cost.shows(one.keeps), cost
    assert first.strip()
    if one.keeps == EVERY:
        assert again == first
    told = [str(warning.message) for warning in said if warning.category is UserWarning]
    assert bool(told) == bool(one.warning), told
    if one.warning:
        assert one.warning in told[0]


def listed(framework: str) -> str:
    """The patterns of a framework, for the docs: those that keep every chunk, then the others."""
    rows = [one for one in APPS if one.framework == framework]
    kept = [
        f"- {one.pattern}{f' ({one.remark})' if one.remark else ''}"
        for one in rows
        if one.keeps == EVERY
    ]
    others = [
        f"- {one.pattern}: **{one.keeps}**{f'; {one.remark}' if one.remark else ''}"
        for one in rows
        if one.keeps != EVERY
    ]
    lines = [f"{len(kept)} keep every chunk:", "", *kept, "", "The others:", "", *others]
    return "\n".join(lines) + "\n"
