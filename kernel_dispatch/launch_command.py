"""`launch`: a script in one process or several, each bound to physical cores of one NUMA node.

Around `torch.backends.xeon.run_cpu`, which starts and binds the processes. What it is told here:
cores by the numbers that affinity masks use (its own choice takes core numbers for CPU numbers,
which differ on many machines with SMT, and knows neither cpusets nor quotas), an allocator where
one is found, and what became of the processes (it ends with 0 whatever they end with).

OMP_PROC_BIND is left alone: a bound main thread hands its single core to every DataLoader worker.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_dispatch.launching import Placement, place
from kernel_dispatch.terminal import write, write_json
from kernel_dispatch.user_code import UsageError
from lowering.errors import nearest

DESCRIPTION = """Run a Python script bound to physical cores of one NUMA node: as many threads as
cores, torch's memory beside them, tcmalloc or jemalloc where one is installed. In a container it
keeps to the CPU set and the quota. Any x86 Linux, not Intel's only; around
torch.backends.xeon.run_cpu. The exit code is the script's: of several instances, the first bad one.

What follows SCRIPT is the script's own."""
EPILOG = """examples:
  kernel-dispatch launch serve.py --port 8000
  kernel-dispatch launch --instances 2 --ncores 8 bench.py
  kernel-dispatch launch --dry-run --node 1 train.py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ncores", type=_count, metavar="N", help="cores of each instance (default: all there are)"
    )
    parser.add_argument(
        "--node", type=int, metavar="N", help="this NUMA node only (default: the largest)"
    )
    parser.add_argument(
        "--instances",
        type=_count,
        default=1,
        metavar="K",
        help="processes side by side (default: 1)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and its environment, run nothing"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python script")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...")


def _count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


@dataclass(frozen=True)
class Launch:
    """Everything that is decided before a process starts."""

    placement: Placement
    environment: dict[str, str]
    arguments: tuple[str, ...]  # of torch.backends.xeon.run_cpu

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "torch.backends.xeon.run_cpu", *self.arguments]


def run(args: argparse.Namespace) -> int:
    launch = prepared(args)
    if args.dry_run:
        _show(launch, args.json)
        return 0
    for note in launch.placement.notes:
        write(f"launch: {note}", sys.stderr)
    os.environ.update(launch.environment)
    return _run(launch.arguments)


def prepared(args: argparse.Namespace) -> Launch:
    """Asks the machine and decides; every mistake of the user is raised here."""
    from lowering import machine
    from lowering.topology import topology

    _demand_tools()
    script = _script(args.script)
    allowed = frozenset(os.sched_getaffinity(0))
    cores = topology().one_thread_of_each_core(allowed)
    if not cores:
        raise UsageError("launch: /sys/devices/system/cpu does not tell the cores of this machine")
    quota = machine.cpu().cgroup_cores
    placement = place(cores, quota, args.ncores, args.node, args.instances)
    environment = {"OMP_NUM_THREADS": str(placement.cores_each)}
    if allocator := _allocator():
        environment["LD_PRELOAD"] = os.pathsep.join(
            filter(None, (allocator, os.environ.get("LD_PRELOAD", "")))
        )
    binding = [] if shutil.which("numactl") else ["--disable-numactl"]
    arguments = (
        *("--ninstances", str(len(placement.instances))),
        *("--ncores-per-instance", str(placement.cores_each)),
        *("--core-list", ",".join(str(cpu) for one in placement.instances for cpu in one)),
        *("--use-default-allocator", "--disable-iomp", *binding),
        *(script, *args.script_arguments),
    )
    return Launch(placement, environment, arguments)


def _demand_tools() -> None:
    if platform.system() != "Linux":
        raise UsageError(f"launch binds cores on Linux only, and this is {platform.system()}")
    if shutil.which("lscpu") is None or not (shutil.which("numactl") or shutil.which("taskset")):
        raise UsageError(
            "launch needs lscpu, and numactl or taskset: apt-get install -y util-linux numactl"
        )


def _script(name: str) -> str:
    path = Path(name)
    if path.is_file() and path.suffix == ".py":
        return name
    if path.is_file():
        raise UsageError(f"{name!r} is no Python script: launch takes a file that ends in .py")
    near = nearest(path.name, (file.name for file in path.parent.glob("*.py")))
    hint = f" Did you mean {str(path.parent / near)!r}?" if near else ""
    raise UsageError(f"there is no script {name!r}.{hint}")


# --- the allocator --------------------------------------------------------------------------------

_ALLOCATORS = ("libtcmalloc.so*", "libtcmalloc_minimal.so*", "libjemalloc.so*")


def _allocator() -> str:
    """Fewer page faults for large tensors that come and go; the user's own choice stays."""
    if "malloc" in os.environ.get("LD_PRELOAD", ""):
        return ""
    return next((str(file) for pattern in _ALLOCATORS for file in _libraries(pattern)), "")


def _libraries(pattern: str) -> Iterator[Path]:
    prefixes = (sys.prefix, os.environ.get("CONDA_PREFIX", ""), "/usr/local", "/usr")
    for prefix in filter(None, prefixes):
        for folder in ("lib", "lib64", f"lib/{platform.machine()}-linux-gnu"):
            yield from sorted(Path(prefix, folder).glob(pattern))


# --- doing it -------------------------------------------------------------------------------------


def _show(launch: Launch, as_json: bool) -> None:
    instances = [list(one) for one in launch.placement.instances]
    if as_json:
        record = {
            "instances": instances,
            "environment": launch.environment,
            "command": launch.command,
            "notes": list(launch.placement.notes),
        }
        write_json(record)
        return
    lines = [f"instance {i}: cores {' '.join(map(str, one))}" for i, one in enumerate(instances)]
    lines += [f"{name}={value}" for name, value in launch.environment.items()]
    lines += [shlex.join(launch.command), *(f"note: {note}" for note in launch.placement.notes)]
    write("\n".join(lines))


def _run(arguments: Sequence[str]) -> int:
    """In this process, so that what run_cpu drops is kept: how its processes ended."""
    run_cpu: Any = importlib.import_module("torch.backends.xeon.run_cpu")
    started: list[_Watched] = []
    start = run_cpu.start_processes

    def start_watched(*args: Any, **kwargs: Any) -> _Watched:
        started.append(_Watched(start(*args, **kwargs)))
        return started[-1]

    parser = argparse.ArgumentParser()
    run_cpu.create_args(parser)
    run_cpu.logger.setLevel(logging.WARNING)
    run_cpu.start_processes = start_watched
    try:
        run_cpu.main(parser.parse_args(list(arguments)))
    finally:
        run_cpu.start_processes = start
    return max((one.exit_code for one in started), default=1)


class _Watched:
    """Started processes that remember how they ended; the rest is theirs."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.exit_code = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._context.wait(*args, **kwargs)
        failures = sorted(result.failures.values(), key=lambda one: one.timestamp) if result else []
        code = failures[0].exitcode if failures else 0
        self.exit_code = code if code >= 0 else 128 - code  # by a signal, as a shell tells it
        return result
