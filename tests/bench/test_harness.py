"""Whole runs: worker processes, verification, interleaved timing; with planted faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_dispatch.bench import comparing, contenders
from kernel_dispatch.bench import session as sessions
from kernel_dispatch.bench.results import Row, Run
from kernel_dispatch.bench.session import Session, Wish
from lowering.errors import SettingError

pytestmark = pytest.mark.slow

_RIGGED = "tests.bench.rigged:"


@pytest.fixture(autouse=True, scope="module")
def no_time_to_settle() -> Iterator[None]:
    """Processes of one thread each have none that look for more work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "SETTLE_S", 0.0)
        yield


def measure(targets: Sequence[str], backends: Sequence[str], **more: Any) -> Run:
    with session(targets, backends, **more) as opened:
        return opened.run()


def session(targets: Sequence[str], backends: Sequence[str], **more: Any) -> Session:
    """So short that each row gets the fewest rounds there are, unless a test wants more."""
    levels = more.pop("levels", ["O2"])
    named = [name if name in ("inductor", "unified") else _RIGGED + name for name in backends]
    wish = Wish(
        targets=[_RIGGED + target for target in targets],
        contenders=contenders.chosen(named, levels),
        **{"seconds_per_row": 0.01, "second_process": False, "threads": 1, **more},
    )
    return Session(wish)


def row(run: Run, target: str, contender: str) -> Row:
    name = contender if contender in ("eager", "inductor") or "unified" in contender else ""
    (found,) = [
        one for one in run.of(_RIGGED + target) if one.contender == (name or _RIGGED + contender)
    ]
    return found


@pytest.fixture(scope="module")
def hanging() -> Iterator[Future[Run]]:
    """It does nothing but wait, so it does that beside the other runs."""
    with ThreadPoolExecutor(1) as beside:
        yield beside.submit(measure, ["mlp"], ["hanging"], timeout_s=30.0)


@pytest.fixture(scope="module")
def faults(hanging: Future[Run]) -> Run:
    """With a second workload, for which the process that died has to be there again."""
    backends = "as_it_is one_percent_off wrong_after_a_while wrong_shape wrong_infinity dying"
    return measure(["mlp", "dropout"], [*backends.split(), "refusing", "noisy", "noisi"])


def test_a_good_row_has_everything(faults: Run) -> None:
    good = row(faults, "mlp", "as_it_is")
    assert good.status == "ok" and not good.reason
    assert good.times is not None and len(good.times.samples) >= 7
    assert good.times.low <= good.times.median <= good.times.high
    assert good.times.calls > 1, "a call is shorter than a clock can tell"
    assert good.numerics is not None and 0 < good.numerics.error <= good.numerics.baseline_error
    assert good.speedup is not None and good.speedup.low <= good.speedup.value <= good.speedup.high
    assert good.compilation.first_call_s is not None
    assert (good.compilation.graphs, good.compilation.breaks, good.compilation.recompiles) == (
        1,
        0,
        0,
    )
    assert good.roofline is not None and good.roofline.flops == 2 * 8 * 32 * 64 * 2
    assert good.limit_fraction is not None and 0 < good.limit_fraction < 1.5
    assert good.peak_memory_bytes is not None
    assert faults.limits.gemm_flops > 1e9 and faults.limits.read_bytes > 1e8
    assert faults.machine["threads"] == 1 and faults.machine["torch"]
    baseline = row(faults, "mlp", "eager")
    assert baseline.speedup is not None and baseline.speedup.value == 1.0


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [
        ("one_percent_off", "wrong", "output 0: error 1.0e-02 against float64, allowed"),
        ("wrong_after_a_while", "wrong", "output 0: error"),
        (
            "wrong_shape",
            "wrong",
            "output 0: shape torch.Size([1, 32]), eager has torch.Size([8, 32])",
        ),
        ("wrong_infinity", "wrong", "output 0: infinity where eager has none"),
        ("dying", "failed", ": the process died of SIGSEGV"),
        ("refusing", "failed", "planted: not on a Saturday"),
    ],
)
def test_a_fault_stops_its_row_and_no_other(
    faults: Run, backend: str, status: str, reason: str
) -> None:
    found = row(faults, "mlp", backend)
    assert found.status == status
    assert reason in found.reason and "\n" not in found.reason
    assert found.times is None and found.speedup is None


def test_what_a_contender_prints_does_no_harm(faults: Run) -> None:
    assert row(faults, "mlp", "noisy").status == "ok"


def test_a_dead_process_is_replaced_for_the_next_workload(faults: Run) -> None:
    for target in ("mlp", "dropout"):
        died = row(faults, target, "dying")
        assert died.status == "failed" and "the process died of SIGSEGV" in died.reason
        assert row(faults, target, "eager").status == "ok"


