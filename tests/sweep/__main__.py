"""`python -m tests.sweep`: the whole sweep or a shard of it, with a table at the end.

Results are appended to OUT.partial as they come; a run that is started again goes on from there.
Exit status: 0 when every failure has its row in `expected_failures.py` and no row passes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported by the workers: one compile at a time per worker, no pool of its own.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.support.compiling import BACKEND
from tests.sweep.check import Result
from tests.sweep.expected_failures import malformed, verdict
from tests.sweep.runner import Settings, Task, run_tasks
from tests.sweep.samples import DIRECTIONS, DTYPES, LEVELS, cases, has_direction

LEGEND = """These are among the passes, and each says less than a pass:
form only  random or uninitialised values: dtype, shape and structure were compared
by eager   the op has no float64 form: eager is its own reference
no graph   the graph broke before the op, so the backend was never called
fell back  a provider failed and the next one took the graph
eager      the backend chose eager: above O1 nothing of its lowerings was tested"""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    tasks = _tasks(options)
    results, done = [], set()
    partial = options.json.with_name(options.json.name + ".partial")
    if options.fresh:
        partial.unlink(missing_ok=True)
    if partial.exists():
        results = [Result(**json.loads(line)) for line in partial.read_text().splitlines()]
        done = {result.label for result in results}
        print(f"going on after {len(done)} results in {partial}", file=sys.stderr)
    tasks = [task for task in (_left(task, done) for task in tasks) if task.levels]
    total = sum(len(task.levels) for task in tasks)
    start = time.monotonic()
    with partial.open("a") as out:

        def record(result: Result) -> None:
            results.append(result)
            out.write(json.dumps(result.as_dict()) + "\n")
            out.flush()
            _progress(result, len(results) - len(done), total, start)

        settings = Settings(
            options.backend, options.samples, options.timeout, options.shipped_limits
        )
        run_tasks(tasks, settings, options.jobs, record)
    results.sort(key=lambda result: result.label)
    meta = {
        "torch": torch.__version__,
        "backend": options.backend,
        "samples": options.samples,
        "shipped_limits": options.shipped_limits,
        "seconds": round(time.monotonic() - start, 1),
    }
    options.json.write_text(
        json.dumps({"meta": meta, "results": [result.as_dict() for result in results]}, indent=1)
    )
    partial.unlink()
    return _summary(results, meta)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--levels", type=_subset(LEVELS), default=LEVELS, metavar="O0,O1,O2")
    parser.add_argument("--dtypes", type=_subset(tuple(DTYPES)), default=tuple(DTYPES))
    parser.add_argument("--directions", type=_subset(DIRECTIONS), default=DIRECTIONS)
    parser.add_argument("--ops", default="", metavar="REGEX", help="searched in NAME.VARIANT")
    parser.add_argument("--shard", type=_shard, default=(0, 1), metavar="I/N", help="I from 1")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--samples", type=int, default=1, help="per op and dtype (default: 1)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per op and level")
    parser.add_argument("--json", type=Path, default=Path("sweep.json"), metavar="OUT")
    parser.add_argument("--fresh", action="store_true", help="do not go on from OUT.partial")
    parser.add_argument(
        "--shipped-limits", action="store_true",
        help="keep the size limits that leave tiny graphs, so nearly every sample, to eager",
    )  # fmt: skip
    parser.add_argument("--backend", default=BACKEND, help="unified, or inductor to compare")
    return parser.parse_args(argv)


def _subset(known: tuple[str, ...]):
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {unknown}; known: {', '.join(known)}")
        return chosen

    return parse


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    shard = (int(index) - 1, int(count))
    if not 0 <= shard[0] < shard[1]:
        raise argparse.ArgumentTypeError(f"shard {text!r} is not between 1/N and N/N")
    return shard


def _tasks(options: argparse.Namespace) -> list[Task]:
    index, count = options.shard
    return [
        Task(case, direction, options.levels)
        for case in cases(options.dtypes, options.ops)[index::count]
        for direction in options.directions
        if has_direction(case, direction)
    ]


def _left(task: Task, done: set[str]) -> Task:
    case = task.case
    levels = tuple(
        level
        for level in task.levels
        if Result(case.op, case.variant, case.dtype, task.direction, level, "").label not in done
    )
    return Task(case, task.direction, levels)


def _progress(result: Result, number: int, total: int, start: float) -> None:
    if result.status not in ("pass", "skip"):
        print(f"{result.label}: {result.status}: {result.detail[:300]}", file=sys.stderr)
    if number % 100 == 0 or number == total:
        elapsed = time.monotonic() - start
        left = elapsed / number * (total - number)
        print(f"[{number}/{total}] {elapsed:.0f} s, about {left:.0f} s left", file=sys.stderr)


def _summary(results: list[Result], meta: dict) -> int:
    table: dict[tuple[str, str, str], Counter[str]] = {}
    unexpected = list(malformed())
    judged = meta["backend"] == "unified"  # the table's rows are about this project's backend
    for result in results:
        counts = table.setdefault((result.level, result.direction, result.dtype), Counter())
        word = verdict(result) if judged else result.status
        if word not in ("pass", "skip", "expected"):
            if judged:
                unexpected.append(word)
            word = "fail"
        counts[word] += 1
        if result.status == "pass":
            counts["form only"] += result.compared == "form"
            counts["by eager"] += result.compared == "eager"
            counts["no graph"] += result.graphs == 0
            counts["fell back"] += bool(result.fallbacks)
            counts["eager"] += result.providers == "eager"
    columns = ("pass", "fail", "expected", "skip", "form only", "by eager", "no graph", "fell back",
               "eager")  # fmt: skip
    print(f"{'level':6}{'direction':10}{'dtype':10}" + "".join(f"{c:>10}" for c in columns))
    for (level, direction, dtype), counts in sorted(table.items()):
        cells = "".join(f"{counts[column]:>10}" for column in columns)
        print(f"{level:6}{direction:10}{dtype:10}{cells}")
    print(LEGEND)
    for line in unexpected:
        print(f"UNEXPECTED {line}")
    print(f"{len(results)} results, {len(unexpected)} unexpected, {meta['seconds']} s")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main())
