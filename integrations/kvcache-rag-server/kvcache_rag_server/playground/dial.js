// The policy dial: which policies there are, what their slider means, and the name for the server.
// It starts at the amounts that docs/quality.md measures.

// `parts`: how many of the slider's steps are 1 for the server.
const PERCENT = { name: "Share of the chunks", min: 0, max: 100, parts: 100, say: (value) => `${value} %` };
const TOKENS = { name: "Tokens of each chunk", min: 0, max: 64, parts: 1, say: String };

export const POLICIES = [
  { id: "bestfew", name: "Best few", computes: "the best chunks alone, the first from its cache" },
  { id: "bestread", name: "Best read", computes: "the chunks that the model itself finds best" },
  { id: "reuse", name: "Reuse", computes: "nothing" },
  { id: "bestlast", name: "Best last", computes: "the best chunks, with the question", slider: PERCENT, start: 20 },
  { id: "legolink", name: "LegoLink", computes: "beginnings of chunks", slider: TOKENS, start: 16 },
  { id: "cacheblend", name: "CacheBlend", computes: "tokens that differ most", slider: PERCENT, start: 20 },
  { id: "prophetkv", name: "ProphetKV", computes: "tokens that the question attends to", slider: PERCENT, start: 20 },
  { id: "cacheclip", name: "CacheClip", computes: "tokens that matter", slider: PERCENT, start: 20 },
  { id: "composite", name: "Composite", computes: "nothing, own places" },
  { id: "ape", name: "APE", computes: "nothing, chunks weighed" },
  { id: "combination", name: "Combination", computes: "computed together" },
  { id: "full", name: "Full prefill", computes: "everything" },
];

const policyOf = (id) => POLICIES.find((one) => one.id === id);
const option = ({ name }, says) => `${name} – ${says}`;

// A policy as the server reads it, such as "cacheblend:0.3", in words: "CacheBlend 30 %".
export function inWords(text) {
  const [id, amount] = text.split(":");
  const { name, slider } = policyOf(id) ?? { name: text };
  return slider ? `${name} ${slider.say(Math.round(Number(amount) * slider.parts))}` : name;
}

// A policy as an answer says it, such as "CacheBlend(ratio=0.3, …)", as the server reads it; one
// that is not on this dial stays as it is.
export function named(said) {
  const [name] = said.split("(");
  let id = name === "FullRecompute" ? "full" : name.toLowerCase();
  if (id === "reuse" && said.includes("composite")) id = "composite";
  if (!policyOf(id)?.slider) return policyOf(id) ? id : said;
  const [, amount] = said.match(/\b(?:share|ratio|tokens)=([\d.e-]+)/) ?? [];
  return amount === undefined ? said : `${id}:${Number(amount)}`;
}

export class Dial {
  constructor(policy, amount, name, value, onChange) {
    Object.assign(this, { policy, amount, name, value });
    for (const one of POLICIES) policy.add(new Option(option(one, one.computes), one.id));
    policy.addEventListener("change", () => {
      this.#choose(this.chosen.start);
      onChange();
    });
    amount.addEventListener("input", () => {
      this.#show();
      onChange();
    });
    this.set("reuse"); // where it stays for a policy that it does not have, and for its other name, "reordered"
  }

  get chosen() {
    return policyOf(this.policy.value);
  }

  // The policy as the server reads it.
  get text() {
    const { id, slider } = this.chosen;
    return slider ? `${id}:${Number(this.amount.value) / slider.parts}` : id;
  }

  set(id, amount) {
    this.policy.value = id;
    this.#choose(amount ?? this.chosen.start);
  }

  // To a policy as the server names it, where this dial has that position.
  follow(text) {
    const [id, amount] = text.trim().toLowerCase().split(":");
    const found = policyOf(id);
    const parts = found?.slider?.parts;
    if (!found || (amount !== undefined && !(parts && Number(amount) >= 0))) return;
    this.set(id, amount === undefined ? undefined : Math.round(Number(amount) * parts));
  }

  // A policy that this server cannot follow, and what to do about that.
  disable(id, advice) {
    const found = this.policy.querySelector(`[value=${id}]`);
    found.disabled = true;
    found.textContent = option(policyOf(id), advice);
  }

  #choose(start) {
    const { slider } = this.chosen;
    this.amount.disabled = !slider;
    if (slider) {
      this.amount.min = slider.min;
      this.amount.max = slider.max;
      this.amount.value = start;
    }
    this.#show();
  }

  #show() {
    const { slider } = this.chosen;
    const said = slider ? slider.say(this.amount.value) : "";
    this.name.textContent = slider ? `${slider.name}:` : "There is no amount to choose";
    this.value.textContent = said;
    this.amount.setAttribute("aria-valuetext", said);
  }
}
