/* The behaviour of the pages; tests/test_browser.py tests each part.

   The theme's own scripts and their libraries are not loaded: they are ten times as long, and
   measure every box of a page before anything can be clicked. */

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const one = (selector, root = document) => root.querySelector(selector);

// --- names for screen readers --------------------------------------------------------------------

const without = (attribute, selector) =>
  all(selector).forEach((node) => node.removeAttribute(attribute));
// The name of a button is its text. References have no list items, so they are no list, and the
// role of a single reference is deprecated.
without("aria-label", "summary, .search-button-field");
without("title", ".theme-switch");
without("role", ".citation-list, .citation");

// --- light and dark: `setMode` is in the head of the page, so that nothing flashes ----------------

all(".theme-switch-button").forEach((button) => {
  button.title = "Colour mode";
  button.onclick = () => {
    const other = one("html").dataset.theme === "dark" ? "light" : "dark";
    const next = { auto: other, [other]: "auto" };
    const mode = one("html").dataset.mode;
    localStorage.setItem("mode", next[mode] ?? other);
    setMode(next[mode] ?? other);
  };
});

// --- search, menus, side bars --------------------------------------------------------------------

const isOutside = (box, { clientX: x, clientY: y }) => {
  const { left, right, top, bottom } = box.getBoundingClientRect();
  return x < left || x > right || y < top || y > bottom;
};
all("dialog").forEach((dialog) =>
  dialog.addEventListener("click", (click) => {
    if (click.target === dialog && isOutside(dialog, click)) dialog.close();
  })
);

const search = () => {
  const field = one(".bd-article-container form.bd-search input"); // of the search page
  const dialog = one("#pst-search-dialog");
  if (field) field.select();
  else if (dialog.open) dialog.close();
  else dialog.showModal();
};
all(".search-button__button").forEach((button) => button.addEventListener("click", search));
addEventListener("keydown", (key) => {
  if (key.key.toLowerCase() !== "k" || !(key.ctrlKey || key.metaKey) || key.shiftKey || key.altKey)
    return;
  key.preventDefault();
  search();
});

all('[data-bs-toggle="dropdown"]').forEach((button) => {
  const menu = button.nextElementSibling;
  const open = (yes) => {
    menu.classList.toggle("show", yes);
    button.ariaExpanded = yes;
  };
  button.addEventListener("click", () => open(button.ariaExpanded !== "true"));
  addEventListener("click", (click) => button.contains(click.target) || open(false));
  button.parentElement.addEventListener("keydown", (key) => {
    if (key.key !== "Escape" || button.ariaExpanded !== "true") return;
    open(false);
    button.focus();
  });
});

// A side bar that does not fit on the screen opens in a dialog, which borrows its content.
for (const side of ["primary", "secondary"]) {
  const bar = one(`#pst-${side}-sidebar`);
  const drawer = one(`#pst-${side}-sidebar-modal`);
  const button = one(`.${side}-toggle`);
  if (!bar || !drawer || !button) continue;
  const move = (from, to) => {
    to.append(...from.childNodes);
    to.className = from.className;
    from.className = "";
  };
  button.addEventListener("click", () => {
    if (side === "primary" && matchMedia("(min-width: 992px)").matches) {
      bar.classList.toggle("pst-sidebar-hidden");
      return;
    }
    move(bar, drawer);
    drawer.showModal();
  });
  drawer.addEventListener("close", () => move(drawer, bar));
}

window.toggleFullScreen = () =>
  document.fullscreenElement ? document.exitFullscreen() : one("html").requestFullscreen();

// The list of chapters keeps its scroll position, unless the current page is out of sight there.
const chapters = one("#pst-primary-sidebar");
const scrolled = Number(sessionStorage.getItem("sidebar-scroll-top"));
if (scrolled) chapters.scrollTop = scrolled; // this forces a layout
requestAnimationFrame(() => {
  const here = chapters.querySelector("li.current > a")?.getBoundingClientRect();
  const bar = chapters.getBoundingClientRect();
  if (here?.height && (here.top < bar.top || here.bottom > bar.bottom))
    chapters.scrollTop += here.top - bar.top - bar.height / 3;
});
addEventListener("pagehide", () =>
  sessionStorage.setItem("sidebar-scroll-top", chapters.scrollTop)
);

// Sections that wait for their layout keep the height they had, so that a reload leads back to the
// same lines: the browser remembers a distance from the top of the page.
const waits = all(".bd-article > section > section");
const heights = `heights of ${location.pathname} at ${innerWidth}`;
JSON.parse(sessionStorage.getItem(heights) ?? "[]").forEach((height, i) => {
  if (waits[i]) waits[i].style.containIntrinsicHeight = `auto ${height}px`;
});
addEventListener("pagehide", () =>
  sessionStorage.setItem(heights, JSON.stringify(waits.map((section) => section.offsetHeight)))
);

// --- the section that is being read --------------------------------------------------------------

const entries = all("#pst-page-toc-nav a[href^='#']:not([href='#'])").map((link) => ({
  link,
  section: document.getElementById(decodeURIComponent(link.hash.slice(1))),
}));

// Just below the height to which links scroll.
const line = parseFloat(getComputedStyle(one("html")).scrollPaddingTop) + 48;

