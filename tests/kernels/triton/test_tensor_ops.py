"""Copies come out exactly, of every dtype and from every layout; gradients against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.support.numerics import assert_bit_identical
from tests.support.triton_kernels import check
from triton_kernels import concat, launching, pad_copy, slice_copy, transpose_copy
from triton_kernels.errors import KernelArgumentError
from triton_kernels.families import tensor_ops as family

Tensor = torch.Tensor
Copy = Callable[[Tensor], Tensor]
EXACT = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
    torch.uint16,
]
# Ours and torch's, for tensors of three dimensions with at least (3, 4, 5) numbers.
COPIES: dict[str, tuple[Copy, Copy]] = {
    "transpose": (lambda x: transpose_copy(x, 0, -1), lambda x: x.transpose(0, -1)),
    "transpose near": (lambda x: transpose_copy(x, 1, 2), lambda x: x.mT),
    "concat": (lambda x: concat([x, x[:, 1:]], 1), lambda x: torch.cat([x, x[:, 1:]], 1)),
    "slice": (lambda x: slice_copy(x, 1, 1, -1), lambda x: x[:, 1:-1]),
    "slice with a step": (lambda x: slice_copy(x, 2, 1, None, 3), lambda x: x[..., 1::3]),
    "pad": (
        lambda x: pad_copy(x, [2, 1, 0, 3], 7.0),
        lambda x: functional.pad(x, [2, 1, 0, 3], value=7.0),
    ),
    "crop": (
        lambda x: pad_copy(x, [-1, 2, 1, -2, -2, 0]),
        lambda x: functional.pad(x, [-1, 2, 1, -2, -2, 0]),
    ),
}


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Every pattern of bits that the dtype may have, NaNs included."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    total = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (total,), dtype=torch.uint8).view(dtype).view(shape)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def torchs_with_bits(copy: Copy, x: Tensor) -> Tensor:
    """What torch's own gives; some of its kernels do not know every dtype, but each its size."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.dtype.itemsize, torch.uint8)
    return copy(x.view(whole)).contiguous().view(x.dtype)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", [name for name in COPIES if name != "pad"])
def test_every_bit_is_copied(name: str, dtype: torch.dtype) -> None:
    ours, torchs = COPIES[name]
    x = numbers(3, 4, 7, dtype=dtype)
    with launching.watched() as names:
        got = ours(x)
    assert set(names) == {"copy_kernel"}
    right = torchs_with_bits(torchs, x)
    assert got.dtype is dtype and got.shape == right.shape and got.is_contiguous()
    assert torch.equal(bits(got), bits(right))


@pytest.mark.parametrize("dtype", EXACT[:-2])
def test_what_stands_around_a_padded_tensor(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, dtype=dtype)
    for value in (0.0, 1.0, 3.0, -0.0):
        got = pad_copy(x, [1, 2], value)
        assert_bit_identical(got, functional.pad(x, [1, 2], value=value), f"{dtype}, {value}")
    if dtype.is_floating_point:
        assert pad_copy(x, [1, 0], float("nan"))[:, 0].isnan().all()


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "strided", "permuted"])
def test_layouts_and_gradients(layout: str, name: str) -> None:
    base = torch.randn(4, 7, 40)
    x = {
        "contiguous": base,
        "transposed": base.mT,
        "expanded": base[:1].expand(4, 7, 40),
        "strided": base[..., 3::2],
        "permuted": base.permute(2, 0, 1),
    }[layout].requires_grad_()
    check(f"{name}, {layout}", *COPIES[name], (x,))


@pytest.mark.parametrize("shape", [(1, 1), (70, 130), (5, 33, 64), (2, 3, 4, 5, 6)])
def test_transposes_of_several_tiles(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float16)
    for dim in range(len(shape)):
        assert_bit_identical(transpose_copy(x, dim, -1), x.transpose(dim, -1), f"{dim}")


def test_many_dimensions() -> None:
    x = torch.randn(2, 3, 2, 3, 2, 3)[::1, :, :, 1:].permute(5, 0, 3, 1, 4, 2)
    assert_bit_identical(transpose_copy(x, 1, 4), x.transpose(1, 4), "six dimensions")
    pad = [1, 0, 0, 2, 1, 1, 0, 0, 2, 0, -1, 3]
    assert_bit_identical(pad_copy(x, pad), functional.pad(x, pad), "six dimensions")


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concat_of_many_with_empty_ones(dim: int) -> None:
    shapes = [[2, 3, 4] for _ in range(4)]
    for shape, size in zip(shapes, (5, 0, 1, 40), strict=True):
        shape[dim] = size
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def ours(*given: Tensor) -> Tensor:
        return concat(given, dim)

    check("many", ours, lambda *given: torch.cat(given, dim), tensors, launches=["copy_kernel"] * 3)


