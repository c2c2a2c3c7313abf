"""`weighbridge demo --engine vllm` as a person runs it: every version moves what a real engine says of a text."""

import os
import re
import subprocess
import sys

import pytest
from tests.engines.real import python_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

STEPS = 2


def test_each_version_of_the_demo_moves_the_engines_log_probability() -> None:
    command = [sys.executable, "-m", "weighbridge", "demo", "--steps", str(STEPS)]
    command += ["--engine", "vllm", "--engine-python", str(python_of("vllm"))]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1100, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = re.findall(r"log p\(text\) = (-\d+\.\d+)(?: \(([+-]\d+\.\d+)\))?", done.stdout)
    assert len(said) == STEPS + 1, done.stdout
    assert all(float(moved) for _, moved in said[1:]), "a version that changed weights left every number as it was"
