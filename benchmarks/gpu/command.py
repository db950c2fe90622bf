"""The command line: what to run, on what, for how long, and where the results are."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu import supervising, tables
from benchmarks.gpu.results import Job, Results, ResultsError
from benchmarks.gpu.settings import Settings
from kernel_dispatch import register
from kernel_dispatch.settings import resolve
from kernel_dispatch.terminal import write
from triton_kernels import tuning

COMMANDS = {
    "check": "every kernel against float64, unified end to end, the kernels' tests",
    "tune": "times launch configurations and keeps the fastest",
    "kernels": "each kernel beside Inductor, cuBLAS, SDPA and Liger",
    "models": "whole models: eager, Inductor, unified O0-O3",
}
SHOW = "show"
UNFINISHED = 3
_ALWAYS = ("kernels/rates",)  # rows that others need


class UsageError(Exception):
    """What was asked for cannot be done here; the text says what can."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    try:
        if options.command == SHOW:
            return _show(options.json)
        settings = _settings(options)
        register()  # for a checkout that is not installed
        _demand_device(settings)
        if options.worker:
            return supervising.work(settings, _jobs(settings, options.part), arguments)
        if options.list:
            write("\n".join(job.key for job in _jobs(settings, options.part)))
            return 0
        return _call(settings, options.part, arguments)
    except (UsageError, ResultsError) as error:
        write(f"error: {error}", sys.stderr)
        return 2


def _call(settings: Settings, part: str, arguments: Sequence[str]) -> int:
    keys = {job.key for job in _jobs(settings, part)}
    if settings.retry:
        Results(settings.json).forget_failures(keys)
    code = supervising.watch(settings, arguments)
    if code:
        return code
    results = Results(settings.json)
    write("\n" + tables.text(results, settings.command))
    left = len(keys - {row["key"] for row in results.rows})
    if left:
        write(f"\n{left} of {len(keys)} rows are left: the same call goes on with them.")
        return UNFINISHED
    return 0 if tables.is_good(results.of(settings.command)) else 1


def _show(path: Path) -> int:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    results = Results(path)
    write("\n\n".join(tables.text(results, name) for name in COMMANDS if results.of(name)))
    return 0


def _jobs(settings: Settings, part: str) -> list[Job]:
    if settings.measures:
        tuning.keep_in(resolve(None, {}).cache_folder)
    found = importlib.import_module(f"benchmarks.gpu.{settings.command}").jobs(settings)
    number, _, count = part.partition("/")
    always = [job for job in found if job.key in _ALWAYS]
    wanted = [job for job in found if job.key not in _ALWAYS and settings.wants(job.key)]
    return always + wanted[int(number) - 1 :: int(count)]


def _demand_device(settings: Settings) -> None:
    if settings.device == "cpu":
        if not settings.quick:
            raise UsageError("--device cpu runs through the script, it measures nothing: --quick")
        return
    if not torch.cuda.is_available():
        raise UsageError(
            f"torch {torch.__version__} sees no GPU here. To run through the script without one: "
            f"--device cpu --quick"
        )
    count = torch.cuda.device_count()
    index = torch.device(settings.device).index or 0
    if index >= count:
        raise UsageError(f"there is no {settings.device} here: {count} GPUs, numbered from 0")


# --- arguments ------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        _add_options(commands.add_parser(name, help=summary, description=summary))
    shown = "the tables of a file of results; needs no GPU"
    commands.add_parser(SHOW, help=shown, description=shown).add_argument("json", type=Path)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, required=True, help="results; rows that it has are not run again")
    add("--device", default="cuda", type=_device, help="cuda (ROCm too), cuda:N, or cpu")
    add("--quick", action="store_true", help="tiny sizes, few rounds: does it run at all?")
    add("--only", type=_words, default=(), help="rows whose key has one of these in it: a,b")
    add("--dtypes", type=_words, default=(), help="bfloat16,float16,float32,float8,int8")
    add("--without", type=_words, default=(), help="contenders to leave out: a,b")
    add("--part", type=_part, default="1/1", help="2/4: the second of four parts of the rows")
    add("--seconds", type=float, default=570.0, help="no row begins after this time")
    add("--row-seconds", type=float, default=None, help="a row that takes longer has failed")
    add("--retry", action="store_true", help="run rows again that failed, were wrong or absent")
    add("--tuned", type=Path, help="folder of tuned choices, instead of the cache of `unified`")
    add("--list", action="store_true", help="print the rows, run nothing")
    add("--worker", action="store_true", help=argparse.SUPPRESS)


def _settings(options: argparse.Namespace) -> Settings:
    names = ("command", "json", "device", "quick", "only", "dtypes", "without", "retry", "tuned")
    # A model has seven contenders to compile.
    usual = 400.0 if options.command == "models" else Settings.row_seconds
    return Settings(
        **{name: getattr(options, name) for name in names},
        seconds=options.seconds,
        row_seconds=options.row_seconds or usual,
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _device(text: str) -> str:
    if text.partition(":")[0] not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r} is not cuda, cuda:N or cpu")
    return text


def _part(text: str) -> str:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2/4")
    return text
