"""A call with a sample, which compiles a model and leaves no trace in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Random state and buffers (running statistics) as they were; gradients as the mode asks."""
    gradients = torch.is_grad_enabled() and model.training
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with _random_state_of(device), torch.set_grad_enabled(gradients):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                # One that nobody wrote into stays untouched, or weights that were folded with it
                # would be packed again. Its version does not tell: batch norm writes past it.
                if buffer.layout != torch.strided or not torch.equal(buffer, before):
                    buffer.copy_(before)


def _random_state_of(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """torch's fork_rng knows GPUs by their number; others have the CPU's state put back only."""
    if device.type in ("cuda", "xpu"):
        return torch.random.fork_rng([device.index], device_type=device.type)
    return torch.random.fork_rng([])
