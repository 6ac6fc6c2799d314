"""What each kind of file says is what people see; the cases are those in which figures change."""

from __future__ import annotations

import pytest
from documents import docx, filled_form, pdf, run

from kvcache_rag.integration import FileText, read_file

TABLE = "<tr><td>Mobrit<td>412<tr><td>Gleis<td>9"


def _page(markup: str) -> str:
    return read_file("a.html", markup.encode()).text


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        # ---------------------------------------------- lines, as an HTML5 parser has them
        pytest.param(f"<table>{TABLE}</table>", "Mobrit | 412\nGleis | 9", id="open-cells"),
        pytest.param(f"<p>Prices:<table>{TABLE}", "Prices:\n\nMobrit | 412\nGleis | 9", id="open"),
        pytest.param(
            "<table><thead><tr><th>A<th>B<tfoot><tr><td>1<td>2<tbody><tr><td>3<td>4</table>",
            "A | B\n1 | 2\n3 | 4",
            id="open-sections",
        ),
        pytest.param("<ul><li>412<li>7</ul>", "412\n7", id="open-items"),
        pytest.param("<dl><dt>Price<dd>412<dt>Seats<dd>7</dl>", "Price\n412\nSeats\n7", id="dl"),
        pytest.param("<p>412<p>7", "412\n\n7", id="open-paragraphs"),
        pytest.param("412<br>7<br/>8</br>9", "412\n7\n8\n9", id="breaks"),
        pytest.param("412<hr>7", "412\n\n7", id="rule"),
        pytest.param("<select><option>412<option>7</select>", "412", id="options"),
        pytest.param(
            "<details><summary>What does it cost?</summary>412 euros.</details>",
            "What does it cost?\n412 euros.",
            id="summary",
        ),
        *(
            pytest.param(f"41<{name}>2</{name}>7", "41\n2\n7", id=name)
            for name in (
                *("address", "article", "aside", "center", "details", "div", "dd", "dt", "footer"),
                *("form", "header", "hgroup", "legend", "main", "menu", "nav", "search", "section"),
                *("figcaption", "summary", "dir", "li"),
            )
        ),
        *(
            pytest.param(f"41<{name}>2</{name}>7", "41\n\n2\n\n7", id=name)
            for name in ("blockquote", "fieldset", "figure", "h1", "h6", "p", "pre")
        ),
        *(
            pytest.param(f"41<{name}>2</{name}>7", "4127", id=name)
            for name in ("a", "b", "code", "em", "font", "i", "span", "time", "u", "custom-name")
        ),
        pytest.param("41<dialog open>2</dialog>7", "41\n2\n7", id="open-dialog"),
        pytest.param("41<button>2</button><button>7</button>", "41 2 7", id="buttons"),
        pytest.param("<textarea>a\n b</textarea>", " a\n b".strip(), id="textarea"),
        pytest.param("<input value=412><input value=7>", "412 7", id="inputs"),
        pytest.param("41<wbr>2", "412", id="wbr"),
        pytest.param(
            "<table><caption>Prices</caption><tr><td>412</table>", "Prices\n412", id="caption"
        ),
        pytest.param(
            "<table><tr><td>Mobrit<p>the red one</p><br>new<td>412</table>",
            "Mobrit the red one new | 412",
            id="paragraphs-in-a-cell",
        ),
        pytest.param(
            f"<table><tr><td><h1>Menu</h1><td>x<table>{TABLE}</table></table>",
            "Menu\n\nx\n\nMobrit | 412\nGleis | 9",
            id="table-that-lays-out",
        ),
        pytest.param("<pre>  a\n\n    b</pre>", "  a\n\n    b", id="pre"),
        pytest.param("<p>in \n  <b> bold</b>  text </p>", "in bold text", id="spaces"),
        pytest.param("a&nbsp;b&ensp;c", "a b c", id="other-spaces"),
        # ---------------------------------------------- numbers that people see
        pytest.param("<ol><li>a<li>b</ol>", "1. a\n2. b", id="ol"),
        pytest.param("<ol start=5><li>a<li value=9>b<li>c</ol>", "5. a\n9. b\n10. c", id="start"),
        pytest.param("<ol reversed><li>a<li>b</ol>", "2. a\n1. b", id="reversed"),
        pytest.param("<ol type=a><li>a<li>b</ol>", "a\nb", id="letters-are-not-made-up"),
        pytest.param("<ol><li><p>a</p><li><p>b</p></ol>", "1. a\n\n2. b", id="ol-of-paragraphs"),
        pytest.param("<ol><li>a<ol><li>b</ol><li>c</ol>", "1. a\n1. b\n2. c", id="inner-ol"),
        pytest.param("<ol start=-1e9><li>a</ol>", "-1. a", id="start-of-digits"),
        # ---------------------------------------------- raised, lowered, struck, quoted
        pytest.param("10<sup>3</sup> m<sup>2</sup>", "10³ m²", id="sup"),
        pytest.param("10<sup>&minus;3</sup>", "10⁻³", id="sup-minus"),
        pytest.param("H<sub>2</sub>O", "H₂O", id="sub"),
        pytest.param("10<sup>1.5</sup>", "10^(1.5)", id="sup-decimal"),
        pytest.param("10<sup><b><i>3</i></b></sup>", "10³", id="sup-of-tags"),
        pytest.param("see<sup>[1]</sup>, 19<sup>th</sup>", "see[1], 19th", id="sup-of-words"),
        pytest.param(
            "<s>412</s><del>7</del> <strike>8</strike> 349", "~~412~~~~7~~ ~~8~~ 349", id="s"
        ),
        pytest.param("<q>412</q>", "\u201c412\u201d", id="q"),
        pytest.param("<ruby>\u6f22<rt>12</rt></ruby>", "\u6f22(12)", id="ruby"),
        pytest.param("<ruby>\u6f22<rp>(<rt>12<rp>)</ruby>", "\u6f22(12)", id="ruby-with-rp"),
        pytest.param("10<span style='vertical-align: super'>3</span>", "10³", id="raised-by-style"),
        # ---------------------------------------------- forms
        pytest.param("<select><option>a<option selected>b</select>", "b", id="selected"),
        pytest.param("<select multiple><option>a<option>b</select>", "a\nb", id="several-choices"),
        pytest.param("<input type=checkbox checked> a", "☑ a", id="checked"),
        pytest.param("<input type=checkbox>a <input type=radio>b", "☐ a ○ b", id="not-checked"),
        # ---------------------------------------------- cells over several rows and columns
        pytest.param(
            "<table><tr><td rowspan=2>Mobrit<td>6:12<td>1<tr><td>18:40<td>2<tr><td>Elin</table>",
            "Mobrit | 6:12 | 1\nMobrit | 18:40 | 2\nElin",
            id="rowspan",
        ),
        pytest.param(
            "<table><tr><td>a<td rowspan=2>9<tr><td>b<tr><td colspan=2>c<td>d</table>",
            "a | 9\nb | 9\nc | | d",
            id="colspan",
        ),
        # ---------------------------------------------- what stands in for something unseen
        pytest.param("5<object>no</object><video>no</video>7", "5 7", id="fallbacks"),
        pytest.param("<div><template shadowrootmode=open>412</template></div>", "412", id="shadow"),
        pytest.param("<a href=a>Home</a><a href=b>Prices</a>", "Home Prices", id="next-links"),
        pytest.param("dog<a href=a>s</a>", "dogs", id="link-in-a-word"),
        pytest.param("a<svg><text>41</text><g><text>7</text></g></svg>b", "a\n41\n7\nb", id="svg"),
        pytest.param("2 < 3 <4 <= 5", "2 < 3 <4 <= 5", id="less-than"),
        pytest.param("<ol style='list-style: none'><li>a</ol>", "a", id="plain-list"),
        # ---------------------------------------------- MathML
        pytest.param(
            "<math><mn>3</mn><mfrac><mn>1</mn><mn>2</mn></mfrac></math>", "3 1/2", id="mixed"
        ),
        pytest.param(
            "<math><msup><mi>x</mi><mn>2</mn></msup><mn>3</mn></math>",
            "x^2 3",
            id="msup-and-figure",
        ),
        pytest.param(
            "<math><mfrac><mn>1</mn><mn>2</mn></mfrac><mi>x</mi></math>", "1/2 x", id="half-of-x"
        ),
        pytest.param(
            "<math><mmultiscripts><mi>C</mi><mprescripts/><mn>6</mn><mn>14</mn></mmultiscripts></math>",
            "_6^14C",
            id="before",
        ),
        pytest.param(
            "<math><mmultiscripts><mi>x</mi><none/><mrow><mi>a</mi><mo>+</mo><mn>1</mn></mrow>"
            "</mmultiscripts></math>",
            "x^(a+1)",
            id="only-above",
        ),
        pytest.param("<math><mi>a</mi><mtext>if</mtext><mi>b</mi></math>", "a if b", id="mtext"),
        pytest.param("<math><mfrac><mn>1</mn><mn>2</mn></mfrac></math>", "1/2", id="mfrac"),
        pytest.param(
            "<math><mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mn>2</mn></mfrac></math>",
            "(a+b)/2",
            id="mfrac-of-a-sum",
        ),
        pytest.param("<math><msup><mn>10</mn><mn>3</mn></msup></math>", "10^3", id="msup"),
        pytest.param(
            "<math><msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup></math>", "x_1^2", id="msubsup"
        ),
        pytest.param("<math><msqrt><mn>16</mn></msqrt></math>", "√(16)", id="msqrt"),
        pytest.param("<math><mroot><mn>8</mn><mn>3</mn></mroot></math>", "3√(8)", id="mroot"),
        pytest.param(
            "<math><mtable><mtr><mtd>1</mtd><mtd>2</mtd></mtr><mtr><mtd>3</mtd></mtr></mtable></math>",
            "1 | 2\n3",
            id="matrix",
        ),
        pytest.param(
            "<math><semantics><mn>7</mn><annotation>7</annotation></semantics></math>",
            "7",
            id="annotation",
        ),
        # ---------------------------------------------- what nobody sees
        *(
            pytest.param(f"<p>a</p>{hidden}<p>b</p>", "a\n\nb", id=hidden[:34])
            for hidden in (
                "<p hidden>x</p>",
                "<p HIDDEN=until-found>x</p>",
                '<p style="display:none">x</p>',
                '<p style="color:red; Display : NONE !important">x</p>',
                '<p style="visibility: hidden">x</p>',
                '<p style="opacity:0">x</p>',
                '<p style="font-size:0px;">x</p>',
                "<dialog>x</dialog>",
                "<template>x</template>",
                "<script>x</script>",
                "<style>x</style>",
                "<noscript>x</noscript>",
                "<svg><title>x</title><defs><text>x</text></defs></svg>",
                "<datalist><option>x</datalist>",
                "<input type=hidden value=x>",
                "<input type=password value=x>",
                "<!-- x -->",
                '<span class="katex-html">x</span>',
                "<div hidden><div><p>x</p></div></div>",
            )
        ),
        *(
            pytest.param(f"<p>a</p>{shown}", "a\n\nx", id=shown[:34])
            for shown in (
                '<p style="opacity:0.5">x',
                '<p style="font-size:09px">x',
                "<p data-hidden>x",
            )
        ),
        pytest.param("<title>x</title><p>b", "b", id="title"),
        pytest.param("a\ufdd0b\ufdd4c", "abc", id="characters-that-lay-out"),
    ],
)
def test_html(markup: str, text: str) -> None:
    assert _page(markup) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("Mobrit\u200b 412 \U0001f469\u200d\U0001f680 \u20ac".encode(), None),
        ("\ufeff412 \u20ac".encode(), "412 \u20ac"),
        (b"<meta charset=latin-1><p>caf\xe9", "caf\u00e9"),
        (b"<p>caf\xe9 \x80412", "caf\u00e9 \u20ac412"),
        (
            b"<meta charset=koi8-r>" + "\u0446\u0435\u043d\u0430".encode("koi8-r"),
            "\u0446\u0435\u043d\u0430",
        ),
        ("<p>412 \u20ac".encode("utf-16"), "412 \u20ac"),
        (b"<meta charset=iso-2022-jp>" + "\u6f22".encode("iso-2022-jp"), "\u6f22"),
        ("<meta charset=latin-1><p>\u20ac".encode(), "\u20ac"),
    ],
    ids=["utf-8", "mark", "latin", "undeclared", "koi8", "utf-16", "japanese", "declared-wrongly"],
)
def test_encoding_of_html(data: bytes, text: str | None) -> None:
    assert read_file("a.htm", data).text == (data.decode() if text is None else text)


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


