"""superoptimize: candidates are verified, then timed; what is wrong or slow is a row that says so.

Times are planted: the clock is the test's own, and candidates move it on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernel_dispatch import (
    BackendNotAvailableError,
    SettingError,
    devices,
    report,
    superoptimize,
)
from lowering.contract import Probe

quick = pytest.mark.quick
X = torch.randn(8, 16)


class Clock:
    """Stands still until a candidate moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return fn(*args, **kwargs)

        return call


def plain(x: Tensor) -> Tensor:
    return torch.softmax(x, -1) @ x.T


def contest(fn: Any, inputs: Any, seconds: float = 1.0, **others: tuple[float, Any]) -> Any:
    """`fn` takes `seconds`, each candidate what is planted for it."""
    clock = Clock()
    also = {
        name: lambda _, t=t, made=made: clock.taking(t, made) for name, (t, made) in others.items()
    }
    return superoptimize(clock.taking(seconds, fn), inputs, levels=(), also=also, clock=clock)


def status(result: Any) -> dict[str, str]:
    return {one.name: one.status for one in result.candidates}


@quick
@pytest.mark.status("met on the CPU, not run on a GPU: none here")
def test_s000_32_the_fastest_that_is_right_is_kept() -> None:
    """`superoptimize` gives back the fastest candidate whose results were verified, and never one
    that was slower than the function itself."""
    result = contest(plain, X, slow=(2.0, plain), fast=(0.25, plain), faster=(0.2, wrong_by(1e-3)))
    assert result.name == "fast"
    assert result.speedup == pytest.approx(4.0)
    assert status(result) == {
        "eager": "slower", "slow": "slower", "fast": "fastest", "faster": "wrong",
    }  # fmt: skip
    assert torch.equal(result(X), plain(X))
    slow = {one.name: one for one in result.candidates}["slow"]
    assert slow.seconds == pytest.approx(2.0)
    assert slow.reason == "takes 8.00 times as long as fast"


@quick
def test_s000_32_nothing_is_faster() -> None:
    result = contest(plain, X, slow=(2.0, plain), same=(1.0, plain))
    assert (result.name, result.speedup) == ("eager", 1.0)
    assert status(result)["same"] == "slower"


@quick
def test_s000_32_a_wrong_candidate_is_not_timed_and_says_by_how_much() -> None:
    row = contest(plain, X, other=(0.1, wrong_by(1e-3))).candidates[1]
    assert (row.status, row.seconds, row.samples) == ("wrong", None, ())
    assert "against float64, allowed" in row.reason


def wrong_by(share: float) -> Callable[[Tensor], Tensor]:
    return lambda x: plain(x) * (1 + share)


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("no such kernel")


def writes_into_its_input(x: Tensor) -> Tensor:
    result = plain(x)
    x.mul_(2)
    return result


@quick
@pytest.mark.parametrize(
    ("candidate", "became", "reason"),
    [
        (raises, "failed", "RuntimeError: no such kernel"),
        (writes_into_its_input, "wrong", "it writes into input tensor 0, which eager leaves alone"),
        (lambda x: (plain(x),), "wrong", "its results are"),
        (lambda x: plain(x).double(), "wrong", "dtype torch.float64, eager has torch.float32"),
        (lambda x: plain(x)[:4], "wrong", "shape"),
    ],
)
def test_s000_32_what_goes_wrong_is_a_row(candidate: Any, became: str, reason: str) -> None:
    before = X.clone()
    result = contest(plain, X, other=(0.1, candidate))
    row = result.candidates[1]
    assert (result.name, row.status) == ("eager", became)
    assert reason in row.reason
    assert torch.equal(X, before), "the caller's own input was changed"


@quick
def test_s000_32_a_candidate_that_goes_wrong_later() -> None:
    calls = iter(range(1000))

    def later(x: Tensor) -> Tensor:
        return plain(x) + (next(calls) > 5)

    row = contest(plain, X, other=(0.1, later)).candidates[1]
    assert row.status == "wrong"
    assert row.reason.startswith("after it was timed")


