"""Notes of a village's boat club, questions that they answer, and questions that they do not.

Half of the latter are about the world at large, half are such as a member might ask.
"""

from __future__ import annotations

from typing import Final

# By their file: what it says, and a question that it answers in other words than its own.
NOTES: Final = {
    "roof.md": (
        "The committee met on 3 March. The boathouse roof gets slate, not tin: slate "
        "costs twice as much, but lasts eighty years. Work begins after the regatta.",
        "What did we decide to cover the roof of the boathouse with?",
    ),
    "winch.txt": (
        "The winch on the slipway is greased every spring. Use the white lithium grease "
        "from the blue tin, never the graphite one, which eats the seals.",
        "Which grease is right for the slipway's winch?",
    ),
    "keys.md": (
        "# Keys\n\nSpare keys hang behind the dartboard. Who borrows one signs the list. "
        "The key of the fuel store is with Henrike only.",
        "Where do I find a spare key?",
    ),
    "dues.txt": (
        "Annual dues are 140 euros for adults and 35 for under-eighteens, payable by the "
        "end of February. Families pay 260 together.",
        "How much does a grown-up pay per year for membership?",
    ),
    "regatta.md": (
        "The Midsummer Regatta starts at ten on the last Saturday of June. Skippers' "
        "briefing is at nine in the sail loft; bring your own radio.",
        "At what time is the briefing before the regatta?",
    ),
    "heron.txt": (
        "Our oldest boat, the Heron, was built in 1931 by Tobias Wren of larch on oak. "
        "She leaked until her garboards were renewed in 2009.",
        "Who built the Heron?",
    ),
    "soup.md": (
        "Fish soup for forty: six kilos of pollock, three of potatoes, two leeks, a litre"
        " of cream, dill at the very end. Simmer, never boil, once the cream is in.",
        "What kind of fish goes into the soup?",
    ),
    "wifi.txt": (
        "The club's wireless network is called Lighthouse. Its password changes every "
        "first of the month and is written on the board beside the coffee machine.",
        "Where can I read the password of the wifi?",
    ),
    "insurance.md": (
        "All club boats are insured with Northern Mutual, policy 88-1207. Damage must be "
        "reported within seven days with photographs. The excess is 500 euros.",
        "How soon does damage to a boat have to be reported to the insurance?",
    ),
    "children.txt": (
        "Children's sailing is on Wednesday afternoons from May to September. Everyone "
        "must be able to swim fifty metres. Paula teaches the beginners, Imre the "
        "advanced.",
        "Who gives lessons to the children that are just starting to sail?",
    ),
    "tide.md": (
        "The harbour bar has 1.2 metres of water at low tide. Boats that draw more have "
        "to wait for half tide, about three hours.",
        "How deep is it over the bar when the tide is out?",
    ),
    "radio.txt": (
        "We listen on channel 37. The harbour master answers on 12, the coastguard on 16."
        " Do a radio check before you leave the pier.",
        "On which channel can the coastguard be reached?",
    ),
    "library.md": (
        "Books from the reading room may be kept for four weeks. Charts are not lent out."
        " Old yearbooks go back to 1904.",
        "How long may I keep a book that I borrowed?",
    ),
    "stove.txt": (
        "The stove in the clubroom burns beech only; pine soots the flue. The sweep comes"
        " in October. Ashes go into the iron bucket outside.",
        "What wood may be burnt in the stove?",
    ),
    "election.md": (
        "At the general meeting Ottilie Brandt was elected chair with 41 votes to 17. The"
        " treasurer, Samuel Okoro, was confirmed without a vote against.",
        "Who is the new chair of the club?",
    ),
    "dog.txt": (
        "The club's dog, Bosun, is fed at seven and at five. No chocolate, no cooked "
        "bones. The vet is Dr. Lindqvist in Harbour Street.",
        "What must Bosun never be given to eat?",
    ),
    "mooring.md": (
        "There are 62 moorings. The waiting list is about four years long. A mooring that"
        " was not used for two summers falls back to the club.",
        "How many years does one wait for a mooring?",
    ),
    "storm.txt": (
        "In the storm of 14 November two pontoons broke loose and the flagpole fell on "
        "the bicycle shed. Nobody was hurt. Repairs came to 9,300 euros.",
        "What did the repairs after the storm cost?",
    ),
    "paint.md": (
        "Antifouling is put on in April, two coats, a day apart. Copper paint is "
        "forbidden in the bay since 2021; use the silicone one.",
        "Why can we not use copper paint any more?",
    ),
    "anniversary.txt": (
        "The club turns 120 next year. There will be a dinner in the town hall, an "
        "exhibition of half models, and a race for boats built before 1950.",
        "What is planned for the club's birthday?",
    ),
}

UNANSWERED: Final = (
    "What is the capital of Mongolia?",
    "How do vaccines train the immune system?",
    "Who wrote the opera Rigoletto?",
    "What is the square root of 1764?",
    "Which planet has the shortest year?",
    "How do I reverse a linked list in Python?",
    "When did the Roman Empire fall?",
    "What are the side effects of ibuprofen?",
    "Who won the world cup in 1998?",
    "Why is the sky blue?",
    "How many calories does a banana have?",
    "What is our parental leave policy?",
    "When does the next train to Hamburg leave?",
    "How do I reset my printer?",
    "Which lawyer drew up the rental contract?",
    "What grade did Anna get in mathematics?",
    "How often should tomatoes be watered?",
    "Who is the landlord of the flat in Berlin?",
    "What did the doctor say about my knee?",
    "Which mobile phone should I buy?",
)
