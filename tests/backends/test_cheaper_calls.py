"""O1 runs a graph from Python, so each call costs: the calls that it makes mean what was traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lowering import direct_calls, public_calls
from lowering.packing import PackedWeights, Place
from lowering.providers import mkldnn
from lowering.targets.cuda import torch_minor
from tests.support.compiling import compile_at, every_row_applies
from tests.support.regions import assert_regions, compile_in, region_rows

aten = torch.ops.aten
CPU = torch.device("cpu")
MADE = {"dtype": torch.float32, "device": CPU, "pin_memory": False}
LAST = 9223372036854775807  # what a traced slice without an end has


# --- public functions -----------------------------------------------------------------------------


def x(*shape: int) -> torch.Tensor:
    return torch.linspace(-2, 3, torch.Size(shape).numel()).reshape(shape)


def at(*places: int) -> torch.Tensor:
    return torch.tensor(places)


REPLACED: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
    *(
        (operator, (x(4, 6),), {})
        for operator in (
            *(aten.relu.default, aten.sigmoid.default, aten.silu.default, aten.gelu.default),
            *(aten.tanh.default, aten.neg.default, aten.exp.default, aten.abs.default),
            *(aten.hardswish.default, aten.hardsigmoid.default, aten.leaky_relu.default),
            *(aten.t.default, aten.detach.default, aten.clone.default),
            *(aten.sum.default, aten.mean.default, aten.amax.default, aten.isnan.default),
        )
    ),
    *(
        (operator, (x(4, 6), other), {})
        for operator in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
        for other in (x(6) + 7, x(4, 6), 2, 0.5)
    ),
    (aten.add.Tensor, (x(4, 6), x(6)), {"alpha": 2}),
    (aten.add_.Tensor, (x(4, 6), x(6)), {}),
    (aten.relu_.default, (x(4, 6),), {}),
    (aten.rsub.Scalar, (x(4, 6), 1), {}),
    (aten.pow.Tensor_Scalar, (x(4, 6), 2), {}),
    (aten.pow.Scalar, (2, x(4, 6)), {}),
    (aten.maximum.default, (x(4, 6), x(6)), {}),
    (aten.clamp.default, (x(4, 6), -1, 1), {}),
    (aten.clamp_min.default, (x(4, 6), 0), {}),
    (aten.hardtanh.default, (x(4, 6), 0.0, 6.0), {}),
    (aten.gt.Scalar, (x(4, 6), 0), {}),
    (aten.eq.Tensor, (x(4, 6), x(6)), {}),
    (aten.where.self, (x(4, 6) > 0, x(4, 6), x(6)), {}),
    (aten.where.ScalarOther, (x(4, 6) > 0, x(4, 6), 1.0), {}),
    (aten.masked_fill.Scalar, (x(4, 6), x(4, 6) > 0, float("-inf")), {}),
    (aten.sum.dim_IntList, (x(4, 6), [1], True), {}),
    (aten.mean.dim, (x(4, 6), [0]), {}),
    (aten.max.dim, (x(4, 6), 1), {}),
    (aten.argmax.default, (x(4, 6), 1), {}),
    (aten.cumsum.default, (x(4, 6), 1), {}),
    (aten.topk.default, (x(4, 6), 2), {}),
    (aten.sort.default, (x(4, 6), 1, True), {}),
    (aten._softmax.default, (x(4, 6), -1, False), {}),
    (aten._log_softmax.default, (x(4, 6), -1, False), {}),
    (aten.view.default, (x(4, 6), [2, -1]), {}),
    (aten.reshape.default, (x(4, 6).t(), [8, 3]), {}),
    (aten.permute.default, (x(4, 6), [1, 0]), {}),
    (aten.transpose.int, (x(2, 4, 6), -2, -1), {}),
    (aten.expand.default, (x(4, 6), [3, -1, -1]), {}),
    (aten.unsqueeze.default, (x(4, 6), -1), {}),
    (aten.squeeze.dim, (x(4, 1), 1), {}),
    (aten.squeeze.dims, (x(4, 1), [1]), {}),
    (aten.as_strided.default, (x(4, 6), [2, 2], [6, 1], 3), {}),
    (aten.split_with_sizes.default, (x(4, 6), [1, 5], 1), {}),
    (aten.unbind.int, (x(4, 6),), {}),
    *((aten.select.int, (x(4, 6), dim, place), {}) for dim in (0, 1, -1) for place in (2, -1)),
    *((aten.slice.Tensor, (x(4, 6), dim, 1, 3), {}) for dim in (0, 1)),
    (aten.slice.Tensor, (x(4, 6), 1, -3, LAST), {}),
    (aten.slice.Tensor, (x(4, 6), 0, 0, LAST, 2), {}),
    (aten.index.Tensor, (x(4, 6), [at(3, 0)]), {}),
    (aten.index.Tensor, (x(4, 6), [None, at(5, 5, 1)]), {}),
    (aten.index.Tensor, (x(4, 6), [at(3, 0), at(1, 2)]), {}),
    (aten.index_select.default, (x(4, 6), 1, at(5, 0)), {}),
    (aten.gather.default, (x(4, 6), 1, at(5, 0, 1, 2).reshape(4, 1)), {}),
    (aten.index_add.default, (x(4, 6), 0, at(3, 3), x(2, 6)), {}),
    (aten.index_put.default, (x(4, 6), [at(1, 2)], x(2, 6)), {}),
    (aten.select_scatter.default, (x(4, 6), x(6), 0, 1), {}),
    (aten.slice_scatter.default, (x(4, 6), x(2, 6), 0, 1, 3), {}),
    (aten.copy_.default, (x(4, 6), x(6)), {}),
    (aten.embedding.default, (x(4, 6), at(3, 0)), {}),
    (aten._embedding_bag.default, (x(4, 6), at(3, 0, 1), at(0, 2)), {}),
    (aten.cat.default, ([x(4, 6), x(4, 2)], 1), {}),
    (aten.stack.default, ([x(4, 6), x(4, 6)], 1), {}),
    (aten.mm.default, (x(4, 6), x(6, 3)), {}),
    (aten.bmm.default, (x(2, 4, 6), x(2, 6, 3)), {}),
    (aten.addmm.default, (x(3), x(4, 6), x(6, 3)), {}),
    (aten.addmm.default, (x(3), x(4, 6), x(6, 3)), {"beta": 2, "alpha": 0.5}),
    (aten.native_layer_norm.default, (x(4, 6), [6], x(6), x(6), 1e-5), {}),
    (aten.native_group_norm.default, (x(1, 6, 4), None, None, 1, 6, 4, 2, 1e-5), {}),
    (
        aten._native_batch_norm_legit_no_training.default,
        (x(2, 3, 4), x(3), x(3), x(3), x(3).abs(), 0.1, 1e-5),
        {},
    ),
    (
        aten.convolution.default,
        (x(1, 2, 5, 5), x(3, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
    ),
    (aten._adaptive_avg_pool2d.default, (x(1, 2, 5, 5), [2, 2]), {}),
    (aten.avg_pool2d.default, (x(1, 2, 5, 5), [2, 2]), {}),
    (aten.constant_pad_nd.default, (x(4, 6), [1, 0], 0.5), {}),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (x(1, 2, 4, 6),) * 3, {}),
    (aten.zeros_like.default, (x(4, 6),), {"pin_memory": False}),
    (aten.zeros.default, ([2, 3],), MADE),
    (aten.full.default, ([2, 3], 0.5), MADE),
    (aten.arange.start_step, (0, 8, 2), {**MADE, "dtype": torch.int64}),
    (aten.tril_indices.default, (4, 4, -1), {"device": CPU, "pin_memory": False}),
]


def graph_of(operator: OpOverload, args: Any, kwargs: Any) -> tuple[fx.Graph, list[torch.Tensor]]:
    """One call, traced as AOTAutograd would have it: with fake tensors beside the nodes."""
    graph, tensors, mode = fx.Graph(), [], FakeTensorMode()

    def node(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placeholder = graph.placeholder(f"x{len(tensors)}")
        placeholder.meta["val"] = mode.from_tensor(value)
        tensors.append(value)
        return placeholder

    graph.output(graph.call_function(operator, pytree.tree_map(node, args), kwargs))
    return graph, tensors


def called(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "call_function")


def run(graph: fx.Graph, tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """The result, and what the inputs are afterwards."""
    copies = [tensor.clone() for tensor in tensors]  # dense ones: in the order they had
    return fx.GraphModule({}, graph)(*copies), copies


@pytest.mark.parametrize("case", REPLACED, ids=lambda case: str(case[0]))
def test_a_public_function_computes_what_the_operator_does(case: Any) -> None:
    graph, tensors = graph_of(*case)
    wanted = run(graph, tensors)
    public_calls.use(graph)
    graph.lint()
    # Brackets of torch 2.8 reach the dispatcher with other arguments, so some operators stay.
    stays = case[0] in (aten.slice.Tensor, aten.index.Tensor) and torch_minor() < (2, 9)
    assert stays or not isinstance(called(graph).target, OpOverload)
    got = run(graph, tensors)
    for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.stride() == other.stride()


KEPT: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [
    (aten.add.Scalar, (x(4, 6), 1), {}),  # torch.add takes a number as a tensor
    (aten._unsafe_view.default, (x(4, 6), [24]), {}),
    (aten._to_copy.default, (x(4, 6),), {"dtype": torch.float64}),
    (aten.slice.Tensor, (x(4, 6), 1, 0, 6), {}),  # x[:, 0:6] is an alias of x
    (aten.zeros.default, ([2, 3],), {}),  # set_default_device() would decide
    (torch.ops.prims.convert_element_type.default, (x(4, 6), torch.float64), {}),
]


@pytest.mark.parametrize("case", KEPT, ids=lambda case: str(case[0]))
def test_an_operator_that_no_public_function_reaches_stays(case: Any) -> None:
    graph, _ = graph_of(*case)
    public_calls.use(graph)
    assert called(graph).target is case[0]


def test_what_is_not_known_of_an_argument_leaves_the_call_alone() -> None:
    graph, _ = graph_of(aten.relu.default, (x(4, 6),), {})
    graph.find_nodes(op="placeholder")[0].meta.clear()
    public_calls.use(graph)
    assert called(graph).target is aten.relu.default


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)).eval()


class Sliced(nn.Module):
    """Views, factories and indices around layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0] - 1, device=x.device)
        y = self.layers(x[1:, :64])[rows, :4]
        return torch.cat([y, torch.zeros(1, 4) + x.sum()]).flip(0)


