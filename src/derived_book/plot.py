"""The style of all figures, with one colour per mechanism.

Figures are inline SVG: text takes the font of the page, black becomes ``currentColor``, and the
background is transparent. So the same output is legible in the book (light, dark, phone, print)
and in Jupyter or Colab, and needs no network. Columns of panels are separate drawings, which are
placed one below the other on a narrow screen.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import ListedColormap, is_color_like, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, NullFormatter

from derived_attention.registry import MECHANISMS

# Every colour has a contrast of at least 3:1 on white and on the dark pages of the book and of
# Jupyter. Colour-blind readers can distinguish those of MAIN too (both are tested).
LABELS = {name: entry.label for name, entry in MECHANISMS.items()} | {"reference": "Reference"}
COLORS = {name: entry.color for name, entry in MECHANISMS.items()} | {"reference": "#8c9292"}
MAIN = ("softmax", "linear", "bn", "sh", "mgk", "primal", "lasso")

SVG_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "derived-attention",  # the same figure gives the same bytes
    "mathtext.fontset": "dejavusans",  # mathematics as Unicode letters
}
STYLE: dict[Any, Any] = {
    "axes.facecolor": "none",
    "axes.prop_cycle": cycler(color=[COLORS[name] for name in MAIN]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "figure.figsize": (4.4, 2.75),  # the widest that fits on a phone of 320 pixels
    "font.size": 10.5,
    "grid.alpha": 0.15,
    "grid.color": "black",
    "image.interpolation": "none",  # a map is embedded at its own size, one pixel per cell
    "legend.columnspacing": 1.2,
    "legend.frameon": False,
    "legend.handlelength": 1.5,
    "legend.labelspacing": 0.3,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
}


LEAST_TYPE = 9.0  # smallest type, in pixels on any screen, and in points in a figure
MOST = 1.5  # largest scale in pixels per point, at which the type is as large as the text
PHONE = 272.0  # width of a figure on the narrowest phone, in pixels


def use_style() -> None:
    """Make Matplotlib draw in the style of the book."""
    mpl.rcParams.update({**SVG_SETTINGS, **STYLE, "image.cmap": fade("softmax")})


def fade(color: str) -> str:
    """Return the name of a colour map from transparent to `color`, a key of `COLORS` or a colour.

    Its low end shows the background, so that ``plt.imshow(A, cmap=fade("bn"), vmin=0)`` looks the
    same in light and dark mode. Another `color` raises ValueError.
    """
    rgb = to_rgb(find_color(color))
    name = f"fade-{to_hex(rgb)[1:]}"
    if name not in mpl.colormaps:
        shades = [(*rgb, alpha) for alpha in opacity(np.linspace(0, 1, 256))]
        mpl.colormaps.register(ListedColormap(shades, name))
    return name


def find_color(color: str, name: str = "color") -> str:
    """Return the colour of a key of `COLORS`, or a colour as it is; raise ValueError for others."""
    found = COLORS.get(color, color)
    if not is_color_like(found):
        raise ValueError(f"{name} is {color!r}; expected a key of COLORS or a colour")
    return found


def opacity(share: np.ndarray) -> np.ndarray:
    """Return the opacity for values as a share, 0 to 1, of the range of a map.

    The exponent is below one, as a proportional opacity would hide small values on a dark page.
    """
    return share**0.6


class _Inline:
    """HTML for a notebook, and plain text for other outputs."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def display_markup(markup: str, alt: str) -> None:
    """Display HTML in a notebook; elsewhere print `alt`."""
    try:
        from IPython.display import display
    except ImportError:
        print(alt)
    else:
        display(_Inline(markup, alt))


