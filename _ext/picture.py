"""Draw `assets/recall.svg`, the picture of README.md and the front page, from recorded runs.

Lines show how much a layer can recall at most, as derived in chapter 4; dots show trained layers.
`make notebooks` draws the picture, and a test compares it with the records.
"""

from pathlib import Path

import numpy as np

from derived_book.experiment_tables import curves
from derived_book.training.recorded import load_experiment

PATH = Path(__file__).resolve().parents[1] / "assets" / "recall.svg"
ARMS = {"linear, 8 heads": 4, "linear, 4 heads": 8, "linear, 2 heads": 16, "softmax, 4 heads": None}
PAIRS, WIDTH, HEIGHT, TOP, BOTTOM, LEFT = 32, 460, 300, 46, 252, 52
STYLE = """
.recall { color: #1f2328; font: 15px sans-serif; }
@media (prefers-color-scheme: dark) { .recall { color: #e6edf3; } }
.recall text { fill: currentColor; text-anchor: middle; }
.recall path { stroke: currentColor; fill: none; }
.recall .limit { stroke-width: 2.5; } .recall .grid { opacity: 0.2; }
.recall .linear { fill: #f06e0a; } .recall .softmax { fill: #1e8cf0; }
.recall circle { fill-opacity: 0.7; }
"""


def draw() -> str:
    """Return the picture as SVG: the limit of each kind of layer, its runs and their mean."""
    scores = curves("chapter04_recall", "recalled")
    longest = load_experiment("chapter04_recall")[0]["steps"][-1]
    parts, said = [], []

    def height(share: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * share

    def write(x: float, y: float, text: str, **style: str) -> None:
        more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}"{more}>{text}</text>')

    title = f"Share of {PAIRS} values that one attention layer recalls"
    write(WIDTH / 2, 18, title, font_weight="bold")
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path class="grid" d="M{LEFT} {height(share):.1f}H{WIDTH - 8}"/>')
        write(LEFT - 8, height(share) + 5, f"{100 * share:.0f} %", style="text-anchor: end")
    step = (WIDTH - 8 - LEFT) / len(ARMS)
    for i, (arm, features) in enumerate(ARMS.items()):
        x, runs, kind = LEFT + (i + 0.5) * step, scores[arm][longest], arm.partition(",")[0]
        limit = 1.0 if features is None else features / PAIRS
        parts.append(f'<path class="limit" d="M{x - 46:.1f} {height(limit):.1f}h92"/>')
        for n, run in enumerate(runs):
            across = x + 9 * (n - (len(runs) - 1) / 2)
            parts.append(f'<circle class="{kind}" cx="{across:.1f}" cy="{height(run):.1f}" r="5"/>')
        mean = f"{len(runs)} runs: {100 * np.mean(runs):.1f} %"
        theory = "no limit" if features is None else f"limit: {100 * limit:g} %"
        write(x, height(limit) + (24 if features is None else -28), theory)
        write(x, height(limit) + (42 if features is None else -11), mean)
        write(x, BOTTOM + 22, kind, font_weight="bold")
        write(x, BOTTOM + 40, "attention" if features is None else f"{features} features")
        shape = f" with {features} features a head" if features else ""
        said.append(f"{kind}{shape}, {theory}, {mean}")
    label = f"{title}: {'; '.join(said)}."
    size = f'class="recall" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
    body = "\n".join([f"<style>{STYLE}</style>", *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


if __name__ == "__main__":
    print(draw(), end="")
