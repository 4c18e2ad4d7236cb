"""Interactive figures without a kernel: an SVG and a range slider over precomputed frames.

The output contains the frames and a short script, and needs no network. The slider follows the
keyboard and the page's theme; without scripts the first frame is shown.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike
from PIL import Image

from derived_book.plot import (
    STYLE,
    SVG_SETTINGS,
    check_alt,
    display_markup,
    find_color,
    opacity,
    svg_tree,
)


@dataclass(frozen=True)
class _XY:
    x: ArrayLike
    y: ArrayLike
    color: str = "softmax"
    label: str = ""


@dataclass(frozen=True)
class Line(_XY):
    """A line through (`x`, `y`), each ``(n,)``, or ``(steps, n)`` to change with the slider.

    As in every mark, `color` is a key of `COLORS`, another colour, or ``"currentColor"``, and a
    `label` adds the mark to the legend.
    """

    dashed: bool = False


@dataclass(frozen=True)
class Points(_XY):
    """Dots at (`x`, `y`), each ``(n,)`` or ``(steps, n)``; `size` is their radius in pixels."""

    size: float = 4.0


@dataclass(frozen=True)
class Bars(_XY):
    """Bars from 0 to `y`, ``(n,)`` or ``(steps, n)``, centred at `x` ``(n,)``, `width` wide."""

    width: float = 0.8


@dataclass(frozen=True)
class Heat:
    """A map of `values` ``(rows, columns)`` or ``(steps, rows, columns)``, row 0 on top.

    Between the two `limits` the colour fades in as in `plot.fade`; by default they are the smaller
    of 0 and the minimum, and the maximum, over all steps. `extent` is (left, right, bottom, top) in
    the coordinates of the axes; by default cell (i, j) is centred at x = j, y = i. Both axes of the
    panel have the same scale.
    """

    values: ArrayLike
    color: str = "softmax"
    label: str = ""
    limits: tuple[float, float] | None = None
    extent: tuple[float, float, float, float] | None = None


Mark = Line | Points | Bars | Heat


@dataclass(frozen=True)
class Panel:
    """Axes with marks. The limits hold for all steps; by default they fit the marks.

    `xticks` and `yticks` map positions to labels: ``{0: "the", 1: "cat"}``. All labels are plain
    text, such as β, σ², QKᵀ.
    """

    marks: Sequence[Mark]
    xlabel: str = ""
    ylabel: str = ""
    title: str = ""
    xlim: tuple[float, float] | None = None
    ylim: tuple[float, float] | None = None
    xticks: Mapping[float, str] | None = None
    yticks: Mapping[float, str] | None = None


def slider(
    label: str,
    values: Sequence,
    panels: Sequence[Panel],
    *,
    alt: str,
    readout: Sequence[str] | None = None,
    start: int = 0,
) -> None:
    """Display an interactive figure: a range slider over precomputed frames.

    Arrow keys, Home and End move the slider. Without scripts, and in print, frame `start` is shown.

    Parameters
    ----------
    label : str
        The quantity that the slider changes, such as ``"β"``.
    values : sequence of float or str
        Its value at each of two or more steps.
    panels : sequence of Panel
        One to three panels, side by side if there is room.
    alt : str
        One or more sentences that state what the figure shows.
    readout : sequence of str, optional
        A line of text per step, such as ``[f"β = {b:.2f}: error {e:.3f}" ...]``. By default
        the label and the value.
    start : int, default 0
        The step shown first.

    Raises
    ------
    TypeError
        If `alt` is not a string, `panels` not a sequence, or a panel or mark of another class.
    ValueError
        If a length differs from the number of steps, a number is not finite, a colour is unknown,
        or `alt` is not a sentence. The message names the panel and the mark.

    Examples
    --------
    >>> x, beta = np.linspace(0, 1, 50), np.linspace(0, 2, 21)
    >>> decay = Line(x, np.exp(-np.outer(beta, x)), color="bn", label="exp(−βx)")
    >>> slider("β", beta, [Panel([decay], xlabel="x")], alt="The curve falls faster as β grows.")
    The curve falls faster as β grows.
    """
    check_alt(alt)
    names = [v if isinstance(v, str) else f"{v:.4g}".replace("-", "−") for v in values]
    lines = [f"{label} = {name}" for name in names] if readout is None else list(readout)
    if len(names) < 2 or len(lines) != len(names):
        raise ValueError(
            f"values has {len(names)} steps, readout {len(lines)}; expected as many, at least 2"
        )
    if not 0 <= start < len(names):
        raise ValueError(f"start is {start}; expected a step from 0 to {len(names) - 1}")
    _check_panels(panels)
    width, height, least, most = _SIZES[len(panels)]
    if any(isinstance(mark, Heat) for panel in panels for mark in panel.marks):
        height = width  # beside a square map
    moving: list[dict[str, list]] = []
    drawn = "".join(
        _panel(panel, f"panels[{i}]", (width, height), len(names), start, moving)
        for i, panel in enumerate(panels)
    )
    data = json.dumps([lines, names, moving], separators=(",", ":"), ensure_ascii=False)
    data = data.replace("<", r"\u003c")  # so that no text can end the script
    key = hashlib.sha256((drawn + data + alt).encode()).hexdigest()[:8]
    description, label, name, line = map(html.escape, (alt, label, names[start], lines[start]))
    markup = (
        f'<div class="da-figure da-slider" data-da="{key}" data-lm-suppress-shortcuts="true" '
        f'style="max-width:{min(42, most * len(panels))}rem;--da-min:{least}rem;'
        f'--da-max:{most}rem"><style>{_CSS}</style>'
        f'<div class="da-panels" role="img" aria-label="{description}">{drawn}</div>'
        f'<label class="da-ctl" hidden><span>{label}</span><input type="range" min="0" '
        f'max="{len(names) - 1}" value="{start}" aria-valuetext="{name}" autocomplete="off">'
        f'</label><output aria-live="polite">{line}</output>'
        f"<script>{_SCRIPT % (key, data)}</script></div>"
    )
    display_markup(markup, alt)


# By number of panels: width and height of a drawing, least and greatest width on the page in
# rem. They make a drawing unit about a pixel, also on a phone, where panels are stacked.
_SIZES = {1: (380, 240, 18, 30), 2: (300, 215, 17, 22), 3: (215, 185, 11.5, 17)}

_CSS = """
.da-slider{color:var(--pst-color-text-base,inherit);margin:.5rem auto;
font-size:.9rem;line-height:1.4;text-align:left}
.da-panels{display:flex;flex-wrap:wrap;gap:.5rem 1rem;align-items:flex-end;justify-content:center}
.da-panels>div{flex:1 1 var(--da-min);max-width:var(--da-max)}
.da-panels svg{fill:currentColor}
.da-panels>div>svg{display:block;width:100%;height:auto}
.da-key{display:flex;flex-wrap:wrap;gap:0 1rem;padding-bottom:.3rem}
.da-key span{display:inline-flex;align-items:center;gap:.35rem}
.da-key svg{width:20px;height:12px;flex:none}
.da-ctl{display:flex;gap:.75rem;align-items:center;padding:.35rem .4rem .35rem 0}
.da-ctl[hidden]{display:none}
.da-ctl input{flex:1;min-width:8rem;height:32px;margin:0;cursor:pointer;
accent-color:var(--pst-color-primary,#1e8cf0)}
.da-ctl input:focus-visible{border-radius:4px;
outline:3px solid var(--pst-color-accent,currentColor);outline-offset:2px}
.da-slider output{display:block;min-height:1.4em;font-variant-numeric:tabular-nums}
@media print{.da-ctl{display:none}}
""".replace("\n", "")

_DASH = ' stroke-dasharray="6 4"'

# Sets the attributes of every moving mark at step k; an attribute that does not move has 1 frame.
_SCRIPT = """
(([text,value,marks])=>{
for(const root of document.querySelectorAll('.da-slider[data-da="%s"]')){
const input=root.querySelector("input"),out=root.querySelector("output"),
groups=root.querySelectorAll("g[data-m]"),at=(frames,k)=>frames[Math.min(k,frames.length-1)],
draw=()=>{const k=+input.value;
out.textContent=text[k];
input.setAttribute("aria-valuetext",value[k]);
marks.forEach((mark,m)=>{const nodes=groups[m].children;
if(mark.x){const y=at(mark.y,k);
nodes[0].setAttribute("points",at(mark.x,k).map((x,i)=>x+","+y[i]).join(" "))}
else for(const a in mark)at(mark[a],k).forEach((v,i)=>nodes[i].setAttribute(a,v))})};
input.addEventListener("input",draw);
root.querySelector(".da-ctl").hidden=false;
draw()}})(%s)
""".replace("\n", "")


def _check_panels(panels: Sequence[Any]) -> None:
    if isinstance(panels, Panel):
        raise TypeError("panels is a Panel; expected a list of 1, 2 or 3 panels")
    if len(panels) not in _SIZES:
        raise ValueError(f"panels has length {len(panels)}; expected 1, 2 or 3 panels")
    for i, panel in enumerate(panels):
        if not isinstance(panel, Panel) or isinstance(panel.marks, Mark) or not panel.marks:
            raise TypeError(f"panels[{i}] is {panel!r}; expected a Panel with a list of marks")


def _panel(panel: Panel, path: str, size: tuple, steps: int, start: int, moving: list) -> str:
    """Draw a panel as HTML at step `start`; append the attributes that move to `moving`.

    `path` names the panel in error messages, such as ``"panels[0]"``.
    """
    loaded = [_load(mark, f"{path}.marks[{i}]", steps) for i, mark in enumerate(panel.marks)]
    maps = [mark for mark in panel.marks if isinstance(mark, Heat)]
    square, cells = bool(maps), any(mark.extent is None for mark in maps)
    x0, x1 = _limits(panel.xlim, [ends for *_, ends, _ in loaded], square, f"{path}.xlim")
    y0, y1 = _limits(panel.ylim, [ends for *_, ends in loaded], square, f"{path}.ylim")
    width, height = size
    if square:  # both axes have the same scale, which determines the height
        height = min(height, width * abs((y1 - y0) / (x1 - x0)))
    with mpl.rc_context({**SVG_SETTINGS, **STYLE, "font.size": 12.5}):
        fig = Figure(figsize=(width / 72, height / 72), dpi=72)  # a drawing unit is a pixel
        axes = fig.subplots()
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
        axes.set_aspect("equal" if square else "auto")
        axes.grid(not square, axis="y")
        if square:  # a frame marks the extent of a map whose edges are transparent
            axes.spines[:].set(visible=True, linewidth=0.6, alpha=0.6)
        for axis, ticks in ((axes.xaxis, panel.xticks), (axes.yaxis, panel.yticks)):
            axis.set_major_locator(MaxNLocator(4, integer=cells, steps=[1, 2, 2.5, 5, 10]))
            if ticks is not None:
                axis.set_ticks(list(ticks), labels=list(ticks.values()))
        axes.set(xlim=(x0, x1), ylim=(y0, y1))  # after the ticks, which would widen them
        svg = ET.tostring(svg_tree(fig, path), encoding="unicode")
    box, bottom = axes.bbox, fig.bbox.height

    def to_x(x: Any) -> np.ndarray:
        return np.round(box.x0 + box.width * (x - x0) / (x1 - x0), 1)

    def to_y(y: Any) -> np.ndarray:  # points down, and is clipped far outside the drawing
        y = bottom - box.y0 - box.height * (y - y0) / (y1 - y0)
        return np.round(np.clip(y, -9999, 9999), 1)

    marks = "".join(_draw(m, x, y, to_x, to_y, start, moving) for m, x, y, *_ in loaded)
    left, top, w, h = box.x0 - 4, bottom - box.y1 - 4, box.width + 8, box.height + 8
    clip = f"{left:.1f} {top:.1f} {w:.1f} {h:.1f}"  # with a margin for dots on the border
    keys = "".join(_key(mark) for mark in panel.marks if mark.label)
    title = f"<strong>{html.escape(panel.title)}</strong>" if panel.title else ""
    return (
        f'<div>{title}<div class="da-key">{keys}</div>'
        f'{svg.removesuffix("</svg>")}<svg x="{left:.1f}" y="{top:.1f}" width="{w:.1f}" '
        f'height="{h:.1f}" viewBox="{clip}" overflow="hidden">{marks}</svg></svg></div>'
    )


def _load(mark: Mark, path: str, steps: int) -> tuple:
    """Return mark, frames of x and y (or of a map, and its extent), ends along x and y."""
    if not isinstance(mark, Line | Points | Bars | Heat):
        raise TypeError(f"{path} is {mark!r}; expected a Line, Points, Bars or Heat")
    _color(mark.color, f"{path}.color")
    if isinstance(mark, Heat):
        values = _frames(mark.values, 2, steps, f"{path}.values")
        rows, columns = values.shape[1:]
        extent = mark.extent or (-0.5, columns - 0.5, rows - 0.5, -0.5)
        _check_pair(extent[:2], f"{path}.extent")
        _check_pair(extent[2:], f"{path}.extent")
        _check_pair(mark.limits or (0, 1), f"{path}.limits")
        return mark, values, np.array(extent), extent[:2], extent[2:]
    x, y = _frames(mark.x, 1, steps, f"{path}.x"), _frames(mark.y, 1, steps, f"{path}.y")
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"{path}.x has length {x.shape[1]} and y {y.shape[1]}; expected the same length"
        )
    if not isinstance(mark, Bars):
        return mark, x, y, (x.min(), x.max()), (y.min(), y.max())
    if len(x) > 1:
        raise ValueError(f"{path}.x has shape {np.shape(mark.x)}; expected (n,)")
    half = mark.width / 2
    return mark, x, y, (x.min() - half, x.max() + half), (min(0.0, y.min()), max(0.0, y.max()))


def _frames(value: ArrayLike, ndim: int, steps: int, path: str) -> np.ndarray:
    """Return `value` with shape (1, ...) if it does not move, else (steps, ...)."""
    frames = np.asarray(value, dtype=float)
    frames = frames[None] if frames.ndim == ndim else frames
    if frames.ndim != ndim + 1 or len(frames) not in (1, steps) or frames.size == 0:
        raise ValueError(
            f"{path} has shape {np.shape(value)}; expected {ndim} axes, or {ndim + 1} with the "
            f"{steps} steps first"
        )
    if not np.isfinite(frames).all():
        found = frames[~np.isfinite(frames)][0]
        raise ValueError(f"{path} contains {found}; expected finite numbers")
    return frames


def _check_pair(pair: Sequence[float], path: str) -> None:
    if len(pair) != 2 or not np.isfinite(pair).all() or pair[0] == pair[1]:
        raise ValueError(f"{path} is {pair}; expected two different finite numbers")


def _limits(
    limits: tuple[float, float] | None, ends: list, tight: bool, path: str
) -> tuple[float, float]:
    """Return `limits`, or by default limits that include all `ends`, in their direction."""
    if limits is not None:
        _check_pair(limits, path)
        return limits
    low, high = min(map(min, ends)), max(map(max, ends))
    margin = 0.5 if low == high else 0.0 if tight else 0.04 * (high - low)
    limits = low - margin * (low != 0 or low == high), high + margin * (high != 0 or low == high)
    return limits[::-1] if any(a > b for a, b in ends) else limits


def _draw(
    mark: Mark, x: Any, y: Any, to_x: Callable, to_y: Callable, start: int, moving: list
) -> str:
    """Draw a mark at step `start`; append the attributes that move to `moving`."""
    color = _color(mark.color)
    if isinstance(mark, Heat):
        (left, right), (top, bottom) = np.sort(to_x(y[:2])), np.sort(to_y(y[2:]))
        tag, frames = "image", {"href": [[address] for address in _pngs(x, mark)]}
        fixed = [
            f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{bottom - top:.1f}" preserveAspectRatio="none" '
            'style="image-rendering:pixelated"'
        ]
    elif isinstance(mark, Line):
        tag, frames = "polyline", {"x": to_x(x).tolist(), "y": to_y(y).tolist()}
        fixed = [f'fill="none" stroke="{color}" stroke-width="2.2"{_DASH * mark.dashed}']
    elif isinstance(mark, Points):
        tag, frames = "circle", {"cx": to_x(x).tolist(), "cy": to_y(y).tolist()}
        fixed = [f'r="{mark.size:g}" fill="{color}"'] * x.shape[1]
    else:
        tag, frames = "line", {"y2": to_y(y).tolist()}
        width = abs(to_x(mark.width) - to_x(0.0))
        style = f'y1="{to_y(0.0)}" stroke="{color}" stroke-width="{width:.1f}"'
        fixed = [f'x1="{v}" x2="{v}" {style}' for v in to_x(x[0])]
    moves = any(len(f) > 1 for f in frames.values())
    moving += [frames] * moves
    now = {name: f[min(start, len(f) - 1)] for name, f in frames.items()}
    if isinstance(mark, Line):
        now = {"points": [" ".join(f"{a},{b}" for a, b in zip(now["x"], now["y"], strict=True))]}
    nodes = ""
    for i, attributes in enumerate(fixed):
        set_ = " ".join(f'{name}="{values[i]}"' for name, values in now.items())
        nodes += f"<{tag} {attributes} {set_}/>"
    return "<g" + ' data-m=""' * moves + f">{nodes}</g>"


def _pngs(values: np.ndarray, mark: Heat) -> list[str]:
    """Return each map as the data URL of an image from transparent to the mark's colour."""
    low, high = mark.limits or (min(0.0, values.min()), values.max())
    scale = 1 / (high - low) if high != low else 0.0
    addresses = []
    for map_ in values:
        image = np.empty((*map_.shape, 4), np.uint8)
        image[..., :3] = np.multiply(255, to_rgb(_color(mark.color))).round()
        image[..., 3] = (255 * opacity(np.clip((map_ - low) * scale, 0, 1))).round()
        out = io.BytesIO()
        Image.fromarray(image).save(out, "PNG", optimize=True)
        addresses.append("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())
    return addresses


def _key(mark: Mark) -> str:
    """Return an entry of the legend: a sample of the mark, and its label."""
    color = _color(mark.color)
    if isinstance(mark, Line):
        sample = f'<path d="M0 6h20" stroke="{color}" stroke-width="2.5"{_DASH * mark.dashed}/>'
    elif isinstance(mark, Points):
        sample = f'<circle cx="10" cy="6" r="4" fill="{color}"/>'
    else:  # three shades for a map, one bar otherwise
        shades = {0: 0.2, 7: 0.6, 14: 1} if isinstance(mark, Heat) else {7: 1}
        rect = f'<rect y="2" width="7" height="9" fill="{color}"'
        sample = "".join(f'{rect} x="{x}" opacity="{a}"/>' for x, a in shades.items())
    return f'<span><svg viewBox="0 0 20 12">{sample}</svg>{html.escape(mark.label)}</span>'


def _color(color: str, path: str = "color") -> str:
    return color if color == "currentColor" else to_hex(find_color(color, path))
