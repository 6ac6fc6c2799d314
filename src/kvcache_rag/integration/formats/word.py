"""Word: what mammoth makes HTML of, with what it passes over put into words first."""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any, Final
from xml.etree import ElementTree  # files that declare entities are refused

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.integration.formats.html import grouped, rendered
from kvcache_rag.integration.formats.text import FileText, counted, silent

# Files of Word are zips; with a password, or of before 2007, they are one of these.
_OLD_OFFICE: Final = b"\xd0\xcf\x11\xe0"
_WORD_BYTES: Final = 30_000_000
"""Of its parts that are XML, unpacked; a long book has two."""
_WITH_TEXT: Final = re.compile(r"word/(?:document|footnotes|endnotes)\d*\.xml")


def word(data: bytes) -> FileText:
    """As Word shows it with all changes accepted; footnotes and endnotes stand at the end."""
    if data.startswith(_OLD_OFFICE):
        raise InvalidInputError(
            "it has a password, or is of a Word before 2007; save it as .docx without one"
        )
    import mammoth  # type: ignore[import-untyped]  # has no types

    prepared, pictures = _prepared(data)
    with silent("mammoth"):
        markup = mammoth.convert_to_html(
            io.BytesIO(prepared), convert_image=mammoth.images.img_element(lambda _: {"src": ""})
        ).value
    # Marks that lead back from a note to its place.
    found = rendered(re.sub(r'<a href="#[^"]*">\u2191</a>', "", markup), by_mammoth=True)
    lists = counted(len(re.findall("<ol>(?!<li id=)", markup)), "list")
    numbers = tuple(f"the numbers of {text}" for text in lists)
    return FileText(found.text, (*counted(pictures, "picture"), *numbers))


def _prepared(data: bytes) -> tuple[bytes, int]:
    """A file in which what mammoth passes over is text, and how many pictures are in it."""
    pictures, out = 0, io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as parts, zipfile.ZipFile(out, "w") as written:
        texts = [part for part in parts.infolist() if part.filename.endswith((".xml", ".rels"))]
        if sum(part.file_size for part in texts) > _WORD_BYTES:
            raise InvalidInputError(
                f"it unpacks to more than {_WORD_BYTES // 1_000_000} MB of text; save it in parts"
            )
        for part in texts:
            content = parts.read(part)
            if b"<!DOCTYPE" in content.replace(b"\0", b""):  # in UTF-16, too
                raise InvalidInputError("it declares entities, which Word never does")
            if _WITH_TEXT.fullmatch(part.filename):
                root = ElementTree.fromstring(content)  # nothing is declared in it
                pictures += sum(_kind(node) in _DRAWN for node in root.iter())
                _put_into_words(root)
                content = ElementTree.tostring(root)
            written.writestr(part.filename, content)
    return out.getvalue(), pictures


_DRAWN: Final = ("blip", "chart", "imagedata", "relIds")


def _kind(node: Any) -> str:
    """The name of an element, in either namespace of Word's formats."""
    return str(node.tag).rpartition("}")[2]


def _put_into_words(root: Any) -> None:
    """Hyphens that do not break, simple fields and formulas as text; hidden runs go."""
    space = root.tag.rpartition("}")[0] + "}"
    for above in list(root.iter()):
        for node in list(above):
            kind = _kind(node)
            if kind == "noBreakHyphen":
                node.tag, node.text = f"{space}t", "-"
            elif kind == "r" and _is_hidden(node, space):
                above.remove(node)
            elif kind in _PASSED_OVER:
                node[:] = sorted(node, key=lambda one: _kind(one) == "rt")  # behind what it is of
                node.tag, node.attrib = f"{space}{_PASSED_OVER[kind]}", {}
            elif kind == "rt":
                text = "".join(one.text or "" for one in node.iter(f"{space}t"))
                node.clear()
                node.tag, node.text = f"{space}t", f"({text})"
            elif kind == "oMath":
                text = _formula(node)
                node.clear()
                node.tag = f"{space}r"
                ElementTree.SubElement(node, f"{space}t").text = text


# What mammoth passes over with all that is in it, as what it reads.
_PASSED_OVER: Final = {
    **dict.fromkeys(("bdo", "customXml", "dir", "fldSimple", "moveTo", "oMathPara"), "smartTag"),
    **dict.fromkeys(("ruby", "rubyBase"), "smartTag"),
    "cr": "br",
    "ptab": "tab",
}


def _is_hidden(run: Any, space: str) -> bool:
    mark = run.find(f"{space}rPr/{space}vanish")
    return mark is not None and mark.get(f"{space}val", "1") not in ("0", "false", "off")


def _formula(node: Any) -> str:
    """A formula in one line: `a/b`, `(a+b)/2`, `x^2`, `x_1`, `√(x)`."""

    def part(name: str) -> str:
        return "".join(_formula(child) for child in node if _kind(child) == name)

    kind = _kind(node)
    if kind == "t":
        return node.text or ""
    if kind == "f":
        return f"{grouped(part('num'))}/{grouped(part('den'))}"
    if kind in ("nary", "sSup", "sSub", "sSubSup"):
        low, high = part("sub"), part("sup")
        raised = (f"_{grouped(low)}" if low else "") + (f"^{grouped(high)}" if high else "")
        if kind == "nary":
            return f"{_sign(node)}{raised} {part('e')}"
        return f"{grouped(part('e'))}{raised}"
    if kind == "rad":
        return f"{part('deg')}√({part('e')})"
    if kind == "d":
        return f"({', '.join(_formula(child) for child in node if _kind(child) == 'e')})"
    if kind == "mr":
        return "; " + ", ".join(map(_formula, node))
    return "".join(map(_formula, node))


def _sign(node: Any) -> str:
    """Of a sum or its like, where the file says it; an integral otherwise."""
    for one in node.iter():
        if _kind(one) == "chr":
            return next(iter(one.attrib.values()), "∫")
    return "∫"
