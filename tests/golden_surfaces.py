"""What `tests/golden` freezes of the surfaces: commands, policies, public names."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import io
import re
import sys
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from kvcache_rag.cli import main as command_line
from kvcache_rag.codecs import CODECS
from kvcache_rag.policies import POLICY_NAMES, ReusePolicy, policy_by_name
from tests.golden_cases import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

SOURCES: Final = {
    "kvcache-rag": "src/kvcache_rag",
    "kvcache-rag-cpu": "integrations/kvcache-rag-cpu/kvcache_rag_cpu",
    "kvcache-rag-documents": "integrations/kvcache-rag-documents/kvcache_rag_documents",
    "kvcache-rag-lab": "lab/kvcache_rag_lab",
    "kvcache-rag-llamacpp": "integrations/kvcache-rag-llamacpp/kvcache_rag_llamacpp",
    "kvcache-rag-server": "integrations/kvcache-rag-server/kvcache_rag_server",
    "kvcache-rag-smollm2": "integrations/kvcache-rag-smollm2/kvcache_rag_smollm2",
    "langchain-kvcache-rag": "integrations/langchain-kvcache-rag/langchain_kvcache_rag",
    "llama-index-kvcache-rag": "integrations/llama-index-kvcache-rag/llama_index",
    "vllm-kvcache-rag": "integrations/vllm-kvcache-rag/vllm_kvcache_rag",
}
PROJECTS: Final = {
    name: (ROOT / place).parent / "pyproject.toml"
    if place[:3] != "src"
    else ROOT / "pyproject.toml"
    for name, place in SOURCES.items()
}
_OURS: Final = (
    *("kvcache_rag", "kvcache_rag_cpu", "kvcache_rag_documents"),
    *("kvcache_rag_lab", "kvcache_rag_server"),
    *("langchain_kvcache_rag", "llama_index.kvcache_rag"),
)


# ---------------------------------------------------------------------- commands
def help_pages() -> dict[str, str]:
    """What `--help` prints, by command line, 100 columns wide."""
    pages = {"kvcache-rag": _help([])}
    for name in sorted(point.name for point in entry_points(group="kvcache_rag.commands")):
        pages[f"kvcache-rag {name}"] = _help([name])
        for action in _actions(name):
            pages[f"kvcache-rag {name} {action}"] = _help([name, action])
    return pages


def _help(words: list[str]) -> str:
    printed = io.StringIO()
    plain = {"COLUMNS": "100", "NO_COLOR": "1"}
    with (
        mock.patch.dict("os.environ", plain),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        command_line([*words, "--help"])
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def _actions(name: str) -> list[str]:
    point = next(iter(entry_points(group="kvcache_rag.commands", name=name)))
    parser = argparse.ArgumentParser()
    point.load().add_arguments(parser)
    groups = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return [action for group in groups for action in group.choices]


def to_pages(text: str) -> dict[str, str]:
    """The pages of `help.txt`."""
    parts = re.split(r"(?m)^\$ (.+) --help\n", text)
    return {name: page.rstrip("\n") for name, page in zip(parts[1::2], parts[2::2], strict=True)}


def from_pages(pages: Mapping[str, str]) -> str:
    """`help.txt` of pages."""
    return "".join(f"$ {name} --help\n{page}\n" for name, page in pages.items())


def options_of(page: str) -> list[str]:
    """Options that a page names, which every version of argparse writes alike."""
    return sorted(set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", page)))


def projects() -> dict[str, Any]:
    """Names of entry points, requirements and extras, out of each `pyproject.toml`."""
    return {name: dict(_declared(path)) for name, path in PROJECTS.items()}


def _declared(path: Path) -> Iterator[tuple[str, Any]]:
    project = _toml(path)["project"]
    yield "name", project["name"]
    yield "python", project["requires-python"]
    yield "requires", sorted(project["dependencies"])
    extras = project.get("optional-dependencies", {})
    yield "extras", {name: sorted(asked) for name, asked in extras.items()}
    yield "entry_points", {group: sorted(points) for group, points in _points(project).items()}


def _points(project: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}


def entry_point_targets() -> Iterator[tuple[str, str, Any]]:
    """Group, name and object of every entry point that a `pyproject.toml` declares.

    Not of llama.cpp's dist, which no environment has but that of `make test-llamacpp`.
    """
    for dist, path in PROJECTS.items():
        if dist == "kvcache-rag-llamacpp":
            continue
        for group, points in _points(_toml(path)["project"]).items():
            for name, target in points.items():
                if group != "kvcache_rag.adapters":  # which leads to a folder
                    yield group, name, EntryPoint(name, target, group).load()


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- settings outside of Python
def configuration() -> dict[str, Any]:
    """Variables of the environment, and what vLLM's `kv_connector_extra_config` takes."""
    from vllm_kvcache_rag.settings import ConnectorSettings

    files = (path for folder in SOURCES.values() for path in (ROOT / folder).rglob("*.py"))
    named = (re.findall(r'"(KVCACHE_RAG_[A-Z_]+)"', path.read_text("utf-8")) for path in files)
    return {
        "environment": sorted({name for names in named for name in names}),
        "kv_connector_extra_config": {
            name: {key: one for key, one in shape.items() if key != "description"}
            for name, shape in ConnectorSettings.model_json_schema()["properties"].items()
        },
    }


