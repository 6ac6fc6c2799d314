"""What each kind of file says is what people see; the cases are those in which figures change."""

from __future__ import annotations

from typing import Any

import pytest
from documents import docx, filled_form, pdf, run

from kvcache_rag_documents import FileText, read_file

TABLE = "<tr><td>Mobrit<td>412<tr><td>Gleis<td>9"


def cases(table: dict[str, tuple[Any, Any]]) -> pytest.MarkDecorator:
    """A test for each row of a table: by its name what is read, and what it says."""
    return pytest.mark.parametrize(("data", "text"), table.values(), ids=table)


def _page(markup: str) -> str:
    return read_file("a.html", markup.encode()).text


HTML = {
    # ---------------------------------------------- lines, as an HTML5 parser has them
    "open-cells": (f"<table>{TABLE}</table>", "Mobrit | 412\nGleis | 9"),
    "open": (f"<p>Prices:<table>{TABLE}", "Prices:\n\nMobrit | 412\nGleis | 9"),
    "open-sections": (
        "<table><thead><tr><th>A<th>B<tfoot><tr><td>1<td>2<tbody><tr><td>3<td>4</table>",
        "A | B\n1 | 2\n3 | 4",
    ),
    "open-items": ("<ul><li>412<li>7</ul>", "412\n7"),
    "dl": ("<dl><dt>Price<dd>412<dt>Seats<dd>7</dl>", "Price\n412\nSeats\n7"),
    "open-paragraphs": ("<p>412<p>7", "412\n\n7"),
    "breaks": ("412<br>7<br/>8</br>9", "412\n7\n8\n9"),
    "rule": ("412<hr>7", "412\n\n7"),
    "options": ("<select><option>412<option>7</select>", "412"),
    "summary": ("<details><summary>A price?</summary>412 euros.</details>", "A price?\n412 euros."),
    **{
        f"<{name}>": (f"41<{name}>2</{name}>7", "41\n2\n7")
        for name in (
            *("address", "article", "aside", "center", "details", "div", "dd", "dt", "footer"),
            *("form", "header", "hgroup", "legend", "main", "menu", "nav", "search", "section"),
            *("figcaption", "summary", "dir", "li", "dialog open"),
        )
    },
    **{
        f"<{name}>": (f"41<{name}>2</{name}>7", "41\n\n2\n\n7")
        for name in ("blockquote", "fieldset", "figure", "h1", "h6", "p", "pre")
    },
    **{
        f"<{name}>": (f"41<{name}>2</{name}>7", "4127")
        for name in ("a", "b", "code", "em", "font", "i", "span", "time", "u", "custom-name")
    },
    "buttons": ("41<button>2</button><button>7</button>", "41 2 7"),
    "textarea": ("<textarea>a\n b</textarea>", "a\n b"),
    "inputs": ("<input value=412><input value=7>", "412 7"),
    "wbr": ("41<wbr>2", "412"),
    "caption": ("<table><caption>Prices</caption><tr><td>412</table>", "Prices\n412"),
    "paragraphs-in-a-cell": (
        "<table><tr><td>Mobrit<p>the red one</p><br>new<td>412</table>",
        "Mobrit the red one new | 412",
    ),
    "table-that-lays-out": (
        f"<table><tr><td><h1>Menu</h1><td>x<table>{TABLE}</table></table>",
        "Menu\n\nx\n\nMobrit | 412\nGleis | 9",
    ),
    "pre": ("<pre>  a\n\n    b</pre>", "  a\n\n    b"),
    "spaces": ("<p>in \n  <b> bold</b>  text </p>", "in bold text"),
    "other-spaces": ("a&nbsp;b&ensp;c", "a b c"),
    # ---------------------------------------------- numbers that people see
    "ol": ("<ol><li>a<li>b</ol>", "1. a\n2. b"),
    "start": ("<ol start=5><li>a<li value=9>b<li>c</ol>", "5. a\n9. b\n10. c"),
    "reversed": ("<ol reversed><li>a<li>b</ol>", "2. a\n1. b"),
    "letters-are-not-made-up": ("<ol type=a><li>a<li>b</ol>", "a\nb"),
    "ol-of-paragraphs": ("<ol><li><p>a</p><li><p>b</p></ol>", "1. a\n\n2. b"),
    "inner-ol": ("<ol><li>a<ol><li>b</ol><li>c</ol>", "1. a\n1. b\n2. c"),
    "start-of-digits": ("<ol start=-1e9><li>a</ol>", "-1. a"),
    # ---------------------------------------------- raised, lowered, struck, quoted
    "sup": ("10<sup>3</sup> m<sup>2</sup>", "10³ m²"),
    "sup-minus": ("10<sup>&minus;3</sup>", "10⁻³"),
    "sub": ("H<sub>2</sub>O", "H₂O"),
    "sup-decimal": ("10<sup>1.5</sup>", "10^(1.5)"),
    "sup-of-tags": ("10<sup><b><i>3</i></b></sup>", "10³"),
    "sup-of-words": ("see<sup>[1]</sup>, 19<sup>th</sup>", "see[1], 19th"),
    "s": ("<s>412</s><del>7</del> <strike>8</strike> 349", "~~412~~~~7~~ ~~8~~ 349"),
    "q": ("<q>412</q>", "\u201c412\u201d"),
    "ruby": ("<ruby>\u6f22<rt>12</rt></ruby>", "\u6f22(12)"),
    "ruby-with-rp": ("<ruby>\u6f22<rp>(<rt>12<rp>)</ruby>", "\u6f22(12)"),
    "raised-by-style": ("10<span style='vertical-align: super'>3</span>", "10³"),
    # ---------------------------------------------- forms
    "selected": ("<select><option>a<option selected>b</select>", "b"),
    "several-choices": ("<select multiple><option>a<option>b</select>", "a\nb"),
    "checked": ("<input type=checkbox checked> a", "☑ a"),
    "not-checked": ("<input type=checkbox>a <input type=radio>b", "☐ a ○ b"),
    # ---------------------------------------------- cells over several rows and columns
    "rowspan": (
        "<table><tr><td rowspan=2>Mobrit<td>6:12<td>1<tr><td>18:40<td>2<tr><td>Elin</table>",
        "Mobrit | 6:12 | 1\nMobrit | 18:40 | 2\nElin",
    ),
    "colspan": (
        "<table><tr><td>a<td rowspan=2>9<tr><td>b<tr><td colspan=2>c<td>d</table>",
        "a | 9\nb | 9\nc | | d",
    ),
    # ---------------------------------------------- what stands in for something unseen
    "fallbacks": ("5<object>no</object><video>no</video>7", "5 7"),
    "shadow": ("<div><template shadowrootmode=open>412</template></div>", "412"),
    "next-links": ("<a href=a>Home</a><a href=b>Prices</a>", "Home Prices"),
    "link-in-a-word": ("dog<a href=a>s</a>", "dogs"),
    "svg": ("a<svg><text>41</text><g><text>7</text></g></svg>b", "a\n41\n7\nb"),
    "less-than": ("2 < 3 <4 <= 5", "2 < 3 <4 <= 5"),
    "plain-list": ("<ol style='list-style: none'><li>a</ol>", "a"),
    # ---------------------------------------------- what nobody sees
    **{
        hidden: (f"<p>a</p>{hidden}<p>b</p>", "a\n\nb")
        for hidden in (
            "<p hidden>x</p>",
            "<p HIDDEN=until-found>x</p>",
            '<p style="display:none">x</p>',
            '<p style="color:red; Display : NONE !important">x</p>',
            '<p style="visibility: hidden">x</p>',
            '<p style="opacity:0">x</p>',
            '<p style="font-size:0px;">x</p>',
            *(f"<{tag}>x</{tag}>" for tag in ("dialog", "template", "script", "style", "noscript")),
            "<svg><title>x</title><defs><text>x</text></defs></svg>",
            "<datalist><option>x</datalist>",
            "<input type=hidden value=x>",
            "<input type=password value=x>",
            "<!-- x -->",
            '<span class="katex-html">x</span>',
            "<div hidden><div><p>x</p></div></div>",
        )
    },
    **{
        shown: (f"<p>a</p>{shown}", "a\n\nx")
        for shown in (
            '<p style="opacity:0.5">x',
            '<p style="font-size:09px">x',
            "<p data-hidden>x",
        )
    },
    "title": ("<title>x</title><p>b", "b"),
    "characters-that-lay-out": ("a\ufdd0b\ufdd4c", "abc"),
}


