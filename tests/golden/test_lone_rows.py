"""Decode compared bit for bit, in a process where MKL sums lone rows as it did for the reference (see the fixture `lone_rows`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_decode_is_bit_equal_with_the_references_sums(golden: Path, same_sums: bool) -> None:
    if not same_sums:
        pytest.skip("this CPU adds up in another order than the machine the golden data came from")
    chosen = "ReferencesSums or caches_after_decode or verification_of_committed"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent), "-k", chosen]
    environment = {**os.environ, "MKL_CBWR": "OFF", "FOREBAY_GOLDEN": str(golden)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-4000:]
    assert int(passed[1]) >= 23
    assert "skipped" not in done.stdout.splitlines()[-1]
