"""Figures: colours, static SVG, slider fragments, and both in a real browser."""

import base64
import io
import json
import re
import xml.etree.ElementTree as ET

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from derived_attention.registry import MECHANISMS
from derived_book import plot, sliders
from derived_book.sliders import Bars, Heat, Line, Panel, Points

ALT = "The curve falls faster as β grows."
DARK = ("#121212", "#14181e", "#1e1e1e")  # the book; its theme's default; Jupyter and VS Code


@pytest.fixture(autouse=True)
def clean_matplotlib():
    with matplotlib.rc_context({"backend": "Agg"}):
        yield
    plt.close("all")


@pytest.fixture
def outputs(monkeypatch):
    """Return the displayed outputs, each as (HTML, text)."""
    seen = []
    for module in (plot, sliders):
        monkeypatch.setattr(module, "display_markup", lambda *shown: seen.append(shown))
    return seen


def subplots(*shape, **options):
    plot.use_style()
    return plt.subplots(*shape, **options)


def curve(title="β decides"):
    fig, axes = subplots()
    axes.plot([0, 1, 2], [1, 4, 2], "o-", label="a")
    axes.axhline(2, color="black")
    axes.set(xlabel="x & y", ylabel="height", title=title)
    axes.legend()
    return fig


def decay(**changes):
    x, beta = np.linspace(0, 4, 30), np.linspace(0, 2, 5)
    panel = Panel([Line(x, np.exp(-np.outer(beta, x)), color="bn", label="exp(−βx)")], xlabel="x")
    sliders.slider(**{"label": "β", "values": beta, "panels": [panel], "alt": ALT, **changes})


def frames_of(markup):
    """Return the data of a slider: texts, values, moving marks."""
    return json.loads(re.search(r"draw\(\)\}\}\)\((.*)\)</script>", markup).group(1))


# Colours