@pytest.mark.parametrize(
    ("inside", "text"),
    [
        pytest.param(
            f"{run('2020')}<w:r><w:noBreakHyphen/></w:r>{run('2024')}", "2020-2024", id="range"
        ),
        pytest.param(
            "<w:r><w:t xml:space='preserve'>It was </w:t><w:noBreakHyphen/><w:t>12</w:t></w:r>",
            "It was -12",
            id="minus",
        ),
        pytest.param("<w:r><w:t>soft</w:t><w:softHyphen/><w:t>ly</w:t></w:r>", "softly", id="soft"),
        pytest.param("<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r>", "a\tb", id="tab"),
        pytest.param("<w:r><w:t>a</w:t><w:br/><w:t>b</w:t></w:r>", "a\nb", id="break"),
        pytest.param("<w:r><w:t>a</w:t><w:cr/><w:t>b</w:t></w:r>", "a\nb", id="cr"),
        pytest.param("<w:r><w:t>a</w:t><w:ptab/><w:t>b</w:t></w:r>", "a\tb", id="ptab"),
        pytest.param(
            run("Rooms: 1") + BOX.format(run("412 seats")) + BOX.format(run("7 tables")),
            "Rooms: 1\n\n412 seats\n\n7 tables",
            id="boxes",
        ),
        pytest.param(f"{run('a ')}<w:ins>{run('412')}</w:ins>", "a 412", id="inserted"),
        pytest.param(
            "<w:del><w:r><w:delText>9</w:delText></w:r></w:del>" + run("412"), "412", id="deleted"
        ),
        pytest.param(
            f"<w:moveFrom>{run('Moved.')}</w:moveFrom>{run('Here.')}<w:moveTo>{run('Moved.')}</w:moveTo>",
            "Here.Moved.",
            id="moved",
        ),
        pytest.param(f"<w:fldSimple w:instr='PAGE'>{run('7')}</w:fldSimple>", "7", id="field"),
        pytest.param(f"<w:hyperlink>{run('412')}</w:hyperlink>", "412", id="link"),
        pytest.param(f"<w:smartTag>{run('412')}</w:smartTag>", "412", id="smart-tag"),
        pytest.param(f"<w:customXml>{run('412')}</w:customXml>", "412", id="custom"),
        pytest.param(f"<w:dir w:val='rtl'>{run('412')}</w:dir>", "412", id="dir"),
        pytest.param(f"<w:bdo w:val='rtl'>{run('412')}</w:bdo>", "412", id="bdo"),
        pytest.param(
            f"<w:sdt><w:sdtContent>{run('412')}</w:sdtContent></w:sdt>", "412", id="control"
        ),
        pytest.param(
            f"<w:r><w:ruby><w:rt>{run('kan')}</w:rt><w:rubyBase>{run('12')}</w:rubyBase></w:ruby></w:r>",
            "12(kan)",
            id="ruby",
        ),
        pytest.param(
            run("10") + run("3", "<w:vertAlign w:val='superscript'/>"), "10³", id="raised"
        ),
        pytest.param(
            run("H") + run("2", "<w:vertAlign w:val='subscript'/>") + run("O"), "H₂O", id="low"
        ),
        pytest.param(run("412", "<w:strike/>") + run(" 349"), "~~412~~ 349", id="struck"),
        pytest.param(run("412", "<w:dstrike/>") + run(" 349"), "~~412~~ 349", id="struck-twice"),
        pytest.param(run("m") + run("2", "<w:position w:val='6'/>"), "m²", id="moved-up"),
        pytest.param(run("m") + run("2", "<w:position w:val='1'/>"), "m2", id="hardly-moved"),
        pytest.param(run("3") + FRACTION, "3 (a+b)/2=5", id="formula-behind-a-figure"),
        pytest.param(
            f"<w:r><w:drawing><wps:txbx><w:txbxContent><w:p>{run('412')}</w:p></w:txbxContent>"
            "</wps:txbx></w:drawing></w:r>",
            "412",
            id="box-of-newer-programs",
        ),
        pytest.param(
            "<w:sdt><w:sdtPr><w14:checkbox><w14:checked w14:val='1'/></w14:checkbox></w:sdtPr>"
            f"<w:sdtContent>{run('x')}</w:sdtContent></w:sdt>{run(' paid')}",
            "☑ paid",
            id="box-that-is-checked",
        ),
        pytest.param(run("hidden", "<w:vanish/>") + run("shown"), "shown", id="hidden"),
        pytest.param(run("shown", "<w:vanish w:val='0'/>"), "shown", id="not-hidden"),
        pytest.param(FRACTION, "(a+b)/2=5", id="formula"),
        pytest.param(
            f"<m:oMathPara>{FRACTION}</m:oMathPara>", "(a+b)/2=5", id="formula-of-its-own"
        ),
        pytest.param(
            "<w:r><w:sym w:font='Wingdings' w:char='F0E0'/></w:r>", "\U0001f86a", id="symbol"
        ),
        pytest.param(
            f"{run('412')}<w:r><w:footnoteReference w:id='1'/></w:r>{run(' euros')}",
            "412[1] euros\n\n1. A note.",
            id="footnote",
        ),
    ],
)
def test_word(inside: str, text: str) -> None:
    data = docx(body=f"<w:p>{inside}</w:p>", notes=["A note."])
    assert read_file("a.docx", data).text == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        pytest.param("", "Title\n\ntext\n\na | b\nc | d", id="table"),
        pytest.param(
            f"<w:tbl><w:tr><w:tc><w:p>{run('Item')}</w:p><w:p>{run('red')}</w:p></w:tc>"
            f"<w:tc><w:p>{run('412')}</w:p></w:tc></w:tr></w:tbl>",
            "Title\n\ntext\n\na | b\nc | d\n\nItem red | 412",
            id="paragraphs-in-a-cell",
        ),
        pytest.param(
            f"<w:sdt><w:sdtContent><w:p>{run('412')}</w:p></w:sdtContent></w:sdt>",
            "Title\n\ntext\n\na | b\nc | d\n\n412",
            id="control",
        ),
        pytest.param(
            "<w:p><w:pPr><w:framePr w:dropCap='drop'/></w:pPr><w:r><w:t>D</w:t></w:r></w:p>"
            f"<w:p><w:pPr/>{run('rop cap')}</w:p>",
            "Title\n\ntext\n\na | b\nc | d\n\nDrop cap",
            id="first-letter",
        ),
        pytest.param(
            f"<w:tbl><w:tr><w:tc><w:tcPr><w:vMerge w:val='restart'/></w:tcPr><w:p>{run('M')}</w:p>"
            f"</w:tc><w:tc><w:p>{run('6:12')}</w:p></w:tc></w:tr><w:tr><w:tc><w:tcPr><w:vMerge/></w:tcPr><w:p/>"
            f"</w:tc><w:tc><w:p>{run('18:40')}</w:p></w:tc></w:tr></w:tbl>",
            "Title\n\ntext\n\na | b\nc | d\n\nM | 6:12\nM | 18:40",
            id="over-two-rows",
        ),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_blocks_of_word(body: str, text: str, strict: bool) -> None:
    data = docx(["Title", "text"], [["a", "b"], ["c", "d"]], body, strict=strict)
    assert read_file("a.docx", data).text == text


