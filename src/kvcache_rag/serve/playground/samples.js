// What the page starts with: texts in the language of the packaged reader ("tiny"), which answers
// these questions rightly by full prefill. A real model reads anything.

const FACTS = [
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
export const SAMPLES = [
  {
    name: "A fact in one document",
    question: "On which river does Lispan lie?",
    documents: FACTS,
  },
  {
    name: "Two documents, two steps",
    question: "Who is the founder of the maker of the Mobrit?",
    documents: FACTS,
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
