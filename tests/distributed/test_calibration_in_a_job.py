"""Ranks choose alike: rank 0's stored profile counts, nobody measures. Real gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "profile", "note"),
    [
        ("all_have_one", "'rank 0'", "rank 0's stored profile, as on every rank"),
        ("only_others", "'none'", "rank 0 has no profile stored"),
        ("late", "'none'", "was more than"),
    ],
)
def test_ranks_use_one_profile(tmp_path: Path, case: str, profile: str, note: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += ["-m", "tests.distributed.calibration_worker", case, str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(profile) == 3
    assert done.stdout.count(note) == 3
    assert f"ok {case}" in done.stdout
