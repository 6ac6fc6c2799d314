"""Files that were damaged, or made to harm who reads them; each is read in a process of its own.

`python -m tests.hostile KIND SEED FIRST COUNT LEVELS` reads some and writes a line for each;
`python -m tests.hostile --write FILE KIND SEED NUMBER LEVELS` keeps one, to look at.
"""

from __future__ import annotations

import io
import random
import re
import resource
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).parents[1]
FILES: Final = Path(__file__).parent / "files"
SECONDS: Final = 30  # of the processor for one file; a slow one takes 14 for the largest
MEGABYTES: Final = 500  # for one file
_LONGEST: Final = 2_000_000
_ENOUGH: Final = 3  # faults, of which each may take its seconds

SEEDS: Final = {
    "html": ("clinic.html", "tide.html", "survey-pandoc.html", "harbour-libreoffice.html"),
    "docx": ("harbour-libreoffice.docx", "survey-pandoc.docx", "tariff-libreoffice.docx"),
    "pdf": ("berth-libreoffice.pdf", "clinic-chromium.pdf", "harbour-libreoffice.pdf"),
    "md": ("survey.md",),
    "txt": ("tide.html.expected.txt", "survey.md.expected.txt"),
}


# ---------------------------------------------------------------------- any bytes
def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _overwritten(data: bytes, chance: random.Random) -> bytes:
    raw = bytearray(data)
    for _ in range(chance.choice((1, 4, 32))):
        at = chance.randrange(len(raw) + 1)
        raw[at : at + 1] = chance.randbytes(chance.choice((1, 1, 2, 8)))
    return bytes(raw)


