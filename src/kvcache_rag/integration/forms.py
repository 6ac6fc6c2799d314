"""What of a row stands in prompts: its document, or what a framework makes of it.

A framework tells how its rows read by an entry point of the group `kvcache_rag.row_texts`.  A row's
reference holds the digest of the text that its chunk was computed from, so rows that have one tell
by themselves which form they are in.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.integration.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.metadata import EntryPoint
    from typing import TypeAlias

    from kvcache_rag.integration.rows import Row
    from kvcache_rag.template import PromptTemplate

    RowText: TypeAlias = Callable[[Row], str]

GROUP: Final = "kvcache_rag.row_texts"
DOCUMENT: Final = "document"
LLAMA_INDEX: Final = "llama-index"
# LlamaIndex writes a node beside its text; rows of others do not have this.
_NODE: Final = "_node_content"


def installed_forms() -> dict[str, RowText]:
    """The forms that rows can be read in, by name: "document" first, then those of frameworks.

    A framework is imported when its form is first used.
    """
    forms: dict[str, RowText] = {DOCUMENT: lambda row: row.document}
    for point in entry_points(group=GROUP):
        forms[point.name] = _Brought(point)
    return forms


class _Brought:
    """The form of a framework."""

    def __init__(self, point: EntryPoint) -> None:
        self._point = point
        self._text_of: RowText | None = None

    def __call__(self, row: Row) -> str:
        if self._text_of is None:
            self._text_of = self._point.load()
        return self._text_of(row)


def row_text(name: str, template: PromptTemplate) -> RowText:
    """How to read rows.

    Args:
        name: A form; "" lets every row tell: the form that its reference was made of, else the
            framework that wrote it, else its document.
        template: Writes the chunks that the references were made of.

    Raises:
        InvalidInputError: If there is no form of that name.
    """
    forms = installed_forms()
    if not name:
        return _Told(forms, template)
    if name not in forms:
        raise InvalidInputError(
            f"there is no form of texts {name!r}; use one of {', '.join(forms)}, or install the "
            "integration that brings it"
        )
    return forms[name]


class _Told:
    """Reads each row in its own form."""

    def __init__(self, forms: Mapping[str, RowText], template: PromptTemplate) -> None:
        self._forms, self._template = forms, template

    def __call__(self, row: Row) -> str:
        reference = Reference.from_metadata(row.metadata)
        if reference is not None:
            for form in self._forms.values():
                text = form(row)
                written = self._template.wrap(text).encode("utf-8", "surrogatepass")
                if hashlib.sha256(written).hexdigest() == reference.text:
                    return text
        usual = LLAMA_INDEX if _NODE in row.metadata else DOCUMENT
        return self._forms.get(usual, self._forms[DOCUMENT])(row)
