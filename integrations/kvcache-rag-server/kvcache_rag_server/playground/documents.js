// The list of documents, each a chunk: edited, added and taken away.

import { element } from "./text.js";

export class Documents {
  constructor(list, onChange) {
    Object.assign(this, { list, onChange });
    this.isSample = false; // until one of them is touched
  }

  // Texts as they will be sent; empty ones are left out.
  get texts() {
    return [...this.list.querySelectorAll("textarea")]
      .map((field) => field.value)
      .filter((text) => text.trim());
  }

  get count() {
    return this.list.children.length;
  }

  set(texts, { isSample = false } = {}) {
    this.list.replaceChildren();
    for (const text of texts) this.add(text);
    this.isSample = isSample;
  }

  // `source`: of which file it is.
  add(text = "", { focus = false, source = "" } = {}) {
    const item = element("li");
    const label = element("label");
    const field = element("textarea");
    item.dataset.source = source;
    field.rows = 2;
    field.spellcheck = false;
    field.value = text;
    field.addEventListener("input", () => this.#changed());
    item.append(label, field, this.#button(item));
    this.list.append(item);
    this.#number();
    if (focus) field.focus();
  }

  // Numbers of the texts that an answer is computed from, the others are said to be left out; null
  // where nobody knows.
  mark(used) {
    let at = 0;
    for (const item of this.list.children) {
      const isAsked = item.querySelector("textarea").value.trim();
      item.classList.toggle("unused", Boolean(isAsked && used && !used.includes(at)));
      if (isAsked) at += 1;
    }
    this.#number();
  }

  #changed() {
    this.isSample = false;
    this.onChange();
  }

  #button(item) {
    const button = element("button", "remove", "×");
    button.type = "button";
    button.addEventListener("click", () => {
      const next = item.nextElementSibling ?? item.previousElementSibling;
      item.remove();
      this.#number();
      (next?.querySelector("textarea") ?? this.list.closest("section").querySelector("button.add")).focus();
      this.#changed();
    });
    return button;
  }

  #number() {
    [...this.list.children].forEach((item, index) => {
      const [label, field, button] = item.children;
      field.id = `document-${index + 1}`;
      label.htmlFor = field.id;
      const { source } = item.dataset;
      label.textContent = `Document ${index + 1}${source && ` of ${source}`}${item.classList.contains("unused") ? ", not used" : ""}`;
      button.setAttribute("aria-label", `Take away document ${index + 1}`);
    });
  }
}
