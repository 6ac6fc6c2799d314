"""Files of documents, made here: PDF, Word, HTML."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING

from docx import Document
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

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
