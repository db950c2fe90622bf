"""What the user asked for arrives: through every door, in the right order, named in the report."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernel_dispatch
from kernel_dispatch import BackendNotAvailableError, UnifiedWarning, configure
from kernel_dispatch.settings import Settings, resolve


def fn(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.t()).relu() + 1


X = torch.randn(6, 6)


def compiled_and_called(f: Callable[..., Any] = fn, **kwargs: Any) -> Any:
    compiled = torch.compile(f, backend="unified", **kwargs)
    torch.testing.assert_close(compiled(X), f(X))
    return compiled


def setting(compiled: Any, name: str) -> tuple[Any, str]:
    (record,) = kernel_dispatch.report(compiled)
    row = record.as_dict()["settings"][name]
    return row["value"], row["source"]


# --- precedence -----------------------------------------------------------------------------------


def test_default() -> None:
    compiled = compiled_and_called()
    assert setting(compiled, "level") == ("O2", "default")
    assert setting(compiled, "device") == ("auto", "default")
    assert kernel_dispatch.report(compiled)[0].provider == "inductor"


def test_environment_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_LEVEL", "conservative")
    monkeypatch.setenv("UNIFIED_THREADS", "1")
    compiled = compiled_and_called()
    assert setting(compiled, "level") == ("O1", "UNIFIED_LEVEL")
    assert setting(compiled, "threads") == (1, "UNIFIED_THREADS")
    assert kernel_dispatch.report(compiled)[0].provider == "eager"


def test_context_beats_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_LEVEL", "O1")
    with configure(level="O0", threads=2):
        compiled = compiled_and_called()
    assert setting(compiled, "level") == ("O0", "configure()")
    assert setting(compiled, "threads") == (2, "configure()")
    assert setting(compiled, "strict") == (False, "default")


def test_option_beats_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_LEVEL", "O3")
    with configure(level="O0", strict=True):
        compiled = compiled_and_called(options={"level": 1})
    assert setting(compiled, "level") == ("O1", "options=")
    assert setting(compiled, "strict") == (True, "configure()")
    text = kernel_dispatch.report(compiled).text()
    assert "level O1 (from options=)" in text


@pytest.mark.quick
def test_each_option_is_resolved_on_its_own() -> None:
    environ = {
        "UNIFIED_LEVEL": "O1",
        "UNIFIED_STRICT": "yes",
        "UNIFIED_DISABLE": "inductor, mkldnn",
    }
    with configure(strict=False):
        settings = resolve(None, {"threads": "3"}, environ)
    assert settings.disable == {"inductor", "mkldnn"}
    assert (str(settings.level), settings.strict, settings.threads) == ("O1", False, 3)
    assert dict(settings.sources) == {
        "level": "UNIFIED_LEVEL",
        "strict": "configure()",
        "threads": "options=",
        "keep_memory": "default",
        "disable": "UNIFIED_DISABLE",
        "device": "default",
        "provider": "default",
        "config": "default",
        "tolerance": "default",
        "buckets": "default",
        "cache_dir": "default",
        "calibration": "default",
        "guards": "default",
        "inductor": "default",
    }


@pytest.mark.quick
def test_an_empty_variable_is_no_wish() -> None:
    assert (
        resolve(environ={"UNIFIED_LEVEL": "", "UNIFIED_DEVICE": "  "}).sources
        == resolve(environ={}).sources
    )


@pytest.mark.quick
def test_settings_are_values() -> None:
    settings = resolve(None, {"level": "O1", "inductor": {"max_autotune": True}}, {})
    assert isinstance(settings, Settings)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert hash(settings) == hash(
        resolve(None, {"inductor": {"max_autotune": True}, "level": 1}, {})
    )


@pytest.mark.quick
@pytest.mark.parametrize("alias", ["O1", "o1", 1, "1", "conservative", "Conservative "])
def test_level_spellings(alias: object) -> None:
    assert str(resolve(None, {"level": alias}, {}).level) == "O1"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("cpu", "cpu"),
        ("HOST", "cpu"),
        (torch.device("cpu"), "cpu"),
        ("nvidia", "cuda"),
        ("amd", "rocm"),
        ("hip:1", "rocm:1"),
        ("tpu", "xla"),
        ("cuda:3", "cuda:3"),
        (torch.device("cuda", 2), "cuda:2"),
        ("metal", "mps"),
        ("auto", None),
        (None, None),
    ],
)
def test_device_spellings(given: object, target: str | None) -> None:
    wish = resolve(None, {"device": given}, {}).device
    assert (str(wish) if wish else None) == target


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = [
    ({"options": {"levle": "O1"}}, ("levle", "level", "strict", "options=")),
    ({"options": {"level": "O7"}}, ("O7", "O0", "O3", "balanced")),
    ({"options": {"level": "agressive"}}, ("agressive", "Did you mean 'aggressive'", "O2")),
    ({"options": {"level": True}}, ("True", "O0")),
    ({"options": {"device": "cdua"}}, ("cdua", "Did you mean 'cuda'", "cpu", "rocm")),
    ({"options": {"device": "cuda:x"}}, ("cuda:x", "index")),
    ({"options": {"disable": ["inducter"]}}, ("inducter", "Did you mean 'inductor'", "mkldnn")),
    ({"options": {"disable": "eager"}}, ("eager", "strict")),
    ({"options": {"disable": 3}}, ("3", "disable")),
    ({"options": {"strict": "maybe"}}, ("maybe", "true", "false")),
    ({"options": {"threads": 0}}, ("threads=0", "from 1 to 4096")),
    ({"options": {"threads": "two"}}, ("two", "from 1 to 4096")),
    ({"options": {"inductor": {"max_autotun": 1}}}, ("max_autotun", "Did you mean 'max_autotune'")),
    ({"options": {"inductor": 5}}, ("inductor=5", "dict")),
    ({"options": {"max_autotune": True}}, ("max_autotune", "inductor=")),
    ({"mode": "max-autotun"}, ("max-autotun", "Did you mean 'max-autotune'", "reduce-overhead")),
]


@pytest.mark.parametrize(("kwargs", "told"), MISTAKES, ids=lambda v: str(v) if v else "")
def test_a_mistake_arrives_as_a_value_error(kwargs: dict, told: tuple[str, ...]) -> None:
    compiled = torch.compile(fn, backend="unified", **kwargs)
    with pytest.raises(ValueError) as caught:
        compiled(X)
    for word in told:
        assert word in str(caught.value)
    assert isinstance(caught.value, kernel_dispatch.SettingError)
    assert not kernel_dispatch.report(compiled)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("UNIFIED_LEVEL", "O9", ("O9", "UNIFIED_LEVEL", "O2")),
        ("UNIFIED_DEVICE", "gpu0", ("gpu0", "UNIFIED_DEVICE", "cuda")),
        ("UNIFIED_STRICT", "2", ("'2'", "UNIFIED_STRICT", "true")),
        ("UNIFIED_DISABLE", "inductor,foo", ("foo", "UNIFIED_DISABLE", "mkldnn")),
        ("UNIFIED_THREADS", "-1", ("-1", "UNIFIED_THREADS", "from 1 to 4096")),
    ],
)
def test_a_mistake_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: tuple[str, ...]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        torch.compile(fn, backend="unified")(X)
    assert all(word in str(caught.value) for word in told)


@pytest.mark.quick
def test_a_mistake_in_configure_is_raised_at_once() -> None:
    with pytest.raises(ValueError, match="configure"):
        configure(levl="O1")
    with pytest.raises(ValueError, match="O8"):
        configure(level="O8")


@pytest.mark.quick
def test_configure_without_with_says_so() -> None:
    with pytest.warns(UnifiedWarning, match="without `with`"):
        configure(level="O1")


@pytest.mark.quick
def test_an_unknown_variable_is_said_once() -> None:
    environ = {"UNIFIED_LEVLE": "O3"}
    with pytest.warns(UnifiedWarning, match="Did you mean UNIFIED_LEVEL") as caught:
        resolve(environ=environ)
        resolve(environ=environ)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("device", "named"), [("cuda", "cuda"), ("xla", "xla"), ("mps", "mps"), ("nvidia:0", "cuda:0")]
)
def test_a_forced_device_that_is_absent(device: str, named: str) -> None:
    if kernel_dispatch.available_targets() != ["cpu"]:
        pytest.skip("this machine has an accelerator")
    compiled = torch.compile(fn, backend="unified", options={"device": device})
    with pytest.raises(BackendNotAvailableError) as caught:
        compiled(X)
    message = str(caught.value)
    assert repr(named) in message
    assert "Available: cpu" in message
    assert "options=" in message


def test_a_forced_device_that_is_there() -> None:
    compiled = compiled_and_called(options={"device": "host"})
    assert setting(compiled, "device") == ("cpu", "options=")
    (record,) = kernel_dispatch.report(compiled)
    assert (record.target, record.transfers, record.fallbacks) == ("cpu", 0, [])
    cuda = next(no for no in record.plan.rejected if no.target == "cuda")
    assert {"target-absent", "not-requested"} >= {reason.code for reason in cuda.reasons}
    assert "not-requested" in {reason.code for reason in cuda.reasons}


def test_a_forced_index_that_is_absent() -> None:
    with pytest.raises(BackendNotAvailableError, match="1 device"):
        torch.compile(fn, backend="unified", options={"device": "cpu:5"})(X)


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "level", "kept"),
    [
        ("reduce-overhead", "O3", "reduce-overhead"),
        ("max-autotune", "O3", "max-autotune"),
        ("max-autotune-no-cudagraphs", "O3", "max-autotune-no-cudagraphs"),
        ("default", "O2", "default"),
        ("O1", "O1", None),
        ("none", "O0", None),
    ],
)
def test_mode_is_a_level(mode: str, level: str, kept: str | None) -> None:
    settings = resolve(mode, None, {"UNIFIED_LEVEL": "O0"})
    assert (str(settings.level), settings.mode) == (level, kept)
    assert dict(settings.sources)["level"] == "mode="


def test_mode_through_torch_compile() -> None:
    compiled = compiled_and_called(mode="reduce-overhead")
    assert setting(compiled, "level") == ("O3", "mode=")
    assert setting(compiled, "mode") == ("reduce-overhead", "mode=")


# --- configure ------------------------------------------------------------------------------------


def test_configure_nests_and_unwinds() -> None:
    with configure(level="O0", threads=1):
        with configure(level="O1"):
            inner = compiled_and_called(lambda x: x.sin() + 1)
        outer = compiled_and_called(lambda x: x.cos() + 1)
    assert setting(inner, "level")[0] == "O1"
    assert setting(inner, "threads")[0] == 1
    assert setting(outer, "level")[0] == "O0"
    assert resolve(environ={}).threads is None


@pytest.mark.quick
def test_configure_unwinds_after_an_exception() -> None:
    with pytest.raises(KeyError), configure(level="O0"):
        raise KeyError
    assert dict(resolve(environ={}).sources)["level"] == "default"


def test_configure_as_a_decorator_of_a_recursive_function() -> None:
    seen = []

    @configure(level="O0")
    def run(depth: int) -> None:
        seen.append(str(resolve(environ={}).level))
        if depth:
            run(depth - 1)
        seen.append(str(resolve(environ={}).level))

    run(2)
    assert seen == ["O0"] * 6
    assert str(resolve(environ={}).level) == "O2"


@pytest.mark.quick
def test_configure_belongs_to_its_thread() -> None:
    seen: list[str] = []
    with configure(level="O0"):
        worker = threading.Thread(target=lambda: seen.append(str(resolve(environ={}).level)))
        worker.start()
        worker.join()
        assert str(resolve(environ={}).level) == "O0"
    assert seen == ["O2"]


def test_compiled_graphs_keep_their_settings() -> None:
    with configure(level="O0"):
        compiled = compiled_and_called()
    with configure(level="O1"), pytest.warns(UnifiedWarning, match="keeps what it was compiled"):
        compiled(X)
    assert setting(compiled, "level") == ("O0", "configure()")
    assert kernel_dispatch.report(compiled)[0].runs == 2


# --- what the settings do -------------------------------------------------------------------------


@pytest.fixture
def seen_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread count in force while the compiled callable runs; it raises for negative sums."""
    from torch._inductor import compile_fx as module

    seen: list[int] = []

    def fake(gm: Any, inputs: Any, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(torch.get_num_threads())
            return gm.forward(*args)

        return run

    monkeypatch.setattr(module, "compile_fx", fake)
    return seen


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_are_in_force_during_the_call_only(seen_threads: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    compiled = compiled_and_called(options={"threads": threads})
    compiled(X)
    assert seen_threads == [threads, threads]
    assert torch.get_num_threads() == before
    assert setting(compiled, "threads") == (threads, "options=")


def test_threads_are_restored_after_an_exception(seen_threads: list[int]) -> None:
    before = torch.get_num_threads()
    compiled = torch.compile(
        lambda x: torch.linalg.inv(x) + 1, backend="unified", options={"threads": 3}
    )
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.zeros(2, 2))
    assert seen_threads == [3]
    assert torch.get_num_threads() == before


def test_threads_at_levels_without_a_compiler() -> None:
    before = torch.get_num_threads()
    seen = []

    @torch.compiler.allow_in_graph
    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x + 1

    compiled = torch.compile(
        lambda x: spy(x) * 2, backend="unified", options={"threads": 3, "level": "O0"}
    )
    assert torch.equal(compiled(X), (X + 1) * 2)
    assert seen[-1] == 3
    assert torch.get_num_threads() == before


def test_disable_inductor() -> None:
    compiled = compiled_and_called(options={"disable": ["inductor"]})
    (record,) = kernel_dispatch.report(compiled)
    assert record.provider == "eager"
    assert record.fallbacks == []
    no = next(no for no in record.plan.rejected if no.provider == "inductor")
    assert [reason.code for reason in no.reasons] == ["provider-disabled"]
    assert setting(compiled, "disable") == (["inductor"], "options=")


def test_inductor_config_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx as module

    real, seen = module.compile_fx, []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("config_patches"))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "compile_fx", spy)
    options = {"inductor": {"cpp.simdlen": 0, "epilogue_fusion": False}, "threads": 1}
    compiled = compiled_and_called(options=options)
    assert seen[0].items() >= {"cpp.simdlen": 0, "epilogue_fusion": False, "cpp.threads": 1}.items()
    assert kernel_dispatch.report(compiled)[0].provider == "inductor"
    assert torch._inductor.config.epilogue_fusion is True