const current = () => {
  const { scrollTop, scrollHeight, clientHeight } = one("html");
  const below = ({ section }, height) =>
    // In a section that is not laid out yet, only the outermost box has a position.
    !section.checkVisibility({ contentVisibilityAuto: true }) ||
    section.getBoundingClientRect().top > height;
  // A page cannot scroll beyond its end: there the section in the address counts, or the last one.
  const atEnd = scrollTop > 0 && scrollTop + clientHeight > scrollHeight - 2;
  const asked = entries.find(({ link }) => link.hash === location.hash);
  if (atEnd && asked && !below(asked, clientHeight)) return asked;
  return entries.findLast((entry) => !below(entry, atEnd ? clientHeight : line));
};

const spy = () => {
  const here = current()?.link;
  for (const { link } of entries) {
    link.classList.toggle("active", link === here);
    if (link === here) link.ariaCurrent = "true";
    else link.removeAttribute("aria-current");
  }
  all("#pst-page-toc-nav .toc-entry").forEach((entry) =>
    entry.classList.toggle("active", entry.contains(here ?? null))
  );
  document.body.classList.toggle("scrolled", one("html").scrollTop > 0);
};

let waiting = false;
const spySoon = () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    spy();
  });
};
addEventListener("scroll", spySoon, { passive: true });
addEventListener("hashchange", spySoon);
spySoon();

// --- content that is wider than its box ----------------------------------------------------------

// A formula is set smaller if it then fits and can still be read, or else broken at its relations.
// Content that is still wider scrolls: it shows at which end there is more. Of these boxes, the Tab
// key stops only at those that scroll.
const SMALLEST = 0.72;
const scrolling =
  ".katex-display, .pst-scrollable-table-container, .cell_output .output, .da-figure, pre";

const ends = (box) => {
  const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
  return [box.scrollLeft > 2 && "start", rest > 2 && "end"].filter(Boolean).join(" ");
};
const showEnds = (box, more = ends(box)) => {
  if (more) box.dataset.more = more;
  else delete box.dataset.more;
};

const widths = new WeakMap();
const fit = (boxes) => {
  const changed = boxes.filter((box) => widths.get(box) !== box.clientWidth);
  for (const box of changed) {
    box.style.fontSize = "";
    box.classList.remove("da-broken");
  }
  const ratios = changed.map((box) => {
    widths.set(box, box.clientWidth);
    return box.clientWidth / box.scrollWidth;
  });
  changed.forEach((box, i) => {
    if (!box.matches(".katex-display") || !(ratios[i] < 1)) return;
    if (ratios[i] < SMALLEST) box.classList.add("da-broken");
    else box.style.fontSize = `${Math.floor(100 * ratios[i]) - 1}%`;
  });
  const found = boxes.map((box) => [box.scrollWidth > box.clientWidth, ends(box)]);
  boxes.forEach((box, i) => {
    const [wide, more] = found[i];
    if (wide !== (box.tabIndex === 0)) box.tabIndex = wide ? 0 : -1;
    showEnds(box, more);
  });
};

const sizes = new ResizeObserver((changes) => fit(changes.map(({ target }) => target)));
const boxes = all(scrolling);
boxes.forEach((box) => box.addEventListener("scroll", () => showEnds(box), { passive: true }));
const measure = () =>
  boxes.forEach((box) => {
    widths.delete(box);
    sizes.unobserve(box);
    sizes.observe(box);
  });
measure();
// A font that loads late makes a formula wider, but does not change the size of its box.
document.fonts.addEventListener("loadingdone", measure);

// --- sliders --------------------------------------------------------------------------------------

// page_assets.py moved the steps of large sliders into files, which are loaded after all else.
addEventListener("load", () =>
  (window.requestIdleCallback ?? setTimeout)(() =>
    all("script[data-src]").forEach((place) => {
      const script = document.createElement("script");
      script.src = place.dataset.src;
      place.replaceWith(script);
    })
  )
);

// --- paper -----------------------------------------------------------------------------------------

// A printed page is light, shows sliders at their start, and is as wide as A4 between its margins.
// After printing, the screen is restored.
let before;
const slide = (values) =>
  values.forEach(([input, value]) => {
    input.value = value;
    input.dispatchEvent(new Event("input"));
  });
addEventListener("beforeprint", () => {
  const sliders = all(".da-slider input").map((input) => [input, input.value]);
  before = { theme: one("html").dataset.theme, sliders };
  one("html").dataset.theme = "light";
  slide(sliders.map(([input]) => [input, input.defaultValue]));
  one(".bd-article").style.width = "19.4cm"; // 17 cm with letters of 14 px
  fit(boxes);
  one(".bd-article").style.width = "";
});
addEventListener("afterprint", () => {
  one("html").dataset.theme = before.theme;
  slide(before.sliders);
  measure();
});

// The faces of formulas off the screen are not loaded yet, but a printed page needs them. A page
// counts as loaded, and a command prints it, only when its faces are loaded.
const used = one('meta[name="da-faces"]')?.content.split(" ") ?? [];
for (const face of document.fonts) {
  if (used.some((name) => face.family.includes(`KaTeX_${name}`))) face.load();
}
