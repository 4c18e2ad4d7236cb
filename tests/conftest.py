"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

# Only jsonschema looks for it, and importing it takes longer than PyTorch.
sys.modules.setdefault("rfc3987_syntax", None)
# Without a GPU, kernels run in Triton's interpreter, which has to be known before they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from derived_attention.common import blocks, convention  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update""".split()


# Longest first: no worker ends alone with one of them, nor steals half of a file from another, for
# which it would make the file's fixtures again.
LONGEST = """course book standin ledger_page notebooks workers pdf references new protocol execute
    set_up slides versions kernels_compiled""".split()


@pytest.hookimpl(optionalhook=True)  # xdist may be off
def pytest_xdist_auto_num_workers():
    """On two cores let a third worker compute while others wait for a kernel or for a browser."""
    return 3 if os.cpu_count() == 2 else None


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest or share what takes long to make."""
    rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish():
    """Spare the garbage collector and keys of stored runs what the tests are made of.

    A key contains all modules of the user's: of this process, those of every test file.
    """
    gc.collect()
    gc.freeze()
    if keys := sys.modules.get("derived_book.training.run_key"):
        keys.LIBRARIES = (*keys.LIBRARIES, Path(__file__).parents[1])


@pytest.fixture
def no_short_forms(monkeypatch):
    """Let short sequences run the forms of long ones."""
    monkeypatch.setattr(convention, "HAS_SHORT_FORMS", False)


@pytest.fixture
def small_blocks(monkeypatch, no_short_forms):
    """Let 9 keys need several blocks of queries, one of them not whole, and two heads at a time."""
    monkeypatch.setattr(blocks, "CHUNK", 4)
    monkeypatch.setattr(blocks, "SCORES", 4 * 9 * 2)


@pytest.fixture(scope="session")
def browser():
    """Start the browser once per worker: Playwright allows no second one beside it."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("NO BROWSER: install chromium, or else NOTHING of what readers see is tested")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield instance
        instance.close()