@pytest.mark.parametrize(
    ("start", "stop", "step"),
    [(None, None, 1), (2, None, 1), (-3, -1, 1), (0, 100, 4), (5, 2, 1), (1, None, 20)],
)
def test_slices(start: int | None, stop: int | None, step: int) -> None:
    def ours(x: Tensor) -> Tensor:
        return slice_copy(x, 0, start, stop, step)

    check("slice", ours, lambda x: x[start:stop:step], (torch.randn(9, 3, requires_grad=True),))


@pytest.mark.parametrize("name", COPIES)
def test_incoming_gradients_of_any_layout(name: str) -> None:
    ours, torchs = COPIES[name]
    x = torch.randn(4, 5, 6, requires_grad=True)
    shape = torchs(x).shape
    for grad in (
        torch.randn(shape[0], 1, 1).expand(shape),
        torch.randn(shape[::-1]).permute(2, 1, 0),
    ):
        got = torch.autograd.grad(ours(x), x, grad)[0]
        assert_bit_identical(got, torch.autograd.grad(torchs(x), x, grad)[0], name)


@pytest.mark.parametrize("name", COPIES)
def test_gradients_of_gradients(name: str) -> None:
    ours, torchs = COPIES[name]
    found = []
    for copy in (ours, torchs):
        x = torch.linspace(-1, 1, 4 * 5 * 6).view(4, 5, 6).requires_grad_()
        (first,) = torch.autograd.grad((copy(x) ** 3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 4, 0), (0, 0, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    for name in ("transpose", "concat", "slice with a step", "pad"):
        ours, torchs = COPIES[name]
        assert_bit_identical(ours(x), torchs(x), name)
        (grad,) = torch.autograd.grad(ours(x).sum(), x)
        assert grad.shape == x.shape
    assert torch.equal(pad_copy(x[..., :0], [2, 1], 5.0), x.new_full((*shape[:-1], 3), 5.0))


def test_scalars_and_conjugates() -> None:
    assert pad_copy(torch.tensor(3), []).item() == 3
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert_bit_identical(transpose_copy(x.conj(), 0, 1), x.conj().mT.resolve_conj(), "conjugate")


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(KernelArgumentError, match="dim1 is one of the 2 dimensions of x, not 2"):
        transpose_copy(x, 0, 2)
    with pytest.raises(KernelArgumentError, match="concat takes at least one tensor"):
        concat([])
    with pytest.raises(KernelArgumentError, match=r"tensor 1 is as the first .* not float32\[4\]"):
        concat([x, x[0]])
    with pytest.raises(KernelArgumentError, match=r"but for dimension 1, not int64\[3, 4\]"):
        concat([x, x.long()], 1)
    with pytest.raises(KernelArgumentError, match="step is at least 1, not -1"):
        slice_copy(x, 0, step=-1)
    with pytest.raises(KernelArgumentError, match="pad is at most 2 pairs of sizes"):
        pad_copy(x, [1, 2, 3])
    with pytest.raises(KernelArgumentError, match="pad crops at most the 4 numbers"):
        pad_copy(x, [-3, -2])


@pytest.mark.plain
@pytest.mark.parametrize("name", COPIES)
def test_in_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_MOVED", frozenset())
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    with launching.watched() as names:
        assert torch.autograd.gradcheck(COPIES[name][0], (x,))
    assert not names
    assert COPIES[name][0](x).is_contiguous()


@pytest.mark.plain
def test_the_backward_of_a_slice_in_plain_torch() -> None:
    grad = torch.randn(3, 2)
    full = family.slice_backward_meaning(grad, 7, 1, 1, 6, 3)
    assert torch.equal(full[:, 1:6:3], grad) and int((full != 0).sum()) == 6


def test_the_operators_keep_the_rules_of_torch() -> None:
    ops, x = torch.ops.triton_kernels, torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(ops.pad_copy.default, (x, [1, -2], 3.0))
    torch.library.opcheck(ops.concat.default, ([x, x.detach()], 0))
