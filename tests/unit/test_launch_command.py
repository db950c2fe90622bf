"""`launch`: which cores are chosen on machines that are not this one, and a script run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_dispatch import launch_command
from kernel_dispatch.launching import place
from kernel_dispatch.user_code import UsageError
from lowering import machine
from tests.unit.conftest import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cores are bound on Linux only")

TWO_NODES = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


# --- which cores ----------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wish", "placed"),
    [
        ({}, [(0, 1, 2, 3)]),
        ({"node": 1}, [(4, 5, 6, 7)]),
        ({"ncores": 2}, [(0, 1)]),
        ({"instances": 2}, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ({"instances": 2, "node": 0}, [(0, 1), (2, 3)]),
        ({"instances": 2, "ncores": 3}, [(0, 1, 2), (4, 5, 6)]),
        ({"instances": 3}, [(0, 1), (2, 3), (4, 5)]),
        ({"instances": 8}, [(i,) for i in range(8)]),
        ({"quota": 2.0}, [(0, 1)]),
        ({"quota": 2.0, "instances": 2}, [(0,), (4,)]),
        ({"quota": 0.5}, [(0,)]),
        ({"quota": 64.0}, [(0, 1, 2, 3)]),
    ],
)
def test_physical_cores_of_one_node(wish: dict[str, Any], placed: list[tuple[int, ...]]) -> None:
    wish = {"quota": None, **wish}
    found = place(TWO_NODES, **wish)
    assert list(found.instances) == placed
    assert found.cores_each == len(placed[0])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"ncores": 5}, "--ncores 5: at most 4 cores for each of 1 instance; .* node 0 has 4"),
        ({"ncores": 3, "instances": 3}, "--ncores 3: at most 2 cores for each of 3 instances"),
        ({"instances": 9}, "--instances 9: each needs a core of its own"),
        ({"node": 7}, "--node 7: no core of that NUMA node may be used here. Nodes: 0, 1"),
        ({"ncores": 2, "quota": 1.0}, "at most 1 core .* quota is 1 cores"),
        ({"instances": 3, "quota": 2.0}, "--instances 3: .* quota is 2 cores"),
    ],
)
def test_more_than_there_is_is_an_error(wish: dict[str, Any], said: str) -> None:
    wish = {"quota": None, **wish}
    with pytest.raises(UsageError, match=said):
        place(TWO_NODES, **wish)


@pytest.mark.quick
def test_an_uneven_cpu_set_gives_every_instance_the_same() -> None:
    assert place({0: [0], 1: [4, 5, 6]}, None).instances == ((4, 5, 6),)
    assert place({0: [0], 1: [4, 5, 6]}, None, instances=2).instances == ((4,), (5,))


@pytest.mark.quick
def test_nodes_whose_numbers_alternate_are_not_mixed() -> None:
    alternating = {0: [0, 2, 4], 1: [1, 3, 5]}
    assert place(alternating, None).instances == ((0, 2, 4),)
    assert place(alternating, None, instances=2, ncores=1).instances == ((0,), (1,))
    with pytest.raises(UsageError, match="start `launch --node 0 --instances 1"):
        place(alternating, None, instances=2)


@pytest.mark.quick
def test_what_stays_unused_is_said() -> None:
    assert "NUMA node 1 stays idle: --instances 2" in place(TWO_NODES, None).notes[0]
    assert place(TWO_NODES, None, node=0).notes == ()
    assert place(TWO_NODES, None, instances=2).notes == ()
    assert place({0: [0, 1, 2]}, 2.0).notes == ("the cgroup's quota allows 2 of 3 cores each",)


# --- what the user typed --------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "serve.py"
    file.write_text(
        "import json, os, sys, torch\n"
        "print(json.dumps({'cores': sorted(os.sched_getaffinity(0)), 'arguments': sys.argv[1:],\n"
        "                  'threads': torch.get_num_threads()}), flush=True)\n"
        "sys.exit(7 if 'fail' in sys.argv else 0)\n"
    )
    return file


@pytest.mark.quick
def test_mistakes_are_named(run: Run, script: Path) -> None:
    done = run("launch", str(script.with_name("server.py")))
    assert done.code == 2
    assert "there is no script" in done.err
    assert f"Did you mean {str(script)!r}?" in done.err
    other = script.with_name("notes.txt")
    other.write_text("")
    assert "a file that ends in .py" in run("launch", str(other)).err
    assert "'0' is not a number from 1 on" in run("launch", "--ncores", "0", str(script)).err
    done = run("launch", "--ncores", "4096", str(script))
    assert (done.code, "--ncores 4096: at most" in done.err) == (2, True)


@pytest.mark.quick
def test_elsewhere_than_on_linux(run: Run, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_command.platform, "system", lambda: "Darwin")
    done = run("launch", "--dry-run", str(script))
    assert (done.code, done.out) == (2, "")
    assert "on Linux only, and this is Darwin" in done.err


@pytest.mark.quick
def test_tools_that_are_missing(run: Run, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_command.shutil, "which", lambda name: None)
    assert "apt-get install -y util-linux numactl" in run("launch", str(script)).err


@pytest.mark.quick
def test_dry_run_shows_command_and_environment(
    run: Run, script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allocator = tmp_path / "lib/libtcmalloc.so.4"
    allocator.parent.mkdir()
    allocator.write_text("")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "libmine.so")
    monkeypatch.setattr(launch_command.sys, "prefix", str(tmp_path / "none"))
    done = run("launch", "--dry-run", "--ncores", "1", "--json", str(script), "--port", "--json")
    told = json.loads(done.out)
    assert told["instances"] == [[HERE[0]]]
    assert told["environment"] == {
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": f"{allocator}{os.pathsep}libmine.so",
    }
    command = told["command"]
    assert command[1:3] == ["-m", "torch.backends.xeon.run_cpu"]
    assert command[command.index("--core-list") + 1] == str(HERE[0])
    assert command[-3:] == [str(script), "--port", "--json"]
    text = run("launch", "--dry-run", "--ncores", "1", str(script)).out
    assert "OMP_NUM_THREADS=1" in text.splitlines()
    assert f"instance 0: cores {HERE[0]}" in text.splitlines()


@pytest.mark.quick
def test_a_container_s_quota_is_kept(
    run: Run, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = replace(machine.cpu(), cgroup_cores=1.0)
    monkeypatch.setattr(machine, "cpu", lambda: limited)
    told = json.loads(run("launch", "--dry-run", "--json", str(script)).out)
    assert told["environment"]["OMP_NUM_THREADS"] == "1"
    assert [len(one) for one in told["instances"]] == [1]


# --- for real -------------------------------------------------------------------------------------


def _launched(*arguments: str, code: int = 0, **env: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kernel_dispatch", "launch", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    return [json.loads(line) for line in lines]


def test_a_script_runs_on_its_cores_with_as_many_threads(script: Path) -> None:
    """Also where the environment asks for more threads: the command line is newer."""
    wish = ("--ncores", "1", str(script), "--a", "--", "b")
    (told,) = _launched(*wish, OMP_NUM_THREADS="64")
    assert told == {"cores": HERE[:1], "arguments": ["--a", "--", "b"], "threads": 1}


@pytest.mark.skipif(len(HERE) < 2, reason="needs two cores")
def test_instances_do_not_share_cores(script: Path) -> None:
    told = _launched("--instances", "2", "--ncores", "1", str(script))
    assert sorted(one["cores"] for one in told) == [[cpu] for cpu in HERE[:2]]


@pytest.mark.skipif(len(HERE) < 2, reason="needs two cores")
def test_a_cpu_set_is_kept(script: Path) -> None:
    os.sched_setaffinity(0, HERE[1:2])
    try:
        (told,) = _launched(str(script))
    finally:
        os.sched_setaffinity(0, HERE)
    assert (told["cores"], told["threads"]) == (HERE[1:2], 1)


def test_the_exit_code_is_the_script_s(script: Path) -> None:
    """run_cpu itself ends with 0 whatever its processes end with."""
    assert len(_launched("--ncores", "1", str(script), "fail", code=7)) == 1
