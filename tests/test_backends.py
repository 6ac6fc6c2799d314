"""Back ends that packages bring: found by name, asked for everything, refused in a sentence."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import TYPE_CHECKING, Any

import pytest
from small import make_tokenizer, make_untrained

from kvcache_rag import Engine, InvalidInputError
from kvcache_rag.errors import MissingExtraError
from kvcache_rag.models import backends
from kvcache_rag.models.pretrained import check_model, language_model
from kvcache_rag.settings import LocalSettings

if TYPE_CHECKING:
    from kvcache_rag.models.language import LanguageModel


class Borrowed:
    """A back end that has transformers run a model of its own."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str]] = []

    def load(self, name: str, *, weight_format: str, **_: Any) -> tuple[Any, Any]:
        self.loaded.append((name, weight_format))
        model = make_untrained()
        model.kvcache_backend = self
        return model, make_tokenizer()

    def check(self, name: str) -> None:
        if name != "someone/mine":
            raise InvalidInputError(f"there is no {name}")

    def check_loaded(self, weight_format: str, *, has_adapter: bool) -> None:
        if has_adapter:
            raise InvalidInputError("it takes no adapter")

    def language_model(self, model: Any, *, window: int | None) -> LanguageModel:
        del model.kvcache_backend
        return language_model(model, window=window)


BORROWED = Borrowed()


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> Borrowed:
    point = EntryPoint("borrowed", f"{__name__}:BORROWED", backends.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda point: BORROWED)
    monkeypatch.setattr(
        backends, "entry_points", lambda group, **by: EntryPoints([point]).select(**by)
    )
    BORROWED.loaded.clear()
    return BORROWED


def test_a_package_brings_one(borrowed: Borrowed) -> None:
    engine = Engine.from_pretrained("someone/mine", backend="borrowed", weight_format="plain")
    assert borrowed.loaded == [("someone/mine", "plain")]
    assert engine.generate("Who?", ["Ann."], max_new_tokens=2).text is not None
    check_model("someone/mine", "borrowed")
    with pytest.raises(InvalidInputError, match="there is no other"):
        check_model("other", "borrowed")
    assert LocalSettings(model="someone/mine", backend="borrowed").backend == "borrowed"


def test_a_name_that_nobody_has_is_refused(borrowed: Borrowed) -> None:
    said = "there is no backend 'mlx'; say 'transformers', 'llama.cpp' or 'borrowed'"
    for asked in (
        lambda: LocalSettings(model="someone/mine", backend="mlx"),
        lambda: Engine.from_pretrained("someone/mine", backend="mlx"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            asked()


def test_one_that_cannot_be_loaded_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "nowhere:BACKEND", backends.GROUP)
    monkeypatch.setattr(
        backends, "entry_points", lambda group, **by: EntryPoints([point]).select(**by)
    )
    with pytest.raises(InvalidInputError, match=r"broken cannot be loaded .*; install its package"):
        backends.named_backend("broken")


def test_one_that_an_extra_brings_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "entry_points", lambda group, **by: EntryPoints([]))
    with pytest.raises(MissingExtraError, match=r"pip install 'kvcache-rag\[llama-cpp\]'"):
        backends.named_backend("llama.cpp")
    assert LocalSettings(model="someone/mine", backend="llama.cpp").backend == "llama.cpp"
