"""HTML: the text that a page shows, in lines as a browser breaks them."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_documents.text import FileText, cleaned, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

_HTML_BYTES: Final = 10_000_000  # half a minute
# Elements that are opened again in every paragraph until they are closed: 15 kB of them can make a
# million.  Text is the same without.
_FORMATTING: Final = re.compile(
    r"<(/?)(?:(s|strike)|a|b|big|code|em|font|i|nobr|small|strong|tt|u)(?=[\s/>])", re.IGNORECASE
)
_NO_TAG: Final = re.compile(r"<(?![a-z/!?])", re.IGNORECASE)
_NEXT_LINK: Final = re.compile(r"</a\s*>(?=<a[\s>])", re.IGNORECASE)
_UNSEEN: Final = (
    *("annotation", "annotation-xml", "datalist", "head", "noscript", "rp", "script", "style"),
    "template",
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
GAP: Final = chr(0xFDE0)
"""A space where two words or figures would touch, and nothing elsewhere."""
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

    markup = _NEXT_LINK.sub(f"</a>{GAP}", _NO_TAG.sub("&lt;", markup))
    renamed = _FORMATTING.sub(lambda found: f"<{found[1]}{'del' if found[2] else 'span'}", markup)
    pieces = _Pieces(by_mammoth=by_mammoth)
    text = "".join(pieces.walk(JustHTML(renamed, sanitize=False).root))
    text = re.sub(rf"(?<=[\w)]){GAP}+(?=[\w(])", " ", text).replace(GAP, "")
    text = re.sub(r" *\n[ \n]*", "\n", re.sub(r" {2,}", " ", text))
    text = re.sub(rf" +(?={_SPACE})|(?<={_SPACE}) +", "", text)
    text = re.sub(rf"{_ITEM}[ \n{_PARAGRAPH}{_BREAK}]*", " ", text)
    text = re.sub(rf"[ \n]*{_PARAGRAPH}[ \n{_PARAGRAPH}]*", "\n\n", text)
    text = re.sub(rf" *{_BREAK} *", "\n", text).replace(_SPACE, " ").replace(_TAB, "\t")
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n")))
    choices = tuple(f"other choices of {one}" for one in counted(pieces.choices, "list"))
    return FileText(
        cleaned(text).strip("\n").rstrip(), (*counted(pieces.pictures, "picture"), *choices)
    )


class _Pieces:
    """The text of a page's nodes in their order, with what stands around each of them."""

    def __init__(self, *, by_mammoth: bool) -> None:
        self.pictures = self.choices = 0
        self._by_mammoth = by_mammoth

    def walk(self, root: Any) -> Iterator[str]:
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
                parts = self._parts(node, laying) if node.name not in _PICTURES else [GAP]
                inside = as_written and not in_cell, in_cell or is_cell
                stack += [(part, *inside) for part in reversed(parts)]

    def _parts(self, node: Any, laying: Collection[int]) -> list[Any]:
        """What a node shows: nodes inside of it, and texts around them."""
        name, inside = node.name, node.children
        if node.namespace == "math":
            return _formula_parts(node)
        place = _RAISED_STYLE.search(node.attrs.get("style") or "") if name == "span" else None
        if name in ("sub", "sup") or place:
            return _raised_or_lowered(node, place[1].lower() if place else name)
        if name == "table" and id(node) not in laying:
            inside = _with_spans(node)
        elif name == "select" and "multiple" not in node.attrs:
            self.choices += 1
            inside = _chosen(node)
        elif name == "ol" and (not self._by_mammoth or _is_of_notes(node)):
            inside = _with_numbers(node)
        elif name in _INSIDE:
            inside = _INSIDE[name](node)
        before, after = _AROUND.get(name, ("", ""))
        if name in ("ol", "ul"):
            is_inner = node.parent is not None and node.parent.name == "li"
            before = after = "\n" if is_inner else _PARAGRAPH
        elif name in ("td", "th") and id(node) in laying:
            before = after = "\n"
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
_MARKS: Final = {"checkbox": ("☐", "☑"), "radio": ("○", "◉")}
_RAISED_STYLE: Final = re.compile(r"vertical-align\s*:\s*(sub|sup)(?:er)?\b", re.IGNORECASE)
_PLAIN_LIST: Final = re.compile(r"list-style(?:-type)?\s*:(?!\s*decimal)", re.IGNORECASE)


def _labels(node: Any) -> list[Any]:
    """The words in a picture of lines."""
    texts = [one for one in _descendants(node, within=_NO_LABEL) if one.name == "text"]
    return [part for one in texts for part in ("\n", one, "\n")]


def _value(node: Any) -> list[Any]:
    """What a field of a form shows."""
    kind = (node.attrs.get("type") or "text").lower()
    if kind in _MARKS:
        return [_MARKS[kind]["checked" in node.attrs]]
    return [node.attrs.get("value") or ""] if kind in _SHOWN_INPUTS else []


_NO_LABEL: Final = ("clipPath", "defs", "desc", "marker", "mask", "pattern", "symbol", "text")
_INSIDE: Final[dict[str, Callable[[Any], list[Any]]]] = {
    "input": _value,
    "svg": _labels,
    "template": lambda node: node.template_content.children,  # the shadow of what is around it
}


