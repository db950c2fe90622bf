"""Memory of freed tensors is kept for the next call: as much as was asked for, and never in use
twice."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.regions import kernels

MIB = 1 << 20


@pytest.fixture(scope="module")
def facts() -> dict[str, dict[str, Any]]:
    kernels()  # built once, for all of them
    found = {}
    for keep in ("auto", "off", "3MB"):
        command = [sys.executable, "-m", "tests.backends.kept_memory_facts", keep]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found[keep] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("keep", ["auto", "off", "3MB"])
def test_results_do_not_depend_on_it(facts: dict[str, Any], keep: str) -> None:
    mine = facts[keep]
    assert mine["held outputs are right"] and mine["threads are right"] and mine["can be resized"]
    assert mine["child ended with"] == 0
    assert mine["profiled"] >= 2 * MIB, "torch's profiler does not see what was made"
    assert not mine["tensors of others are kept"]


def test_it_is_kept_and_given_back(facts: dict[str, Any]) -> None:
    assert facts["auto"]["idle after"] >= 2 * MIB
    assert facts["auto"]["idle at last"] >= 4 * MIB
    assert facts["auto"]["idle after reset"] == 0


def test_code_may_read_a_vector_beyond_the_last_row(facts: dict[str, Any]) -> None:
    """Inductor's masked loads at the end of a row do: HaloNet read the page behind its keys."""
    assert facts["auto"]["bytes behind a block"] >= 64


def test_no_more_than_was_asked_for(facts: dict[str, Any]) -> None:
    assert facts["off"]["idle after"] == facts["off"]["idle at last"] == 0
    assert 0 < facts["3MB"]["idle after"] <= 3 * MIB
    assert facts["3MB"]["idle at last"] <= 3 * MIB


def test_training_steps_take_no_page_faults(facts: dict[str, Any]) -> None:
    """Ten steps make 100 MiB of activations and gradients: 25 thousand pages."""
    assert facts["auto"]["faults of ten steps"] < 1000