def test_inductors_own_random_numbers_can_be_eagers() -> None:
    """Which operators are taken apart follows the graph's config, not the process's."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    options = {"level": "O2", "inductor": {"fallback_random": True}}
    compiled, x = torch.compile(noisy, backend="unified", options=options), torch.randn(64, 64)
    torch.manual_seed(0)
    expected = noisy(x)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_freezing_keeps_each_models_own_weights(everywhere: bool, dynamic: bool) -> None:
    """Inductor's cache gives the code of the first model to the second one, and its weights are to
    be the second one's. `everywhere`: as TORCHINDUCTOR_FREEZING has it."""
    options = {"level": "O2", "inductor": {} if everywhere else {"freezing": True}}
    for _ in range(3):
        torch._dynamo.reset()
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Hardswish()).eval()
        compiled = torch.compile(model, backend="unified", dynamic=dynamic, options=options)
        x = torch.randn(1, 3, 20, 20)
        with torch.no_grad(), torch._inductor.config.patch(freezing=everywhere):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        (record,) = kernel_dispatch.report(compiled)
        assert (record.provider, record.fallbacks) == ("inductor", [])
        assert any("freezing is on" in note for note in record.notes)


def test_kernels_of_ours_where_inductor_is_to_refuse_what_it_does_not_know() -> None:
    """`implicit_fallbacks` off means that it generates code for everything, or raises."""

    def model(x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn_like(x), torch.nn.functional.interpolate(image, scale_factor=2.0)

    compiled = torch.compile(model, backend="unified", options={"level": "O2"})
    with torch._inductor.config.patch(implicit_fallbacks=False):
        shapes = [each.shape for each in compiled(torch.zeros(2048), torch.randn(1, 8, 16, 16))]
    assert shapes == [(2048,), (1, 8, 32, 32)]
    (record,) = kernel_dispatch.report(compiled)
    assert (record.provider, record.fallbacks) == ("inductor", [])