@pytest.fixture(scope="module")
def odd_cases() -> Run:
    targets = "dropout counting new_word_each_call worded unseeded no_tensor raising reading"
    return measure(targets.split(), ["as_it_is", "changes_the_word"])


def test_random_outputs_are_compared_in_form_only(odd_cases: Run) -> None:
    found = row(odd_cases, "dropout", "as_it_is")
    assert (found.status, found.numerics) == ("ok", None)
    assert "random" in found.reason


def test_a_case_with_state_is_verified_on_its_first_call(odd_cases: Run) -> None:
    found = row(odd_cases, "counting", "as_it_is")
    assert found.status == "ok"
    assert found.numerics is not None and found.numerics.error == 0


@pytest.mark.parametrize(
    ("target", "backend", "text"),
    [
        ("new_word_each_call", "as_it_is", "compiled again in 5 calls of the same case while it"),
        ("worded", "changes_the_word", "compiled again while it was timed"),
    ],
)
def test_a_recompile_is_an_error(odd_cases: Run, target: str, backend: str, text: str) -> None:
    found = row(odd_cases, target, backend)
    assert found.status == "recompiled" and found.times is None
    assert found.reason.startswith(text)
    assert "word" in found.reason, "the guard that failed"
    assert row(odd_cases, target, "eager").status == "ok"


def test_a_builder_that_is_not_seeded_is_told(odd_cases: Run) -> None:
    for contender in ("eager", "as_it_is"):
        found = row(odd_cases, "unseeded", contender)
        assert found.status == "different" and "torch's generator" in found.reason


def test_without_a_baseline_nothing_is_timed(odd_cases: Run) -> None:
    assert row(odd_cases, "no_tensor", "eager").status == "wrong"
    assert "no tensor" in row(odd_cases, "no_tensor", "as_it_is").reason
    assert row(odd_cases, "raising", "eager").status == "failed"
    assert "planted in the model" in row(odd_cases, "raising", "as_it_is").reason
    assert row(odd_cases, "raising", "as_it_is").times is None
    assert "EOFError" in row(odd_cases, "reading", "eager").reason


def test_a_step_that_hangs_is_given_up(hanging: Future[Run]) -> None:
    found = row(hanging.result(), "mlp", "hanging")
    assert (found.status, found.reason) == ("failed", "starting: no answer within 30 s")


def test_unified_tells_its_report_and_the_worth_of_its_cache() -> None:
    run = measure(["mlp"], ["unified"], levels=["O2"], second_process=True)
    o2 = row(run, "mlp", "unified-O2")
    assert o2.status == "ok" and o2.compilation.fallbacks == 0
    assert "inductor" in o2.report and "ran" in o2.report
    assert str(Path.cwd()) not in o2.report, "names a folder of this machine"
    first, second = o2.compilation.first_call_s, o2.compilation.second_process_s
    assert first is not None and second is not None and second < first
    assert row(run, "mlp", "eager").report == ""


def test_training_verifies_and_times_the_gradients() -> None:
    run = measure(["mlp"], ["as_it_is", "unified"], levels=["O1"], training=True)
    for name in ("as_it_is", "unified-O1"):
        found = row(run, "mlp", name)
        assert found.status == "ok" and found.training
    assert found.roofline is not None
    # Two products forward; backward two for each weight, and none for the input of the first.
    assert found.roofline.flops == 2 * 8 * 32 * 64 * (2 + 2 + 1)


def test_a_slow_down_of_ten_percent_is_seen_and_noise_is_not() -> None:
    backends = ["as_it_is", "a_tenth_slower"]
    with session(["busy"], backends, seconds_per_row=1.0) as opened:
        before, again = opened.run(), opened.run()
    assert not comparing.compare(before, again, 0.05).failed
    names = [_RIGGED + name for name in backends]
    found = comparing.compare(_without(before, names[1]), _in_place_of(again, *names), 0.05)
    assert [change.verdict for change in found.changes] == ["same", "slower"]
    assert found.changes[1].factor == pytest.approx(1.1, abs=0.04)


def _without(run: Run, contender: str) -> Run:
    return replace(run, rows=tuple(one for one in run.rows if one.contender != contender))


def _in_place_of(run: Run, old: str, new: str) -> Run:
    """As if the new one were what the old one has become."""
    rows = _without(run, old).rows
    renamed = (replace(one, contender=old) if one.contender == new else one for one in rows)
    return replace(run, rows=tuple(renamed))


def test_a_target_that_is_not_there_is_one_error(faults: Run) -> None:
    with pytest.raises(SettingError, match=r"rigged has no 'mpl'. Did you mean 'mlp'\?"):
        measure(["mpl"], ["as_it_is"])
    # A backend is looked up when it is needed: its row says so, and the others are not lost.
    found = row(faults, "mlp", "noisi")
    assert found.status == "failed" and "Did you mean 'noisy'?" in found.reason
