"""The registry, the choice of a default, and the order in which a provider is selected."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import ProviderId, default_backend
from kernel_dispatch.registry import (
    BackendRegistry,
    CompileContext,
    Provider,
    select_backend,
    table,
)
from kernel_dispatch.settings import resolve
from lowering.errors import BackendNotAvailableError, SettingError, UnifiedWarning
from tests.support.compiling import every_row_applies
from tests.support.fake_machine import gpu, pretend

NAMES = tuple(table.BY_NAME)


@pytest.fixture(autouse=True)
def no_default() -> Iterator[None]:
    default_backend.choose(None)
    yield
    default_backend.choose(None)


@pytest.fixture
def fresh() -> BackendRegistry:
    return BackendRegistry()


class Mine(Provider):
    """Somebody's own, in the place of one of the fourteen."""

    def is_available(self) -> bool:
        return True


# --- the registry ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_s000_20_one_for_the_process(fresh: BackendRegistry) -> None:
    """`instance()` is the same registry every time; a backend is registered once, and replaced only
    where that is asked for."""
    assert BackendRegistry.instance() is BackendRegistry.instance()
    assert BackendRegistry.instance() is BackendRegistry.get_instance()
    mine = Mine(table.BY_NAME["mps"])
    assert not fresh.register_backend(mine), "taken"
    assert fresh.register_backend(mine, override=True)
    assert fresh.get_backend("mps") is mine
    assert fresh.unregister_backend("metal")
    assert not fresh.unregister_backend(ProviderId.MPS)
    assert fresh.get_backend("mps") is None
    assert fresh.register_backend(mine)
    with pytest.raises(TypeError, match="BackendInterface"):
        fresh.register_backend("mps")  # type: ignore[arg-type]


@pytest.mark.quick
def test_s000_20_numbers_are_given_by_the_table(fresh: BackendRegistry) -> None:
    """What has none of the fourteen numbers is told how new hardware comes in."""

    class Strange(Mine):
        def get_type(self) -> ProviderId:
            return ProviderId.UNKNOWN

    with pytest.raises(SettingError, match="add_a_target"):
        fresh.register_backend(Strange(table.BY_NAME["cpu"]))


def test_s000_20_threads_at_once(fresh: BackendRegistry) -> None:
    """Eight threads that register, look up, ask and choose at once neither block each other for
    ever nor see each other's choice.

    A hundred of them: tests/api/test_hammer.py.
    """
    here = [n for n in ("cpu", "mkldnn", "opt_einsum") if kernel_dispatch.is_backend_available(n)]
    start = threading.Barrier(8)

    def work(number: int) -> bool:
        mine = here[number % len(here)]
        start.wait(timeout=60)
        kernel_dispatch.set_default_backend(mine)
        for _ in range(5):
            fresh.register_backend(Mine(table.BY_NAME[mine]), override=True)
            assert fresh.get_backend(mine) is not None
            assert ProviderId.CPU in fresh.get_available_backends()
            assert kernel_dispatch.get_default_backend() == mine
            assert resolve().provider == mine
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8), timeout=60))


@pytest.mark.quick
def test_s000_21_by_number_and_by_name(fresh: BackendRegistry) -> None:
    """A provider is found by number, name or alias, in any case; what there is not gives None."""
    for info in table.TABLE:
        found = fresh.get_backend(info.type)
        assert found is not None
        assert found is fresh.get_backend(info.name.upper())
        assert found is fresh.get_backend(f"BT_{info.name}")
    aliases = {"nvidia": "cuda", "metal": "mps", "onednn": "mkldnn", "neuron": "nki", "x86": "cpu"}
    for alias, name in aliases.items():
        assert fresh.get_backend(alias) is fresh.get_backend(name)
    for nothing in ("cdua", "", ProviderId.UNKNOWN, None, "rocm"):
        assert fresh.get_backend(nothing) is None  # type: ignore[arg-type]


