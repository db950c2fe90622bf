"""Embedding and its backward, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.support.triton_kernels import DEVICE, DTYPES, check
from triton_kernels import embedding, launching
from triton_kernels.configurations import embedding as configurations
from triton_kernels.errors import KernelArgumentError
from triton_kernels.families import embedding as family

Tensor = torch.Tensor
ONE_PART = ["embedding_forward_kernel", "embedding_backward_kernel"]
SEVERAL_PARTS = [*ONE_PART, "embedding_join_kernel"]


def table(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(("shape", "columns"), [((1,), 1), ((), 5), ((2, 3), 64), ((7, 4), 129)])
def test_embedding(
    shape: tuple[int, ...], columns: int, kind: torch.dtype, dtype: torch.dtype
) -> None:
    ids = torch.randint(0, 11, shape, dtype=kind)
    inputs = (ids, table(11, columns, dtype))
    check(f"{shape}", embedding, functional.embedding, inputs, launches=ONE_PART)


def test_rows_wider_than_a_tile() -> None:
    inputs = (torch.randint(0, 3, (9,)), table(3, 1500))
    check("wide", embedding, functional.embedding, inputs, launches=ONE_PART)


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_runs_that_are_summed_in_parts(rows: int) -> None:
    ids = torch.randint(0, rows, (2 * configurations.PART + 21,))
    inputs = (ids, table(rows, 20, torch.float16))
    check(f"{rows}", embedding, functional.embedding, inputs, launches=SEVERAL_PARTS)


def test_a_run_of_more_parts_than_are_joined_at_once() -> None:
    inputs = (torch.full((17 * configurations.PART + 2,), 1), table(3, 3))
    check("long", embedding, functional.embedding, inputs, launches=SEVERAL_PARTS)


@pytest.mark.parametrize("before", [0, 1, 63, 64, 65])
def test_runs_that_end_where_a_part_does(before: int) -> None:
    part = configurations.PART
    assert part == 64
    ids = torch.cat((torch.zeros(before), torch.ones(part), torch.full((70,), 2.0))).long()
    inputs = (ids[torch.randperm(len(ids))], table(4, 6))
    check(f"{before}", embedding, functional.embedding, inputs, launches=SEVERAL_PARTS)


@pytest.mark.parametrize("padding", [0, 3, -1])
def test_the_row_of_padding_gets_no_gradient(padding: int) -> None:
    ids = torch.randint(0, 4, (3, 40))

    def ours(weight: Tensor) -> Tensor:
        return embedding(ids, weight, padding_idx=padding)

    def torchs(weight: Tensor) -> Tensor:
        return functional.embedding(ids, weight, padding_idx=padding)

    weight = table(4, 10)
    check(f"padding {padding}", ours, torchs, (weight,), launches=SEVERAL_PARTS)
    (grad,) = torch.autograd.grad(ours(weight).sum(), weight)
    assert torch.equal(grad[padding], torch.zeros(10))


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_layouts(layout: str) -> None:
    base = torch.randn(10, 12)
    weight = {
        "transposed": base.mT,
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(10, 12),
    }[layout].requires_grad_()
    ids = torch.randint(0, weight.shape[0], (4, 6)).mT[::2]
    check(layout, embedding, functional.embedding, (ids, weight), launches=ONE_PART)


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_incoming_gradients_of_any_layout(layout: str) -> None:
    ids, weight = torch.randint(0, 5, (3, 8)), table(5, 6)
    grad = {
        "expanded": torch.randn(6).expand(3, 8, 6),
        "transposed": torch.randn(6, 8, 3).permute(2, 1, 0),
    }[layout]
    got = torch.autograd.grad(embedding(ids, weight), weight, grad)
    right = torch.autograd.grad(functional.embedding(ids, weight), weight, grad)
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize(("shape", "columns"), [((0,), 4), ((3, 0), 4), ((2,), 0)])
def test_empty(shape: tuple[int, ...], columns: int) -> None:
    weight = table(6, columns)
    out = embedding(torch.zeros(shape, dtype=torch.int64), weight)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert out.shape == (*shape, columns)
    assert torch.equal(grad, torch.zeros(6, columns))


def test_ids_that_are_not_in_the_table() -> None:
    ids, weight = torch.tensor([-1, 5, 2, 1 << 40]), table(5, 3)
    out = embedding(ids, weight)
    assert out.isnan().all(-1).tolist() == [True, True, False, True]
    (grad,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    assert grad.sum(-1).tolist() == [0, 0, 3, 0, 0]


def test_special_numbers_are_copied() -> None:
    weight = torch.tensor([[torch.nan, 1.0], [torch.inf, -0.0]], requires_grad=True)
    check("special", embedding, functional.embedding, (torch.tensor([1, 0, 1]), weight))


def test_many_gradients_of_one_id_are_summed_in_float32() -> None:
    weight = table(2, 2, torch.float16)
    out = embedding(torch.zeros(64, dtype=torch.int64), weight)
    (grad,) = torch.autograd.grad(out, weight, torch.full_like(out, 50.125))
    assert grad[0].tolist() == [3208.0, 3208.0]


def test_gradients_are_the_same_in_every_run() -> None:
    ids, weight = torch.randint(0, 3, (200,)), table(3, 8)
    grad = torch.randn(200, 8)
    runs = [torch.autograd.grad(embedding(ids, weight), weight, grad)[0] for _ in range(2)]
    assert torch.equal(*runs)


@pytest.mark.plain
def test_bad_arguments_are_named() -> None:
    ids, weight = torch.tensor([1]), torch.randn(3, 4)
    with pytest.raises(KernelArgumentError, match=r"ids are int32 or int64 numbers, not float32"):
        embedding(ids.float(), weight)
    with pytest.raises(KernelArgumentError, match=r"weight is \(rows, columns\), not float32\[4\]"):
        embedding(ids, weight[0])
    with pytest.raises(KernelArgumentError, match="padding_idx is one of 3 rows, not 3"):
        embedding(ids, weight, padding_idx=3)


@pytest.mark.plain
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU would stop at torch's own assertion")
def test_float64_is_computed_in_plain_torch() -> None:
    ids, weight = torch.tensor([[1, 0], [2, 1]]), table(3, 2).double().detach().requires_grad_()
    with launching.watched() as names:
        assert torch.autograd.gradcheck(lambda w: embedding(ids, w), (weight,))
        with pytest.raises(IndexError):
            embedding(torch.tensor([3]), weight)
    assert not names


@pytest.mark.plain
@pytest.mark.parametrize("padding", [-1, 2])
def test_the_backward_written_in_plain_torch(padding: int) -> None:
    ids, weight = torch.randint(0, 4, (3, 5)), torch.randn(4, 2, dtype=torch.float64)
    out = family.embedding_meaning(ids, weight.requires_grad_(), padding)
    grad = torch.randn_like(out)
    (right,) = torch.autograd.grad(out, weight, grad)
    torch.testing.assert_close(family.backward_meaning(grad, ids, 4, padding), right)


def test_the_operator_keeps_the_rules_of_torch() -> None:
    ids, weight = torch.randint(0, 5, (3, 4)), table(5, 6)
    torch.library.opcheck(torch.ops.triton_kernels.embedding_forward.default, (ids, weight, 2))
