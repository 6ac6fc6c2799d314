// Words and elements that several parts of the page write.

export const plural = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.max(value * 1000, 0.1).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return `${value.toFixed(2)} s`;
}

export const count = (number) => number.toLocaleString("en");

export const times = (ratio) => `${ratio.toFixed(ratio < 10 ? 1 : 0)}×`;

// "document 3 of 8", where an answer left others out; "" where it had all of them.
export function usedOf({ answered_from: used = [], unused_chunks: left = 0 }) {
  const numbers = used.map((at) => at + 1).join(", ");
  return left ? `document${used.length === 1 ? "" : "s"} ${numbers} of ${used.length + left}` : "";
}

// Its text is text: nothing in it is ever markup.
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

export function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
