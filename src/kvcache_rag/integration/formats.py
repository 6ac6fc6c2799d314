"""What each kind of file says: text as people see it, and what of it could not be put into words.

HTML is parsed by JustHTML, as browsers do; Word becomes HTML by mammoth first; PDF is read by
pypdf, front matter by PyYAML.  They are libraries of the extra `documents`, imported when a file
needs them.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
import time
import warnings
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree  # files that declare entities are refused

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence


@dataclass(frozen=True)
class FileText:
    """What a file says.

    Attributes:
        text: As it is shown.
        without: What it has besides and is not in the text, for people: "2 pictures".
        metadata: What is said about the file in it, by name.
        digest: SHA-256 of the file, in hexadecimal digits; "" where it is not known.
    """

    text: str
    without: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""


def _counted(count: int, name: str) -> tuple[str, ...]:
    return (f"{count} {name}{'s' * (count != 1)}",) if count else ()


# ---------------------------------------------------------------------- text
_CONTROLS: Final = {
    **dict.fromkeys((*range(0x20), *range(0x7F, 0xA0), 0xAD)),  # with the soft hyphen
    **{ord(letter): letter for letter in "\t\n"},
    **dict.fromkeys(map(ord, "\r\v\f\x85"), "\n"),
    **dict.fromkeys(range(0x1C, 0x20), " "),
}


def cleaned(text: str) -> str:
    """Without control characters, that nobody sees; halves of surrogate pairs become "?"."""
    return text.replace("\r\n", "\n").encode(errors="replace").decode().translate(_CONTROLS)


def plain(data: bytes) -> FileText:
    """Text in UTF-8."""
    try:
        return FileText(cleaned(data.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        raise InvalidInputError("it is not UTF-8 text; save it as UTF-8") from error


# ---------------------------------------------------------------------- Markdown
_FRONT_MATTER: Final = re.compile(
    r"---[ \t]*\n((?:[^\n]*\S[^\n]*\n)+?)(?:---|\.\.\.)[ \t]*(?:\n|\Z)"
)


def markdown(data: bytes) -> FileText:
    """As it is; front matter is a title, sentences that stay, and metadata.

    Front matter is one block of lines, none of them blank, that is a YAML mapping; what only looks
    like it stays text.
    """
    whole = plain(data).text
    found = _FRONT_MATTER.match(whole)
    fields = _yaml_mapping(found[1]) if found else None
    if found is None or fields is None:
        return FileText(whole)
    body = whole[found.end() :].lstrip("\n")
    title = _listed(fields["title"]) if "title" in fields else ""
    heading = [f"# {title}"] if title and not body.startswith("# ") else []
    said = [value for name, value in fields.items() if name != "title" and _is_sentence(value)]
    metadata = {
        name: _listed(value)
        for name, value in fields.items()
        if name == "title" or not _is_sentence(value)
    }
    text = "\n\n".join([*heading, *said, *([body] if body else [])])
    return FileText(text, metadata=metadata)


def _yaml_mapping(text: str) -> dict[str, Any] | None:
    """A YAML mapping; None if it is none."""
    import yaml  # type: ignore[import-untyped]  # has no types

    try:
        # Of aliases a few lines can make a billion.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.BaseLoader)):
            return None
        node = yaml.compose(text, yaml.BaseLoader)
        found = yaml.load(text, yaml.BaseLoader)  # it makes texts alone
    except (yaml.YAMLError, RecursionError, TypeError):  # a name may be a list
        return None
    is_whole = isinstance(found, dict) and len(found) == len(node.value)  # no name is there twice
    return found if is_whole and all(isinstance(name, str) for name in found) else None


def _is_sentence(value: Any) -> bool:
    """Whether a value says something rather than labels: words that end as a sentence does."""
    if not isinstance(value, str):
        return False
    text = value.strip()
    return len(text.split()) > 2 and text.endswith((".", "!", "?", "。", "！", "？"))  # noqa: RUF001


def _listed(value: Any) -> str:
    """A value of YAML as one line."""
    if isinstance(value, list):
        return ", ".join(map(_listed, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_listed(one)}" for name, one in value.items())
    return " ".join(str(value).split())


# ---------------------------------------------------------------------- HTML
_HTML_BYTES: Final = 20_000_000  # a minute
# Elements that are opened again in every paragraph until they are closed: 15 kB of them can make a
# million.  Text is the same without.
_FORMATTING: Final = re.compile(
    r"<(/?)(?:(s|strike)|a|b|big|code|em|font|i|nobr|small|strong|tt|u)(?=[\s/>])", re.IGNORECASE
)
_UNSEEN: Final = (
    *("annotation", "annotation-xml", "datalist", "head", "noscript", "rp", "script", "style"),
    *("svg", "template"),
)
_UNSEEN_STYLE: Final = re.compile(
    r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)|"
    r"(?:opacity|font-size)\s*:\s*(?:0*\.)?0+[a-z%]*\s*(?:!|;|$))",
    re.IGNORECASE,
)
_SHOWN_INPUTS: Final = (
    *("button", "date", "email", "month", "number", "reset", "search", "submit", "tel", "text"),
    *("time", "url", "week"),
)
_PICTURES: Final = ("canvas", "embed", "img", "object", "video")
_HEADINGS: Final = ("h1", "h2", "h3", "h4", "h5", "h6")
_PARAGRAPHS: Final = (
    *_HEADINGS,
    *("blockquote", "dl", "fieldset", "figure", "hr", "ol", "p", "pre", "table", "ul"),
)
_LINES: Final = (
    *("address", "article", "aside", "body", "caption", "center", "dd", "details", "dialog"),
    *("dir", "div", "dt", "figcaption", "footer", "form", "header", "hgroup", "html", "legend"),
    *("li", "listing", "main", "menu", "nav", "optgroup", "option", "search", "section"),
    *("summary", "tr", "xmp"),
)
_BESIDE: Final = ("button", "input", "meter", "progress", "select", "textarea")
_AS_WRITTEN: Final = ("listing", "plaintext", "pre", "textarea", "xmp")
_RAISED: Final = str.maketrans("0123456789+-\u2212=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ")
_LOWERED: Final = str.maketrans("0123456789+-\u2212=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
# White space that is meant, among what only parts words; characters that no text has.
_PARAGRAPH, _BREAK, _ITEM, _SPACE, _TAB = map(chr, range(0xFDD0, 0xFDD5))
_MEANT: Final = str.maketrans({" ": _SPACE, "\n": _BREAK, "\t": _TAB})


def html(data: bytes) -> FileText:
    """What a page shows, menus too, in lines as a browser breaks them.

    Raises:
        InvalidInputError: If it is too long.
    """
    if len(data) > _HTML_BYTES:
        raise InvalidInputError(
            f"it has more than {_HTML_BYTES // 1_000_000} MB; save it in parts, or as text"
        )
    return rendered(_decoded(data))


def _decoded(data: bytes) -> str:
    """UTF-8 where it can be that, whatever a page declares; else what it declares, or Western."""
    with suppress(UnicodeDecodeError):
        if b"\x1b$" not in data:  # Japanese in ASCII
            return data.decode("utf-8-sig")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    declared = _DECLARED.search(data[:_DECLARED_WITHIN])
    with suppress(LookupError):
        name = codecs.lookup(declared[1].decode("ascii")).name if declared else _WESTERN
        if _OF_PAGES.fullmatch(name):
            return data.decode(_WIDER.get(name, name), "replace")
    return data.decode(_WESTERN, "replace")


_DECLARED: Final = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_DECLARED_WITHIN: Final = 4096
_WESTERN: Final = "cp1252"
_OF_PAGES: Final = re.compile(
    r"cp\d+|iso8859-\d+|koi8-[ru]|gb\w+|big5\w*|shift_jis|euc_\w+|iso2022_jp|mac-\w+|tis-620"
)
# Browsers take these for what has more letters: https://encoding.spec.whatwg.org/#names-and-labels
_WIDER: Final = {
    "iso8859-1": _WESTERN,
    "iso8859-9": "cp1254",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}


def rendered(markup: str, *, by_mammoth: bool = False) -> FileText:
    """The text of HTML, and how many pictures are in it.

    Args:
        markup: A page.
        by_mammoth: Whether its white space is meant, and where lists begin is not known.
    """
    from justhtml import JustHTML

    renamed = _FORMATTING.sub(lambda found: f"<{found[1]}{'del' if found[2] else 'span'}", markup)
    pieces = _Pieces(by_mammoth=by_mammoth)
    text = "".join(pieces.of(JustHTML(renamed, sanitize=False).root))
    text = re.sub(r" *\n[ \n]*", "\n", re.sub(r" {2,}", " ", text))
    text = re.sub(rf"{_ITEM}[ \n{_PARAGRAPH}{_BREAK}]*", " ", text)
    text = re.sub(rf"[ \n]*{_PARAGRAPH}[ \n{_PARAGRAPH}]*", "\n\n", text)
    text = re.sub(rf" *{_BREAK} *", "\n", text).replace(_SPACE, " ").replace(_TAB, "\t")
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text))
    return FileText(cleaned(text).strip("\n").rstrip(), _counted(pieces.pictures, "picture"))


class _Pieces:
    """The text of a page's nodes in their order, with what stands around each of them."""

    def __init__(self, *, by_mammoth: bool) -> None:
        self.pictures = 0
        self._by_mammoth = by_mammoth

    def of(self, root: Any) -> Iterator[str]:
        """Without recursion: tags may be nested as deep as a file is long."""
        laying = _laying_out(root)
        stack: list[tuple[Any, bool, bool]] = [(root, self._by_mammoth, False)]
        while stack:
            node, as_written, in_cell = stack.pop()
            if isinstance(node, str):
                yield re.sub(rf"[\n{_PARAGRAPH}{_BREAK}]+", " ", node) if in_cell else node
            elif node.name == "#text":
                text = re.sub(r"[\ufdd0-\ufdd4]", "", node.data or "")
                yield text.translate(_MEANT) if as_written else re.sub(r"\s+", " ", text)
            elif node.children is not None and not _is_unseen(node):
                self.pictures += node.name in _PICTURES
                as_written = as_written or node.name in _AS_WRITTEN
                is_cell = node.name in ("td", "th") and id(node) not in laying
                parts = self._parts(node, laying)
                inside = as_written and not in_cell, in_cell or is_cell
                stack += [(part, *inside) for part in reversed(parts)]

    def _parts(self, node: Any, laying: Collection[int]) -> list[Any]:
        """What a node shows: nodes inside of it, and texts around them."""
        name, inside = node.name, node.children
        if node.namespace == "math":
            return _formula_parts(node)
        if name in ("sub", "sup"):
            return _raised_or_lowered(node)
        if name == "tr":
            is_data = not any(id(child) in laying for child in inside)
            inside = _between(inside, " | ", ("td", "th")) if is_data else inside
        elif name == "ol" and (not self._by_mammoth or _is_of_notes(node)):
            inside = _with_numbers(node)
        before, after = _AROUND.get(name, ("", ""))
        if name in ("ol", "ul"):
            is_inner = node.parent is not None and node.parent.name == "li"
            before = after = "\n" if is_inner else _PARAGRAPH
        elif name in ("td", "th") and id(node) in laying:
            before = after = "\n"
        elif name == "input":
            kind = (node.attrs.get("type") or "text").lower()
            inside = [node.attrs.get("value") or ""] if kind in _SHOWN_INPUTS else []
        return [before, *inside, after]


