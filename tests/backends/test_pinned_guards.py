"""Guards that are pinned: nothing is asked while nothing changes, and no change goes unnoticed."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from kernel_dispatch import pinned_guards
from kernel_dispatch.pin_plan import Pin
from kernel_dispatch.pinned_guards import Unchanged
from lowering.native import library
from tests.support.compiling import compile_at
from tests.support.reports import graph_reports as graphs


class Sizes:
    def __init__(self) -> None:
        self.factor = 2


class Block(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.register_buffer("shift", torch.ones(size))
        self.register_buffer("other", torch.zeros(size))
        self.scale = 1.5
        self.pair = (2, 3)
        self.table = {"a": 1.0}
        self.sizes = Sizes()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.scale + self.shift - self.other
        x = x * self.pair[0] + self.table["a"] + self.sizes.factor
        if hasattr(self, "more"):
            x = x + self.more
        return x + 1 if self.training else x


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.ReLU(), Block(), nn.LayerNorm(8)).eval()


X = torch.linspace(-1, 1, 24).reshape(3, 8)


@pytest.fixture(autouse=True)
def fresh(our_kernels: None) -> Iterator[None]:
    if library.pin_plan([], {}, []) is None:
        pytest.skip("this Python tells nothing of the changes of its dictionaries")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=32), torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def in_full() -> Iterator[mock.Mock]:
    """Counts how often torch's own guards are asked."""
    asked = mock.Mock()
    whole = Unchanged._in_full

    def counted(self: Unchanged, arguments: Any) -> bool:
        asked()
        return whole(self, arguments)

    with mock.patch.object(Unchanged, "_in_full", counted):
        yield asked


def assert_equal_to_eager(compiled: Any, eager: Any, x: Tensor = X, times: int = 3) -> None:
    for _ in range(times):
        torch.testing.assert_close(compiled(x), eager(x))


# --- while nothing changes ------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_is_asked_while_nothing_changes(level: str, in_full: mock.Mock) -> None:
    eager = model()
    compiled = compile_at(level, eager)
    assert_equal_to_eager(compiled, eager)
    in_full.reset_mock()
    assert_equal_to_eager(compiled, eager, times=5)
    assert in_full.call_count == 0
    (graph,) = graphs(compiled)
    pinned, asked = graph.guards
    assert pinned > 50 > asked
    assert f"guards: {pinned} pinned, {asked} asked in each call" in graph.text()
    assert graph.as_dict()["guards"] == {"pinned": pinned, "asked": asked}


def test_values_of_weights_and_buffers_are_no_change(in_full: mock.Mock) -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    assert_equal_to_eager(compiled, eager)
    in_full.reset_mock()
    for tensor in (*eager.parameters(), *eager.buffers()):
        tensor.add_(0.25)
    assert_equal_to_eager(compiled, eager)
    assert in_full.call_count == 0
    assert len(graphs(compiled)) == 1


def closure(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: net(x) * 2


class Pipeline:
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def run(self, x: Tensor) -> Tensor:
        return self.net(x) * 2


GLOBAL = model()


def with_global(x: Tensor) -> Tensor:
    return GLOBAL(x) * 2


@pytest.mark.parametrize(
    "function",
    [closure(model()), Pipeline(model()).run, with_global],
    ids=["closure", "attribute", "global"],
)
def test_wherever_the_model_comes_from(function: Any, in_full: mock.Mock) -> None:
    compiled = compile_at("O1", function)
    assert_equal_to_eager(compiled, function)
    in_full.reset_mock()
    assert_equal_to_eager(compiled, function)
    assert in_full.call_count == 0
    assert graphs(compiled)[0].guards[0] > 50


def test_layers_that_share_a_graph_are_pinned_each(in_full: mock.Mock) -> None:
    layers = [Block().eval() for _ in range(4)]

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) * 2

    compiled = compile_at("O1", run)
    for _ in range(2):
        for layer in layers:
            torch.testing.assert_close(compiled(layer, X), run(layer, X))
    assert len(graphs(compiled)) == 1
    with mock.patch.object(Unchanged, "_pin") as pin:
        for layer in layers * 3:
            torch.testing.assert_close(compiled(layer, X), run(layer, X))
    assert pin.call_count == 0
    layers[2].scale = 3.0
    for layer in layers:
        torch.testing.assert_close(compiled(layer, X), run(layer, X))
    assert len(graphs(compiled)) == 2


