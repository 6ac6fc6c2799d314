"""Files of documents, made here: PDF, Word, HTML."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any, Final

from pypdf import PdfWriter
from pypdf.generic import (
    ArrayObject,
    DecodedStreamObject,
    DictionaryObject,
    NameObject,
    NumberObject,
    PdfObject,
    RectangleObject,
    TextStringObject,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def pdf(pages: Sequence[str], *, user_password: str | None = None) -> bytes:
    """A PDF with a line of text on each page; "" leaves the page without any."""
    writer = PdfWriter()
    named = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = writer._add_object(_entries(named))
    for text in pages:
        line = f"BT /F1 12 Tf 40 700 Td ({text}) Tj ET".encode() if text else b""
        _draw(writer, line, {"/Font": {"/F1": font}})
    if user_password is not None:
        writer.encrypt(user_password, "owner", algorithm="AES-256")
    return _written(writer)


def nested_pdf(levels: int, pages: int = 1) -> bytes:
    """A PDF of pages with a form that shows one twice that shows one twice, and so on."""
    writer, shown = PdfWriter(), dict[str, Any]()
    for level in range(levels + 1):
        form = _stream(b"/X Do /X Do" if level else b"")
        values = {"/Type": "/XObject", "/Subtype": "/Form"}
        form.update(_entries({**values, "/Resources": shown} if level else values))
        form[NameObject("/BBox")] = RectangleObject((0, 0, 9, 9))
        shown = {"/XObject": {"/X": writer._add_object(form)}}
    for _ in range(pages):
        _draw(writer, b"/X Do", shown)
    return _written(writer)


def _draw(writer: PdfWriter, content: bytes, resources: dict[str, Any]) -> None:
    """Add a page."""
    page = writer.add_blank_page(width=600, height=800)
    page[NameObject("/Resources")] = _entries(resources)
    page[NameObject("/Contents")] = writer._add_object(_stream(content))


def _stream(data: bytes) -> DecodedStreamObject:
    made = DecodedStreamObject()
    made.set_data(data)
    return made


_WORD: Final = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "v": "urn:schemas-microsoft-com:vml",
    "r": "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "w14": "http://schemas.microsoft.com/office/word/2010/wordml",
    "wp": "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing",
    "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
}
_STRICT: Final = {
    "w": "http://purl.oclc.org/ooxml/wordprocessingml/main",
    "m": "http://purl.oclc.org/ooxml/officeDocument/math",
}
_ROOTS: Final = {
    "word/document.xml": "w:document",
    "word/footnotes.xml": "w:footnotes",
    "word/header1.xml": "w:hdr",
    "word/comments.xml": "w:comments",
}
_PACKAGE: Final = "http://schemas.openxmlformats.org/package/2006"


def docx(
    paragraphs: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    body: str = "",
    *,
    notes: Sequence[str] = (),
    comments: Sequence[str] = (),
    header: str = "",
    strict: bool = False,
) -> bytes:
    """A Word file: paragraphs, a table, further XML of its body, and footnotes from 1 on."""
    texts = "".join(f"<w:p>{run(text)}</w:p>" for text in paragraphs)
    cells = ("".join(f"<w:tc><w:p>{run(text)}</w:p></w:tc>" for text in row) for row in rows)
    table = "".join(f"<w:tr>{row}</w:tr>" for row in cells)
    footnotes = "".join(
        f'<w:footnote w:id="{number}"><w:p>{run(text)}</w:p></w:footnote>'
        for number, text in enumerate(notes, 1)
    )
    remarks = "".join(
        f'<w:comment w:id="{number}"><w:p>{run(one)}</w:p></w:comment>'
        for number, one in enumerate(comments)
    )
    parts = {
        "word/document.xml": f"<w:body>{texts}{table and f'<w:tbl>{table}</w:tbl>'}{body}</w:body>",
        **({"word/footnotes.xml": footnotes} if notes else {}),
        **({"word/header1.xml": f"<w:p>{run(header)}</w:p>"} if header else {}),
        **({"word/comments.xml": remarks} if comments else {}),
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, inside in parts.items():
            names = {**_WORD, **(_STRICT if strict else {})}
            spaces = " ".join(f'xmlns:{prefix}="{uri}"' for prefix, uri in names.items())
            kind = _ROOTS[name]
            file.writestr(name, f"<{kind} {spaces}>{inside}</{kind}>")
        related = f'<Relationships xmlns="{_PACKAGE}/relationships">'
        to = '<Relationship Id="r{0}" Type="{1}/{0}" Target="{2}"/>'
        kind = _WORD["r"]
        main = to.format("officeDocument", kind, "word/document.xml")
        file.writestr("_rels/.rels", f"{related}{main}</Relationships>")
        more = to.format("footnotes", kind, "footnotes.xml") if notes else ""
        file.writestr("word/_rels/document.xml.rels", f"{related}{more}</Relationships>")
        types = f'<Types xmlns="{_PACKAGE}/content-types"/>'
        file.writestr("[Content_Types].xml", types)
    return made.getvalue()


def run(text: str, properties: str = "") -> str:
    """A piece of a Word file's paragraph."""
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def filled_form(fields: Sequence[dict[str, Any]], text: str = "") -> bytes:
    """A PDF of a page with annotations; a value that begins with "/" is a name."""
    writer = PdfWriter(io.BytesIO(pdf([text])))
    made = [_entries({"/Subtype": "/Widget", **field}) for field in fields]
    writer.pages[0][NameObject("/Annots")] = ArrayObject(map(writer._add_object, made))
    return _written(writer)


def _entries(values: dict[str, Any]) -> DictionaryObject:
    def entry(value: Any) -> Any:
        if isinstance(value, dict):
            return _entries(value)
        if isinstance(value, list):
            return ArrayObject(map(entry, value))
        if isinstance(value, int):
            return NumberObject(value)
        if isinstance(value, PdfObject):
            return value
        return NameObject(value) if value.startswith("/") else TextStringObject(value)

    return DictionaryObject({NameObject(key): entry(value) for key, value in values.items()})


def _written(writer: PdfWriter) -> bytes:
    made = io.BytesIO()
    writer.write(made)
    return made.getvalue()
