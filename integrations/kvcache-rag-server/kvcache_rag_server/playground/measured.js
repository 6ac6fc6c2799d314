// What was measured here: ratios of times to first tokens, and what each position of the dial costs.

import { inWords } from "./dial.js";
import { count, element, median, plural, seconds, times } from "./text.js";

const MOST = 10; // questions

// What belongs to the documents of now: others have other ratios, and cost something else.
class OverDocuments {
  found = new Map(); // by the dial's position
  #key = null;

  begin(key) {
    if (key !== this.#key) this.found.clear();
    this.#key = key;
  }
}

// Full prefill's time to the first token over the stitched answer's, of the last questions of each policy.
export class Ratios extends OverDocuments {
  constructor({ value, note, marks }) {
    super();
    Object.assign(this, { value, note, marks });
  }

  add(policy, { full, stitched, isWarm, question }) {
    const before = this.found.get(policy) ?? [];
    this.found.set(policy, [...before, { ratio: full / stitched, isWarm, question }].slice(-MOST));
  }

  show(policy) {
    const found = this.found.get(policy) ?? [];
    const warm = found.filter((one) => one.isWarm);
    this.value.textContent = warm.length ? times(median(warm.map((one) => one.ratio))) : "–";
    this.note.textContent = this.#told(policy, warm.length, found.length - warm.length);
    const top = Math.max(2, ...found.map((one) => one.ratio));
    this.marks.replaceChildren(...found.map((one) => this.#mark(one, top)));
  }

  #told(policy, warm, cold) {
    if (!warm && !cold) return `No question about these documents was answered by ${inWords(policy)} yet.`;
    const rings = cold ? `${plural(cold, "ring")}: chunks were prefilled first.` : "";
    if (!warm) return `${rings} Ask again to see a ratio.`;
    const much = `median of ${plural(warm, "answer")}, all chunks cached.`;
    return `Full prefill's time to the first token over that of ${inWords(policy)}: ${much} ${rings}`.trim();
  }

  // As high as its ratio; its number stands below it.
  #mark({ ratio, isWarm, question }, top) {
    const mark = element("li", isWarm ? "mark" : "mark cold");
    const dot = element("span", "dot");
    dot.style.bottom = `${(100 * ratio) / top}%`;
    const track = element("span", "track");
    track.append(dot);
    mark.append(track, element("span", "times", times(ratio).slice(0, -1)));
    mark.append(element("span", "unseen", ` times${isWarm ? "" : ", chunks prefilled first"}: ${question}`));
    mark.title = question;
    return mark;
  }
}

// Tokens computed again and times to first tokens, by position of the dial.
export class Costs extends OverDocuments {
  constructor({ rows, said }) {
    super();
    Object.assign(this, { rows, said });
  }

  #of(policy) {
    if (!this.found.has(policy)) this.found.set(policy, { tokens: null, all: null, ttfts: [] });
    return this.found.get(policy);
  }

  explained(policy, { tokens, query_tokens: query, recomputed_tokens, fresh_tokens }) {
    const again = recomputed_tokens + fresh_tokens;
    const all = tokens.length - query;
    const isFull = tokens[0]?.state === "computed";
    Object.assign(this.#of(policy), { tokens: isFull ? all : again, all });
    this.#of("full").tokens = this.#of("full").all = all;
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

  #row(policy, { tokens, ttfts }, isNow) {
    const row = element("tr");
    if (isNow) row.setAttribute("aria-current", "true");
    const head = element("th", "", inWords(policy));
    head.scope = "row";
    const time = ttfts.length ? `${seconds(median(ttfts))} (${ttfts.length})` : "–";
    row.append(head, element("td", "", count(tokens)), element("td", "", time));
    return row;
  }
}