@quick
@pytest.mark.parametrize("inputs", [(X, 2.0), {"x": X, "by": 2.0}])
def test_s000_32_tuples_and_dicts_of_inputs_and_of_results(inputs: Any) -> None:
    def several(x: Tensor, by: float) -> dict[str, Any]:
        return {"scaled": x * by, "largest": (x.max(), x.argmax()), "by": by}

    def differs(x: Tensor, by: float) -> dict[str, Any]:
        return {**several(x, by), "by": by + 1}

    result = contest(several, inputs, same=(0.5, several), other=(0.1, differs))
    assert status(result) == {"eager": "slower", "same": "fastest", "other": "wrong"}
    assert "returns 3.0 where eager returns 2.0" in result.candidates[2].reason


@quick
def test_s000_32_random_results_cannot_be_verified() -> None:
    def dropped(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)

    state = torch.get_rng_state()
    result = contest(dropped, X, same=(0.1, dropped))
    assert status(result) == {"eager": "fastest", "same": "unverified"}
    assert "its results are random" in str(result)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator was moved on"


@quick
def test_s000_32_state_that_cannot_be_put_back() -> None:
    calls = iter(range(1000))
    result = contest(lambda x: x + next(calls), X, same=(0.1, lambda x: x))
    assert status(result) == {"eager": "fastest", "same": "unverified"}
    assert "keeps state elsewhere" in result.candidates[1].reason


class Counting(nn.Module):
    """Writes into a buffer and into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x.add_(1)
        return self.layer(x) * self.calls


class Forgetful(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + 1) * (self.calls + 1)


@quick
@torch.no_grad()
def test_s000_32_writes_are_compared_and_put_back() -> None:
    model, x = Counting(), X.clone()
    clock = Clock()
    also = {
        "same": lambda fn: clock.taking(0.5, fn),
        "does not count": lambda fn: clock.taking(0.1, lambda x: Forgetful.forward(fn, x)),
    }
    clock.taking(1.0, model)
    model.register_forward_pre_hook(lambda *_: setattr(clock, "now", clock.now + 1.0))
    result = superoptimize(model, x, levels=(), also=also, clock=clock)
    assert status(result)["does not count"] == "wrong"
    assert torch.equal(x, X)
    assert model.calls.item() == 0


class Averaging(nn.Module):
    """BatchNorm's statistics, updated in a way that is not eager's."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        with torch.no_grad():
            self.norm.running_mean *= 0.5
        return y


@quick
@torch.no_grad()
def test_s000_32_batch_norm_keeps_its_statistics() -> None:
    """Eager's BatchNorm writes without telling torch's version counters."""
    norm, clock = nn.BatchNorm1d(16), Clock()
    norm.register_forward_pre_hook(lambda *_: setattr(clock, "now", clock.now + 1.0))
    also = {"forgetting": Forgetting, "averaging": Averaging}
    result = superoptimize(norm, X, levels=(), also=also, clock=clock)
    assert status(result) == {"eager": "fastest", "forgetting": "wrong", "averaging": "wrong"}
    assert torch.equal(norm.running_mean, torch.zeros(16))
    assert norm.num_batches_tracked.item() == 0


