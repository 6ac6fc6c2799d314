// The playground: asks twice, shows both answers and what became of every token.

import { apiKey, getJson, postJson, setApiKey, streamAnswer } from "./api.js";
import { AnswerCard, agreement, heading, race, stitchedOf, verdict, warmth } from "./answers.js";
import { Dial, inWords, named } from "./dial.js";
import { Documents } from "./documents.js";
import { chunksOf } from "./files.js";
import { Costs } from "./measured.js";
import { PromptView } from "./prompt.js";
import { ARTICLES, FACTS } from "./samples.js";
import { count, plural, usedOf } from "./text.js";

const DEBOUNCE = 200; // milliseconds between the last touch of the dial and what follows
const MOST_TOKENS = 64; // of an answer
const MOST_LETTERS = 6; // of a token, on average: beyond, documents are certainly too long
const OWN = "own"; // what is chosen of the samples once something of one was changed
const NOTHING_YET = "Full prefill and cached chunks"; // the heading before anything was answered
const NO_DOCUMENTS = "There are no documents, so nothing is stitched.";

const by = (id) => document.getElementById(id);
const cards = {
  full: new AnswerCard(by("full"), by("full-lane")),
  stitched: new AnswerCard(by("stitched"), by("stitched-lane")),
};
const view = new PromptView({ spans: by("spans"), legend: by("legend"), bar: by("bar"), readout: by("readout") });
const documents = new Documents(by("documents"), changed);
const dial = new Dial(by("policy"), by("amount"), by("amount-name"), by("amount-value"), turned);
const costs = new Costs({ rows: by("costs"), said: by("cost") });
const state = { model: "", window: null, full: null, asking: "", asked: null, running: null, timer: 0, config: {}, samples: [] };

// ------------------------------------------------------------------ what is asked
function asks() {
  return { question: by("question").value.trim(), documents: documents.texts };
}

function body({ question, documents: texts }, policy) {
  const messages = [{ role: "user", content: question }];
  return { model: state.model, max_tokens: MOST_TOKENS, temperature: 0, kvcache: { policy }, messages, documents: texts };
}

function stream(card, asked, policy, signal) {
  const sent = { ...body(asked, policy), stream_options: { include_usage: true } };
  return card.fill((onPiece) => streamAnswer("/v1/chat/completions", sent, { signal, onPiece }));
}

// A policy under which explaining computes nothing, and that needs the same chunks as the dial's.
const PEEKED = ["bestfew", "bestlast", "combination"];
const peeking = () => (PEEKED.includes(dial.chosen.id) ? dial.text : "reuse");

function explain(asked, policy, signal) {
  return postJson("/v1/explain", body(asked, policy), signal);
}

// ------------------------------------------------------------------ what happens
// One thing at a time: a new one stops the one before.
async function run(work, { isAsking = false } = {}) {
  clearTimeout(state.timer);
  state.timer = 0;
  settle(false);
  state.running?.abort();
  const control = (state.running = new AbortController());
  by("error").hidden = true;
  document.body.classList.toggle("busy", isAsking);
  by("ask").textContent = isAsking ? "Stop" : "Ask";
  try {
    await work(control.signal);
  } catch (error) {
    if (state.running !== control) return;
    const isStopped = error.name === "AbortError";
    if (isAsking || work === again) unanswered(isStopped ? "Stopped." : "There is no answer.");
    if (!isStopped) complain(error);
  } finally {
    if (state.running === control) {
      state.running = null;
      settle(!state.timer);
      document.body.classList.remove("busy");
      by("ask").textContent = "Ask";
    }
  }
}

// `work` once nothing was touched for a moment; an answer on its way is not broken off by it.
function soon(work, delay = DEBOUNCE) {
  clearTimeout(state.timer);
  settle(false);
  state.timer = setTimeout(() => {
    state.timer = 0;
    if (!isBusy()) run(work);
  }, delay);
}

function settle(is) {
  by("main").setAttribute("aria-busy", String(!is));
}

const isBusy = () => document.body.classList.contains("busy");

function unanswered(why) {
  by("verdict").textContent = why;
  for (const id of ["warmth", "agreement"]) by(id).textContent = ""; // of an answer before
}

function complain(error) {
  by("error").textContent = error.message;
  by("error").hidden = false;
}

function failed(error) {
  complain(error);
  settle(true);
}

// Full prefill first, then stitched: side by side they would slow each other down.
async function ask(signal) {
  const asked = asks();
  if (!asked.question) throw new Error("The question is empty; ask something.");
  state.full = state.asked = null;
  state.asking = JSON.stringify(asked);
  for (const id of ["warmth", "agreement"]) by(id).textContent = "";
  by("answers-title").textContent = NOTHING_YET;
  by("verdict").textContent = "Full prefill answers first …";
  measureOver(asked.documents);
  cards.stitched.clear();
  cards.stitched.name(inWords(dial.text));
  by("answers").scrollIntoView({ block: "nearest" });
  state.full = await stream(cards.full, asked, "full", signal);
  race(cards, { full: state.full });
  costs.answered("full", state.full.kvcache?.ttft);
  costs.filled(state.full);
  state.asked = asked;
  by("verdict").textContent = "… now from stitched chunks.";
  const policy = await stitched(asked, signal);
  // What was touched while the answer was on its way comes now.
  if (JSON.stringify(asks()) !== state.asking) edited();
  else if (policy !== dial.text) turned();
}