@pytest.fixture
def small_regions() -> Iterator[None]:
    with every_row_applies():
        yield


@pytest.mark.usefixtures("small_regions")
def test_sizes_may_change() -> None:
    model = Sliced().eval()
    compiled = compile_in("O1 mkldnn", model, dynamic=True)
    with torch.no_grad():
        for rows in (5, 9, 17, 3):
            given = torch.randn(rows, 70)
            torch.testing.assert_close(compiled(given), model(given), rtol=1e-5, atol=1e-5)
    assert_regions(compiled, ("linear", "mkldnn", 2, 8))


@pytest.mark.usefixtures("small_regions")
def test_a_default_device_of_the_caller_changes_nothing() -> None:
    model = Sliced().eval()
    given = torch.randn(5, 70)
    compiled = compile_in("O1 mkldnn", model)
    with torch.no_grad(), torch.device("cpu"):
        for _ in range(3):
            torch.testing.assert_close(compiled(given), model(given), rtol=1e-5, atol=1e-5)
    assert_regions(compiled, ("linear", "mkldnn", 2, 6))


# --- operators of ours ----------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def linear_graph() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    tensors = [torch.randn(4, 64), torch.randn(48, 64), torch.randn(48)]
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(name) for name in ("input", "weight", "bias"))
    operator = torch.ops.kernel_dispatch.mkldnn_linear.default
    graph.output(graph.call_function(operator, (*inputs, "relu", 0.0, 0.0, False)))
    return fx.GraphModule({}, graph), tensors


