/* Repairs that neither CSS nor an option can make; tests/test_browser.py needs each of them. */

// Search results quote their pages, which a browser cannot fetch from disk.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

document.addEventListener("DOMContentLoaded", () => {
  const without = (attribute, selector) =>
    document.querySelectorAll(selector).forEach((node) => node.removeAttribute(attribute));

  // Buttons are called what they say; references are no list without list items.
  without("aria-label", "summary, .search-button-field");
  without("title", ".theme-switch");
  without("role", ".citation-list");

  // What is wider than its place scrolls: let the keyboard reach that, and only that. The theme
  // does so for tables and code, but not for formulas, nor for what is unfolded later.
  const sizes = new ResizeObserver((changes) => {
    const boxes = changes.map(({ target }) => [target, target.scrollWidth > target.clientWidth]);
    for (const [box, scrolls] of boxes) box.tabIndex = scrolls ? 0 : -1;
  });
  document
    .querySelectorAll(".katex-display, .pst-scrollable-table-container, .cell_output > .output, pre")
    .forEach((box) => sizes.observe(box));
});
