// The two answers side by side: text as it comes, first token, and what each cost.

import { element, plural, seconds, times } from "./text.js";

// [name, how it is read from an answer]; every row is always there, so that nothing jumps.
const FIGURES = [
  ["seen by this page", (found) => seconds(found.firstPiece)],
  ["tokens a second", (found) => rate(found)],
  ["cached tokens", (found) => found.usage?.prompt_tokens_details?.cached_tokens],
  ["computed tokens", (found) => computed(found)],
  ["chunks found", (found) => tiers(found.kvcache)],
];

function rate({ usage, kvcache }) {
  const tokens = (usage?.completion_tokens ?? 0) - 1;
  const time = (kvcache?.total ?? 0) - (kvcache?.ttft ?? 0);
  return tokens > 0 && time > 0 ? (tokens / time).toFixed(tokens / time < 10 ? 1 : 0) : null;
}

function computed({ usage, kvcache }) {
  if (!usage || !kvcache) return null;
  return usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens + kvcache.recomputed_tokens;
}

function tiers(kvcache) {
  if (!kvcache) return null;
  const hits = Object.entries(kvcache.hits ?? {}).map(([tier, count]) => `${count} in ${tier}`);
  if (kvcache.misses) hits.push(`${kvcache.misses} not cached`);
  return hits.join(", ") || "none asked for";
}

export class AnswerCard {
  constructor(card) {
    const part = (name) => card.querySelector(`[data-part=${name}]`);
    Object.assign(this, { card, ttft: part("ttft"), text: part("text"), figures: part("figures") });
    this.policy = part("policy");
    this.turn = 0;
    this.#figure({});
  }

  // The answer belongs to something else than what is asked now.
  markStale() {
    this.card.classList.add("stale");
  }

  clear() {
    this.ttft.textContent = "–";
    this.text.textContent = "";
    this.#figure({});
    this.card.classList.remove("stale");
  }

  #begin() {
    this.clear();
    this.ttft.textContent = "…";
    this.text.setAttribute("aria-busy", "true");
    this.card.classList.add("running");
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
    this.ttft.textContent = seconds(found.kvcache?.ttft ?? found.firstPiece);
    if (!found.text) this.text.textContent = "(an empty answer)";
    this.#figure(found);
  }

  #stop() {
    this.text.setAttribute("aria-busy", "false");
    this.card.classList.remove("running");
    if (this.ttft.textContent === "…") this.ttft.textContent = "–";
  }

  #figure(found) {
    this.figures.replaceChildren();
    for (const [name, read] of FIGURES) {
      this.figures.append(element("dt", "", name), element("dd", "", read(found) ?? "–"));
    }
  }
}

// "4.2× sooner", or later.
export function verdict(full, stitched) {
  const [slow, quick] = [full?.kvcache?.ttft, stitched?.kvcache?.ttft];
  if (!slow || !quick) return "";
  const much = times(slow >= quick ? slow / quick : quick / slow);
  return `The stitched answer began ${much} ${slow >= quick ? "sooner" : "later"}.`;
}

// Whether the cache was cold or warm for an answer.
export function warmth(kvcache) {
  const { misses = 0, declined = {}, hits = {}, gate = "" } = kvcache;
  if (gate) return `The gate let a full prefill answer: ${gate}.`;
  const again = Object.values(declined).reduce((sum, count) => sum + count, 0);
  if (again) return `${plural(again, "chunk")} came too slowly from the store and were prefilled again.`;
  if (misses) {
    const were = misses === 1 ? "was" : "were";
    return `Cold: ${plural(misses, "chunk")} ${were} prefilled just now and kept; ask again to see it warm.`;
  }
  const found = Object.values(hits).reduce((sum, count) => sum + count, 0);
  return found ? `Warm: all ${plural(found, "chunk")} came from the cache.` : "";
}
