// The list of documents, each a chunk: edited, added and taken away.

export class Documents {
  constructor(list, onChange) {
    Object.assign(this, { list, onChange });
  }

  // Texts as they will be sent; empty ones are left out.
  get texts() {
    return [...this.list.querySelectorAll("textarea")]
      .map((field) => field.value)
      .filter((text) => text.trim());
  }

  set(texts, { readOnly = false } = {}) {
    this.list.replaceChildren();
    for (const text of texts) this.add(text, { readOnly });
  }

  add(text = "", { readOnly = false, focus = false } = {}) {
    const item = document.createElement("li");
    const label = document.createElement("label");
    const field = document.createElement("textarea");
    field.rows = 2;
    field.spellcheck = false;
    field.value = text;
    field.readOnly = readOnly;
    field.addEventListener("input", this.onChange);
    item.append(label, field);
    if (!readOnly) item.append(this.#button(item));
    this.list.append(item);
    this.#number();
    if (focus) field.focus();
  }

  #button(item) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "remove";
    button.textContent = "×";
    button.addEventListener("click", () => {
      const next = item.nextElementSibling ?? item.previousElementSibling;
      item.remove();
      this.#number();
      next?.querySelector("textarea").focus();
      this.onChange();
    });
    return button;
  }

  #number() {
    [...this.list.children].forEach((item, index) => {
      const [label, field, button] = item.children;
      field.id = `document-${index + 1}`;
      label.htmlFor = field.id;
      label.textContent = `Document ${index + 1}`;
      button?.setAttribute("aria-label", `Take away document ${index + 1}`);
    });
  }
}
