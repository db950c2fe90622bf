"""The script for GPUs, as far as it runs without one: its rows, its file, and how it fails."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import checking, command, supervising, tables, targets, timing, zoo
from benchmarks.gpu.case import FORWARD, Absent, Case, Targets, Work, kernel
from benchmarks.gpu.cases import ALL, BY_NAME
from benchmarks.gpu.results import ABSENT, FAILED, OK, RUNNING, WRONG, Job, Results, ResultsError
from benchmarks.gpu.rivals import EAGER, MAX_AUTOTUNE, OURS
from benchmarks.gpu.settings import CPU_NOTE, Settings
from benchmarks.gpu.timing import Rates
from kernel_dispatch.bench import Workload

ROOT = Path(__file__).parents[2]
HERE = {"card": CPU_NOTE, "torch": "2", "triton": "3"}


def script(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: kernels are interpreted there."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
    )


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in json.loads(path.read_text())["rows"]}


def settings(path: Path, name: str = "check", **more: Any) -> Settings:
    return Settings(name, path / "gpu.json", device="cpu", quick=True, **more)


def begun(path: Path) -> Results:
    results = Results(path / "gpu.json")
    results.begin_run({"started": "", **HERE})
    return results


# --- the whole way, on the CPU --------------------------------------------------------------------


def test_every_case_runs_forward_and_backward(tmp_path: Path) -> None:
    """Kernels that are not there yet are rows that say so; those that are there are right."""
    path = tmp_path / "gpu.json"
    # bfloat16 and 8-bit floats are wrong in the interpreter.
    only = ("--only", "/plain", "--dtypes", "float32,int8")
    done = script("check", "--json", str(path), "--device", "cpu", "--quick", *only)
    rows = rows_of(path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert {key.split("/")[1] for key in rows} == set(BY_NAME)
    for row in rows.values():
        case = BY_NAME[row["key"].split("/")[1]]
        if not _is_there(case):
            assert row["status"] == ABSENT and "has no" in row["reason"]
            continue
        assert row["status"] == OK and row["launched"], row
        assert _has_gradients(case) == any("gradient" in v["what"] for v in row["verdicts"])
    assert f"{len(rows)} rows" in done.stdout
    assert CPU_NOTE in done.stdout


def _is_there(case: Case) -> bool:
    with contextlib.suppress(Absent):
        return bool(kernel(case.kernel))
    return False


def _has_gradients(case: Case) -> bool:
    dtype = torch.int8 if case.dtypes[-1] == "int8" else torch.float32
    return bool(checking.wanting(case.make(case.tiny, dtype, "cpu")))


def test_kernels_are_timed_beside_their_rivals(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    call = ("kernels", "--json", str(path), "--device", "cpu", "--quick")
    only = ("--only", "/swiglu/forward,/rms_norm/backward,/linear_cross_entropy/")
    done = script(*call, *only, "--without", "inductor,inductor-max-autotune")
    assert done.returncode == 0, done.stdout + done.stderr
    rates, *timed = rows_of(path).values()
    assert rates["copy"] > 0 and rates["product"] > 0
    assert [row["direction"] for row in timed] == ["backward", "step", "forward"]
    for row in timed:
        ours = row["contenders"][OURS]
        assert ours["device_us"] > 0 and ours["wall_us"] >= ours["host_us"] > 0
        assert ours["how"] == timing.WALL
        assert row["contenders"]["liger"]["status"] == ABSENT or _has_liger()


def _has_liger() -> bool:
    from importlib.util import find_spec

    return find_spec("liger_kernel") is not None


def test_configurations_are_gone_through_and_never_kept_from_a_cpu(tmp_path: Path) -> None:
    call = ("tune", "--json", str(tmp_path / "gpu.json"), "--tuned", str(tmp_path / "tuned"))
    done = script(*call, "--device", "cpu", "--quick", "--only", "/rms_norm/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "tuned").exists()
    rows = rows_of(tmp_path / "gpu.json").values()
    assert len(rows) == 2 and all(row["choices"] for row in rows)


def test_a_process_that_dies_takes_one_row_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows before and after are there; a row over its time ends in the same way."""
    (tmp_path / "sitecustomize.py").write_text(_PLANTED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    asked = settings(tmp_path)
    call = ["check", "--json", str(asked.json), "--device", "cpu", "--quick", "--row-seconds", "1"]
    assert supervising.watch(asked, call) == 0
    rows = rows_of(asked.json)
    assert {key: row["status"] for key, row in rows.items()} == {
        "check/a": OK,
        "check/b": FAILED,
        "check/c": FAILED,
        "check/d": WRONG,
        "check/e": OK,
    }
    assert "ended with code 7" in rows["check/b"]["reason"]
    assert "longer than --row-seconds (1)" in rows["check/c"]["reason"]
    assert "wrong    4/5 check/d planted" in capfd.readouterr().out
    text = tables.text(Results(asked.json), "check")
    assert "wrong check/d: planted" in text and "5 rows: 2 failed, 2 ok, 1 wrong" in text
    assert not tables.is_good(Results(asked.json).rows)


_PLANTED = """
import sys, types, os, time

def jobs(settings):
    from benchmarks.gpu.results import Job
    def wrong():
        return {"status": "wrong", "reason": "planted"}
    todo = {"a": dict, "b": lambda: os._exit(7), "c": lambda: time.sleep(60), "d": wrong, "e": dict}
    return [Job(f"check/{name}", run) for name, run in todo.items()]
planted = types.ModuleType("benchmarks.gpu.check")
planted.jobs = jobs
sys.modules["benchmarks.gpu.check"] = planted
"""


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["check", "--device", "cpu"], "--device cpu runs through the script, it measures nothing"),
        (["check", "--device", "tpu"], "'tpu' is not cuda, cuda:N or cpu"),
        (["check", "--part", "5/4"], "'5/4' is not like 2/4"),
        (["chek"], "invalid choice: 'chek'"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert command.main([*arguments, "--json", str(tmp_path / "gpu.json")]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["kernels", "--json", str(tmp_path / "gpu.json")]) == 2
    assert "sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.quick
def test_parts_are_the_whole_and_do_not_overlap(tmp_path: Path) -> None:
    parts = [command._jobs(settings(tmp_path), f"{n}/3") for n in (1, 2, 3)]
    keys = [job.key for part in parts for job in part]
    assert sorted(keys) == sorted(job.key for job in command._jobs(settings(tmp_path), "1/1"))
    assert len(keys) == len(set(keys))


@pytest.mark.quick
def test_every_command_lists_its_rows_for_a_gpu(tmp_path: Path) -> None:
    """As they would be run there: shapes that users have, each row once."""
    for name in command.COMMANDS:
        asked = Settings(name, tmp_path / "gpu.json", device="cuda")
        module = __import__(f"benchmarks.gpu.{name}", fromlist=["jobs"])
        keys = [job.key for job in module.jobs(asked)]
        assert len(keys) == len(set(keys)) and keys
        assert all(key.startswith(f"{name}/") for key in keys)


# --- rows and the file ----------------------------------------------------------------------------


@pytest.mark.quick
def test_a_row_that_fails_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> dict[str, Any]:
        raise ValueError("planted")

    def absent() -> dict[str, Any]:
        raise Absent("not there yet")

    begun(tmp_path)
    jobs = [Job("check/a", fails), Job("check/b", absent), Job("check/c", lambda: {"error": 0.0})]
    assert supervising.work(settings(tmp_path), jobs, []) == 0
    rows = rows_of(tmp_path / "gpu.json")
    assert [row["status"] for row in rows.values()] == [FAILED, ABSENT, OK]
    assert rows["check/a"]["reason"] == "ValueError: planted"
    assert supervising.work(settings(tmp_path), jobs, []) == 0  # nothing is left to do
    assert capsys.readouterr().out.count("check/a") == 1
    Results(tmp_path / "gpu.json").forget_failures({"check/a", "check/c"})
    assert set(rows_of(tmp_path / "gpu.json")) == {"check/b", "check/c"}


@pytest.mark.quick
def test_a_row_that_nobody_finished_is_run_again(tmp_path: Path) -> None:
    results = begun(tmp_path)
    results.put("check/a", RUNNING, limit=1.0)
    supervising._forget_unfinished(results)
    assert not rows_of(tmp_path / "gpu.json")


@pytest.mark.quick
def test_a_call_that_is_over_leaves_the_rest(tmp_path: Path) -> None:
    begun(tmp_path)
    jobs = [Job("check/a", dict)]
    assert supervising.work(settings(tmp_path, seconds=-1.0), jobs, []) == 0
    assert not rows_of(tmp_path / "gpu.json")


@pytest.mark.quick
def test_results_of_two_cards_are_not_mixed(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(
        ResultsError, match="has results of cpu, not a measurement; this is another"
    ):
        Results(tmp_path / "gpu.json").begin_run({**HERE, "card": "another"})
    (tmp_path / "other.json").write_text('{"benchmarks": []}')
    with pytest.raises(ResultsError, match="cannot read"):
        Results(tmp_path / "other.json")


@pytest.mark.quick
def test_the_table_has_shares_and_targets(tmp_path: Path) -> None:
    results = begun(tmp_path)
    case = replace(BY_NAME["rms_norm"], targets=Targets(0.9, rival=MAX_AUTOTUNE, times_rival=1.03))
    work, rates = Work(1e9, 2e9), Rates(copy=4e12, product=8e14)
    times = {OURS: 312.5, EAGER: 1000.0, MAX_AUTOTUNE: 300.0}
    found = {n: {"device_us": us, **targets.shares(work, us, rates)} for n, us in times.items()}
    found["liger"] = {"status": ABSENT, "reason": "not installed"}
    met = targets.met(case, (1, 1), FORWARD, work, found)
    results.put("kernels/rms_norm/forward", OK, contenders=found, targets=met)
    results.put("kernels/other", WRONG, reason="planted")
    text = tables.text(Results(tmp_path / "gpu.json"), "kernels")
    assert [(one["value"], one["met"]) for one in met] == [
        (pytest.approx(0.8), False),
        (pytest.approx(312.5 / 300), False),
    ]
    (line,) = (line for line in text.splitlines() if "ours" in line and "312.5" in line)
    assert line.split()[-3:] == ["80%", "1%", "1.00"]
    for part in ("NOT MET", ">= 0.9", "<= 1.03", "3.20", "not installed", "wrong kernels/other"):
        assert part in text, text


@pytest.mark.quick
def test_targets_of_time_and_memory_are_for_one_shape() -> None:
    case = BY_NAME["linear_cross_entropy"]
    found = {
        OURS: {"device_us": 39_000.0, "copy_share": 0.1, "peak_bytes": 100},
        EAGER: {"device_us": 36_000.0, "copy_share": 0.1, "peak_bytes": 590},
    }
    at, work = case.targets.at, Work(1.0)
    assert at is not None
    met = targets.met(case, at, "step", work, found)
    assert [one["met"] for one in met] == [True, False]
    assert targets.met(case, (1, 2, 3), "step", work, found) == []


# --- models of other packages ---------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workload", zoo.workloads(2), ids=lambda workload: workload.name)
def test_a_model_of_another_package_is_built_and_alive(workload: Workload) -> None:
    if reason := workload.missing():
        pytest.skip(reason)
    case = workload.build(small=True)
    with torch.no_grad():
        out = case.fn(*case.args)
    assert torch.isfinite(out).all() and 0.05 < out.std() < 20.0


# --- judging --------------------------------------------------------------------------------------


def judge(got: Any, own: Any, truth: Any) -> list[checking.Verdict]:
    return list(checking.judged("it", got, own, truth))


@pytest.mark.quick
def test_what_is_off_is_seen() -> None:
    truth = torch.linspace(1, 2, 100, dtype=torch.float64)
    own = truth.float()
    (right,) = judge(own, own, truth)
    assert right.kept and right.error < 1e-7
    (off,) = judge(own + 1e-4, own, truth)
    assert not off.kept and off.error == pytest.approx(5e-5, rel=0.1)
    spoilt = own.clone()
    spoilt[3] = torch.nan
    (elsewhere,) = judge(spoilt, own, truth)
    assert not elsewhere.kept and "NaN or infinities at 1 other" in elsewhere.fault
    (better,) = judge(own, spoilt, truth)
    assert better.kept, "where torch overflows and the result does not"
    (form,) = judge(own.half(), own, truth)
    assert not form.kept and "torch.float16[100]" in form.fault
    (count,) = judge((own, own), own, truth)
    assert not count.kept and "2 and 1" in count.fault


@pytest.mark.quick
def test_errors_are_those_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts as in one piece."""
    from kernel_dispatch.numerics import measure

    monkeypatch.setattr(checking, "_PART", 7)
    truth = torch.randn(5, 9, dtype=torch.float64)
    own, got = truth.half(), (truth * 1.001).half()
    own[2, 3] = got[2, 3] = torch.inf
    (mine,) = judge(got, own, truth)
    theirs = measure(got, own, truth)
    assert (mine.error, mine.own) == pytest.approx((theirs.candidate, theirs.eager))
    assert mine.bound == pytest.approx(theirs.bound)


@pytest.mark.quick
def test_slices_of_huge_tensors_lie_where_indices_overflow() -> None:
    starts = checking._starts(600_000, 4096)
    assert starts[0] == 0 and starts[-1] == 600_000 - 64
    assert any(start * 4096 < 2**31 < (start + 64) * 4096 for start in starts)


@pytest.mark.quick
def test_a_wrong_slice_is_seen() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[:-3], x[-3:] * 2)) * 3

    case = replace(BY_NAME["swiglu"], ours=broken, own=lambda x: x * 3, rows_of=(0,))
    checked = checking.check_slices(case, (torch.randn(500, 4, requires_grad=True),))
    bad = {verdict.what for verdict in checked.verdicts if not verdict.kept}
    assert bad == {"rows from 436 0", "rows from 436 1"}  # the output and the gradient


@pytest.mark.quick
def test_the_work_of_every_case_is_counted() -> None:
    for case in ALL:
        for shape in case.shapes:
            for direction in case.directions:
                work = case.work(shape, 2, direction)
                assert work.bytes > 0 and work.flops >= 0, (case.name, shape)
        assert case.tiny and set(case.dtypes_on("cpu")).isdisjoint({"bfloat16", "float8"})
    huge = [case for case in ALL if case.huge is not None]
    assert huge and all(torch.Size(case.huge[:2]).numel() > 2**31 for case in huge)


# --- timing, on a GPU that is played --------------------------------------------------------------


class Played:
    """What torch.cuda is asked for, in order; time passes when something is replayed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.refuses_to_capture = False

    def event(self, enable_timing: bool) -> Any:
        event = types.SimpleNamespace(at=0.0)
        event.record = lambda stream: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: Any) -> Iterator[None]:
        self.log.append("capture")
        if self.refuses_to_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield

    def cuda_graph(self) -> Any:
        return types.SimpleNamespace(replay=self.work("replay", 2.0))

    def work(self, name: str, milliseconds: float) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += milliseconds

        return run


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    buffer = types.SimpleNamespace(zero_=lambda: played.log.append("flush"))
    card = types.SimpleNamespace(L2_cache_size=50 << 20)
    instead = {
        "Stream": lambda device: stream,
        "Event": played.event,
        "CUDAGraph": played.cuda_graph,
        "graph": played.graph,
        "synchronize": lambda device=None: played.log.append("wait"),
        "get_device_properties": lambda device: card,
        "current_stream": lambda device: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
    }
    for name, value in instead.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timing.torch, "empty", lambda *size, **more: buffer)
    return played


