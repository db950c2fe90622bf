"""Run by torchrun on every rank: one training or inference case, compiled against uncompiled.

Each level starts from a fresh Dynamo. Exits non-zero with the reason when a number or a report is
wrong. Usage: worker.py CASE LEVEL...
"""

from __future__ import annotations

import copy
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import kernel_dispatch
from lowering.errors import UnifiedWarning


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 + rank))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
        for name, parameter in module.named_parameters()
        if (grad := parameter.grad) is not None
    }


def train(module: nn.Module, compiled, rank: int) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    for _ in range(2):  # the second step runs without any compilation
        module.zero_grad()
        compiled(batch(rank)).square().mean().backward()
    return gradients(module)


def case_ddp(level: str, rank: int) -> kernel_dispatch.Report:
    plain = DistributedDataParallel(model())
    expected = train(plain, plain, rank)
    module = DistributedDataParallel(model())
    compiled = torch.compile(module, backend="unified", options={"level": level})
    same_gradients(train(module, compiled, rank), expected)
    return kernel_dispatch.report()


def case_fsdp2(level: str, rank: int) -> kernel_dispatch.Report:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded() -> nn.Module:
        module = model()
        for block in module:
            fully_shard(block, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    plain = sharded()
    expected = train(plain, plain, rank)
    module = sharded()
    for block in module:
        block.compile(backend="unified", options={"level": level})
    same_gradients(train(module, module, rank), expected)
    return kernel_dispatch.report()


def case_tensor_parallel(level: str, rank: int) -> kernel_dispatch.Report:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block = Block()
    dist.broadcast_object_list(state := [block.state_dict()], src=0)
    block.load_state_dict(state[0])
    x = batch(0)
    expected = block(x)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallel = parallelize_module(copy.deepcopy(block), mesh, plan)
    compiled = torch.compile(parallel, backend="unified", options={"level": level})
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    return kernel_dispatch.report()


def same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys() and actual, (actual.keys(), expected.keys())
    for name, grad in expected.items():
        assert grad.abs().max() > 0, f"{name}: the test is degenerate"
        torch.testing.assert_close(
            {name: actual[name]}, {name: grad}, rtol=1e-4, atol=1e-6
        )  # as a mapping, so that a failure names the parameter


def main() -> None:
    case, *levels = sys.argv[1:]
    warnings.simplefilter("error", UnifiedWarning)
    dist.init_process_group("gloo")
    for level in levels:
        torch._dynamo.reset()
        check(case, level, dist.get_rank())
    dist.barrier()  # nobody tears gloo down while another rank still talks
    dist.destroy_process_group()
    # The verdict is out. Gloo's threads sometimes abort the interpreter's own shutdown.
    sys.stdout.flush()
    os._exit(0)


def check(case: str, level: str, rank: int) -> None:
    graphs = globals()[f"case_{case}"](level, rank)
    assert graphs, "the backend was never called"
    assert not graphs.fallbacks, graphs.text()
    assert {graph.level for graph in graphs} == {level}
    assert all(graph.target == "cpu" for graph in graphs)
    assert sum(graph.runs for graph in graphs) > 0
    if level == "O2":
        assert any(graph.runs_by_provider.get("inductor") for graph in graphs), graphs.text()
    plans: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(plans, [graph.plan.fingerprint() for graph in graphs])
    assert all(plan == plans[0] for plan in plans), plans
    if rank == 0:
        print(f"ok {case} {level}: {len(graphs)} graphs on every rank, plans {plans[0]}")


if __name__ == "__main__":
    main()
