"""C++ kernels of ours, on OpenMP threads: layers, products, norms of images, random numbers.

They are built for this machine at first use (`lowering/native`). Compared with a library call they
absorb more of what stands around them and cost a microsecond to call. Linear layers and
convolutions in half precision are multiplied by the CPU itself where it can; all other half
precision is computed in float32, from weights that were widened once.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch import fx

from lowering import machine
from lowering.contract import Probe, Provider, RegionMaker
from lowering.convolution_steps import Way
from lowering.graphs import call, hint
from lowering.native import library
from lowering.native.shapes import INT8_RESULTS, QUANTIZED_RESULTS
from lowering.regions.batch_norm import GradientSums, Moments
from lowering.regions.calls import value_of
from lowering.regions.convolution import LONGEST_CHAIN, Convolution
from lowering.regions.embedding_bag import EmbeddingBags
from lowering.regions.epilogue import ACTIVATIONS, Abilities, Epilogue
from lowering.regions.gathered_weights import Gathered
from lowering.regions.group_norm import GroupNorm
from lowering.regions.grouped_linear import GroupedLinear
from lowering.regions.int8_linear import Int8Linear
from lowering.regions.linear import Linear
from lowering.regions.product import Product
from lowering.regions.quantized import QuantizedLayer
from lowering.regions.random_numbers import RandomNumbers
from lowering.regions.recurrent import GATES, Recurrent, read
from lowering.regions.softmax import Softmax
from lowering.regions.training_convolution import TrainingConvolution
from lowering.regions.transposed_convolution import TransposedConvolution
from lowering.regions.weight_gradient import WeightGradient
from lowering.regions.widening import narrowed, widened

aten = torch.ops.aten

ABILITIES = Abilities(frozenset(ACTIVATIONS) - {"none"}, before=True, times=True, after=True)


def probe() -> Probe:
    return library.probe()


def _in_halves(match: Linear | Convolution) -> bool:
    """Does it read and give halves, and multiply them as such?"""
    return library.multiplies(match.dtype)


def _is_long_product(match: Convolution) -> bool:
    """As `halves::suits` in native/half_convolution.h has it: others are computed in float32."""
    total, inputs, *taps = match.weight.meta["val"].shape
    outputs = total // match.groups
    by_channel = match.groups > 1 and (inputs == 1 or (inputs, outputs) == (8, 8))
    return not by_channel and outputs >= 8 and inputs * math.prod(taps) >= 16


def _emit_linear(graph: fx.Graph, match: Linear, epilogue: Epilogue) -> fx.Node:
    if _in_halves(match):
        beside = (epilogue.before, epilogue.times, epilogue.after)
        return graph.call_function(
            torch.ops.kernel_dispatch.openmp_linear_half.default,
            (match.input, match.weight, match.bias, *beside, *_activation(epilogue), match.in_out),
        )
    head = (widened(graph, match.input), match.weight, match.bias)
    new = graph.call_function(
        torch.ops.kernel_dispatch.openmp_linear.default,
        (*head, *_tail(graph, epilogue), match.in_out),
    )
    return narrowed(graph, new, match.dtype)


def _emit_int8_linear(graph: fx.Graph, match: Int8Linear, epilogue: Epilogue) -> fx.Node:
    """Of halves that cannot be multiplied as they are, floats."""
    dtype, x = match.dtype, match.input
    beside: tuple[Any, ...] = (epilogue.before, epilogue.times, epilogue.after)
    if not match.of_bytes and dtype is not torch.float32 and not library.multiplies(dtype):
        dtype, x = torch.float32, widened(graph, x)
        beside = _widened_beside(graph, epilogue)
    around = (match.row_scale, match.scale, match.bias, *beside, *_activation(epilogue))
    new = graph.call_function(
        torch.ops.kernel_dispatch.openmp_int8_linear.default,
        (x, match.weight, *around, INT8_RESULTS.index(dtype), match.in_out),
    )
    return new if dtype is match.dtype else narrowed(graph, new, match.dtype)


def _emit_grouped_linear(graph: fx.Graph, match: GroupedLinear, epilogue: Epilogue) -> fx.Node:
    if match.gathered is not None:
        return _emit_gathered_linear(graph, match, match.gathered)
    epilogue.steps.extend(match.steps)
    act = match.activation
    return graph.call_function(
        torch.ops.kernel_dispatch.openmp_grouped_linear.default,
        (
            *(match.input, match.weight, match.ends, match.in_out, int(match.gate)),
            *(ACTIVATIONS.index(act.name), float(act.a), float(act.b)),
        ),
    )


def _emit_gathered_linear(graph: fx.Graph, match: GroupedLinear, found: Gathered) -> fx.Node:
    chosen = found.chosen
    if chosen.meta["val"].dim() > 1:
        chosen = call(graph, aten.reshape.default, chosen, [-1])
    new = call(
        graph,
        torch.ops.kernel_dispatch.openmp_gathered_linear.default,
        *(call(graph, aten.select.int, *found.rows, 0), match.weight, chosen, match.in_out),
    )
    _, *sizes = match.node.meta["val"].shape
    return graph.call_function(aten.reshape.default, (new, [-1, *sizes]))


def _refuses_grouped_linear(match: GroupedLinear) -> str:
    if match.dtype is torch.float32 or library.multiplies(match.dtype):
        return ""
    return f"openmp multiplies no {_name(match.dtype)} here"


def _declines_grouped_linear(match: GroupedLinear) -> str:
    """Measured: 32 weights of 1024 to 1536, 2 cores of a Xeon with AMX; one row each takes 11.3 ms,
    torch's loop 6.6, 32 rows each 20.1 and 21.5."""
    if match.in_out and match.gathered is None and match.dtype is torch.float32:
        return "openmp gains nothing on weights of float32 that are stored as (group, in, out)"
    return ""