def linear(color):
    channels = np.array(to_rgb(color))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    low, high = sorted(linear(color) @ [0.2126, 0.7152, 0.0722] for color in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_every_color_is_legible_on_light_and_dark():
    for name, color in plot.COLORS.items():
        assert min(contrast(color, page) for page in ("#ffffff", *DARK)) >= 3, name


def test_colors_and_labels_are_those_of_the_registry_and_differ_between_families():
    assert plot.COLORS.keys() == plot.LABELS.keys() >= {*MECHANISMS, *plot.MAIN}
    assert len(set(plot.LABELS.values())) == len(plot.LABELS)
    families = {}
    for name, color in plot.COLORS.items():
        assert name not in MECHANISMS or color == MECHANISMS[name].color
        entry = MECHANISMS.get(name)
        families.setdefault(color, set()).add(entry.function.split(".")[0] if entry else name)
    assert all(len(family) == 1 for family in families.values())


# Machado, Oliveira and Fernandes (2009), severity 1: how dichromats see linear RGB.
SEEN = {
    "all cones": "1 0 0 0 1 0 0 0 1",
    "no red": "0.152286 1.052583 -.204868 0.114503 0.786281 0.099216 -.003882 -.048116 1.051998",
    "no green": "0.367322 0.860646 -.227968 0.280085 0.672501 0.047413 -.011820 0.042940 0.968881",
    "no blue": "1.255528 -.076749 -.178779 -.078411 0.930809 0.147602 0.004733 0.691367 0.303900",
}
CONES = """0.4122214708 0.5363325363 0.0514459929 0.2119034982 0.6806995451 0.1073969566
    0.0883024619 0.2817188376 0.6299787005"""
OKLAB = """0.2104542553 0.7936177850 -0.0040720468 1.9779984951 -2.4285922050 0.4505937099
    0.0259040371 0.7827717662 -0.8086757660"""


def matrix(text):
    return np.array(text.split(), float).reshape(3, 3)


@pytest.mark.parametrize("eye", SEEN)
def test_main_colors_stay_apart_for_every_reader(eye):
    """In OKLab 0.02 is the least visible difference; equally light green and red are 0.03 apart."""
    light = np.array([linear(plot.COLORS[name]) for name in plot.MAIN])
    cones = np.clip(light @ matrix(SEEN[eye]).T, 0, 1) @ matrix(CONES).T
    seen = np.cbrt(cones) @ matrix(OKLAB).T
    apart = np.linalg.norm(seen[:, None] - seen, axis=-1) + np.eye(len(seen))
    assert apart.min() > (0.1 if eye == "all cones" else 0.06)


# Static figures


def test_show_displays_one_labelled_svg_and_closes_the_figure(outputs):
    fig = curve()
    plot.show(fig, ALT)
    ((markup, text),) = outputs
    assert text == ALT
    assert not plt.fignum_exists(fig.number)
    root = ET.fromstring(markup)[0]
    assert (root.get("role"), root.get("aria-label")) == ("img", ALT)
    assert [child.tag for child in root] == ["svg"] and not root[0].get("role")
    texts = ["".join(node.itertext()) for node in root.iter("text")]
    assert {"x & y", "height", "β decides", "a"} <= set(texts)
    # No external resource, no font, no fixed black, and no white background.
    for word in """<?xml <!DOCTYPE http xmlns <style <script <metadata date font-family DejaVu
        #000000 #ffffff""".split():
        assert word not in markup
    assert "currentColor" in markup


def test_same_figure_same_bytes_and_other_figure_other_ids(outputs):
    plot.show(curve(), ALT)
    plot.show(curve(), ALT)
    plot.show(curve("another"), ALT)
    first, again, other = (markup for markup, _ in outputs)
    assert first == again
    ids = [set(re.findall(r' id="([^"]+)"', markup)) for markup in (first, other)]
    assert ids[0] and ids[1] and not ids[0] & ids[1]
    for markup, own in zip((first, other), ids, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', markup)) == own


def test_maps_are_embedded_cell_by_cell_with_a_transparent_end(outputs):
    fig, axes = subplots()
    image = axes.imshow(np.eye(5), cmap=plot.fade("bn"))
    fig.colorbar(image)
    plot.show(fig, "The map is the identity.")
    markup = outputs[0][0]
    assert markup.count("data:image/png;base64,") == 2  # the map, and the bar as one image
    assert "image-rendering:pixelated" in markup.replace(" ", "")
    assert len(markup) < 20_000
    end = matplotlib.colormaps[plot.fade("bn")](1.0)
    assert matplotlib.colors.to_hex(end) == plot.COLORS["bn"]


def test_logarithmic_axes_have_plain_letters(outputs):
    fig, axes = subplots()
    axes.loglog([1e-3, 1e3], [1, 100])
    plot.show(fig, "Both axes are logarithmic.")
    texts = ["".join(t.itertext()) for t in ET.fromstring(outputs[0][0]).iter("text")]
    assert {"10⁻³", "1", "10", "10²"} <= set(texts)
    fig, axes = subplots()
    axes.plot([-100, 100], [0, 1])
    axes.set_xscale("symlog")
    plot.show(fig, "One axis has both signs.")
    assert ">0</text>" in outputs[1][0] and ">10²</text>" in outputs[1][0]


def columns():
    """Return a map with its colour bar and two panels of lines and bars, side by side."""
    fig, axes = subplots(1, 3, figsize=(7.2, 2.5))
    fig.colorbar(axes[0].imshow(np.eye(3)))
    for i, ax in enumerate(axes[1:], 1):
        ax.plot([0, 1], [0, i], "o-", label="line")
        ax.bar([0, 1], [0, i], hatch="/" * i)
        ax.set(xlabel=f"x{i}", ylabel=f"y{i}", title=f"title {i}")
        ax.legend()
    return fig


def boxes_of(drawings):
    return [np.array(svg.get("viewBox").split(), float) for svg in drawings]


def test_columns_are_drawings_that_share_out_one_figure(outputs):
    plot.show(columns(), ALT)
    drawings = ET.fromstring(outputs[0][0])[0].findall("svg")
    boxes = boxes_of(drawings)
    assert len(drawings) == 3 and boxes[0][0] == 0
    for (left, top, width, height), after in zip(boxes, [*boxes[1:], [7.2 * 72]], strict=True):
        assert (top, height) == (0, 180) and left + width == pytest.approx(after[0], abs=0.02)
    assert len(drawings[0].findall(".//image")) == 2  # the bar is in the drawing of its map
    for i, svg in enumerate(drawings[1:], 1):
        texts = {"".join(node.itertext()): float(node.get("x", "nan")) for node in svg.iter("text")}
        assert {f"x{i}", f"y{i}", f"title {i}", "line"} <= set(texts)
        inside = [boxes[i][0] < x < boxes[i][:3:2].sum() for x in texts.values() if x == x]
        assert inside and all(inside)
    every = [node for svg in drawings for node in svg.iter()]
    ids = [node.get("id") for node in every if node.get("id")]
    assert len(ids) == len(set(ids)) and all(id_.startswith("da") for id_ in ids)
    used = re.findall(r'(?:href="|url\()#([^")]+)', outputs[0][0])
    assert set(used) == set(ids)
    for svg in drawings:
        own = {node.get("id") for tag in ("clipPath", "pattern") for node in svg.iter(tag)}
        assert own == set(re.findall(r"url\(#([^)]+)", ET.tostring(svg, "unicode")))


def test_narrow_neighbours_stay_together_and_so_does_what_cannot_be_cut(outputs):
    fig, _ = subplots(2, 8, figsize=(7.6, 2.2))
    plot.show(fig, "Sixteen panels stand in two rows.")
    titled, over = columns(), columns()
    titled.suptitle("Of all")
    over.axes[1].set_title("a title as wide as two panels, at the very least")
    for fig in (titled, over):
        plot.show(fig, ALT)
    counts = [len(ET.fromstring(markup)[0]) for markup, _ in outputs]
    assert counts == [2, 1, 2]


def test_type_that_nobody_can_read_is_refused(outputs):
    fig = curve()
    fig.axes[0].text(1, 1, "tiny", fontsize=8.5)
    with pytest.raises(ValueError, match="text of 8.5 points, 'tiny'; expected at least 9"):
        plot.show(fig, ALT)
    assert not outputs
    plot.show(curve(), ALT)
    (least,) = re.findall(r"min-width:([\d.]+)rem", outputs[0][0])
    assert float(least) * 16 * 10.5 / (4.4 * 72) == pytest.approx(9, abs=0.01)


@pytest.mark.parametrize("page", ["#ffffff", *DARK])
def test_small_values_of_a_map_are_seen_on_any_page(page):
    """Zero is transparent, and a quarter of the range contrasts with the page."""
    for name in plot.COLORS:
        shades = matplotlib.colormaps[plot.fade(name)](np.linspace(0, 1, 9))
        assert shades[0, 3] == 0 and shades[-1, 3] == 1 and (np.diff(shades[:, 3]) > 0).all()
        alpha = shades[2, 3]
        seen = alpha * shades[2, :3] + (1 - alpha) * np.array(to_rgb(page))
        assert contrast(seen, page) > 1.45, name
    with pytest.raises(ValueError, match="color is 'sofmax'; expected a key of COLORS or a colour"):
        plot.fade("sofmax")


@pytest.mark.parametrize("alt", ["", "  ", "A curve", "Curve.", "no end"])
def test_alt_must_be_a_sentence(alt, outputs):
    with pytest.raises(ValueError, match="alt is .*; expected a sentence"):
        plot.show(curve(), alt)
    with pytest.raises(ValueError, match="alt is .*; expected a sentence"):
        decay(alt=alt)
    assert not outputs


def test_output_in_a_notebook_is_html_with_alt_as_text(monkeypatch):
    formatters = pytest.importorskip("IPython.core.formatters")
    displayed = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    plot.show(curve(), ALT)
    data, _ = formatters.DisplayFormatter().format(displayed[0])
    assert data.keys() == {"text/html", "text/plain"}
    assert data["text/plain"] == ALT
    assert data["text/html"].startswith('<div class="da-figure"')


# Sliders


def test_slider_is_one_element_with_a_native_labelled_control(outputs):
    decay(start=2)
    markup, text = outputs[0]
    assert text == ALT and markup.startswith("<div") and markup.endswith("</div>")
    assert f'role="img" aria-label="{ALT}"' in markup
    label = re.search(r"<label .*?</label>", markup).group()
    assert "<span>β</span>" in label and 'type="range" min="0" max="4" value="2"' in label
    assert 'aria-valuetext="1"' in label
    assert '<output aria-live="polite">β = 1</output>' in markup
    assert "http" not in markup and "@import" not in markup
    assert len(markup) < 10_000


def test_first_frame_is_drawn_by_python_and_equals_the_data(outputs):
    decay(start=3)
    markup = outputs[0][0]
    lines, names, (mark,) = frames_of(markup)
    assert lines == [f"β = {v}" for v in names] == ["β = 0", "β = 0.5", "β = 1", "β = 1.5", "β = 2"]
    assert len(mark["x"]) == 1 and len(mark["y"]) == 5  # coordinates that do not move are sent once
    points = " ".join(f"{x},{y}" for x, y in zip(mark["x"][0], mark["y"][3], strict=True))
    assert f'points="{points}"' in markup


def test_marks_lie_where_the_axes_say(outputs):
    """Points at tick positions must have the coordinates of the tick marks."""
    points = Points([0, 1], [[0, 1], [0, 2]])
    ticks = {"xticks": {0: "", 1: "", 9: ""}, "yticks": {1: "", 2: ""}}  # one is outside
    sliders.slider("k", [0, 1], [Panel([points], xlim=(0, 2), ylim=(0, 2), **ticks)], alt=ALT)
    svg = ET.fromstring(re.search(r"<svg viewBox.*</svg>", outputs[0][0]).group())
    ticks = [(float(use.get("x")), float(use.get("y"))) for use in svg.iter("use")]
    (x0, bottom), (x1, _), (left, y1), (_, y2) = ticks
    (mark,) = frames_of(outputs[0][0])[2]
    np.testing.assert_allclose(mark["cx"], [[x0, x1]], atol=0.1)
    np.testing.assert_allclose(mark["cy"], [[bottom, y1], [bottom, y2]], atol=0.1)
    assert x0 == left < x1 and y2 < y1 < bottom


def test_all_marks_move_and_still_ones_cost_nothing(outputs):
    x = np.arange(4.0)
    steps = np.arange(3.0)[:, None] + x
    panels = [
        Panel([Line(x, steps), Line(x, x, color="currentColor", dashed=True), Bars(x, steps)]),
        Panel([Points(steps, x, color="#123456"), Points(x, steps)], title="dots"),
        Panel([Heat(np.stack([np.eye(3) * k for k in range(3)]), label="A"), Points([1], [1])]),
    ]
    sliders.slider("k", ["a", "b", "c"], panels, alt=ALT, readout=["x", "y", "z"])
    texts, names, marks = frames_of(outputs[0][0])
    assert (texts, names) == (["x", "y", "z"], ["a", "b", "c"])
    keys = [["x", "y"], ["y2"], ["cx", "cy"], ["cx", "cy"], ["href"]]
    assert [list(mark) for mark in marks] == keys
    assert outputs[0][0].count('<g data-m="">') == 5
    assert len({href for (href,) in marks[4]["href"]}) == 3


def test_heat_fades_from_transparent_to_the_full_color(outputs):
    maps = np.array([[[0.0, 1.0], [2.0, 4.0]], [[4.0, 4.0], [0.0, 0.0]]])
    sliders.slider("k", [1, 2], [Panel([Heat(maps, color="sh")])], alt=ALT)
    first = frames_of(outputs[0][0])[2][0]["href"][0][0].partition(",")[2]
    image = np.array(Image.open(io.BytesIO(base64.b64decode(first))))
    alpha = 255 * plot.opacity(np.array([[0, 0.25], [0.5, 1]]))
    np.testing.assert_array_equal(image[..., 3], alpha.round())
    assert matplotlib.colors.to_hex(image[1, 1, :3] / 255) == plot.COLORS["sh"]


def test_limits_in_reverse_reverse_a_map(outputs):
    for values, limits in ((np.eye(2), (1, 0)), (1 - np.eye(2), (0, 1))):
        sliders.slider("k", [1, 2], [Panel([Heat([values] * 2, limits=limits)])], alt=ALT)
    images = [re.search('href="(data:[^"]+)', markup).group(1) for markup, _ in outputs]
    assert images[0] == images[1]


def test_no_text_can_end_the_script_or_open_an_element(outputs):
    evil = '</script><b title="x">&'
    panel = Panel([Line([0, 1], [[0, 1], [1, 0]], label=evil)], title=evil, xlabel=evil)
    sliders.slider(evil, [0, 1], [panel], alt=f"{evil} ends here.", readout=[evil, evil])
    markup = outputs[0][0]
    assert "<b" not in markup and markup.count("</script>") == 1
    assert frames_of(markup)[0] == [evil, evil]


BAD = [
    ({"values": [1]}, "values has 1 steps, readout 1; expected as many, at least 2"),
    ({"readout": ["one"]}, "values has 5 steps, readout 1; expected as many"),
    ({"start": 5}, "start is 5; expected a step from 0 to 4"),
    ({"panels": []}, "panels has length 0; expected 1, 2 or 3 panels"),
    ({"panels": [Panel([Line([0, 1], [[0, 1]] * 4)])]}, r"panels\[0\].marks\[0\].y has .* 1 axes"),
    ({"panels": [Panel([Line([0, 1], [0, 1, 2])])]}, "x has length 2 and y 3; expected the same"),
    ({"panels": [Panel([Line([0, 1], [0, np.nan])])]}, r"marks\[0\].y contains nan; expected fin"),
    ({"panels": [Panel([Line([0, 1], [0, 1], color="blurple")])]}, "color is 'blurple'; expected"),
    ({"panels": [Panel([Bars([[0, 1]] * 5, [0, 1])])]}, r"x has shape .*; expected \(n,\)"),
    ({"panels": [Panel([Heat([1.0, 2.0])])]}, r"marks\[0\].values has shape .*; expected 2 axes"),
    ({"panels": [Panel([Heat(np.eye(2), limits=(1, 1))])]}, "limits is .*; expected two different"),
    ({"panels": [Panel([Line([0, 1], [0, 1])], ylim=(0, np.nan))]}, "ylim is .*; expected two dif"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_sliders_are_refused_with_the_place(changes, message, outputs):
    with pytest.raises(ValueError, match=message):
        decay(**changes)
    assert not outputs


def test_wrong_types_are_named():
    for call, message in (
        (lambda: plot.show([], ALT), "fig is list; expected a Matplotlib figure"),
        (lambda: plot.show(curve(), None), "alt is NoneType; expected a string"),
        (lambda: decay(panels=Panel([])), "panels is a Panel; expected a list of 1, 2 or 3"),
        (lambda: decay(panels=["panel"]), r"panels\[0\] is 'panel'; expected a Panel"),
        (lambda: decay(panels=[Panel(Line([0], [0]))]), r"panels\[0\] is .* a list of marks"),
        (lambda: decay(panels=[Panel(["line"])]), r"panels\[0\].marks\[0\] is 'line'; expected"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


# In a browser

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Figures</title>
<meta name="viewport" content="width=device-width">
<script>window.before = Object.keys(window).length</script>
<body style="background:{};color:{};font:16px sans-serif;max-width:40rem;margin:1rem">
<div style="overflow:auto">{}</div>"""


def test_sliders_and_figures_in_a_browser(outputs, browser, tmp_path):
    decay(readout=[f"step {k}" for k in range(5)], start=1)
    maps = np.stack([np.eye(4) * (k + 1) for k in range(3)])
    panels = [Panel([Heat(maps)], xlabel="key"), Panel([Bars(np.arange(4), maps[:, 0])])]
    sliders.slider("scale", ["one", "two", "three"], panels, alt=ALT)
    plot.show(curve(), ALT)
    plot.show(columns(), ALT)
    body = "".join(markup for markup, _ in outputs)
    (tmp_path / "light.html").write_text(PAGE.format("#fff", "rgb(1, 2, 3)", body), "utf-8")
    (tmp_path / "dark.html").write_text(PAGE.format("#121212", "rgb(222, 221, 220)", body), "utf-8")
    for theme in ("light", "dark"):
        for width in (320, 390, 1000):
            with browser.new_context(viewport={"width": width, "height": 900}) as context:
                address = (tmp_path / f"{theme}.html").as_uri()
                check_page(context.new_page(), address, theme, width)
    with browser.new_context(java_script_enabled=False) as context:
        still = context.new_page()
        still.goto((tmp_path / "light.html").as_uri())
        assert not still.locator("input").first.is_visible()
        assert still.locator("polyline").first.is_visible()
        assert still.locator("output").first.inner_text() == "step 1"


def check_page(page, address, theme, width):
    """Check requests, console, theme, layout, text size and the keyboard on one page."""
    problems = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: r.url.startswith("http") and problems.append(r.url))
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("Object.keys(window).length === window.before + 1")  # `before` itself

    ink = "rgb(1, 2, 3)" if theme == "light" else "rgb(222, 221, 220)"
    inks = "[...document.querySelectorAll('svg text')].map(node => getComputedStyle(node).fill)"
    assert set(page.evaluate(inks)) == {ink}
    sizes = """[...document.querySelectorAll('svg text')].map(node => {
        const m = node.getScreenCTM();
        return parseFloat(getComputedStyle(node).fontSize) * Math.hypot(m.a, m.b)})"""
    assert min(page.evaluate(sizes)) >= 9
    check_columns(page, width)
    beside = page.locator("[data-da] >> nth=1 >> .da-panels > div").all()
    tops = [panel.bounding_box()["y"] for panel in beside]
    assert (tops[0] == tops[1]) == (width > 600)

    first, second = page.locator("input").all()
    assert first.bounding_box()["height"] >= 24
    assert page.get_by_role("slider", name="β", exact=True).count() == 1
    line, still = page.locator("polyline").first, page.locator("line").first
    output = page.locator("output").first
    before = (line.get_attribute("points"), still.get_attribute("y2"))
    first.focus()
    page.keyboard.press("ArrowRight")
    check_ring(first)
    assert output.inner_text() == "step 2" and first.get_attribute("aria-valuetext") == "1"
    assert line.get_attribute("points") != before[0] and still.get_attribute("y2") == before[1]
    page.keyboard.press("ArrowLeft")
    assert line.get_attribute("points") == before[0]
    page.keyboard.press("End")
    assert output.inner_text() == "step 4"
    page.keyboard.press("Home")
    assert output.inner_text() == "step 0"
    page.keyboard.press("Tab")
    assert second.evaluate("node => node === document.activeElement")
    href = page.locator(".da-panels image").get_attribute("href")
    page.keyboard.press("End")
    assert second.get_attribute("aria-valuetext") == "three"
    assert page.locator(".da-panels image").get_attribute("href") != href
    assert still.get_attribute("y2") != before[1]
    assert problems == []


def check_columns(page, width):
    """Assert that columns form one row on a laptop, and one column on a phone."""
    boxes = [svg.bounding_box() for svg in page.locator("[role=img]").last.locator("svg").all()]
    assert len(boxes) == 3
    for left, right in zip(boxes, boxes[1:], strict=False):
        if width == 1000:
            assert left["x"] + left["width"] == pytest.approx(right["x"], abs=0.1)
            assert right["y"] == left["y"]
            assert right["height"] == pytest.approx(left["height"], abs=0.1)
        else:
            assert right["y"] >= left["y"] + left["height"]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)


def check_ring(slider):
    """Assert that a focused slider has a ring, which lies within its figure."""
    ring, inside = slider.evaluate("""node => {
        const style = getComputedStyle(node), box = node.getBoundingClientRect();
        const drawn = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth);
        const reach = drawn + parseFloat(style.outlineOffset);
        const around = node.closest(".da-figure").getBoundingClientRect();
        return [drawn, box.left - reach >= around.left && box.right + reach <= around.right]}""")
    assert ring >= 2 and inside
