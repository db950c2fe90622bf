"""`kernel-dispatch bench` and `bench compare`: arguments, files, exit codes.

Torch is imported only once a command runs, as in cli.py.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_dispatch.bench.results import BASELINE
from kernel_dispatch.exit_codes import INTERRUPTED
from kernel_dispatch.terminal import style_of, write
from lowering.errors import SettingError, unknown

if TYPE_CHECKING:
    from kernel_dispatch.bench.results import Row, Run
    from kernel_dispatch.bench.session import Wish

DESCRIPTION = """Time a workload under several backends, side by side, and verify before timing.

TARGET is one of

  a name           one of the built-in workloads (they come with the project's checkout; see --list)
  core             all workloads of the core set
  module:function  your own: what `explain` accepts, for instance a function without arguments that
                   returns (model, args) or (model, args, kwargs); the same for file.py:function

Every contender runs in a process of its own; eager is always one of them, since it is what the
others are measured by. Their output is compared with float64 first: a wrong one is not timed."""

EPILOG = """examples:
  kernel-dispatch bench shop:make --levels O0,O1,O2,O3 --backends eager,inductor,unified
  kernel-dispatch bench text-encoder cnn --backends unified,openvino-f32 --html report.html
  kernel-dispatch bench model.py:make --dtype bfloat16 --training --json after.json
  kernel-dispatch bench compare before.json after.json --fail-on 5%

exit code: 0 fine, 1 eager or unified failed, or an output was wrong, 2 wrong usage, 130
interrupted: what was finished by then is shown, and in the files. A peer that is not installed or
cannot run a model is a row with the reason, and no failure."""

COMPARE_EPILOG = """A row is slower only if it lost more than --fail-on and the 95% intervals of the
two runs do not touch. By default times are compared relative to the baseline of their own run,
which takes out how busy the machine was. Reads files of --json and of pytest --benchmark-json.

exit code: 0 fine, 1 a row became slower, broke or is gone, 2 wrong usage."""

_BACKENDS = "contenders beside eager (default: inductor,unified); your own: module:function"
_ONE_PROCESS = "leave out the warm compile time; intervals are then about one process only"
_A_DAY = 86400
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def names(text: str) -> list[str]:
        return [part.strip() for part in text.split(",") if part.strip()]

    add = parser.add_argument
    add("targets", nargs="*", metavar="TARGET", help="a built-in workload, or module:function")
    add("--list", action="store_true", help="the built-in workloads and backends, and their state")
    add("--backends", type=names, default=["inductor", "unified"], metavar="A,B", help=_BACKENDS)
    add("--levels", type=names, default=["O2"], metavar="O1,O2", help="levels of unified")
    add("--devices", type=names, default=["cpu"], metavar="D", help="cpu, cuda, cuda:1, xpu, mps")
    add("--dtype", metavar="DTYPE", help=f"{', '.join(_DTYPES)} (default: as it is built)")
    add("--threads", type=_positive, metavar="N", help="threads of every process")
    add("--training", action="store_true", help="forward and backward instead of inference")
    add("--seed", type=int, default=0, help="for weights, inputs and the order of the rounds")
    add("--seconds", type=float, default=2.0, metavar="S", help="of timing per row (default: 2)")
    add("--timeout", type=float, default=900.0, metavar="S", help="for one step of one contender")
    add("--no-second-process", action="store_true", help=_ONE_PROCESS)
    add("--json", metavar="FILE", help="results, readable by pytest-benchmark compare")
    _add_outputs(parser)


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", metavar="A.json", help="what bench --json wrote")
    parser.add_argument("--markdown", action="store_true", help="a table for a README, to stdout")
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--csv", metavar="FILE", help="results as a flat table")
    add("--html", metavar="FILE", help="results as one page without outside resources")
    add("--plots", metavar="FOLDER", help="speed-up and roofline plots as SVG and PNG")


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json", help="the run to compare with")
    parser.add_argument("after", metavar="B.json", help="the run in question")
    parser.add_argument("--fail-on", type=_percent, default=0.05, metavar="5%",
                        help="a row may lose this much (default: 5%%)")  # fmt: skip
    parser.add_argument("--by", choices=("ratio", "time"), default="ratio",
                        help="relative to the run's baseline (default), or seconds")  # fmt: skip


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads: 1, 2, 3 ...")
    return int(text)


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < (10 if text.endswith("%") else 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: write 5% or 0.05")
    return value


# --- bench ----------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    if args.list:
        _list()
        return 0
    wish = _wish(args)
    _demand_places((args.json, args.csv, args.html), args.plots)
    result = _measured(wish)
    from kernel_dispatch.bench import storing
    from kernel_dispatch.bench.views import table

    if args.json:
        Path(args.json).write_text(storing.to_json(result), encoding="utf-8")
    write(table.text(result, style_of(sys.stdout)))
    _write_outputs(result, args)
    if left_out := result.settings.get("left_out"):
        write(f"kernel-dispatch: interrupted; not measured: {', '.join(left_out)}", sys.stderr)
        return INTERRUPTED
    return int(any(map(_is_failure, result.rows)))


def _is_failure(row: Row) -> bool:
    """A peer that cannot run a model is a finding; a wrong output, or a failure of ours, is not."""
    ours = row.contender == BASELINE or row.contender.startswith("unified")
    return row.status == "wrong" or (ours and row.status not in ("ok", "missing"))


def _wish(args: argparse.Namespace) -> Wish:
    """Everything that can be wrong is told before the first process starts."""
    from kernel_dispatch.bench import catalogue, contenders, device
    from kernel_dispatch.bench.session import Wish

    if args.dtype is not None and args.dtype not in _DTYPES:
        raise unknown("dtype", args.dtype, _DTYPES, "--dtype")
    if not (0 < args.seconds <= _A_DAY and 0 < args.timeout <= _A_DAY):
        raise SettingError(f"--seconds and --timeout want a number above 0, up to {_A_DAY}.")
    return Wish(
        targets=_targets(args.targets),
        contenders=contenders.chosen(args.backends, _levels(args.levels), catalogue.peers()),
        devices=[device.demand(name) for name in args.devices] or ["cpu"],
        dtype=args.dtype,
        threads=args.threads,
        training=args.training,
        seed=args.seed,
        seconds_per_row=args.seconds,
        second_process=not args.no_second_process,
        timeout_s=args.timeout,
    )


def _targets(names: Sequence[str]) -> list[str]:
    from kernel_dispatch.bench import catalogue

    if not names:
        raise SettingError("bench: name a TARGET, module:function or a built-in workload (--list).")
    if "core" in names and not catalogue.core():
        raise SettingError(
            "'core' comes with the project's checkout; name your own module:function."
        )
    wanted = [one for name in names for one in (catalogue.core() if name == "core" else [name])]
    for name in wanted:
        catalogue.workload(name)
    return list(dict.fromkeys(wanted))


def _levels(names: Sequence[str]) -> list[str]:
    from kernel_dispatch.settings import list_levels

    known = {name.lower(): name for name in list_levels()}
    for name in names:
        if name.lower() not in known:
            raise unknown("level", name, known.values(), "--levels")
    return [known[name.lower()] for name in names]


def _demand_places(files: Iterable[str | None], folder: str | None) -> None:
    """An hour of measuring must not end in a file that cannot be written."""
    for file in filter(None, files):
        try:
            with Path(file).open("a"):
                pass
        except OSError as error:
            raise SettingError(f"cannot write {file!r}: {error.strerror}.") from None
    if folder:
        try:
            Path(folder).mkdir(exist_ok=True)
        except OSError as error:
            raise SettingError(f"cannot make the folder {folder!r}: {error.strerror}.") from None


def _measured(wish: Wish) -> Run:
    from kernel_dispatch.bench.progress import Progress, duration
    from kernel_dispatch.bench.session import Session

    progress = Progress()
    # As Ctrl-C does: processes and temporary folders are cleaned up on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    write(f"{len(wish.targets)} workload(s), {len(wish.contenders)} contenders: "
          f"{duration(_estimate(wish))} at a guess, most of it compiling.", sys.stderr)  # fmt: skip
    try:
        with Session(wish, progress) as session:
            return session.run()
    finally:
        progress.done()


def _estimate(wish: Wish) -> float:
    """Before anything is known: process starts, and a mid-sized model's compilations."""
    compiling = [one for one in wish.contenders if one.compiles_with_dynamo]
    starts = 5 * len(wish.contenders) + 10 * len(compiling) * (1 + wish.second_process)
    each = (wish.seconds_per_row + 3) * len(wish.contenders) + 8 * len(compiling)
    return starts + each * len(wish.targets) * len(wish.devices)


def _write_outputs(result: Run, args: argparse.Namespace) -> None:
    from kernel_dispatch.bench import storing

    if args.csv:
        Path(args.csv).write_text(storing.to_csv(result), encoding="utf-8")
    if args.html:
        from kernel_dispatch.bench.views import page

        Path(args.html).write_text(page.html(result), encoding="utf-8")
    if args.plots:
        _write_plots(result, Path(args.plots))


def _write_plots(result: Run, folder: Path) -> None:
    from kernel_dispatch.bench.views import drawing

    folder.mkdir(exist_ok=True)
    plots = {"speedup": drawing.speedup_bars(result), "roofline": drawing.roofline(result)}
    for name, svg in plots.items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    try:
        for name, svg in plots.items():
            (folder / f"{name}.png").write_bytes(drawing.png(svg))
    except drawing.DrawingError as error:
        write(f"kernel-dispatch: only SVG was written: {error}", sys.stderr)


def _list() -> None:
    from kernel_dispatch.bench import catalogue, contenders
    from kernel_dispatch.settings import list_levels

    style, core = style_of(sys.stdout), catalogue.core()
    write(style.bold("workloads") + ("" if core else ": none, they come with the checkout"))
    for name, one in catalogue.workloads().items():
        missing = one.missing()
        mark, in_core = style.mark("info" if missing else "ok"), " (core)" if name in core else ""
        write(f"{mark} {name}{in_core}: {one.summary}{f'; {missing}' if missing else ''}")
    write(style.bold("backends"))
    peers = catalogue.peers()
    for contender in contenders.chosen(["inductor", "unified"], list_levels(), peers) + [*peers]:
        missing = contender.missing()
        mark = style.mark("info" if missing else "ok")
        write(f"{mark} {contender.name}: {contender.summary}{f'; {missing}' if missing else ''}")
    write("and every backend that torch.compile knows by name")


# --- bench show, bench compare --------------------------------------------------------------------


def run_show(args: argparse.Namespace) -> int:
    from kernel_dispatch.bench import storing
    from kernel_dispatch.bench.views import table

    _demand_places((args.csv, args.html), args.plots)
    result = storing.load(args.results)
    _write_outputs(result, args)
    style = style_of(sys.stdout)
    write(table.markdown(result) if args.markdown else table.text(result, style))
    return 0


def run_compare(args: argparse.Namespace) -> int:
    from kernel_dispatch.bench import comparing, storing
    from kernel_dispatch.bench.views import table

    before, after = storing.load(args.before), storing.load(args.after)
    found = comparing.compare(before, after, args.fail_on, args.by)
    write(table.comparison(found, style_of(sys.stdout)))
    return int(found.failed)
