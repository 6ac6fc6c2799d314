// A table that is wider than the page is moved by the arrow keys, too.
document$.subscribe(() => setTimeout(() => {
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset .figure, .md-typeset pre > code")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  }
}));