def show(fig: Figure, alt: str) -> None:
    """Display a figure as inline SVG, and close it.

    Columns of panels are placed side by side if the type is then large enough to read, otherwise
    one below the other; a column that is still too wide scrolls.

    Parameters
    ----------
    fig : matplotlib.figure.Figure
        The figure. Black becomes the colour of the page's text. A figure with texts or legends
        outside its axes is not divided into columns.
    alt : str
        One or more sentences that state what the figure shows, for screen readers, and for
        outputs that do not render HTML.

    Raises
    ------
    TypeError
        If `fig` is not a Matplotlib figure or `alt` is not a string.
    ValueError
        If `alt` is not a sentence that ends in ``.``, ``!`` or ``?``, or if a text of the figure
        is smaller than 9 points.
    """
    if not isinstance(fig, Figure):
        raise TypeError(f"fig is {type(fig).__name__}; expected a Matplotlib figure")
    check_alt(alt)
    _prepare(fig)
    cuts = _cuts(fig)
    pieces = _split_drawing(svg_tree(fig, alt), cuts)
    plt.close(fig)
    display_markup(_place_side_by_side(pieces, cuts, alt), alt)


def _place_side_by_side(pieces: list[ET.Element], cuts: list[float], alt: str) -> str:
    """Return HTML with the pieces side by side if their type is then legible, else stacked."""
    least, most = LEAST_TYPE / _type_size(pieces) / 16, MOST / 16  # rem per point
    for piece, (low, high) in zip(pieces, pairwise(cuts), strict=True):
        # If there is room for all pieces, the flex basis is negative, and they share the line in
        # proportion to their widths. Otherwise it is huge, and each piece fills a line.
        width = high - low
        piece.attrib |= {
            "class": "da-svg",
            "style": f"flex:{width:.2f} 1 calc(({least * cuts[-1]:.2f}rem - 100%)*999);"
            f"min-width:{least * width:.2f}rem;max-width:{most * width:.2f}rem;height:auto;"
            "margin:auto;overflow:visible",
        }
    drawn = "".join(ET.tostring(piece, encoding="unicode") for piece in pieces)
    return (
        '<div class="da-figure" style="overflow:auto hidden"><div role="img" '
        f'aria-label="{html.escape(alt)}" style="display:flex;flex-wrap:wrap;row-gap:.5rem;'
        f"max-width:{most * cuts[-1]:.2f}rem;margin:auto;"
        f'color:var(--pst-color-text-base,inherit);fill:currentColor">{drawn}</div></div>'
    )


def _prepare(fig: Figure) -> None:
    """Adapt labels and maps to the page."""
    for axis in (axis for axes in fig.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterSciNotation):
            axis.set_major_formatter(FuncFormatter(_power_of_ten))
            axis.set_minor_formatter(NullFormatter())
    for mesh in fig.findobj(QuadMesh):
        mesh.set_rasterized(True)  # hundreds of cells as paths are large and show seams
    for axes in fig.axes:
        if axes.images:  # a frame marks the extent of a map whose edges are transparent
            axes.spines[:].set(visible=True, linewidth=0.6, alpha=0.6)


def _cuts(fig: Figure) -> list[float]:
    """Return the cuts between columns of axes, from 0 to the figure's width, in points.

    Neighbours that fit on a phone together are not separated. A figure with artists outside its
    axes is not cut, as they may refer to any of them.
    """
    width = 72 * fig.get_figwidth()
    if set(fig.get_children()) != {fig.patch, *fig.axes}:
        return [0.0, width]
    fig.draw_without_rendering()  # drawing computes the layout
    columns: list[tuple[float, float]] = []
    for low, high in sorted(_extent(axes) for axes in fig.axes):
        if columns and low < columns[-1][1]:
            low, high = columns[-1][0], max(high, columns.pop()[1])
        columns.append((low, high))
    gaps = [(a[1] + b[0]) / 2 for a, b in pairwise(columns)]
    cuts, room = [0.0], PHONE / LEAST_TYPE * mpl.rcParams["font.size"]
    for gap, after in pairwise([*gaps, width]):
        cuts += [gap] if after - cuts[-1] > room else []
    cuts.append(width)
    for axes in fig.axes if len(cuts) > 2 else []:
        axes.set_gid(f"piece{np.searchsorted(cuts[1:-1], np.mean(_extent(axes)))}")
    return cuts


def _extent(axes: Axes) -> tuple[float, float]:
    """Return left and right end of the axes with labels, titles and legends, in points."""
    box = axes.get_tightbbox() or axes.bbox
    return 72 * box.x0 / axes.figure.dpi, 72 * box.x1 / axes.figure.dpi