class Forgetting(nn.Module):
    """The right result, without the statistics."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return torch.nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)


@quick
def test_s000_32_training_is_verified_with_gradients() -> None:
    layer = nn.Linear(16, 4)

    def wrong_backward(x: Tensor) -> Tensor:
        return layer(x) * 2 - layer(x).detach()

    clock = Clock()
    also = {
        "same": lambda fn: clock.taking(0.5, fn),
        "wrong backward": lambda _: clock.taking(0.1, wrong_backward),
    }
    layer.register_forward_pre_hook(lambda *_: setattr(clock, "now", clock.now + 1.0))
    result = superoptimize(layer, X, levels=(), also=also, clock=clock)
    rows = {one.name: one for one in result.candidates}
    assert result.training
    assert rows["wrong backward"].status == "wrong"
    assert rows["wrong backward"].reason.startswith("gradients: error")
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert "forward and backward" in str(result)


@quick
def test_s000_32_a_function_that_calls_a_module() -> None:
    """Its weights get gradients too; in float64 it does not run, so eager is what it is held to."""
    layer = nn.Linear(16, 4)
    result = contest(
        lambda x: layer(x).sum(),
        X,
        same=(0.5, lambda x: layer(x).sum()),
        other=(0.1, lambda x: layer(x).sum() * 2 - layer(x).sum().detach()),
    )
    assert status(result) == {"eager": "slower", "same": "fastest", "other": "wrong"}
    assert result.training
    assert "no float64 reference" in str(result)
    assert layer.weight.grad is None


@quick
def test_s000_32_mode_and_flags_stay_the_callers() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.Dropout()).eval()
    with torch.no_grad():
        result = superoptimize(model, X, levels=(), also={"same": lambda fn: fn}, seconds=0.01)
    assert not model.training
    assert not result.training
    assert result.candidates[1].status in ("fastest", "slower")


@quick
def test_s000_32_the_users_own_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no such kernel"):
        contest(raises, X)


@quick
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"backend": "mkldn"}, SettingError, "Did you mean 'mkldnn'"),
        ({"backend": "cudnn"}, BackendNotAvailableError, "Backend 'cudnn' not available"),
        ({"backend": "xpu"}, BackendNotAvailableError, "Backend 'xpu' not available"),
        ({"levels": ["O9"]}, SettingError, "unknown level 'O9'"),
        ({"tolerance": 3}, SettingError, "tolerance=3"),
        ({"seconds": 0}, SettingError, "seconds=0"),
        ({"also": {"eager": lambda fn: fn}}, SettingError, "two candidates have the name 'eager'"),
    ],
)
def test_s000_32_mistakes_are_told(
    given: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "probe_provider", lambda name: Probe.no("not asked here"))
    with pytest.raises(error, match=text.replace("(", r"\(")):
        superoptimize(plain, X, **given)
    with pytest.raises(SettingError, match="inputs is of type int"):
        superoptimize(plain, 3)
    with pytest.raises(SettingError, match="cannot be called"):
        superoptimize(3, X)


def test_s000_32_levels_of_unified() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    with torch.no_grad():
        before = torch.compile(model, backend="unified", options={"level": "O1"})(X)
        result = superoptimize(model, X, "mkldnn", levels=("O0", "O1"), seconds=0.01)
    assert [one.name for one in result.candidates] == ["eager", "unified O0", "unified O1"]
    for row in result.candidates[1:]:
        assert row.status in ("fastest", "slower"), row
        assert row.error is not None and row.bound is not None and row.error <= row.bound
        assert "eager" in row.computed_by
    assert result.speedup >= 1.0
    with torch.no_grad():
        assert torch.allclose(result(X), before, atol=1e-6)


def test_s000_32_the_candidates_do_not_share_graphs_and_keep_what_was_asked() -> None:
    def spread(x: Tensor) -> Tensor:
        return (x.sin() * x).sum(-1)

    kept: dict[str, Any] = {}
    clock = Clock()

    def as_o1(_: Any) -> Any:
        kept["O1"] = torch.compile(spread, backend="unified", options={"level": "O1"})
        return clock.taking(0.1, kept["O1"])

    result = superoptimize(
        clock.taking(1.0, spread), X, levels=("O0",), also={"mine": as_o1}, clock=clock
    )
    assert result.name == "mine"
    assert [graph.level for graph in report(kept["O1"])] == ["O1"]
    torch._dynamo.reset()
    only = superoptimize(spread, X, "cpu", levels="O1", seconds=0.01)
    (graph,) = {
        id(graph): graph for graph in report() if graph.function.endswith("spread")
    }.values()
    assert graph.settings.as_dict()["provider"]["value"] == "cpu"
    assert only.name in ("eager", "unified O1")


def test_s000_32_where_eager_is_far_from_float64_nothing_is_judged() -> None:
    """Twice eager's error would let anything pass, zeros too."""
    found = contest(lambda x: (x + 1e8) - 1e8, torch.randn(8), zeros=(0.1, torch.zeros_like))
    assert status(found) == {"eager": "fastest", "zeros": "unverified"}
    assert "eager's own error" in found.candidates[0].reason


def test_s000_32_what_cannot_be_compared_is_kept() -> None:
    found = superoptimize(lambda x: x.to_sparse(), torch.eye(3), levels=["O0"], seconds=0.05)
    assert status(found) == {"eager": "fastest", "unified O0": "unverified"}
    assert "cannot be compared" in found.candidates[0].reason


def test_s000_32_compilations_elsewhere_do_not_unseat_the_baseline() -> None:
    """Of the function itself, or of another thread: eager stays what the others are compared to."""
    calls = 0

    def compiles_now_and_then(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls in (20, 25, 30):
            torch.compile(lambda y: y * 2, backend="eager")(torch.randn(calls))
        return x * 2

    assert superoptimize(compiles_now_and_then, torch.randn(4), levels=[], seconds=0.05).name == (
        "eager"
    )
