"""Files that LibreOffice, pandoc and Chromium made are read as what their sources say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache_rag.integration.extraction import read_file

FILES = Path(__file__).parent / "files"
ENDING = ".expected.txt"

# What must be in each, by its source.  Of PDF no formula, no bar between cells.
HARBOUR = (
    *("1,412 ships", "\u221212 °C", "421 ppm", "48,300 euros", "17 days", "A berth costs 40 euros"),
    *("Length (m)", "\u22127.5", "Coal, 80 t", "Grain, 35 t", "Without 19 % of tax.", "page 231"),
    *("640 m", "1887", "215 m", "1954", "Hafenmeister", "Schleusentore", "Höhe über NN: 4,25 m"),
    *("Größe 1.250,5 m²", "n° 7 coûte 1 250,50 €", "15 août", "Moor at quay 7:", "tide tables"),
)
HARBOUR_ROWS = (
    *("Ship | Length (m) | Cargo", "Mobrit | 412 | Coal, 80 t Grain, 35 t", "Elin | \u22127.5 |"),
    *("Sum of both | | 115 t", "3.5 \u00d7 10³ m³", "10⁻²", "CO₂"),
)
SURVEY = (
    *("\u22123.5 m", "4.1 \u00d7 10⁵ m³", "12 mg/L of O₂", "Station | km | Flow (m³/s)"),
    *("Orlau | 12 | 85", "Nieder | \u22124 | 7.25", "250 mL", "(a+b)/2", "√(x_1^2)≤0.03", "31 m"),
    *("4,25 m", "~~17~~ 18 stations", "7 May 2021", "0.4 m in 1998", "85 - 7.25", "map of 1887"),
    "2020\u20112024",
)
CLINIC = (
    *("2020\u20112024", "\u221212 °C", "206 up to 12 years", "309 after", "0700\u2011118", "18.50"),
    *(
        "twice: 30",
        "7. Wait.",
        "4 days a week",
        "13:15",
        "18:45",
        "1.250,50 €",
        "n° 7 coûte 3,80 €",
    ),
    *("35 places", "Ring 144.", "Mon  8-11", "Ann Bouvier", "tooth no. 36", "Numbers of 2019."),
)
FACTS = {
    "berth-libreoffice.html": ("Captain: Ann Bouvier", "Draught: \u22123,75 m", "12.50 euros"),
    "berth-libreoffice.pdf": (
        *("captain: Ann Bouvier", "draught: \u22123,75 m", "pilot: Yes", "quay: South 215"),
        *("cargo: Grain", "berth: week", "12.50 euros"),
    ),
    "clinic-chromium.pdf": (*CLINIC, "X-ray 412", "3. Call", "4. Bring:"),
    "clinic.html": (
        *(*CLINIC, "~~45~~ 49 euros", "4.5 \u00d7 10¹² red cells", "10⁻³", "H₂O", "d=(w+5)/2 mg"),
        *("X-ray | 412 | 206", "Vaccine | | free", "3. Call", "Ärztinnen", "Krankenkasse"),
    ),
    "harbour-libreoffice.docx": (
        *(*HARBOUR, *HARBOUR_ROWS, "2020-2024", "channel 16", "channel: 74", "v=(a+3)/(t^2)"),
    ),
    "harbour-libreoffice.html": (*HARBOUR, *HARBOUR_ROWS, "2020\u20112024", "2. Moor"),
    "harbour-libreoffice.pdf": (
        *(*HARBOUR, "2020-2024", "channel 16", "Mobrit 412 Coal", "2. Moor", "b) then stern."),
    ),
    "survey-pandoc.docx": SURVEY,
    "survey-pandoc.html": (*SURVEY, "4. Take", "6. Write down:"),
    "survey.md": (
        "\u22123.5 m",
        "4.1 \u00d7 10^5^ m^3^",
        "| Orlau   | 12 | 85",
        "3.2 million tonnes",
    ),
    "tariff-libreoffice.docx": (
        *("costs 40 euros a day.", "2.60 euros a m³", "24/05/24", "see quay 7", "3  x   5 m"),
        *("May | 17 €", "June | 21 €", "9 €", "8 € for members"),
    ),
    "tide.html": (
        *("東京(Tōkyō)", "6:12: 4.25 m", "12:31: \u22120.30 m", "1412000 m³", "veryfastwords"),
        *("“a spring tide”", "3rd of 2ⁿ⁺¹", "x₁₂", "3.1 of 5 m", "Elin | 7:02 | 13:20"),
        *(
            "3. third",
            "1. first",
            "if tide < 2:\n    wait(30)",
            "0700\u2011118",
            "By a gauge of 1887",
        ),
    ),
}
NEVER = ("hidden", "Unseen", "35 euros", "Ships under", "cookies", "999")

# What is right, and what a reader gives in its place; a mended reader takes its line from here.
WRONG: dict[str, dict[str, str]] = {
    "clinic-chromium.pdf": {
        "10² mg": "10²  mg",
        "\U0001d451=(\U0001d464+5)/2 mg": "\U0001d451= \U0001d464+5 2  mg",
        "Ärztinnen": "Ärzt innen",
        "Krankenkasse": "Kranken kasse",
    },
    "harbour-libreoffice.pdf": {
        "v=(a+3)/t² in": "v= a+3 t²  in",
    },
}


def read(name: str) -> str:
    return read_file(name, (FILES / name).read_bytes()).text


def right(name: str) -> str:
    return (FILES / f"{name}{ENDING}").read_text(encoding="utf-8")


def test_every_file_has_a_right_text_and_facts() -> None:
    assert {path.name.removesuffix(ENDING) for path in FILES.glob(f"*{ENDING}")} == FACTS.keys()
    assert WRONG.keys() <= FACTS.keys()
    assert {path.name for path in FILES.iterdir() if path.suffix in (".docx", ".html", ".pdf")} <= (
        FACTS.keys()
    )


@pytest.mark.parametrize("name", FACTS)
def test_a_file_is_read_as_its_source_says(name: str) -> None:
    wanted = right(name)
    for correct, given in WRONG.get(name, {}).items():
        assert wanted.count(correct) == 1, correct
        wanted = wanted.replace(correct, given)
    assert read(name).rstrip("\n") == wanted.rstrip("\n")


@pytest.mark.parametrize("name", FACTS)
def test_a_file_says_its_facts_and_nothing_unseen(name: str) -> None:
    # Spaces that do not break are spaces to who looks for a fact.
    text, rightly = (
        one.replace("\u00a0", " ").replace("\u202f", " ") for one in (read(name), right(name))
    )
    assert [fact for fact in FACTS[name] if fact not in rightly] == [], "the right text lacks it"
    assert [fact for fact in FACTS[name] if fact not in text] == []
    assert [word for word in NEVER if word in text] == []
