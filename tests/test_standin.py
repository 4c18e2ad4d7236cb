"""All that a reader's GPU would run, run on a device without hardware: see `standin`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("standin_cases.py")
PARTS = {
    "the device": "device",
    "mechanisms": "mechanism and not functions",
    "functions": "functions",
    "layers": "layer",
    "models": "models",
    "plugs": "plugs",
    "training": "fit",
}


def in_a_process_of_its_own(words):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*command, str(CASES), "-k", words], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("part", PARTS)
def test_runs_on_a_device_that_shares_no_memory_with_the_cpu(part):
    child = in_a_process_of_its_own(PARTS[part])
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]


def test_every_case_belongs_to_a_part():
    parts = " or ".join(PARTS.values())
    child = in_a_process_of_its_own(f"not ({parts})")
    assert child.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, child.stdout[-2000:]
