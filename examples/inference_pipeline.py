"""An inference pipeline: prepared once, called often, wherever it runs.

`prepare` returns the function that answers, and a description of the device. With a sample input,
the model is compiled before the first user waits for it. Inputs may be on any device, also inside
of a dict or a list: `to_device` moves what is there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch.backends import DeviceInfo, get_backend

Predict = Callable[[torch.Tensor], torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
    return nn.Sequential(layer, nn.Linear(32, 8)).eval()


def prepare(
    model: nn.Module, sample_input: torch.Tensor | None = None, level: str = "O2"
) -> tuple[Predict, DeviceInfo]:
    backend = get_backend()
    ready = backend.prepare_model(model, level)
    ready = backend.optimize_for_inference(ready, sample_input=sample_input)

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            answer = ready(backend.to_device(inputs))
        backend.synchronize()  # an accelerator may still be at it
        return answer

    return predict, backend.get_device_info()


def main(level: str = "O2", requests: int = 4) -> list[int]:
    """The class that each request was given."""
    predict, device = prepare(make_model(), torch.randn(1, 12, 32), level)
    memory = f", {device.total_memory_gb:.0f} GB" if device.total_memory_bytes else ""
    print(f"running on {device.device_name} ({device.device_type}{memory})")

    generator = torch.Generator().manual_seed(1)
    answers = []
    for number in range(requests):
        scores = predict(torch.randn(1, 12, 32, generator=generator))
        answers.append(int(scores.mean(dim=1).argmax()))
        print(f"request {number}: class {answers[-1]}")

    print(kernel_dispatch.report())
    return answers


if __name__ == "__main__":
    main()
