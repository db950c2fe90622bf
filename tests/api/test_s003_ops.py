"""The operations of `lowering.ops`, on each way through this project, against their oracle."""

from __future__ import annotations

import ast
import inspect
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_dispatch import SettingError, dry_run, report
from lowering import layouts, ops, reference, tolerances
from lowering.errors import OperandError
from tests.conftest import Python
from tests.support.compiling import compile_at, size_limits_lifted
from tests.support.op_cases import Case, of
from tests.support.reports import assert_ran_as_planned
from triton_kernels.architectures import KNOWN

quick = pytest.mark.quick
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EVERY = list(ops.BY_NAME)


def _agrees(case: Case) -> None:
    """Eager in every dtype, then a graph at O1, with the report of what ran."""
    for dtype in DTYPES:
        args = case.args(dtype)
        error = case.error(case.run(args), args)
        assert error <= tolerances.tolerance(case.op, dtype), (dtype, error)
    args = case.args(torch.float32)
    with size_limits_lifted(), torch.no_grad():
        compiled = compile_at("O1", ops.BY_NAME[case.op])
        got = case.run(args, compiled)
        assert_ran_as_planned(compiled, "O1")
    assert case.error(got, args) <= tolerances.tolerance(case.op, torch.float32, "O1")


def _has_right_gradients(case: Case) -> None:
    """Of the operation by differences, and against autograd through the oracle."""
    args = case.args(torch.float64)
    leaves = [a.requires_grad_() for a in args if a.is_floating_point()]
    if sum(leaf.numel() for leaf in leaves) < 2000 and "-inf" not in case.name:
        assert torch.autograd.gradcheck(lambda *_: tuple(case.run(args)), leaves)
    cotangents = [torch.randn_like(one) for one in case.run(args)]
    got = torch.autograd.grad(case.run(args), leaves, cotangents)
    wanted = torch.autograd.grad(case.truth(args), leaves, cotangents)
    for mine, truth in zip(got, wanted, strict=True):
        assert torch.allclose(mine, truth, rtol=1e-9, atol=1e-9, equal_nan=True)


# --- one row for each operation -------------------------------------------------------------------


@pytest.mark.status(
    "met on the CPU and by kernels in Triton's interpreter, not run on a GPU: none here"
)
@pytest.mark.parametrize("case", of("matmul2d", "linear"))
def test_s003_04_matmul2d_and_linear(case: Case) -> None:
    """`matmul2d` is the product of two matrices, in the forward and in the backward, whoever
    computes it."""
    _agrees(case)
    _has_right_gradients(case)


@pytest.mark.status(
    "met on the CPU and by kernels in Triton's interpreter, not run on a GPU: none here"
)
@pytest.mark.parametrize("case", of("softmax_lastdim"))
def test_s003_05_softmax_lastdim(case: Case) -> None:
    """`softmax_lastdim` is right for rows of any length, for large values and for rows of -inf."""
    _agrees(case)
    _has_right_gradients(case)


@pytest.mark.status(
    "met on the CPU and by kernels in Triton's interpreter, not run on a GPU: none here"
)
@pytest.mark.parametrize("case", of("layernorm", "rms_norm"))
def test_s003_06_layernorm(case: Case) -> None:
    """`layernorm` is right for rows that are no power of two, without a bias and without a
    weight."""
    _agrees(case)
    _has_right_gradients(case)


@pytest.mark.status(
    "met on the CPU and by kernels in Triton's interpreter, not run on a GPU: none here"
)
@pytest.mark.parametrize("case", of("self_attention", "rope"))
def test_s003_07_self_attention(case: Case) -> None:
    """`self_attention` knows causal order, grouped heads, a scale and both kinds of mask; a fused
    kernel is one more way to compute it."""
    _agrees(case)
    _has_right_gradients(case)


@pytest.mark.parametrize(
    "case", of("add", "mul", "gelu", "swiglu", "conv2d", "embedding", "cross_entropy")
)
def test_s003_09_every_other_operation(case: Case) -> None:
    _agrees(case)
    _has_right_gradients(case)


@quick
def test_s003_09_one_oracle_for_each_operation() -> None:
    """Every operation has one reference in plain torch, in elementary steps, which is the judge of
    every target, the CPU included."""
    assert set(reference.BY_NAME) == set(EVERY) == set(tolerances.TABLE)
    tree = ast.parse(inspect.getsource(reference))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    libraries = {
        "matmul",
        "mm",
        "bmm",
        "einsum",
        "softmax",
        "log_softmax",
        "layer_norm",
        "rms_norm",
    }
    assert not names & (libraries | {"functional", "conv2d", "linear", "gelu", "silu", "ops"})
    for name, op in ops.BY_NAME.items():
        mine = [*inspect.signature(op).parameters]
        assert [p for p in mine if p != "layout"] == [
            *inspect.signature(reference.BY_NAME[name]).parameters
        ]


# --- at O2, once, all of them in one graph --------------------------------------------------------