def _split_drawing(root: ET.Element, cuts: list[float]) -> list[ET.Element]:
    """Split a drawing into one drawing for each piece between `cuts`."""
    if len(cuts) == 2:
        return [root]
    height = root.attrib["viewBox"].split()[3]
    pieces = []
    for i, (low, high) in enumerate(pairwise(cuts)):
        box = f"{low:.2f} 0 {high - low:.2f} {height}"
        pieces.append(ET.Element("svg", {**root.attrib, "viewBox": box}))
        for group in root.findall(f"g[@id='piece{i}']"):
            pieces[-1].extend(group)
    for node in root.findall("defs/*"):  # clip paths and hatches move to the piece that uses them
        address = "#" + node.attrib["id"]
        users = (
            p for p in pieces if any(address in v for n in p.iter() for v in n.attrib.values())
        )
        next(users, pieces[0]).append(node)
    return pieces


def _type_size(pieces: list[ET.Element]) -> float:
    """Return the size of the smallest text in points; raise ValueError if it is illegible."""
    texts = []
    for node in (node for piece in pieces for node in piece.iter()):
        style = re.search(r"font-size: ([\d.]+)px", node.get("style", ""))
        if style and (text := "".join(node.itertext()).strip()):
            texts.append((float(style[1]), text))
    size, text = min(texts, default=(LEAST_TYPE, ""))
    if size < LEAST_TYPE:
        raise ValueError(
            f"fig has a text of {size:g} points, {text!r}; expected at least {LEAST_TYPE:g} points"
        )
    return size


def svg_tree(fig: Figure, key: str) -> ET.Element:
    """Return the figure as an SVG element; its ids depend on the figure and `key`."""
    out = io.StringIO()
    with mpl.rc_context(SVG_SETTINGS):
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        fig.savefig(out, format="svg", transparent=True, metadata=no_metadata)
    source = out.getvalue()
    root = ET.fromstring(source)
    prefix = "da" + hashlib.sha256((source + key).encode()).hexdigest()[:8]
    used = set(re.findall(r"#([\w.]+)", source))
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
        node.text, node.tail = (node.text or "").strip(), None
        attributes = {name.rpartition("}")[2]: value for name, value in node.attrib.items()}
        node.attrib = {n: _attribute(v, prefix) for n, v in attributes.items() if n != "id"}
        name = attributes.get("id", "")
        if name in used:
            node.attrib["id"] = prefix + name
        elif name.startswith("piece"):
            node.attrib["id"] = name
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del node.attrib["transform"]
    _prune(root)
    root.attrib = {"viewBox": root.attrib["viewBox"], "stroke-linejoin": "round"}
    return root


def _prune(node: ET.Element) -> None:
    """Remove elements without effect, and style elements, which would apply to the whole page."""
    kept: list[ET.Element] = []
    for child in node:
        _prune(child)
        if child.tag == "g" and not child.attrib:
            kept += child
        elif child.tag != "style" and child.get("style") != "fill: none":
            kept += [child] * (child.tag != "defs" or len(child) > 0)
    node[:] = kept


def _attribute(value: str, prefix: str) -> str:
    """Adapt an attribute: the page's font and colour, ids with a prefix, two decimals."""
    if value.startswith("data:"):
        return value
    value = re.sub(r"font-family:[^;]*;? ?", "", value.replace("#000000", "currentColor"))
    value = re.sub(r"^#|(?<=url\()#", f"#{prefix}", value)
    return " ".join(re.sub(r"(\.\d\d)\d+", r"\1", value).split())


def _power_of_ten(value: float, position: int | None = None) -> str:
    """Return a label of a logarithmic axis, such as 10³, in Unicode characters."""
    exponent = round(np.log10(value)) if value > 0 else 0
    if not np.isclose(value, 10.0**exponent) or exponent in (0, 1):
        return f"{value:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def check_alt(alt: str) -> None:
    """Raise TypeError or ValueError unless `alt` is a sentence."""
    if not isinstance(alt, str):
        raise TypeError(f"alt is {type(alt).__name__}; expected a string")
    if not re.fullmatch(r"\S+\s.*[.!?]", alt.strip(), re.DOTALL):
        raise ValueError(f"alt is {alt!r}; expected a sentence that ends in '.', '!' or '?'")
