// The playground: asks twice, shows both answers and what became of every token.

import { apiKey, getJson, postJson, setApiKey, streamAnswer } from "./api.js";
import { AnswerCard, verdict, warmth } from "./answers.js";
import { Dial } from "./dial.js";
import { Documents } from "./documents.js";
import { chunksOf } from "./files.js";
import { Costs, Ratios } from "./measured.js";
import { PromptView } from "./prompt.js";
import { ARTICLES, FACTS } from "./samples.js";
import { plural } from "./text.js";

const DEBOUNCE = 200; // milliseconds between the last touch of the dial and what follows
const MOST_TOKENS = 64; // of an answer
const MOST_LETTERS = 6; // of a token, on average: beyond, documents are certainly too long

const by = (id) => document.getElementById(id);
const cards = { full: new AnswerCard(by("full")), stitched: new AnswerCard(by("stitched")) };
const view = new PromptView({ spans: by("spans"), legend: by("legend"), bar: by("bar"), readout: by("readout") });
const documents = new Documents(by("documents"), edited);
const dial = new Dial(by("policy"), by("amount"), by("amount-name"), by("amount-value"), turned);
const ratios = new Ratios({ value: by("ratio"), note: by("ratio-note"), marks: by("marks") });
const costs = new Costs({ rows: by("costs"), said: by("cost") });
const state = { model: "", window: null, full: null, asked: null, running: null, timer: 0, config: {}, samples: [] };

// ------------------------------------------------------------------ what is asked
function asks() {
  const question = by("question").value.trim();
  if (by("retrieve").checked) return { question, documents: null, top: Number(by("top").value) };
  return { question, documents: documents.texts };
}

function body({ question, documents: texts, top }, policy) {
  const shared = { model: state.model, max_tokens: MOST_TOKENS, temperature: 0, kvcache: { policy } };
  if (texts === null) return { ...shared, question, top_k: top };
  return { ...shared, messages: [{ role: "user", content: question }], documents: texts };
}

function stream(card, asked, policy, signal) {
  const path = asked.documents === null ? "/v1/rag" : "/v1/chat/completions";
  const usage = asked.documents === null ? {} : { stream_options: { include_usage: true } };
  return card.fill((onPiece) => streamAnswer(path, { ...body(asked, policy), ...usage }, { signal, onPiece }));
}

// A policy under which explaining computes nothing, and that needs the same chunks as the dial's.
const peeking = () => (dial.text === "combination" ? "combination" : "reuse");

// The documents that are in the prompt are those that were given, or that the server found.
function explain(asked, found, policy, signal) {
  const documents = asked.documents ?? found?.sources?.map((source) => source.text) ?? [];
  return postJson("/v1/explain", body({ ...asked, documents }, policy), signal);
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
    if (isAsking) by("verdict").textContent = isStopped ? "Stopped." : "There is no answer.";
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
  by("warmth").textContent = "";
  by("verdict").textContent = "Full prefill answers first …";
  measureOver(asked);
  cards.stitched.clear();
  by("answers").scrollIntoView({ block: "nearest" });
  state.full = await stream(cards.full, asked, "full", signal);
  costs.answered("full", state.full.kvcache?.ttft);
  if (state.full.sources) {
    documents.set(state.full.sources.map((source) => source.text), { readOnly: true });
  }
  state.asked = asked;
  by("verdict").textContent = "… now from stitched chunks.";
  const policy = await stitched(asked, signal);
  // What was touched while the answer was on its way comes now.
  if (JSON.stringify(asks()) !== JSON.stringify(asked)) edited();
  else if (policy !== dial.text) turned();
}

async function stitched(asked, signal) {
  const policy = dial.text;
  cards.stitched.policy.textContent = `policy ${policy}`;
  const before = await explain(asked, state.full, peeking(), signal);
  const found = await stream(cards.stitched, asked, policy, signal);
  by("verdict").textContent = verdict(state.full, found);
  by("warmth").textContent = warmth(found.kvcache);
  const isWarm = measured(policy, asked, found.kvcache);
  const after = await explain(asked, found, policy, signal);
  show(policy, after, isWarm ? new Set() : fresh(before));
  return policy;
}

// What an answer says of its policy; whether all its chunks were cached.
function measured(policy, { question }, { ttft, misses }) {
  if (policy !== "full" && ttft) {
    ratios.add(policy, { full: state.full.kvcache.ttft, stitched: ttft, isWarm: !misses, question });
    if (!misses) costs.answered(policy, ttft); // else it is the time of a prefill
  }
  ratios.show(dial.text);
  return !misses;
}

// Times and counts of other documents are put aside.
function measureOver({ documents: texts }) {
  costs.begin(JSON.stringify(texts));
  costs.show(dial.text);
}

// What is known of the dial's position without asking anybody.
function showPosition() {
  by("against").textContent = dial.label;
  ratios.show(dial.text);
  costs.show(dial.text);
}

