"""XLA's own cache on disk: named before the first computation, and only where it can be read."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Python

_RUN = """
import os, torch, kernel_dispatch
from lowering.contract import Probe
from lowering.providers import torch_xla as provider
started = provider._started()
if KIND != "CPU":
    provider._started = lambda: Probe.yes("2.9", device="xla:0", pjrt=KIND, notes=[])
torch.compile(lambda x: x.sin() + 1, backend="unified")(torch.ones(3))
(graph,) = kernel_dispatch.report()
print(graph.runs_by_provider, os.environ.get("XLA_PERSISTENT_CACHE_PATH"))
"""


def _run(python: Python, kind: str, **environ: str) -> str:
    script = _RUN.replace("KIND", repr(kind))
    return python(script, UNIFIED_DEVICE="xla", PJRT_DEVICE="CPU", **environ).stdout.strip()


def test_the_cache_folder_is_ours(python: Python, tmp_path: Path) -> None:
    told = _run(python, "TPU", UNIFIED_CACHE_DIR=str(tmp_path))
    folder = told.rpartition(" ")[2]
    assert told.startswith("{'torch_xla': 1}")
    assert Path(folder).parent == tmp_path and any(Path(folder).iterdir())


def test_the_users_own_stays(python: Python, tmp_path: Path) -> None:
    told = _run(
        python, "TPU", UNIFIED_CACHE_DIR=str(tmp_path), XLA_PERSISTENT_CACHE_PATH="/tmp/own-xla"
    )
    assert told.endswith("/tmp/own-xla") and not list(tmp_path.glob("xla-*"))


def test_none_for_a_device_that_cannot_read_it_back(python: Python, tmp_path: Path) -> None:
    assert _run(python, "CPU", UNIFIED_CACHE_DIR=str(tmp_path)).endswith("None")
    assert not list(tmp_path.glob("xla-*"))
