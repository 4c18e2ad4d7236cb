/* Repairs that neither CSS nor an option can make; tests/test_browser.py needs each of them. */

// Search results quote their pages, which a browser cannot fetch from disk.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

document.addEventListener("DOMContentLoaded", () => {
  const without = (attribute, selector) =>
    document.querySelectorAll(selector).forEach((node) => node.removeAttribute(attribute));

  // Buttons are called what they say; references are no list without list items.
  without("aria-label", "summary, .search-button-field");
  without("title", ".theme-switch");
  // Font Awesome makes elements of the icons' titles, when it gets to it.
  const untitle = () =>
    document.querySelectorAll(".theme-switch title").forEach((title) => {
      title.parentNode.ariaHidden = "true";
      title.remove();
    });
  untitle();
  document
    .querySelectorAll(".theme-switch-button")
    .forEach((box) => new MutationObserver(untitle).observe(box, { childList: true, subtree: true }));
  without("role", ".citation-list");

  // What is wider than its place scrolls: let the keyboard reach that, and only that. The theme
  // does so for tables and code, but not for formulas, nor for what is unfolded later.
  const sizes = new ResizeObserver((changes) => {
    const wide = changes.map(({ target }) => target.scrollWidth > target.clientWidth);
    changes.forEach(({ target }, i) => {
      if (wide[i] !== (target.tabIndex === 0)) target.tabIndex = wide[i] ? 0 : -1;
    });
  });
  const boxes = document.querySelectorAll(
    ".katex-display, .pst-scrollable-table-container, .cell_output .output, .da-figure, pre"
  );
  const measure = () =>
    boxes.forEach((box) => {
      sizes.unobserve(box);
      sizes.observe(box);
    });
  measure();
  // A font that arrives late makes a formula wider, and leaves its box as it is.
  document.fonts.addEventListener("loadingdone", measure);
});