def test_an_operator_of_ours_is_called_directly() -> None:
    module, tensors = linear_graph()
    wanted = module(*tensors)
    direct_calls.use(module.graph)
    module.recompile()
    assert not isinstance(called(module.graph).target, OpOverload)
    torch.testing.assert_close(module(*tensors), wanted, rtol=0, atol=0)


def test_whoever_listens_to_the_dispatcher_sees_the_operator() -> None:
    module, tensors = linear_graph()
    direct_calls.use(module.graph)
    module.recompile()
    with Seen() as seen:
        module(*tensors)
    assert "kernel_dispatch.mkldnn_linear.default" in seen.names
    with torch.profiler.profile() as profile:
        module(*tensors)
    assert "kernel_dispatch::mkldnn_linear" in {event.name for event in profile.events()}


def test_what_depends_on_the_call_stays_with_the_operator() -> None:
    """A stride that is computed in the graph."""
    graph = fx.Graph()
    image, weight, stride = (graph.placeholder(name) for name in ("image", "weight", "stride"))
    operator = torch.ops.kernel_dispatch.mkldnn_convolution.default
    rest = ([0, 0], [1, 1], 1, "none", 0.0, 0.0)
    graph.output(graph.call_function(operator, (image, weight, None, [], 0.0, [stride, 1], *rest)))
    direct_calls.use(graph)
    assert called(graph).target is operator