@cases(HTML)
def test_html(data: str, text: str) -> None:
    assert _page(data) == text


HALF = "<mfrac><mn>1</mn><mn>2</mn></mfrac>"


@cases(
    {
        "mixed": (f"<mn>3</mn>{HALF}", "3 1/2"),
        "msup-and-figure": ("<msup><mi>x</mi><mn>2</mn></msup><mn>3</mn>", "x^2 3"),
        "half-of-x": (f"{HALF}<mi>x</mi>", "1/2 x"),
        "before": (
            "<mmultiscripts><mi>C</mi><mprescripts/><mn>6</mn><mn>14</mn></mmultiscripts>",
            "_6^14C",
        ),
        "only-above": (
            "<mmultiscripts><mi>x</mi><none/><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow>"
            "</mmultiscripts>",
            "x^(a+1)",
        ),
        "mtext": ("<mi>a</mi><mtext>if</mtext><mi>b</mi>", "a if b"),
        "mfrac": (HALF, "1/2"),
        "mfrac-of-a-sum": (
            "<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac>",
            "(a+b)/2",
        ),
        "msup": ("<msup><mn>10</mn><mn>3</mn></msup>", "10^3"),
        "msubsup": ("<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>", "x_1^2"),
        "msqrt": ("<msqrt><mn>16</mn></msqrt>", "√(16)"),
        "mroot": ("<mroot><mn>8</mn><mn>3</mn></mroot>", "3√(8)"),
        "matrix": (
            "<mtable><mtr><mtd>1</mtd><mtd>2</mtd></mtr><mtr><mtd>3</mtd></mtr></mtable>",
            "1 | 2\n3",
        ),
        "annotation": ("<semantics><mn>7</mn><annotation>7</annotation></semantics>", "7"),
    }
)
def test_formulas_of_html(data: str, text: str) -> None:
    assert _page(f"<math>{data}</math>") == text


