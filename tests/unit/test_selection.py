"""plan(): the same graph on machines that are not this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from kernel_dispatch.facts import GraphFacts, nothing_known
from kernel_dispatch.selection import Machine, Plan, plan
from kernel_dispatch.settings import Settings, resolve
from lowering import targets
from lowering.capability import CapabilityRow
from lowering.contract import Probe, Target
from lowering.errors import BackendNotAvailableError
from lowering.levels import Level

pytestmark = pytest.mark.quick


def facts(devices: Iterable[str] = ("cpu",), **changes: Any) -> GraphFacts:
    known = {"op_count": 10, "dtypes": ("float32",), "ops": (("add", 10),), "bytes_moved": 1 << 22}
    return replace(nothing_known("model.py:1"), devices=tuple(devices), **{**known, **changes})


def settings(**options: Any) -> Settings:
    return resolve(None, options, {})


def machine(*here: str, absent: dict[str, str] | None = None, **details: Any) -> Machine:
    def probe(target: Target) -> Probe:
        if target.name in here:
            return Probe.yes("1", **details.get(target.name, {}))
        return Probe.no(f"no {target.name} here", f"buy a {target.name}")

    gone = {"ipex": "IPEX is not installed", **(absent or {})}  # it is there for one torch only
    return Machine(targets.ours(), probe, lambda provider: gone.get(provider, ""))


CPU_ONLY = machine("cpu")
CUDA = machine("cuda", "cpu", cuda={"device_count": 2, "features": ["sm90"]})
ROCM = machine("rocm", "cpu", rocm={"device_count": 1, "features": ["gfx942"]})
MAC = machine("mps", "cpu", cpu={"features": ["arm", "neon"]})
EPYC_DETAILS = {"features": ["amd", "avx512f", "avx2"]}
EPYC = machine("cpu", cpu=EPYC_DETAILS)
ZEN4 = {"features": ["amd", "avx512f", "avx512_bf16", "avx2"]}
TORCH_28 = machine("cpu", absent={"ipex": ""}, cpu=ZEN4)  # with the IPEX that belongs to it


def rejected(found: Plan, target: str, provider: str = "") -> list[str]:
    return [
        reason.code
        for no in found.rejected
        if (no.target, no.provider) == (target, provider)
        for reason in no.reasons
    ]


@pytest.mark.parametrize(
    ("where", "devices", "target", "providers"),
    [
        (CPU_ONLY, ["cpu"], "cpu", ("inductor", "eager")),
        (CUDA, ["cpu"], "cpu", ("inductor", "eager")),
        (CUDA, ["cuda"], "cuda", ("inductor", "eager")),
        (CUDA, ["cpu", "cuda"], "cuda", ("inductor", "eager")),
        (CUDA, [], "cpu", ("inductor", "eager")),
        (ROCM, ["cuda"], "rocm", ("inductor", "eager")),
        (MAC, ["mps"], "mps", ("inductor", "eager")),
        (MAC, ["cpu"], "cpu", ("inductor", "eager")),
    ],
)
def test_graphs_follow_their_tensors(
    where: Machine, devices: list[str], target: str, providers: tuple[str, ...]
) -> None:
    found = plan(facts(devices), settings(), where)
    assert (found.target, found.providers, found.move_to) == (target, providers, None)
    assert found.provider == providers[0]
    others = {one.name for one in targets.ours()} - {target}
    assert others <= {no.target for no in found.rejected}, "a target without an answer"


def test_every_no_says_why() -> None:
    found = plan(facts(), settings(), CUDA)
    assert rejected(found, "cuda") == ["tensors-elsewhere"]
    assert rejected(found, "rocm") == ["target-absent", "tensors-elsewhere"]
    assert rejected(found, "xla") == ["target-absent", "tensors-elsewhere"]
    there = plan(facts(["cuda"]), settings(), CUDA)
    assert rejected(there, "rocm") == ["target-absent"]
    assert rejected(there, "cpu") == ["tensors-elsewhere"]


def test_a_target_without_a_lowering() -> None:
    there = machine("xla", "cpu")
    bare = [replace(t, rows=()) if t.name == "xla" else t for t in there.targets]
    found = plan(facts(["xla"]), settings(), replace(there, targets=bare))
    assert (found.target, found.providers) == ("xla", ("eager",))
    assert "no-lowering" in rejected(found, "xla")
    assert "no-target" in rejected(found, "xla")


@pytest.mark.parametrize(
    ("level", "providers"),
    [
        ("O0", ("eager",)),
        ("O1", ("eager",)),
        ("O2", ("inductor", "eager")),
        ("O3", ("inductor", "eager")),
    ],
)
def test_the_level_says_who_may_compute(level: str, providers: tuple[str, ...]) -> None:
    found = plan(facts(), settings(level=level), CPU_ONLY)
    assert found.providers == providers
    assert ("level-too-low" in rejected(found, "cpu", "inductor")) == (len(providers) == 1)


def test_disabled_and_absent_providers() -> None:
    off = plan(facts(), settings(disable="inductor"), CPU_ONLY)
    assert off.providers == ("eager",)
    assert (set(rejected(off, "cpu", "inductor")), off.missing) == ({"provider-disabled"}, ())
    gone = plan(facts(), settings(), machine("cpu", absent={"inductor": "no compiler"}))
    assert gone.providers == ("eager",)
    assert [reason.code for reason in gone.missing] == ["provider-absent"]
    assert "no compiler" in gone.missing[0].text


def test_what_is_not_wanted_is_not_missing() -> None:
    """At O1, or for a graph too small anyway, a missing compiler is no shortfall."""
    where = machine("cpu", absent={"inductor": "no compiler"})
    assert plan(facts(), settings(level="O1"), where).missing == ()
    assert plan(facts(op_count=1, bytes_moved=8), settings(), where).missing == ()


def test_a_small_graph_stays_with_eager() -> None:
    found = plan(facts(op_count=1, bytes_moved=64), settings(), CPU_ONLY)
    assert found.providers == ("eager",)
    assert rejected(found, "cpu", "inductor") == ["too-small"]


def test_what_is_only_one_vector_function_stays_with_eager() -> None:
    """Torch computes it as fast, and nothing is there to fuse; a sum is not on the list."""
    large = {"op_count": 1, "bytes_moved": 1 << 30, "dtypes": ("float32",)}
    found = plan(facts(ops=(("gelu", 1),), **large), settings(), CPU_ONLY)
    assert found.providers == ("eager",)
    assert rejected(found, "cpu", "inductor") == ["too-small"]
    assert plan(facts(ops=(("sum", 1),), **large), settings(), CPU_ONLY).provider == "inductor"


OURS = {
    "attention:mha",
    "batch_norm:openmp",
    "convolution:openmp",
    "embedding_bag:openmp",
    "group_norm:openmp",
    "grouped_linear:openmp",
    "int8_linear:openmp",
    "linear:openmp",
    "random:openmp",
    "recurrent:openmp",
    "softmax:openmp",
    "transposed_convolution:openmp",
}
# of two tensors that both may change, so in training as well
PRODUCTS = {"product:openmp", "training_convolution:openmp", "weight_gradient:openmp"}
# mostly, but noise is drawn in inference too, classes are weighed, and tokens find their experts
TRAINED = {"batch_norm:openmp", "grouped_linear:openmp", "random:openmp", "softmax:openmp"}
IMAGES = {"convolution:mkldnn", "transposed_convolution:mkldnn"}
ONEDNN = {*IMAGES, "linear:mkldnn"}
ORDERS = {"einsum:opt_einsum"}  # before autograd, so in training as well
SAMPLED = {"resampling:eager"}  # likewise, and from O2 on in training
# not in training, where weights change in every step, and every step of a sequence has gradients
AHEAD = {"branches:eager", "from_weights:eager", "recurrent:eager"}
OTHERS = {"convolution:nnpack", "linear:mkl", *ORDERS, *SAMPLED, *AHEAD}  # wide; only if measured
IPEX = {"attention:ipex", "convolution:ipex", "linear:ipex"}


@pytest.mark.parametrize(
    ("where", "level", "training", "disable", "rows"),
    [
        (EPYC, "O2", False, "", {*OURS, *PRODUCTS, *ONEDNN, *OTHERS}),
        # what needs a compiler starts at O2
        (EPYC, "O1", False, "", {*ONEDNN, *OTHERS}),
        (EPYC, "O0", False, "", set()),
        (EPYC, "O2", True, "", {*PRODUCTS, *TRAINED, *ORDERS, *SAMPLED}),
        (EPYC, "O1", True, "", ORDERS),
        (EPYC, "O2", False, "mkldnn", {*OURS, *PRODUCTS, *OTHERS}),
        (EPYC, "O2", False, "openmp", {"attention:mha", *ONEDNN, *OTHERS}),
        (EPYC, "O2", False, "mkldnn,openmp,mha", OTHERS),
        (EPYC, "O2", False, "mkldnn,openmp,mha,mkl,nnpack,opt_einsum", SAMPLED | AHEAD),
        (CPU_ONLY, "O2", False, "", {*OURS, *IMAGES, *OTHERS}),
        (CPU_ONLY, "O1", False, "", {*IMAGES, *OTHERS}),
        (MAC, "O2", False, "", {*OURS, *IMAGES, *OTHERS}),
        (TORCH_28, "O1", False, "", {*IPEX, *ONEDNN, *OTHERS}),
        (TORCH_28, "O2", False, "ipex", {*OURS, *PRODUCTS, *ONEDNN, *OTHERS}),
        (TORCH_28, "O2", False, "mkldnn,openmp,mha", {*IPEX, *OTHERS}),
        (TORCH_28, "O2", True, "", {*PRODUCTS, *TRAINED, *ORDERS, *SAMPLED}),
    ],
)
def test_region_rows(
    where: Machine, level: str, training: bool, disable: str, rows: set[str]
) -> None:
    found = plan(facts(training=training), settings(level=level, disable=disable), where)
    inductors = {"resampling:inductor"} if level == "O2" else set()
    assert found.as_dict()["regions"] == sorted(rows | inductors)


@pytest.mark.parametrize("feature", ["avx512_vnni", "avx_vnni"])
def test_layers_between_bytes_need_vnni(feature: str) -> None:
    layers = {"quantized_convolution", "quantized_linear"}
    features = ["intel", "avx2", feature]
    for level, provider in (("O1", "mkldnn"), ("O2", "openmp")):
        for where, wanted in ((machine("cpu", cpu={"features": features}), layers), (EPYC, set())):
            found = plan(facts(), settings(level=level), where).as_dict()["regions"]
            of_provider = {row.partition(":")[0] for row in found if row.endswith(f":{provider}")}
            assert of_provider & layers == wanted


def test_a_region_row_that_was_refused_says_why() -> None:
    """An answer for each row of the provider that does not fit."""
    refused = plan(facts(), settings(), CPU_ONLY)
    assert set(rejected(refused, "cpu", "mkldnn")) == {"arch-unsupported"}  # not float32 images
    unwanted = plan(facts(), settings(disable="mkldnn"), EPYC)
    assert rejected(unwanted, "cpu", "mkldnn").count("provider-disabled") == len(rows_of("mkldnn"))
    training = plan(facts(training=True), settings(), machine("cpu", cpu=ZEN4))
    for_inference = [row for row in rows_of("openmp") if not row.training]
    lacking = {"amx_bf16", "amx_fp16", "avx512_vnni", "avx_vnni"}
    of_others = sum(bool(row.features & lacking) for row in rows_of("openmp"))
    assert Counter(rejected(training, "cpu", "openmp")) == {
        "training-unsupported": len(for_inference),
        "arch-unsupported": of_others,
    }


def rows_of(provider: str) -> list[CapabilityRow]:
    cpu = next(target for target in targets.ours() if target.name == "cpu")
    return [row for row in cpu.rows if row.provider == provider]


def test_region_providers_without_a_compiler() -> None:
    """The library calls are left; that ours are gone is no shortfall of its own to warn about."""
    gone = {"openmp": "no compiler", "mha": "no compiler"}
    found = plan(facts(), settings(), machine("cpu", absent=gone, cpu=EPYC_DETAILS))
    assert found.as_dict()["regions"] == sorted({*ONEDNN, *OTHERS, "resampling:inductor"})
    assert rejected(found, "cpu", "mha") == ["provider-absent"]
    assert found.missing == ()


@pytest.mark.parametrize("target", ["cuda", "rocm"])
def test_a_gpu_without_a_working_triton_runs_eagerly(target: str) -> None:
    """A build without triton_key, or of another flavour, imports and cannot compile."""
    broken = {"triton": "this triton has no triton_key"}
    where = machine(target, "cpu", absent=broken)
    found = plan(facts(devices=("cuda",)), settings(), where)
    assert (found.target, found.providers) == (target, ("eager",))
    assert "no triton_key" in found.missing[0].text
    assert plan(facts(devices=("cuda",)), settings(level="O1"), where).missing == ()


# --- a forced device ------------------------------------------------------------------------------


def test_forced_and_absent_is_an_error() -> None:
    with pytest.raises(BackendNotAvailableError) as caught:
        plan(facts(), settings(device="nvidia"), CPU_ONLY)
    for part in ("'cuda'", "options=", "no cuda here", "buy a cuda", "Available: cpu."):
        assert part in str(caught.value)


@pytest.mark.parametrize(("device", "fine"), [("cuda:1", True), ("cuda:2", False), ("cpu:0", True)])
def test_a_forced_index(device: str, fine: bool) -> None:
    if fine:
        assert plan(facts(), settings(device=device), CUDA).target == device.split(":")[0]
        return
    with pytest.raises(BackendNotAvailableError, match="2 device"):
        plan(facts(), settings(device=device), CUDA)


@pytest.mark.parametrize(
    ("device", "devices", "move_to"),
    [
        ("cuda", ["cpu"], "cuda"),
        ("cuda:1", ["cpu"], "cuda:1"),
        ("cuda", ["cuda"], None),
        ("cuda:1", ["cuda"], "cuda:1"),
        ("cpu", ["cpu"], None),
        ("cpu", ["cuda"], "cpu"),
        ("cpu:0", ["cpu"], None),
    ],
)
def test_a_forced_device_moves_only_what_is_elsewhere(
    device: str, devices: list[str], move_to: str | None
) -> None:
    found = plan(facts(devices), settings(device=device), CUDA)
    assert (found.target, found.move_to) == (device.split(":")[0], move_to)
    other = "cpu" if device.startswith("cuda") else "cuda"
    assert "not-requested" in rejected(found, other)


def test_a_forced_device_that_refuses_the_graph() -> None:
    found = plan(facts(dtypes=("complex64",)), settings(device="mps"), MAC)
    assert (found.target, found.move_to) == ("cpu", None)
    told = [(reason.code, reason.text.split()[0]) for reason in found.refused_wish]
    assert told == [("dtype-unsupported", "inductor"), ("dtype-unsupported", "eager")]


# --- priority, determinism ------------------------------------------------------------------------


def toy(priority: int) -> Target:
    rows = (CapabilityRow("toy", "eager", level=Level.O0, refused_ops=frozenset({"cumsum"})),)
    return Target("toy", "a toy", ("cpu",), Probe.yes, rows, priority=priority)


@pytest.mark.parametrize(("priority", "target", "other"), [(99, "toy", "cpu"), (1, "cpu", "toy")])
def test_priority(priority: int, target: str, other: str) -> None:
    both = sorted([*targets.ours(), toy(priority)], key=lambda one: -one.priority)
    where = replace(machine("cpu", "toy"), targets=tuple(both))
    found = plan(facts(), settings(), where)
    assert found.target == target
    assert rejected(found, other) == ["lower-priority"]
    lacking = plan(facts(ops=(("cumsum", 1),)), settings(), where)
    assert lacking.target == "cpu"
    assert rejected(lacking, "toy", "eager") == ["op-unsupported"]


def test_the_fingerprint_is_deterministic_and_tells_plans_apart() -> None:
    found = [plan(facts(), settings(), EPYC).fingerprint() for _ in range(3)]
    assert len(set(found)) == 1
    others = [
        plan(facts(), settings(level="O1"), EPYC),
        plan(facts(), settings(disable="mkldnn"), EPYC),
        plan(facts(), settings(level="O0"), CPU_ONLY),
        plan(facts(["cuda"]), settings(), CUDA),
        plan(facts(), settings(device="cuda"), CUDA),
    ]
    assert len({*found, *(other.fingerprint() for other in others)}) == 6
    assert len(found[0]) == 16
