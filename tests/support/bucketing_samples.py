"""Functions of tensors whose sizes vary, written B, L and M; one or more for each rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

aten = torch.ops.aten

# The first is what is traced. All differ, so that no two letters become one symbol.
LENGTHS = ({"B": 3, "L": 5, "M": 6}, {"B": 6, "L": 12, "M": 4}, {"B": 2, "L": 7, "M": 15})
SIZES = (4, 9, 16)


@dataclass(frozen=True)
class Sample:
    name: str
    function: Callable[..., Any]
    shapes: tuple[str, ...]

    def inputs(self, sizes: dict[str, int]) -> list[torch.Tensor]:
        return [_tensor(shape, sizes) for shape in self.shapes]

    def static_dims(self) -> list[list[int]]:
        return [
            [i for i, word in enumerate(shape.split(":")[0].split()) if word.isdigit()]
            for shape in self.shapes
        ]


def _tensor(shape: str, sizes: dict[str, int]) -> torch.Tensor:
    words, _, kind = shape.partition(":")
    lengths = [sizes[word] if word.isalpha() else int(word) for word in words.split()]
    if kind == "":
        return torch.randn(lengths)
    if kind == "bool":
        return torch.rand(lengths) < 0.5
    if kind == "int":  # no zero among them
        return torch.randint(1, 9, lengths) * (torch.randint(0, 2, lengths) * 2 - 1)
    if kind == "complex":
        return torch.randn(lengths, dtype=torch.complex64)
    if kind == "bfloat16":
        return torch.randn(lengths).to(torch.bfloat16)
    # "<L", "<7": positions below that; "<-L": from the end as well
    below = kind.strip("<-")
    end = sizes[below] if below.isalpha() else int(below)
    return torch.randint(-end if "-" in kind else 0, end, lengths)


def _of(*shapes: str, **functions: Callable[..., Any]) -> list[Sample]:
    return [Sample(name, function, shapes) for name, function in functions.items()]


POINTWISE = [
    *_of(
        "B L 4",
        chain=lambda x: (x * 2 + 1).relu().sigmoid(),
        cast=lambda x: x.to(torch.bfloat16).float(),
        convert=lambda x: torch.ops.prims.convert_element_type(x, torch.float64),
        clone=lambda x: x.clone().contiguous() + 1,
        detach=lambda x: aten.detach(x) + aten.alias(x) + aten.lift_fresh_copy(x),
        scale_by_length=lambda x: x / x.shape[1],
        times_length=lambda x: x * x.shape[1] + x.shape[0],
        up_to_length=lambda x: x.clamp(max=x.shape[1]).clamp(-x.shape[0], 1),
        compared_with_length=lambda x: (x * 9 > x.shape[1]) & (x < x.shape[0]),
        of_derived_length=lambda x: x * (x.shape[1] // 2) / (x.shape[1] * x.shape[0] + 1),
        by_root_of_length=lambda x: x * x.shape[1] ** -0.5,
        where_length=lambda x: torch.where(x > 0, x, x.shape[1]),
        masked=lambda x: x.masked_fill(x > 0, 3.0),
        masked_with_tensor=lambda x: aten.masked_fill(x, x > 0, x[0, 0, 0] * 2),
        masked_by_length=lambda x: x.masked_fill(x > 0, x.shape[1]),
        where_scalars=lambda x: torch.where(x > 0, 1.0, 2.0),
        scalar_where=lambda x: torch.where(x > 0, x, 2.0) + torch.where(x > 0, 1.0, x),
        copied=lambda x: aten.copy(x, x[:, :1].double()) + aten.copy(x, x.exp()),
        length_is_an_output=lambda x: (x + 1, x.shape[1], x.shape[0] * 2),
    ),
    *_of("B L 4:complex", complex_numbers=lambda x: (x * x).abs() + torch.view_as_real(x)[..., 0]),
    *_of(
        "B L 4:",
        to_complex=lambda x: torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2)).abs(),
        polar=lambda x: torch.view_as_real(torch.polar(x, x) + torch.complex(x, x)),
    ),
    *_of("B L 4", "B 1 4", "L 1", "4", broadcast=lambda x, y, z, w: x * y + z - w),
    *_of(
        "L:int",
        "L:int",
        div=lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        floor_divide=lambda x, y: x // y,
        remainder=lambda x, y: x % y,
        fmod=lambda x, y: torch.fmod(x, y),
    ),
]

REDUCTIONS = [
    *_of(
        "B L 4",
        sum=lambda x: (x.exp().sum(), x.sum(1), x.sum((0, 1), keepdim=True), x.sum(-1)),
        nansum=lambda x: (x.nansum(1), x.exp().nansum()),
        mean=lambda x: (x.exp().mean(), x.mean(1), x.mean((0, -1), keepdim=True), x.mean(2)),
        var=lambda x: (x.var(1), x.std((0, 1), keepdim=True), x.var(2), x.var(1, correction=0)),
        var_mean=lambda x: (*torch.var_mean(x, 1), *torch.std_mean(x, (0, 2), keepdim=True)),
        linalg_vector_norm=lambda x: (x.norm(), x.norm(dim=1), x.norm(p=1, dim=(0, 1))),
        count_nonzero=lambda x: ((x > 0).count_nonzero(), (x > 0).count_nonzero(1)),
        prod=lambda x: (x.prod(), x.prod(1)),
        amax=lambda x: (x.amax(1), x.amax((0, 1)), x.amax(-1)),
        amin=lambda x: (x.amin(1), x.amin((0, 1)), x.amin(-1)),
        max=lambda x: (x.max(), *x.max(1), *x.max(2, keepdim=True)),
        min=lambda x: (x.min(), *x.min(1), *x.min(2, keepdim=True)),
        argmax=lambda x: (x.argmax(1), x.argmax(0, keepdim=True), x[:, 0, 0].argmax()),
        argmin=lambda x: (x.argmin(1), x.argmin(0, keepdim=True), x[0, :, 0].argmin()),
        logsumexp=lambda x: (aten.logsumexp(x, [1]), aten.logsumexp(x, [0, 1], True)),
        _softmax=lambda x: (x.softmax(1), x.softmax(0), x.softmax(2)),
        _log_softmax=lambda x: (x.log_softmax(1), x.log_softmax(0), x.log_softmax(2)),
        _safe_softmax=lambda x: aten._safe_softmax(x, 1),
        merged=lambda x: (x.reshape(-1, 4).sum(0), x.reshape(-1, 4).softmax(0).mean(0)),
        merged_with_the_last=lambda x: (x.flatten(1).mean(1), x.flatten().amax(0)),
    ),
    *_of(
        "B L 4",
        any=lambda x: ((x > 50).any(), (x > 50).any(1), (x > 50).any((0, 1))),
        all=lambda x: ((x < 50).all(), (x < 50).all(1), (x < 50).all((0, 1))),
    ),
    *_of("B L:int", amax_of_integers=lambda x: (x.amax(1), x.amin(1), x.sum(), x.argmax(0))),
    *_of("B L 4:bfloat16", mean_of_bfloat16=lambda x: (x.mean(1), x.softmax(1), x.var(1))),
    *_of(
        "B L",
        cumsum=lambda x: (x.cumsum(1), x.cumsum(0), (x > 0).cumsum(1)),
        other_scans=lambda x: (x.cumprod(1), *x.cummax(1), *x.cummin(1), x.logcumsumexp(1)),
    ),
]

PRODUCTS = [
    *_of("B L", "L M", mm=lambda x, y: (x @ y, y.t() @ x.t())),
    *_of("B L 4", "B L 5", bmm=lambda x, y: x.transpose(1, 2) @ y),
    *_of("B L", "L 4", "4", addmm=lambda x, y, z: torch.addmm(z, x, y, alpha=2)),
    *_of("B 4 L", "B L M", "M", baddbmm=lambda x, y, z: torch.baddbmm(z, x, y)),
    *_of("B L", "L", mv=lambda x, y: x @ y),
    *_of("L", "L", dot=lambda x, y: x @ y),
    *_of("B L 4", "5 4", "5", linear=F.linear),
    *_of("B L 4", "B M 4", scores=lambda x, y: (x @ y.transpose(1, 2)).softmax(-1) @ y),
    *_of("B L 4", outer=lambda x: torch.einsum("blc,bmc->blm", x, x)),
    *_of("B 4 L", "5 4 3", "5", convolution=lambda x, w, b: F.conv1d(x, w, b, padding=1)),
    *_of("B 4 L", "4 1 3", strided=lambda x, w: F.conv1d(x, w, None, 2, 2, groups=4)),
    *_of("B 4 M L", "5 4 3 3", "5", two_dimensions=lambda x, w, b: F.conv2d(x, w, b, padding=1)),
    *_of("B 4 6", "4 5 3", transposed_batch=lambda x, w: F.conv_transpose1d(x, w)),
    *_of(
        "B 2 L 4",
        "B 2 M 4",
        "B 2 M 5",
        attention=F.scaled_dot_product_attention,
        causal=lambda q, k, v: F.scaled_dot_product_attention(
            q, torch.cat([q, k], 2), torch.cat([q @ q.transpose(2, 3) @ q, k], 2), is_causal=True
        ),
    ),
    *_of(
        "B 2 L 4",
        "B L:bool",
        masked_attention=lambda x, m: F.scaled_dot_product_attention(
            x, x, x, attn_mask=m[:, None, None, :]
        ),
    ),
]

VIEWS = [
    *_of(
        "B L 4",
        merge_and_split=lambda x: (x.reshape(-1, 2, 2) + 1).reshape(x.shape),
        unsafe_view=lambda x: aten._unsafe_view(x + 1, [x.shape[0] * x.shape[1], 4]).sum(0),
        heads=lambda x: x.reshape(*x.shape[:2], 2, 2).transpose(1, 2).flatten(0, 1) * 2,
        permuted=lambda x: (x.permute(2, 0, 1) + 1, aten.permute(x, [-1, 0, 1]).sum(2)),
        unsqueezed=lambda x: x[:, None, ..., None] + 1,
        squeezed=lambda x: (aten.squeeze(x[:, None]) + 1, x.unsqueeze(1).squeeze(1).sum(1)),
        squeezed_dims=lambda x: aten.squeeze.dims(x[:, None, :, None], [1, 3]) + 1,
        expanded=lambda x: x[:, None].expand(-1, x.shape[1], -1, -1).sum((1, 2)),
        expanded_anew=lambda x: x[0, 0].expand(x.shape[1], -1).sum(0),
        repeated=lambda x: (x.repeat(2, 3, 1), x.repeat(1, 2, 1).sum(1)),
        repeated_by_length=lambda x: x[:, :1].repeat(1, x.shape[1], 1).sum(1),
        repeated_each=lambda x: x.repeat_interleave(2, dim=1).cumsum(-1).sum(1),
        split=lambda x: x.chunk(2, dim=-1)[1] * 2,
        split_sizes=lambda x: [part + 1 for part in x.split([1, 3], -1)],
        unbound=lambda x: [part + 1 for part in x.unbind(-1)],
    ),
    *_of("B L", transposed=lambda x: aten.t(x) * 2),
    *_of("B L 4", "8", reshaped_constant=lambda x, y: x.sum(1) + y.view(2, 4)[1]),
]

POSITIONS = [
    *_of(
        "B L 4",
        first=lambda x: x[:, 0] * 2,
        last=lambda x: x[:, -1] * 2,
        last_but_one=lambda x: (x[:, -2] * 2, x.select(1, x.shape[1] - 1) + 1),
        select_row=lambda x: x[-1, 1] + 1,
        all_but_last=lambda x: (x[:, :-1] * 2).sum(1),
        all_but_first=lambda x: x[:, 1:].sum(1) + (x[:, 1:] * x[:, :-1]).amax(1),
        last_three=lambda x: x[:, -2:] * 2,
        first_two=lambda x: x[:, :2] * 2,
        every_second=lambda x: (x[:, ::2].sum(1), x[:, 1::3] * 2),
        with_token=lambda x: torch.cat([x[:1, :1].expand(x.shape[0], 1, 4) * 2, x], 1),
        token_behind=lambda x: torch.cat([x, x[:, :1]], 1).softmax(1),
        to_itself=lambda x: torch.cat([x, x, x[:, 1:]], 1).flip(2).cumsum(1),
        other_dim=lambda x: torch.cat([x, x], -1),
        stacked=lambda x: torch.stack([x, x * 2], 1).sum(2),
        rolled_by_hand=lambda x: torch.cat([x[:, 1:], x[:, :1]], 1) - x,
        padded=lambda x: (F.pad(x, (0, 0, 2, 3), value=7.0).sum(1), F.pad(x, (1, 1)) * 2),
        shifted=lambda x: F.pad(x, (0, 0, 1, -1)) - x,
        cut=lambda x: F.pad(x, (0, 0, -1, -1)).sum(1),
        constant_pad_nd=lambda x: F.pad(x, (0, 0, 0, 2)).sum((0, 1)),
        flipped=lambda x: x.flip(-1) + x.roll(1, -1),
        diagonal=lambda x: (x @ x.transpose(1, 2)).tril() + (x @ x.transpose(1, 2)).triu(1),
    ),
    *_of("B M", "B L", cat_two=lambda x, y: torch.cat([x, y, x], 1).cumsum(1)),
    *_of("L", "M", behind_the_other=lambda x, y: torch.cat([x, y])[x.shape[0] :] * 2),
    *_of("20 4", "B L", cut_to_length=lambda table, x: table[: x.shape[1]].sum(0) + x.sum()),
    *_of("15 4", "M", table_that_ends=lambda table, x: table[: x.shape[0]] * 2 + x.sum()),
    *_of(
        "40 4",
        "B L",
        window=lambda table, x: table[x.shape[0] : x.shape[0] + x.shape[1]] * 2,
    ),
]


def _written(x: torch.Tensor) -> torch.Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1].clone()
    shifted[:, 0] = 7
    shifted[:, :, 1:2] = 5
    return shifted


POSITIONS += [
    *_of("B L 4", written=_written),
    *_of(
        "B L 4",
        "B L",
        slice_scatter=lambda x, y: aten.slice_scatter(x, y[..., None] * 2, 2, 1, 2),
        select_scatter=lambda x, y: aten.select_scatter(x, y, 2, -1).sum(1),
    ),
]

INDEXING = [
    *_of("7 4", "B L:<7", embedding=lambda table, index: F.embedding(index, table)),
    *_of(
        "B L 4",
        "M:<L",
        index_select=lambda x, index: x.index_select(1, index).sum(1),
    ),
    *_of("B L", "B M:<L", gather=lambda x, index: x.gather(1, index).sum(1)),
    *_of("B L 4", "B L 2:<4", gather_fixed=lambda x, index: x.gather(2, index).sum(1)),
    *_of("B L 4", "B L 2:<4", scatter=lambda x, index: x.scatter(2, index, 2.5)),
    *_of(
        "B L 4",
        "B L 2:<4",
        scatter_add=lambda x, index: x.scatter_add(2, index, x[..., :2] * 2),
        scatter_src=lambda x, index: torch.zeros_like(x).scatter(2, index, x[..., :2] * 0 + 2),
    ),
    *_of("B L", "M:<-L", index=lambda x, index: x[:, index].sum(1)),
    *_of("B L 4", "B:<-L", last_token=lambda x, at: x[torch.arange(x.shape[0]), at] * 2),
    *_of("B L 4", "M:<L", "M:<4", apart=lambda x, one, other: x[:, one, other].sum(1)),
    *_of("B L 4", "M:<B", "M:<4", around=lambda x, one, other: x[one, :, other].sum(0)),
    *_of(
        "B L",
        "B L:bool",
        last_marked=lambda x, mask: x.gather(1, (mask * torch.arange(x.shape[1])).amax(1)[:, None]),
    ),
]

CREATION = [
    *_of(
        "B L 4",
        full=lambda x: torch.full(x.shape[:2], 2.5).sum(1),
        zeros=lambda x: torch.zeros(x.shape[0], 3) + torch.ones(x.shape[0], 1),
        empty=lambda x: torch.empty(x.shape[:2]).fill_(3.0).sum(1),
        new=lambda x: (x.new_full((x.shape[1],), 2.0).sum(), x.new_zeros(x.shape[1]) + 1),
        new_more=lambda x: x.new_ones(x.shape[1]).sum() + x.new_empty(x.shape[1]).zero_().sum(),
        like=lambda x: torch.full_like(x, 2.0).sum(1) + torch.ones_like(x).sum(1),
        more_like=lambda x: torch.zeros_like(x).sum(1) + torch.empty_like(x).fill_(1).sum(1),
        length_as_tensor=lambda x: aten.scalar_tensor(x.shape[1], dtype=torch.float32) + 1,
        full_of_length=lambda x: torch.full((x.shape[0], 2), x.shape[1]),
        arange=lambda x: torch.arange(x.shape[1]) * 2,
        arange_from=lambda x: torch.arange(x.shape[0], x.shape[0] + x.shape[1]),
        arange_of_floats=lambda x: torch.arange(x.shape[1], dtype=torch.float32) / 3,
        arange_of_twos=lambda x: torch.arange(0, 2 * x.shape[1], 2),
        iota=lambda x: torch.ops.prims.iota(
            x.shape[1], start=3, step=2, dtype=torch.int64, device="cpu", requires_grad=False
        ),
        identity=lambda x: aten.eye(x.shape[1]) + aten.eye(x.shape[1], x.shape[1]),
        causal_mask=lambda x: torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1]),
    ),
]

ROWS = [
    *_of(
        "B L 4",
        "4",
        "4",
        layer_norm=lambda x, w, b: F.layer_norm(x, (4,), w, b),
        rms_norm=lambda x, w, b: F.rms_norm(x, (4,), w) + b,
    ),
    *_of(
        "B L 4",
        sorted=lambda x: [aten.sort(x, -1)[0], aten.argsort(x, -1), aten.sort(x, stable=True)[1]],
        topk=lambda x: [*x.topk(2, -1), x.kthvalue(2, -1)[0], x.median(-1)[0]],
        glu=lambda x: F.glu(x, -1),
    ),
    *_of(
        "B 4 6 8",
        "4",
        "4",
        group_norm=lambda x, w, b: F.group_norm(x, 2, w, b),
        batch_norm=lambda x, w, b: F.batch_norm(x, b, w.abs() + 1, w, b),
    ),
    *_of(
        "B 4 6 8",
        pools=lambda x: [F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, (3, 2))],
        more_pools=lambda x: F.adaptive_max_pool2d(x, (3, 2)),
        nearest=lambda x: [F.interpolate(x, scale_factor=2), F.interpolate(x, (5, 7))],
        bilinear=lambda x: F.interpolate(x, (5, 7), mode="bilinear"),
        bicubic=lambda x: F.interpolate(x, (5, 7), mode="bicubic"),
        borders=lambda x: [F.pad(x, (1, 1, 1, 1), mode=mode) for mode in ("reflect", "replicate")],
        shuffled=lambda x: [aten.pixel_shuffle(x, 2), aten.pixel_unshuffle(x, 2)],
    ),
]

SAMPLES = [
    *POINTWISE,
    *REDUCTIONS,
    *PRODUCTS,
    *VIEWS,
    *POSITIONS,
    *INDEXING,
    *CREATION,
    *ROWS,
]