function show(policy, explained, looked = new Set()) {
  view.show(explained, looked);
  costs.explained(policy, explained);
  costs.show(dial.text);
  note(told(explained));
}

// Numbers of the chunks that would be prefilled.
function fresh({ spans, tokens }) {
  const chunks = spans.filter((span) => span.kind === "chunk");
  return new Set(chunks.flatMap((span, index) => (tokens[span.start]?.state === "prefilled" ? [index] : [])));
}

// The dial moved: what it would compute, at once; and the answer that follows, if there was one.
function turned() {
  showPosition();
  if (state.asked) cards.stitched.markStale();
  soon(state.asked && by("live").checked ? again : look);
}

async function again(signal) {
  const asked = state.asked;
  const policy = dial.text;
  show(policy, await explain(asked, state.full, policy, signal));
  await stitched(asked, signal);
}

async function look(signal) {
  const asked = state.asked ?? asks();
  if (!asked.question || !(asked.documents || state.asked)) return;
  const policy = dial.text;
  const explained = await explain(asked, state.full, policy, signal);
  // Who chooses tokens has to look at the chunks, so those that were missing are there now.
  const looked = explained.recomputed_tokens ? fresh(explained) : new Set();
  show(policy, explained, looked);
  if (looked.size) note(`${told(explained)} ${looked.size} of the chunks were prefilled just now, to choose from them.`);
}

// What the cache holds of the documents; computes nothing.
async function peek(signal) {
  const asked = asks();
  if (!asked.question || !asked.documents) return;
  const explained = await explain(asked, null, peeking(), signal);
  const missing = fresh(explained).size;
  const chunks = explained.spans.filter((span) => span.kind === "chunk").length;
  measureOver(asked);
  show(peeking(), explained);
  note(
    missing
      ? `Nothing was computed yet: ${missing} of ${chunks} documents are not cached. Ask, or move the dial.`
      : "All documents are cached. Ask, or move the dial.",
  );
}

function told({ policy, gate, recomputed_tokens: again, tokens, query_tokens: query }) {
  if (gate) return `The gate: ${gate}.`;
  if (tokens[0]?.state === "computed") return `${policy}: everything is computed.`;
  return `${policy}: ${again} of ${tokens.length - query} tokens before the question are computed again.`;
}

function note(text) {
  by("prompt-note").textContent = text;
}

function edited() {
  state.asked = null;
  for (const card of [...Object.values(cards), view]) card.markStale();
  soon(peek, 2 * DEBOUNCE);
}

function choose(sample) {
  by("question").value = sample.question;
  by("retrieve").checked = false;
  if (sample.policy) dial.set(sample.policy);
  showPosition();
  retrieving();
}

function retrieving() {
  const is = by("retrieve").checked;
  by("top-row").hidden = !is;
  by("retrieve-note").hidden = !is;
  by("adding").hidden = is;
  documents.set(is ? [] : state.samples[by("sample").value].documents, { readOnly: is, isSample: true });
  edited();
}

// ------------------------------------------------------------------ files
// Each file is a run of documents; what cannot be used is told, the others are added.
async function addFiles(files) {
  settle(false);
  tell("files-note", "");
  tell("files-error", "");
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
  tell("files-note", added.length ? `Added ${added.join(", ")}.` : "");
  tell("files-error", refused.join(" "));
  if (added.length) edited();
  else settle(!state.timer && !state.running);
}

async function readable(file) {
  if (by("retrieve").checked) throw new Error("The server retrieves the documents; untick that to add files.");
  const texts = await chunksOf(file, state.config.file_bytes);
  const others = documents.isSample ? [] : documents.texts;
  if (others.length + texts.length > state.config.documents) {
    throw new Error(`${file.name} makes ${plural(texts.length, "document")}, and a question may have ${state.config.documents}; give a smaller file.`);
  }
  const letters = [...others, ...texts].reduce((sum, text) => sum + text.length, 0);
  if (state.window && letters > MOST_LETTERS * state.window) {
    throw new Error(`${file.name} would make ${letters.toLocaleString("en")} letters of documents, more than the ${plural(state.window, "token")} that ${state.model} reads; give a smaller file.`);
  }
  return texts;
}

function tell(id, text) {
  by(id).textContent = text;
  by(id).hidden = !text;
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
  by("question").value = state.samples[0].question;
  documents.set(state.samples[0].documents, { isSample: true });
  showPosition();
  by("reader-note").hidden = !config.reader;
  by("key-form").hidden = !config.needs_key;
  by("retrieve-row").hidden = !config.rag;
  by("top").value = config.top_k;
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
by("question").addEventListener("input", edited);
by("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    by("form").requestSubmit();
  }
});
by("retrieve").addEventListener("change", retrieving);
by("add").addEventListener("click", () => documents.add("", { focus: true }));
by("clear").addEventListener("click", () => {
  documents.set([]);
  edited();
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
  if (isBusy()) state.running?.abort();
  else run(ask, { isAsking: true });
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
});
begin().catch(failed);