_AROUND: Final = {
    **dict.fromkeys(_LINES, ("\n", "\n")),
    **dict.fromkeys(_PARAGRAPHS, (_PARAGRAPH, _PARAGRAPH)),
    **dict.fromkeys(_BESIDE, (" ", " ")),
    "br": (_BREAK, ""),
    "del": ("~~", "~~"),
    "q": ("\u201c", "\u201d"),
    "rt": ("(", ")"),
}


def _is_unseen(node: Any) -> bool:
    attributes = node.attrs or {}
    return (
        node.name in _UNSEEN
        or "hidden" in attributes
        or (node.name == "dialog" and "open" not in attributes)
        or "katex-html" in (attributes.get("class") or "")  # a formula that is there as MathML
        or _UNSEEN_STYLE.search(attributes.get("style") or "") is not None
    )


def _laying_out(root: Any) -> set[int]:
    """Ids of tables, and of their cells, that lay out a page: tables or headings are in them."""
    found: set[int] = set()
    cells: list[tuple[int, int]] = []
    stack: list[tuple[Any, int | None]] = [(root, None)]
    while stack:
        node, table = stack.pop()
        if table is not None and (node.name == "table" or node.name in _HEADINGS):
            found.add(table)
        if table is not None and node.name in ("td", "th"):
            cells.append((id(node), table))
        inner = id(node) if node.name == "table" else table
        stack += [(child, inner) for child in node.children or ()]
    return found | {cell for cell, table in cells if table in found}


