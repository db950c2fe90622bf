"""What our C++ operators return, without computing it: for tracing and for the compiler."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from lowering import convolution_steps, linear_groups, recurrent
from lowering.convolution_steps import Kind, Told
from lowering.outputs import lies_channels_last

Optional = torch.Tensor | None


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    before: Optional,
    times: Optional,
    after: Optional,
    act: int,
    a: float,
    b: float,
    in_out: bool = False,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1 if in_out else 0]))


def _int8_linear(x: torch.Tensor, weight: torch.Tensor, *given: Any) -> torch.Tensor:
    *_, dtype, in_out = given if isinstance(given[-1], bool) else (*given, False)
    sizes = (*x.shape[:-1], weight.shape[1 if in_out else 0])
    return x.new_empty(sizes, dtype=INT8_RESULTS[dtype])


INT8_RESULTS = (torch.float32, torch.bfloat16, torch.float16)  # as in int8_linear.cpp


def convolved(
    x: torch.Tensor, weight: torch.Tensor, geometry: Sequence[Sequence[int]], dtype: torch.dtype
) -> torch.Tensor:
    """An image channels last. `geometry`: stride, padding, dilation."""
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry, strict=True)
    spatial = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes]
    return x.new_empty((x.shape[0], *spatial, weight.shape[0]), dtype=dtype).movedim(-1, 1)


def _quantized_convolution(x: torch.Tensor, weight: torch.Tensor, *given: Any) -> torch.Tensor:
    result, *_, stride, padding, dilation, _ = given[6:]
    return convolved(x, weight, (stride, padding, dilation), QUANTIZED_RESULTS[result])


def _quantized_linear(x: torch.Tensor, weight: torch.Tensor, *given: Any) -> torch.Tensor:
    result, *_, in_out = given[8:]
    sizes = (*x.shape[:-1], weight.shape[1 if in_out else 0])
    return x.new_empty(sizes, dtype=QUANTIZED_RESULTS[result])


# as in quantized_layers.cpp
QUANTIZED_RESULTS = (torch.uint8, torch.int8, torch.float32)


def _grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    in_out: bool,
    gate: int,
    *_: object,
) -> torch.Tensor:
    outputs = weight.shape[2 if in_out else 1]
    return rows.new_empty((rows.shape[0], outputs // 2 if gate else outputs))


def _gathered_linear(
    rows: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, in_out: bool
) -> torch.Tensor:
    return rows.new_empty((chosen.shape[0], weight.shape[2 if in_out else 1]))


def mkl_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: Optional, in_out: bool = False
) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[1 if in_out else 0]))


def _linears(
    x: torch.Tensor, tensors: Sequence[torch.Tensor], integers: Sequence[int], _: object
) -> list[torch.Tensor]:
    layers = linear_groups.weights(tensors, integers)
    gates = {gate for _, _, gate in layers}
    return [
        x.new_empty((*x.shape[:-1], weight.shape[1 if in_out else 0]))
        for index, (weight, in_out, _) in enumerate(layers)
        if index not in gates
    ]


def _gated_linear(*given: Any) -> torch.Tensor:
    (result,) = _linears(*given)
    return result


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    norm_weight: Optional,
    norm_bias: Optional,
    mean: Optional,
    var: Optional,
    eps: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *_: object,
    rows: bool = False,
) -> torch.Tensor:
    kernel = weight.shape[2:]
    before, behind = padding[: len(kernel)], padding[-len(kernel) :]
    sizes = zip(x.shape[2:], kernel, stride, before, behind, dilation, strict=True)
    spatial = [(size + p + q - d * (k - 1) - 1) // s + 1 for size, k, s, p, q, d in sizes]
    if rows:
        return x.new_empty((x.shape[0], weight.shape[0], *spatial))
    return _channels_last(x, weight.shape[0], spatial)


def _training_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    turns: bool,
    way: int,
) -> torch.Tensor:
    """As torch's own, its result lies as its image does, of which Inductor takes how results are to
    lie in the end. What is computed is channels last, and so is what Inductor hands over for that
    (lowering/image_layouts.py)."""
    used, rows = weight.transpose(0, 1) if turns else weight, not lies_channels_last(x)
    return _convolution(x, used, bias, *(None,) * 4, 0.0, stride, padding, dilation, rows=rows)


def _weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, kernel: Sequence[int], *_: object
) -> torch.Tensor:
    return x.new_empty((grad.shape[1], x.shape[1], *kernel))


def _channels_last(like: torch.Tensor, channels: int, sizes: Sequence[int]) -> torch.Tensor:
    """In memory, also for images with one row (1-D)."""
    return like.new_empty((like.shape[0], *sizes, channels)).movedim(-1, 1)


def _convolutions(
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    text: str,
    others: Sequence[torch.Tensor],
    rows: bool = False,
) -> torch.Tensor:
    values, left = [x, *others], iter(tensors)
    for step in convolution_steps.told(text):
        own = [next(left) for _ in range(step.tensors)]
        values.append(_step(values[step.image], own, step))
    last = values[-1]
    return torch.empty_like(last, memory_format=torch.contiguous_format) if rows else last


def _step(image: torch.Tensor, tensors: Sequence[torch.Tensor], step: Told) -> torch.Tensor:
    stride, before, behind, dilation = (step.window[i : i + 2] for i in (0, 2, 4, 6))
    _, channels, *sizes = image.shape
    if step.kind is Kind.CONVOLUTION:
        first = 2 - len(sizes)  # images with one row have the second dimension only
        padding = (*before[first:], *behind[first:])
        geometry = (stride[first:], padding, dilation[first:])
        return _convolution(image, tensors[0], *(None,) * 5, 0.0, *geometry)
    if step.kind is Kind.MEAN:
        sizes = [1] * len(sizes)
    elif step.kind in (Kind.PART, Kind.SLICE):
        channels = step.extent[1]
    elif step.kind is Kind.ENLARGED:
        sizes = [size * times for size, times in zip(sizes, stride, strict=True)]
    elif step.kind is not Kind.POINTWISE:
        window = zip(sizes, before, behind, dilation, step.extent, stride, strict=True)
        sizes = [(size + p + q - d * (k - 1) - 1) // s + 1 for size, p, q, d, k, s in window]
    return _channels_last(image, channels, sizes)


def transposed_sizes(
    image: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Of the output of a transposed convolution."""
    sizes = (image, kernel, stride, padding, output_padding, dilation)
    return [
        (size - 1) * s - 2 * p + d * (k - 1) + more + 1
        for size, k, s, p, more, d in zip(*sizes, strict=True)
    ]


