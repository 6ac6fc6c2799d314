"""Six notes of a household in two languages, what they answer, and what they do not.

The second half of the questions that have no answer is about the very things that the notes are
about: only what is asked of them is not said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Notebook:
    """Notes and questions in one language.

    Attributes:
        notes: Their texts.
        answered: Questions that one of them answers, and which one.
        far: Questions about other things.
        near: Questions about what the notes are about, which they do not answer.
    """

    notes: tuple[str, ...]
    answered: tuple[tuple[str, int], ...]
    far: tuple[str, ...]
    near: tuple[str, ...]

    @property
    def asked(self) -> list[tuple[str, tuple[int, ...]]]:
        """All questions, each with the numbers of the notes that answer it."""
        answered = [(question, (note,)) for question, note in self.answered]
        others: Sequence[str] = (*self.far, *self.near)
        return [*answered, *((question, ()) for question in others)]

    @property
    def numbers(self) -> tuple[range, range, range]:
        """Of the questions that are answered, of those about other things, of the others."""
        far = len(self.answered) + len(self.far)
        return (
            range(len(self.answered)),
            range(len(self.answered), far),
            range(far, len(self.asked)),
        )


ENGLISH: Final = Notebook(
    notes=(
        "The heating was serviced on 9 October by Kessler & Sons. They replaced the circulation "
        "pump, which cost 640 euros. The next service is due in two years. The pressure should "
        "stay between 1.5 and 2 bar; if it falls, top up at the tap behind the boiler.",
        "The tax return has to be at the office by 31 July. Mrs Vogt, our adviser, needs the "
        "receipts for the home office, the childminder's invoice and the bank's statement of "
        "interest. Last year we got 1,180 euros back.",
        "Ida's school trip goes to Lindau from 4 to 8 June. She needs a rain jacket, sturdy shoes "
        "and 60 euros of pocket money. Phones stay at home. The coach leaves at half past seven "
        "from the sports hall.",
        "Sourdough bread: 400 g of rye flour, 200 g of wheat, 420 ml of water and 12 g of salt. "
        "Let the dough rest for fourteen hours in the cellar, then bake it for fifty minutes, the "
        "first ten of them at 250 degrees.",
        "The car, a grey Octavia, goes in for its inspection in March. Its winter tyres are stored "
        "at Tyre-Benz in Mill Lane. The insurance was moved to Concordia for 412 euros a year; "
        "whoever drives must be over twenty-three.",
        "While we are away, Mr Adeyemi from the second floor waters the plants: the orchid once a "
        "week, the tomatoes every evening. The key of the letter box hangs beside the meter. The "
        "cat moves in with Ruth.",
    ),
    answered=(
        ("What did the new pump cost?", 0),
        ("Who serviced our heating?", 0),
        ("How high should the pressure of the boiler be?", 0),
        ("Where do I top up the water of the heating?", 0),
        ("By when must we hand in the tax return?", 1),
        ("Which papers does Mrs Vogt want?", 1),
        ("How much tax did we get back last year?", 1),
        ("Where does Ida's class travel to?", 2),
        ("How much pocket money does Ida need?", 2),
        ("When does the coach of the school trip leave?", 2),
        ("Can Ida take her phone along?", 2),
        ("How long does the dough rest?", 3),
        ("How much salt goes into the bread?", 3),
        ("How hot is the oven at the beginning?", 3),
        ("Where are our winter tyres?", 4),
        ("How old must one be to drive the Octavia?", 4),
        ("What do we pay for the car's insurance?", 4),
        ("Who waters the flowers while we are on holiday?", 5),
        ("How often is the orchid given water?", 5),
        ("With whom does the cat stay?", 5),
    ),
    far=(
        "What is the capital of Australia?",
        "How does a nuclear reactor work?",
        "Who painted the Mona Lisa?",
        "What is the derivative of the sine?",
        "How do I cancel my gym membership?",
        "When was the Berlin Wall built?",
        "Which vitamins are in spinach?",
        "How do I boil an egg so that it stays soft?",
        "What does the train to Munich cost?",
        "Who is the director of the choir?",
    ),
    near=(
        "How many litres of oil does the heating burn in a year?",
        "Who built the boiler?",
        "What does Mrs Vogt charge for her work?",
        "Which tax class are we in?",
        "How many children go on the school trip?",
        "What is the name of Ida's teacher?",
        "How much yeast belongs in the bread?",
        "What was the mileage of the Octavia at its last inspection?",
        "Who sold us the car?",
        "What does the cat get to eat?",
    ),
)

GERMAN: Final = Notebook(
    notes=(
        "Die Heizung wurde am 9. Oktober von Kessler & Söhne gewartet. Sie haben die Umwälzpumpe "
        "getauscht, das kostete 640 Euro. Die nächste Wartung ist in zwei Jahren fällig. Der Druck "
        "soll zwischen 1,5 und 2 bar bleiben; fällt er, wird am Hahn hinter dem Kessel "
        "nachgefüllt.",
        "Die Steuererklärung muss bis zum 31. Juli beim Amt sein. Frau Vogt, unsere Beraterin, "
        "braucht die Belege für das Arbeitszimmer, die Rechnung der Tagesmutter und die "
        "Zinsbescheinigung der Bank. Letztes Jahr bekamen wir 1.180 Euro zurück.",
        "Idas Klassenfahrt geht vom 4. bis 8. Juni nach Lindau. Sie braucht eine Regenjacke, feste "
        "Schuhe und 60 Euro Taschengeld. Telefone bleiben zu Hause. Der Bus fährt um halb acht an "
        "der Sporthalle ab.",
        "Sauerteigbrot: 400 g Roggenmehl, 200 g Weizenmehl, 420 ml Wasser und 12 g Salz. Der Teig "
        "ruht vierzehn Stunden im Keller, dann wird er fünfzig Minuten gebacken, die ersten zehn "
        "davon bei 250 Grad.",
        "Das Auto, ein grauer Octavia, muss im März zur Hauptuntersuchung. Die Winterreifen lagern "
        "bei Reifen-Benz im Mühlweg. Die Versicherung ist jetzt bei der Concordia, für 412 Euro im "
        "Jahr; wer fährt, muss über dreiundzwanzig sein.",
        "Während wir weg sind, gießt Herr Adeyemi aus dem zweiten Stock die Pflanzen: die Orchidee "
        "einmal in der Woche, die Tomaten jeden Abend. Der Schlüssel des Briefkastens hängt neben "
        "dem Zähler. Die Katze zieht zu Ruth.",
    ),
    answered=(
        ("Was hat die neue Pumpe gekostet?", 0),
        ("Wer hat unsere Heizung gewartet?", 0),
        ("Wie hoch soll der Druck des Kessels sein?", 0),
        ("Wo fülle ich das Wasser der Heizung nach?", 0),
        ("Bis wann müssen wir die Steuererklärung abgeben?", 1),
        ("Welche Unterlagen will Frau Vogt haben?", 1),
        ("Wie viel Steuern bekamen wir letztes Jahr zurück?", 1),
        ("Wohin fährt Idas Klasse?", 2),
        ("Wie viel Taschengeld braucht Ida?", 2),
        ("Wann fährt der Bus der Klassenfahrt ab?", 2),
        ("Darf Ida ihr Telefon mitnehmen?", 2),
        ("Wie lange ruht der Teig?", 3),
        ("Wie viel Salz kommt ins Brot?", 3),
        ("Wie heiß ist der Ofen am Anfang?", 3),
        ("Wo sind unsere Winterreifen?", 4),
        ("Wie alt muss man sein, um den Octavia zu fahren?", 4),
        ("Was zahlen wir für die Versicherung des Autos?", 4),
        ("Wer gießt die Blumen, während wir im Urlaub sind?", 5),
        ("Wie oft bekommt die Orchidee Wasser?", 5),
        ("Bei wem bleibt die Katze?", 5),
    ),
    far=(
        "Was ist die Hauptstadt von Australien?",
        "Wie funktioniert ein Kernreaktor?",
        "Wer hat die Mona Lisa gemalt?",
        "Was ist die Ableitung des Sinus?",
        "Wie kündige ich meinen Vertrag beim Fitnessstudio?",
        "Wann wurde die Berliner Mauer gebaut?",
        "Welche Vitamine stecken in Spinat?",
        "Wie koche ich ein Ei, damit es weich bleibt?",
        "Was kostet der Zug nach München?",
        "Wer leitet den Chor?",
    ),
    near=(
        "Wie viele Liter Öl verbraucht die Heizung im Jahr?",
        "Wer hat den Kessel gebaut?",
        "Was verlangt Frau Vogt für ihre Arbeit?",
        "In welcher Steuerklasse sind wir?",
        "Wie viele Kinder fahren mit auf die Klassenfahrt?",
        "Wie heißt Idas Lehrerin?",
        "Wie viel Hefe gehört ins Brot?",
        "Welchen Kilometerstand hatte der Octavia bei der letzten Untersuchung?",
        "Wer hat uns das Auto verkauft?",
        "Was bekommt die Katze zu fressen?",
    ),
)

LANGUAGES: Final = {"English": ENGLISH, "German": GERMAN}
