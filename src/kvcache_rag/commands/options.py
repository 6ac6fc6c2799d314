"""Command lines made of settings, by pydantic-settings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import expanded

if TYPE_CHECKING:
    import argparse

    from pydantic import BaseModel


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

    from kvcache_rag.settings import is_path

    fields = {
        name: field
        for name, field in settings.model_fields.items()
        if (name in names if names else field.default_factory is not dict and name not in but)
    }
    paths = {f"--{name.replace('_', '-')}" for name, field in fields.items() if is_path(field)}
    chosen: Any = {name: (field.annotation, field) for name, field in fields.items()}

    def add(_: object, *flags: str, help: str, **how: Any) -> None:  # argparse's names
        how["default"] = None
        if how.get("metavar", "").startswith("tuple"):
            how["action"] = "append"  # before 2.16 of lists alone
        if "metavar" in how and "{" not in how["metavar"]:  # else a type of Python's
            how["metavar"] = "N" if how["metavar"] in ("int", "float") else "TEXT"
        if not paths.isdisjoint(flags):
            how["type"] = expanded
        parser.add_argument(*flags, help=re.sub(r" \(default: (None)?\)$", "", help), **how)

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


def add_model(parser: argparse._ActionsContainer, **how: Any) -> None:
    """Declare the positional MODEL."""
    from kvcache_rag.settings import EngineSettings

    help_ = EngineSettings.model_fields["model"].description
    parser.add_argument("model", metavar="MODEL", help=help_, **how)
