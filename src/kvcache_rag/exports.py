"""Public names of a package, each written once and imported on first use.

    if TYPE_CHECKING:
        from kvcache_rag.engine import Engine as Engine
    else:
        __getattr__, __dir__ = lazy_names(__name__)

Type checkers and editors read these imports; so does the package, instead of a second list.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(
    package: str,
    moved: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, by its imports under `TYPE_CHECKING`.

    `__all__` is one of the names that `__getattr__` knows: all of them, sorted.  What they import
    as another name, or without `as`, is not public.

    Args:
        package: Its name.
        moved: Names that were there before, by the module below it that has them now; who asks for
            one is told.
        elsewhere: Names that other packages have now, by their module; they are still given, with
            a warning the first time.
    """

    def get(name: str) -> Any:
        modules = _modules(package)
        if name == "__all__":
            return sorted(modules)
        if name not in modules:
            if home := _home(name, elsewhere):
                return _of_another(package, home, name)
            if home := _home(name, moved):
                # Of an AttributeError `from ... import` would keep the name alone.
                raise ImportError(
                    f"{name} has moved: write `from {package}.{home} import {name}`", name=package
                )
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    def names() -> list[str]:
        return [*sorted(_modules(package)), *({"__version__"} & vars(sys.modules[package]).keys())]

    return get, names


def _home(name: str, homes: Mapping[str, str] | None) -> str:
    return next((home for home, names in (homes or {}).items() if name in names.split()), "")


def _of_another(package: str, home: str, name: str) -> Any:
    said = f"write `from {home} import {name}`"
    try:
        found = getattr(import_module(home), name)
    except ImportError as error:
        dist = home.partition(".")[0].replace("_", "-")
        raise ImportError(f"{name} is in {dist} now: install that, and {said}") from error
    warnings.warn(f"{package}.{name} goes in 0.5: {said}", DeprecationWarning, stacklevel=3)
    vars(sys.modules[package])[name] = found  # `from ... import` asks twice
    return found


@cache
def _modules(package: str) -> dict[str, str]:
    """The module of each public name."""
    import ast  # slower than all that importing the package does
    from pkgutil import get_data

    tree = ast.parse(get_data(package, "__init__.py") or b"")
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: node.module or ""
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }
