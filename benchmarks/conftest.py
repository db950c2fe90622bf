"""Benchmarks run in inference mode unless they say otherwise, and report to the JSON file."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info["torch"] = torch.__version__
    machine_info["threads"] = torch.get_num_threads()
    machine_info["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
