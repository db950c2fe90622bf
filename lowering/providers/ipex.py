"""Intel's extension (IPEX) where it fits torch exactly: its C++ operators, region by region.

What `ipex.optimize` does to a module (BatchNorm folded into convolutions, weights laid out once,
activations in the same call) is done here to regions of the graph, so that it shows in the report
and follows a weight that changes. Its attention in bfloat16 is the part that nobody else has.

Only its C++ library is loaded, and only when a row of this provider is about to be taken (or is
measured by `calibrate`): that alone replaces some of torch's own CPU kernels in this process
(layer_norm, cat, index_select, matmul and a dozen others). `import intel_extension_for_pytorch`
patches Python classes as well and takes seconds; it still works before and after.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lowering import machine, observing
from lowering.contract import Probe, Provider, RegionMaker
from lowering.packing import PackedWeights
from lowering.providers import mkldnn
from lowering.regions.attention import Attention
from lowering.regions.convolution import Convolution
from lowering.regions.epilogue import Abilities, Epilogue
from lowering.regions.linear import Linear
from lowering.targets.cuda import distribution_version, torch_minor

DISTRIBUTION = "intel-extension-for-pytorch"
_PACKAGE = "intel_extension_for_pytorch"
_LIBRARY = "lib/libintel-ext-pt-cpu.so"
ARCHIVED = (
    "IPEX is archived: its last release is 2.8, which needs torch 2.8 exactly, and stock torch "
    "(oneDNN and Inductor on CPU, torch.xpu on GPU) replaces it"
)


def probe() -> Probe:
    """By metadata only. Under another torch, importing IPEX fails, or worse: its binary reads
    torch's structures as they were then."""
    version = distribution_version(DISTRIBUTION)
    if not version:
        return Probe.no(f"IPEX is not installed, and nothing is missing: {ARCHIVED}")
    minor = ".".join(map(str, torch_minor()))
    if version.split(".")[:2] != minor.split("."):
        return Probe.no(
            f"IPEX {version} is ignored under torch {minor}: their minor versions differ; "
            f"{ARCHIVED}",
            f"pip uninstall -y {DISTRIBUTION}",
            installed=version,
        )
    if "avx2" not in machine.cpu().isa:
        return Probe.no(f"IPEX {version} needs a CPU with AVX2", installed=version)
    if _library_file() is None:
        return Probe.no(
            f"IPEX {version} is registered as installed, but {_LIBRARY} is missing from it",
            f"pip install --force-reinstall --no-deps {DISTRIBUTION}=={version}",
            installed=version,
        )
    return Probe.yes(version, notes=[f"matches torch {minor}; {ARCHIVED}"])


def version() -> str:
    """For measured profiles, which do not outlive another IPEX; empty where it is not used."""
    return probe().version


def _library_file() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    files = (Path(folder) / _LIBRARY for folder in folders)
    return next((file for file in files if file.is_file()), None)


@functools.cache
def cannot_load() -> str:
    """Loads the operators, once. Empty if they are there, else why not."""
    try:
        torch.ops.load_library(str(_library_file()))
        torch.ops.ipex_prepack.linear_prepack  # noqa: B018  (raises if nothing registered it)
    except Exception as error:  # noqa: BLE001  (the loader's word becomes the reason)
        return f"IPEX does not load: {type(error).__name__}: {error}"
    return ""


def operators() -> Any:
    """IPEX's operators. A graph out of torch's caches may call before any row was looked at."""
    if why := cannot_load():
        raise RuntimeError(why)
    return torch.ops.ipex_prepack


weights = PackedWeights()

# Our name of an activation -> IPEX's, and its arguments made of the activation's two numbers.
_ATTRIBUTES: dict[str, tuple[str, Any]] = {
    "none": ("", lambda a, b: ()),
    "relu": ("relu_", lambda a, b: ()),
    "gelu_erf": ("gelu_", lambda a, b: ("none",)),
    "gelu_tanh": ("gelu_", lambda a, b: ("tanh",)),
    "silu": ("swish_", lambda a, b: ()),
    "tanh": ("tanh_", lambda a, b: ()),
    "sigmoid": ("sigmoid_", lambda a, b: ()),
    "hardswish": ("hardswish_", lambda a, b: ()),
    "hardsigmoid": ("hardsigmoid_", lambda a, b: ()),
    "clamp": ("hardtanh_", lambda a, b: (a, b)),
    "leaky_relu": ("leaky_relu_", lambda a, b: (a,)),
    "elu": ("elu_", lambda a, b: (a, 1.0, 1.0)),
}
_ABILITIES = Abilities(activations=frozenset(_ATTRIBUTES) - {"none"})
_library = torch.library.Library("kernel_dispatch", "FRAGMENT")

# --- linear ---------------------------------------------------------------------------------------

_library.define(
    "ipex_linear(Tensor input, Tensor weight, Tensor? bias, str activation, float a, float b)"
    " -> Tensor"
)


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    a: float,
    b: float,
) -> torch.Tensor:
    if not input.numel() or not weight.numel():  # no empty products in oneDNN, IPEX's neither
        return torch.ops.kernel_dispatch.mkldnn_linear(input, weight, bias, activation, a, b)
    ipex, dtype = operators(), input.dtype
    observing.region_ran("linear", "ipex")

    def pack() -> Any:
        plain = weight.detach().to(dtype).contiguous()
        # No number of rows: one form serves all of them, at the same rate.
        return ipex.linear_prepack(plain, None if bias is None else bias.detach().to(dtype), None)

    parts = (weight,) if bias is None else (weight, bias)
    packed = weights.get(parts, dtype, pack)
    name, arguments = _ATTRIBUTES[activation]
    run = getattr(ipex, f"linear_{name}run")
    result: torch.Tensor = run(input.contiguous(), *arguments(a, b), packed)
    return result


