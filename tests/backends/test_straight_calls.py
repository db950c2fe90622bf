"""Operators of ours whose arguments are not boxed when Python calls them: the same answers, and
nobody who wants to see a call misses it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lowering.native import library
from tests.support.compiling import compile_at, every_row_applies
from tests.support.regions import assert_regions, compile_in, hold

pytestmark = pytest.mark.usefixtures("our_kernels")

NAME = "kernel_dispatch::openmp_linear"


def operator(name: str = "openmp_linear") -> Any:
    return getattr(torch.ops.kernel_dispatch, name).default


def layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(5, 24), torch.randn(16, 24), torch.randn(16)


def linear(*tensors: Any, **named: Any) -> Any:
    return operator()(*tensors, None, None, None, 0, 0.0, 0.0, **named)


def watched(name: str = "openmp_linear") -> tuple[Any, list[int]]:
    """The operator's function as the library makes it, and whenever it leaves a call to torch."""
    left: list[int] = []
    boxed = torch._C._get_operation_overload(f"kernel_dispatch::{name}", "")[0]

    def torchs_own(*args: Any, **kwargs: Any) -> Any:
        left.append(len(args) + len(kwargs))
        return boxed(*args, **kwargs)

    return library.straight(operator(name), torchs_own), left


@torch.no_grad()
def test_a_plain_call_is_not_left_to_torch() -> None:
    (x, weight, bias), (call, left) = layer(), watched()
    expected = torch.nn.functional.linear(x, weight, bias)
    rest = (None, None, None, 0, 0.0, 0.0)
    torch.testing.assert_close(call(x, weight, bias, *rest), expected)
    torch.testing.assert_close(call(x, torch.nn.Parameter(weight), bias, *rest), expected)
    torch.testing.assert_close(call(x, weight.t(), bias, *rest, in_out=True), expected)
    with torch.autocast("cpu"), torch.inference_mode():
        torch.testing.assert_close(call(x, weight, bias, *rest), expected)
    with profile(activities=[ProfilerActivity.CPU]):
        call(x, weight, bias, *rest)
    assert left == []


def test_a_call_with_something_special_is() -> None:
    (x, weight, bias), (call, left) = layer(), watched()
    rest = (None, None, None, 0, 0.0, 0.0)
    call(x.requires_grad_(), weight, bias, *rest)
    call(*(one.to("meta") for one in layer()), *rest)
    with Seen():
        call(*layer(), *rest)
    with torch.no_grad(), SeenAsFunctions():
        call(*layer(), *rest)
    call(x.detach().as_subclass(Marked), weight, bias, *rest)
    call(*layer(), None, None, None, 0, 0, 0)
    assert left == [9] * 6


def test_every_operator_is_called_so() -> None:
    names = library.straight_names()
    assert {"openmp_linear", "openmp_convolutions", "mha_attention", "openmp_recurrent"} <= {*names}
    for name in names:
        assert operator(name)._op.__doc__ == "Its arguments are not boxed.", name


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class SeenAsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted(times: int) -> Iterator[None]:
    before = library.snapshot()
    yield
    ran = dict(library.regions_of(library.snapshot() - before))
    assert ran.get(("linear", "openmp"), 0) == times


@torch.no_grad()
def test_numbers_and_memory() -> None:
    x, weight, bias = layer()
    with counted(1):
        found = linear(x, weight, bias)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))
    assert type(found) is torch.Tensor and not found.requires_grad
    seen = weakref.ref(found)
    del found
    assert seen() is None, "nobody else holds a result"


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_nothing_of_an_argument_is_kept(kind: Any) -> None:
    x, weight, bias = layer()
    held = kind(weight) if kind is torch.nn.Parameter else weight.clone()
    linear(x, held, bias)
    gone = weakref.ref(held)
    del held
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_arguments_by_name_and_left_out() -> None:
    x, weight, bias = layer()
    expected = torch.nn.functional.linear(x, weight, bias)
    across = weight.t().contiguous()
    torch.testing.assert_close(linear(x, across, bias, in_out=True), expected)
    by_name = operator()(
        x, weight=weight, bias=bias, before=None, times=None, after=None, act=0, b=0.0, a=0.0
    )
    torch.testing.assert_close(by_name, expected)
    # What torch's own reading of arguments allows.
    whole = operator()(x, weight, bias, None, None, None, 0, 0, 0)
    torch.testing.assert_close(whole, expected)


@torch.no_grad()
def test_lists_and_several_results() -> None:
    x, weight, bias = layer()
    several = operator("openmp_linears")
    for tensors in ([weight, bias, weight], (weight, bias, weight)):
        first, second = several(x, tensors, [0, 1, -1, 0, 0, -1], [])
        torch.testing.assert_close(first, torch.nn.functional.linear(x, weight, bias))
        torch.testing.assert_close(second, torch.nn.functional.linear(x, weight))
    mean, var = operator("openmp_moments")(torch.randn(4, 3, 5, 5))
    assert mean.shape == var.shape


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda x, w, b: (x, w, b, None, None, None, 0, 0.0), "missing value for argument 'b'"),
        (lambda x, w, b: (x, w, b, None, None, None, "relu", 0.0, 0.0), "argument 'act'"),
        (lambda x, w, b: (x, w.tolist(), b, None, None, None, 0, 0.0, 0.0), "argument 'weight'"),
        (lambda x, w, b: (x, w, b, None, None, None, 1 << 70, 0.0, 0.0), "act|[Oo]verflow"),
        (
            lambda x, w, b: (x, w[:, :5], b, None, None, None, 0, 0.0, 0.0),
            r"has a weight of \[16, 5",
        ),
    ],
)
def test_bad_arguments_raise_torchs_errors(arguments: Any, says: str) -> None:
    with torch.no_grad(), pytest.raises((RuntimeError, OverflowError), match=says):
        operator()(*arguments(*layer()))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="colour"):
        linear(*layer(), colour=1)