# ---------------------------------------------------------------------- policies and codecs
POLICIES: Final = (
    *("Ape()", "Ape(temperature=0.7, scale=1.1)", "BestFew()", "BestFew(count=2)", "BestLast()"),
    *("BestLast(share=0.4, positions='composite')", "BestRead()", "BestRead(count=2)"),
    *("CacheBlend()", "CacheBlend(ratio=0.3, check_layer=2, positions='composite')"),
    *("CacheClip()", "CacheClip(ratio=0.4, window=4, threshold=None)", "Combination()"),
    *("FullRecompute()", "LegoLink()", "LegoLink(tokens=4, positions='composite')", "ProphetKV()"),
    *("ProphetKV(ratio=0.3, positions='composite')", "Reuse()", "Reuse(positions='composite')"),
)
"""As a user writes them."""
NAMED: Final = (
    *("full", "reuse", "composite", "bestfew", "bestfew:2", "bestlast", "bestlast:0.4"),
    *("prophetkv", "prophetkv:0.3", "legolink", "legolink:8", "cacheblend", "cacheblend:0.3"),
    *("cacheclip", "cacheclip:0.3", "cacheclip:0.3,mean", "cacheclip:0.3,4"),
    *("ape", "ape:0.8,0.7", "combination"),
)


CORE: Final = (
    "kvcache_rag",
    *("kvcache_rag.auxiliary", "kvcache_rag.codecs", "kvcache_rag.errors"),
    *("kvcache_rag.generation", "kvcache_rag.kv", "kvcache_rag.models", "kvcache_rag.policies"),
    *("kvcache_rag.prompt", "kvcache_rag.stores", "kvcache_rag.verdict"),
)
# Read by name: type checkers see the imports that it is made of, not the list.
PUBLIC: Final = {
    name: getattr(module, name) for module in map(import_module, CORE) for name in module.__all__
}


def written(code: str) -> Any:
    """The object that a line of Python names, with the public names."""
    return eval(code, {**PUBLIC})


def representations() -> dict[str, Any]:
    """`repr` of policies and codecs, and the names by which they are known."""
    named = {text: policy_by_name(text) for text in NAMED}
    return {
        "policies": {code: _policy(written(code)) for code in POLICIES},
        "named": {text: _policy(policy) for text, policy in named.items()},
        "policy_names": list(POLICY_NAMES),
        "codecs": {
            name: {"repr": repr(kind()), "name": kind.name, "raw_keys": kind.raw_keys}
            for name, kind in CODECS.items()
        },
    }


def _policy(policy: ReusePolicy) -> dict[str, Any]:
    facts = ("name", "positions", "joint", "adjacent_query", "reads", "is_full", "is_reuse")
    return {"repr": repr(policy), **{name: getattr(policy, name) for name in facts}}


# ---------------------------------------------------------------------- the public interface
PACKAGES: Final = (
    *CORE,
    "kvcache_rag.commands",
    "kvcache_rag_lab.finetune",
    "kvcache_rag.integration",
    "kvcache_rag_documents",
    "kvcache_rag_lab.reader",
    "llama_index.kvcache_rag",
    "langchain_kvcache_rag",
)
_DUNDERS: Final = frozenset(
    f"__{name}__"
    for name in (
        *("init", "call", "len", "iter", "next", "aiter", "anext", "or", "contains", "getitem"),
        *("enter", "exit", "aenter", "aexit", "deepcopy", "getstate", "setstate"),
    )
)
_PATH: Final = re.compile(
    r"\b(?:langchain_|llama_index\.)?kvcache_rag(?:_documents|_lab|_server)?(?:\.\w+)*\.(?=\w)"
)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_PRIVATE: Final = re.compile(r"(?<![\w.])_[A-Z]\w*")


