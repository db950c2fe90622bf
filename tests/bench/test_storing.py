"""Results as files: nothing is lost, and pytest-benchmark can read them."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_dispatch.bench import storing
from kernel_dispatch.bench.results import Compilation
from tests.bench.made_up import refused, row, run

RUN = run(
    row(contender="eager", ms=20),
    row(ms=10, compilation=Compilation(1.5, 0.5, 0.1, 1, 0, 0, 2), report="what it did"),
    refused("net", "openvino", "missing", 'needs openvino, "pip install openvino"'),
    seconds=12.5,
    settings={"seed": 0},
)


def stored(tmp_path: Path, text: str) -> str:
    path = tmp_path / "result.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.quick
def test_json_gives_back_the_run(tmp_path: Path) -> None:
    assert storing.load(stored(tmp_path, storing.to_json(RUN))) == RUN


@pytest.mark.quick
def test_rows_without_times_are_not_benchmarks() -> None:
    record = json.loads(storing.to_json(RUN))
    assert [one["param"] for one in record["benchmarks"]] == ["eager", "unified-O2"]
    assert [one["contender"] for one in record["not_measured"]] == ["openvino"]


@pytest.mark.quick
def test_statistics_are_pytest_benchmarks() -> None:
    from pytest_benchmark.stats import Stats

    times = RUN.rows[1].times
    assert times is not None
    theirs = Stats()
    for sample in (*times.samples, 1.0):
        theirs.update(sample)
    from kernel_dispatch.bench import estimates

    mine = storing._stats(estimates.times([*times.samples, 1.0], 1))
    for name in "min max mean stddev rounds median ops total ld15iqr hd15iqr outliers".split():
        assert mine[name] == pytest.approx(getattr(theirs, name)), name


def test_pytest_benchmark_compares_it(tmp_path: Path) -> None:
    tool = shutil.which("pytest-benchmark", path=str(Path(sys.executable).parent))
    assert tool is not None
    path = stored(tmp_path, storing.to_json(RUN))
    done = subprocess.run([tool, "compare", path], capture_output=True, text=True, check=True)
    assert "net[unified-O2]" in done.stdout and "net[eager]" in done.stdout


@pytest.mark.quick
def test_a_file_of_pytest_benchmark_is_read(tmp_path: Path) -> None:
    record = json.loads(storing.to_json(RUN))
    del record["run"], record["not_measured"]
    for one in record["benchmarks"]:
        one["extra_info"] = {}
    loaded = storing.load(stored(tmp_path, json.dumps(record)))
    assert [(r.workload, r.contender) for r in loaded.rows] == [
        ("net", "eager"),
        ("net", "unified-O2"),
    ]
    assert loaded.rows[0].times == RUN.rows[0].times
    for one in record["benchmarks"]:  # --benchmark-json without --benchmark-save-data
        del one["stats"]["data"]
    medians = [r.times.median for r in storing.load(stored(tmp_path, json.dumps(record))).rows]  # type: ignore[union-attr]
    assert medians == pytest.approx([0.02, 0.01])


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"benchmarks": 3}', '"x"'])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        storing.BenchmarkFileError, match=r"result\.json' is not a benchmark result"
    ):
        storing.load(stored(tmp_path, text))


@pytest.mark.quick
def test_a_file_that_is_not_there() -> None:
    with pytest.raises(storing.BenchmarkFileError, match=r"cannot read 'no\.json': No such file"):
        storing.load("no.json")


@pytest.mark.quick
def test_csv_has_a_line_per_row_and_empty_cells_for_what_is_not_known() -> None:
    rows = list(csv.DictReader(io.StringIO(storing.to_csv(RUN))))
    assert [one["status"] for one in rows] == ["ok", "ok", "missing"]
    assert float(rows[1]["median_s"]) == pytest.approx(0.01)
    assert float(rows[1]["speedup"]) == pytest.approx(2.0)
    assert float(rows[1]["limit_fraction"]) == pytest.approx(0.5)
    assert (rows[1]["first_call_s"], rows[1]["fallbacks"]) == ("1.5", "2")
    assert rows[2]["median_s"] == "" and rows[2]["reason"].startswith("needs openvino")
    assert list(rows[0]) == storing.COLUMNS