@pytest.mark.usefixtures("small_regions")
def test_equal_layers_in_one_graph_keep_their_own_weights() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).eval()
    compiled, given = compile_in("O1 mkldnn", model), torch.randn(8, 32)
    with torch.no_grad():
        compiled(given)
        packed = mkldnn.weights.packed
        for _ in range(3):
            torch.testing.assert_close(compiled(given), model(given), rtol=1e-5, atol=1e-5)
        assert mkldnn.weights.packed == packed
        model[2].weight.data.mul_(2)
        torch.testing.assert_close(compiled(given), model(given), rtol=1e-5, atol=1e-5)
    assert mkldnn.weights.packed == packed + 1
    assert_regions(compiled, ("linear", "mkldnn", 4, 20))


# --- packed forms ---------------------------------------------------------------------------------


def test_a_place_keeps_no_packed_form_alive() -> None:
    weights = PackedWeights()
    place, weight = Place(weights), torch.ones(64)
    made = []

    def pack() -> torch.Tensor:
        made.append(1)
        return torch.zeros(8)

    first = place.get((weight,), "plain", pack)
    assert place.get((weight,), "plain", pack) is first
    assert place.get((weight,), "other", pack) is not first
    assert len(made) == 2 == len(weights._entries)
    weights.clear()
    place.get((weight,), "other", pack)
    assert len(made) == 3
    del weight
    gc.collect()
    assert not weights._entries
    assert place._last() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 3, 7, 64, 1000])
def test_a_write_behind_torchs_back_is_seen(dtype: torch.dtype, size: int) -> None:
    place, weight = Place(PackedWeights()), torch.ones(size, dtype=dtype)
    first = place.get((weight,), None, object)
    assert place.get((weight,), None, object) is first
    weight.data.mul_(3)
    seen = place.get((weight,), None, object) is not first
    assert seen == (size * dtype.itemsize >= 4), "words of four bytes are looked at"


def test_inference_tensors_are_packed_in_every_call() -> None:
    with torch.inference_mode():
        weight = torch.ones(64)
    place = Place(PackedWeights())
    assert place.get((weight,), None, object) is not place.get((weight,), None, object)


# --- graphs without regions -----------------------------------------------------------------------


def test_a_graph_without_regions_runs_as_it_was_captured() -> None:
    model = layers()  # too small for the rows
    compiled, given = compile_at("O1", model), torch.randn(4, 64)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(given), model(given), rtol=0, atol=0)
    assert region_rows(compiled) == []
    assert_regions(compiled)