def test_hyphens_and_formulas_of_strict_word() -> None:
    body = f"<w:p><w:r><w:noBreakHyphen/><w:t>12</w:t></w:r>{FRACTION}</w:p>"
    assert read_file("a.docx", docx(body=body, strict=True)).text == "-12 (a+b)/2=5"


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


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ([_field("/Tx", "guest", "412")], "guest: 412"),
        ([_field("/Tx", "guest", "412", TU="Name of the guest")], "Name of the guest: 412"),
        ([_field("/Tx", "guest", "412", F=2)], ""),
        ([_field("/Tx", "secret", "412", Ff=1 << 13)], ""),
        ([_field("/Tx", "guest", "")], ""),
        ([_field("/Ch", "rooms", ["Red", "Blue"])], "rooms: Red, Blue"),
        (
            [_field("/Btn", "paid", "/Yes", AS="/Yes"), _field("/Btn", "late", "/Off", AS="/Off")],
            "paid: Yes",
        ),
        ([_field("/Btn", "print", "/Yes", Ff=1 << 16)], ""),
        ([{"/Parent": _field("/Tx", "guest", "412"), "/T": "name"}], "guest.name: 412"),
        ([{"/Subtype": "/FreeText", "/Contents": "412 seats"}], "412 seats"),
    ],
    ids=[
        *("text", "by-its-name-for-people", "hidden", "password", "empty", "choice", "boxes"),
        *("button", "inherited", "note-on-a-page"),
    ],
)
def test_what_is_filled_in_in_a_pdf(fields: list[dict[str, object]], text: str) -> None:
    assert read_file("a.pdf", filled_form(fields)).text == text
    whole = read_file("a.pdf", filled_form(fields, "Form")).text
    assert whole == (f"Form\n{text}" if text else "Form")


