"""`kvcache-rag chat`: a conversation in the terminal over what was ingested.

The chunks stand before the history in every prompt, so their KV is reused in every turn.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag import InvalidInputError, KVCacheRagError
from kvcache_rag.integration import dimmed, plain
from kvcache_rag.progress import without_controls
from llama_index.kvcache_rag.commands.corpus import (
    PACKAGED,
    TINY,
    Chosen,
    add_answering,
    add_place,
    embedding,
    open_store,
)
from llama_index.kvcache_rag.commands.report import (
    cost_line,
    figures,
    is_near,
    plural,
    source,
    source_lines,
    sources,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llama_index.kvcache_rag import KVCacheChatEngine
    from llama_index.kvcache_rag.commands.settings import Settings

HELP = "talk about the ingested files, with a history"
PROMPT: Final = "you> "
_LEAVE: Final = ("/quit", "exit", "quit")
# The one reads made-up facts alone; of eight questions about a company's notes the other had six
# right as they were asked and three as it wrote them anew.
_TOO_SMALL: Final = (TINY, PACKAGED)
_COMMANDS: Final = {
    "/help": "this list",
    "/sources": "the chunks that the last answer came from, and the others that were found",
    "/reset": "forget what was said",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is talked about and how; as for `ask`."""
    add_place(parser)
    add_answering(parser)
    parser.add_argument(
        "--condense",
        action=argparse.BooleanOptionalAction,
        help="let the model write each question anew, with what was said, before chunks are "
        "searched (default: yes, unless the model is smollm2 or tiny, which write worse ones)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends; 1 if a piped question could not be answered."""
    chosen = Chosen.from_arguments(arguments)
    from llama_index.core import VectorStoreIndex

    from llama_index.kvcache_rag import KVCacheChatEngine, KVCacheLLM

    settings = chosen.settings
    llm = KVCacheLLM(
        **settings.of_llm, policy=chosen.policy, max_new_tokens=arguments.max_new_tokens
    )
    chosen.check(llm.engine)  # loaded before anybody is asked to type
    store = open_store(settings, llm)
    condense = arguments.condense
    if condense is None:
        condense = settings.model not in _TOO_SMALL
    engine = KVCacheChatEngine.from_index(
        VectorStoreIndex.from_vector_store(store, embed_model=embedding(settings.embed)),
        llm,
        similarity_top_k=arguments.top_k,
        skip_condense=not condense,
    )
    is_typed = sys.stdin.isatty()
    talk = Talk(engine, settings, is_typed=is_typed)
    if is_typed:
        about = f"{settings.model} over {plural(store.client.count(), 'chunk')}"
        print(dimmed(f"{about}; /help lists commands, Ctrl-D leaves", sys.stdout))
    for line in _typed() if is_typed else _piped():
        if not talk.take(line):
            break
    return 1 if talk.failed and not is_typed else 0


def kept(arguments: argparse.Namespace) -> str:
    """What Ctrl-C leaves."""
    return "what was ingested is as it was, what was said is forgotten"


def _typed() -> Iterator[str]:
    """Lines from the keyboard; Ctrl-C drops one, and ends nothing."""
    with suppress(ImportError):
        import readline  # noqa: F401  # arrows and history, where there is one
    with _handled(_drop):
        while (line := _line()) is not None:
            yield line


def _drop(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _handled(handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _line() -> str | None:
    """The next line; None after Ctrl-D, and "" for one that Ctrl-C dropped."""
    try:
        return input(PROMPT)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _piped() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise InvalidInputError("the standard input is not UTF-8 text; pipe UTF-8") from error


class Talk:
    """One conversation.

    Attributes:
        engine: Answers and remembers.
        settings: Of the collection.
        is_typed: Whether somebody sits there, who may stop an answer.
        failed: Whether a question could not be answered.
    """

    def __init__(self, engine: KVCacheChatEngine, settings: Settings, *, is_typed: bool) -> None:
        """Begin one; nothing was said."""
        self.engine, self.settings, self.is_typed, self.failed = engine, settings, is_typed, False
        self._sources: list[dict[str, Any]] = []

    def take(self, line: str) -> bool:
        """Answer a line, or do what it says; whether to go on."""
        line = line.strip()
        if line.lower() in _LEAVE:
            return False
        if line.startswith("/"):
            self._command(line)
        elif line:
            try:
                self._answer(line)
            except KVCacheRagError as error:
                self.failed = True
                print(f"kvcache-rag: error: {error}", file=sys.stderr)
            except KeyboardInterrupt:  # before the first word
                if not self.is_typed:
                    raise
                self._say("(stopped; this question is forgotten)")
        return True

    def _command(self, line: str) -> None:
        if line == "/reset":
            self.engine.reset()
            self._sources = []
            self._say("what was said is forgotten")
        elif line == "/sources":
            print("\n".join(source_lines(self._sources)) or "nothing was answered yet")
        else:
            if line != "/help":
                print(f"there is no {plain(line)}")
            print("\n".join(f"{name:<10}{text}" for name, text in _COMMANDS.items()))

    def _answer(self, question: str) -> None:
        with _stoppable(self.is_typed) as stop:
            response = self.engine.stream_chat(question)
            for piece in response.response_gen:
                stop.is_speaking = True
                print(without_controls(piece), end="", flush=True)
                if stop.is_wanted:
                    response.close()
        print()
        metrics = (response.metadata or {}).get("kv_cache") or None
        self._sources = sources([*map(source, response.source_nodes)], metrics)
        self._say(self._cost(metrics, stopped=stop.is_wanted))

    def _cost(self, metrics: dict[str, Any] | None, *, stopped: bool) -> str:
        """What an answer cost and where it came from, in a line.

        Args:
            metrics: None of an answer that was stopped.
            stopped: Whether it was.
        """
        parts, found = [], self._sources
        if metrics:
            nearest = max((one["score"] for one in found), default=0.0)
            parts.append(cost_line(figures(metrics, self.settings, nearest)))
        if stopped:
            parts.append("stopped")
        files = dict.fromkeys(plain(one["file"]) for one in found if one["used"])
        parts.append(f"from {', '.join(files)}" if files else "no chunk was found")
        if found and is_near(found, self.settings) is False:
            parts.append("none of them is near")
        return "; ".join(parts)

    @staticmethod
    def _say(text: str) -> None:
        print(dimmed(text, sys.stdout), end="\n\n", flush=True)


class _Stop:
    """What Ctrl-C means while an answer is made.

    Attributes:
        is_speaking: Whether there was a word of it, so that it is remembered as far as it came.
        is_wanted: Whether it shall end.
    """

    is_speaking = is_wanted = False

    def __call__(self, *_: object) -> None:
        if self.is_wanted or not self.is_speaking:
            raise KeyboardInterrupt
        self.is_wanted = True


@contextmanager
def _stoppable(is_typed: bool) -> Iterator[_Stop]:
    stop = _Stop()
    if not is_typed:
        yield stop
        return
    with _handled(stop):
        yield stop