@cases(
    {
        "utf-8": (
            "4\u200b12 \U0001f469\u200d\U0001f680 €".encode(),
            "4\u200b12 \U0001f469\u200d\U0001f680 €",
        ),
        "mark": ("\ufeff412 €".encode(), "412 €"),
        "latin": (b"<meta charset=latin-1><p>caf\xe9", "café"),
        "undeclared": (b"<p>caf\xe9 \x80412", "café €412"),
        "koi8": (b"<meta charset=koi8-r>" + "цена".encode("koi8-r"), "цена"),
        "utf-16": ("<p>412 €".encode("utf-16"), "412 €"),
        "japanese": (b"<meta charset=iso-2022-jp>" + "漢".encode("iso-2022-jp"), "漢"),
        "declared-wrongly": ("<meta charset=latin-1><p>€".encode(), "€"),
    }
)
def test_encoding_of_html(data: bytes, text: str) -> None:
    assert read_file("a.htm", data).text == text


def test_what_of_html_is_no_text_is_counted() -> None:
    page = (
        b"<p>See <img src=a alt=412> <canvas></canvas><img hidden src=b><select><option>a</select>"
    )
    found = read_file("a.html", page)
    assert (found.text, found.without) == ("See a", ("2 pictures", "other choices of 1 list"))


# ---------------------------------------------------------------------- Word
BOX = (
    "<w:r><mc:AlternateContent><mc:Choice Requires='wps'><w:drawing><wp:inline><a:graphic>"
    "<a:graphicData><wps:wsp><wps:txbx><w:txbxContent><w:p>{0}</w:p></w:txbxContent></wps:txbx>"
    "</wps:wsp></a:graphicData></a:graphic></wp:inline></w:drawing></mc:Choice><mc:Fallback><w:pict>"
    "<v:textbox><w:txbxContent><w:p>{0}</w:p></w:txbxContent></v:textbox></w:pict></mc:Fallback>"
    "</mc:AlternateContent></w:r>"
)
FRACTION = (
    "<m:oMath><m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den>"
    "</m:f><m:r><m:t>=5</m:t></m:r></m:oMath>"
)