def _moved(before: str, up: int, small: str, after: str) -> str:
    """The inside of a line of `pdf`, a part of which is smaller, and higher or lower."""
    width = 14 if before == "10" else 9
    moved = f"/F1 7 Tf {width} {up} Td ({small}) Tj /F1 12 Tf {4 * len(small)} {-up} Td"
    return f"{before}) Tj {moved} ({after}"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (pdf(["first page", "second"]), "first page\n\nsecond"),
        (pdf([""]), ""),
        (pdf(["open"], user_password=""), "open"),
        (pdf([_moved("10", 5, "3", "m")]), "10³m"),
        (pdf([_moved("H", -3, "2", "O")]), "H₂O"),
        (pdf([_moved("10", 5, "x3", "m")]), "10x3m"),
        (pdf([_moved("10", 30, "3", "m")]), "10\n3\nm"),
    ],
    ids=[
        *("pages", "empty", "without-a-password", "raised", "lowered", "no-small-letters"),
        "another-line",
    ],
)
def test_pdf(data: bytes, text: str) -> None:
    assert read_file("a.pdf", data).text == text


# ---------------------------------------------------------------------- text
NOTE = "---\nNote: The Mobrit costs 412 euros.\n\nMore.\n---\nEnd.\n"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        pytest.param(NOTE, FileText(NOTE), id="a-blank-line"),
        pytest.param("---\nplain\n---\n", FileText("---\nplain\n---\n"), id="rules"),
        pytest.param("---\n- a\n---\n", FileText("---\n- a\n---\n"), id="a-list"),
        pytest.param("---\na: [\n---\n", FileText("---\na: [\n---\n"), id="no-yaml"),
        pytest.param("---\na: 1\na: 2\n---\n", FileText("---\na: 1\na: 2\n---\n"), id="twice"),
        pytest.param(
            "---\na: &b 1\nc: *b\n---\n", FileText("---\na: &b 1\nc: *b\n---\n"), id="alias"
        ),
        pytest.param("---\n? [a]\n: 1\n---\n", FileText("---\n? [a]\n: 1\n---\n"), id="no-name"),
        pytest.param("a: 1\n---\nb", FileText("a: 1\n---\nb"), id="not-first"),
        pytest.param(
            "---\ntitle: 'Prices: all'\ndate: 2026-03-01\ntags: [a, b]\nb: It costs 7.\n---\n\nx\n",
            FileText(
                "# Prices: all\n\nIt costs 7.\n\nx\n",
                metadata={"title": "Prices: all", "date": "2026-03-01", "tags": "a, b"},
            ),
            id="front-matter",
        ),
        pytest.param(
            "---\ntitle: Prices\nid: 007\n---\n# Our prices\nx\n",
            FileText("# Our prices\nx\n", metadata={"title": "Prices", "id": "007"}),
            id="a-heading-of-its-own",
        ),
        pytest.param(
            "---\ntitle: |\n  two\n  lines\n---\ny\n",
            FileText("# two lines\n\ny\n", metadata={"title": "two lines"}),
            id="a-title-of-lines",
        ),
        pytest.param(
            "---\n# 412 euros\na: 1\n---\ny",
            FileText("y", metadata={"a": "1", "comments": "412 euros"}),
            id="comments",
        ),
        pytest.param("---\na: 1\n...\ny", FileText("y", metadata={"a": "1"}), id="ends-with-dots"),
        pytest.param("---\na: 1\n---", FileText("", metadata={"a": "1"}), id="nothing-else"),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_markdown(data: str, found: FileText, newline: str) -> None:
    read = read_file("a.md", data.replace("\n", newline).encode())
    assert (read.text, read.metadata) == (found.text, found.metadata)
    assert read_file("a.txt", data.encode()).text == data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfone\r\ntwo\rthree", "one\ntwo\nthree"),
        (b"41\x002", "412"),
        (b"41\x0c2\x0b7", "41\n2\n7"),
        (b"41\x1f2\x1c7", "41 2 7"),
        ("41\x852\u20287".encode(), "41\n2\u20287"),
        (b"a\tb\x1b[1mc\x7f\x08", "a\tb[1mc"),
        ("so\u00adft".encode(), "soft"),
    ],
    ids=["line-ends", "nul", "pages", "separators", "next-line", "controls", "soft-hyphen"],
)
def test_text(data: bytes, text: str) -> None:
    for name in ("a.txt", "a.MD"):
        assert read_file(name, data).text == text
