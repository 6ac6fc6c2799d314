// What is wider than the page is moved by the arrow keys, too.
document$.subscribe(() => setTimeout(() => {
  for (const part of document.querySelectorAll(".md-content :is(div, p, pre, code)")) {
    if (part.scrollWidth > part.clientWidth && getComputedStyle(part).overflowX === "auto") part.tabIndex = 0;
  }
}));
