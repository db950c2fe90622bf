"""S002-41 to 43: the seed's three programs, as examples/ has them. And S003-01 for their models."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import kernel_dispatch
from examples import backend_comparison, inference_pipeline, training_loop
from kernel_dispatch import BackendNotAvailableError, DeviceInfo
from kernel_dispatch.backends import (
    AMDBackend,
    BackendFactory,
    BaseBackend,
    CPUBackend,
    IntelBackend,
    MPSBackend,
    NVIDIABackend,
    TPUBackend,
    get_backend,
)
from tests.support.reports import assert_ran_as_planned

MODULES = (training_loop, inference_pipeline, backend_comparison)
CLASSES = (NVIDIABackend, AMDBackend, TPUBackend, IntelBackend, MPSBackend, CPUBackend)
HERE = BackendFactory.is_available  # of this machine: tests hold wherever they run


def eager_losses(epochs: int) -> list[float]:
    """The same loop without any of our names in it."""
    model = training_loop.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(epochs):
        own = []
        for x, wanted in training_loop.make_batches(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), wanted)
            loss.backward()
            optimizer.step()
            own.append(loss.item())
        losses.append(sum(own) / len(own))
    return losses


def test_s002_41_a_training_loop_for_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """One training loop runs on whatever device is here: the loss falls as it does in eager, on the
    best backend there is, and the report counts every step."""
    losses = training_loop.main(epochs=2, level="O1")
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(eager_losses(2), rel=1e-4)
    graphs = kernel_dispatch.report()
    assert sum(graph.runs for graph in graphs) == 40  # two epochs of twenty steps
    assert {graph.level for graph in graphs} == {"O1"}
    assert not graphs.fallbacks
    said = capsys.readouterr().out
    assert f"({get_backend().BACKEND_NAME})" in said and "epoch 1: loss" in said


def test_s002_41_the_optimizer_that_holds_the_parameters_stays_valid() -> None:
    """Made before or after `prepare_model`: the seed's loop makes it before."""
    backend = get_backend("cpu")
    plain = training_loop.make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = backend.prepare_model(plain, "O1")
    model, same = backend.optimize_for_training(model, optimizer)
    assert same is optimizer
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x, wanted = training_loop.make_batches(1)[0]
    nn.functional.cross_entropy(model(x), wanted).backward()
    same.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_s002_42_a_comparison_skips_what_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    """One program compares every backend: what is here is verified and timed, what is absent is a
    row that says why."""
    rows = {row.backend: row for row in backend_comparison.main(level="O1", calls=3)}
    assert list(rows) == [kind.value for kind in backend_comparison.EVERY]
    cpu = rows["cpu"]
    assert cpu.median_ms is not None and cpu.median_ms > 0
    assert cpu.computed_by.startswith("graph by ")
    for name, row in rows.items():
        assert (row.median_ms is None) == (not HERE(name)), row
        if row.median_ms is None:
            assert name in row.computed_by and "cpu" in row.computed_by
    assert "cpu" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_s002_42_both_ways_to_ask_for_a_backend(cls: type[BaseBackend]) -> None:
    """The factory raises, the class says that it is not available; and never another's device."""
    name = str(cls.BACKEND_NAME)
    with pytest.warns(DeprecationWarning, match="old way"):
        built = cls()
    assert built.is_available is HERE(name)
    if HERE(name):
        assert type(BackendFactory.create(name)) is cls
        return
    with pytest.raises(BackendNotAvailableError, match="cpu"):
        BackendFactory.create(name)
    with pytest.raises(BackendNotAvailableError):
        built.prepare_model(backend_comparison.make_model(), "O1")


def test_s002_43_a_pipeline_gives_the_function_and_the_device() -> None:
    """`prepare` returns a function that answers as eager does, compiled before its first call, and
    the description of the device."""
    model = inference_pipeline.make_model()
    sample = torch.randn(1, 12, 32)
    predict, device = inference_pipeline.prepare(model, sample, "O1")
    assert isinstance(device, DeviceInfo) and device.is_available
    assert device.backend == get_backend().BACKEND_NAME

    compiled = kernel_dispatch.report()
    assert compiled and sum(graph.runs for graph in compiled) == len(compiled)
    x = torch.randn(1, 12, 32)
    with torch.no_grad():
        torch.testing.assert_close(predict(x).cpu(), inference_pipeline.make_model()(x))
    assert len(kernel_dispatch.report()) == len(compiled)  # the first answer compiled nothing
    assert not predict(x).requires_grad
    if device.backend == "cpu":
        assert_ran_as_planned(None, "O1")


def test_s002_43_the_example_answers_every_request(capsys: pytest.CaptureFixture[str]) -> None:
    answers = inference_pipeline.main(level="O1", requests=2)
    model = inference_pipeline.make_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for answer in answers:
            scores = model(torch.randn(1, 12, 32, generator=generator))
            assert answer == int(scores.mean(dim=1).argmax())
    assert len(answers) == 2
    assert "running on " in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize("module", MODULES, ids=lambda module: Path(module.__file__).stem)
def test_s003_01_models_know_no_backend(module: object) -> None:
    """One model for every target: what builds it is plain torch, and no name of ours is in it."""
    source = inspect.getsource(module.make_model)  # type: ignore[attr-defined]
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    ours = {
        name
        for name, value in vars(module).items()
        if str(getattr(value, "__module__", getattr(value, "__name__", ""))).startswith(
            ("kernel_dispatch", "lowering", "triton_kernels")
        )
    }
    assert "kernel_dispatch" in ours  # the test can see our names
    assert not names & ours
