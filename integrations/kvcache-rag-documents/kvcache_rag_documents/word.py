"""Word: converted to HTML by mammoth, after text that mammoth skips was made readable."""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree  # files that declare entities are refused

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_documents.html import GAP, grouped, rendered
from kvcache_rag_documents.text import FileText, counted, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Files of Word are zips; with a password, or of before 2007, they are one of these.
_OLD_OFFICE: Final = b"\xd0\xcf\x11\xe0"
_WORD_BYTES: Final = 30_000_000
"""Of its parts that are XML, unpacked; a long book has two."""
_ELEMENTS: Final = 500_000  # half a minute
_FIELDS_WITHIN: Final = 50
_WITH_TEXT: Final = re.compile(r"word/(?:document|footnotes|endnotes)\d*\.xml")


_BESIDE_TEXT: Final = re.compile(r"word/(?:comments|footer|header)\d*\.xml")
_DRAWN_FIELD: Final = re.compile(r"\s*(?:EQ|FORMDROPDOWN)\b", re.IGNORECASE)


def word(data: bytes) -> FileText:
    """As Word shows it with all changes accepted; footnotes and endnotes stand at the end."""
    if data.startswith(_OLD_OFFICE):
        raise InvalidInputError(
            "it has a password, or is of a Word before 2007; save it as .docx without one"
        )
    import mammoth  # type: ignore[import-untyped]  # has no types

    prepared, without = _prepared(data)
    with silent("mammoth"):
        markup = mammoth.convert_to_html(
            io.BytesIO(prepared), convert_image=mammoth.images.img_element(lambda _: {"src": ""})
        ).value
    # Marks that lead back from a note to its place.
    found = rendered(re.sub(r'<a href="#[^"]*">\u2191</a>', "", markup), by_mammoth=True)
    lists = counted(len(re.findall("<ol>(?!<li id=)", markup)), "list")
    numbers = tuple(f"the numbers of {text}" for text in lists)
    return FileText(found.text, (*without, *numbers))


def _prepared(data: bytes) -> tuple[bytes, tuple[str, ...]]:
    """A file in which what mammoth passes over is text, and what in it is none."""
    count, out = Counter[str](), io.BytesIO()
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
            if content.count(b"<") > 2 * _ELEMENTS:
                raise InvalidInputError(
                    f"it has more than {_ELEMENTS:,} pieces; save it in parts, or as text"
                )
            is_read = _WITH_TEXT.fullmatch(part.filename)
            if is_read or _BESIDE_TEXT.fullmatch(part.filename):
                root = ElementTree.fromstring(content)  # nothing is declared in it
                count.update(_without(root))
                if is_read:
                    _put_into_words(root)
                    content = ElementTree.tostring(root)
            written.writestr(part.filename, content)
    edges = ("its headers and footers",) if count["edge"] else ()
    kinds = ("picture", "field", "comment")
    return out.getvalue(), (*(one for kind in kinds for one in counted(count[kind], kind)), *edges)


def _without(root: Any) -> Iterator[str]:
    """What of a part is no text of ours, by kind."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        kind = _kind(node)
        if kind != "Fallback":  # for older programs, what stands beside it again
            nodes += node
        if kind in _DRAWN:
            yield "picture"
        elif kind == "control" or (kind == "instrText" and _DRAWN_FIELD.match(node.text or "")):
            yield "field"
        elif kind == "comment":
            yield "comment"
    texts = (node.text or "" for node in root.iter() if _kind(node) == "t")
    if _kind(root) in ("hdr", "ftr") and any(map(str.strip, texts)):
        yield "edge"


_DRAWN: Final = ("blip", "chart", "imagedata", "relIds")


def _kind(node: Any) -> str:
    """The name of an element, in either namespace of Word's formats."""
    return str(node.tag).rpartition("}")[2]


def _put_into_words(root: Any) -> None:
    """What mammoth passes over as what it reads; what is hidden goes."""
    space = root.tag.rpartition("}")[0] + "}"
    _check_fields(root, space)
    seen: set[str] = set()
    is_note = _kind(root) in ("footnotes", "endnotes")
    for above in list(root.iter()):
        for place, node in reversed(list(enumerate(above))):
            kind = _kind(node)
            if kind == "r" and _is_hidden(node, space):
                del above[place]
            elif kind in ("footnoteReference", "endnoteReference"):
                # One that is there again, or in a note, would be read again with all that is in it.
                name = f"{kind} {node.get(f'{space}id')}"
                if is_note or name in seen:
                    del above[place]
                seen.add(name)
            elif kind == "p" and _dropped(node, space) and place + 1 < len(above):
                _put_before(above[place + 1], node, space)
                del above[place]
            else:
                _put_node(node, kind, space)


