"""`unified` against IPEX's own ways, in the environment of torch 2.8 and IPEX 2.8.

    .venv-ipex/bin/python -m benchmarks.lanes.ipex --out docs/results/lanes/ipex.json

Each contender has a process of its own, because importing IPEX changes torch, and computes the same
model from the same seed. In each round each of them makes one call, one after the other: what
disturbs the machine falls on all of them. A ratio is the median over the rounds of
(IPEX compiled / contender): above 1, the contender is faster. Every output is compared with eager
in float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kernel_dispatch.bench.surroundings import commit
from lowering import machine

_REST_S = 0.03  # OpenMP threads of the last contender spin for some milliseconds after their call
_WARM_UP = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BASELINE = "ipex-compiled"


# --- models: the published sizes, random weights, no download -------------------------------------


def _bert() -> tuple[torch.nn.Module, torch.Tensor]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), torch.arange(128).reshape(1, 128)


def _llama() -> tuple[torch.nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12}
    config = LlamaConfig(vocab_size=32000, use_cache=False, **sizes, **heads)
    return LlamaModel(config), torch.arange(256).reshape(1, 256)


def _resnet() -> tuple[torch.nn.Module, torch.Tensor]:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig()), torch.rand(1, 3, 224, 224)


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "bert-base": _bert,
    "llama-style": _llama,
    "resnet-50": _resnet,
}


# --- contenders -----------------------------------------------------------------------------------


def _unified(level: str) -> Callable[[torch.nn.Module], Any]:
    return lambda model: torch.compile(model, backend="unified", options={"level": level})


def _ipex_optimize(model: torch.nn.Module, **more: Any) -> Any:
    import intel_extension_for_pytorch as ipex

    kind = next(model.parameters()).dtype
    return ipex.optimize(model, dtype=None if kind is torch.float32 else kind, **more)


CONTENDERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "eager": lambda model: model,
    "unified-O1": _unified("O1"),
    "unified-O2": _unified("O2"),
    BASELINE: lambda model: torch.compile(_ipex_optimize(model), backend="ipex"),
    # As IPEX's documentation has it for torch.compile.
    "ipex-compiled-unpacked": lambda model: torch.compile(
        _ipex_optimize(model, weights_prepack=False), backend="ipex"
    ),
    "ipex-optimized": _ipex_optimize,
}


# --- one contender's process: a line in, a line out -----------------------------------------------


def _work(contender: str, model: str, dtype: str) -> None:
    answer = sys.stdout
    with redirect_stdout(sys.stderr), torch.no_grad():
        module, example, first = _made(model, dtype)
        reference = _first_output(module.double()(_as(first, torch.float64)))
        module, example, _ = _made(model, dtype)
        eager = _first_output(module(example))
        fn = CONTENDERS[contender](module)
        start = time.perf_counter()
        got = _first_output(fn(example))
        compile_s = time.perf_counter() - start
        for _ in range(_WARM_UP):
            fn(example)
        record = {
            "error": _error(got, reference),
            "eager_error": _error(eager, reference),
            "compile_s": round(compile_s, 1),
            "regions": _regions(fn) if contender.startswith("unified") else {},
        }
        print(json.dumps(record), file=answer, flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            fn(example)
            print(json.dumps(time.perf_counter() - start), file=answer, flush=True)


def _made(model: str, dtype: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module, example = MODELS[model]()
    kind = DTYPES[dtype]
    example = _as(example, kind)
    return module.eval().to(kind), example, example


def _as(example: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return example.to(dtype) if example.is_floating_point() else example


def _first_output(result: Any) -> torch.Tensor:
    return result[0].double()


def _error(got: torch.Tensor, reference: torch.Tensor) -> float:
    return float((got - reference).norm() / reference.norm())


def _regions(fn: Any) -> dict[str, int]:
    import kernel_dispatch

    found: dict[str, int] = {}
    for graph in kernel_dispatch.report(fn):
        for region in graph.regions:
            key = f"{region.name}:{region.provider}"
            found[key] = found.get(key, 0) + region.count
    return found


# --- all of them, taking turns --------------------------------------------------------------------


class _Client:
    def __init__(self, contender: str, model: str, dtype: str) -> None:
        self.name = contender
        command = [sys.executable, "-m", "benchmarks.lanes.ipex", "--work", contender, model, dtype]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("SHOW_STDERR") else subprocess.DEVNULL,
            text=True,
        )
        self.record: Any = self._answer()  # one after the other: compiling is not shared

    def call(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: run with SHOW_STDERR=1 to see why")
        return json.loads(line)

    def end(self) -> None:
        self._process.communicate()


def compare(model: str, dtype: str, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    clients = [_Client(name, model, dtype) for name in names]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        # Who comes first changes, so that nobody always follows the same one.
        for client in [*clients[turn % len(clients) :], *clients[: turn % len(clients)]]:
            time.sleep(_REST_S)
            times[client.name].append(client.call())
    for client in clients:
        client.end()
    base = times[BASELINE]
    return {
        client.name: {
            "median_ms": round(statistics.median(times[client.name]) * 1e3, 3),
            "fastest_ms": round(min(times[client.name]) * 1e3, 3),
            "ratio": _ratio(base, times[client.name]),
            "ratio_of_fastest": round(min(base) / min(times[client.name]), 3),
            **client.record,
        }
        for client in clients
    }


def _ratio(base: Sequence[float], mine: Sequence[float]) -> float:
    return round(statistics.median(b / m for b, m in zip(base, mine, strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS)
    )
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    args = parser.parse_args()
    if args.work:
        _work(*args.work)
        return
    names = [name for name in CONTENDERS if name in {*args.contenders, BASELINE}]
    results: dict[str, Any] = {"surroundings": _surroundings(args.rounds), "results": {}}
    for model in args.models:
        for dtype in args.dtypes:
            found = compare(model, dtype, args.rounds, names)
            results["results"][f"{model} {dtype}"] = found
            print(f"\n{model} {dtype}", flush=True)
            for name, row in found.items():
                print(
                    f"  {name:<24}{row['median_ms']:>9.2f} ms  x{row['ratio']:<6}"
                    f" (fastest {row['fastest_ms']:.2f} ms, x{row['ratio_of_fastest']})"
                    f"  error {row['error']:.1e}, eager's {row['eager_error']:.1e}"
                    f"  {row['regions'] or ''}",
                    flush=True,
                )
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(results, indent=1) + "\n")


def _surroundings(rounds: int) -> dict[str, Any]:
    cpu = machine.cpu()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu.model,
        "isa": sorted(cpu.isa),
        "cores": cpu.effective_cores,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "ipex": metadata.version("intel-extension-for-pytorch"),
        "transformers": metadata.version("transformers"),
        "rounds": rounds,
        "load_before": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
