"""oneDNN (which torch calls mkldnn): linear layers and convolutions with prepacked weights.

The graph keeps the weight as an input and calls an operator of ours that owns the packed form.
So an updated weight is seen, equal layers share a compiled graph, and cache keys do not depend on
the values of weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowering import direct_calls, libraries, observing
from lowering.contract import Probe, Provider, RegionMaker
from lowering.norm_folding import factor_and_shift
from lowering.packing import PackedWeights, Place, out_in
from lowering.providers import half_precision, mkldnn_quantized, mkldnn_transposed, post_ops
from lowering.regions.convolution import LONGEST_CHAIN, Convolution, torch_unfolds
from lowering.regions.epilogue import Epilogue
from lowering.regions.linear import Linear


def probe() -> Probe:
    if not torch.backends.mkldnn.is_available():
        return Probe.no("this torch was built without oneDNN")
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return Probe.no("this torch has no mkldnn::_linear_pointwise")
    return Probe.yes(libraries.onednn_version())


weights = PackedWeights()


_library = torch.library.Library("kernel_dispatch", "FRAGMENT")

# --- linear ---------------------------------------------------------------------------------------

_library.define(
    "mkldnn_linear(Tensor input, Tensor weight, Tensor? bias, str activation, float a, float b, "
    "bool in_out=False) -> Tensor"
)


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *constants: Any
) -> torch.Tensor:
    return _every_linear(*constants)(input, weight, bias)


def _one_linear(activation: str, a: float, b: float, in_out: bool = False) -> Callable[..., Any]:
    """What one call in a graph computes."""
    place, run = Place(weights), torch.ops.mkldnn._linear_pointwise.default
    name, numbers, algorithm = post_ops.of(activation, a, b)

    def linear(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        dtype = input.dtype
        if half_precision.is_widened(dtype):
            return linear(input.float(), weight, bias).to(dtype)
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        if not input.numel() or not weight.numel():  # oneDNN has no empty products
            observing.region_ran("linear", "eager")
            out = torch.nn.functional.linear(input, out_in(weight, in_out).to(dtype), bias)
            return post_ops.activated(out, activation, a, b)
        observing.region_ran("linear", "mkldnn")
        make = functools.partial(_pack_linear, weight, dtype, in_out)
        packed = place.get((weight,), (dtype, in_out), make)
        result: torch.Tensor = run(input.contiguous(), packed, bias, name, numbers, algorithm)
        return result

    return linear


_every_linear = functools.cache(_one_linear)


def _pack_linear(weight: torch.Tensor, dtype: torch.dtype, in_out: bool) -> torch.Tensor:
    plain = out_in(weight.detach(), in_out).to(dtype).contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(plain, None)


def linear_meta(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    a: float,
    b: float,
    in_out: bool = False,
) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[1 if in_out else 0]))


_library.impl("mkldnn_linear", _linear, "CPU")
direct_calls.offer(torch.ops.kernel_dispatch.mkldnn_linear.default, 3, _one_linear)
torch.library.register_fake("kernel_dispatch::mkldnn_linear", linear_meta, lib=_library)


def _emit_linear(graph: fx.Graph, match: Linear, epilogue: Epilogue) -> fx.Node:
    act = epilogue.activation
    return graph.call_function(
        torch.ops.kernel_dispatch.mkldnn_linear.default,
        (match.input, match.weight, match.bias, act.name, float(act.a), float(act.b), match.in_out),
    )


# --- convolution ----------------------------------------------------------------------------------

_library.define(
    "mkldnn_convolution(Tensor input, Tensor weight, Tensor? bias, Tensor?[] norm, float eps, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, int groups, str activation, float a, "
    "float b, *, bool rows=False, bool short_chains=False) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),  # Inductor is to write images as the graph says
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
    *constants: Any,
    **how: bool,
) -> torch.Tensor:
    geometry = (tuple(stride), tuple(padding), tuple(dilation))
    made = _every_convolution(eps, *geometry, *constants, **how)
    result: torch.Tensor = made(input, weight, bias, norm)
    return result


def _one_convolution(
    eps: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    a: float,
    b: float,
    rows: bool = False,
    short_chains: bool = False,
) -> Callable[..., Any]:
    """What one call in a graph computes."""
    if rows:
        how = (groups, activation, a, b, short_chains)
        return _convolution_of_rows(eps, stride, padding, dilation, *how)
    place, geometry = Place(weights), (padding, stride, dilation, groups)
    post_op = post_ops.of(activation, a, b)

    def convolution(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        dtype = input.dtype
        if half_precision.is_widened(dtype):
            return convolution(input.float(), weight, bias, norm).to(dtype)
        layout = mkldnn_transposed.channels_last(input)
        image = input.contiguous(memory_format=layout)
        parts = tuple([t for t in (weight, bias, *norm) if t is not None])
        if _is_torchs(input, weight, groups, short_chains):
            observing.region_ran("convolution", "eager")

            def fold() -> tuple[torch.Tensor, torch.Tensor | None]:
                plain, shift = fold_norm(weight, bias, norm, eps, dtype)
                return plain.contiguous(memory_format=layout), shift

            plain, shift = place.get(parts, (dtype, eps, bias is None, "plain"), fold)
            run_plain = torch.conv2d if input.dim() == 4 else torch.conv3d
            out = run_plain(image, plain, shift, stride, padding, dilation, groups)
            return post_ops.activated(out.contiguous(memory_format=layout), activation, a, b)
        observing.region_ran("convolution", "mkldnn")

        channels = weight.shape[1]
        at_a_time = _channels_at_a_time(weight, LONGEST_CHAIN) if short_chains else channels

        def pack() -> tuple[list[torch.Tensor], torch.Tensor | None]:
            plain, shift = fold_norm(weight, bias, norm, eps, dtype)
            return [_packed(part, input, *geometry) for part in plain.split(at_a_time, 1)], shift

        packed, shift = place.get(parts, (dtype, eps, groups, bias is None, at_a_time), pack)
        if len(packed) > 1:
            out = _in_short_chains(image, packed, shift, geometry, activation == "relu")
            return out if activation == "relu" else post_ops.activated(out, activation, a, b)
        result: torch.Tensor = run(image, packed[0], shift, *geometry, *post_op)
        return result

    run = torch.ops.mkldnn._convolution_pointwise.default
    return convolution


def _channels_at_a_time(weight: torch.Tensor, chain: int) -> int:
    """Parts of about the same size, in whole vectors of oneDNN's."""
    channels, taps = weight.shape[1], math.prod(weight.shape[2:])
    most = max(16, chain // taps // 16 * 16)
    if taps == 1 or channels <= most:  # products of matrices are added up as eager's
        return channels
    parts = -(-channels // most)
    return -(-channels // (parts * 16)) * 16


def _is_torchs(image: torch.Tensor, weight: torch.Tensor, groups: int, as_exact: bool) -> bool:
    """oneDNN has no empty images. And what torch multiplies as matrices takes it no longer, and is
    added up in parts: up to three times what the contract allows is lost in one long chain."""
    if not image.numel() or not weight.numel():
        return True
    long = math.prod(weight.shape[1:]) > LONGEST_CHAIN // 2
    return as_exact and long and torch_unfolds(image, weight, groups)


def _packed(
    weight: torch.Tensor,
    image: torch.Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    sizes = [image.shape[0], weight.shape[1] * groups, *image.shape[2:]]
    reorder = torch.ops.mkldnn._reorder_convolution_weight
    packed: torch.Tensor = reorder(weight, padding, stride, dilation, groups, sizes)
    return packed


def _in_short_chains(
    image: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    geometry: tuple[Any, ...],
    relu: bool,
) -> torch.Tensor:
    """Some channels after the other, each part added to what is there."""
    first = torch.ops.mkldnn._convolution_pointwise.default
    add = torch.ops.mkldnn._convolution_pointwise_.binary
    out: torch.Tensor | None = None
    channels = weights[0].shape[1]
    for index, (part, weight) in enumerate(zip(image.split(channels, 1), weights, strict=True)):
        dense = part.contiguous(memory_format=torch.channels_last)
        if out is None:
            out = first(dense, weight, bias, *geometry, "none", [], "")
        else:
            last = "relu" if relu and index == len(weights) - 1 else None
            out = add(out, dense, weight, None, *geometry, "add", 1.0, last, [], "")
    assert out is not None
    return out


def _convolution_of_rows(
    eps: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    a: float,
    b: float,
    short_chains: bool,
) -> Callable[..., Any]:
    """Images in rows on both sides: oneDNN lays them out on its own, which takes less time than to
    do so outside. It takes packed weights too, but gives images channels last then. Volumes that
    torch would unfold are added up in short chains: torch itself takes up to eight times as
    long."""
    place, run = Place(weights), torch.ops.aten.mkldnn_convolution.default

    def convolution(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        dtype = input.dtype
        if half_precision.is_widened(dtype):
            return convolution(input.float(), weight, bias, norm).to(dtype)
        parts = tuple([t for t in (weight, bias, *norm) if t is not None])
        plain, shift = place.get(
            parts, (dtype, eps, "rows"), lambda: fold_norm(weight, bias, norm, eps, dtype)
        )
        volume = input.dim() == 5
        if _is_torchs(input, weight, groups, short_chains and not volume):
            observing.region_ran("convolution", "eager")
            run_plain = torch.conv3d if volume else torch.conv2d
            out = run_plain(input, plain, shift, stride, padding, dilation, groups)
            return post_ops.activated(out, activation, a, b)
        observing.region_ran("convolution", "mkldnn")
        image, geometry = input.contiguous(), (padding, stride, dilation, groups)
        if not (volume and short_chains and torch_unfolds(image, weight, groups)):
            return post_ops.activated(run(image, plain, shift, *geometry), activation, a, b)
        channels = _channels_at_a_time(weight, LONGEST_CHAIN // 2)
        pairs = zip(image.split(channels, 1), plain.split(channels, 1), strict=True)
        out = run(*next(pairs), shift, *geometry)
        for part, its_weight in pairs:
            out += run(part, its_weight, None, *geometry)
        return post_ops.activated(out, activation, a, b)

    return convolution


_every_convolution = functools.cache(_one_convolution)


def fold_norm(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Sequence[torch.Tensor | None],
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of the convolution that does the work of a BatchNorm behind it as well."""
    plain = weight.detach()
    if not norm:
        return plain.to(dtype).contiguous(), None if bias is None else bias.detach().to(dtype)
    factor, shift = factor_and_shift(bias, norm, eps)
    scaled = plain.double() * factor.reshape(-1, *[1] * (weight.dim() - 1))
    return scaled.to(dtype).contiguous(), shift.to(dtype)


def convolution_meta(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: list[torch.Tensor | None],
    eps: float,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *_: object,
    rows: bool = False,
    short_chains: bool = False,
) -> torch.Tensor:
    sizes = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    spatial = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes]
    if rows:
        return input.new_empty((input.shape[0], weight.shape[0], *spatial))
    return input.new_empty((input.shape[0], *spatial, weight.shape[0])).movedim(-1, 1)


_library.impl("mkldnn_convolution", _convolution, "CPU")
direct_calls.offer(torch.ops.kernel_dispatch.mkldnn_convolution.default, 4, _one_convolution)
torch.library.register_fake("kernel_dispatch::mkldnn_convolution", convolution_meta, lib=_library)


def _emit_convolution(graph: fx.Graph, match: Convolution, epilogue: Epilogue) -> fx.Node:
    return graph.call_function(
        torch.ops.kernel_dispatch.mkldnn_convolution.default,
        convolution_arguments(match, epilogue),
        _how(match),
    )


def _how(match: Convolution) -> dict[str, Any]:
    image = match.input.meta["val"]
    if _is_volume_in_rows(match):
        return {"rows": True, "short_chains": image.dtype == torch.float32}
    # Where eager's images lie channels last, its sums are as long, and half precision rounds more.
    as_exact = image.dtype == torch.float32 and image.is_contiguous() and match.groups == 1
    return {"short_chains": True} if as_exact and image.dim() == 4 else {}


def _is_volume_in_rows(match: Convolution) -> bool:
    """They stay in rows: channels last, oneDNN gains a tenth of the time, and sums over 64 channels
    and more have four times eager's error."""
    image = match.input.meta["val"]
    return image.dim() == 5 and image.is_contiguous()


def convolution_arguments(match: Convolution, epilogue: Epilogue) -> tuple[Any, ...]:
    """What an operator with this schema is called with; IPEX's has the same one."""
    act, norm = epilogue.activation, match.norm
    parts = [norm.weight, norm.bias, norm.mean, norm.var] if norm is not None else []
    return (
        match.input,
        match.weight,
        match.bias,
        parts,
        norm.eps if norm is not None else 0.0,
        match.stride,
        match.padding,
        match.dilation,
        match.groups,
        act.name,
        float(act.a),
        float(act.b),
    )


def _refuses(match: Convolution) -> str:
    """One-row images through oneDNN's 2-D convolution gain nothing, so they are left alone."""
    lines = match.weight.meta["val"].dim() == 3
    return "mkldnn takes convolutions of images and volumes only" if lines else ""


def _packed_element(match: Convolution) -> int:
    """For images in rows oneDNN gets the weight as it is, or with its norm folded in."""
    in_rows = match.stands_alone or _is_volume_in_rows(match)
    changed = match.casts_weight or half_precision.is_widened(match.dtype)
    as_it_is = in_rows and match.norm is None and not changed
    return 0 if as_it_is else half_precision.element(match)


def _declines(match: Convolution) -> str:
    """Between images in rows torch calls oneDNN as well, but for 1x1, of which its own product is
    twice as fast: what can be gained is the work that follows."""
    nothing_follows = match.norm is None and all(user.op == "output" for user in match.node.users)
    image = match.weight.meta["val"].dim() == 4  # of single volumes torch's own is slow
    easy = image and not half_precision.is_widened(match.dtype)
    gains_nothing = easy and (match.is_product or nothing_follows) and match.stands_alone
    return "torch's own convolution between images in rows is as fast" if gains_nothing else ""


PROVIDER = Provider(
    name="mkldnn",
    summary="oneDNN with prepacked weights: linear layers and convolutions in inference",
    probe=probe,
    regions={
        "linear": RegionMaker(
            _emit_linear,
            post_ops.ABILITIES,
            packed_element=half_precision.element,
        ),
        "convolution": RegionMaker(
            _emit_convolution,
            post_ops.ABILITIES,
            _refuses,
            _declines,
            packed_element=_packed_element,
        ),
        "transposed_convolution": mkldnn_transposed.REGION,
        "quantized_convolution": mkldnn_quantized.CONVOLUTION,
        "quantized_linear": mkldnn_quantized.LINEAR,
    },
)
