"""What counts as slower between two runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernel_dispatch.bench import comparing, storing
from kernel_dispatch.bench.results import Run
from kernel_dispatch.bench.views import table
from kernel_dispatch.cli import main
from kernel_dispatch.terminal import Style
from tests.bench.made_up import refused, row, run

pytestmark = pytest.mark.quick


def pair(ms: float, eager_ms: float = 20.0) -> Run:
    return run(row(contender="eager", ms=eager_ms), row(ms=ms))


def verdicts(before: Run, after: Run, limit: float = 0.05, by: str = "ratio") -> dict[str, str]:
    found = comparing.compare(before, after, limit, by)
    assert found.failed == any(c.verdict in ("slower", "gone", "broken") for c in found.changes)
    return {change.contender: change.verdict for change in found.changes}


def test_the_same_run_twice() -> None:
    assert verdicts(pair(10), pair(10)) == {"eager": "same", "unified-O2": "same"}


def test_a_tenth_slower_and_a_tenth_faster() -> None:
    assert verdicts(pair(10), pair(11))["unified-O2"] == "slower"
    assert verdicts(pair(11), pair(10))["unified-O2"] == "faster"
    assert verdicts(pair(10), pair(11), limit=0.15)["unified-O2"] == "same"


def test_a_machine_that_is_slower_as_a_whole_is_told_and_no_failure() -> None:
    before, after = pair(10, 20), pair(15, 30)
    assert verdicts(before, after) == {"eager": "same", "unified-O2": "same"}
    assert verdicts(before, after, by="time") == {"eager": "slower", "unified-O2": "slower"}
    (note,) = comparing.compare(before, after, 0.05).notes
    assert "(eager) took 1.50 x its time; --by time" in note


def test_a_difference_within_the_noise_is_none() -> None:
    noisy = run(row(contender="eager", ms=20), row(ms=10))
    noisier = [s * (1 + 0.3 * (i % 3 - 1)) for i, s in enumerate(noisy.rows[1].times.samples)]  # type: ignore[union-attr]
    from kernel_dispatch.bench import estimates

    after = run(row(contender="eager", ms=20), row(times=estimates.times(noisier, 1), ms=11))
    assert verdicts(noisy, after)["unified-O2"] == "same"


def test_a_row_that_broke_or_is_gone_fails() -> None:
    broken = run(row(contender="eager", ms=20), refused("net", "unified-O2", "wrong", "off by one"))
    assert verdicts(pair(10), broken)["unified-O2"] == "broken"
    shown = table.comparison(comparing.compare(pair(10), broken, 0.05), Style())
    assert "ok before, wrong now: off by one" in shown
    assert verdicts(pair(10), run(row(contender="eager", ms=20)))["unified-O2"] == "gone"
    assert verdicts(broken, pair(10))["unified-O2"] == "new"
    assert verdicts(broken, broken)["unified-O2"] == "same"


def test_a_row_without_a_speedup_is_compared_in_seconds() -> None:
    alone = run(row(contender="eager", ms=20), row(ms=10))
    without = run(*[replace(one, speedup=None) for one in alone.rows[1:]], row("b", "eager"))
    with_b = run(*alone.rows, row("b", "eager"), row("b", ms=5))
    changes = comparing.compare(with_b, without, 0.05).changes
    assert [c.factor for c in changes if c.workload == "net" and c.contender != "eager"] == [1.0]


def test_workloads_of_one_file_only_are_named_and_not_compared() -> None:
    both = run(row(contender="eager"), row(), row("other", "eager"), row("other"))
    found = comparing.compare(both, run(row(contender="eager"), row()), 0.05)
    assert not found.failed and {change.workload for change in found.changes} == {"net"}
    assert "only in the first file, not compared: other" in found.notes


def test_another_machine_is_told() -> None:
    before = pair(10)
    after = run(*pair(10).rows, machine={"cpu": "Other", "threads": 4, "torch": "2.13.0"})
    notes = comparing.compare(before, after, 0.05).notes
    assert notes[:2] == (
        "cpu differs: Some CPU before, Other now",
        "threads differs: 2 before, 4 now",
    )


def test_nothing_in_common() -> None:
    with pytest.raises(storing.BenchmarkFileError, match="no row in common"):
        comparing.compare(pair(10), run(row("other")), 0.05)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    for name, ms in (("a.json", 10.0), ("b.json", 11.0)):
        (tmp_path / name).write_text(storing.to_json(pair(ms)))
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


def test_the_command(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = files
    assert main(["bench", "compare", a, b]) == 1
    shown = capsys.readouterr().out
    assert "net  unified-O2  slower  1.100 x the time before" in shown
    assert "1 slower, 0 broken or gone, of 2 rows" in shown
    assert main(["bench", "compare", a, a]) == 0
    assert main(["bench", "compare", a, b, "--fail-on", "20%"]) == 0
    assert main(["bench", "compare", a, b, "--fail-on", "0.2"]) == 0


@pytest.mark.parametrize("share", ["five", "-3%", "5000%", "%", "nan", "5"])
def test_a_bad_share(
    files: tuple[str, str], share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", *files, f"--fail-on={share}"]) == 2
    assert f"{share!r} is not a share: write 5% or 0.05" in capsys.readouterr().err
