"""Paths and settings of the checkout and of the built book."""

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text("utf8"))["sphinx"]["config"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
# All pages of the table of contents, such as ``book/01_attention``.
PAGES = [TOC["root"], *(page["file"] for part in TOC["parts"] for page in part["chapters"])]