def interface() -> dict[str, Any]:
    """Public names of every package, and how each is called."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = import_module(package)
        names = sorted(getattr(module, "__all__", ()))
        found[package] = {name: _described(getattr(module, name)) for name in names}
    found["vllm_kvcache_rag"] = _written_class(CONNECTOR_FILE, "KVCacheRAGConnector")
    return found


CONNECTOR_FILE: Final = ROOT / "integrations/vllm-kvcache-rag/vllm_kvcache_rag/connector.py"


def _written_class(path: Path, kind: str) -> dict[str, Any]:
    """A class as it is written, or none if it is gone: importing this one takes vLLM."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == kind)
    return {one.name: dict(_written(one)) for one in classes}


def _written(found: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    yield "bases", [ast.unparse(one) for one in found.bases]
    for one in found.body:
        if isinstance(one, ast.FunctionDef) and (one.name in _DUNDERS or one.name[0] != "_"):
            returns = f" -> {ast.unparse(one.returns)}" if one.returns else ""
            yield one.name, f"({ast.unparse(one.args)}){returns}"


def _described(value: Any) -> Any:
    if inspect.isclass(value):
        return {"bases": _bases(value), **dict(sorted(_members(value)))}
    if inspect.isroutine(value):
        return _signature(value)
    return _plain(repr(value) if not isinstance(value, dict) else repr(sorted(value)))


def _bases(kind: type) -> list[str]:
    """Names of the public and foreign classes it is one of: mixins of ours may come and go."""
    public = {*PUBLIC, "Hit"}
    return sorted(
        one.__name__
        for one in kind.__mro__[1:]
        if one is not object and (not _is_ours(one) or one.__name__ in public)
    )


def _is_ours(value: Any) -> bool:
    module = getattr(value, "__module__", "") or ""
    return any(module == one or module.startswith(f"{one}.") for one in _OURS)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class and those of our classes below it declare."""
    ours = [one for one in kind.__mro__ if _is_ours(one)]
    fields: dict[str, str] = {}
    for one in reversed(ours):
        fields.update(inspect.get_annotations(one))
    if dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"):
        plain = {name: _plain(str(text)) for name, text in fields.items()}
        yield "fields", {name: text for name, text in plain.items() if not name.startswith("_")}
    names = {name for one in ours for name in vars(one)} - {"model_post_init"}  # pydantic's own
    for name in sorted(names):
        if name in fields or (name.startswith("_") and name not in _DUNDERS):
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, property):
            yield name, f"property -> {_returned(value.fget)}"
        elif isinstance(value, (classmethod, staticmethod)):
            yield name, f"{type(value).__name__} {_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield name, _signature(value)


def _returned(function: Any) -> str:
    return _plain(str(inspect.signature(function).return_annotation))


def _signature(function: Callable[..., Any]) -> str:
    """A signature with its annotations as they are written, and no mark of positional-only ones."""
    signature = inspect.signature(function)
    parameters = [
        one.replace(
            annotation=_annotation(one.annotation), kind=max(one.kind, one.POSITIONAL_OR_KEYWORD)
        )
        for one in signature.parameters.values()
    ]
    returns = _annotation(signature.return_annotation)
    return _plain(str(signature.replace(parameters=parameters, return_annotation=returns)))


class _Written(str):
    """An annotation as it is written: `inspect` shows its representation."""

    __slots__ = ()
    __repr__ = str.__str__


def _annotation(value: Any) -> Any:
    if value is inspect.Signature.empty:
        return value
    return _Written(value if isinstance(value, str) else inspect.formatannotation(value))


def _plain(text: str) -> str:
    """A text without paths of our modules, addresses, and names of our type variables."""
    return _PRIVATE.sub("Self", _ADDRESS.sub("", _PATH.sub("", text)))


def differences(golden: Any, now: Any, place: str = "") -> Iterable[str]:
    """Where two plain values differ, a line each."""
    if isinstance(golden, dict) and isinstance(now, dict):
        for name in sorted({*golden, *now}):
            where = f"{place}/{name}"
            if name not in now:
                yield f"{where} is gone"
            elif name not in golden:
                yield f"{where} is new"
            else:
                yield from differences(golden[name], now[name], where)
    elif golden != now:
        yield f"{place}: {golden!r} was frozen, {now!r} is now"