def _transposed_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional,
    norm_weight: Optional,
    norm_bias: Optional,
    mean: Optional,
    var: Optional,
    eps: float,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    *_: object,
) -> torch.Tensor:
    dims = (x.shape[2:], weight.shape[2:], stride, padding, output_padding, [1] * len(stride))
    out = x.new_empty((x.shape[0], *transposed_sizes(*dims), weight.shape[1]))
    return out.movedim(-1, 1)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> torch.Tensor:
    batch, heads, length, _size = query.shape
    return query.new_empty((batch, length, heads, value.shape[3])).transpose(1, 2)


def _product(left: torch.Tensor, right: torch.Tensor, *_: object) -> torch.Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


def _recurrent(
    x: torch.Tensor,
    state: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    cell: int,
    biases: bool,
    bidirectional: bool,
    batch_first: bool,
) -> list[torch.Tensor]:
    return recurrent.results_like(x, state, bidirectional, batch_first)


def _random(size: Sequence[int], seed: torch.Tensor, normal: bool) -> torch.Tensor:
    return seed.new_empty(size, dtype=torch.float32)


def _moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    each = [1, x.shape[1], *[1] * (x.dim() - 2)]
    return x.new_empty(each), x.new_empty(each)


def _norm_sums(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _softmax(x: torch.Tensor, logarithm: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


def _group_norm(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


def _embedding_bags(
    tables: Sequence[torch.Tensor],
    numbers: Sequence[torch.Tensor],
    begins: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    padding: Sequence[int],
    mean: bool,
    with_end: bool,
) -> torch.Tensor:
    bags = begins[0].shape[0] - (1 if with_end else 0)
    return tables[0].new_empty((bags, sum(table.shape[1] for table in tables)))


@functools.cache
def register() -> None:
    """Once the operators exist."""
    register_fake = torch.library.register_fake
    register_fake("kernel_dispatch::openmp_linear", _linear)
    register_fake("kernel_dispatch::openmp_linears", _linears)
    register_fake("kernel_dispatch::openmp_gated_linear", _gated_linear)
    register_fake("kernel_dispatch::openmp_int8_linear", _int8_linear)
    register_fake("kernel_dispatch::openmp_quantized_convolution", _quantized_convolution)
    register_fake("kernel_dispatch::openmp_quantized_linear", _quantized_linear)
    register_fake("kernel_dispatch::openmp_grouped_linear", _grouped_linear)
    register_fake("kernel_dispatch::openmp_gathered_linear", _gathered_linear)
    register_fake("kernel_dispatch::openmp_convolution", _convolution)
    register_fake("kernel_dispatch::openmp_convolutions", _convolutions)
    register_fake("kernel_dispatch::openmp_training_convolution", _training_convolution)
    register_fake("kernel_dispatch::openmp_weight_gradient", _weight_gradient)
    register_fake("kernel_dispatch::openmp_transposed_convolution", _transposed_convolution)
    register_fake("kernel_dispatch::mha_attention", _attention)
    register_fake("kernel_dispatch::openmp_product", _product)
    register_fake("kernel_dispatch::openmp_recurrent", _recurrent)
    register_fake("kernel_dispatch::openmp_random", _random)
    register_fake("kernel_dispatch::openmp_moments", _moments)
    register_fake("kernel_dispatch::openmp_norm_sums", _norm_sums)
    register_fake("kernel_dispatch::openmp_softmax", _softmax)
    register_fake("kernel_dispatch::openmp_group_norm", _group_norm)
    register_fake("kernel_dispatch::openmp_embedding_bags", _embedding_bags)
    register_fake("kernel_dispatch::mkl_linear_native", mkl_linear)
    if hasattr(torch.ops.kernel_dispatch, "openmp_linear_half"):
        register_fake("kernel_dispatch::openmp_linear_half", _linear)
        register_fake("kernel_dispatch::openmp_linears_half", _linears)
        register_fake("kernel_dispatch::openmp_gated_linear_half", _gated_linear)
