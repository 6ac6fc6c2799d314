"""The text of files, by what they are; and of folders, with what was left out."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import zipfile
from typing import TYPE_CHECKING

import pytest
from documents import docx, filled_form, nested_pdf, pdf

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag_documents import LeftOut, extract_text, extraction, left_out_lines, read_folder
from kvcache_rag_documents import pdf as pdf_format

if TYPE_CHECKING:
    from pathlib import Path


def _entities(encoding: str = "utf-8") -> bytes:
    text = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "bbbb">]><a>&b;</a>'
    return _with_document(text.encode(encoding))


def _with_document(content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("word/document.xml", content)
    return made.getvalue()


FIELD = "<w:r><w:fldChar w:fldCharType='begin'/></w:r>"
ONLY = "only .docx, .htm, .html, .md, .pdf, .txt files are read"
UNREADABLE = {
    "not-utf8": ("a.txt", b"caf\xe9", "it is not UTF-8 text; save it as UTF-8"),
    "encrypted": ("a.pdf", pdf(["x"], user_password="secret"), "it is encrypted; save a copy"),
    "no-pdf": ("a.pdf", b"nothing of the kind", "it cannot be read as .pdf ("),
    "cut-pdf": ("a.pdf", pdf(["x"])[:200], "it cannot be read as .pdf ("),
    "no-word": ("a.docx", b"nothing of the kind", "it cannot be read as .docx (File is not a zip"),
    "entities": ("a.docx", _entities(), "it declares entities, which Word never does"),
    "utf-16": ("a.docx", _entities("utf-16"), "it declares entities, which Word never does"),
    "bomb": ("a.docx", _with_document(b" " * 30_000_001), "it unpacks to more than 30 MB of text"),
    "long-page": ("a.html", b" " * 10_000_001, "it has more than 10 MB; save it in parts"),
    "old-word": (
        "a.docx",
        b"\xd0\xcf\x11\xe0\xa1\xb1",
        "it has a password, or is of a Word before",
    ),
    "pieces": ("a.docx", docx(body="<w:p/>" * 1_100_000), "it has more than 500,000 pieces; save"),
    "fields": (
        "a.docx",
        docx(body=f"<w:p>{FIELD * 100}</w:p>"),
        "its fields are nested too deep; save it as text",
    ),
    "unknown-ending": ("a.png", b"", ONLY),
    "no-ending": ("makefile", b"", ONLY),
}


@pytest.mark.parametrize(("name", "data", "says"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_says_why(
    name: str, data: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(InvalidInputError) as failed:
        extract_text(name, data)
    assert str(failed.value).startswith(says)
    assert "\n" not in str(failed.value)
    assert caplog.records == []
    assert logging.getLogger("pypdf").level == logging.NOTSET


# ---------------------------------------------------------------------- folders
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    for name, data in {
        "sub/a.txt": b"Ann",
        "b.pdf": pdf(["Bo"]),
        "blank.md": b" \n",
        "scan.pdf": pdf([""]),
        "locked.pdf": pdf(["x"], user_password="secret"),
        "photo.png": b"",
        ".git/config.txt": b"hidden",
        ".hidden.txt": b"hidden",
    }.items():
        (root / name).write_bytes(data)
    return root


def test_a_folder_gives_texts_and_what_was_left_out(folder: Path) -> None:
    found = read_folder(str(folder))
    assert found.texts == {"b.pdf": "Bo", "sub/a.txt": "Ann"}
    assert found.left_out == (
        LeftOut("blank.md", "there is no text in it", is_read=True),
        LeftOut("locked.pdf", "it is encrypted; save a copy without its password"),
        LeftOut("photo.png", ONLY),
        LeftOut(
            "scan.pdf",
            "there is no text in it; pages that were scanned need OCR first",
            is_read=True,
        ),
    )


def test_a_file_that_cannot_be_opened_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(folder).read_bytes

    def read(path: Path) -> bytes:
        if path.name == "b.pdf":
            raise PermissionError(13, "Permission denied", str(path))
        assert path.name != "photo.png", "what is never read is not opened"
        return real(path)

    monkeypatch.setattr(type(folder), "read_bytes", read)
    found = read_folder(str(folder))
    assert list(found.texts) == ["sub/a.txt"]
    assert LeftOut("b.pdf", "it cannot be opened (Permission denied)") in found.left_out


def test_what_is_no_file_is_left_out_with_its_reason(folder: Path) -> None:
    (folder / "linked.txt").symlink_to(folder / "sub" / "a.txt")
    (folder / "other").symlink_to(folder / "sub")
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / ".hidden").symlink_to(folder / "sub")
    os.mkfifo(folder / "pipe.txt")
    found = read_folder(str(folder))
    assert found.texts["linked.txt"] == "Ann"
    assert "other/a.txt" not in found.texts
    told = [one for one in found.left_out if "." not in one.name or one.name[0] in "gp"]
    assert told == [
        LeftOut("gone.txt", "it is a link to nothing"),
        LeftOut(
            "other",
            "it is a link to a folder, which is not followed; put its files here",
            is_read=True,
        ),
        LeftOut("photo.png", ONLY),
        LeftOut("pipe.txt", "it is neither a file nor a folder"),
    ]
    assert "  other: it is a link to a folder" in "\n".join(left_out_lines(found.left_out))


def test_a_folder_without_text_says_why_its_first_file_gave_none(folder: Path) -> None:
    (folder / "sub" / "a.txt").unlink()
    (folder / "b.pdf").unlink()
    with pytest.raises(InvalidInputError, match=r"\.docx, .*; blank.md: there is no text in it$"):
        read_folder(str(folder))
    with pytest.raises(InvalidInputError, match="there is no folder "):
        read_folder(str(folder / "nowhere"))
    (folder / "empty").mkdir()
    assert read_folder(str(folder / "empty"), allow_empty=True).texts == {}


@pytest.mark.parametrize(
    ("name", "package"),
    [("a.pdf", "pypdf"), ("a.docx", "mammoth"), ("b.docx", "justhtml"), ("a.HTML", "justhtml")],
)
def test_a_missing_library_is_named_before_anything_is_read(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "before.txt").write_text("text")
    (tmp_path / name).write_bytes(b"")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        extraction, "find_spec", lambda wanted: None if wanted == package else real(wanted)
    )
    monkeypatch.setattr(type(tmp_path), "read_bytes", lambda _: pytest.fail("a file was read"))
    says = f"{package}, which reads {name}, is not installed: pip install 'kvcache-rag[documents]'"
    with pytest.raises(MissingExtraError) as failed:
        read_folder(str(tmp_path))
    assert str(failed.value) == says
    with pytest.raises(MissingExtraError):
        extract_text(name, b"")


def test_every_kind_has_its_library_in_the_extra() -> None:
    from importlib.metadata import requires

    wanted = [line for line in requires("kvcache-rag-documents") or () if "extra" in line]
    for reader in extraction._READERS.values():
        for package, _ in reader.needs:
            assert any(line.startswith(package) for line in wanted), package


# ---------------------------------------------------------------------- what would take for ever
def test_forms_within_forms_are_read_so_far() -> None:
    """Of thirty levels there are a billion; pypdf before 6.17 reads them all."""
    assert extract_text("a.pdf", nested_pdf(30)) == ""


def test_pages_that_take_far_too_long_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_format, "PDF_SECONDS", 1e-9)
    with pytest.raises(InvalidInputError, match=r"^its first 0 pages took longer"):
        extract_text("a.pdf", nested_pdf(2, pages=3))


@pytest.mark.parametrize(
    "page",
    [
        *(one * 20_000 for one in ("<div>", "<li>", "<b>", "<template>", "<sup>", "<ol>", "<q>")),
        *(one * 20_000 for one in ("<!--", "<table><td>", "<math><mfrac>", "<del>", "<ruby><rt>")),
        # Opened again in each paragraph: 640,000 elements of 15 kB.
        "<p>" + "".join(f"<font size={size}>" for size in range(800)) + "<p>x" * 800,
        "<td>".join(["<table>x"] * 20_000),
        "<" * 500_000 + " ",
        f"<pre>{' ' * 500_000}x",
        "<tr>".join(["<table>", *["<td rowspan=9999 colspan=9999>x"] * 2_000]),
    ],
    ids=lambda page: page[:20],
)
def test_what_is_never_closed_is_read_in_a_time_of_its_length(page: str) -> None:
    # The square of it takes hours.
    is_seen = not page.startswith(("<!--", "<template>"))
    assert ("end" in extract_text("a.html", f"{page}end".encode())) is is_seen


@pytest.mark.parametrize(
    "text",
    [
        "---\n" + "a: b\n" * 4_000,
        f"---\na: {'[' * 10_000}\n---\n",
        "---\n" + "".join(f"{number}: a\n" for number in range(50_000)) + "---\n",
    ],
    ids=["no-end", "brackets", "names"],
)
def test_what_is_hardly_front_matter_stays_text(text: str) -> None:
    assert extract_text("a.md", text.encode()) == text


def test_a_note_that_is_referred_to_again_and_again_is_read_once() -> None:
    references = "<w:r><w:footnoteReference w:id='1'/></w:r>" * 2_000
    note = f"A note.</w:t></w:r>{references}<w:r><w:t>"
    data = docx(body=f"<w:p>{references}</w:p>", notes=[note])
    assert extract_text("a.docx", data).count("A note.") == 1


def test_a_value_that_many_fields_show_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_format, "_LETTERS", 20_000)
    field = {"/FT": "/Tx", "/V": "x" * 1_000}
    with pytest.raises(InvalidInputError, match="it makes more than 20,000 letters"):
        extract_text("a.pdf", filled_form([field] * 30))
