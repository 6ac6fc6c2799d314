"""Files of documents, made here: PDF, Word, HTML."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any

from docx import Document
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject, RectangleObject

if TYPE_CHECKING:
    from collections.abc import Sequence


def pdf(pages: Sequence[str], *, user_password: str | None = None) -> bytes:
    """A PDF with a line of text on each page; "" leaves the page without any."""
    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(width=600, height=800)
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 40 700 Td ({text}) Tj ET".encode() if text else b"")
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        page[NameObject("/Contents")] = writer._add_object(content)
    if user_password is not None:
        writer.encrypt(user_password, "owner", algorithm="AES-256")
    return _written(writer)


def nested_pdf(levels: int, pages: int = 1) -> bytes:
    """A PDF of pages with a form that shows one twice that shows one twice, and so on."""
    writer = PdfWriter()
    form = _form(writer, b"", None)
    for _ in range(levels):
        form = _form(writer, b"/X Do /X Do", form)
    for _ in range(pages):
        page = writer.add_blank_page(width=600, height=800)
        page[NameObject("/Resources")] = _showing(form)
        content = DecodedStreamObject()
        content.set_data(b"/X Do")
        page[NameObject("/Contents")] = writer._add_object(content)
    return _written(writer)


def _form(writer: PdfWriter, data: bytes, inner: Any) -> Any:
    form = DecodedStreamObject()
    form.set_data(data)
    form[NameObject("/Type")], form[NameObject("/Subtype")] = (
        NameObject("/XObject"),
        NameObject("/Form"),
    )
    form[NameObject("/BBox")] = RectangleObject((0, 0, 9, 9))
    if inner is not None:
        form[NameObject("/Resources")] = _showing(inner)
    return writer._add_object(form)


def _showing(form: Any) -> DictionaryObject:
    return DictionaryObject({NameObject("/XObject"): DictionaryObject({NameObject("/X"): form})})


def docx(paragraphs: Sequence[str], rows: Sequence[Sequence[str]] = (), body: str = "") -> bytes:
    """A Word file: paragraphs, a table, and further XML of its body."""
    document = Document()
    for text in paragraphs:
        document.add_paragraph(text)
    if rows:
        table = document.add_table(len(rows), len(rows[0]))
        for row, texts in zip(table.rows, rows, strict=True):
            for cell, text in zip(row.cells, texts, strict=True):
                cell.text = text
    return _with_body(_written(document), body)


def _with_body(data: bytes, body: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            part = old.read(name)
            if name == "word/document.xml":
                part = part.replace(b"<w:sectPr", body.encode() + b"<w:sectPr", 1)
            new.writestr(name, part)
    return made.getvalue()


def _written(document: object) -> bytes:
    made = io.BytesIO()
    (document.write if isinstance(document, PdfWriter) else document.save)(made)
    return made.getvalue()
