// What each position of the dial costs, as it was measured here.

import { inWords } from "./dial.js";
import { count, element, median, plural, seconds, times } from "./text.js";

// Tokens computed again and times to first tokens, by position of the dial; what belongs to the
// documents of now, as others cost something else.
export class Costs {
  found = new Map(); // by the dial's position
  #key = null;

  constructor({ rows, said }) {
    Object.assign(this, { rows, said });
  }

  begin(key) {
    if (key !== this.#key) this.found.clear();
    this.#key = key;
  }

  #of(policy) {
    if (!this.found.has(policy)) this.found.set(policy, { tokens: null, all: null, ttfts: [] });
    return this.found.get(policy);
  }

  explained(policy, { tokens, query_tokens: query, recomputed_tokens, fresh_tokens, unused_chunks: left }) {
    const again = recomputed_tokens + fresh_tokens;
    const all = tokens.length - query;
    const isFull = tokens[0]?.state === "computed";
    Object.assign(this.#of(policy), { tokens: isFull ? all : again, all });
    if (!left) Object.assign(this.#of("full"), { tokens: all, all });
  }

  // Of a full prefill's answer, as a policy that leaves documents out is explained without them.
  filled({ usage, kvcache }) {
    if (!usage || !kvcache) return;
    const all = usage.prompt_tokens - kvcache.query_tokens;
    if (all) Object.assign(this.#of("full"), { tokens: all, all });
  }

  answered(policy, ttft) {
    if (ttft) this.#of(policy).ttfts.push(ttft);
  }

  // The position in words, and a table of all that were looked at.
  show(policy) {
    const cost = this.found.get(policy);
    this.said.textContent = cost?.all ? this.#told(cost) : "What this position costs was not looked at yet.";
    const rows = [...this.found].filter(([, one]) => one.all);
    rows.sort(([, one], [, other]) => one.tokens - other.tokens);
    this.rows.replaceChildren(...rows.map(([name, one]) => this.#row(name, one, name === policy)));
  }

  #told({ tokens, all, ttfts }) {
    const again = `Computes ${count(tokens)} of ${plural(all, "token")} before the question again`;
    if (!ttfts.length) return `${again}; its time to the first token was not measured yet.`;
    const answers = `median of ${plural(ttfts.length, "answer")}`;
    return `${again}; first token after ${seconds(median(ttfts))} on this machine (${answers}).`;
  }

  // How many times sooner than full prefill its first tokens came.
  #sooner(policy, ttfts) {
    const full = this.found.get("full")?.ttfts ?? [];
    return policy !== "full" && full.length && ttfts.length ? times(median(full) / median(ttfts)) : "–";
  }

  #row(policy, { tokens, ttfts }, isNow) {
    const row = element("tr");
    if (isNow) row.setAttribute("aria-current", "true");
    const head = element("th", "", inWords(policy));
    head.scope = "row";
    const time = ttfts.length ? `${seconds(median(ttfts))} (${ttfts.length})` : "–";
    const cells = [count(tokens), time, this.#sooner(policy, ttfts)];
    row.append(head, ...cells.map((text) => element("td", "", text)));
    return row;
  }
}
