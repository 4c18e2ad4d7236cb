"""Test all code for a reader's GPU on a device without hardware; see `standin`."""

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("standin_cases.py")


def test_runs_on_a_device_that_shares_no_memory_with_the_cpu():
    """Use a separate process, because the device changes PyTorch."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([*command, str(CASES)], env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