def _everything(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    product = ops.matmul2d(x, w)
    normed = ops.layernorm(product, g)
    probabilities = ops.softmax_lastdim(product)
    heads = normed.unflatten(0, (1, 3, 11)).contiguous()
    attended = ops.self_attention(heads, heads, heads, causal=True)
    return product, normed, probabilities, attended, ops.gelu(ops.add(normed, product))


def _truths(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    product = reference.matmul2d(x, w)
    normed = reference.layernorm(product, g)
    heads = normed.unflatten(0, (1, 3, 11))
    attended = reference.self_attention(heads, heads, heads, causal=True)
    probabilities = reference.softmax_lastdim(product)
    return product, normed, probabilities, attended, reference.gelu(normed + product)


def test_s003_04_s003_05_s003_06_s003_07_in_one_graph_of_generated_code() -> None:
    inputs = [torch.randn(*sizes, requires_grad=True) for sizes in ((33, 40), (40, 48), (48,))]
    with size_limits_lifted():
        compiled = compile_at("O2", _everything)
        got = compiled(*inputs)
        cotangents = [torch.randn_like(one) for one in got]
        gradients = torch.autograd.grad(got, inputs, cotangents)
        assert_ran_as_planned(compiled, "O2")
        (graph,) = report(compiled)
        assert graph.provider == "inductor"
    wide = [one.detach().double().requires_grad_() for one in inputs]
    truths = _truths(*wide)
    wanted = torch.autograd.grad(truths, wide, [one.double() for one in cotangents])
    for mine, truth in zip((*got, *gradients), (*truths, *wanted), strict=True):
        scale = truth.abs().max()
        assert ((mine - truth).abs().max() / scale).item() < 2e-5


_INTERPRETED = """
import json, math, torch
import triton_kernels as tk
from triton_kernels import launching
from kernel_dispatch.numerics import distance
from lowering import reference

torch.manual_seed(0)
x, w, b = torch.randn(3, 1000) * 2, torch.randn(1000), torch.randn(1000)
short = torch.randn(5, 33)
q, k, v = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
half = torch.randn(9, 8)
cos, sin = (torch.cat((f(half), f(half)), -1) for f in (torch.cos, torch.sin))
hidden = short.clone()
hidden[1, 3:] = -math.inf
cases = {
    "matmul2d": (lambda: tk.matmul(short, short.t().contiguous()),
                 lambda r, d: r.matmul2d(d(short), d(short).t())),
    "softmax_lastdim": (lambda: tk.softmax(hidden), lambda r, d: r.softmax_lastdim(d(hidden))),
    "layernorm": (lambda: tk.layer_norm(x, w, b, 1e-5), lambda r, d: r.layernorm(d(x), d(w), d(b))),
    "rms_norm": (lambda: tk.rms_norm(x, w, 1e-6), lambda r, d: r.rms_norm(d(x), d(w))),
    "self_attention": (lambda: tk.attention(q, k, v, causal=True),
                       lambda r, d: r.self_attention(d(q), d(k), d(v), causal=True)),
    "swiglu": (lambda: tk.swiglu(x, x + 1), lambda r, d: r.swiglu(d(x), d(x + 1))),
}
found = {}
for name, (kernel, oracle) in cases.items():
    with launching.watched() as ran:
        got = kernel()
    assert ran, name
    found[name] = distance(got, oracle(reference, lambda t: t.double())).relative
print(json.dumps(found))
"""


def test_s003_04_s003_05_s003_06_s003_07_s003_09_triton_kernels(python: Python) -> None:
    pytest.importorskip("triton")
    found = json.loads(python(_INTERPRETED, kernels=False, TRITON_INTERPRET="1").stdout)
    assert len(found) == 6
    for name, error in found.items():
        assert error <= tolerances.tolerance(name, torch.float32), (name, error)


# --- the layout contract --------------------------------------------------------------------------


@pytest.fixture
def copied() -> Iterator[Callable[[str, str], int]]:
    """How often an argument was copied since the test began."""
    before = layouts.copies()
    yield (
        lambda op, argument: layouts.copies().get((op, argument), 0) - before.get((op, argument), 0)
    )


@quick
def test_s003_08_another_layout_is_copied_and_told(
    copied: Callable[[str, str], int], caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors are row-major; any other layout is refused, or copied and reported, or has to be
    tagged."""
    x, turned = torch.randn(4, 6), torch.randn(9, 6).t()
    with caplog.at_level(logging.WARNING, "lowering.layouts"):
        first, _ = ops.matmul2d(x, turned), ops.matmul2d(x, turned)
    assert torch.equal(first, x @ turned.contiguous())
    assert copied("matmul2d", "b") == 2
    assert copied("matmul2d", "a") == 0
    assert len([line for line in caplog.messages if "strides (1, 6)" in line]) == 1


@quick
def test_s003_08_another_layout_is_refused_by_name() -> None:
    with pytest.raises(OperandError, match=r"matmul2d: b of sizes \(6, 9\) has strides \(1, 6\)"):
        ops.matmul2d(torch.randn(4, 6), torch.randn(9, 6).t(), layout="refuse")
    with pytest.raises(SettingError, match=r"unknown layout 'refus'.*Did you mean 'refuse'"):
        ops.matmul2d(torch.randn(4, 6), torch.randn(6, 4), layout="refus")
    with pytest.raises(SettingError, match="Accepted: copy, refuse"):
        ops.softmax_lastdim(torch.randn(4, 6), layout="channels_last")


@quick
def test_s003_08_channels_last_is_a_tag(copied: Callable[[str, str], int]) -> None:
    images = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3)
    plain = ops.conv2d(images, weight)
    assert copied("conv2d", "x") == 1
    tagged = ops.conv2d(images, weight, layout="channels_last")
    assert copied("conv2d", "x") == 1
    assert torch.allclose(plain, tagged, atol=1e-5)
    with pytest.raises(OperandError, match="channels last"):
        ops.conv2d(images, weight, layout="refuse")
    with pytest.raises(OperandError, match="neither"):
        ops.add(images.transpose(2, 3), images.transpose(2, 3), layout="channels_last")


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_s003_08_copies_stand_in_the_report(level: str, copied: Callable[[str, str], int]) -> None:
    x, turned = torch.randn(4, 6, requires_grad=True), torch.randn(9, 6).t()
    compiled = compile_at(level, lambda x, y: ops.matmul2d(x, y))
    compiled(x, turned).sum().backward()
    (graph,) = report(compiled)
    (note,) = [note for note in graph.notes if note.startswith("layout-copied")]
    assert note.startswith("layout-copied: matmul2d: b has strides (1, 6)")
    assert f"[{__file__}:" in note
    assert copied("matmul2d", "b") == 1
    assert torch.allclose(x.grad, turned.sum(1).expand(4, 6))


@quick
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ops.matmul2d(torch.ones(2, 3), torch.ones(2, 3)), "a [2, 3], b [2, 3]"),
        (lambda: ops.matmul2d(torch.ones(2, 3, 1), torch.ones(2, 3)), "a must have 2 dimensions"),
        (lambda: ops.add(torch.ones(2), torch.ones(2).double()), "different dtypes: a torch.float"),
        (lambda: ops.gelu(torch.ones(2, dtype=torch.int64)), "x is torch.int64"),
        (lambda: ops.gelu(3.0), "x is of type float"),
        (lambda: ops.layernorm(torch.ones(2, 3), torch.ones(2)), "weight must have as many"),
        (lambda: ops.add(torch.ones(2), torch.ones(2, device="meta")), "different devices"),
        (lambda: ops.embedding(torch.ones(2), torch.ones(3, 4)), "tokens is torch.float32"),
        (lambda: ops.cross_entropy(torch.ones(2, 3), torch.ones(3).long()), "one label for each"),
        (
            lambda: ops.self_attention(*(torch.ones(1, h, 4, 8) for h in (3, 2, 2))),
            "number of heads",
        ),
    ],
)
def test_s003_08_arguments_that_do_not_fit_are_named(call: Any, text: str) -> None:
    with pytest.raises(OperandError) as raised:
        call()
    assert text in str(raised.value)


# --- GPUs: by plan --------------------------------------------------------------------------------


def _gemm(x: Tensor, w: Tensor) -> Tensor:
    return ops.gelu(ops.mul(ops.add(ops.matmul2d(x, w), x), x))


def _planned(device: str) -> Any:
    x = torch.randn(64, 64)
    with torch.no_grad():
        return dry_run(_gemm, (x, x), {}, device=device)


@pytest.mark.status("met, not run on hardware: no NVIDIA GPU here")
def test_s003_10_products_stay_with_cublas() -> None:
    """On NVIDIA GPUs a plain product is cuBLAS's, memory and streams are torch's, and add, mul and
    gelu become one generated kernel."""
    text = _planned("cuda:sm90").text(True)
    assert "target cuda, provider inductor" in text
    assert "product x" not in text and "linear x" not in text, "it is no region: torch's own"
    assert f"graph at {__file__}:" in text, (
        "the place is the caller's line, not that of lowering.ops"
    )
    x = torch.randn(4, 4)
    with torch.no_grad():
        names = [str(node.target) for node in _traced(x).graph.nodes]
    assert "aten.mm.default" in names, "the product is the operator that torch gives to cuBLAS"


def _traced(x: Tensor) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(_gemm)(x, x)


@pytest.mark.status("met, not run on hardware: no AMD GPU here")
def test_s003_11_the_same_meaning_on_amd() -> None:
    """On AMD GPUs the same operations go to rocBLAS and the same Triton kernels; that a wavefront
    has 64 lanes is known to the launch parameters only."""
    text = _planned("rocm:gfx942").text(True)
    assert "target rocm, provider inductor" in text
    families = Path(ops.__file__).parents[1] / "triton_kernels" / "families"
    for file in families.glob("*.py"):
        source = file.read_text().lower()
        assert "wavefront" not in source and "warpsize" not in source, file
    lanes = {one.name: one.lanes for one in KNOWN}
    assert (lanes["gfx942"], lanes["sm90"]) == (64, 32)
