"""A target of one's own, in a package of one's own: nothing in `kernel_dispatch` has to change.

`TARGET` below is all of it: where tensors live, a probe, who compiles, and rows that say what it
does not take. Installed, a package names it in its pyproject.toml:

    [project.entry-points."kernel_dispatch.targets"]
    acme = "custom_target:TARGET"

`main` lays out what pip would leave of such a package in a temporary folder, and starts a new
process there, since targets are looked up once per process. Three graphs then show the table at
work: one that Acme takes, one that it does not (training), one in a dtype that it lacks. What it
does not take goes to the next target, and the report says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import kernel_dispatch
from lowering.capability import GRAPH, CapabilityRow
from lowering.contract import Compiled, Probe, Provider, Request, Target
from lowering.levels import Level


def compile_for_acme(request: Request) -> Compiled:
    """Where a vendor's compiler would be called. This one leaves out what computes nothing.

    The graph is ours to change. What is raised here becomes a fallback with its message.
    """
    graph = request.graph
    removed = 0
    for node in graph.graph.find_nodes(op="call_method", target="contiguous"):
        if node.args[0].meta["example_value"].is_contiguous():
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            removed += 1
    graph.recompile()
    return Compiled(run=graph.forward, notes=[f"acme left out {removed} operators"])


TARGET = Target(
    name="acme",
    summary="Acme accelerators",
    device_types=("cpu",),
    probe=lambda: Probe.yes("1.0"),
    priority=70,
    providers=(Provider("acmecc", "Acme's compiler", lambda: Probe.yes("1.0"), compile_for_acme),),
    rows=(
        CapabilityRow(
            "acme",
            "acmecc",
            GRAPH,
            Level.O1,
            priority=50,
            refused_dtypes=frozenset({"float64", "complex64"}),
            training=False,
            no_training="its kernels have no backward",
        ),
    ),
)


def install(folder: Path) -> dict[str, str]:
    """What pip leaves: the module, and a note of its entry points. Returns an environment."""
    distribution = folder / "acme-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text(
        f"[kernel_dispatch.targets]\nacme = {Path(__file__).stem}:TARGET\n"
    )
    (folder / Path(__file__).name).write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def scaled_sum(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous() * 2 + 1).sum()


def show() -> None:
    """In the process that has Acme: three graphs, and who took them."""
    inputs = {
        "inference": torch.randn(8),
        "training": torch.randn(8, requires_grad=True),
        "float64": torch.randn(8, dtype=torch.float64),
    }
    found: dict[str, Any] = {"targets": kernel_dispatch.available_targets()}
    for name, x in inputs.items():
        torch.compiler.reset()
        compiled = torch.compile(scaled_sum, backend="unified", options={"level": "O1"})
        torch.testing.assert_close(compiled(x), scaled_sum(x))
        (graph,) = kernel_dispatch.report(compiled)
        print(graph, file=sys.stderr)
        refused = [row for row in graph.plan.rejected if row.target == "acme"]
        why = "; ".join(reason.text for row in refused for reason in row.reasons)
        found[name] = {
            "target": graph.target,
            "provider": graph.provider,
            "runs": graph.runs,
            "notes": graph.notes,
            "why_not_acme": why,
        }
    print(json.dumps(found))


def main() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        shown = subprocess.run(
            [sys.executable, "-c", f"import {Path(__file__).stem} as acme; acme.show()"],
            env=install(Path(folder)),
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found = json.loads(shown.stdout)
    print("targets here:", ", ".join(found["targets"]))
    for name in ("inference", "training", "float64"):
        row = found[name]
        why = f" (acme: {row['why_not_acme']})" if row["why_not_acme"] else ""
        print(f"{name}: {row['target']}, computed by {row['provider']}{why}")
    return found


if __name__ == "__main__":
    main()