def _between(nodes: Sequence[Any], text: str, names: Collection[str] = ()) -> list[Any]:
    """Nodes with a text between two of these names, or any."""
    found: list[Any] = []
    is_first = True
    for node in nodes:
        if node.name in names or (not names and node.name[0] != "#"):
            found += [] if is_first else [text]
            is_first = False
        found.append(node)
    return found


def _is_of_notes(node: Any) -> bool:
    """Whether these are a Word file's notes, by mammoth."""
    ids = (str((child.attrs or {}).get("id")) for child in node.children)
    return any(one.startswith(("footnote-", "endnote-")) for one in ids)


def _with_numbers(node: Any) -> list[Any]:
    """A list whose items have the numbers that are shown before them, unless these are letters."""
    if node.attrs.get("type") not in (None, "1"):
        return list(node.children)
    items = sum(child.name == "li" for child in node.children)
    is_reversed = "reversed" in node.attrs
    number = _integer(node.attrs.get("start"), items if is_reversed else 1)
    found: list[Any] = []
    for child in node.children:
        if child.name == "li":
            number = _integer(child.attrs.get("value"), number)
            found.append(f"\n{number}.{_ITEM}")
            number += -1 if is_reversed else 1
        found.append(child)
    return found


def _integer(text: str | None, default: int) -> int:
    found = re.match(r"\s*([+-]?\d{1,9})", text or "", re.ASCII)
    return int(found[1]) if found else default


