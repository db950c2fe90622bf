"""Small odd graphs, where a backend can only lose: what counts is how little it adds."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu

from benchmarks.workloads.initial_weights import draw
from kernel_dispatch.bench import Case, Workload


def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def one_op() -> Case:
    return Case(added, (torch.randn(8, 8), torch.randn(8, 8)))


def five_steps(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x * y + 1.0).tanh() - y).relu()


def five_ops() -> Case:
    return Case(five_steps, (torch.randn(8, 8), torch.randn(8, 8)))


def tiny_mlp() -> Case:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return Case(draw(model), (torch.randn(2, 16),))


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean()


def scalar_reduction() -> Case:
    return Case(mean_square, (torch.randn(64),))


def total(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def many_small_inputs() -> Case:
    return Case(total, tuple(torch.randn(4) for _ in range(40)))


def pick_by_hash(table: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integer arithmetic, bits, a comparison and a gather."""
    rows = ((keys * 31) ^ (keys >> 2)) % table.shape[0]
    return torch.where(keys % 2 == 0, table[rows], -table[rows]), rows


def integer_mix() -> Case:
    return Case(pick_by_hash, (torch.randn(32), torch.randint(1000, (16,))))


def rectified(x: torch.Tensor) -> torch.Tensor:
    return (x * 2.0 + 1.0).relu()


def empty_tensor() -> Case:
    return Case(rectified, (torch.randn(0, 16),))


def regrouped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    heads = x.unflatten(-1, (4, 8)).transpose(0, 1)
    return heads[1:], heads.flatten(1)[..., None]


def views_only() -> Case:
    return Case(regrouped, (torch.randn(6, 32),))


def scaled_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y) * 0.5


def non_contiguous() -> Case:
    """A transposed tensor, and every second column of another."""
    return Case(scaled_sum, (torch.randn(16, 8).t(), torch.randn(8, 32)[:, ::2]))


def branch_on_data(x: torch.Tensor) -> torch.Tensor:
    """Dynamo has to stop at the question, so this is two graphs with Python between them."""
    hidden = gelu(x * 1.5)
    if hidden.sum() > -1e6:
        return torch.tanh(hidden) + x
    return x


def graph_break() -> Case:
    return Case(branch_on_data, (torch.randn(8, 16),))


def branch_on_shape(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 4:
        return x.cumsum(0) * 0.5
    return x * 2.0


def python_branch() -> Case:
    return Case(branch_on_shape, (torch.randn(8, 16),))


WORKLOADS = (
    Workload("one-op", one_op, "a sum of 8x8", "overhead"),
    Workload("five-ops", five_ops, "five pointwise operations on 8x8", "overhead"),
    Workload("tiny-mlp", tiny_mlp, "16 to 32 to 4, 2 rows", "overhead"),
    Workload("scalar-reduction", scalar_reduction, "mean square of 64 numbers", "overhead"),
    Workload("many-small-inputs", many_small_inputs, "the sum of 40 tensors of 4", "overhead"),
    Workload(
        "integer-mix",
        integer_mix,
        "16 keys hashed by integer arithmetic into a table of 32",
        "overhead",
        trains=False,
    ),
    Workload("empty-tensor", empty_tensor, "three operations on 0x16", "overhead", trains=False),
    Workload("views-only", views_only, "five views of 6x32, no arithmetic", "overhead"),
    Workload("non-contiguous", non_contiguous, "a transposed and a strided 8x16", "overhead"),
    Workload("graph-break", graph_break, "a branch on the data amid 8x16", "overhead"),
    Workload("python-branch", python_branch, "a branch on the shape of 8x16", "overhead"),
)
