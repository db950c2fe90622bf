"""DDP, FSDP2 and DTensor under torchrun with gloo: two real processes, real collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


LEVELS = ("O0", "O1", "O2")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["ddp", "fsdp2", "tensor_parallel"])
def test_two_ranks_agree_with_the_uncompiled_run(case: str) -> None:
    """All levels by the same processes: most of their time is imports and the meeting of ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.distributed.worker", case, *LEVELS]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for level in LEVELS:
        assert f"ok {case} {level}" in done.stdout