def _blocks(data: bytes, chance: random.Random) -> list[bytes]:
    size = max(1, len(data) // chance.choice((3, 17, 200)))
    return [data[at : at + size] for at in range(0, len(data), size)]


def _shuffled(data: bytes, chance: random.Random) -> bytes:
    blocks = _blocks(data, chance)
    chance.shuffle(blocks)
    return b"".join(blocks)


def _repeated(data: bytes, chance: random.Random) -> bytes:
    blocks = _blocks(data, chance)
    at = chance.randrange(len(blocks) + 1)
    blocks[at:at] = blocks[at : at + 1] * chance.choice((1, 2, 30))
    return b"".join(blocks)[:_LONGEST]


_BYTES: Final = (_cut, _overwritten, _shuffled, _repeated)


def _any_bytes(data: bytes, chance: random.Random, _: int) -> bytes:
    return chance.choice(_BYTES)(data, chance) if data else data


def _levels(chance: random.Random, most: int) -> int:
    """Ten to `most`, as many tens as thousands."""
    return int(10 ** chance.uniform(1, len(str(most)) - 1))


def _put_in(data: bytes, piece: bytes, chance: random.Random) -> bytes:
    at = chance.choice([found.start() for found in re.finditer(rb"<|\n|\Z", data)])
    return data[:at] + piece + data[at:]


# ---------------------------------------------------------------------- HTML
_TAGS: Final = (
    *("a", "b", "button", "del", "details", "div", "dl", "fieldset", "font size={}", "form", "h1"),
    *("iframe", "li", "math", "math><mfrac", "math><msup><mi>x</mi", "nobr", "object", "ol"),
    *("ol><li", "option", "p", "pre", "q", "ruby><rt", "select", "span", "sub", "sup", "svg"),
    *("svg><foreignObject", "table", "table><tr><td", "template", "textarea", "title", "ul", "!--"),
)
_HTML_PIECES: Final = (
    *("&amp", "&#x110000;", "&#0;", "&" + "a" * 50, "<!DOCTYPE x [<!ENTITY a 'b'>]>", "<![CDATA["),
    *("<p style='" + " ;opacity : 0" * 50, "<", "</", "<a href='", "<pre> \t", "<br> ", " \n"),
    *("<meta charset=utf-16>", "<meta charset=iso-2022-jp>\x1b$B", "\0", "\ufdd0\ufdd1", "</p>"),
)


def _html(data: bytes, chance: random.Random, most: int) -> bytes:
    number = _levels(chance, most)
    if chance.random() < 0.6:
        tag = chance.choice(_TAGS)
        opened = "".join(f"<{tag}>".format(one) for one in range(number))
        closed = "" if chance.random() < 0.5 else f"</{tag.split(' ')[0].split('>')[0]}>" * number
        data = _put_in(data, opened.encode() + b"x" + closed.encode(), chance)
    else:
        data = _put_in(data, chance.choice(_HTML_PIECES).encode() * number, chance)
    return data[:_LONGEST]


# ---------------------------------------------------------------------- Word
_XML_TAGS: Final = (
    *("w:p", "w:r", "w:tbl", "w:tbl><w:tr><w:tc", "w:sdt><w:sdtContent", "w:ins", "w:hyperlink"),
    *("w:fldSimple", "w:smartTag", "m:oMath", "m:f><m:num", "m:rad><m:e", "m:oMathPara", "w:t"),
    *("mc:AlternateContent><mc:Fallback", "w:pict><v:shape><v:textbox><w:txbxContent", "x"),
)
_NAMESPACES: Final = (
    b' xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    b' xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    b' xmlns:v="urn:schemas-microsoft-com:vml"'
)
_LAUGHS: Final = (
    b'<!DOCTYPE x [<!ENTITY a "ha">'
    + b"".join(b'<!ENTITY %c "%s">' % (98 + one, b"&%c;" % (97 + one) * 10) for one in range(9))
    + b"]>"
)


def _docx(data: bytes, chance: random.Random, most: int) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    way = chance.choice((_nested_part, _nested_part, _changed_part, _laughing, _bomb, _lying))
    name = chance.choice((*["word/document.xml"] * 3, *(one for one in parts if "." in one)))
    return way(parts, name, chance, most)


def _zipped(parts: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for name, part in parts.items():
            new.writestr(name, part)
    return made.getvalue()


def _nested_part(parts: dict[str, bytes], name: str, chance: random.Random, most: int) -> bytes:
    """Elements around another one, closed as they should."""
    xml, number = parts[name], _levels(chance, most)
    names = chance.choice(_XML_TAGS).split("><")
    opened = "".join(f"<{one}>" for one in names).encode() * number
    closed = "".join(f"</{one}>" for one in reversed(names)).encode() * number
    places = list(re.finditer(rb"<(w:p|w:r|w:t|w:tbl|m:oMath|w:style)\b[^>]*(?<!/)>", xml))
    if places:
        place = chance.choice(places)
        end = xml.find(b"</" + place[1] + b">", place.end()) + len(place[1]) + 3
        xml = xml[: place.start()] + opened + xml[place.start() : end] + closed + xml[end:]
        for one in _NAMESPACES.split():  # those that the root has not
            if one.partition(b"=")[0] + b"=" not in xml:
                xml = re.sub(rb"(<w:\w+)", rb"\1 " + one.replace(b"\\", rb"\\"), xml, count=1)
    return _zipped({**parts, name: xml})


def _changed_part(parts: dict[str, bytes], name: str, chance: random.Random, _: int) -> bytes:
    if chance.random() < 0.3:  # pieces of XML in another order are XML still
        pieces = re.split(rb"(?<=</w:p>)|(?<=</w:r>)", parts[name])
        chance.shuffle(pieces)
        return _zipped({**parts, name: b"".join(pieces)})
    if chance.random() < 0.2:
        return _zipped({one: part for one, part in parts.items() if one != name})
    return _zipped({**parts, name: _any_bytes(parts[name], chance, 0)})


def _laughing(parts: dict[str, bytes], name: str, chance: random.Random, _: int) -> bytes:
    xml = re.sub(rb"<\?xml.*?\?>", b"", parts[name])
    xml = _LAUGHS + xml.replace(b"</w:t>", b"&j;</w:t>")
    encoding = chance.choice(("utf-8", "utf-16", "utf-16-be", "cp037", "latin-1"))
    text = f'<?xml version="1.0" encoding="{encoding}"?>' + xml.decode()
    return _zipped({**parts, name: text.encode(encoding, "xmlcharrefreplace")})


def _bomb(parts: dict[str, bytes], name: str, chance: random.Random, most: int) -> bytes:
    fill = chance.choice((b" ", b"<w:p/>", b"<!-- -->", b"<w:p><w:r><w:t>x</w:t></w:r></w:p>"))
    size = chance.choice((most, most * 10, most * 100))
    xml = parts[name]
    at = max(xml.find(b"<w:body>") + 8, 0)
    return _zipped({**parts, name: xml[:at] + fill * (size // len(fill)) + xml[at:]})


def _lying(parts: dict[str, bytes], name: str, chance: random.Random, most: int) -> bytes:
    """A size, a method or a name that is not so, in one of the two places that say it."""
    raw = bytearray(_bomb(parts, name, chance, most) if chance.random() < 0.3 else _zipped(parts))
    mark, end = chance.choice(((b"PK\x03\x04", 30), (b"PK\x01\x02", 46), (b"PK\x05\x06", 22)))
    places = range(4, end)
    heads = [found.start() for found in re.finditer(re.escape(mark), raw)]
    for _ in range(chance.choice((1, 3))):
        at = chance.choice(heads) + chance.choice(places)
        raw[at : at + 1] = chance.choice((b"\0", b"\xff", b"\x01", chance.randbytes(1)))
    return bytes(raw)


# ---------------------------------------------------------------------- PDF
def _pdf(data: bytes, chance: random.Random, most: int) -> bytes:
    way = chance.choice((_nested_pdf, _pointing, _pointing, _changed_stream, _filled_stream))
    return way(data, chance, most)


def _nested_pdf(data: bytes, chance: random.Random, most: int) -> bytes:
    opened, closed = chance.choice(((b"[", b"]"), (b"<</A", b">>"), (b"(", b")"), (b"[<</K[", b"")))
    number = _levels(chance, most)
    at = chance.choice([found.end() for found in re.finditer(rb"<<|\[|/\w+\b", data)])
    return data[:at] + opened * number + closed * chance.choice((0, number)) + data[at:]


def _pointing(data: bytes, chance: random.Random, _: int) -> bytes:
    """References to other objects, so that some point at themselves; or other numbers."""
    form = chance.choice((rb"\d+(?= 0 R)", rb"\d+(?= 0 R)", rb"(?<=/\w{5} )\d+", rb"\d+"))
    share, highest = chance.choice((0.02, 0.2, 1)), chance.choice((8, 40, 10**10))

    def other(found: re.Match[bytes]) -> bytes:
        return b"%d" % chance.randrange(highest) if chance.random() < share else found[0]

    return re.sub(form, other, data)


_STREAM: Final = re.compile(rb"(?<=/FlateDecode)(.{0,40}?stream\r?\n)(.*?)(?=\r?\nendstream)", re.S)


def _with_stream(data: bytes, chance: random.Random, change: Callable[[bytes], bytes]) -> bytes:
    places = list(_STREAM.finditer(data))
    if not places:
        return data
    place = chance.choice(places)
    try:
        content = zlib.decompress(place[2])
    except zlib.error:
        content = place[2]
    return data[: place.start(2)] + zlib.compress(change(content), 1) + data[place.end(2) :]


def _changed_stream(data: bytes, chance: random.Random, most: int) -> bytes:
    def change(content: bytes) -> bytes:
        if chance.random() < 0.5:
            return _any_bytes(content, chance, most)
        return _pointing(content, chance, most)

    return _with_stream(data, chance, change)


def _filled_stream(data: bytes, chance: random.Random, most: int) -> bytes:
    fill = chance.choice(
        (b" ", b"q ", b"(x) Tj ", b"[(x) -500] TJ ", b"1 ", b"[", b"<<", b"BI ID ")
    )
    size = chance.choice((most, most * 10, most * 100 if fill == b" " else most))
    return _with_stream(data, chance, lambda content: content + fill * size)


# ---------------------------------------------------------------------- Markdown
_YAML: Final = (
    *(
        "a: [",
        "- ",
        "? ",
        "a: {",
        "&a ",
        "*a ",
        "!!python/name:os.system ",
        "a: &a [*a]\n",
        "---\n",
    ),
    *("a: >\n  x\n", ": ", '"', "a: b\n", "#", "%YAML 1.1\n", "\t", "<<: x\n", " ", "\ufeff"),
    "k{}: v\n",
)


def _md(data: bytes, chance: random.Random, most: int) -> bytes:
    front, number = data.index(b"\n---\n"), _levels(chance, most)
    piece = chance.choice(_YAML)
    at = chance.choice([found.end() for found in re.finditer(rb"\n|: ", data[: front + 1])])
    many = "".join(piece.replace("{}", str(one)) for one in range(number))
    return data[:at] + many.encode() + chance.choice((b"", b"\n")) + data[at:]


# ---------------------------------------------------------------------- all
_OWN: Final[dict[str, Callable[[bytes, random.Random, int], bytes]]] = {
    "html": _html,
    "docx": _docx,
    "pdf": _pdf,
    "md": _md,
    "txt": _any_bytes,
}


def made(kind: str, seed: int, number: int, levels: int) -> bytes:
    """One of the files, always the same for the same numbers.

    Args:
        kind: One of `SEEDS`.
        seed: Of the run.
        number: Of the file.
        levels: How deep something is nested at most.
    """
    chance = random.Random(f"{kind} {seed} {number}")
    data = (FILES / chance.choice(SEEDS[kind])).read_bytes()
    for _ in range(chance.choice((1, 1, 2))):
        way = _OWN[kind] if chance.random() < 0.7 else _any_bytes
        try:
            data = way(data, chance, levels)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, LookupError, OSError):
            data = _any_bytes(data, chance, levels)  # what was done first left no such file
    return data


@dataclass(frozen=True)
class Read:
    """How the reading of some files went.

    Attributes:
        texts: How many gave a text.
        refused: How many gave a sentence.
        slowest: Seconds of the processor for one.
        faults: What went wrong, with the numbers to make each again.
    """

    texts: int
    refused: int
    slowest: float
    faults: tuple[str, ...]


def read_all(kind: str, seed: int, count: int, levels: int) -> Read:
    """Read files in processes of their own; where one dies the next goes on behind its file."""
    lines: list[str] = []
    faults: list[str] = []
    while len(lines) < count and len(faults) < _ENOUGH:
        numbers = map(str, (seed, len(lines), count, levels))
        command = [sys.executable, "-m", "tests.hostile", kind, *numbers]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines += done.stdout.splitlines()
        if len(lines) < count:
            how = -done.returncode if done.returncode < 0 else done.stderr[-300:]
            lines.append(f"fault the process died ({how}; {int(signal.SIGPROF)} is out of time) 0")
        faults = [
            f"python -m tests.hostile --write FILE.{kind} {kind} {seed} {number} {levels}: {line}"
            for number, line in enumerate(lines)
            if line.startswith("fault")
        ]
    return Read(
        texts=sum(line.startswith("text") for line in lines),
        refused=sum(line.startswith("refused") for line in lines),
        slowest=max(float(line.rsplit(" ", 1)[1]) for line in lines),
        faults=tuple(faults),
    )


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _lines(kind: str, seed: int, first: int, count: int, levels: int) -> Iterator[str]:
    from kvcache_rag.errors import InvalidInputError
    from kvcache_rag_documents import read_file

    for name in SEEDS[kind]:  # libraries are imported
        read_file(name, (FILES / name).read_bytes())
    for number in range(first, count):
        data = made(kind, seed, number, levels)
        before, start = _memory(), time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            read_file(f"a.{kind}", data).text.encode()
            said = "text"
        except InvalidInputError as error:
            said = "fault of two lines" if "\n" in str(error) else "refused"
        except BaseException as error:
            said = f"fault {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        if _memory() - before > MEGABYTES:
            said = f"fault of {_memory() - before:.0f} MB"
        yield f"{said} {time.process_time() - start:.2f}"


def main() -> None:
    if sys.argv[1] == "--write":
        kind, *numbers = sys.argv[3:]
        Path(sys.argv[2]).write_bytes(made(kind, *map(int, numbers)))
        return
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30,) * 2)
    for line in _lines(sys.argv[1], *map(int, sys.argv[2:])):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