def _emit_quantized_convolution(
    graph: fx.Graph, match: QuantizedLayer, epilogue: Epilogue
) -> fx.Node:
    epilogue.steps.extend(match.steps)
    *spatial, groups = match.geometry
    return graph.call_function(
        torch.ops.kernel_dispatch.openmp_quantized_convolution.default,
        (*match.tensors(), *_of_quantized(match), *map(list, spatial), groups),
    )


def _emit_quantized_linear(graph: fx.Graph, match: QuantizedLayer, epilogue: Epilogue) -> fx.Node:
    epilogue.steps.extend(match.steps)
    return graph.call_function(
        torch.ops.kernel_dispatch.openmp_quantized_linear.default,
        (*match.tensors(), *match.found_grid(), *_of_quantized(match), match.in_out),
    )


def _of_quantized(match: QuantizedLayer) -> tuple[Any, ...]:
    act = match.activation
    kind = QUANTIZED_RESULTS.index(match.dtype)
    return *match.grids(), kind, ACTIVATIONS.index(act.name), float(act.a), float(act.b)


def _refuses_quantized_convolution(match: QuantizedLayer) -> str:
    *_, groups = match.geometry
    outputs, inputs, *_ = match.weight.meta["val"].shape
    alone = inputs == 1 and outputs == groups
    if match.node.meta["val"].dim() != 4 or not (groups == 1 or alone):
        return "openmp takes images only, all channels in one group or each in its own"
    return _refuses_quantized(match)


def _refuses_quantized(match: QuantizedLayer) -> str:
    if match.dtype not in QUANTIZED_RESULTS:
        return "openmp gives bytes or float32"
    if match.other is not None and match.other.meta["val"].dtype != match.dtype:
        return "openmp adds what is of the result's own kind"
    if match.grid.dtype is None or not match.grid.is_fixed:
        return ""
    limits = torch.iinfo(match.grid.dtype)
    within = limits.min <= match.grid.zero <= limits.max  # type: ignore[operator]
    return "" if within else "the zero of its input is no byte"