_library.impl("ipex_linear", _linear, "CPU")
torch.library.register_fake("kernel_dispatch::ipex_linear", mkldnn.linear_meta, lib=_library)


def _emit_linear(graph: fx.Graph, match: Linear, epilogue: Epilogue) -> fx.Node:
    act = epilogue.activation
    return graph.call_function(
        torch.ops.kernel_dispatch.ipex_linear.default,
        (match.input, match.weight, match.bias, act.name, float(act.a), float(act.b)),
    )


def _refuses_linear(match: Linear) -> str:
    return "ipex takes weights that are stored as (out, in)" if match.in_out else cannot_load()


# --- convolution ----------------------------------------------------------------------------------

_library.define(
    "ipex_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor?[] norm, float eps, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, int groups, str activation, float a, "
    "float b) -> Tensor"
)


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: list[torch.Tensor | None],
    eps: float,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    a: float,
    b: float,
) -> torch.Tensor:
    if not input.numel() or not weight.numel():
        rest = (stride, padding, dilation, groups, activation, a, b)
        return torch.ops.kernel_dispatch.mkldnn_convolution(input, weight, bias, norm, eps, *rest)
    ipex, dtype = operators(), input.dtype
    observing.region_ran("convolution", "ipex")
    name, arguments = _ATTRIBUTES[activation]
    numbers = arguments(a, b)
    image = input.contiguous(memory_format=torch.channels_last)

    def pack() -> Any:
        plain, shift = mkldnn.fold_norm(weight, bias, norm, eps, dtype)
        plain = plain.contiguous(memory_format=torch.channels_last)
        make = getattr(ipex, f"convolution_{name}prepack")
        # The sizes are a hint: a form that was made for some images serves others as well.
        geometry = (stride, padding, dilation, groups, True, list(image.shape))
        return make(plain, shift, *geometry, *numbers)

    parts = tuple(t for t in (weight, bias, *norm) if t is not None)
    where = (tuple(stride), tuple(padding), tuple(dilation), groups)
    recipe = (dtype, eps, where, activation, a, b, bias is None)
    packed = weights.get(parts, recipe, pack)
    run = getattr(ipex, f"convolution_{name}run")
    result: torch.Tensor = run(image, *numbers, packed)
    return result.contiguous(memory_format=torch.channels_last)


_library.impl("ipex_convolution", _convolution, "CPU")
torch.library.register_fake(
    "kernel_dispatch::ipex_convolution", mkldnn.convolution_meta, lib=_library
)


def _emit_convolution(graph: fx.Graph, match: Convolution, epilogue: Epilogue) -> fx.Node:
    arguments = mkldnn.convolution_arguments(match, epilogue)
    return graph.call_function(torch.ops.kernel_dispatch.ipex_convolution.default, arguments)


def _refuses_convolution(match: Convolution) -> str:
    if match.weight.meta["val"].dim() != 4:
        return "ipex is used for 2-D convolutions only"
    return cannot_load()


# --- attention ------------------------------------------------------------------------------------

_library.define(
    "ipex_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float scale)"
    " -> Tensor"
)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    operators()
    observing.region_ran("attention", "ipex")
    flash = torch.ops.torch_ipex.flash_attention
    out: torch.Tensor
    out, _ = flash(query, key, value, 0.0, causal, attention_mask=mask, scale=scale)
    return out if mask is None else _zeros_without_keys(out, mask)


def _zeros_without_keys(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """IPEX gives NaN for a row that is masked out altogether, where torch gives zeros."""
    for dim in range(mask.dim() - 1):  # what was expanded is looked at once
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    masked = ~mask if mask.dtype == torch.bool else mask == -torch.inf
    nothing = masked.all(-1, keepdim=True)
    return out.masked_fill_(nothing, 0.0) if nothing.any() else out


def _attention_meta(query: torch.Tensor, *_: object) -> torch.Tensor:
    batch, heads, tokens, size = query.shape
    return query.new_empty((batch, tokens, heads, size)).transpose(1, 2)


_library.impl("ipex_attention", _attention, "CPU")
torch.library.register_fake("kernel_dispatch::ipex_attention", _attention_meta, lib=_library)


def _emit_attention(graph: fx.Graph, match: Attention, epilogue: Epilogue) -> fx.Node:
    return graph.call_function(
        torch.ops.kernel_dispatch.ipex_attention.default,
        (match.query, match.key, match.value, match.mask, match.causal, match.scale),
    )


def _refuses_attention(match: Attention) -> str:
    query, key, value = (node.meta["val"] for node in (match.query, match.key, match.value))
    if match.mask is not None:
        mask = match.mask.meta["val"]
        if match.causal or mask.dim() != 4 or mask.dtype not in (torch.bool, match.dtype):
            return f"ipex takes masks of four dimensions, of bool and {match.dtype}"
    if query.shape[1] != key.shape[1] or key.shape[1] != value.shape[1]:
        return "ipex reads beyond the end of heads that are shared by several queries"
    if query.shape[3] != value.shape[3]:
        return "ipex takes one head size for query, key and value"
    return cannot_load()


PROVIDER = Provider(
    name="ipex",
    summary="Intel's extension under torch 2.8: linear layers, convolutions, bfloat16 attention",
    probe=probe,
    requires=(f"pip install {DISTRIBUTION}==2.8.0", "torch 2.8", "x86-64 with AVX2, Linux"),
    regions={
        "linear": RegionMaker(_emit_linear, _ABILITIES, _refuses_linear),
        "convolution": RegionMaker(_emit_convolution, _ABILITIES, _refuses_convolution),
        "attention": RegionMaker(_emit_attention, refuses=_refuses_attention),
    },
)