@cases(
    {
        "range": (f"{run('2020')}<w:r><w:noBreakHyphen/></w:r>{run('2024')}", "2020-2024"),
        "minus": (
            "<w:r><w:t xml:space='preserve'>It was </w:t><w:noBreakHyphen/><w:t>12</w:t></w:r>",
            "It was -12",
        ),
        "soft-hyphen": ("<w:r><w:t>a</w:t><w:softHyphen/><w:t>b</w:t></w:r>", "ab"),
        "tab": ("<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r>", "a\tb"),
        "ptab": ("<w:r><w:t>a</w:t><w:ptab/><w:t>b</w:t></w:r>", "a\tb"),
        "break": ("<w:r><w:t>a</w:t><w:br/><w:t>b</w:t></w:r>", "a\nb"),
        "cr": ("<w:r><w:t>a</w:t><w:cr/><w:t>b</w:t></w:r>", "a\nb"),
        "boxes": (
            run("Rooms: 1") + BOX.format(run("412 seats")) + BOX.format(run("7 tables")),
            "Rooms: 1\n\n412 seats\n\n7 tables",
        ),
        "inserted": (f"{run('a ')}<w:ins>{run('412')}</w:ins>", "a 412"),
        "deleted": ("<w:del><w:r><w:delText>9</w:delText></w:r></w:del>" + run("412"), "412"),
        "moved": (
            f"<w:moveFrom>{run('Moved.')}</w:moveFrom>{run('Here.')}"
            f"<w:moveTo>{run('Moved.')}</w:moveTo>",
            "Here.Moved.",
        ),
        **{
            around: (f"<w:{around}>{run('412')}</w:{around.split(' ')[0]}>", "412")
            for around in (
                *("fldSimple w:instr='PAGE'", "hyperlink", "smartTag", "customXml"),
                *("dir w:val='rtl'", "bdo w:val='rtl'"),
            )
        },
        "control": (f"<w:sdt><w:sdtContent>{run('412')}</w:sdtContent></w:sdt>", "412"),
        "ruby": (
            f"<w:r><w:ruby><w:rt>{run('kan')}</w:rt><w:rubyBase>{run('12')}</w:rubyBase>"
            "</w:ruby></w:r>",
            "12(kan)",
        ),
        "raised": (run("10") + run("3", "<w:vertAlign w:val='superscript'/>"), "10³"),
        "low": (run("H") + run("2", "<w:vertAlign w:val='subscript'/>") + run("O"), "H₂O"),
        "struck": (run("412", "<w:strike/>") + run(" 349"), "~~412~~ 349"),
        "struck-twice": (run("412", "<w:dstrike/>") + run(" 349"), "~~412~~ 349"),
        "moved-up": (run("m") + run("2", "<w:position w:val='6'/>"), "m²"),
        "hardly-moved": (run("m") + run("2", "<w:position w:val='1'/>"), "m2"),
        "formula-behind-a-figure": (run("3") + FRACTION, "3 (a+b)/2=5"),
        "box-of-newer-programs": (
            f"<w:r><w:drawing><wps:txbx><w:txbxContent><w:p>{run('412')}</w:p></w:txbxContent>"
            "</wps:txbx></w:drawing></w:r>",
            "412",
        ),
        "box-that-is-checked": (
            "<w:sdt><w:sdtPr><w14:checkbox><w14:checked w14:val='1'/></w14:checkbox></w:sdtPr>"
            f"<w:sdtContent>{run('x')}</w:sdtContent></w:sdt>{run(' paid')}",
            "☑ paid",
        ),
        "hidden": (run("hidden", "<w:vanish/>") + run("shown"), "shown"),
        "not-hidden": (run("shown", "<w:vanish w:val='0'/>"), "shown"),
        "formula": (FRACTION, "(a+b)/2=5"),
        "formula-of-its-own": (f"<m:oMathPara>{FRACTION}</m:oMathPara>", "(a+b)/2=5"),
        "symbol": ("<w:r><w:sym w:font='Wingdings' w:char='F0E0'/></w:r>", "\U0001f86a"),
        "footnote": (
            f"{run('412')}<w:r><w:footnoteReference w:id='1'/></w:r>{run(' euros')}",
            "412[1] euros\n\n1. A note.",
        ),
    }
)
def test_word(data: str, text: str) -> None:
    file = docx(body=f"<w:p>{data}</w:p>", notes=["A note."])
    assert read_file("a.docx", file).text == text