def _is_unseen(node: Any) -> bool:
    attributes = node.attrs or {}
    return (
        (node.name in _UNSEEN and "shadowrootmode" not in attributes)
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


def _is_of_notes(node: Any) -> bool:
    """Whether these are a Word file's notes, by mammoth."""
    ids = (str((child.attrs or {}).get("id")) for child in node.children)
    return any(one.startswith(("footnote-", "endnote-")) for one in ids)


def _chosen(node: Any) -> list[Any]:
    """What a list of choices shows while it is closed."""
    options = [one for one in _descendants(node) if one.name == "option"]
    selected = [one for one in options if "selected" in one.attrs]
    return [*(selected[-1:] or options[:1])[0].children] if options else []


def _descendants(node: Any, *, within: Collection[str] = ()) -> Iterator[Any]:
    """Elements inside of one, in their order; not inside of those of some names."""
    stack = [node]
    while stack:
        one = stack.pop()
        if one is not node:
            yield one
        if one is node or one.name not in within:
            stack += reversed([child for child in one.children or () if child.name[0] != "#"])


def _with_spans(table: Any) -> list[Any]:
    """What is in a table, its rows as lines of cells; one over several rows stands in each."""
    found: list[Any] = []
    spans: dict[int, tuple[int, Any]] = {}  # by column: rows to come, and what stands there
    for part in _descendants(table, within=("tr", "caption")):
        if part.name == "caption":
            found.append(part)
        elif part.name == "tr":
            line = _cells(part, spans)
            found += ["\n", *_joined(line, " | "), "\n"]
    return found


def _cells(row: Any, spans: dict[int, tuple[int, Any]]) -> list[Any]:
    line: list[Any] = []
    for cell in (child for child in row.children if child.name in ("td", "th")):
        _carry(line, spans)
        rows, columns = (_integer(cell.attrs.get(name), 1) for name in ("rowspan", "colspan"))
        text = _short_text(cell) or ""
        again = text if len(text) <= _SAID_AGAIN else ""
        for shown in [cell, *[""] * (min(columns, _COLUMNS) - 1)]:
            if rows > 1 and len(line) < _COLUMNS:
                spans[len(line)] = (rows - 1, again if shown else "")
            line.append(shown)
    _carry(line, spans)
    while line and line[-1] == "":
        line.pop()
    return line


def _carry(line: list[Any], spans: dict[int, tuple[int, Any]]) -> None:
    """Add the cells of rows before that reach into this one here."""
    while (place := len(line)) in spans:
        rows, shown = spans.pop(place)
        if rows > 1:
            spans[place] = (rows - 1, shown)
        line.append(shown)


_COLUMNS: Final = 50  # that cells may reach over, or down in
_SAID_AGAIN: Final = 100  # letters of a cell at most, in each row that it reaches into


def _joined(parts: Sequence[Any], text: str) -> list[Any]:
    return [piece for part in parts for piece in (text, part)][1:]


def _with_numbers(node: Any) -> list[Any]:
    """A list whose items have the numbers that are shown before them, unless these are letters."""
    is_plain = _PLAIN_LIST.search(node.attrs.get("style") or "")
    if node.attrs.get("type") not in (None, "1") or is_plain:
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


def raised(text: str, *, is_low: bool = False) -> str | None:
    """Small letters of a text, raised or lowered; None where some have none."""
    letters = _LOWERED if is_low else _RAISED
    has_all = text and all(ord(letter) in letters for letter in text)
    return text.translate(letters) if has_all else None


def _raised_or_lowered(node: Any, name: str) -> list[Any]:
    """Figures as small letters: 10³ is not 103."""
    sign, text = "^" if name == "sup" else "_", _short_text(node)
    small = raised(text or "", is_low=name == "sub")
    if small is not None:
        return [small]
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
        return [*([GAP] if node.name == "mfrac" else []), *found, GAP]
    if node.name == "mmultiscripts" and inside:
        names = [child.name for child in inside]
        behind = names.index("mprescripts") if "mprescripts" in names else len(inside)
        after, before = inside[1:behind], inside[behind + 1 :]
        return [GAP, *_scripts(before), inside[0], *_scripts(after), GAP]
    if node.name == "mtext":
        return [GAP, *node.children, GAP]
    if node.name == "msqrt":
        return ["√(", *node.children, ")"]
    if node.name == "mroot" and len(inside) == 2:
        return [inside[1], "√(", inside[0], ")"]
    if node.name == "mfenced":
        return ["(", *_joined(inside, ", "), ")"]
    if node.name in ("mtr", "mlabeledtr"):
        return ["\n", *_joined(inside, " | "), "\n"]
    return list(node.children)


def _scripts(nodes: Sequence[Any]) -> list[Any]:
    """Of pairs, below and above, those that are there."""
    signs = zip(nodes, "_^" * len(nodes), strict=False)
    found = [[sign, *_in_brackets(one)] for one, sign in signs if one.children]
    return [part for one in found for part in one]


def _in_brackets(node: Any) -> list[Any]:
    text = _short_text(node)
    return [node] if text is not None and grouped(text) == text else ["(", node, ")"]


def grouped(text: str) -> str:
    """In brackets where it has parts."""
    return text if len(text) < 2 or text.isalnum() else f"({text})"
