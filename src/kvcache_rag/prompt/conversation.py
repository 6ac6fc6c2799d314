"""What a list of messages asks: the same rules for both frameworks, the server and vLLM.

A front end maps its message classes to turns as chat templates read them; this module decides what
happens to turns.  Every prompt over chunks is prefix, chunks, history and question in this order.
Chunks were computed after the engine's own instruction, so any other one cannot come before them;
it goes before the user's last turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Turn: TypeAlias = "dict[str, Any]"
"""A turn as chat templates read it: role, content, and tool calls or the call it answers."""


def said(role: str, content: str) -> Turn:
    """A turn of text."""
    return {"role": role, "content": content}


def joined(turns: Iterable[Turn]) -> list[Turn]:
    """Turns without the empty ones; consecutive turns of one role become one, for chat templates.

    Tool calls and their results stay separate: each result belongs to its call.
    """
    kept: list[Turn] = []
    texts: list[list[str]] = []  # of each, joined once at the end: there may be thousands
    for turn in turns:
        is_plain = turn.keys() == {"role", "content"} and turn["role"] != "tool"
        if is_plain and not turn["content"].strip():
            continue
        last = kept[-1] if kept else {}
        if is_plain and last.get("role") == turn["role"] and "tool_calls" not in last:
            texts[-1].append(turn["content"])
        else:
            kept.append(turn)
            texts.append([turn["content"]])
    return [
        turn if len(parts) == 1 else said(turn["role"], "\n\n".join(parts))
        for turn, parts in zip(kept, texts, strict=True)
    ]


def in_two_roles(turns: Iterable[Turn]) -> list[Turn]:
    """Turns for chat templates that know users and assistants only."""
    return joined(
        turn if turn["role"] == "assistant" else said("user", turn["content"]) for turn in turns
    )


def opened(turns: Sequence[Turn], instruction: str | None) -> list[Turn]:
    """Turns that begin with an instruction, unless a system message is there already."""
    if not instruction or any(turn["role"] == "system" for turn in turns):
        return [*turns]
    return [said("system", instruction), *turns]


def foreign_instructions(turns: Iterable[Turn], *own: str) -> list[str]:
    """System messages other than the engine's own, each once."""
    system = [turn["content"].strip() for turn in turns if turn["role"] == "system"]
    known = {"", *(text.strip() for text in own)}
    return [text for text in dict.fromkeys(system) if text not in known]


def instructed(turns: Sequence[Turn], *own: str) -> tuple[list[Turn], bool]:
    """Turns that can follow chunks, and whether one was a foreign instruction.

    Foreign instructions, each once, are written before the user's last turn.

    Args:
        turns: Turns of any role.
        own: The instruction that the chunks were computed after, in each of its forms.
    """
    foreign = foreign_instructions(turns, *own)
    spoken = joined(turn for turn in turns if turn["role"] != "system")
    if not foreign:
        return spoken, False
    users = [index for index, turn in enumerate(spoken) if turn["role"] == "user"]
    if not users:
        return [said("user", "\n\n".join(foreign)), *spoken], True
    asked = spoken[users[-1]]
    spoken[users[-1]] = said("user", "\n\n".join([*foreign, asked["content"]]))
    return spoken, True


def rendered(render: Callable[..., str], turns: Sequence[Turn], **chat: Any) -> str:
    """A conversation without chunks as one text; in two roles if the template knows no others.

    Args:
        render: `Engine.render_chat`.
        turns: Turns without tool calls, or in the form that the template knows.
        chat: Further arguments of `render`.

    Raises:
        InvalidInputError: If there are no turns, or the tokenizer's chat template cannot write
            them.
    """
    if not turns:
        raise InvalidInputError("there is no message with text; ask something")
    try:
        return render(turns, **chat)
    except InvalidInputError:
        plain = in_two_roles(turns)
        if plain == [*turns] or any(turn["role"] == "tool" or len(turn) > 2 for turn in turns):
            raise
        return render(plain, **chat)
