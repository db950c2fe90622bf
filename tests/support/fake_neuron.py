"""torch_neuronx, in both of its kinds, as a fake on a path: it records its calls and computes by
calling what it was given. What the real one refuses or forgets, this one does too: an artifact
takes the sizes that it was traced with only, and keeps the weights of that moment."""

from __future__ import annotations

from pathlib import Path

import torch

_TRACED = '''
"""The package on top of torch_xla: traces modules."""
import copy
import torch

calls = []

class Artifact(torch.nn.Module):
    def __init__(self, function, example_inputs, inlined):
        super().__init__()
        self.function, self.inlined = copy.deepcopy(function), inlined
        self.sizes = [(tuple(x.shape), x.dtype) for x in example_inputs]

    def forward(self, *inputs):
        assert [(tuple(x.shape), x.dtype) for x in inputs] == self.sizes, "another size"
        with torch.no_grad():
            results = self.function(*inputs)
        return results[0] if len(results) == 1 else results

def trace(func, example_inputs, *_, input_output_aliases={}, compiler_workdir=None,
          compiler_args=None, partitioner_config=None, inline_weights_to_neff=True,
          cpu_backend=False):
    assert not any(p.requires_grad for p in func.parameters())
    assert all(type(x) is torch.Tensor and not x.requires_grad for x in example_inputs)
    calls.append(("trace", len(example_inputs), len(func.state_dict()), tuple(compiler_args)))
    return Artifact(func, example_inputs, inline_weights_to_neff)

def replace_weights(neuron_model, weights):
    assert not neuron_model.inlined, "the weights were inlined"
    calls.append(("replace_weights", len(weights)))
    neuron_model.function.load_state_dict(weights)

def move_trace_to_device(trace, device_id):
    calls.append(("move", device_id))
'''

_NATIVE = '''
"""The package that is a device of torch: registers a compiler for torch.compile."""
calls = []

def _autoload():
    calls.append("autoloaded")
'''

_BACKEND = """
import torch_neuronx

def neuron_backend(gm, example_inputs, *, options=None, mode="default"):
    assert mode == "default"
    torch_neuronx.calls.append((len(example_inputs), options))

    def run(*args):
        torch_neuronx.calls.append("ran")
        return gm.forward(*args)

    return run
"""
_ENTRY_POINTS = """[torch.backends]
torch_neuronx = torch_neuronx:_autoload

[torch_dynamo_backends]
neuron = torch_neuronx.neuron_dynamo_backend.backend:neuron_backend
"""


def fitting() -> str:
    """A version for this torch."""
    return ".".join(torch.__version__.split(".")[:2]) + ".0.1"


def install(folder: Path, version: str = "", native: bool = False) -> str:
    """The distribution as pip would leave it; returns what belongs on PYTHONPATH."""
    version = version or fitting()
    site = folder / "neuron_site"
    info = site / f"torch_neuronx-{version}.dist-info"
    package = site / "torch_neuronx"
    for made in (info, package):
        made.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n\n"
    )
    (package / "__init__.py").write_text(_NATIVE if native else _TRACED)
    if native:
        (info / "entry_points.txt").write_text(_ENTRY_POINTS)
        backend = package / "neuron_dynamo_backend"
        backend.mkdir()
        (backend / "__init__.py").write_text("")
        (backend / "backend.py").write_text(_BACKEND)
    return str(site)
