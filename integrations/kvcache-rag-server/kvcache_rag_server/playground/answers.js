// The two answers: a bar each as long as its first token took, text as it comes, and what each cost.

import { inWords, named } from "./dial.js";
import { count, element, plural, seconds, times, usedOf } from "./text.js";

const ABOUT = 1.1; // a ratio of two times below which neither is sooner
const [MOST_TOLD, LONGEST_TOLD] = [1, 32]; // differing parts that are told in words, and letters of each

// [name, how it is read from an answer]; every row is always there, so that nothing jumps.
const FIGURES = [
  ["seen by this page", (found) => seconds(found.firstPiece)],
  ["tokens a second", (found) => rate(found)],
  ["cached tokens", ({ usage }) => usage && count(usage.prompt_tokens_details.cached_tokens)],
  ["computed tokens", (found) => computed(found)],
  ["chunks found", (found) => tiers(found.kvcache)],
  ["recognised as", ({ kvcache }) => kvcache?.recognised?.form],
  ["answered from", ({ kvcache }) => kvcache && (usedOf(kvcache) || "all documents")],
  ["read, nats", ({ kvcache }) => kvcache && readOf(kvcache)],
];

// "4: +21.6, 1: -0.7": how much likelier each document makes the question, most first.
function readOf({ relevance = [] }) {
  const sorted = [...relevance].sort((one, other) => other.nats - one.nats);
  return sorted.map(({ chunk, nats }) => `${chunk + 1}: ${nats < 0 ? "" : "+"}${nats.toFixed(1)}`).join(", ") || null;
}

function rate({ usage, kvcache }) {
  const tokens = (usage?.completion_tokens ?? 0) - 1;
  const time = (kvcache?.total ?? 0) - (kvcache?.ttft ?? 0);
  return tokens > 0 && time > 0 ? (tokens / time).toFixed(tokens / time < 10 ? 1 : 0) : null;
}

function computed({ usage, kvcache }) {
  if (!usage || !kvcache) return null;
  return count(usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens + kvcache.recomputed_tokens);
}

function tiers(kvcache) {
  if (!kvcache) return null;
  const hits = Object.entries(kvcache.hits ?? {}).map(([tier, chunks]) => `${chunks} in ${tier}`);
  if (kvcache.misses) hits.push(`${kvcache.misses} not cached`);
  return hits.join(", ") || "none asked for";
}

export class AnswerCard {
  constructor(card, lane) {
    const part = (name) => card.querySelector(`[data-part=${name}]`);
    Object.assign(this, { card, text: part("text"), cut: part("cut"), figures: part("figures") });
    Object.assign(this, { lane, ttft: lane.querySelector("b"), length: lane.querySelector(".length") });
    this.names = [part("policy"), lane.querySelector(".name")];
    this.turn = 0;
    this.#figure({});
  }

  get isFilled() {
    return Boolean(this.text.textContent);
  }

  // The policy over the figures: what is asked for, until the answer says which one it was.
  name(text) {
    for (const one of this.names) one.textContent = text;
  }

  // Its bar, beside the longest, whose length is 1.
  draw(share) {
    this.length.style.width = `${100 * share}%`;
  }

  // The answer, if there is one, belongs to something else than what is asked now.
  markStale() {
    for (const one of [this.card, this.lane]) one.classList.toggle("stale", this.isFilled);
  }

  clear() {
    this.ttft.textContent = "–";
    this.text.textContent = "";
    this.cut.hidden = true;
    this.draw(0);
    this.#figure({});
    for (const one of [this.card, this.lane]) one.classList.remove("stale");
  }

  // The same text, with the words marked that the other answer does not have; text nodes, never markup.
  mark(parts) {
    if (!parts.length) return; // an empty answer, which is said in words
    this.text.replaceChildren(...parts.map(({ text, differs }) => (differs ? element("mark", "", text) : text)));
  }

