"""What the torch that runs here has, for tests that need it: each answer is why not, or empty."""

from __future__ import annotations

import importlib
import weakref

import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from lowering.targets.cuda import torch_minor


def no_backward_at_once() -> str:
    """Plans want the backward lowered with the forward."""
    config = importlib.import_module("torch._functorch.config")
    if hasattr(config, "force_non_lazy_backward_lowering"):
        return ""
    return "this torch lowers a backward when it is called, and a plan calls none"


def no_amd_linker() -> str:
    """Older Tritons want ROCm's linker; later ones bring it."""
    backend = importlib.import_module("triton.backends.amd.compiler").HIPBackend
    find = getattr(backend, "path_to_rocm_lld", None)
    try:
        if find is not None:
            find()
    except Exception as error:  # noqa: BLE001  (Triton raises a bare Exception)
        return f"this Triton links code for AMD with ROCm only: {error}"
    return ""


def no_fused_grouped_heads() -> str:
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    if torch._fused_sdp_choice(q, k, k, enable_gqa=True) == 0:  # the kernel made of products
        return "this torch computes attention with grouped heads op by op: none is left to match"
    return ""


def pads_otherwise_than_it_says() -> str:
    """Compiled code lays memory out as fake tensors say."""
    x = torch.zeros(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    real = F.pad(x, (1, 1, 1, 1), mode="reflect")
    with FakeTensorMode() as mode:
        fake = F.pad(mode.from_tensor(x), (1, 1, 1, 1), mode="reflect")
    if fake.stride() == real.stride():
        return ""
    return "this torch lays reflection padding out otherwise than its fake tensors say"


def inverts_singular_matrices() -> str:
    """Seen with torch 2.8, 2.9 and 2.11; 2.13 raises."""
    if torch_minor() >= (2, 12):
        return ""
    return (
        "Inductor of this torch gives NaN for the inverse of a singular matrix, where eager raises"
    )


def keeps_code_for_replaced_memory() -> str:
    """Later ones compile anew for a weight whose `data` has other sizes or strides."""
    compiled = CompileCounter()
    linear = torch.nn.Linear(4, 4)
    call = torch.compile(linear, backend=compiled)
    for weight in (linear.weight.data, linear.weight.data.t()):
        linear.weight.data = weight
        call(torch.zeros(1, 4))
    if compiled.frame_count > 1:
        return ""
    return "this torch runs what it compiled for other sizes and strides of a weight"


def refuses_to_swap_compiled_parameters() -> str:
    """Earlier ones keep weak references to parameters, and `swap_tensors` refuses these."""
    linear = torch.nn.Linear(4, 4)
    torch.compile(linear, backend="aot_eager")(torch.zeros(1, 4))
    if not weakref.getweakrefs(linear.weight):
        return ""
    return "this torch keeps weak references to the parameters of what it compiled"
