"""What a model writes around its thoughts and tool calls, according to transformers.

A response template (`tokenizer.response_template`) says how an answer is taken apart; transformers'
`ResponseParser` does it while the answer is written.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_PARSERS: Final = "transformers.utils.chat_parsing"


class StreamParser(Protocol):
    """What of transformers' `ResponseParser` is used."""

    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


def own_template(tokenizer: Any) -> Mapping[str, Any] | None:
    """The response template that a tokenizer brings; None if there is none, or nothing reads it."""
    template: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
    # transformers 5.3, the oldest that is allowed, has no parser yet.
    return template if template is not None and find_spec(_PARSERS) is not None else None


def known_template(tokenizer: Any, model: Any) -> Mapping[str, Any] | None:
    """The one that transformers' own server takes for this type of model, or None.

    A checkpoint of that type may have a chat template of its own, so whoever takes it looks first
    whether it reads what the chat template writes.
    """
    with suppress(ImportError, AttributeError):  # private to transformers, and newer than 5.3
        from transformers.cli.serving.utils import get_response_template

        template: Mapping[str, Any] | None = get_response_template(tokenizer, model)
        return template
    return None


def stream_parser(
    template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]]
) -> StreamParser:
    """A parser of one answer.

    Args:
        template: Of the model's answers.
        prompt: Text before the answer, whose end may have begun it (`<think>`).
        tools: By whose schemas the arguments of calls are read.
    """
    from transformers.utils.chat_parsing import ResponseParser

    parser: StreamParser = ResponseParser(dict(template), prompt, tools=[*map(dict, tools)])
    return parser
