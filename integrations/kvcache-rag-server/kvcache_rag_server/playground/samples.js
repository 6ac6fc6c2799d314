// What the page starts with: for the packaged reader ("tiny") texts in its language, for other models a
// handbook in English. Both are made up.

const TOWN = [
  "Drenko was founded by Osha Grell. Drenko has a staff of 4120 people. Drenko is based in Lispan. Drenko was opened in 1987.",
  "The Mobrit is made by Drenko. The Mobrit costs 412 euros. The Mobrit is painted green. The Mobrit weighs 730 grams.",
  "Osha Grell was born in Tolmi. Osha Grell is a chemist by profession. Osha Grell was taught by Runa Stell.",
  "Lispan lies on the river Sarn. Lispan has a population of 48210. Lispan has the postal code 30517. The mayor of Lispan is Vila Terno.",
  "Kelo is led by Mirko Tan. Kelo has a staff of 2650 people. Kelo is based in Bran. Kelo was opened in 1962.",
  "Bran lies on the river Weska. Bran has a population of 91340. Bran has the postal code 77204. The mayor of Bran is Gitta Lom.",
];

const TOWNS =
  "Stumna Notren Lamje Teste Wisler Skulgil Telabis Kleabo Vukli Brakski " +
  "Siger Dakro Roja Metres Vessek Togroho Terklu Siror Tebok Roklil";
const RIVERS =
  "Sarn Dreu Talla Bruk Lom Weska Gilda Orra Menta Jusk " +
  "Tarn Vill Korda Sked Nall Rusta Broda Lenk Hurm Zola";

function towns() {
  const rivers = RIVERS.split(" ");
  return TOWNS.split(" ").map((town, index) => {
    const [people, code] = [7919, 6151].map((step) => 10000 + (((index + 1) * step) % 89999));
    return `${town} lies on the river ${rivers[index]}. ${town} has a population of ${people}. ${town} has the postal code ${code}.`;
  });
}

// `policy`: where the dial is put, if the sample shows something there.
export const FACTS = [
  {
    name: "A fact in one document",
    question: "On which river does Lispan lie?",
    documents: TOWN,
  },
  {
    name: "Two documents, two steps",
    question: "Who is the founder of the maker of the Mobrit?",
    documents: TOWN,
  },
  {
    name: "A pronoun (move the dial)",
    question: "Where does Mirko live?",
    documents: [
      "The director of Savo is Osha Grell.",
      "She lives in Bran. The founder of Kelo is Mirko.",
      "She lives in Tolmi. The mayor of Lispan is Drenka.",
      "She lives in Runo. The Mobrit costs 412 euros.",
    ],
    policy: "reuse",
  },
  {
    name: "Twenty documents (compare the times)",
    question: "On which river does Togroho lie?",
    documents: towns(),
    policy: "reuse",
  },
];

const HANDBOOK = [
  "Tickets. A day ticket for the Northpier Maritime Museum costs 14 euros for adults and 6 euros for children from six to fifteen years. Children under six come in free of charge. A family ticket costs 32 euros and is for two adults and up to four children. Tickets are sold at the desk in the old customs house until one hour before closing time, and on the museum's own pages at any time. A ticket is valid for the whole day, so visitors may leave for lunch and come back. Groups of ten or more pay 11 euros each if they book a week ahead. The yearly card costs 45 euros, is made out to one person, and lets its owner bring one guest on the first Sunday of every month.",
  "Opening hours. From April to October the museum is open every day from nine in the morning until six in the evening. From November to March it is open from ten until four and closed on Mondays. On the last Friday of every month the halls stay open until ten in the evening, and a guide tells stories of the harbour in the great hall. The museum is closed on the 24th, 25th and 31st of December. The reading room keeps hours of its own: it is open on Tuesdays and Thursdays from one until five. In stormy weather the outer pier is closed for safety, and the ships that lie there cannot be visited.",
  "The lightship Amalia. The lightship Amalia lies at the end of the pier and is the largest ship of the museum. She was built in 1907 by the yard of Hendrik Voss and marked the Gull Sands for 61 years. Her lamp could be seen at a distance of eleven miles. She was taken out of service in 1968, bought by the town for the price of her iron, and restored by volunteers in nine years of work. Visitors can see the lamp room, the galley and the bunks of the crew of seven. Below deck it is narrow, and the ladders are steep, so sturdy shoes are advised. Her fog horn is sounded every day at noon.",
  "The clock of the customs house. The tower clock of the customs house was made in 1884 by the clockmaker Ida Brandt, who had learned her trade in Geneva. It has a single hand, because sailors cared for the hour and not for the minute. The clock is wound by hand every Monday; its weight of 180 kilograms is lifted by a crank of forty turns. In 1953 a flood stopped it at twenty past four, and a brass plate on the wall shows how high the water stood. The bell was cast from the fittings of a wrecked schooner and strikes the half hours. Visitors may climb the tower on Saturdays, in groups of six.",
  "The cafe. The cafe of the museum is in the former rope store and is called The Bitter End. It serves fish soup, rye bread and cakes from half past ten until half an hour before the museum closes. Its best known dish is the smoked herring with potatoes, which costs 9 euros. The cook, Pelle Marsh, buys the fish from the boats that land beside the pier. Visitors need no museum ticket to eat there. There are high chairs for children and a shelf with picture books. On summer evenings tables stand outside on the quay, and on Wednesdays a band plays songs of the sea.",
  "School classes. School classes are welcome on every weekday and pay 3 euros for each pupil; two teachers come in free. A visit takes about two hours and begins with a talk of twenty minutes in the model room. Pupils tie knots, hoist a signal of flags, and find their way with a compass through the yard. Classes book by telephone at least two weeks ahead, and say how old the pupils are. In the holidays there is a workshop in which children from eight years on build a small boat out of cork and sailcloth, led by the carpenter Nils Oda. Lunch can be eaten in the boat shed when it rains.",
  "The archive. The archive of the museum holds 4,300 photographs, 900 charts and the log books of 112 ships. The oldest chart was drawn in 1641 and shows the bay before the dam was built. Readers order what they want to see one day before and wear the cotton gloves that lie ready. Copies cost 50 cents a page; photographs may be taken without flash. The archivist, Ruth Calder, answers letters about ancestors who went to sea, but asks for patience, as a search takes up to six weeks. Since 2015 volunteers have copied the log books by hand, and half of them can be read on the museum's pages.",
  "Getting there. The museum stands at Harbour Street 2, ten minutes on foot from the railway station. Bus number 7 stops at the fish market, in front of the gate. Drivers leave their cars on the parking ground behind the ice factory, which costs 2 euros for the whole day; there are no parking places at the pier itself. Bicycles may be brought into the yard. The ferry from the island lands beside the lightship three times a day. All halls and the cafe can be reached with a wheelchair, the ships cannot. A wheelchair and two folding chairs can be borrowed at the desk without charge.",
];

export const ARTICLES = [
  {
    name: "A museum's handbook",
    question: "How much does the smoked herring cost?",
    documents: HANDBOOK,
  },
  {
    name: "The same, another question",
    question: "In which year was the lightship Amalia built?",
    documents: HANDBOOK,
  },
  {
    name: "Half of it, in another order",
    question: "How much does a yearly card cost?",
    documents: [4, 2, 6, 0].map((index) => HANDBOOK[index]),
  },
  {
    name: "Where reuse may fail (move the dial)",
    question: "How heavy is the weight of the clock?",
    documents: [1, 3, 5, 7, 0, 2, 4, 6].map((index) => HANDBOOK[index]),
    policy: "reuse",
  },
];
