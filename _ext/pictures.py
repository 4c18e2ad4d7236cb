"""The five small pictures of the landing page, drawn from the formulas that they stand for.

``{picture} name`` with a sentence for those who cannot see it. Lines take the colours of the page.
"""

from __future__ import annotations

import html

import numpy as np
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

WIDTH, HEIGHT, MARGIN = 120, 72, 6


def points(x, y) -> str:
    """Return points of the unit square, y upwards, as SVG coordinates."""
    x = MARGIN + np.asarray(x) * (WIDTH - 2 * MARGIN)
    y = HEIGHT - MARGIN - np.asarray(y) * (HEIGHT - 2 * MARGIN)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))


def line(x, y, kind: str = "main") -> str:
    """Return a line: main, or faint."""
    return f'<polyline class="{kind}" points="{points(x, y)}"/>'


def tube() -> str:
    """Draw regression with a tolerance: only points outside the tube, filled, have a say."""
    x, epsilon = np.linspace(0, 1, 49), 0.17
    f = 0.5 + 0.28 * np.sin(2 * np.pi * x)
    band = points(np.r_[x, x[::-1]], np.r_[f - epsilon, (f + epsilon)[::-1]])
    at, off = (
        np.array([3, 9, 14, 20, 27, 33, 39, 45]),
        [0.07, -0.26, 0.1, 0.3, -0.08, 0.05, -0.3, 0.1],
    )
    dots = ""
    for place, outside in zip(
        points(x[at], f[at] + off).split(), np.abs(off) > epsilon, strict=True
    ):
        cx, cy = place.split(",")
        kind = "full" if outside else "hollow"
        dots += f'<circle class="{kind}" cx="{cx}" cy="{cy}" r="2.6"/>'
    return f'<polygon class="area" points="{band}"/>{line(x, f)}{dots}'


def staircase() -> str:
    """Draw a curve, and its averages over eight equal pieces: Haar wavelets down to one scale."""
    x = (np.arange(240) + 0.5) / 240
    f = 0.5 + 0.32 * np.sin(2 * np.pi * x) + 0.14 * np.cos(6 * np.pi * x)
    means = f.reshape(8, -1).mean(1)
    edges = np.linspace(0, 1, 9)
    return line(x[::4], f[::4], "faint") + line(np.repeat(edges, 2)[1:-1], np.repeat(means, 2))


def mixture() -> str:
    """Draw two Gaussians and their sum."""
    x = np.linspace(0, 1, 61)
    one, two = (
        w * np.exp(-(((x - m) / s) ** 2) / 2) for w, m, s in ((0.62, 0.3, 0.1), (0.85, 0.64, 0.13))
    )
    return line(x, one, "faint") + line(x, two, "faint") + line(x, one + two)


def spectrum() -> str:
    """Draw the singular values of an exponential kernel between two sets of points."""
    queries, keys = np.linspace(-1.5, 1.5, 12), np.linspace(-1, 2, 12)
    values = np.linalg.svd(np.exp(np.outer(queries, keys)), compute_uv=False)
    heights = np.clip(1 + np.log10(values / values[0]) / 9, 0.01, 1)  # nine powers of ten
    bars = ""
    for x, height in zip((np.arange(12) + 0.5) / 12, heights, strict=True):
        bars += line([x, x], [0, height], "bar")
    return bars


def threshold() -> str:
    """Draw soft thresholding, and the identity that it shrinks."""
    v, cut = np.array([-1, -0.4, 0.4, 1]), 0.4
    shrunk = np.sign(v) * np.maximum(np.abs(v) - cut, 0)
    return line([0, 1], [0, 1], "faint") + line((v + 1) / 2, (shrunk + 1) / 2)


PICTURES = {f.__name__: f for f in (tube, staircase, mixture, spectrum, threshold)}


class Picture(SphinxDirective):
    """``{picture} name``: one of the drawings above; the content says what it shows."""

    required_arguments = 1
    has_content = True

    def run(self):
        """Return the drawing."""
        name, alt = self.arguments[0], " ".join(self.content)
        if name not in PICTURES or not alt:
            raise self.error(f"picture needs one of {', '.join(PICTURES)} and a sentence on it")
        head = f'<svg class="da-picture" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        drawing = f'{head} aria-label="{html.escape(alt)}">{PICTURES[name]()}</svg>'
        return [nodes.raw("", drawing, format="html")]


def setup(app):
    """Register the directive."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