def test_s000_22_available_is_what_the_probes_say(
    fresh: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of those that are available agrees with the probes, in the order of the table, and
    the CPU is always in it."""
    listed = fresh.get_available_backends()
    assert ProviderId.CPU in listed
    for info in table.TABLE:
        assert (info.type in listed) == fresh.is_backend_available(info.name)
    pretend(monkeypatch, {"cuda": gpu("sm90")}, ["triton"])
    assert fresh.get_available_backends()[0] is ProviderId.CUDA
    assert fresh.is_backend_available(ProviderId.TRITON)
    assert not fresh.is_backend_available("nothing of the kind")


# --- several in one process -----------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()


@pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()),
    reason="this torch lacks one of the two libraries",
)
def test_s000_25_s000_36_two_providers_in_turn() -> None:
    """Several providers work in one process: compiled at once and called in turn, each graph keeps
    to its own and neither changes anything for the other."""
    model, x = mlp(), torch.randn(64, 256)
    made = {}
    with every_row_applies():  # each is ahead on CPUs of one vendor
        for name in ("mkl", "mkldnn"):
            ctx = CompileContext(model, (x,), level="O1")
            found = BackendRegistry.instance().get_backend(name)
            assert found is not None
            assert found.compile(ctx), ctx.error
            made[name] = ctx
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            for ctx in made.values():
                assert ctx.compiled is not None
                torch.testing.assert_close(ctx.compiled(x), expected)
    for name, ctx in made.items():
        assert ctx.report is not None
        rows = [row for graph in ctx.report for row in graph.as_dict()["regions"]]
        assert [(r["region"], r["provider"], r["runs"]) for r in rows[1:]] == [("linear", name, 6)]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_s000_31_s000_36_a_switch_between_calls() -> None:
    """After the default is switched, new graphs follow it and say so; graphs that were compiled
    keep what they have, and that is said where it makes a difference."""
    x = torch.randn(64, 256)

    def compiled() -> tuple[object, list[tuple[str, str]]]:
        with torch.no_grad():
            made = torch.compile(mlp(), backend="unified", options={"level": "O1"})
            made(x)
        (graph,) = kernel_dispatch.report(made)
        return made, [(region.name, region.provider) for region in graph.regions]

    kernel_dispatch.set_default_backend("mkl")
    old, regions = compiled()
    assert regions == [("linear", "mkl")]
    (graph,) = kernel_dispatch.report(old)
    shown = graph.settings.as_dict()["provider"]
    assert shown == {"value": "mkl", "source": "set_default_backend()"}
    texts = [r.text for no in graph.plan.rejected for r in no.reasons]
    assert "mkldnn is off while mkl is chosen (from set_default_backend())" in texts

    kernel_dispatch.set_default_backend("mkldnn")
    differs = pytest.warns(UnifiedWarning, match="with mkl as the default, which is mkldnn now")
    with torch.no_grad(), differs:
        old(x)  # type: ignore[operator]
    assert graph.regions[0].provider == "mkl"
    torch.compiler.reset()
    assert ("linear", "mkl") not in compiled()[1]


def test_s000_31_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default of one target changes nothing on another, and an option comes before it."""
    pretend(monkeypatch, {"cuda": gpu("sm90")}, ["triton"])
    kernel_dispatch.set_default_backend("triton")
    settings = resolve()
    assert settings.provider == "triton"
    compiled = torch.compile(lambda x: x + 1, backend="unified", options={"level": "O0"})
    compiled(torch.ones(2))
    (graph,) = kernel_dispatch.report(compiled)
    assert graph.target == "cpu"
    assert "provider-disabled" not in {
        r.code for no in graph.plan.rejected for r in no.reasons if no.target == "cpu"
    }
    assert resolve(None, {"provider": "cpu"}).provider == "cpu"
    with kernel_dispatch.configure(provider="mkldnn"):
        assert resolve().provider == "mkldnn"


# --- selection ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_s000_28_s001_08_s001_15_selection(caplog: pytest.LogCaptureFixture) -> None:
    """The provider that was named is taken, else the first fallback that is here; where none is,
    the two errors have the texts of the design and then the reasons."""
    assert select_backend("cpu") == "cpu"
    assert select_backend("cuda", ["mps", "cpu"]) == "cpu"
    assert select_backend("CPU", ["mkl"]) == "cpu", "named comes first"
    none_of = re.escape("No available backend from ['nki', 'mps']")
    with pytest.raises(ValueError, match=f"^{none_of}.*torch_neuronx.*macOS"):
        select_backend("nki", ["mps"])
    here = re.escape(f"Available: {kernel_dispatch.get_available_backends()}")
    for fallbacks in (None, []):
        with pytest.raises(BackendNotAvailableError, match=f"^Backend 'mps' not available. {here}"):
            select_backend("mps", fallbacks)
    with pytest.raises(ValueError, match=r"^Backend 'x' not available. Available: .*unknown"):
        select_backend("x")
    with pytest.raises(SettingError, match="give a list"):
        select_backend("cuda", "cpu")  # type: ignore[arg-type]
    assert select_backend("cuda", ["mkldn", "cpu"]) == "cpu"
    assert "Did you mean 'mkldnn'" in caplog.text


def test_s000_30_types_of_the_functions(caplog: pytest.LogCaptureFixture) -> None:
    """The list is a list of names, the question gives a bool, the information is a dict; a name
    that there is not is an error for the last, and false and logged for the second."""
    listed = kernel_dispatch.get_available_backends()
    assert isinstance(listed, list)
    assert set(listed) <= set(NAMES)
    assert kernel_dispatch.is_backend_available("cpu") is True
    assert kernel_dispatch.is_backend_available("nki") is ("nki" in listed)
    assert kernel_dispatch.is_backend_available("cdua") is False
    assert "Did you mean 'cuda'" in caplog.text
    assert isinstance(kernel_dispatch.get_backend_info("cpu"), dict)
    with pytest.raises(ValueError, match=r"unknown provider 'cdua'.*Did you mean 'cuda'"):
        kernel_dispatch.get_backend_info("cdua")


def test_s000_36_fallback() -> None:
    """Simultaneous compilation, a switch while running and a fallback are tested together with the
    providers of this machine, and with probes of others that are handed in."""
    chosen = select_backend("cuda", ["mps", "cpu"])
    found = BackendRegistry.instance().get_backend(chosen)
    ctx = CompileContext(lambda x: x * 2, (torch.ones(3),), level="O1")
    assert found is not None
    assert found.compile(ctx)
