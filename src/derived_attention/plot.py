"""One style for every figure, one colour per mechanism.

Figures are inline SVG: text takes the font of the page, black becomes ``currentColor``, the
background is transparent. So the same output reads well in the book (light, dark, phone, print)
and in Jupyter or Colab, and makes no request.
"""

from __future__ import annotations

import hashlib
import io
import re
import xml.etree.ElementTree as ET
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, NullFormatter

from derived_attention.attention.mechanisms import MECHANISMS

# Every colour has a contrast of at least 3:1 on white and on the dark pages of the book and of
# Jupyter. Those of MAIN stay apart for red-, green- and blue-blind readers too (both tested).
_OTHERS = {  # in no registry yet: mechanisms of chapters to come, and what they are held against
    "mrs": ("MrsHA", "#e65aaa"),
    "linformer": ("Linformer", "#a0643c"),
    "performer": ("Performer", "#8250dc"),
    "fmm": ("FMMformer", "#5aa000"),
    "luna": ("Luna", "#468c8c"),
    "mra": ("MRA-2", "#d25a78"),
    "primal": ("Primal-Attention", "#e6001e"),
    "admm": ("ADMM attention", "#147878"),
    "reference": ("Reference", "#8c9292"),
}
_LOOKS = {name: (entry.label, entry.color) for name, entry in MECHANISMS.items()} | _OTHERS
LABELS = {name: label for name, (label, _) in _LOOKS.items()}
COLORS = {name: color for name, (_, color) in _LOOKS.items()}
MAIN = ("softmax", "linear", "bn", "sh", "mgk", "primal", "admm")

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
    "figure.figsize": (5.4, 3.2),
    "font.size": 10.5,
    "grid.alpha": 0.15,
    "grid.color": "black",
    "image.interpolation": "none",  # a map is embedded at its own size, one pixel per cell
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
}


def use_style() -> None:
    """Make Matplotlib draw in the style of the book."""
    mpl.rcParams.update({**SVG_SETTINGS, **STYLE, "image.cmap": fade("softmax")})


def fade(color: str) -> str:
    """Name of a colour map from transparent to `color`, a key of `COLORS` or any other colour.

    Its low end shows the page, so that ``plt.imshow(A, cmap=fade("bn"), vmin=0)`` reads the same
    way in light and dark mode: nothing there, nothing drawn.
    """
    rgb = to_rgb(COLORS.get(color, color))
    name = f"fade-{to_hex(rgb)[1:]}"
    if name not in mpl.colormaps:
        ends = [(*rgb, 0.0), (*rgb, 1.0)]
        mpl.colormaps.register(LinearSegmentedColormap.from_list(name, ends))
    return name


class _Inline:
    """HTML for a notebook, with a plain text for everything else."""

    def __init__(self, markup: str, text: str):
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

    Parameters
    ----------
    fig : matplotlib.figure.Figure
        The figure. Black turns into the colour of the page's text.
    alt : str
        One or more sentences that state what the figure shows: read aloud by screen readers,
        and the output wherever HTML is not rendered.

    Raises
    ------
    TypeError
        If `fig` is no Matplotlib figure or `alt` no string.
    ValueError
        If `alt` is not a sentence that ends in ``.``, ``!`` or ``?``.
    """
    if not isinstance(fig, Figure):
        raise TypeError(f"fig must be a Matplotlib figure, got {type(fig).__name__}")
    check_alt(alt)
    for axis in (axis for axes in fig.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterSciNotation):
            axis.set_major_formatter(FuncFormatter(_power_of_ten))
            axis.set_minor_formatter(NullFormatter())
    for mesh in fig.findobj(QuadMesh):
        mesh.set_rasterized(True)  # hundreds of cells as paths are heavy and show seams
    svg = svg_tree(fig, alt)
    points = float(svg.attrib["viewBox"].split()[2])
    least, most = 0.8 / 16 * points, 1.4 / 16 * points  # a point: 0.8 to 1.4 pixels, in rem
    svg.attrib |= {
        "class": "da-svg",
        "role": "img",
        "aria-label": alt,
        "style": f"display:block;margin:auto;width:100%;min-width:{least:.1f}rem;"
        f"max-width:{most:.1f}rem;height:auto;overflow:visible;"
        "color:var(--pst-color-text-base,inherit);fill:currentColor",
    }
    plt.close(fig)
    box = '<div class="da-figure" style="overflow:auto hidden">'  # on a phone, wide figures scroll
    display_markup(f"{box}{ET.tostring(svg, encoding='unicode')}</div>", alt)


def svg_tree(fig: Figure, key: str) -> ET.Element:
    """Turn the figure into an element of an HTML page; ids differ by figure and `key`."""
    out = io.StringIO()
    with mpl.rc_context(SVG_SETTINGS):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        fig.savefig(out, format="svg", transparent=True, metadata=nothing)
    source = out.getvalue()
    root = ET.fromstring(source)
    prefix = "da" + hashlib.sha256((source + key).encode()).hexdigest()[:8]
    used = set(re.findall(r"#([\w.]+)", source))
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag.endswith("}style")]:
            parent.remove(child)  # its rules would apply to the whole page
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
        node.text, node.tail = (node.text or "").strip(), None
        node.attrib = {
            name.rpartition("}")[2]: prefix + value if name == "id" else _attribute(value, prefix)
            for name, value in node.attrib.items()
            if name != "id" or value in used
        }
    root.attrib = {"viewBox": root.attrib["viewBox"], "stroke-linejoin": "round"}
    return root


def _attribute(value: str, prefix: str) -> str:
    """One attribute for the page: its font, its colour, own ids, two decimals."""
    if value.startswith("data:"):
        return value
    value = re.sub(r"font-family:[^;]*;? ?", "", value.replace("#000000", "currentColor"))
    value = re.sub(r"^#|(?<=url\()#", f"#{prefix}", value)
    return " ".join(re.sub(r"(\.\d\d)\d+", r"\1", value).split())


def _power_of_ten(value: float, position: int | None = None) -> str:
    """Label of a logarithmic axis, such as 10³, in letters that any font has."""
    exponent = round(np.log10(value))
    if not np.isclose(value, 10.0**exponent) or exponent in (0, 1):
        return f"{value:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def check_alt(alt: str) -> None:
    """Raise TypeError or ValueError unless `alt` is a sentence."""
    if not isinstance(alt, str):
        raise TypeError(f"alt must be a string, got {type(alt).__name__}")
    if not re.fullmatch(r"\S+\s.*[.!?]", alt.strip(), re.DOTALL):
        raise ValueError(f"alt must be a sentence that ends in '.', '!' or '?', got {alt!r}")