async function stitched(asked, signal) {
  const policy = dial.text;
  by("agreement").textContent = "";
  by("answers-title").textContent = NOTHING_YET;
  if (state.full.text) cards.full.mark([{ text: state.full.text, differs: false }]);
  cards.stitched.name(inWords(policy));
  const before = await explain(asked, peeking(), signal);
  const found = await stream(cards.stitched, asked, policy, signal);
  race(cards, { full: state.full, stitched: found });
  by("answers-title").textContent = heading(state.full, found);
  by("verdict").textContent = verdict(state.full, found);
  by("warmth").textContent = warmth(found.kvcache);
  await compare(found, signal);
  const isWarm = measured(found.kvcache);
  const after = await explain(asked, policy, signal);
  show(after, isWarm ? new Set() : fresh(before));
  return policy;
}

// Where the two answers have other words; the server says it.
async function compare(found, signal) {
  const said = { full: state.full.text, stitched: found.text };
  const compared = await postJson("/v1/playground/compare", said, signal);
  by("agreement").textContent = agreement(compared);
  for (const side of ["full", "stitched"]) cards[side].mark(compared[side]);
}

// What an answer cost; whether all its chunks were cached, else its time is that of a prefill.
function measured(kvcache) {
  const { cached, computed } = stitchedOf(kvcache);
  if (cached && !computed) costs.answered(named(kvcache.policy), kvcache.ttft);
  return !computed;
}

// Times and counts of other documents are put aside.
function measureOver(texts) {
  costs.begin(JSON.stringify(texts));
  costs.show(dial.text);
}

// What is known of the dial's position without asking anybody.
function showPosition() {
  by("warning").textContent = state.config.warnings?.[dial.chosen.id] ?? "";
  by("warning").hidden = !by("warning").textContent;
  costs.show(dial.text);
  if (!cards.stitched.isFilled) cards.stitched.name(inWords(dial.text));
}

function show(explained, looked = new Set()) {
  documents.mark(explained.answered_from);
  view.show(explained, looked);
  costs.explained(named(explained.policy), explained);
  costs.show(dial.text);
  note(told(explained));
}

// Numbers of the chunks that would be prefilled.
function fresh({ spans, tokens }) {
  const chunks = spans.filter((span) => span.kind === "chunk");
  const isPrefilled = (token) => token.state === "prefilled";
  return new Set(chunks.flatMap(({ start, stop }, index) => (tokens.slice(start, stop).some(isPrefilled) ? [index] : [])));
}

// The dial moved: what it would compute, at once; and the answer that follows, if there was one.
function turned() {
  showPosition();
  if (state.asked) cards.stitched.markStale();
  soon(state.asked && by("live").checked ? again : look);
}

async function again(signal) {
  const { asked } = state;
  show(await explain(asked, dial.text, signal));
  await stitched(asked, signal);
}

async function look(signal) {
  const asked = state.asked ?? asks();
  if (!asked.question) return;
  const explained = await explain(asked, dial.text, signal);
  // Who chooses tokens has to look at the chunks, so those that were missing are there now.
  const looked = explained.recomputed_tokens ? fresh(explained) : new Set();
  show(explained, looked);
  if (looked.size) note(`${told(explained)} ${looked.size} of the chunks were prefilled just now, to choose from them.`);
}

// What the cache holds of the documents; computes nothing.
async function peek(signal) {
  const asked = asks();
  measureOver(asked.documents);
  if (!asked.question) return note("The prompt is shown once there are a question and its documents.");
  const explained = await explain(asked, peeking(), signal);
  const missing = fresh(explained).size;
  show(explained);
  if (!hasChunks(explained)) return;
  if (explained.unused_chunks) note(`${told(explained)} ${missing ? "The first is not cached yet" : "The first is cached"}. Ask, or move the dial.`);
  else if (missing) note(`Not cached yet: ${missing} of ${plural(asked.documents.length, "document")}. Ask, or move the dial.`);
  else note("All documents are cached. Ask, or move the dial.");
}

const hasChunks = ({ spans }) => spans.some((span) => span.kind === "chunk");

function told(explained) {
  const used = usedOf(explained);
  const policy = inWords(named(explained.policy)) + (used && ` from ${used}`);
  const { gate, recomputed_tokens: again, fresh_tokens: withIt, tokens, query_tokens: query } = explained;
  if (!hasChunks(explained)) return NO_DOCUMENTS;
  if (gate) return `The gate: ${gate}.`;
  if (tokens[0]?.state === "computed") return `${policy}: everything is computed.`;
  if (withIt) return `${policy}: ${count(withIt)} of ${plural(tokens.length - query, "token")} before the question are computed with it.`;
  return `${policy}: ${count(again)} of ${plural(tokens.length - query, "token")} before the question are computed again.`;
}

