"""The fourteen providers as data: what each is called, needs, and stands for in this project.

A provider stands for a target as a whole (`cuda`, `cpu`, `mps`, `nki`, `xeon`), or for those of our
own providers that compute regions on its targets (`mkl`: linear layers of the CPU).
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_dispatch.registry.provider_id import ProviderId
from lowering import targets as all_targets
from lowering.errors import SettingError, unknown


@dataclass(frozen=True)
class BackendInfo:
    """What is known of a provider without asking the machine."""

    type: ProviderId
    name: str
    display_name: str
    requires_gpu: bool
    required_libs: tuple[str, ...]
    optional_libs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()  # where it computes, best first
    providers: tuple[str, ...] = ()  # our providers that it stands for; (): all that a target has
    summary: str = ""

    @property
    def flag(self) -> str:
        """What switches it on in a configuration file."""
        return f"USE_{self.name.upper()}"

    @property
    def is_target(self) -> bool:
        """Does it stand for a whole target, so that its flag switches the target on and off?"""
        return self.targets == (OWN_TARGET.get(self.name),)


# Providers that are a target under another or the same name.
OWN_TARGET = {"cuda": "cuda", "cpu": "cpu", "mps": "mps", "nki": "neuron"}

# In the order of the seed's table, which is that of its configuration file.
TABLE: tuple[BackendInfo, ...] = (
    BackendInfo(
        ProviderId.CUDA,
        "cuda",
        "NVIDIA CUDA",
        True,
        ("CUDA Toolkit", "cuBLAS"),
        ("cuDNN", "cuSPARSELt"),
        ("cuda",),
        summary="NVIDIA GPUs, with all that this project has for them",
    ),
    BackendInfo(
        ProviderId.CPU,
        "cpu",
        "CPU",
        False,
        (),
        ("OpenMP",),
        ("cpu",),
        summary="any CPU that torch runs on, with all that this project has for it",
    ),
    BackendInfo(
        ProviderId.MPS,
        "mps",
        "Apple Metal Performance Shaders",
        True,
        ("Metal (macOS only)",),
        (),
        ("mps",),
        summary="Apple GPUs, with all that this project has for them",
    ),
    BackendInfo(
        ProviderId.CUDNN,
        "cudnn",
        "NVIDIA cuDNN",
        True,
        ("CUDA Toolkit", "cuDNN"),
        (),
        ("cuda",),
        ("cudnn",),
        "attention in half precision, and convolutions, on NVIDIA GPUs",
    ),
    BackendInfo(
        ProviderId.MKL,
        "mkl",
        "Intel MKL",
        False,
        ("Intel MKL",),
        (),
        ("cpu",),
        ("mkl",),
        "linear layers in float32 whose weight is laid out once, in inference",
    ),
    BackendInfo(
        ProviderId.MKLDNN,
        "mkldnn",
        "Intel oneDNN",
        False,
        ("oneDNN",),
        ("Intel Extension for PyTorch",),
        ("cpu",),
        ("mkldnn", "ipex"),
        "linear layers and convolutions with what follows them, in inference",
    ),
    BackendInfo(
        ProviderId.OPENMP,
        "openmp",
        "OpenMP",
        False,
        ("OpenMP", "a C++ compiler"),
        (),
        ("cpu",),
        ("openmp",),
        "C++ kernels of this project on OpenMP threads, built at first use",
    ),
    BackendInfo(
        ProviderId.NKI,
        "nki",
        "AWS Neuron",
        False,
        ("AWS Neuron SDK",),
        (),
        ("neuron",),
        ("nki",),
        "AWS Trainium and Inferentia, in inference",
    ),
    BackendInfo(
        ProviderId.TRITON,
        "triton",
        "OpenAI Triton",
        True,
        ("PyTorch", "Triton"),
        (),
        ("cuda", "rocm"),
        ("triton",),
        "Triton kernels of this project, on NVIDIA and AMD GPUs",
    ),
    BackendInfo(
        ProviderId.CUSPARSELT,
        "cusparselt",
        "NVIDIA cuSPARSELt",
        True,
        ("CUDA Toolkit", "cuSPARSELt"),
        (),
        ("cuda",),
        ("cusparselt",),
        "linear layers whose weights have two zeros among every four numbers",
    ),
    BackendInfo(
        ProviderId.MHA,
        "mha",
        "Fused multi-head attention",
        False,
        (),
        ("a C++ compiler",),
        ("cuda", "rocm", "cpu"),
        ("mha",),
        "attention: a kernel of this project on CPUs, torch's fused ones on GPUs",
    ),
    BackendInfo(
        ProviderId.NNPACK,
        "nnpack",
        "NNPACK",
        False,
        ("NNPACK",),
        (),
        ("cpu",),
        ("nnpack",),
        "convolutions of single images by transforms, on one thread",
    ),
    BackendInfo(
        ProviderId.OPT_EINSUM,
        "opt_einsum",
        "opt_einsum",
        False,
        ("opt_einsum",),
        (),
        ("cpu",),
        ("opt_einsum",),
        "the order in which an einsum of three or more operands is contracted",
    ),
    BackendInfo(
        ProviderId.XEON,
        "xeon",
        "Intel Xeon",
        False,
        (),
        ("oneDNN", "Intel MKL"),
        ("cpu",),
        ("xeon",),
        "the CPU target where it is a Xeon; what its cores and instructions are",
    ),
)
BY_NAME = {info.name: info for info in TABLE}
BY_ID = {info.type: info for info in TABLE}
_ALIASES = {"onednn": "mkldnn", "omp": "openmp"}
_OF_TARGET = {target: name for name, target in OWN_TARGET.items()}


def find(name: object) -> BackendInfo | None:
    """By id, name, alias (`nvidia`, `onednn`, `BT_CPU`) in any case; None if there is none."""
    if isinstance(name, int) and not isinstance(name, bool):
        return BY_ID.get(name)  # type: ignore[call-overload]  # an IntEnum is found by its number
    if not isinstance(name, str):
        return None
    word = name.strip().lower().removeprefix("bt_").replace("-", "_")
    word = _ALIASES.get(word, word)
    if word in BY_NAME:
        return BY_NAME[word]
    target = all_targets.resolve_name(word)
    return BY_NAME.get(_OF_TARGET.get(target or "", ""))


def demand(name: object, source: str = "") -> BackendInfo:
    """As `find`; a name that there is not is an error that names the nearest."""
    if (found := find(name)) is None:
        raise unknown("provider", name, BY_NAME, source)
    return found


def names_of(value: object, what: str) -> list[str]:
    """A list of names that a user gave; one string would be read letter by letter."""
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise SettingError(f"{what}={value!r}: give a list of names, such as ['cuda', 'cpu'].")
    return list(value)