def _raised_or_lowered(node: Any) -> list[Any]:
    """Figures as small letters: 10³ is not 103."""
    letters, sign = (_RAISED, "^") if node.name == "sup" else (_LOWERED, "_")
    text = _short_text(node)
    if text and all(ord(letter) in letters for letter in text):
        return [text.translate(letters)]
    if text and any(letter.isdigit() for letter in text) and text[0] not in "[(":
        return [f"{sign}(", *node.children, ")"]
    return list(node.children)


def _short_text(node: Any) -> str | None:
    """The text of a few nodes; None of more."""
    texts: list[str] = []
    stack = [node]
    for _ in range(_FEW_NODES):
        if not stack:
            return "".join(texts).strip()
        one = stack.pop()
        texts.append(one.data or "" if one.name == "#text" else "")
        stack += reversed(one.children or ())
    return None


_FEW_NODES: Final = 12
_JOINTS: Final = {
    "mfrac": ("/",),
    **dict.fromkeys(("msup", "mover"), ("^",)),
    **dict.fromkeys(("msub", "munder"), ("_",)),
    **dict.fromkeys(("msubsup", "munderover"), ("_", "^")),
}


def _formula_parts(node: Any) -> list[Any]:
    """MathML in a line, as `_formula` of Word."""
    inside = [child for child in node.children if child.name[0] != "#"]
    joints = _JOINTS.get(node.name)
    if joints is not None and len(inside) == len(joints) + 1:
        found = _in_brackets(inside[0])
        for joint, child in zip(joints, inside[1:], strict=True):
            found += [joint, *_in_brackets(child)]
        return found
    if node.name == "msqrt":
        return ["√(", *node.children, ")"]
    if node.name == "mroot" and len(inside) == 2:
        return [inside[1], "√(", inside[0], ")"]
    if node.name == "mfenced":
        return ["(", *_between(node.children, ", "), ")"]
    if node.name in ("mtr", "mlabeledtr"):
        return ["\n", *_between(node.children, " | ", ("mtd",)), "\n"]
    return list(node.children)


def _in_brackets(node: Any) -> list[Any]:
    text = _short_text(node)
    return [node] if text is not None and _grouped(text) == text else ["(", node, ")"]


# ---------------------------------------------------------------------- Word
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
    with _silent("mammoth"):
        markup = mammoth.convert_to_html(
            io.BytesIO(prepared), convert_image=mammoth.images.img_element(lambda _: {"src": ""})
        ).value
    # Marks that lead back from a note to its place.
    found = rendered(re.sub(r'<a href="#[^"]*">\u2191</a>', "", markup), by_mammoth=True)
    lists = _counted(len(re.findall("<ol>(?!<li id=)", markup)), "list")
    numbers = tuple(f"the numbers of {text}" for text in lists)
    return FileText(found.text, (*_counted(pictures, "picture"), *numbers))


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
        return f"{_grouped(part('num'))}/{_grouped(part('den'))}"
    if kind in ("nary", "sSup", "sSub", "sSubSup"):
        low, high = part("sub"), part("sup")
        raised = (f"_{_grouped(low)}" if low else "") + (f"^{_grouped(high)}" if high else "")
        if kind == "nary":
            return f"{_sign(node)}{raised} {part('e')}"
        return f"{_grouped(part('e'))}{raised}"
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


def _grouped(text: str) -> str:
    return text if len(text) < 2 or text.isalnum() else f"({text})"