# --- what changes ---------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _new_weight(m: Any) -> None:
    m[2].layer.weight = nn.Parameter(torch.randn(8, 8))


def _other_memory(m: Any) -> None:
    m[2].layer.weight.data = torch.randn(8, 8)


def _transposed(m: Any) -> None:
    m[2].layer.weight.data = torch.randn(8, 8).t()


def _swapped(m: Any) -> None:
    torch.utils.swap_tensors(m[2].layer.weight, nn.Parameter(torch.randn(8, 8).t()))


def _without_bias(m: Any) -> None:
    m[2].layer.bias = None


def _attributes_at_once(m: Any) -> None:
    m[2].__dict__ = {**m[2].__dict__, "scale": 4.0}


def _deleted(m: Any) -> None:
    del m[1]


def _tied(m: Any) -> None:
    m[2].other = m[2].shift


def _assigned(m: Any) -> None:
    m.load_state_dict({k: v.clone().add_(1) for k, v in m.state_dict().items()}, assign=True)


def _loaded(m: Any) -> None:
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})


def _class(m: Any) -> None:
    m[2].layer.__class__ = Doubled


def _setting(path: str, value: Any) -> Callable[[Any], None]:
    *holders, name = path.split(".")

    def change(m: Any) -> None:
        found = m[2]
        for holder in holders:
            found = getattr(found, holder)
        setattr(found, name, value)

    change.__name__ = path
    return change


# What changes, and whether the graph has to be another one.
CHANGES: list[tuple[Callable[[Any], object], bool]] = [
    (_setting("scale", 4.0), True),
    (_setting("pair", (4, 3)), True),
    (_setting("table", {"a": 5.0}), True),
    (_setting("sizes.factor", 7), True),
    (_setting("more", 3.0), True),
    (_setting("unrelated", 3.0), False),
    (_setting("layer", nn.Linear(8, 8)), False),
    (_setting("layer", nn.Linear(8, 8, bias=False)), True),
    (_setting("layer", nn.Identity()), True),
    (_setting("layer", Doubled(8, 8)), True),
    (_new_weight, False),
    (_other_memory, False),
    (_transposed, True),
    (_swapped, True),
    (_without_bias, True),
    (_attributes_at_once, True),
    (_deleted, True),
    (_tied, True),
    (_assigned, False),
    (_loaded, False),
    (_class, True),
    (lambda m: m[2].table.update(a=6.0), True),
    (lambda m: m.train(), True),
    (lambda m: m.train().eval(), False),
    (lambda m: m.requires_grad_(False), True),
    (lambda m: m[2].shift.resize_(1), True),
]


@pytest.mark.parametrize(
    ("change", "recompiles"), CHANGES, ids=lambda given: getattr(given, "__name__", str(given))
)
def test_a_change_is_noticed(change: Callable[[Any], object], recompiles: bool) -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    assert_equal_to_eager(compiled, eager)
    assert len(graphs(compiled)) == 1
    change(eager)
    assert_equal_to_eager(compiled, eager)
    assert len(graphs(compiled)) == 1 + recompiles


def test_what_was_changed_back_needs_no_new_graph() -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    for scale in (1.5, 2.0, 1.5, 2.0):
        eager[2].scale = scale
        assert_equal_to_eager(compiled, eager)
    assert len(graphs(compiled)) == 2


def test_the_reason_is_the_one_that_torch_gives() -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    assert_equal_to_eager(compiled, eager)
    eager[2].scale = 9.0
    assert_equal_to_eager(compiled, eager)
    assert "scale" in graphs(compiled)[1].recompile_reason


def test_an_input_may_not_be_a_buffer_that_the_graph_reads() -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    assert_equal_to_eager(compiled, eager, torch.ones(8))
    assert_equal_to_eager(compiled, eager, eager[2].shift)
    assert len(graphs(compiled)) == 2


def test_modes_of_torch_are_noticed() -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    assert_equal_to_eager(compiled, eager)
    with torch.inference_mode():
        assert_equal_to_eager(compiled, eager)
    with torch.enable_grad():
        compiled(X).sum().backward()
    assert eager[0].layer.weight.grad is not None
    assert_equal_to_eager(compiled, eager)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        self.latest = self.block(x)
        return self.latest * 2