  #begin() {
    this.clear();
    this.ttft.textContent = "…";
    this.text.setAttribute("aria-busy", "true");
    for (const one of [this.card, this.lane]) one.classList.add("running");
    this.turn += 1;
    return this.turn;
  }

  // `answer(onPiece)` streams; what it resolves to is shown and given back.
  async fill(answer) {
    const turn = this.#begin();
    const started = performance.now();
    try {
      const found = await answer((piece) => {
        if (!this.text.firstChild) this.ttft.textContent = seconds((performance.now() - started) / 1000);
        this.text.append(piece); // a text node: never markup
      });
      this.#end(found);
      return found;
    } finally {
      if (turn === this.turn) this.#stop(); // else a newer answer has the card
    }
  }

  #end(found) {
    this.ttft.textContent = seconds(ttftOf(found));
    if (found.kvcache?.policy) this.name(inWords(named(found.kvcache.policy)));
    if (!found.text) this.text.textContent = "(an empty answer)";
    this.cut.textContent = cutIn(found);
    this.cut.hidden = !this.cut.textContent;
    this.#figure(found);
  }

  #stop() {
    this.text.setAttribute("aria-busy", "false");
    for (const one of [this.card, this.lane]) one.classList.remove("running");
    if (this.ttft.textContent === "…") this.ttft.textContent = "–";
  }

  #figure(found) {
    this.figures.replaceChildren();
    for (const [name, read] of FIGURES) {
      this.figures.append(element("dt", "", name), element("dd", "", read(found) ?? "–"));
    }
  }
}

const ttftOf = (found) => found.kvcache?.ttft ?? found.firstPiece;

// Said where an answer stops because it may not be longer.
function cutIn({ isCut, usage }) {
  if (!isCut) return "";
  const tokens = usage?.completion_tokens;
  return tokens ? `Cut after ${plural(tokens, "token")}; the model had more to say.` : "Cut; the model had more to say.";
}

// Both bars on one scale.
export function race(cards, answers) {
  const longest = Math.max(...Object.values(answers).map(ttftOf));
  for (const [side, found] of Object.entries(answers)) cards[side].draw(longest ? ttftOf(found) / longest : 0);
}

// "Best last 20 % against full prefill", of the policies that answered.
export function heading(full, stitched) {
  const [one, other] = [full, stitched].map(({ kvcache }) => inWords(named(kvcache.policy)));
  return one === other ? `${one}, twice` : `${other} against ${one.toLowerCase()}`;
}

const sum = (counts) => Object.values(counts).reduce((all, one) => all + one, 0);

// Chunks of a stitched answer: found in the cache, and computed for it. A full prefill has none.
export function stitchedOf({ hits = {}, misses = 0 }) {
  return { cached: sum(hits), computed: misses };
}

// "4.2× sooner", or later.
export function verdict(full, stitched) {
  const { cached, computed } = stitchedOf(stitched.kvcache);
  if (!cached && !computed) return "Nothing was stitched, so there is nothing to compare.";
  const [slow, quick] = [full?.kvcache?.ttft, stitched.kvcache.ttft];
  if (!slow || !quick) return "";
  const much = Math.max(slow / quick, quick / slow);
  if (much < ABOUT) return "Both answers began about as soon.";
  return `The stitched answer began ${times(much)} ${slow >= quick ? "sooner" : "later"}.`;
}

// Whether both answers say the same, and else what either has that the other has not.
export function agreement({ same, full, stitched }) {
  if (same) return "Same answer.";
  return `The answers differ: full prefill has ${differing(full)}, the stitched answer ${differing(stitched)}.`;
}

function differing(parts) {
  const told = parts.filter((part) => part.differs).map(({ text }) => `“${shortened(text)}”`);
  const more = told.length - MOST_TOLD;
  if (!told.length) return "nothing in their place";
  return told.slice(0, MOST_TOLD).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

const shortened = (text) => (text.length > LONGEST_TOLD ? `${text.slice(0, LONGEST_TOLD - 1)}…` : text);

// Whether the cache was cold or warm for an answer.
export function warmth(kvcache) {
  const { misses = 0, hits = {}, gate = "" } = kvcache;
  if (gate) return `The gate let a full prefill answer: ${gate}.`;
  if (misses) {
    const were = misses === 1 ? "was" : "were";
    return `Cold: ${plural(misses, "chunk")} ${were} prefilled just now and kept; ask again to see it warm.`;
  }
  const found = sum(hits);
  if (kvcache.unused_chunks) return found ? "Warm: the first document came from the cache." : "";
  return found ? `Warm: all ${plural(found, "chunk")} came from the cache.` : "";
}
