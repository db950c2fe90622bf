"""One training loop for every machine: plain torch, on the backend that is best where it runs.

`get_backend()` takes the best device that is here. `prepare_model` moves the model there, its
parameters in place, so that an optimizer that holds them stays valid, and compiles it with
`unified`. The report says what really computed forward and backward.
"""

from __future__ import annotations

import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch.backends import OptimizationLevel, get_backend


def make_model() -> nn.Module:
    """Plain torch: no line of a model knows where it will run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def make_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Which quarter of the circle do the first two numbers point into?"""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        x = torch.randn(32, 16, generator=generator)
        batches.append((x, 2 * (x[:, 0] > 0) + (x[:, 1] > 0)))
    return batches


def main(epochs: int = 3, level: str = "O2") -> list[float]:
    """The mean loss of every epoch."""
    backend = get_backend()
    print(f"training on {backend.get_device_info().device_name} ({backend.BACKEND_NAME})")

    model = backend.prepare_model(make_model(), OptimizationLevel.from_string(level))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = backend.optimize_for_training(model, optimizer)

    losses = []
    for epoch in range(epochs):
        total = 0.0
        batches = make_batches(20)
        for batch in batches:
            x, wanted = backend.to_device(batch)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), wanted)
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")

    print(kernel_dispatch.report(model))
    return losses


if __name__ == "__main__":
    main()