def _own(match: Convolution | TransposedConvolution) -> tuple[Any, ...]:
    """The layer's own tensors, and those and the eps of the BatchNorm behind it."""
    norm = match.norm
    parts = (None,) * 4 if norm is None else (norm.weight, norm.bias, norm.mean, norm.var)
    return (match.weight, match.bias, *parts, 0.0 if norm is None else norm.eps)


def _emit_convolution(graph: fx.Graph, match: Convolution, epilogue: Epilogue) -> fx.Node:
    geometry = (match.stride, match.padding, match.dilation, match.groups)

    def emitted(image: fx.Node, beside: tuple[Any, ...]) -> fx.Node:
        # A plain number: torch before 2.10 writes an enum into its code as `<Way.PLAIN: 0>`.
        way = int(_way(match))
        operands = (image, *_own(match), *geometry, *beside, *_activation(epilogue), way)
        return graph.call_function(torch.ops.kernel_dispatch.openmp_convolution.default, operands)

    if _in_halves(match):
        return emitted(match.input, (epilogue.before, epilogue.times, epilogue.after))
    new = emitted(widened(graph, match.input), _widened_beside(graph, epilogue))
    return narrowed(graph, new, match.dtype)


def _way(match: Convolution) -> Way:
    if _in_halves(match) and _is_long_product(match):
        return Way.BFLOAT16 if match.dtype is torch.bfloat16 else Way.FLOAT16
    return Way.WINOGRAD if match.winograd_pays else Way.PLAIN


def _winograd(match: Convolution) -> tuple[str, float]:
    """Errors are those of a direct convolution: the transforms only add and halve."""
    return ("winograd", 16 / 9) if _way(match) is Way.WINOGRAD else ("", 1.0)


def _emit_transposed(graph: fx.Graph, match: TransposedConvolution, epilogue: Epilogue) -> fx.Node:
    new = graph.call_function(
        torch.ops.kernel_dispatch.openmp_transposed_convolution.default,
        (
            widened(graph, match.input),
            *_own(match),
            match.stride,
            match.padding,
            match.output_padding,
            *_activation(epilogue),
        ),
    )
    return narrowed(graph, new, match.dtype)


