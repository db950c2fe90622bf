"""Graphs padded to a bucket: outputs as eager's whatever stands in the padding, or a refusal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kernel_dispatch.numerics import double_by_default, to_reference
from lowering.bucketing import next_size
from lowering.bucketing.bucket import Bucket
from lowering.bucketing.neutral import NEUTRAL
from lowering.bucketing.rules import RULES
from tests.support.bucketing import InBuckets
from tests.support.bucketing_samples import LENGTHS, SAMPLES, SIZES, Sample
from tests.support.numerics import assert_contract

BY_NAME = {sample.name: sample for sample in SAMPLES}


def run(sample: Sample) -> InBuckets:
    """Compile it once with sizes that vary and compare it at several sizes with eager."""
    backend = InBuckets(SIZES)
    torch._dynamo.reset()
    compiled = torch.compile(sample.function, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for sizes in LENGTHS:
            torch.manual_seed(0)
            inputs = sample.inputs(sizes)
            for tensor, dims in zip(inputs, sample.static_dims(), strict=True):
                for dim in dims:
                    torch._dynamo.mark_static(tensor, dim)
            before = [tensor.clone() for tensor in inputs]
            got, own = compiled(*inputs), sample.function(*inputs)
            with double_by_default():
                reference = sample.function(*to_reference(inputs))
            assert_contract(got, own, reference, f"{sample.name} at {sizes}")
            assert all(map(torch.equal, inputs, before))
    return backend


@functools.cache
def operators_of(name: str) -> frozenset[str]:
    """What a sample's graph, as it is planned, is made of; with the proof that it is right."""
    backend = run(BY_NAME[name])
    assert backend.refusals == []
    assert backend.graphs == 1
    assert backend.compiled
    return frozenset(backend.operators)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BY_NAME)
def test_garbage_in_the_padding_never_shows(name: str) -> None:
    assert operators_of(name) is not None


@pytest.mark.wide
def test_every_rule_has_a_sample() -> None:
    seen = frozenset().union(*map(operators_of, BY_NAME))
    known = {name for name in RULES if _exists(name)}
    assert known - seen == set()


def _exists(name: str) -> bool:
    namespace, operator, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return hasattr(packet, overload)


FILLS = [(name, operand) for name, kinds in NEUTRAL.items() for operand in range(len(kinds))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "operand"), FILLS)
def test_without_one_fill_a_result_is_wrong(
    name: str, operand: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = Bucket.filled

    def forgetful(self: Bucket, operator: str, place: int, x: Any, *rest: Any) -> torch.Tensor:
        if (operator, place) == (name, operand):
            return x.tensor
        return shipped(self, operator, place, x, *rest)

    monkeypatch.setattr(Bucket, "filled", forgetful)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        run(BY_NAME[name])


REFUSED = {
    "nonzero": (lambda x: x.nonzero(), "depends on the data"),
    "masked_select": (lambda x: x[x > 0] * 2, "depends on the data"),
    "sort": (lambda x: x.sort(1)[0], "aten.sort.default: it mixes along a dimension of s"),
    "topk": (lambda x: x.topk(2, 1)[0], "aten.topk.default: it mixes along a dimension of s"),
    "roll": (lambda x: x.roll(1, 1), "aten.roll.default: it mixes along"),
    "flip": (lambda x: x.flip(1), "aten.flip.default: it mixes along"),
    "cumsum of a flipped one": (lambda x: x.flip(1).cumsum(1), "aten.flip.default"),
    "cumsum of a merged one": (
        lambda x: x.reshape(-1).cumsum(0),
        "aten.cumsum.default: it looks at positions along a dimension that was merged",
    ),
    "last of a merged one": (lambda x: x.reshape(-1)[-1] * 2, "that was merged from padded ones"),
    "regrouped": (lambda x: x.reshape(x.shape[1], -1).sum(1), "aten.view.default: it splits"),
    "merged beside another": (
        lambda x: x.reshape(-1) + torch.arange(x.numel()),
        "operands are padded differently",
    ),
    "random": (lambda x: torch.rand_like(x), "it draws random numbers"),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.5), "it draws random numbers"),
    "view of an input": (lambda x: x[:, 1:], "an output shares memory with an input"),
    "part of an input": (lambda x: x[:, 0, 0], "an output shares memory with an input"),
    "views of one another": (lambda x: [(y := x * 2), y[1:]], "shares memory"),
    "pooling over it": (
        lambda x: torch.nn.functional.max_pool2d(x[:, None], 2),
        "aten.max_pool2d_with_indices.default: it mixes",
    ),
    "normalizing over it": (
        lambda x: torch.nn.functional.group_norm(x.transpose(1, 2), 2),
        "aten.native_group_norm.default: it mixes",
    ),
    "no rule": (lambda x: torch.linalg.qr(x)[1], "it has no rule for padded tensors"),
    "strides": (
        lambda x: (x * 2).as_strided((2, 2), (x.shape[1], 1)) + 1,
        "aten.as_strided.default: it has no rule",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proven_is_refused_with_a_sentence(name: str) -> None:
    function, sentence = REFUSED[name]
    backend = InBuckets(SIZES)
    compiled = torch.compile(function, backend=backend, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = torch.randn(3, 5, 4)
        torch._dynamo.mark_static(x, 2)
        torch.manual_seed(1)
        got = compiled(x)
        torch.manual_seed(1)
        torch.testing.assert_close(got, function(x), rtol=0, atol=0)
    assert backend.compiled == {}
    (reason,) = backend.refusals
    assert reason.code == "dynamic-unsupported"
    assert reason.text.startswith("no buckets: ")
    assert sentence in reason.text
    assert "test_bucketing.py:" in reason.place


def test_what_does_not_vary_needs_no_buckets() -> None:
    backend = InBuckets()
    torch.compile(lambda x: x * 2, backend=backend, dynamic=False)(torch.randn(3, 4))
    assert [reason.text for reason in backend.refusals] == [
        "no buckets: no size of this graph varies"
    ]


def test_planning_adds_no_guard_and_changes_no_graph() -> None:
    sizes = range(4, 40)
    backend = InBuckets()

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, x[:, 1:]], 1).softmax(1)
        return y[:, -1] * x.shape[1] + y.reshape(-1, 4).sum(0)

    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for size in sizes:
            x = torch.randn(3, size, 4)
            torch._dynamo.mark_static(x, 2)
            torch.testing.assert_close(compiled(x), function(x))
    assert backend.graphs == 1


def test_parameters_pass_untouched_and_inputs_that_fit_are_not_copied() -> None:
    seen: list[Any] = []

    class Spy(InBuckets):
        def _with_garbage(self, bucketing: Any, args: Any, key: Any) -> Any:
            seen.append((args, bucketing.pad(args, key)))
            return seen[-1][1]

    layer = torch.nn.Linear(4, 3)
    compiled = torch.compile(layer, backend=Spy(), dynamic=True)
    with torch.no_grad():
        for size in (5, 8):
            compiled(torch.randn(size, 4))
    for args, padded in seen:
        for parameter in layer.parameters():
            assert any(one is parameter for one in args)
            assert any(one is parameter for one in padded)
    for (args, padded), fits in zip(seen, (False, True), strict=True):
        (x,) = (arg for arg in args if getattr(arg, "ndim", 0) == 2 and arg.shape[0] in (5, 8))
        assert any(one is x for one in padded) is fits


def test_sizes() -> None:
    buckets = [next_size(true) for true in range(1, 50)]
    assert sorted(set(buckets)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert all(true <= bucket for true, bucket in enumerate(buckets, 1))
    assert [next_size(true, [128, 64]) for true in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 129]
