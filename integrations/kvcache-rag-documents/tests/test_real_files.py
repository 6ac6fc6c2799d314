"""Files that LibreOffice, pandoc and Chromium made are read as what their sources say."""

from __future__ import annotations

from pathlib import Path

import documents
import pytest

from kvcache_rag_documents import read_file

FILES = Path(documents.__file__).parent / "files"
ENDING = ".expected.txt"
NAMES = sorted(path.name.removesuffix(ENDING) for path in FILES.glob(f"*{ENDING}"))

# What is right, and what a reader gives in its place; a mended reader takes its line from here.
WRONG: dict[str, dict[str, str]] = {
    "clinic-chromium.pdf": {
        "10² mg": "10²  mg",
        "\U0001d451=(\U0001d464+5)/2 mg": "\U0001d451= \U0001d464+5 2  mg",
        "Ärztinnen": "Ärzt innen",
        "Krankenkasse": "Kranken kasse",
    },
    "harbour-libreoffice.pdf": {
        "v=(a+3)/t² in": "v= a+3 t²  in",
    },
}


def read(name: str) -> str:
    return read_file(name, (FILES / name).read_bytes()).text


def right(name: str) -> str:
    return (FILES / f"{name}{ENDING}").read_text(encoding="utf-8")


def test_every_file_has_a_right_text() -> None:
    made = {path.name for path in FILES.iterdir() if path.suffix in (".docx", ".html", ".pdf")}
    assert made <= {*NAMES}
    assert WRONG.keys() <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_read_as_its_source_says(name: str) -> None:
    wanted = right(name)
    for correct, given in WRONG.get(name, {}).items():
        assert wanted.count(correct) == 1, correct
        wanted = wanted.replace(correct, given)
    assert read(name).rstrip("\n") == wanted.rstrip("\n")