def test_a_model_that_writes_into_itself_is_left_to_torch() -> None:
    eager = Counting().eval()
    compiled = compile_at("O1", eager)
    pinned = []
    allows = pinned_guards.Budget.allows

    def counted(self: pinned_guards.Budget) -> bool:
        pinned.append(allows(self))
        return pinned[-1]

    with (
        mock.patch.object(pinned_guards.Budget, "allows", counted),
        mock.patch.multiple(pinned_guards, _AT_FIRST=1e-4, _SHARE=0.0),
    ):
        for _ in range(40):
            compiled(X)
    assert pinned[0] and not pinned[-1] and len(pinned) >= 38
    eager.block.scale = 5.0
    assert_equal_to_eager(compiled, eager)


class ThenChanged:
    """Torch's guards, and what another thread does to the model after one of their answers."""

    def __init__(self, authority: Any, change: Callable[[], object], answer: int) -> None:
        self.authority, self.change, self.left = authority, change, answer

    def check(self, arguments: Any) -> bool:
        found = self.authority.check(arguments)
        self.left -= 1
        if not self.left:
            self.change()
        return bool(found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.authority, name)


@pytest.mark.parametrize("answer", [1, 2])
def test_what_changes_while_torch_is_asked_is_noticed(answer: int) -> None:
    made = []
    begin = Unchanged.__init__

    def remembered(self: Unchanged, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    eager = model()
    compiled = compile_at("O1", eager)
    with mock.patch.object(Unchanged, "__init__", remembered):
        assert_equal_to_eager(compiled, eager)
    (unchanged,) = made
    eager[2].unrelated = 1  # so that torch is asked
    change = lambda: setattr(eager[2], "scale", 8.0)  # noqa: E731
    unchanged.authority = ThenChanged(unchanged.authority, change, answer)
    compiled(X)
    assert eager[2].scale == 8.0
    assert_equal_to_eager(compiled, eager)
    assert len(graphs(compiled)) == 2


def test_an_argument_with_the_name_self_may_be_anything() -> None:
    blocks = [Block().eval() for _ in range(3)]
    for number, block in enumerate(blocks):
        block.scale = number + 1.0

    def run(self: Any, x: Tensor) -> Tensor:
        return self[0](x) * self[1]

    compiled = compile_at("O1", run)
    for turn in range(9):
        given = (blocks[turn % 3], turn % 2 + 1)
        torch.testing.assert_close(compiled(given, X), run(given, X))
        del given


class WithSlot(nn.Module):
    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return x + self.kept if hasattr(self, "kept") else x


def test_what_is_in_a_slot_is_noticed() -> None:
    eager = WithSlot().eval()
    compiled = compile_at("O1", eager)
    assert_equal_to_eager(compiled, eager)
    assert graphs(compiled)[0].guards[0] > 16
    eager.kept = 5.0
    assert_equal_to_eager(compiled, eager)


def test_a_class_of_settings_that_changes_is_noticed() -> None:
    class Own(Sizes):
        pass

    eager = model()
    eager[2].sizes = Own()
    compiled = compile_at("O1", eager)
    assert_equal_to_eager(compiled, eager)
    Own.factor = property(lambda self: 11, lambda self, value: None)  # type: ignore[assignment]
    assert_equal_to_eager(compiled, eager)


def test_an_attribute_that_the_class_has_too_needs_no_new_graph() -> None:
    class Own(Sizes):
        factor = 2

    eager = model()
    eager[2].sizes = Own()
    compiled = compile_at("O1", eager)
    assert_equal_to_eager(compiled, eager)
    del eager[2].sizes.factor
    assert_equal_to_eager(compiled, eager)
    assert len(graphs(compiled)) == 1


# --- what stays as it would be without us ---------------------------------------------------------


def test_nothing_is_kept_alive() -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        return net(x) * 2

    compiled = compile_at("O1", run)
    eager = model()
    for _ in range(3):
        compiled(eager, X)
    part, weight = weakref.ref(eager[2]), weakref.ref(eager[2].layer.weight)
    eager[2] = nn.Identity()
    gc.collect()
    assert part() is None and weight() is None
    whole = weakref.ref(eager)
    del eager
    gc.collect()
    assert whole() is None


def test_guards_as_torch_has_them() -> None:
    eager = model()
    compiled = torch.compile(eager, backend="unified", options={"level": "O1", "guards": "torch"})
    assert_equal_to_eager(compiled, eager)
    (graph,) = graphs(compiled)
    assert graph.guards == (0, 0)
    assert "guards:" not in graph.text()


@pytest.mark.parametrize(("target", "pinned"), [("cpu", 1), ("cuda", 0), ("none", 0)])
def test_only_what_runs_on_the_cpu_is_pinned(target: str, pinned: int) -> None:
    context, record = Sizes(), mock.Mock(target=target)
    with mock.patch.object(torch._guards.TracingContext, "try_get", return_value=context):
        pinned_guards.wanted(record)
    assert [pinned_guards._to_be_pinned.get(context)] == ([record] if pinned else [None])


def test_other_backends_have_their_own() -> None:
    compile_at("O1", model())(X)
    with mock.patch.object(pinned_guards, "divide") as divide:
        eager = model()
        assert_equal_to_eager(torch.compile(eager, backend="eager"), eager)
    assert divide.call_count == 0


@pytest.mark.parametrize(("saves", "times"), [(False, 1), (True, 0), (None, 1), ("save", 0)])
def test_guards_that_are_saved_stay_in_one_piece(saves: object, times: int) -> None:
    compile_at("O1", model())(X)  # from now on guards are divided
    build = torch._dynamo.guards.CheckFunctionManager.build_guards
    with (
        mock.patch.object(pinned_guards, "_built") as divided,
        contextlib.suppress(AttributeError),  # of no manager at all
    ):
        build(object(), [], None, None, None, saves)
    assert divided.call_count == times


@pytest.mark.parametrize("missing", ["divide", "_in_two_parts"])
def test_where_torch_is_another_one(missing: str) -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    with mock.patch.object(pinned_guards, missing, side_effect=AttributeError("moved")):
        assert_equal_to_eager(compiled, eager)
    (graph,) = graphs(compiled)
    assert graph.guards == (0, 0)
    eager[2].scale = 3.0
    assert_equal_to_eager(compiled, eager)


def test_where_python_cannot_say() -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    with mock.patch.object(library, "pin_plan", return_value=None):
        assert_equal_to_eager(compiled, eager)
        eager[2].scale = 3.0
        assert_equal_to_eager(compiled, eager)
    assert [graph.guards for graph in graphs(compiled)] == [(0, 0), (0, 0)]


def test_threads_may_call_while_the_model_changes() -> None:
    eager = model()
    compiled = compile_at("O1", eager)
    allowed = []
    for scale in (1.5, 3.0):
        eager[2].scale = scale
        allowed.append(compiled(X))
    wrong: list[Tensor] = []
    done = threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not done.is_set():
                found = compiled(X)
                if not any(torch.allclose(found, one, atol=1e-5) for one in allowed):
                    wrong.append(found)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for turn in range(200):
        eager[2].scale = (1.5, 3.0)[turn % 2]
    done.set()
    for caller in callers:
        caller.join()
    assert not wrong


# --- the pins themselves --------------------------------------------------------------------------

Steps = list[tuple[int, Any, bool, type, int]]


def pins_of(arguments: dict[str, Any], steps: Steps, **more: Any) -> Any:
    pin = library.pin_plan(steps, more.get("variables", {}), more.get("others", []))
    assert pin is not None
    return pin(arguments)


def holds_after(what: Pin, thing: Any, change: Callable[[Any], object]) -> bool:
    hold = pins_of({"x": thing}, [(-1, "x", False, type(thing), int(what))])
    assert hold({"x": thing}) and hold({"x": thing, "y": 1})
    change(thing)
    return bool(hold({"x": thing}))


class Anything:
    def __init__(self) -> None:
        self.b = 1  # with 3.10 an object has no dictionary before its first attribute


def test_pins_of_python() -> None:
    assert holds_after(Pin.DICTIONARY, {"a": 1}, lambda d: d.get("a"))
    assert not holds_after(Pin.DICTIONARY, {"a": 1}, lambda d: d.update(a=2))
    assert not holds_after(Pin.DICTIONARY, {"a": 1}, lambda d: d.pop("a"))
    assert not holds_after(Pin.DICTIONARY, {"a": 1}, lambda d: d.update(b=2))
    assert holds_after(Pin.OBJECT, Anything(), lambda o: setattr(o, "a", 1))
    assert not holds_after(Pin.ATTRIBUTES, Anything(), lambda o: setattr(o, "a", 1))
    assert not holds_after(Pin.OBJECT, Anything(), lambda o: setattr(o, "__dict__", {}))
    assert not holds_after(Pin.OBJECT, Block(), lambda o: setattr(o, "__class__", nn.ReLU))
    _ = getattr(Anything(), "a", None)  # a class has a number once an object of it was asked
    assert not holds_after(Pin.TYPE, Anything(), lambda o: setattr(type(o), "a", 1))


@pytest.mark.parametrize("has_dictionary", [False, True])
def test_attributes_that_python_sets_by_a_short_way(has_dictionary: bool) -> None:
    """After some calls an instruction remembers where objects of a class keep the attribute."""

    def store(thing: Any) -> None:
        thing.b = 2

    for _ in range(1000):
        other = Anything()
        if has_dictionary:
            assert other.__dict__
        store(other)
    assert not holds_after(Pin.ATTRIBUTES, Anything(), store)


def test_who_is_gone_is_not_asked() -> None:
    """Neither the dictionary that was pinned, nor what says whether it is as it was."""
    step = [(-1, "x", False, dict, int(Pin.DICTIONARY))]
    thing: dict[str, Any] = {"a": 1}
    first, second = (pins_of({"x": thing}, step) for _ in range(2))
    assert first({"x": thing}) and second({"x": thing})
    del first
    assert second({"x": thing})
    thing["a"] = 2
    assert not second({"x": thing})
    third = pins_of({"x": thing}, step)
    assert third({"x": thing})
    del thing
    gc.collect()
    assert not third({"x": {"a": 2}})


def test_pins_of_tensors() -> None:
    def weight() -> nn.Parameter:
        return nn.Parameter(torch.ones(4, 6))

    assert holds_after(Pin.TENSOR, weight(), lambda w: w.add_(1))
    assert holds_after(Pin.TENSOR, weight(), lambda w: setattr(w, "data", torch.zeros(4, 6)))
    for other in (torch.ones(4, 7), torch.ones(6, 4).t(), torch.ones(4, 6, dtype=torch.half)):
        assert not holds_after(Pin.TENSOR, weight(), lambda w, o=other: setattr(w, "data", o))
    assert not holds_after(Pin.TENSOR, weight(), lambda w: w.requires_grad_(False))
    assert not holds_after(Pin.TENSOR, weight(), lambda w: torch._dynamo.mark_dynamic(w, 0))


def test_pins_of_arguments() -> None:
    thing, other = Anything(), torch.ones(2)
    thing.a = (3, other)  # type: ignore[attr-defined]
    begin = (-1, "x", False, Anything, int(Pin.ATTRIBUTES))
    steps: Steps = [
        begin,
        (0, "a", False, tuple, 0),
        (1, 1, True, torch.Tensor, int(Pin.TENSOR | Pin.ALONE)),
    ]
    hold = pins_of({"x": thing}, steps, others=["y"])
    assert hold({"x": thing, "y": torch.ones(2)})
    assert not hold({"x": Anything(), "y": torch.ones(2)})
    assert not hold({"y": torch.ones(2)})
    assert not hold({"x": thing, "y": other})
    variables = {"x": thing}
    hold = pins_of({}, [begin], variables=variables)
    assert hold({})
    variables["x"] = Anything()
    assert not hold({})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_not_there_is_not_pinned() -> None:
    thing = Anything()
    begin = (-1, "x", False, Anything, int(Pin.ATTRIBUTES))
    assert pins_of({"x": thing}, [begin]) is not None
    assert pins_of({}, [begin]) is None
    assert pins_of({"x": 1}, [begin]) is None
    assert pins_of({"x": thing}, [begin, (0, "a", False, int, 0)]) is None
    empty = Anything.__new__(Anything)
    assert (pins_of({"x": empty}, [begin]) is None) == (sys.version_info < (3, 11))
    assert pins_of({"x": (1,)}, [(-1, "x", False, tuple, 0), (0, 1, True, int, 0)]) is None
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert pins_of({"x": nested}, [(-1, "x", False, torch.Tensor, int(Pin.TENSOR))]) is None