@torch.no_grad()
def test_who_listens_sees_the_call() -> None:
    tensors = layer()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        linear(*tensors)
    assert [event.count for event in seen.key_averages() if event.key == NAME] == [1]
    with Seen() as dispatched:
        linear(*tensors)
    assert dispatched.names == [NAME]
    with SeenAsFunctions() as functions:
        linear(*tensors)
    assert functions.seen == [operator()]


def test_fake_tensors_stay_fake() -> None:
    tensors = layer()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, counted(0):
        assert linear(*map(mode.from_tensor, tensors)).shape == (5, 16)
        assert type(linear(*tensors)) is not torch.Tensor


def test_meta_tensors_are_not_computed() -> None:
    with counted(0):
        assert linear(*(t.to("meta") for t in layer())).is_meta


class Marked(torch.Tensor):
    """Has nothing of its own but a name."""


@torch.no_grad()
def test_a_subclass_is_asked() -> None:
    x, weight, bias = layer()
    assert type(linear(x.as_subclass(Marked), weight, bias)) is Marked


@torch.no_grad()
def test_conjugated_numbers_are_not_taken_as_they_lie() -> None:
    x, weight, bias = layer()
    negative = torch._neg_view(x)
    torch.testing.assert_close(
        linear(negative, weight, bias), torch.nn.functional.linear(-x, weight, bias)
    )


def test_gradients_are_not_lost_without_a_word() -> None:
    """The operator has none: torch's dispatcher gives a result that says so when asked."""
    x, weight, bias = layer()
    found = linear(x, weight.requires_grad_(), bias)
    if found.requires_grad:
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            found.sum().backward()


@torch.no_grad()
def test_inference_tensors() -> None:
    tensors = layer()
    with torch.inference_mode():
        found = linear(*tensors)
        assert found.is_inference()
    torch.testing.assert_close(found.clone(), linear(*tensors))


@torch.no_grad()
def test_threads_run_beside_each_other() -> None:
    """The lock of Python's interpreter is free meanwhile."""
    x, weight = torch.randn(512, 1024), torch.randn(1024, 1024)
    expected = torch.nn.functional.linear(x, weight)
    wrong: list[int] = []

    def work(number: int) -> None:
        found = [linear(x, weight, None) for _ in range(5)]
        wrong.extend(number for one in found if not torch.allclose(one, expected, atol=1e-3))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_what_is_given_by_name_alone_is_no_place() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="4 positional"):
        operator("openmp_convolutions")(torch.randn(1, 2, 3, 3), [], "", [], True)


@torch.no_grad()
def test_tensors_are_held_while_a_kernel_runs() -> None:
    """Another thread drops them, or swaps them for others."""
    x, several = torch.randn(256, 1024), operator("openmp_linears")
    weight = torch.randn(1024, 1024)
    expected = torch.nn.functional.linear(x, weight)
    done = threading.Event()
    lists: list[list[torch.Tensor]] = []

    def spoil() -> None:
        while not done.is_set():
            for one in lists:
                one.clear()
                one.extend(torch.randn(3) for _ in range(3))

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        for _ in range(40):
            lists[:] = []
            given = [weight.clone()]
            lists.append(given)
            with contextlib.suppress(RuntimeError):  # it was another list before the call began
                (found,) = several(x, given, [0, 0, -1], [])
                torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    finally:
        done.set()
        thread.join()


@torch.no_grad()
def test_another_kernel_may_take_its_place() -> None:
    tensors = layer()
    other = torch.library.Library("kernel_dispatch", "IMPL")
    other.impl("openmp_linear", lambda x, *_: x + 1, "CPU", allow_override=True)
    try:
        torch.testing.assert_close(linear(*tensors), tensors[0] + 1)
    finally:
        other._destroy()
    torch.testing.assert_close(linear(*tensors), torch.nn.functional.linear(*tensors))


@torch.no_grad()
def test_excluded_keys_are_only_those() -> None:
    """Meta tensors have no numbers, whatever keys are left out."""
    meta = [one.to("meta") for one in layer()]
    left_out = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
    with torch._C._ExcludeDispatchKeyGuard(left_out), pytest.raises(NotImplementedError):
        linear(*meta)


def test_a_compiled_graph_counts_what_ran() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    with every_row_applies():
        compiled = compile_at("O2", model.eval(), options={"strict": True})
        x = torch.randn(3, 24)
        for _ in range(3):
            hold(compiled, model, x)
    assert_regions(compiled, ("linear", "openmp", 2, 6))


@torch.no_grad()
def test_no_layer_is_too_small() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    compiled = compile_in("O2 openmp", model.eval(), options={"strict": True})
    hold(compiled, model, torch.randn(3, 8))
    assert_regions(compiled, ("linear", "openmp", 2, 2))
