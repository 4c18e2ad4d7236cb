"""All that a reader's GPU would run, run on a device without hardware: see `standin`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("standin_cases.py")
HALF = "device or mechanism or functions or layer"
PARTS = {"mechanisms and layers": HALF, "models, plugs and training": f"not ({HALF})"}


@pytest.mark.parametrize("part", PARTS)
def test_runs_on_a_device_that_shares_no_memory_with_the_cpu(part):
    """In a process of its own for each half of the cases, as the device changes PyTorch."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run(
        [*command, str(CASES), "-k", PARTS[part]], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
