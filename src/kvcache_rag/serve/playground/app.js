// The playground: asks twice, shows both answers and what became of every token.

import { apiKey, getJson, postJson, setApiKey, streamAnswer } from "./api.js";
import { AnswerCard, verdict, warmth } from "./answers.js";
import { Dial } from "./dial.js";
import { Documents } from "./documents.js";
import { PromptView } from "./prompt.js";
import { SAMPLES } from "./samples.js";

const DEBOUNCE = 200; // milliseconds between the last touch of the dial and what follows
const MOST_TOKENS = 128; // of an answer

const by = (id) => document.getElementById(id);
const cards = { full: new AnswerCard(by("full")), stitched: new AnswerCard(by("stitched")) };
const view = new PromptView({ spans: by("spans"), legend: by("legend"), bar: by("bar"), readout: by("readout") });
const documents = new Documents(by("documents"), edited);
const dial = new Dial(by("policy"), by("amount"), by("amount-name"), by("amount-value"), turned);
const state = { model: "", full: null, asked: null, running: null, timer: 0 };

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
  cards.stitched.clear();
  by("answers").scrollIntoView({ block: "nearest" });
  state.full = await stream(cards.full, asked, "full", signal);
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
  const after = await explain(asked, found, policy, signal);
  view.show(after, found.kvcache.misses ? fresh(before) : new Set());
  note(told(after));
  return policy;
}

// Numbers of the chunks that would be prefilled.
function fresh({ spans, tokens }) {
  const chunks = spans.filter((span) => span.kind === "chunk");
  return new Set(chunks.flatMap((span, index) => (tokens[span.start]?.state === "prefilled" ? [index] : [])));
}

// The dial moved: what it would compute, at once; and the answer that follows, if there was one.
function turned() {
  if (state.asked) cards.stitched.markStale();
  soon(state.asked && by("live").checked ? again : look);
}

async function again(signal) {
  const asked = state.asked;
  const explained = await explain(asked, state.full, dial.text, signal);
  view.show(explained);
  note(told(explained));
  await stitched(asked, signal);
}

async function look(signal) {
  const asked = state.asked ?? asks();
  if (!asked.question || !(asked.documents || state.asked)) return;
  const explained = await explain(asked, state.full, dial.text, signal);
  // Who chooses tokens has to look at the chunks, so those that were missing are there now.
  const looked = explained.recomputed_tokens ? fresh(explained) : new Set();
  view.show(explained, looked);
  const news = looked.size ? ` ${looked.size} of the chunks were prefilled just now, to choose from them.` : "";
  note(told(explained) + news);
}

// What the cache holds of the documents; computes nothing.
async function peek(signal) {
  const asked = asks();
  if (!asked.question || !asked.documents) return;
  const explained = await explain(asked, null, peeking(), signal);
  const missing = fresh(explained).size;
  const chunks = explained.spans.filter((span) => span.kind === "chunk").length;
  view.show(explained);
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
  retrieving();
}

function retrieving() {
  const is = by("retrieve").checked;
  by("top-row").hidden = !is;
  by("retrieve-note").hidden = !is;
  by("add").hidden = is;
  documents.set(is ? [] : SAMPLES[by("sample").value].documents, { readOnly: is });
  edited();
}

// ------------------------------------------------------------------ the beginning
async function begin() {
  const config = await getJson("/playground/config");
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
  state.model = models.data[0].id;
  by("model").textContent = state.model;
  await run(peek);
}

SAMPLES.forEach(({ name }, index) => by("sample").add(new Option(name, index)));
by("question").value = SAMPLES[0].question;
documents.set(SAMPLES[0].documents);
by("sample").addEventListener("change", (event) => choose(SAMPLES[event.target.value]));
by("question").addEventListener("input", edited);
by("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    by("form").requestSubmit();
  }
});
by("retrieve").addEventListener("change", retrieving);
by("add").addEventListener("click", () => documents.add("", { focus: true }));
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
