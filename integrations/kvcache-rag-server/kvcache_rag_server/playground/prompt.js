// The prompt as coloured tokens. Everything is written as text: nothing in it is ever markup.

import { count, element, plural } from "./text.js";

export const STATES = {
  reused: { label: "reused", note: "keys and values come from the cache" },
  prefilled: { label: "prefilled", note: "its chunk is not cached: an answer computes it by itself and keeps it" },
  recomputed: { label: "recomputed", note: "cached, and computed again among the other chunks" },
  computed: { label: "computed", note: "the question, and chunks that are computed with it; everything in a full prefill" },
};
const SPANS = { prefix: "Instruction", chunk: "Document", query: "Question" };
const MOST_DRAWN = 8000; // tokens; a browser draws more only slowly

export class PromptView {
  constructor({ spans, legend, bar, readout }) {
    Object.assign(this, { spans, legend, bar, readout, explained: null, at: -1 });
    this.hint = readout.textContent;
    for (const state of Object.keys(STATES)) legend.append(this.#entry(state));
    spans.addEventListener("pointerover", (event) => this.#point(event.target));
    spans.addEventListener("click", (event) => this.#point(event.target));
    spans.addEventListener("keydown", (event) => this.#move(event));
  }

  #entry(state) {
    const entry = element("li", "");
    const { label, note } = STATES[state];
    const number = element("b", "", "–");
    number.dataset.state = state;
    entry.append(element("span", `token ${state}`, label), number, element("span", "quiet", note));
    return entry;
  }

  // What is shown belongs to something else than what is written now.
  markStale() {
    this.spans.classList.add("stale");
  }

  // `fresh`: numbers of the chunks that the last answer had to prefill.
  show(explained, fresh = new Set()) {
    this.explained = { ...explained, tokens: explained.tokens.map((token) => ({ ...token })) };
    const ids = explained.tokens.map((token) => token.id).join();
    if (ids !== this.ids) this.at = -1; // another prompt
    this.ids = ids;
    this.spans.classList.remove("stale");
    this.#markFresh(fresh);
    this.#count();
    this.spans.replaceChildren();
    this.drawn = [];
    let chunk = 0;
    for (const span of explained.spans) {
      const at = span.kind === "chunk" ? chunk++ : -1;
      const number = at < 0 ? 0 : explained.answered_from[at] + 1; // in the list of documents
      if (span.stop > span.start) this.spans.append(this.#section(span, number, fresh.has(at)));
    }
    if (explained.unused_chunks) this.spans.append(this.#unused(explained));
    const left = explained.tokens.length - this.drawn.length;
    if (this.at in this.drawn) this.#choose(this.at);
    else this.#forget();
    if (left > 0) this.spans.append(element("p", "quiet", `${plural(left, "more token")} not drawn`));
  }

  // Where no chunk was cached the instruction does not count as cached either, as in answers' `usage`.
  #markFresh(fresh) {
    const { spans, tokens } = this.explained;
    const chunks = spans.filter((span) => span.kind === "chunk");
    const isCached = ({ start, tier }, index) => !fresh.has(index) && (tier || tokens[start].state === "reused");
    const news = chunks.filter((_, index) => fresh.has(index));
    if (!chunks.some(isCached)) news.push(...spans.filter((span) => span.kind === "prefix"));
    for (const { start, stop } of news) {
      for (const token of tokens.slice(start, stop)) {
        if (token.state === "reused") token.state = "prefilled";
      }
    }
  }

  #count() {
    const counts = Object.fromEntries(Object.keys(STATES).map((state) => [state, 0]));
    for (const token of this.explained.tokens) counts[token.state] += 1;
    this.bar.replaceChildren();
    for (const [state, tokens] of Object.entries(counts)) {
      this.legend.querySelector(`[data-state=${state}]`).textContent = count(tokens);
      if (!tokens) continue;
      const part = element("span", state);
      part.style.flexGrow = tokens;
      this.bar.append(part);
    }
  }

  #section({ kind, start, stop, tier }, number, isFresh) {
    const section = element("div", `span ${kind}`);
    const name = number ? `${SPANS[kind]} ${number}` : SPANS[kind];
    const from = this.#origin(kind, tier, this.explained.tokens[start].state, isFresh);
    const head = element("p", "span-head", [name, plural(stop - start, "token"), from].filter(Boolean).join(" · "));
    const body = element("p", "tokens");
    for (let at = start; at < stop && at < MOST_DRAWN; at += 1) {
      const { text, state } = this.explained.tokens[at];
      const token = element("span", `token ${state}`, text);
      token.dataset.at = at;
      this.drawn.push(token);
      body.append(token);
    }
    section.append(head, body);
    section.dataset.name = name;
    return section;
  }

  // What is not in the prompt, which has nothing else to show of it.
  #unused({ answered_from: used, unused_chunks: left }) {
    const all = Array.from({ length: used.length + left }, (_, at) => at);
    const numbers = all.filter((at) => !used.includes(at)).map((at) => at + 1);
    const section = element("div", "span unused");
    section.append(element("p", "span-head", `Not in the prompt · ${numbers.length === 1 ? "document" : "documents"} ${numbers.join(", ")}`));
    return section;
  }

  #origin(kind, tier, state, isFresh) {
    if (kind === "prefix") return state === "computed" ? "" : "computed once for all questions";
    if (isFresh) return "prefilled just now";
    if (kind === "chunk" && state === "computed" && this.explained.fresh_tokens) return "computed with the question";
    return state === "prefilled" ? "not cached yet" : tier && `from ${tier}`;
  }

  #point(target) {
    const at = target.dataset?.at;
    if (at !== undefined) this.#choose(Number(at));
  }

  // The state and place of one token, in words.
  #choose(at) {
    this.drawn[this.at]?.classList.remove("active");
    this.at = at;
    const drawn = this.drawn[at];
    drawn.classList.add("active");
    const { text, position, state, id } = this.explained.tokens[at];
    const name = drawn.closest(".span").dataset.name;
    const shown = text ? `“${text}”` : "(part of the next character)";
    this.readout.textContent = `${shown} – ${STATES[state].label}, position ${position}, ${name}, id ${id}`;
  }

  #forget() {
    this.at = -1;
    this.readout.textContent = this.hint;
  }

  #move(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step === undefined || !this.drawn?.length) return;
    event.preventDefault();
    this.#choose(Math.min(Math.max(this.at + step, 0), this.drawn.length - 1));
    this.drawn[this.at].scrollIntoView({ block: "nearest" });
  }
}
