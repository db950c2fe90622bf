"""`unified` against torch_xla's own backend, on tensors that live on the device already.

    PJRT_DEVICE=CPU .venv-xla/bin/python -m benchmarks.lanes.xla --out docs/results/lanes/xla.json

Both contenders compute the same model in one process, in turn; a call ends when its output is on
the CPU. A ratio is the median over the rounds of (unified / openxla): below 1, unified is faster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kernel_dispatch
from kernel_dispatch.bench.surroundings import commit
from lowering import machine

_WARM_UP = 3
Step = Callable[[], float]


def _bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = BertModel(BertConfig(num_attention_heads=4, **sizes))
    return model, {"input_ids": torch.arange(64).reshape(1, 64)}


def _llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(vocab_size=1000, use_cache=False, **sizes, **heads))
    return model, {"input_ids": torch.arange(64).reshape(1, 64)}


def _perceptron() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
    return torch.nn.Sequential(*layers), {"input": torch.ones(4, 64)}


MODELS = {"bert": _bert, "llama-style": _llama, "perceptron": _perceptron}


def _step(backend: str, name: str, training: bool, device: Any) -> tuple[Step, Any]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.train(training).to(device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    fast = torch.compile(model, backend=backend)
    inputs = {key: value.to(device) for key, value in inputs.items()}

    def step() -> float:
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            result = fast(**inputs)
            output = result if isinstance(result, torch.Tensor) else result[0]
            if training:
                output.square().mean().backward()
                next(model.parameters()).grad.cpu()  # type: ignore[union-attr]
                model.zero_grad()
            output.cpu()
        return time.perf_counter() - start

    return step, fast


def measure(name: str, training: bool, rounds: int) -> dict[str, Any]:
    import torch_xla

    torch.compiler.reset()
    steps = {
        backend: _step(backend, name, training, torch_xla.device())
        for backend in ("openxla", "unified")
    }
    for step, _ in steps.values():
        for _ in range(_WARM_UP):
            step()
    times: dict[str, list[float]] = {backend: [] for backend in steps}
    for number in range(rounds):
        for backend in sorted(steps, reverse=bool(number % 2)):
            times[backend].append(steps[backend][0]())
    pairs = zip(times["unified"], times["openxla"], strict=True)
    (graph,) = kernel_dispatch.report(steps["unified"][1])
    return {
        "model": name,
        "training": training,
        "rounds": rounds,
        "milliseconds": {n: round(1e3 * statistics.median(t), 3) for n, t in times.items()},
        "ratio": round(statistics.median(one / other for one, other in pairs), 4),
        "report": {**graph.runs_by_provider, "transfers": graph.transfers},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import torch_xla

    rows = []
    for name in MODELS:
        for training in (False, True):
            rows.append(measure(name, training, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
    found = {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": machine.cpu().model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torch_xla": torch_xla.__version__,
        "rows": rows,
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
