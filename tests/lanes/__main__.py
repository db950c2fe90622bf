"""`python -m tests.lanes NAME`: build the lane's environment if need be, run its tests there.

Exit status: that of the first tests that fail; 0 where disk space was too low or the time was up,
which is said.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.lanes import BY_NAME, MAIN, ROOT, SHORT, Lane

_PAUSE = 10  # seconds before the one retry of an index that did not answer
_BUILD = 5  # minutes, about: less is not worth an environment


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    lane = BY_NAME[options.lane]
    here = _is_current(lane)
    lacking = "" if here else _lacking(options)
    if lacking:
        _say(f"SKIPPED: lane {lane.name} was NOT run. {lacking}")
        return 0
    end = time.monotonic() + options.minutes * 60
    try:
        if not here:
            _install(lane)
        _say(f"lane {lane.name}: {_versions(lane)}; {_size(lane.folder)}")
        return 0 if options.only_build else _test(lane, options, end)
    finally:
        if options.remove and not here:
            shutil.rmtree(lane.folder, ignore_errors=True)
            _say(f"lane {lane.name}: {lane.folder.name} was made for this run and is removed")


def _lacking(options: argparse.Namespace) -> str:
    """What a new environment has too little of, in words."""
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < options.least_disk:
        return (
            f"Its environment needs disk space of up to {options.least_disk} GB, and "
            f"{free:.0f} GB are free where {ROOT} is."
        )
    if options.minutes < _BUILD:
        return f"Its environment takes about {_BUILD} minutes, and it has {options.minutes:g}."
    return ""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lanes", description=__doc__)
    parser.add_argument("lane", choices=sorted(BY_NAME))
    parser.add_argument("--only-build", action="store_true", help="run no tests")
    parser.add_argument(
        "--short", action="store_true", help="of the main suite the quick tier and the window only"
    )
    parser.add_argument(
        "--remove", action="store_true", help="remove the environment if this run made it"
    )
    parser.add_argument(
        "--least-disk", type=float, default=0, metavar="GB", help="skip, and say so, below it"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="N",
        help="stop then, and say what was not run; ends at the first failure",
    )
    parser.add_argument("--workers", type=int, default=2, help="test processes (default: 2)")
    return parser.parse_args(argv)


# --- the environment ------------------------------------------------------------------------------


def _is_current(lane: Lane) -> bool:
    stamp = _stamp(lane)
    return stamp.is_file() and stamp.read_text() == _wanted(lane)


def _stamp(lane: Lane) -> Path:
    return lane.folder / ".ready-lane"


def _wanted(lane: Lane) -> str:
    """Everything that an environment follows from; another text means another environment."""
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    return json.dumps([_minor(), lane.requirements, project])


def _minor() -> str:
    return "{}.{}".format(*sys.version_info)


def _install(lane: Lane) -> None:
    """Into the folder as it stands: pip changes only what does not fit."""
    start = time.monotonic()
    python = lane.folder / "bin" / "python"
    if not _runs(python):
        _say(f"lane {lane.name}: a new environment in {lane.folder.name}")
        venv.create(lane.folder, with_pip=True, clear=True)
    _stamp(lane).unlink(missing_ok=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--editable", *lane.requirements]
    if subprocess.run(command, cwd=ROOT).returncode:
        _say(f"lane {lane.name}: pip failed; once more in {_PAUSE} seconds")
        time.sleep(_PAUSE)
        subprocess.run(command, cwd=ROOT, check=True)
    _stamp(lane).write_text(_wanted(lane))
    _say(f"lane {lane.name}: installed in {time.monotonic() - start:.0f} s")


def _runs(python: Path) -> bool:
    """An environment of another Python, or of one that was removed, is made anew."""
    told = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        done = subprocess.run([str(python), "-c", told], capture_output=True, text=True)
    except OSError:
        return False
    return done.stdout.strip() == _minor()


def _versions(lane: Lane) -> str:
    names = ["torch", *(lane.beside or ())[:1]]
    told = f"from importlib.metadata import version as v; print(*[n + ' ' + v(n) for n in {names}])"
    return subprocess.check_output([_python(lane), "-c", told], text=True).strip()


def _python(lane: Lane) -> str:
    return str(lane.folder / "bin" / "python")


def _size(folder: Path) -> str:
    files = (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return f"{sum(file.stat().st_size for file in files) / 1e9:.1f} GB in {folder.name}"


# --- the tests ------------------------------------------------------------------------------------


def _test(lane: Lane, options: argparse.Namespace, end: float) -> int:
    """What every torch has to pass, then what only this lane can run."""
    start = time.monotonic()
    spread = ["-n", str(options.workers), "--dist", "loadfile"]
    runs = [[*spread, *arguments] for arguments in (SHORT if options.short else MAIN)]
    if lane.tests.is_dir():
        runs.append([*spread, str(lane.tests.relative_to(ROOT))])
    _run(lane, ["tests.support.built_kernels", str(_cache(lane))], end)
    codes = [_pytest(lane, arguments, end) for arguments in runs]
    _say(f"lane {lane.name}: tests took {(time.monotonic() - start) / 60:.1f} minutes")
    return next((code for code in codes if code), 0)


def _pytest(lane: Lane, arguments: list[str], end: float) -> int:
    # What is cut off reports no failures: so none may have been seen before.
    first = [] if math.isinf(end) else ["--exitfirst"]
    return _run(lane, ["pytest", "-q", "-o", f"cache_dir={_cache(lane)}", *first, *arguments], end)


def _cache(lane: Lane) -> Path:
    """The lane's own: kernels of ours are built for one torch."""
    return lane.folder / ".pytest_cache"


def _run(lane: Lane, module: list[str], end: float) -> int:
    """Its exit status; 0 where the time was up, which is said."""
    # One thread per worker: idle OpenMP threads would spin on the other's core.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **lane.variables}
    command = [_python(lane), "-m", *module]
    _say(f"lane {lane.name}: {' '.join(command[1:])}")
    left = None if math.isinf(end) else max(0.0, end - time.monotonic())
    try:
        return subprocess.run(command, cwd=ROOT, env=variables, timeout=left).returncode
    except subprocess.TimeoutExpired:
        _say(f"NOT FINISHED: lane {lane.name}: the time was up: {' '.join(module)}")
        return 0


def _say(text: str) -> None:
    print(f"=== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
