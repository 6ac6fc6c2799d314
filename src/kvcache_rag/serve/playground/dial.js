// The policy dial: which policies there are, what their slider means, and the name for the server.

const PERCENT = { name: "Share of the chunks", min: 0, max: 100, say: (value) => `${value} %` };

export const POLICIES = [
  { id: "reuse", label: "Reuse – nothing" },
  {
    id: "legolink",
    label: "LegoLink – beginnings of chunks",
    slider: { name: "Tokens of each chunk", min: 0, max: 64, say: String },
    start: 8,
    write: (value) => `legolink:${value}`,
  },
  {
    id: "cacheblend",
    label: "CacheBlend – tokens that differ most",
    slider: PERCENT,
    start: 30,
    write: (value) => `cacheblend:${value / 100}`,
  },
  {
    id: "cacheclip",
    label: "CacheClip – tokens that matter",
    slider: PERCENT,
    start: 30,
    write: (value) => `cacheclip:${value / 100}`,
  },
  { id: "composite", label: "Composite – nothing, own places" },
  { id: "ape", label: "APE – nothing, chunks weighed" },
  { id: "combination", label: "Combination – computed together" },
  { id: "full", label: "Full prefill – everything" },
];

export class Dial {
  constructor(policy, amount, name, value, onChange) {
    Object.assign(this, { policy, amount, name, value });
    for (const one of POLICIES) policy.add(new Option(one.label, one.id));
    policy.addEventListener("change", () => {
      this.#choose(this.chosen.start);
      onChange();
    });
    amount.addEventListener("input", () => {
      this.#show();
      onChange();
    });
    this.set("reuse");
  }

  get chosen() {
    return POLICIES.find((one) => one.id === this.policy.value);
  }

  // The policy's name alone.
  get label() {
    return this.chosen.label.split(" – ")[0];
  }

  // The policy as the server reads it, such as "cacheblend:0.3".
  get text() {
    const { id, write } = this.chosen;
    return write ? write(Number(this.amount.value)) : id;
  }

  set(id, amount) {
    this.policy.value = id;
    this.#choose(amount ?? this.chosen.start);
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
