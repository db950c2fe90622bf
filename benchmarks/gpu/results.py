"""The file of results: read, added to row by row, and written whole in one step.

It is also how the two processes of a call talk: what is running is a row with that status.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.settings import CPU_NOTE
from kernel_dispatch.bench.surroundings import commit

FORMAT = "unified-gpu-results 1"
Row = dict[str, Any]
# ok: done. wrong: done, and the numbers are not right. failed: an error. absent: nothing there to
# run. running: begun, and the process did not come back (yet).
OK, WRONG, FAILED, ABSENT, RUNNING = "ok", "wrong", "failed", "absent", "running"


class ResultsError(Exception):
    """A file that is not ours, or from another card."""


@dataclass(frozen=True)
class Job:
    """What makes one row. `run` gives what is in it beside its key, status and seconds."""

    key: str  # command / case / ...: stable, it decides what is done already
    run: Callable[[], Row]


class Results:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.record = _read(path)

    @property
    def rows(self) -> list[Row]:
        return list(self.record["rows"].values())

    def of(self, command: str) -> list[Row]:
        return [row for row in self.rows if row["key"].startswith(f"{command}/")]

    def get(self, key: str) -> Row | None:
        return self.record["rows"].get(key)

    def last_call(self) -> str:
        return str(self.record["runs"][-1]["started"]) if self.record["runs"] else ""

    def begin_run(self, surroundings: dict[str, Any]) -> None:
        """Rows say which run they are from: a file may be continued at another commit."""
        cards = {run["card"] for run in self.record["runs"]} - {surroundings["card"]}
        if cards:
            raise ResultsError(
                f"{self._path} has results of {', '.join(sorted(cards))}; this is "
                f"{surroundings['card']}. Give another --json."
            )
        self.record["runs"].append(surroundings)
        self.save()

    def put(self, key: str, status: str, **more: Any) -> None:
        run = len(self.record["runs"]) - 1
        self.record["rows"][key] = {"key": key, "status": status, "run": run, **more}
        self.save()

    def remove(self, key: str) -> None:
        self.record["rows"].pop(key, None)
        self.save()

    def running(self) -> Row | None:
        return next((row for row in self.rows if row["status"] == RUNNING), None)

    def forget_failures(self, keys: set[str]) -> None:
        """Also what was absent: it may be there now."""
        for row in self.rows:
            if row["status"] != OK and row["key"] in keys:
                self.record["rows"].pop(row["key"])
        self.save()

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(self.record["rows"].values())
        half = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        half.write_text(json.dumps({**self.record, "rows": rows}, indent=1, default=str) + "\n")
        half.replace(self._path)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"format": FORMAT, "runs": [], "rows": {}}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] == FORMAT:
            return {**record, "rows": {row["key"]: row for row in record["rows"]}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"cannot read {path} as results of this script: {error}") from None
    raise ResultsError(f"{path} is of the format {record['format']!r}, not {FORMAT!r}")


def surroundings(device: str, arguments: list[str]) -> dict[str, Any]:
    return {
        "arguments": arguments,
        "commit": commit(),
        "torch": torch.__version__,
        "triton": _triton(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **_card(device),
    }


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _card(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"card": CPU_NOTE}
    properties = torch.cuda.get_device_properties(device)
    return {
        "card": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "units": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": _driver(),
        "limits": _asked("clocks.max.sm,clocks.max.mem,power.limit"),
    }


def _driver() -> str:
    return _asked("driver_version").splitlines()[0] if _asked("driver_version") else ""


def _asked(fields: str) -> str:
    """Of NVIDIA's tool; empty for other makers."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