function note(text) {
  by("prompt-note").textContent = text;
}

function edited() {
  state.asked = null;
  for (const card of [...Object.values(cards), view]) card.markStale();
  documents.mark(null);
  soon(peek, 2 * DEBOUNCE);
}

// Somebody changed a sample, which can be chosen again now.
function changed() {
  by("sample").value = OWN;
  edited();
}

function choose(sample) {
  by("question").value = sample.question;
  documents.set(sample.documents, { isSample: true });
  tellOfFiles();
  if (sample.policy) dial.set(sample.policy);
  showPosition();
  edited();
}

// ------------------------------------------------------------------ files
// Each file is a run of documents; what cannot be used is told, the others are added.
async function addFiles(files) {
  settle(false);
  tellOfFiles();
  const [added, refused] = [[], []];
  for (const file of files) {
    try {
      const texts = await readable(file);
      if (documents.isSample) documents.set([]); // one's own are asked about alone
      texts.forEach((text, at) => documents.add(text, { source: `${file.name}, ${at + 1}/${texts.length}` }));
      added.push(`${file.name}: ${plural(texts.length, "document")}`);
    } catch (error) {
      refused.push(error.message);
    }
  }
  tellOfFiles(added.length ? `Added ${added.join(", ")}.` : "", refused.join(" "));
  if (added.length) changed();
  else settle(!state.timer && !state.running);
}

async function readable(file) {
  const texts = await chunksOf(file, state.config.file_bytes);
  const others = documents.isSample ? [] : documents.texts;
  if (others.length + texts.length > state.config.documents) {
    throw new Error(`${file.name} makes ${plural(texts.length, "document")}, and a question may have ${state.config.documents}; give a smaller file.`);
  }
  const letters = [...others, ...texts].reduce((sum, text) => sum + text.length, 0);
  if (state.window && letters > MOST_LETTERS * state.window) {
    throw new Error(`${file.name} would make ${count(letters)} letters of documents, more than the ${plural(state.window, "token")} that ${state.model} reads; give a smaller file.`);
  }
  return texts;
}

function tellOfFiles(added = "", refused = "") {
  for (const [id, text] of [["files-note", added], ["files-error", refused]]) {
    by(id).textContent = text;
    by(id).hidden = !text;
  }
}

// A file that is dropped beside the list would else be opened instead of this page.
function receiveFiles() {
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  const mark = (is) => by("documents-panel").classList.toggle("over", is);
  addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    mark(true);
  });
  addEventListener("dragleave", (event) => event.relatedTarget ?? mark(false));
  addEventListener("drop", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    mark(false);
    addFiles([...event.dataTransfer.files]);
  });
  by("files").addEventListener("change", async (event) => {
    const files = [...event.target.files];
    event.target.value = ""; // so that the same file can be chosen again
    await addFiles(files);
  });
}

// ------------------------------------------------------------------ the beginning
async function begin() {
  const config = (state.config = await getJson("/playground/config"));
  state.samples = config.reader ? FACTS : ARTICLES;
  state.samples.forEach(({ name }, index) => by("sample").add(new Option(name, index)));
  const own = new Option("Your own", OWN);
  own.disabled = own.hidden = true; // shown where it is so, and never chosen
  by("sample").add(own);
  dial.follow(config.policy);
  if (!config.auxiliary) dial.disable("cacheclip", "start with --auxiliary MODEL");
  by("question").value = state.samples[0].question;
  documents.set(state.samples[0].documents, { isSample: true });
  showPosition();
  by("reader-note").hidden = !config.reader;
  by("key-form").hidden = !config.needs_key;
  if (config.needs_key && !apiKey()) {
    by("key").focus();
    note("This server wants an API key; give yours above.");
    settle(true);
    return;
  }
  await meet();
}

async function meet() {
  const models = await getJson("/v1/models");
  [{ id: state.model, max_model_len: state.window }] = models.data;
  by("model").textContent = state.model;
  await run(peek);
}

by("sample").addEventListener("change", (event) => choose(state.samples[event.target.value]));
by("question").addEventListener("input", changed);
by("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    by("form").requestSubmit();
  }
});
by("add").addEventListener("click", () => documents.add("", { focus: true }));
by("clear").addEventListener("click", () => {
  documents.set([]);
  tellOfFiles();
  changed();
});
receiveFiles();
by("key").value = apiKey();
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(by("key").value);
  by("error").hidden = true;
  meet().catch(failed);
});
by("form").addEventListener("submit", (event) => {
  event.preventDefault();
  // The button stops an answer; Enter stops it, too, unless something else is asked now.
  const isNew = !event.submitter && JSON.stringify(asks()) !== state.asking;
  if (isBusy() && !isNew) state.running?.abort();
  else run(ask, { isAsking: true });
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
begin().catch(failed);
