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
    """One pattern."""

    framework: str
    pattern: str  # as users call it
    keeps: str  # of the chunks of a question that is asked again
    remark: str  # why, or what to do; "" where nothing has to be said
    warning: str  # a part of the one that says so; "" for none
    build: Callable[..., Callable[[], Any]]  # makes the app, and gives what asks it


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


def check(one: App, ask: Callable[[], Any], engine: CountingEngine) -> None:
    """Ask an app twice; it keeps what the list says, answers, and warns as the list says."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = str(ask())
        start = len(engine.costs)
        again = str(ask())
    assert first.strip()
    loaded = sum(cost.reused_tokens for cost in engine.costs[start:])
    computed = sum(cost.prefilled_tokens for cost in engine.costs[start:])
    if one.keeps == EVERY:
        assert loaded > 0 == computed, (loaded, computed)
        assert again == first
    else:
        assert (loaded > 0) == (one.keeps == PART), (loaded, computed)
    told = [str(warning.message) for warning in said if warning.category is UserWarning]
    assert bool(told) == bool(one.warning), told
    if one.warning:
        assert one.warning in told[0]


def listed(framework: str) -> str:
    """The patterns of a framework, for the docs: those that keep every chunk, then the others."""
    rows = [one for one in APPS if one.framework == framework]
    kept = [
        f"- {one.pattern} ({one.remark})" if one.remark else f"- {one.pattern}"
        for one in rows
        if one.keeps == EVERY
    ]
    others = [
        "; ".join(filter(None, (f"- {one.pattern}: **{one.keeps}**", one.remark)))
        for one in rows
        if one.keeps != EVERY
    ]
    lines = [f"{len(kept)} keep every chunk:", "", *kept, "", "The others:", "", *others]
    return "\n".join(lines) + "\n"
