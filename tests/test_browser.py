"""The built pages in a real browser, as readers see them: on a laptop, on a phone, in dark mode.

Every check is a function from a loaded page to a list of problems. `test_defects_are_found` breaks
a page on purpose and expects a report of each defect.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest
from places import HTML, PAGES, ROOT

import pdf

AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
SOLUTION = 'class="solution dropdown'
WIDEST = "01_attention 17_side_by_side ledger speed api_attention audit_mixtures".split()
every_page = pytest.mark.parametrize("name", PAGES)


# --- the book, served and opened -----------------------------------------------------------------


@pytest.fixture(scope="session")
def built():
    """Return the folder of the built book."""
    if not (HTML / "index.html").is_file():
        pytest.fail(f"there is no book in {HTML.relative_to(ROOT)}: run `make book` first")
    return HTML


@pytest.fixture(scope="session")
def origins(built):
    """Serve the book; return its address on the web and its address on the disk."""
    handler = partial(pdf.Served, directory=built, made={})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"http": f"http://127.0.0.1:{server.server_port}/", "file": built.as_uri() + "/"}
        server.shutdown()


@pytest.fixture(scope="session")
def web(origins):
    return origins["http"]


@pytest.fixture
def page(browser):
    """Return an empty page without history, on a laptop in light mode."""
    size = {"width": 1280, "height": 900}
    # Reduced motion, because checks would otherwise run in the middle of the theme's animations.
    with browser.new_context(viewport=size, reduced_motion="reduce") as context:
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.emulate_media(color_scheme="light")
        yield page


def report(problems: list[str]) -> None:
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(dict.fromkeys(problems))


@contextmanager
def watched(page, origin: str):
    """Collect what goes wrong while a page loads and works."""
    problems: list[str] = []

    def requested(request):
        if not request.url.startswith((origin, "data:", "blob:")):
            problems.append(f"external request: {request.url}")

    def answered(response):
        if response.status >= 400:
            problems.append(f"status {response.status}: {response.url}")

    def failed(request):
        if request.failure != "net::ERR_ABORTED":  # of the icon, when the address changes
            problems.append(f"failed request: {request.url}")

    def said(message):
        if message.type in ("error", "warning"):
            problems.append(f"console {message.type}: {message.text}")

    page.on("request", requested)
    page.on("response", answered)
    page.on("requestfailed", failed)
    page.on("console", said)
    page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
    yield problems


def settle(page) -> None:
    """Wait for what comes after loading: fonts and the deferred scripts of the theme."""
    page.evaluate("document.fonts.ready.then(() => true)")
    page.wait_for_function("['light', 'dark'].includes(document.documentElement.dataset.theme)")


def visit(page, url: str) -> None:
    page.goto(url)
    settle(page)


def unfold(page) -> None:
    """Open everything that is folded, lay out what waits for its turn, so that checks see it."""
    page.add_style_tag(content="section, dl { content-visibility: visible !important }")
    page.evaluate("""() => {
        document.querySelectorAll("details").forEach(d => { d.open = true });
        document.querySelectorAll(".toggle-button-hidden").forEach(b => b.click());
    }""")


@cache
def source(name: str) -> str:
    return (HTML / f"{name}.html").read_text("utf8")


def first_with(markup: str) -> str:
    """Return the first page that has some markup; the book must have one."""
    return next(name for name in PAGES if markup in source(name))


# --- checks: each returns a list of problems -----------------------------------------------------


def unrendered(page) -> list[str]:
    """Find formulas that are not typeset, and markup that reached the reader raw."""
    return page.evaluate(r"""() => {
        const problems = [], raw = /\$|\\[([]|\{[\w:]+\}`|:::|\|\s*:?[-—]+:?\s*\|/;
        for (const node of document.querySelectorAll(".math-error"))
            problems.push("broken formula: " + node.textContent);
        for (const node of document.querySelectorAll(".math"))
            if (!node.querySelector(".katex-html")) problems.push("no formula: " + node.outerHTML);
        const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) {
            const text = walk.currentNode;
            if (raw.test(text.data)
                && !text.parentElement.closest("pre, code, script, style, noscript, .katex"))
                problems.push("raw markup: " + text.data.trim().slice(0, 120));
        }
        if (raw.test(document.title)) problems.push("raw markup in the title: " + document.title);
        const fonts = [...document.fonts].filter(font => font.family.includes("KaTeX"));
        const loaded = fonts.filter(font => font.status === "loaded");
        if (document.querySelector(".katex") && !loaded.length)
            problems.push("formulas without their fonts");
        for (const font of fonts)
            if (font.status === "error") problems.push("font missing: " + font.family);
        return problems;
    }""")


def nameless_figures(page) -> list[str]:
    """Find drawings and images that a screen reader cannot describe."""
    return page.evaluate("""() => {
        const problems = [], cut = node => node.outerHTML.slice(0, 160);
        for (const svg of document.querySelectorAll(".bd-article svg"))
            if (!svg.closest("[role=img], [aria-hidden=true], button"))
                problems.push("svg without role=img: " + cut(svg));
        for (const node of document.querySelectorAll(".bd-article [role=img]"))
            if (!node.closest("[aria-hidden=true]") && !node.getAttribute("aria-label")?.trim())
                problems.push("role=img without aria-label: " + cut(node));
        for (const image of document.querySelectorAll("img"))
            if (!image.alt.trim()) problems.push("img without alt: " + cut(image));
        for (const figure of document.querySelectorAll(".bd-article figure"))
            if (!figure.querySelector("figcaption")?.textContent.trim())
                problems.push("figure without caption: #" + figure.id);
        return problems;
    }""")


def undrawn(page) -> list[str]:
    """Find icons without a drawing, and characters that need a font of emoji."""
    return page.evaluate(r"""() => {
        const problems = [];
        for (const icon of document.querySelectorAll("[class*='fa-'], .da-mark")) {
            const style = getComputedStyle(icon);
            if (!style.maskImage.includes("url") && style.display !== "none")
                problems.push("no drawing: " + icon.outerHTML);
        }
        for (const title of document.querySelectorAll(".admonition > .admonition-title")) {
            const {content, display, maskImage} = getComputedStyle(title, "::after");
            if (/[\uE000-\uF8FF]/.test(content) && display !== "none" && maskImage === "none")
                problems.push("no drawing: the box " + title.parentElement.className);
        }
        for (const [found] of document.body.innerText.matchAll(/\p{Emoji_Presentation}|[✍⌨]/gu))
            problems.push("needs a font of emoji: " + found);
        return problems;
    }""")


def overflowing(page) -> list[str]:
    """Find what sticks out of the screen sideways and cannot be scrolled to within its own box."""
    return page.evaluate("""() => {
        const root = document.documentElement, width = root.clientWidth, problems = [];
        const scrolls = node => node && node !== document.body && node !== root
            && (["auto", "scroll"].includes(getComputedStyle(node).overflowX)
                || scrolls(node.parentElement));
        const parts = ".bd-main :not(.katex *, svg *, .tooltip), .bd-main .katex-base";
        for (const node of document.querySelectorAll(parts)) {
            const box = node.getBoundingClientRect();
            if (!box.width || !box.height || (box.right <= width + 1 && box.left >= -1)) continue;
            if (scrolls(node)) continue;
            problems.push(`sticks out to ${Math.round(box.left)}…${Math.round(box.right)} of `
                + `${width} px: ${node.tagName.toLowerCase()}.${node.getAttribute("class")} `
                + node.textContent.trim().slice(0, 60));
        }
        if (root.scrollWidth > width)
            problems.push(`the page is ${root.scrollWidth} px wide on a screen of ${width} px`);
        return problems;
    }""")


def small_labels(page) -> list[str]:
    """Find text of figures that is too small to read."""
    return page.evaluate("""() => {
        const problems = [];
        for (const node of document.querySelectorAll(".bd-article svg :is(text, tspan)")) {
            const at = node.getScreenCTM(), size = parseFloat(getComputedStyle(node).fontSize);
            const pixels = at ? size * Math.hypot(at.a, at.b) : 0;
            if (node.getClientRects().length && node.textContent.trim() && pixels < 8.99)
                problems.push(`type of ${pixels.toFixed(1)} px: ` + node.textContent.trim());
        }
        return problems;
    }""")


def stuck_sliders(page) -> list[str]:
    """Turn each slider by its keys; drawing, line of text and spoken value must follow."""
    problems = []
    for number, figure in enumerate(page.locator(".da-slider").all(), 1):
        knob, seen = figure.locator("input[type=range]"), {}
        last = knob.get_attribute("max")
        for key, position in (("Home", "0"), ("ArrowRight", "1"), ("End", last)):
            knob.press(key)  # also takes the focus back from a script of the theme
            moving = figure.locator("g[data-m]")
            drawing = moving.evaluate_all("nodes => nodes.map(node => node.innerHTML)")
            spoken = knob.get_attribute("aria-valuetext")
            seen[key] = (drawing, figure.locator("output").inner_text(), spoken)
            if knob.input_value() != position:
                problems.append(f"slider {number}: {key} leads to step {knob.input_value()}")
        problems += [
            f"slider {number}: its {part} is the same after Home and after {key}"
            for i, part in enumerate(("drawing", "line of text", "spoken value"))
            for key in ("ArrowRight", "End")
            if seen[key][i] == seen["Home"][i]
        ]
    return problems


def unreachable(page) -> list[str]:
    """Find boxes that scroll sideways, but not by the keyboard, or do not show that they do."""
    return page.evaluate("""async () => {
        await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
        const problems = [];
        const boxes = ".katex-display, pre, .pst-scrollable-table-container, .da-figure";
        for (const node of document.querySelectorAll(`.bd-article :is(${boxes})`)) {
            const more = node.clientWidth && node.scrollWidth > node.clientWidth + 2
                && getComputedStyle(node).overflowX !== "visible";
            const cue = node.matches("[data-more~=end]")
                && getComputedStyle(node).maskImage.includes("gradient");
            if (more !== 0 && more !== cue && node.scrollLeft === 0)
                problems.push((more ? "no cue at " : "a cue at ") + node.outerHTML.slice(0, 100));
        }
        for (const node of document.querySelectorAll(".bd-article :not(.katex *, svg *)"))
            if (node.scrollWidth > node.clientWidth && node.clientWidth
                && ["auto", "scroll"].includes(getComputedStyle(node).overflowX)
                && node.tabIndex < 0 && !node.querySelector("a, button, input, [tabindex='0']"))
                problems.push("the keyboard cannot scroll " + node.outerHTML.slice(0, 100));
        return problems;
    }""")


def faint(page) -> list[str]:
    """Find text with too little contrast, by the rule of WCAG 2: a look at each kind of it."""
    return page.evaluate(r"""() => {
        const seen = new Set(), problems = [];
        const paint = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        const lightness = colors => {
            for (paint.fillStyle of colors) paint.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map(x =>
                x < 10 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
        };
        const grounds = new Map([[null, ["white"]]]), behind = node => {
            if (grounds.has(node)) return grounds.get(node);
            const own = getComputedStyle(node).backgroundColor, all = behind(node.parentElement);
            grounds.set(node, own === "rgba(0, 0, 0, 0)" ? all : [...all, own]);
            return grounds.get(node);
        };
        for (const node of document.querySelectorAll("body :not(.katex *, svg *)")) {
            const written = [...node.childNodes].some(
                x => x.nodeType === 3 && /[\p{L}\p{N}]/u.test(x.data));
            if (!written || !node.checkVisibility({opacityProperty: true})) continue;
            const {color, fontSize, fontWeight} = getComputedStyle(node);
            const kind = [color, fontSize, fontWeight, behind(node)].join(";");
            if (seen.has(kind)) continue;
            seen.add(kind);
            const two = [lightness(behind(node)), lightness([color])];  // painted upon it
            const ratio = Math.max(...two) / Math.min(...two), size = parseFloat(fontSize);
            if (ratio < (size >= 24 || (size > 18.6 && fontWeight >= 700) ? 3 : 4.5))
                problems.push(`contrast of ${ratio.toFixed(2)}: ` + node.outerHTML.slice(0, 160));
        }
        return problems;
    }""")


def barriers(page) -> list[str]:
    """Let axe look for serious and critical barriers other than those that `faint` finds.

    Formulas stand as their TeX, drawings as their names, code without its colours: what they are
    made of is hidden from screen readers anyway, and is most of a page.
    """
    page.evaluate("""() => {
        for (const tex of document.querySelectorAll("annotation"))
            tex.closest(".katex").textContent = tex.textContent;
        for (const node of document.querySelectorAll(".bd-article [role=img]"))
            node.textContent = "";
        for (const node of document.querySelectorAll("pre")) node.textContent = node.textContent;
    }""")
    page.evaluate(AXE.read_text("utf8"))
    options = {"resultTypes": ["violations"], "preload": False}  # no rule that runs needs styles
    elsewhere = ("scrollable-region-focusable", "color-contrast")  # see `unreachable` and `faint`
    options["rules"] = {rule: {"enabled": False} for rule in elsewhere}
    result = page.evaluate("options => axe.run(document, options)", options)
    return [
        f"axe, {violation['impact']}: {violation['id']}: {node['target']} {node['html'][:160]}"
        f" {node['failureSummary']}"
        for violation in result["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


class Links(HTMLParser):
    """The anchors that a page offers, and the addresses that it refers to."""

    CDATA_CONTENT_ELEMENTS = ()

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.resources: list[str] = []
        text = re.sub(r"(<script\b[^>]*>).*?</script>|<!--.*?-->", r"\1", text, flags=re.DOTALL)
        tags = re.findall(r"""<\w(?:[^<>"']|"[^"]*"|'[^']*')*>""", text)  # few have one of these:
        self.feed("".join(tag for tag in tags if re.search(r"\s(?:id|name|href|src|data)=", tag)))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found[key] for key in ("id", "name") if found.get(key) and tag != "meta"]
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "link" and found.get("href") and found.get("rel") != "canonical":
            self.resources.append(found["href"])
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object"):
            self.resources += filter(None, [found.get("src"), found.get("data")])


def dead_links(pages: dict[str, Links], name: str) -> list[str]:
    """Find links of one page that lead to no file, to no anchor, or to an ambiguous one."""
    problems = []
    for address in [*pages[name].links, *pages[name].resources]:
        if urlsplit(address).scheme or address.startswith("//"):
            continue
        path, anchor = urldefrag(urljoin(f"/{name}", address))
        path, anchor = unquote(urlsplit(path).path).lstrip("/"), unquote(anchor)
        if not (HTML / path).is_file():
            problems.append(f"{name}: no such file: {address}")
        elif "=" in anchor:  # a filter of the ledger
            continue
        elif anchor and path in pages and (times := pages[path].ids.count(anchor)) != 1:
            problems.append(f"{name}: {times} anchors for {address}")
    return problems


def foreign_resources(pages: dict[str, Links], name: str) -> list[str]:
    """Find scripts, styles and images from elsewhere, also those that no reader has met yet."""
    return [
        f"{name}: loads {address}"
        for address in pages[name].resources
        if address.startswith("//") or urlsplit(address).scheme not in ("", "data")
    ]


# --- every page ----------------------------------------------------------------------------------


@every_page
def test_page(page, origins, name):
    """A page on the disk and on the narrowest phone, all of it unfolded, by day and at night.

    What fits there fits wider phones, too; `test_page_on_a_laptop_from_a_server` has the rest.
    """
    with watched(page, origins["file"]) as problems:
        page.set_viewport_size({"width": 320, "height": 844})
        first, last = ("light", "dark")[:: (-1) ** PAGES.index(name)]  # axe checks the last one
        page.emulate_media(color_scheme=first)
        visit(page, f"{origins['file']}{name}.html")
        problems += [f"folded: {found}" for found in overflowing(page)]
        unfold(page)
        problems += unrendered(page) + nameless_figures(page) + undrawn(page)
        problems += stuck_sliders(page)
        problems += overflowing(page) + unreachable(page) + small_labels(page)
        problems += faint(page)
        page.emulate_media(color_scheme=last)
        page.wait_for_function(f"document.documentElement.dataset.theme === '{last}'")
        problems += [f"{last}: {found}" for found in faint(page)]
        problems += barriers(page)  # last, because it changes the page
    report(problems)


@pytest.mark.parametrize("name", WIDEST)
def test_page_on_a_laptop_from_a_server(page, web, name):
    with watched(page, web) as problems:
        visit(page, f"{web}book/{name}.html")
        unfold(page)
        problems += unrendered(page) + stuck_sliders(page)
        problems += overflowing(page) + unreachable(page) + small_labels(page)
    report(problems)


def test_the_sidebar_shows_the_page_that_is_read(page, web):
    visit(page, f"{web}book/18_invent.html")  # the last of its group
    page.wait_for_function("""() => {
        const here = document.querySelector("#pst-primary-sidebar li.current > a");
        const {top, bottom, height} = here.getBoundingClientRect();
        return height > 0 && top >= 0 && bottom <= innerHeight;
    }""")


def test_a_copied_formula_is_its_tex(page, web):
    visit(page, f"{web}book/01_attention.html")
    page.evaluate("""() => {
        const formula = document.querySelector(".bd-article p .katex"), range = new Range();
        range.selectNodeContents(formula.closest("p"));
        getSelection().addRange(range);
        addEventListener("copy", (copy) => {
            document.copied = copy.clipboardData.getData("text/plain");
            document.tex = formula.querySelector("annotation").textContent;
        });
    }""")
    page.keyboard.press("Control+c")
    copied, tex = page.evaluate("[document.copied, document.tex]")
    assert f"${tex}$" in copied


# --- the whole book ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def parsed(built):
    paths = [path for path in built.rglob("*.html") if "_static" not in path.parts]
    return {path.relative_to(built).as_posix(): Links(path.read_text("utf8")) for path in paths}


def test_every_link_leads_somewhere(parsed):
    assert {f"{name}.html" for name in PAGES} <= set(parsed)
    report([found for name in parsed for found in dead_links(parsed, name)])


def test_nothing_comes_from_elsewhere(parsed):
    report([found for name in parsed for found in foreign_resources(parsed, name)])


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_front_door(page, origins, scheme):
    page.goto(origins[scheme] + "index.html")
    page.wait_for_url(f"**/{PAGES[0]}.html")


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_search_leads_to_the_section(page, origins, scheme):
    """From any page by Ctrl+K and then by the Tab key, also without a server."""
    with watched(page, origins[scheme]) as problems:
        visit(page, f"{origins[scheme]}{PAGES[0]}.html")
        page.keyboard.press("Control+k")
        page.keyboard.type("shell game")
        page.keyboard.press("Enter")
        page.wait_for_url("**/search.html?q=shell*game")
        found = page.locator("#da-found a")
        found.first.wait_for()
        assert "ball" in page.inner_text("#da-found li p >> nth=0"), "the result has no quotation"
        page.focus("main form.bd-search input")
        for _ in range(3):
            page.keyboard.press("Tab")
            if found.first.evaluate("link => link === document.activeElement"):
                break
        anchor = found.first.get_attribute("href").partition("#")[2].partition(":~:")[0]
        page.keyboard.press("Enter")
        page.wait_for_url(f"**#{anchor}*")
        settle(page)
        top, bottom = page.evaluate(
            "id => (({ top, bottom }) => [top, bottom])"
            "(document.getElementById(id).getBoundingClientRect())",
            anchor,
        )
        assert top < 900 and bottom > 0 and page.evaluate("scrollY > 1000"), (anchor, top, bottom)
    report(problems)


def test_search_follows_what_is_typed(page, web):
    visit(page, f"{web}search.html")
    page.keyboard.type("nystrom")
    first = page.locator("#da-found a").first
    first.wait_for()
    assert "Nystr\u00f6m" in first.inner_text()
    page.fill("main form.bd-search input", "xyzzyq")
    page.locator("#da-found-count", has_text="Nothing found").wait_for()
    assert not page.locator("#da-found a").count()
    page.reload()  # the address contains the words
    page.locator("#da-found-count", has_text="xyzzyq").wait_for()


def test_theme_switch_is_remembered(page, web):
    visit(page, f"{web}{PAGES[0]}.html")
    button = page.locator(".theme-switch-button:visible")
    for _ in range(3):  # light, dark, system
        if page.get_attribute("html", "data-theme") == "dark":
            break
        button.click()
    assert page.get_attribute("html", "data-theme") == "dark"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    visit(page, f"{web}{PAGES[1]}.html")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.evaluate("localStorage.clear()")
    visit(page, f"{web}{PAGES[1]}.html")
    assert page.get_attribute("html", "data-theme") == "light"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_solution_opens_by_click_and_by_key(page, web):
    with watched(page, web) as problems:
        visit(page, f"{web}{first_with(SOLUTION)}.html")
        solution = page.locator(".solution").first
        text, button = solution.locator("section").first, solution.locator(".toggle-button")
        assert not text.is_visible()
        solution.locator(".admonition-title").click(position={"x": 60, "y": 10})
        assert text.is_visible() and button.get_attribute("aria-expanded") == "true"
        button.click()
        assert not text.is_visible()
        for key, visible in (("Enter", True), ("Space", False)):
            button.press(key)
            assert text.is_visible() == visible, key
    report(problems)


def test_copy_button_copies_the_cell(page, web):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit(page, f"{web}{first_with('cell_input')}.html")
    cell = page.locator(".cell_input:visible").first
    cell.hover()
    cell.locator("button.copybtn").click()
    code = cell.locator("pre").inner_text().strip()
    assert code
    assert page.evaluate("navigator.clipboard.readText()").strip() == code


def test_tab_key_reaches_the_slider(page, web):
    visit(page, f"{web}{first_with('da-slider')}.html")
    page.locator(".bd-article").evaluate("node => { node.tabIndex = -1; node.focus() }")
    focused = "document.activeElement.matches('.da-slider input')"
    for _ in range(400):
        page.keyboard.press("Tab")
        if page.evaluate(focused):
            return
    pytest.fail("pressing Tab 400 times from the top of the page does not reach the slider")


def test_a_wide_formula_is_reachable_and_shows_where_there_is_more(page, web):
    """Also if it is wide only when a font has come: its glyphs widen the formula, not the box."""
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, f"{web}{first_with('katex-display')}.html")
    unfold(page)
    seen = page.evaluate("""async () => {
        const frames = () => new Promise(done =>
            requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))));
        const box = [...document.querySelectorAll(".katex-display")]
            .find(box => box.clientWidth && box.scrollWidth <= box.clientWidth);
        const formula = box.querySelector(".katex"), seen = [[box.tabIndex, ""]];
        box.scrollIntoView();
        for (const [width, left] of [[3000, 0], [3000, 99], [3000, 9999], [0, 0]]) {
            formula.style.paddingLeft = `${width}px`;
            document.fonts.dispatchEvent(new Event("loadingdone"));
            await frames();
            box.scrollLeft = left;
            await frames();
            seen.push([box.tabIndex, box.dataset.more ?? ""]);
        }
        return seen;
    }""")
    assert seen[:4] == [[-1, ""], [0, "end"], [0, "start end"], [0, "start"]] and not seen[4][1]


@pytest.mark.parametrize("width", [390, 1280])
def test_contents_follow_the_reader(page, web, width):
    """On the way down, and where a link or a reload leads, far from what is laid out."""
    page.set_viewport_size({"width": width, "height": 844})
    visit(page, f"{web}{first_with('da-slider')}.html")
    links = page.locator("#pst-page-toc-nav a").evaluate_all("all => all.map(a => a.hash)")
    active = "[...document.querySelectorAll('#pst-page-toc-nav a.active')].map(a => a.hash)"
    on_screen = """id => {
        const { top } = document.getElementById(id).getBoundingClientRect();
        return top >= 0 && top < innerHeight;
    }"""
    for link in links if width == 1280 else links[1::4]:  # the script is the same for every width
        page.evaluate("link => document.querySelector(link).scrollIntoView()", link)
        at_end = "scrollY + innerHeight > document.body.scrollHeight - 3"
        page.wait_for_function(f"String({active}) === {link!r} || {at_end}", timeout=2000)
    for link in [links[-1], links[len(links) // 2]]:
        page.goto(page.url.partition("#")[0] + link)
        for _ in range(2):
            page.wait_for_function(f"({active})[0] === {link!r}", timeout=2000)
            assert page.evaluate(on_screen, link[1:]), link
            page.reload()
    page.goto(page.url.partition("#")[0] + "?")
    page.evaluate("link => document.querySelector(link).scrollIntoView()", links[-2])
    page.wait_for_timeout(300)
    page.reload()
    page.wait_for_timeout(300)
    assert page.evaluate(on_screen, links[-2][1:]), "a reload scrolls to another place"


def test_links_to_claims_arrive(page, web, parsed):
    links = [link for link in parsed["book/ledger.html"].links if "#claim-" in link]
    assert len(links) > 4, "the ledger must link to more than four claims"
    for link in links[:: len(links) // 4]:
        page.goto(f"{web}book/{link}")
        page.wait_for_timeout(300)
        box = page.locator(f"[id='{urldefrag(link)[1]}']").bounding_box()
        assert box and 0 <= box["y"] < 450, (link, box)


def test_folded_code_says_what_it_is(page, web):
    visit(page, f"{web}{first_with('Show the code: figure')}.html")
    summary = page.locator("summary", has_text="Show the code: figure").first
    for key, said in (("Enter", "Hide"), ("Space", "Show")):
        summary.focus()
        page.keyboard.press(key)
        assert summary.inner_text().strip().startswith(f"{said} the code: figure ")
        opened = page.locator("details[open].hide .cell_input").count()
        assert opened == (said == "Hide")


def test_menu_opens_and_closes(page, web):
    visit(page, f"{web}{PAGES[0]}.html")
    button, menu = page.locator("[data-bs-toggle=dropdown]"), page.locator(".dropdown-menu")
    button.focus()
    for key, visible in (("Enter", True), ("Escape", False), ("Space", True)):
        page.keyboard.press(key)
        assert menu.is_visible() == visible, key
        assert button.get_attribute("aria-expanded") == str(visible).lower()
        assert page.evaluate("document.activeElement.matches('.dropdown-toggle')")
    assert not overflowing(page)
    page.mouse.click(640, 600)
    assert not menu.is_visible()


def test_a_page_loads_little(page, web):
    """No framework, no icon font, and nothing that the page does not use."""
    sizes: dict[str, int] = {}
    page.on("response", lambda r: sizes.update({r.url.removeprefix(web): len(r.body())}))
    visit(page, f"{web}{first_with('katex-display')}.html")
    ours = {name: size for name, size in sizes.items() if not name.startswith("book/")}
    assert sum(ours.values()) < 350_000, ours  # not compressed
    assert not [name for name in ours if "awesome" in name or "bootstrap" in name]
    assert sum(name.partition("?")[0].endswith(".css") for name in ours) == 1


def test_contents_drawer_opens_on_a_phone(page, web):
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, f"{web}{PAGES[0]}.html")
    link = page.locator(f".bd-sidebar-primary a[href$='{Path(PAGES[1]).name}.html']").first
    assert not link.is_visible()
    page.locator(".primary-toggle:visible").click()
    link.wait_for(state="visible")
    report(overflowing(page))
    link.click()
    page.wait_for_url(f"**/{PAGES[1]}.html")


def test_paper_shows_what_the_screen_folds_and_of_solutions_those_that_were_opened(page, web):
    """On paper nothing can be opened; a handout has no answers but those that somebody wants."""
    visit(page, f"{web}book/05_normalise_and_scale.html")
    opened, *others = page.locator(".solution").all()
    opened.locator(".toggle-button").click()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    sections = page.locator(".bd-article > section > section")
    waits = sections.evaluate_all("all => all.map(s => getComputedStyle(s).contentVisibility)")
    assert set(waits) == {"visible"}
    for folded in page.locator(".bd-article details:not(.hide) > :not(summary)").all():
        assert folded.is_visible(), folded.inner_html()[:200]
    assert opened.locator("section").first.is_visible()
    assert others and not any(solution.is_visible() for solution in others)
    assert page.locator("h1:visible").inner_text().startswith("5. Batch normalisation")
    boxes = page.locator("details.hide:not([open]):visible, .da-ctl:visible, .bd-header:visible")
    assert not boxes.count(), "the print shows controls that need a click"


def test_paper_shows_folded_tables(page, web):
    visit(page, f"{web}book/17_side_by_side.html")
    tables = page.locator(".cell_output details table")
    assert tables.count() and not tables.first.is_visible()
    page.emulate_media(media="print")
    assert all(table.is_visible() for table in tables.all())


def test_paper_is_light_and_has_sliders_at_their_start(page, web):
    page.emulate_media(color_scheme="dark")
    visit(page, f"{web}{first_with('da-slider')}.html")
    knob = page.locator(".da-slider input").first
    start = knob.input_value()
    moved = "1" if start == "0" else "0"
    knob.fill(moved)
    state = "() => [document.documentElement.dataset.theme, "
    state += "document.querySelector('.da-slider input').value]"
    for event, seen in (("beforeprint", ["light", start]), ("afterprint", ["dark", moved])):
        page.evaluate(f"window.dispatchEvent(new Event('{event}'))")
        assert page.evaluate(state) == seen


@pytest.mark.parametrize("width", [412, 1350])
def test_sections_are_as_tall_as_they_say(page, web, width):
    """Near enough for a scroll bar, and for a link to a place further down."""
    page.set_viewport_size({"width": width, "height": 900})
    for name in ("01_attention", "11_singular_vectors", "audit_splitting"):
        visit(page, f"{web}book/{name}.html")
        said = page.evaluate("document.documentElement.scrollHeight")
        page.add_style_tag(content="section { content-visibility: visible !important }")
        settle(page)
        assert 0.8 < said / page.evaluate("document.documentElement.scrollHeight") < 1.4, name


def test_the_first_print_has_every_letter(page, web, tmp_path):
    """A command prints when a page counts as loaded, before anybody has looked at it."""
    page.route("**/book.js*", lambda route: route.abort())  # which loads all font faces
    visit(page, f"{web}book/11_singular_vectors.html")
    unfold(page)
    settle(page)
    used = page.evaluate("""[...document.fonts].filter((face) => face.status === "loaded")
        .map((face) => face.family).filter((family) => family.includes("KaTeX"))""")
    url = f"{web}book/11_singular_vectors.html"
    fonts = pdf.print_page(pdf.find_browser(), url, tmp_path / "page.pdf").pages
    names = {
        str(f.get_object()["/BaseFont"]) for p in fonts for f in p["/Resources"]["/Font"].values()
    }
    printed = {name.partition("+")[2].partition("-")[0] for name in names}
    assert len(used) > 5 and set(used) <= printed


def test_pages_beside_the_book_fit_a_phone(page, web):
    longest = max((HTML / "_modules").rglob("*.html"), key=lambda path: len(str(path)))
    longest = longest.relative_to(HTML).with_suffix("").as_posix()
    page.set_viewport_size({"width": 390, "height": 844})
    for name in ("genindex", "py-modindex", "prf-prf", "search", "_modules/index", longest):
        visit(page, f"{web}{name}.html")
        report([f"{name}: {found}" for found in overflowing(page)])


# --- the checks themselves -----------------------------------------------------------------------

DEFECTS = {
    "external request": (None, '<script src="https://example.org/tracker.js"></script>'),
    "status 404": (None, '<img src="missing.png" alt="Nothing.">'),
    "console error": (None, "<script>console.error('oops')</script>"),
    "script error": (None, "<script>undefinedFunction()</script>"),
    "raw markup": (unrendered, "<p>The price is $x^2$.</p>"),
    "broken formula": (unrendered, '<code class="math-error">\\frac</code>'),
    "img without alt": (nameless_figures, '<img src="../_static/favicon.svg">'),
    "svg without role": (nameless_figures, "<svg></svg>"),
    "role=img without": (nameless_figures, '<svg role="img" aria-label=" "></svg>'),
    "no drawing": (undrawn, '<i class="fa-solid fa-horse"></i>'),
    "no drawing: the box": (
        undrawn,
        '<div class="admonition warning"><p class="admonition-title">Careful</p></div>',
    ),
    "font of emoji": (undrawn, "<p>✍ Prove it.</p>"),
    "no cue": (unreachable, '<pre style="width: 9px; overflow-x: auto; mask: none">unmarked</pre>'),
    "type of 8.5 px": (small_labels, '<svg><text style="font-size: 8.5px">small</text></svg>'),
    "sticks out": (overflowing, '<div style="width: 1300px">wide</div>'),
    "cannot scroll": (unreachable, '<div style="width: 9px; overflow-x: auto">unscrollable</div>'),
    "contrast of 2.32": (faint, '<p style="color: #aaa; background: #fff">faint</p>'),
    "button-name": (barriers, "<button></button>"),
}


def test_defects_are_found(page, web):
    checks = dict.fromkeys(check for check, _ in DEFECTS.values() if check)
    broken = source(PAGES[0])
    broken = broken.replace("</article>", "".join(x for _, x in DEFECTS.values()) + "</article>")
    page.route(f"**/{PAGES[0]}.html", lambda route: route.fulfill(body=broken))
    with watched(page, web) as problems:
        visit(page, f"{web}{PAGES[0]}.html")
        found = {check: check(page) for check in checks}
    for expected, (check, _) in DEFECTS.items():
        assert any(expected in x for x in (found[check] if check else problems)), expected


@pytest.mark.parametrize("defect", ["#nowhere", "nowhere.html", "../ledger.html#claim-none-1"])
def test_dead_links_are_found(parsed, defect):
    name = f"{PAGES[0]}.html"
    broken = Links(source(PAGES[0]) + f'<a href="{defect}">there</a>')
    assert len(dead_links({**parsed, name: broken}, name)) == 1


# --- the ledger's filters ------------------------------------------------------------------------

SHOWN = "nodes => nodes.filter(node => node.checkVisibility()).map(node => node.id)"
ROWS = ".da-ledger tbody tr"


def shown(page) -> list[str]:
    return page.locator(ROWS).evaluate_all(SHOWN)


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_ledger_is_filtered_by_keyboard(page, origins, scheme):
    with watched(page, origins[scheme]) as problems:
        visit(page, f"{origins[scheme]}book/ledger.html")
        count, everything = page.locator(".da-filter output"), page.locator(ROWS).count()
        assert count.inner_text() == f"{everything} of {everything} items"
        page.locator("[value=wrong-as-printed]").focus()
        page.keyboard.press("Space")
        wrong = page.locator("tr.verdict-wrong-as-printed").evaluate_all("a => a.map(r => r.id)")
        assert shown(page) == wrong and 0 < len(wrong) < everything
        assert count.inner_text() == f"{len(wrong)} of {everything} items"
        assert page.evaluate("location.hash") == "#verdict=wrong-as-printed"
        page.locator("[name=paper]").focus()
        page.keyboard.type("004")
        page.locator("[name=words]").focus()
        page.keyboard.type("Gaussian MIXTURES")
        has = "text => ['gaussian', 'mixtures'].every(word => text.toLowerCase().includes(word))"
        chosen = page.locator("tr.verdict-wrong-as-printed[id^='004.']").evaluate_all(
            f"rows => rows.filter(row => ({has})(row.textContent)).map(row => row.id)"
        )
        assert shown(page) == chosen and "004.thm1" in chosen and len(chosen) < len(wrong)
        page.reload()
        settle(page)
        assert shown(page) == chosen, "a reload must keep the filter in the address"
        page.locator(".da-filter button").focus()
        page.keyboard.press("Enter")
        page.wait_for_function("!location.hash")
        assert count.inner_text() == f"{everything} of {everything} items"
    report(problems)


def test_ledger_follows_its_address(page, web):
    visit(page, f"{web}book/index.html")
    page.locator(".da-tally a[href$='#grade=error']").first.click()
    page.wait_for_url("**/ledger.html#grade=error")
    settle(page)
    assert str(len(shown(page))) == page.locator(".da-counts tr:last-child a").first.inner_text()
    page.locator(
        ".da-counts a[href='#paper=000&verdict=holds-if'], "
        ".da-counts a[href$='#paper=000&verdict=holds-if']"
    ).click()
    rows = page.locator("tr.verdict-holds-if[id^='000.']")
    assert shown(page) == rows.evaluate_all("a => a.map(r => r.id)")
    hidden = page.locator("tr.verdict-holds:not([id^='000.'])").first
    assert not hidden.is_visible()
    page.evaluate(f"location.hash = '{hidden.get_attribute('id')}'")  # an address shows hidden rows
    hidden.wait_for()


def test_ledger_shows_everything_without_scripts(browser, web):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{web}book/ledger.html")
        assert not page.locator(".da-filter").is_visible()
        assert page.locator(".da-ledger tbody tr").last.is_visible()
