"""A script that runs one graph on its own: eager against `unified`, with the report."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kernel_dispatch.reporting import GraphReport

_SCRIPT = '''\
"""Runs graph {index} of {function} by itself: eager against unified, on made-up values.

Written by kernel_dispatch {version} with torch {torch}. Original source: {place}
"""

import torch
import torch.fx
import torch.fx._symbolic_trace
from torch import device, inf, nan  # names that the printed graph uses
from torch.nn import *

import kernel_dispatch


{module}


def make(shape, stride, dtype, where, requires_grad):
    """A tensor of that layout with values that are neither zero nor large."""
    room = 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if 0 not in shape else 0
    if dtype.is_floating_point or dtype.is_complex:
        storage = torch.randn(room).to(dtype)
    else:
        storage = torch.randint(0, 2, (room,)).to(dtype)
    return storage.to(where).as_strided(shape, stride).requires_grad_(requires_grad)


def inputs():
    torch.manual_seed(0)
    return [
{inputs}
    ]


if __name__ == "__main__":
    model = Repro()
    with torch.set_grad_enabled({training}):
        expected = model(*inputs())
        compiled = torch.compile(model, backend="unified", options={options})
        actual = compiled(*inputs())
    for number, (a, b) in enumerate(zip(expected, actual)):
        if isinstance(a, torch.Tensor) and a.numel() and not a.is_complex():
            error = (a.double() - b.double()).abs().max().item()
            print(f"output {{number}}: shape {{tuple(a.shape)}}, largest difference {{error:.3g}}")
    print(kernel_dispatch.report(compiled).text(verbose=True))
'''


def reproducer(gm: fx.GraphModule, record: GraphReport) -> str:
    """The script as text; it needs nothing but torch and this package."""
    from torch._dynamo.debug_utils import NNModuleToString

    from kernel_dispatch._version import __version__

    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    return _SCRIPT.format(
        index=record.index,
        function=record.function,
        version=__version__,
        torch=torch.__version__,
        place=record.place or "unknown",
        module=NNModuleToString.convert(gm).strip(),
        inputs="\n".join(f"        {_expression(value)}," for value in values),
        training=record.facts.training,
        options={"level": record.level},
    )


def _expression(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape, stride = [[_number(n) for n in sizes] for sizes in (value.shape, value.stride())]
        return (
            f"make({shape}, {stride}, {value.dtype}, {value.device.type!r}, {value.requires_grad})"
        )
    return repr(_number(value))


def _number(value: Any) -> Any:
    """A concrete value for a symbolic one."""
    hint = getattr(getattr(value, "node", None), "hint", None)
    return value if hint is None else hint