def _refuses_transposed(match: TransposedConvolution) -> str:
    """Each phase of the stride is to have taps, and outputs of all inputs."""
    kernel = match.weight.meta["val"].shape[2:]
    if len(kernel) == 3:
        return "openmp takes transposed convolutions of lines and images only"
    if match.groups > 1 or any(step > 1 for step in match.dilation):
        return "openmp takes transposed convolutions without groups and dilation only"
    if any(size < step for size, step in zip(kernel, match.stride, strict=True)):
        return "openmp takes transposed convolutions with kernels from the stride's size on only"
    outputs = match.weight.meta["val"].shape[1]
    lanes = -(-outputs // _LANES) * _LANES
    # oneDNN was 1.1 to 1.3 times as fast with 21 outputs, and no faster with 3 (Zen 4).
    elsewhere = len(kernel) == 2 and match.dtype is torch.float32
    if elsewhere and outputs > _LANES and 4 * outputs < 3 * lanes:
        return f"{outputs} outputs leave a third of openmp's vectors empty"
    return ""


def _emit_product(graph: fx.Graph, match: Product, epilogue: Epilogue) -> fx.Node:
    return graph.call_function(
        torch.ops.kernel_dispatch.openmp_product.default, (match.left, match.right, match.bias)
    )


def _emit_recurrent(graph: fx.Graph, match: Recurrent, epilogue: Epilogue) -> fx.Node:
    now = read(match.node)
    assert now is not None, "it was matched"
    return graph.call_function(
        torch.ops.kernel_dispatch.openmp_recurrent.default,
        (
            *(now.input, list(now.state), list(now.weights)),
            *(_CELLS.index(now.node.target), now.biases, now.bidirectional, now.batch_first),
        ),
    )


_CELLS: list[Any] = list(GATES)  # in the order of `enum class Cell` in native/recurrent.h


def _refuses_recurrent(match: Recurrent) -> str:
    if match.lengths is not None:
        return "openmp takes sequences of one length only, not packed ones"
    if match.is_projected:
        return "openmp takes LSTMs without projections only"
    if match.training and match.dropout > 0 and match.layers > 1:
        return "openmp takes layers without dropout between them only"
    if not match.weights_stay:
        return "openmp packs weights, and these are made anew in every call"
    name = _name(match.dtype)
    if _PRODUCTS.get(name) in machine.cpu().isa and not _gains_beside_products(match):
        return f"the CPU multiplies {name} itself, and torch uses that"
    return ""


def _gains_beside_products(match: Recurrent) -> bool:
    """Ours are computed in floats. torch has one call for an LSTM, and a dozen small ones for each
    step of the others: their products have to be many to outweigh those (measured: a Xeon with
    AMX; GRUs of 256, 384 and 512, eight sequences, 0.6, 1.0 and 1.2 of torch's time)."""
    if match.node.target is torch.lstm or "amx_tile" not in machine.cpu().isa:
        return False
    steps = value_of(match.input).shape[1 if match.batch_first else 0]
    return match.work().flops <= 2 * _MOST_PRODUCTS * match.layers * hint(steps)


_MOST_PRODUCTS = 6_000_000  # of a layer in a step


def _emit_batch_norm(
    graph: fx.Graph, match: Moments | GradientSums, epilogue: Epilogue
) -> fx.Node | dict[fx.Node, fx.Node]:
    if isinstance(match, Moments):
        return graph.call_function(torch.ops.kernel_dispatch.openmp_moments.default, (match.x,))
    operands = (match.grad, match.x, match.mean)
    sums = graph.call_function(torch.ops.kernel_dispatch.openmp_norm_sums.default, operands)
    sums.meta["val"] = (match.total.meta["val"], match.node.meta["val"])
    total, dot = (graph.call_function(operator.getitem, (sums, index)) for index in (0, 1))
    return {total: match.total, dot: match.node}


def _emit_training_convolution(
    graph: fx.Graph, match: TrainingConvolution, epilogue: Epilogue
) -> fx.Node:
    where = (match.stride, match.padding, match.dilation)
    way = Way.WINOGRAD if match.winograd_pays else Way.PLAIN
    new = graph.call_function(
        torch.ops.kernel_dispatch.openmp_training_convolution.default,
        (match.image, match.weight, match.bias, *where, match.turns, int(way)),
    )
    if match.backward is not None:  # what is left of it: the gradients of weight and bias
        given: Any = match.backward.args
        *rest, mask = given
        match.backward.args = (*rest, [False, *mask[1:]])
    return new


def _refuses_training_convolution(match: TrainingConvolution) -> str:
    """oneDNN is as fast where neither tiles nor memory that is kept between steps gain anything.
    But on images channels last it adds up all products in one chain. With AVX2 it does so in the
    forward of images in rows, too: eager's own sums are no better there."""
    if match.winograd_pays:
        return ""
    wide = not machine.cpu().ends_at_avx2
    if math.prod(match.kernel) > 1:
        if match.products <= LONGEST_CHAIN:
            return "oneDNN is as fast, and its sums are short"
        return "" if wide or match.turns else "oneDNN is as fast, and its sums are eager's"
    gains = match.pixels >= _FEWEST_PIXELS and all(step == 1 for step in match.stride)
    return "" if wide and gains else "oneDNN is as fast, and sums of single pixels are eager's"


# That packing the weight of a 1x1 convolution is little beside. With AVX2 nothing is gained.
_FEWEST_PIXELS = 1024


def _emit_weight_gradient(graph: fx.Graph, match: WeightGradient, epilogue: Epilogue) -> fx.Node:
    where = (match.kernel, match.stride, match.padding, match.dilation)
    new = graph.call_function(
        torch.ops.kernel_dispatch.openmp_weight_gradient.default,
        (match.grad, match.image, *where),
    )
    given: Any = match.backward.args
    *rest, mask = given
    match.backward.args = (*rest, [mask[0], False, mask[2]])
    return new


def _refuses_weight_gradient(match: WeightGradient) -> str:
    if not machine.cpu().ends_at_avx2:
        return "with AVX-512 it was not measured against oneDNN"
    if match.inputs < _FEWEST_INPUTS:
        return f"{match.inputs} inputs leave most of openmp's vectors empty"
    if math.prod(match.kernel) == 1:
        return "oneDNN is as fast on 1x1 kernels"
    return ""


_FEWEST_INPUTS = 16  # 3 took twice oneDNN's time


def _emit_random(graph: fx.Graph, match: RandomNumbers, epilogue: Epilogue) -> fx.Node:
    operands = (match.size, match.seed, match.normal)
    return graph.call_function(torch.ops.kernel_dispatch.openmp_random.default, operands)


def _emit_softmax(graph: fx.Graph, match: Softmax, epilogue: Epilogue) -> fx.Node:
    operands = (match.x, match.logarithm)
    return graph.call_function(torch.ops.kernel_dispatch.openmp_softmax.default, operands)


def _emit_group_norm(graph: fx.Graph, match: GroupNorm, epilogue: Epilogue) -> fx.Node:
    operands = (match.image, match.scale, match.shift, match.groups, match.eps)
    target = torch.ops.kernel_dispatch.openmp_group_norm.default
    return graph.call_function(target, (*operands, *_activation(epilogue)))


def _packed_linear_element(match: Linear) -> int:
    return 2 if _in_halves(match) else 4


def _packed_convolution_element(match: Convolution) -> int:
    return 2 if _way(match) in (Way.BFLOAT16, Way.FLOAT16) else 4


def _cannot_multiply(match: Linear | Convolution) -> str:
    """What the CPU multiplies itself, oneDNN has multiplied by it."""
    name = _name(match.dtype)
    if _PRODUCTS.get(name) in machine.cpu().isa and not _in_halves(match):
        return f"openmp was built without, or may not use, this CPU's {name} products"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_PRODUCTS = {"bfloat16": "avx512_bf16", "float16": "amx_fp16"}  # the feature that multiplies them


def _refuses_convolution(match: Convolution) -> str:
    """Outputs of one group are the lanes of a vector; groups of one input, or of a few with as many
    outputs as inputs, share vectors. All else would leave lanes empty."""
    total, inputs, *taps = match.weight.meta["val"].shape
    if len(taps) == 3:
        return "openmp takes convolutions of lines and images only"
    if without_products := _cannot_multiply(match):
        return without_products
    outputs = total // match.groups
    if inputs == 1:  # with a cut vector, several kernels of each channel take twice oneDNN's time
        shared = outputs == 1 or (total >= _LANES and taps[0] > 1)
    else:
        shared = outputs == inputs and _share_vectors(total, inputs)
    fills = outputs >= (_FILLS_LANES_ALONE if match.stands_alone else _FILLS_LANES) or shared
    # 1x1 is no slower than oneDNN's, lines it does not take, and half precision it leaves half.
    others = match.groups > 1 and len(taps) == 2 and max(taps) > 1
    if others and not fills and match.dtype is torch.float32:
        return f"groups of {inputs} inputs and {outputs} outputs do not fill openmp's vectors"
    return ""


def _share_vectors(total: int, inputs: int) -> bool:
    """Where channels end within a vector, a part of it is computed twice: with 24 and 40 channels
    in groups of 8 oneDNN was 1.3 times as fast, with 208 ours 1.1 times (Zen 4)."""
    fewest = _LANES if total % _LANES == 0 or inputs < 8 else 12 * _LANES
    return inputs in (2, 4, 8) and total >= fewest


_LANES = 16  # of the widest vectors, AVX-512's
# With 16 oneDNN's kernel is 1.0 to 1.2 times as fast, but with its calls in between a network took
# 1.7 times as long (RegNetX-400MF, Zen 5); with 2 it was four times as fast (Zen 4).
# Alone between images in rows 16 took up to 1.5 times as long as torch's, 24 0.8 to 1.4 (Zen 5).
_FILLS_LANES, _FILLS_LANES_ALONE = 16, 32


def _emit_embedding_bags(
    graph: fx.Graph, match: EmbeddingBags, epilogue: Epilogue
) -> dict[fx.Node, fx.Node]:
    """All tables beside each other in one tensor: its columns are their results."""
    tables, (first, *_) = match.tables, match.tables
    if len(tables) > 1:
        epilogue.steps.append(f"{len(tables)} tables")
    beside = call(
        graph,
        torch.ops.kernel_dispatch.openmp_embedding_bags.default,
        [bags.table for bags in tables],
        [bags.numbers for bags in tables],
        [bags.begins for bags in tables],
        [bags.factors for bags in tables if bags.factors is not None],
        [bags.padding for bags in tables],
        *(first.mean, first.with_end),
    )
    ends = list(itertools.accumulate(bags.width for bags in tables))
    return {
        call(graph, aten.slice.Tensor, beside, 1, end - bags.width, end): bags.result
        for bags, end in zip(tables, ends, strict=True)
    }


def _tail(graph: fx.Graph, epilogue: Epilogue) -> tuple[Any, ...]:
    return (*_widened_beside(graph, epilogue), *_activation(epilogue))


def _widened_beside(graph: fx.Graph, epilogue: Epilogue) -> tuple[Any, ...]:
    beside = (epilogue.before, epilogue.times, epilogue.after)
    return tuple(None if node is None else widened(graph, node) for node in beside)


def _activation(epilogue: Epilogue) -> tuple[int, float, float]:
    act = epilogue.activation
    return ACTIVATIONS.index(act.name), float(act.a), float(act.b)


PROVIDER = Provider(
    name="openmp",
    summary="C++ kernels of ours, built at first use: layers, norms of images, random numbers",
    probe=probe,
    requires=("a C++ compiler (GCC or Clang)",),
    regions={
        "linear": RegionMaker(
            _emit_linear, ABILITIES, _cannot_multiply, packed_element=_packed_linear_element
        ),
        "convolution": RegionMaker(
            _emit_convolution,
            ABILITIES,
            _refuses_convolution,
            packed_element=_packed_convolution_element,
            transforms=_winograd,
        ),
        "transposed_convolution": RegionMaker(
            _emit_transposed,
            Abilities(ABILITIES.activations),
            _refuses_transposed,
            packed_element=lambda match: 4,
        ),
        "int8_linear": RegionMaker(_emit_int8_linear, ABILITIES, packed_element=lambda match: 1),
        "quantized_convolution": RegionMaker(
            _emit_quantized_convolution,
            refuses=_refuses_quantized_convolution,
            packed_element=lambda match: 1,
        ),
        "grouped_linear": RegionMaker(
            _emit_grouped_linear,
            refuses=_refuses_grouped_linear,
            declines=_declines_grouped_linear,
            packed_element=lambda match: 0,
        ),
        "quantized_linear": RegionMaker(
            _emit_quantized_linear, refuses=_refuses_quantized, packed_element=lambda match: 1
        ),
        "product": RegionMaker(_emit_product),
        "batch_norm": RegionMaker(_emit_batch_norm),
        "training_convolution": RegionMaker(
            _emit_training_convolution,
            refuses=_refuses_training_convolution,
            packed_element=lambda match: 0,
        ),
        "weight_gradient": RegionMaker(
            _emit_weight_gradient,
            refuses=_refuses_weight_gradient,
        ),
        "random": RegionMaker(_emit_random),
        "softmax": RegionMaker(_emit_softmax),
        "group_norm": RegionMaker(_emit_group_norm, Abilities(ABILITIES.activations)),
        "embedding_bag": RegionMaker(_emit_embedding_bags),
    },
    early_regions={
        "recurrent": RegionMaker(
            _emit_recurrent, refuses=_refuses_recurrent, packed_element=lambda match: 4
        )
    },
)