def _row(*cells: str) -> str:
    return f"<w:tr>{''.join(f'<w:tc>{cell}</w:tc>' for cell in cells)}</w:tr>"


def _line(text: str) -> str:
    return f"<w:p>{run(text)}</w:p>"


@cases(
    {
        "table": ("", ""),
        "paragraphs-in-a-cell": (
            f"<w:tbl>{_row(_line('Item') + _line('red'), _line('412'))}</w:tbl>",
            "\n\nItem red | 412",
        ),
        "control": (f"<w:sdt><w:sdtContent>{_line('412')}</w:sdtContent></w:sdt>", "\n\n412"),
        "first-letter": (
            "<w:p><w:pPr><w:framePr w:dropCap='drop'/></w:pPr><w:r><w:t>D</w:t></w:r></w:p>"
            f"<w:p><w:pPr/>{run('rop cap')}</w:p>",
            "\n\nDrop cap",
        ),
        "over-two-rows": (
            "<w:tbl>"
            + _row(f"<w:tcPr><w:vMerge w:val='restart'/></w:tcPr>{_line('M')}", _line("6:12"))
            + _row("<w:tcPr><w:vMerge/></w:tcPr><w:p/>", _line("18:40"))
            + "</w:tbl>",
            "\n\nM | 6:12\nM | 18:40",
        ),
        "hyphen-and-formula": (
            f"<w:p><w:r><w:noBreakHyphen/><w:t>12</w:t></w:r>{FRACTION}</w:p>",
            "\n\n-12 (a+b)/2=5",
        ),
    }
)
@pytest.mark.parametrize("strict", [False, True])
def test_blocks_of_word(data: str, text: str, strict: bool) -> None:
    file = docx(["Title", "text"], [["a", "b"], ["c", "d"]], data, strict=strict)
    assert read_file("a.docx", file).text == f"Title\n\ntext\n\na | b\nc | d{text}"


def test_what_of_word_is_no_text_is_counted() -> None:
    picture = "<w:drawing><a:blip/></w:drawing>"
    again = f"<mc:Choice Requires='wps'>{picture}</mc:Choice><mc:Fallback>{picture}</mc:Fallback>"
    drawn = f"<w:r><mc:AlternateContent>{again}</mc:AlternateContent></w:r>"
    texts = (" FORMDROPDOWN ", "REF x")
    field = "".join(f"<w:r><w:instrText>{text}</w:instrText></w:r>" for text in texts)
    data = docx(["a"], body=f"<w:p>{drawn}{field}</w:p>", comments=["b", "c"], header="d")
    assert read_file("a.docx", data).without == (
        *("1 picture", "1 field", "2 comments", "its headers and footers"),
    )


# ---------------------------------------------------------------------- PDF
def _field(kind: str, name: str, value: object, **more: object) -> dict[str, object]:
    return {"/FT": kind, "/T": name, "/V": value, **{f"/{key}": one for key, one in more.items()}}


@cases(
    {
        "text": ([_field("/Tx", "guest", "412")], "guest: 412"),
        "by-its-name-for-people": (
            [_field("/Tx", "guest", "412", TU="Name of the guest")],
            "Name of the guest: 412",
        ),
        "hidden": ([_field("/Tx", "guest", "412", F=2)], ""),
        "password": ([_field("/Tx", "secret", "412", Ff=1 << 13)], ""),
        "empty": ([_field("/Tx", "guest", "")], ""),
        "choice": ([_field("/Ch", "rooms", ["Red", "Blue"])], "rooms: Red, Blue"),
        "boxes": (
            [_field("/Btn", "paid", "/Yes", AS="/Yes"), _field("/Btn", "late", "/Off", AS="/Off")],
            "paid: Yes",
        ),
        "button": ([_field("/Btn", "print", "/Yes", Ff=1 << 16)], ""),
        "inherited": (
            [{"/Parent": _field("/Tx", "guest", "412"), "/T": "name"}],
            "guest.name: 412",
        ),
        "note-on-a-page": ([{"/Subtype": "/FreeText", "/Contents": "412 seats"}], "412 seats"),
    }
)
def test_what_is_filled_in_in_a_pdf(data: list[dict[str, object]], text: str) -> None:
    assert read_file("a.pdf", filled_form(data)).text == text
    whole = read_file("a.pdf", filled_form(data, "Form")).text
    assert whole == (f"Form\n{text}" if text else "Form")


