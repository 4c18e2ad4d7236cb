"""Tests of `make new`: a reader's mechanism from template to contract, in a temporary copy."""

import keyword
import os
import shutil
import subprocess
import sys

import pytest
from places import ROOT

import new

FORMULA = "    return mask.softmax(scores(q, k, scale) / 2) @ v\n"
FAST = "    return sdpa(q, k, v, mask, (scale or 1 / math.sqrt(q.shape[-1])) / 2)\n"
ENTRY = '    "warm": Entry("Warm", "#b4641e", 18, "warm.core.warm_attention", any_mask=True),'
SPECIAL = """    import torch

    from derived_attention import warm_attention

    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    softer = torch.nn.functional.scaled_dot_product_attention(q / 2, k, v)
    torch.testing.assert_close(warm_attention(q, k, v), softer)
"""
NEXT = "from __future__ import annotations\n"
FUSED = "import math\n\nfrom derived_attention.softmax.core import sdpa\n"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a copy of the package's code, in which `new` has begun a mechanism."""
    root = tmp_path_factory.mktemp("copy")
    skipped = shutil.ignore_patterns("recorded", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", root / "src", ignore=skipped)
    recorded = "src/derived_book/training/recorded/__init__.py"
    (root / recorded).parent.mkdir()
    shutil.copy(ROOT / recorded, root / recorded)
    shutil.copy(ROOT / "pyproject.toml", root)
    new.begin("warm", root)
    return root


def run(root, *command):
    # import the copy, not the installed package
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    how = {"cwd": root, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "-m", *command], **how)


def fill(path, *, old, new, imports=""):
    """Replace the last line that begins with `old`, and add imports below `from __future__`."""
    head, _, rest = path.read_text("utf8").rpartition(old)
    text = head.rstrip(" ") + new + rest.partition("\n")[2]
    title, _, rest = text.partition("\n\n")
    path.write_text(f"{title}\n\n{rest.replace(NEXT, f'{NEXT}{imports}', 1)}", "utf8")


def test_what_is_begun_says_politely_what_is_missing(copy):
    first = run(copy, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_warm.py", "-k",
                "special or values or causality")  # fmt: skip
    assert first.returncode == 1
    assert "not written yet: the fast form, in warm/core.py" in first.stdout
    assert "not written yet: a test of your theorem" in first.stdout
    assert "Not written yet: the primal" in (copy / "book" / "warm.md").read_text("utf8")
    style = run(copy, "ruff", "check", "src/derived_attention/warm", "tests")
    assert style.returncode == 0, style.stdout


def test_what_is_filled_in_keeps_every_promise(copy):
    library, missing = copy / "src/derived_attention", "    raise NotImplementedError("
    fill(library / "formulas.py", old=missing, new=FORMULA)
    fill(library / "warm/core.py", old=missing, new=FAST, imports=FUSED)
    fill(library / "registry.py", old='    "warm": ', new=f"{ENTRY}\n")
    fill(copy / "tests/test_warm.py", old="    pytest.fail(", new=SPECIAL)
    done = run(copy, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_warm.py")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "failed" not in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Huber", "NAME is 'Huber'; expected lower-case letters"),
        ("2nd", "NAME is '2nd'; expected lower-case letters"),
        ("a_name_of_16_let", "beginning with a letter, 15 characters at most"),
        ("../up", "NAME is '../up'; expected lower-case letters"),
        ("softmax", "NAME is 'softmax', which is taken"),
        ("warm", "NAME is 'warm', which is taken"),
        ("layer", "NAME is 'layer', which is taken"),  # a module, which a folder would hide
        ("shifted_mixture", "NAME is 'shifted_mixture', which is taken"),  # a public function
        ("scores", "NAME is 'scores', which is taken"),  # other formulas call it
        ("max", "NAME is 'max', which is taken"),
        *((name, f"NAME is '{name}'; .* no keyword") for name in keyword.kwlist if name.islower()),
    ],
)
def test_a_name_that_cannot_be_is_refused(copy, name, message):
    before = set(copy.rglob("*"))
    with pytest.raises(ValueError, match=message):
        new.begin(name, copy)
    assert set(copy.rglob("*")) == before


def test_no_name_is_asked_for(capsys):
    assert new.main([]) == 2
    assert "make new NAME=huber" in capsys.readouterr().err
