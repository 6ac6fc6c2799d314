"""Back ends other than transformers that run models; packages provide them.

A package has an entry point of the group `kvcache_rag.backends`: its name is what users say as
`backend=`, and what it loads is a `Backend`.  They are found by name, before torch is loaded.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from kvcache_rag.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    import os

    import torch

    from kvcache_rag.models.language import LanguageModel

GROUP: Final = "kvcache_rag.backends"
TRANSFORMERS: Final = "transformers"
"""The back end of this package."""
_EXTRAS: Final = {"llama.cpp": "llama-cpp"}
"""Extras that install back ends which are known by name."""


class Backend(Protocol):
    """Loads models, and shows the rest of the package what they can do.

    A model that `load` gives has the attribute `kvcache_backend`, which is this back end, and what
    is asked of transformers' models: `config`, `name_or_path`, `num_parameters()`.  Its
    `LanguageModel` says by `abilities` what it cannot do, in a sentence each, and by `contexts` who
    brings chunks into memory of its own.
    """

    def load(
        self,
        name: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str,
        device: str | None,
        options: dict[str, Any],
        tokenizer: Any,
        adapter: str | os.PathLike[str] | None,
        weight_format: str,
    ) -> tuple[Any, Any]:
        """A model and its tokenizer; arguments as for `kvcache_rag.models.pretrained.load`.

        Raises:
            InvalidInputError: If something cannot be loaded, or does not fit.
            MissingExtraError: If what runs models is not installed.
        """

    def check(self, name: str) -> None:
        """Say before hours of work whether a model is there; raises as `load`, and reads little."""

    def check_loaded(self, weight_format: str, *, has_adapter: bool) -> None:
        """Refuse what a model that is loaded cannot be given any more.

        Raises:
            InvalidInputError: If its weights cannot be of this format, or it takes no adapter.
        """

    def language_model(self, model: Any, *, window: int | None) -> LanguageModel:
        """A model that was loaded here, as the rest of the package uses it.

        Args:
            model: The model.
            window: Longest prompt plus answer that is wanted; None for the model's own.
        """


def named_backend(name: str) -> Backend | None:
    """The back end of a name; None for transformers.

    Raises:
        InvalidInputError: If there is none of that name.
        MissingExtraError: If it is one that an extra installs.
    """
    if name == TRANSFORMERS:
        return None
    found = [*entry_points(group=GROUP, name=name)]
    if found:
        try:
            return cast("Backend", found[0].load())
        except ImportError as error:
            raise InvalidInputError(
                f"the back end {name} cannot be loaded ({error}); install its package again, of "
                "the version of kvcache-rag"
            ) from error
    check_backend(name)
    raise MissingExtraError(f"the back end {name}", _EXTRAS[name])


def check_backend(name: str, *others: str) -> str:
    """A back end's name, if there is one of it, installed or not.

    Args:
        name: As it was said.
        others: Further names that are taken.

    Raises:
        InvalidInputError: If there is none.
    """
    if name in (TRANSFORMERS, *_EXTRAS, *others):
        return name
    names = dict.fromkeys((TRANSFORMERS, *_EXTRAS, *sorted(entry_points(group=GROUP).names)))
    known = (*names, *others)
    if name not in known:
        said = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise InvalidInputError(f"there is no backend {name!r}; say {said}")
    return name


def backend_of(model: Any) -> Backend | None:
    """The back end that a model was loaded by; None for one of transformers."""
    return cast("Backend | None", getattr(model, "kvcache_backend", None))