# ---------------------------------------------------------------------- PDF
# A page takes hundredths of a second; one of forms within forms takes what pypdf gives it at most.
PDF_SECONDS: Final = 30.0  # and as many for each megabyte


def pdf(data: bytes) -> FileText:
    """All pages, a blank line between two."""
    texts, pictures = [], 0
    for page in _pages(data):
        with _silent("pypdf"):
            pictures += _pictures(page)
            texts.append(_page_text(page))
    return FileText(cleaned("\n\n".join(texts)).strip(), _counted(pictures, "picture"))


def pdf_pages(data: bytes) -> Iterator[str]:
    """The text of each page of a PDF, with what was filled in, read when it is asked for.

    Raises:
        InvalidInputError: If it is encrypted, or takes far longer than files of its size do.
        Exception: Whatever pypdf meets in a damaged file.
    """
    for page in _pages(data):
        with _silent("pypdf"):
            text = _page_text(page)
        yield text


def _page_text(page: Any) -> str:
    text = page.extract_text().strip()
    return "\n".join([*([text] if text else []), *_filled_in(page)])


def _filled_in(page: Any) -> Iterator[str]:
    """What was written on a page; fields as `name: value`, by the name that a person sees."""
    for reference in page.get("/Annots") or ():
        annotation = reference.get_object()
        if int(annotation.get("/F", 0)) & _HIDDEN:
            continue
        if annotation.get("/Subtype") == "/FreeText" and annotation.get("/Contents"):
            yield _shown(annotation["/Contents"])
        if annotation.get("/Subtype") != "/Widget":
            continue
        kind, flags = _inherited(annotation, "/FT"), int(_inherited(annotation, "/Ff") or 0)
        value = _inherited(annotation, "/V")
        if kind == "/Btn":
            # A box or one of several buttons: it shows its own state, not the field's.
            state = annotation.get("/AS", value)
            if flags & _PUSHED or state in (None, "/Off"):
                continue
            shown = str(state).lstrip("/")
        elif kind in ("/Tx", "/Ch") and not (kind == "/Tx" and flags & _PASSWORD):
            several = value if isinstance(value, list) else [value]
            shown = ", ".join(_shown(one) for one in several if one is not None)
        else:
            continue
        if shown.strip():
            name = _inherited(annotation, "/TU") or _full_name(annotation)
            yield f"{name}: {shown}" if name else shown


# Flags of annotations and fields, by ISO 32000-1, tables 165, 226 and 228.
_HIDDEN: Final = 0b100010  # hidden, or not to be viewed
_PUSHED: Final = 1 << 16
_PASSWORD: Final = 1 << 13


def _shown(value: Any) -> str:
    """A value as text; of long ones a stream holds it."""
    value = value.get_object()
    data = getattr(value, "get_data", None)
    return data().decode(errors="replace") if data else str(value)


def _inherited(field_: Any, key: str) -> Any:
    """An entry of a field, or of those above it."""
    for _ in range(_FIELD_LEVELS):
        if key in field_:
            return field_[key]
        if "/Parent" not in field_:
            break
        field_ = field_["/Parent"].get_object()
    return None


_FIELD_LEVELS: Final = 32


def _full_name(field_: Any) -> str:
    names = []
    for _ in range(_FIELD_LEVELS):
        if "/T" in field_:
            names.append(str(field_["/T"]))
        if "/Parent" not in field_:
            break
        field_ = field_["/Parent"].get_object()
    return ".".join(reversed(names))


def _pictures(page: Any) -> int:
    """How many pictures a page has, none of them looked at."""
    resources = page.get("/Resources")
    shown = resources.get_object().get("/XObject") if resources is not None else None
    if shown is None:
        return 0
    kinds = (one.get_object().get("/Subtype") for one in shown.get_object().values())
    return sum(kind == "/Image" for kind in kinds)


def _pages(data: bytes) -> Iterator[Any]:
    from pypdf import PasswordType, PdfReader

    end = time.monotonic() + PDF_SECONDS * (1 + len(data) / 1e6)
    with _silent("pypdf"):
        document = PdfReader(io.BytesIO(data))
        # Many are encrypted without a password, only to forbid printing.
        if document.is_encrypted and document.decrypt("") == PasswordType.NOT_DECRYPTED:
            raise InvalidInputError("it is encrypted; save a copy without its password")
        pages = document.pages
    for number in range(len(pages)):
        if time.monotonic() > end:
            raise InvalidInputError(
                f"its first {number} pages took longer than files of its size do; print it to a "
                "new PDF"
            )
        yield pages[number]


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Keep a library from writing about each small fault of a file."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