@pytest.mark.quick
def test_the_cache_is_flushed_before_every_replay_and_nobody_waits(played: Played) -> None:
    watch = timing.GpuClock("cuda", quick=True)
    calls = {"a": played.work("a", 3.0), "b": played.work("b", 5.0)}
    samples = watch.seconds(calls)
    turn, reverse = ["flush", "a", "flush", "b"], ["flush", "b", "flush", "a"]
    assert played.log == [*turn, "wait", *turn, *reverse, *turn, "wait"]
    assert samples == {"a": pytest.approx([3e-3] * 3), "b": pytest.approx([5e-3] * 3)}


@pytest.mark.quick
def test_what_cannot_be_captured_is_timed_as_it_is(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next row is for another process: the allocator does not know that it has ended."""
    monkeypatch.setattr(timing.Clock, "spoilt", False)
    watch, call = timing.GpuClock("cuda", quick=True), played.work("call", 1.0)
    with watch.here():
        replay, how = watch.ready(call)
    assert how == timing.GRAPH and replay is not call and not timing.Clock.spoilt
    played.refuses_to_capture = True
    assert watch.ready(call) == (call, timing.EVENTS)
    assert timing.milliseconds(watch, call) == pytest.approx(1.0)
    begun(tmp_path)
    jobs = [Job("check/a", dict), Job("check/b", dict)]
    assert supervising.work(settings(tmp_path), jobs, []) == supervising.BROKEN
    assert set(rows_of(tmp_path / "gpu.json")) == {"check/a"}, "the next row in the same process"


@pytest.mark.quick
def test_waiting_is_apart_from_launching(played: Played) -> None:
    watch = timing.GpuClock("cuda", quick=True)
    found = watch.waiting({"a": played.work("a", 1.0)})
    returned, done = found["a"]
    assert len(returned) == len(done) == 3
    assert all(one <= other for one, other in zip(returned, done, strict=True))