def _moved(before: str, up: int, small: str, after: str) -> str:
    """The inside of a line of `pdf`, a part of which is smaller, and higher or lower."""
    width = 14 if before == "10" else 9
    moved = f"/F1 7 Tf {width} {up} Td ({small}) Tj /F1 12 Tf {4 * len(small)} {-up} Td"
    return f"{before}) Tj {moved} ({after}"


@cases(
    {
        "pages": (pdf(["first page", "second"]), "first page\n\nsecond"),
        "empty": (pdf([""]), ""),
        "without-a-password": (pdf(["open"], user_password=""), "open"),
        "raised": (pdf([_moved("10", 5, "3", "m")]), "10³m"),
        "lowered": (pdf([_moved("H", -3, "2", "O")]), "H₂O"),
        "no-small-letters": (pdf([_moved("10", 5, "x3", "m")]), "10x3m"),
        "another-line": (pdf([_moved("10", 30, "3", "m")]), "10\n3\nm"),
    }
)
def test_pdf(data: bytes, text: str) -> None:
    assert read_file("a.pdf", data).text == text


# ---------------------------------------------------------------------- text
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "data",
    [
        "---\nNote: The Mobrit costs 412 euros.\n\nMore.\n---\nEnd.\n",  # a blank line
        "---\nplain\n---\n",
        "---\n- a\n---\n",
        "---\na: [\n---\n",
        "---\na: 1\na: 2\n---\n",
        "---\na: &b 1\nc: *b\n---\n",
        "---\n? [a]\n: 1\n---\n",
        "a: 1\n---\nb",
    ],
)
def test_what_is_no_front_matter_stays_text(data: str, newline: str) -> None:
    read = read_file("a.md", data.replace("\n", newline).encode())
    assert (read.text, read.metadata) == (data, {})


@cases(
    {
        "front-matter": (
            "title: 'Prices: all'\ndate: 2026-03-01\ntags: [a, b]\nb: It costs 7.\n---\n\nx\n",
            FileText(
                "# Prices: all\n\nIt costs 7.\n\nx\n",
                metadata={"title": "Prices: all", "date": "2026-03-01", "tags": "a, b"},
            ),
        ),
        "a-heading-of-its-own": (
            "title: Prices\nid: 007\n---\n# Our prices\nx\n",
            FileText("# Our prices\nx\n", metadata={"title": "Prices", "id": "007"}),
        ),
        "a-title-of-lines": (
            "title: |\n  two\n  lines\n---\ny\n",
            FileText("# two lines\n\ny\n", metadata={"title": "two lines"}),
        ),
        "comments": (
            "# 412 euros\na: 1\n---\ny",
            FileText("y", metadata={"a": "1", "comments": "412 euros"}),
        ),
        "ends-with-dots": ("a: 1\n...\ny", FileText("y", metadata={"a": "1"})),
        "nothing-else": ("a: 1\n---", FileText("", metadata={"a": "1"})),
    }
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_front_matter(data: str, text: FileText, newline: str) -> None:
    whole = f"---\n{data}"
    read = read_file("a.md", whole.replace("\n", newline).encode())
    assert (read.text, read.metadata) == (text.text, text.metadata)
    assert read_file("a.txt", whole.encode()).text == whole


@cases(
    {
        "line-ends": (b"\xef\xbb\xbfone\r\ntwo\rthree", "one\ntwo\nthree"),
        "nul": (b"41\x002", "412"),
        "pages": (b"41\x0c2\x0b7", "41\n2\n7"),
        "separators": (b"41\x1f2\x1c7", "41 2 7"),
        "next-line": ("41\x852\u20287".encode(), "41\n2\u20287"),
        "controls": (b"a\tb\x1b[1mc\x7f\x08", "a\tb[1mc"),
        "soft-hyphen": ("so\u00adft".encode(), "soft"),
    }
)
@pytest.mark.parametrize("name", ["a.txt", "a.MD"])
def test_text(name: str, data: bytes, text: str) -> None:
    assert read_file(name, data).text == text
