"""Settings and fixtures that the test files share."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

# Only jsonschema imports this module, and the import takes longer than that of PyTorch.
sys.modules.setdefault("rfc3987_syntax", None)
# Without a GPU, kernels run in Triton's interpreter; Triton reads this when it defines them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from derived_attention.common import blocks, convention  # noqa: E402

ARGUMENTS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update""".split()


# The slowest files come first, so that no worker starts one at the end, or takes over half of one
# from another worker and sets up its fixtures a second time.
LONGEST = """course book standin ledger_page notebooks workers pdf references new protocol execute
    set_up slides versions kernels_compiled""".split()


@pytest.hookimpl(optionalhook=True)  # xdist may be off
def pytest_xdist_auto_num_workers():
    """Return 3 workers for two cores: one computes while others wait for a kernel or browser."""
    return 3 if os.cpu_count() == 2 else None


def pytest_collection_modifyitems(items):
    """Sort the tests: slow files, and those with slow shared fixtures, come first."""
    rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish():
    """Exclude the tests from garbage collection and from the keys of stored runs.

    A key covers all modules of the user, which in this process would include all test files.
    """
    gc.collect()
    gc.freeze()
    if keys := sys.modules.get("derived_book.training.run_key"):
        keys.LIBRARIES = (*keys.LIBRARIES, Path(__file__).parents[1])


@pytest.fixture
def no_short_forms(monkeypatch):
    """Make short sequences use the forms for long ones."""
    monkeypatch.setattr(convention, "HAS_SHORT_FORMS", False)


@pytest.fixture(params=[True, False], ids=["short forms", "long forms"])
def any_length(request, monkeypatch):
    """Use the forms for short sequences, and then those for long ones."""
    monkeypatch.setattr(convention, "HAS_SHORT_FORMS", request.param)


@pytest.fixture
def small_blocks(monkeypatch, no_short_forms):
    """Compute 4 queries and, for 9 keys, two heads at a time, so that tests need several blocks."""
    monkeypatch.setattr(blocks, "CHUNK", 4)
    monkeypatch.setattr(blocks, "SCORES", 4 * 9 * 2)


@pytest.fixture(scope="session")
def browser():
    """Yield one browser per worker, because Playwright cannot run twice at a time in a process."""
    from pdf import BROWSERS  # late, because loading takes half a second

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("NO BROWSER: THE PAGES ARE NOT TESTED AS READERS SEE THEM; install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield instance
        instance.close()