def _put_node(node: Any, kind: str, space: str) -> None:
    if kind == "noBreakHyphen":
        node.tag, node.text = f"{space}t", "-"
    elif kind in _PASSED_OVER:
        node.tag, node.attrib = f"{space}{_PASSED_OVER[kind]}", {}
        node[:] = sorted(node, key=lambda one: _kind(one) == "rt")  # behind what it is of
    elif kind == "rt":
        text = "".join(one.text or "" for one in node.iter(f"{space}t"))
        node.clear()
        node.tag, node.text = f"{space}t", f"({text})"
    elif kind == "rPr":
        _put_properties(node, space)
    elif kind == "drawing":
        boxes = list(node.iter(f"{space}txbxContent"))
        if boxes:
            node.tag, node[:] = f"{space}pict", boxes
    elif kind == "oMath":
        text = _formula(node)
        node.clear()
        node.tag = f"{space}r"
        ElementTree.SubElement(node, f"{space}t").text = text


def _put_properties(node: Any, space: str) -> None:
    """Raised, lowered and struck text as Word's own words for them."""
    for one in node:
        kind, value = _kind(one), one.get(f"{space}val", "0")
        if kind == "dstrike":
            one.tag = f"{space}strike"
        elif kind == "position" and value.lstrip("-").isdecimal() and abs(int(value)) > _MOVED:
            one.tag = f"{space}vertAlign"
            one.set(f"{space}val", "subscript" if value.startswith("-") else "superscript")


_MOVED: Final = 3  # half points up or down that are no matter of looks


def _check_fields(root: Any, space: str) -> None:
    """Fields within fields, of which mammoth takes the square."""
    depth = 0
    for mark in root.iter(f"{space}fldChar"):
        kind = mark.get(f"{space}fldCharType")
        depth += (kind == "begin") - (kind == "end")
        if depth > _FIELDS_WITHIN:
            raise InvalidInputError("its fields are nested too deep; save it as text")


def _dropped(paragraph: Any, space: str) -> bool:
    """Whether it is the first letter of the next one."""
    frame = paragraph.find(f"{space}pPr/{space}framePr")
    return frame is not None and frame.get(f"{space}dropCap", "none") != "none"


def _put_before(paragraph: Any, letter: Any, space: str) -> None:
    if _kind(paragraph) == "p":
        runs = [one for one in letter if one.tag != f"{space}pPr"]
        first = int(bool(len(paragraph)) and paragraph[0].tag == f"{space}pPr")
        paragraph[first:first] = runs


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
    """A formula in one line: `a/b`, `(a+b)/2`, `x^2`, `x_1`, `√(x)`; words in it have a gap."""
    kind = _kind(node)
    if kind == "t":
        return node.text or ""
    write = _WRITTEN.get(kind)
    if write is None:
        return "".join(map(_formula, node))
    return write(node)


def _part(node: Any, name: str) -> str:
    return "".join(_formula(child) for child in node if _kind(child) == name)


def _scripts(node: Any) -> str:
    low, high = _part(node, "sub"), _part(node, "sup")
    return (f"_{grouped(low)}" if low else "") + (f"^{grouped(high)}" if high else "")


def _delimited(node: Any) -> str:
    inside = ", ".join(_formula(child) for child in node if _kind(child) == "e")
    return f"{_said(node, 'begChr', '(')}{inside}{_said(node, 'endChr', ')')}"


def _behind_base(node: Any) -> str:
    return f"{grouped(_part(node, 'e'))}{_scripts(node)}{GAP}"


_WRITTEN: Final[dict[str, Callable[[Any], str]]] = {
    "oMath": lambda node: f"{GAP}{''.join(map(_formula, node))}{GAP}",
    "f": lambda node: f"{GAP}{grouped(_part(node, 'num'))}/{grouped(_part(node, 'den'))}{GAP}",
    "limLow": lambda node: f"{_part(node, 'e')}_{grouped(_part(node, 'lim'))}{GAP}",
    "limUpp": lambda node: f"{_part(node, 'e')}^{grouped(_part(node, 'lim'))}{GAP}",
    "func": lambda node: f"{_part(node, 'fName')}{GAP}{_part(node, 'e')}",
    "nary": lambda node: f"{_said(node, 'chr', '∫')}{_scripts(node)} {_part(node, 'e')}",
    "sPre": lambda node: f"{GAP}{_scripts(node)}{_part(node, 'e')}{GAP}",
    **dict.fromkeys(("sSup", "sSub", "sSubSup"), _behind_base),
    "rad": lambda node: f"{_part(node, 'deg')}√({_part(node, 'e')})",
    "d": _delimited,
    "mr": lambda node: f"; {', '.join(map(_formula, node))}",
}


def _said(node: Any, name: str, default: str) -> str:
    """A sign that the properties of a part of a formula say."""
    properties = next((one for one in node if _kind(one).endswith("Pr")), ())
    signs = (value for one in properties if _kind(one) == name for value in one.attrib.values())
    return next(signs, default)
