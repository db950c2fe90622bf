"""The configuration file: what it may say, what it switches off, and where that is seen."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import kernel_dispatch
from kernel_dispatch import cli
from kernel_dispatch.config import get_backend_macros, load_backend_config
from kernel_dispatch.registry import table
from kernel_dispatch.settings import resolve
from lowering.errors import BackendNotAvailableError, SettingError, UnifiedWarning

# As it stands in the design document.
SAMPLE = """\
# Backend options - multiple selections allowed
set(USE_CUDA ON)
set(USE_CPU ON)
set(USE_MPS OFF)
set(USE_CUDNN OFF)
set(USE_MKL OFF)
set(USE_MKLDNN OFF)
set(USE_OPENMP ON)
set(USE_NKI OFF)
set(USE_TRITON ON)
set(USE_CUSPARSELT OFF)
set(USE_MHA OFF)
set(USE_NNPACK OFF)
set(USE_OPT_EINSUM OFF)
set(USE_XEON OFF)

# Other options
set(BUILD_CPP_EXAMPLES OFF)
set(USE_FORMAL_VERIFIER OFF)
"""
FLAGS = [info.flag for info in table.TABLE]
File = Callable[[str], Path]


@pytest.fixture
def file(tmp_path: Path) -> File:
    def write(text: str) -> Path:
        path = tmp_path / "config.cmake"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def in_force(file: File, monkeypatch: pytest.MonkeyPatch) -> File:
    def write(text: str) -> Path:
        path = file(text)
        monkeypatch.setenv("UNIFIED_CONFIG", str(path))
        return path

    return write


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_s000_23_the_sample_file(file: File) -> None:
    """The design's own file is read as it stands: fourteen flags, four of them on, nothing that
    excludes another."""
    found = load_backend_config(file(SAMPLE))
    assert found.enabled == {"cuda", "cpu", "openmp", "triton"}
    assert list(found.flags) == FLAGS
    assert len(FLAGS) == 14
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("set(use_cuda on)", {"cuda"}),
        ("  SET ( USE_CPU   TRUE )  # for debugging", {"cpu"}),
        ("set(USE_MKL ON) set(USE_MHA 1)\nset(USE_CPU Yes)", {"mkl", "mha", "cpu"}),
        ("set(USE_CPU ON)\n# set(USE_MKL ON)\nset(USE_CPU ON)", {"cpu"}),
        ("set(USE_CPU ON)\nset(USE_MKL ON)\nset(USE_MKL off)", {"cpu"}),
        ('set(USE_XEON "ON" CACHE BOOL "Xeon")\nset(CMAKE_CXX_STANDARD 17)', {"xeon"}),
        ("set(\n  USE_OPT_EINSUM\n  ON\n)", {"opt_einsum"}),
        ("\ufeffset(USE_CPU ON)\r\nset(USE_MKL ON)\r\n", {"cpu", "mkl"}),
    ],
)
def test_s000_23_as_cmake_would_read_it(file: File, text: str, on: set[str]) -> None:
    """In any case, with spaces, comments and CMake's other words; the last word counts."""
    assert load_backend_config(file(text)).enabled == on


@pytest.mark.quick
@pytest.mark.parametrize("flag", FLAGS)
def test_s000_24_a_macro_for_each(file: File, flag: str) -> None:
    """Each flag that is on gives the macro of the design, in the order of its table; a file that
    switches everything off is the design's error."""
    assert get_backend_macros(file(f"set({flag} ON)")) == [
        (f"YIRAGE_BACKEND_{flag.removeprefix('USE_')}_ENABLED", None)
    ]
    assert [name for name, _ in get_backend_macros(str(file(SAMPLE)))] == [
        f"YIRAGE_BACKEND_{name}_ENABLED" for name in ("CUDA", "CPU", "OPENMP", "TRITON")
    ]
    for text in ("", "set(USE_FORMAL_VERIFIER OFF)", SAMPLE.replace("ON)", "OFF)")):
        with pytest.raises(
            ValueError, match=r"^At least one backend must be enabled in config.cmake"
        ):
            get_backend_macros(file(text))


@pytest.mark.quick
def test_s000_23_mistakes_are_told(file: File, tmp_path: Path) -> None:
    """A flag that there is not, a word that is none, a file that cannot be read: each is named."""
    with pytest.warns(UnifiedWarning, match=r"config.cmake:2: USE_MLK .*Did you mean USE_MKL"):
        load_backend_config(file("set(USE_CPU ON)\nset(USE_MLK ON)"))
    with pytest.warns(UnifiedWarning, match="USE_FORMAL_VERIFIER asks for a C"):
        load_backend_config(file("set(USE_CPU ON) set(USE_FORMAL_VERIFIER ON)"))
    with pytest.raises(SettingError, match=r"config.cmake:1: USE_CPU is 'MAYBE'; give one of ON"):
        load_backend_config(file("set(USE_CPU MAYBE)"))
    with pytest.raises(SettingError, match="USE_CPU is ''"):
        load_backend_config(file("set(USE_CPU)"))
    for path in (tmp_path, tmp_path / "none.cmake"):
        with pytest.raises(SettingError, match=f"{path.name} cannot be read"):
            load_backend_config(path)
    for value in (None, 7, True, ""):
        with pytest.raises(SettingError, match="give the path"):
            load_backend_config(value)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"none.cmake \(from options=\) cannot be read"):
        resolve(None, {"config": "none.cmake"})


@pytest.mark.quick
def test_s000_33_old_names(file: File) -> None:
    """An old configuration is valid, with the old name of its macro under a DeprecationWarning; the
    default is CUDA where it is here."""
    with pytest.warns(
        DeprecationWarning, match="YIRAGE_BACKEND_USE_CUDA is the old name of USE_CUDA"
    ):
        macros = get_backend_macros(file("set(YIRAGE_BACKEND_USE_CUDA ON)"))
    assert macros == [("YIRAGE_BACKEND_CUDA_ENABLED", None)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_backend_macros(file("set(USE_CUDA ON)")) == macros


@pytest.mark.quick
def test_s000_23_a_file_that_changed_is_read_again(file: File) -> None:
    path = file("set(USE_CPU ON)")
    assert load_backend_config(path).enabled == {"cpu"}
    path.write_text("set(USE_CPU ON) set(USE_MKL ON)")
    assert load_backend_config(path).enabled == {"cpu", "mkl"}


# --- effect ---------------------------------------------------------------------------------------


def test_s000_23_s001_13_what_is_off_is_not_listed(in_force: File) -> None:
    """A provider that the file leaves off is not listed and says where it was switched off; a
    provider is available where it is enabled and its probe says yes."""
    path = in_force("set(USE_CPU ON)\nset(USE_MKLDNN ON)\nset(USE_CUDNN ON)")
    assert set(kernel_dispatch.get_available_backends()) <= {"cpu", "mkldnn"}
    info = kernel_dispatch.get_backend_info("triton")
    assert not info["enabled"]
    assert not info["available"]
    assert info["reason"] == f"triton is off in {path} (USE_TRITON)"
    cudnn = kernel_dispatch.get_backend_info("cudnn")
    assert cudnn["enabled"]
    assert f"cuda is off in {path} (USE_CUDA)" in cudnn["reason"]
    with pytest.raises(BackendNotAvailableError, match="USE_OPENMP"):
        kernel_dispatch.set_default_backend("openmp")


def test_s000_23_it_reaches_the_plan(in_force: File) -> None:
    """Providers that are off compute nothing, and the report names the file."""
    path = in_force("set(USE_CPU ON)\nset(USE_OPENMP ON)")
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()
    compiled = torch.compile(model, backend="unified", options={"level": "O1"})
    with torch.no_grad():
        compiled(torch.randn(64, 256))
    (graph,) = kernel_dispatch.report(compiled)
    assert graph.regions == []
    texts = [r.text for no in graph.plan.rejected for r in no.reasons]
    assert f"mkldnn is off in {path} (USE_MKLDNN)" in texts
    shown = json.loads(kernel_dispatch.report(compiled).json())["graphs"][0]["settings"]["config"]
    assert shown == {
        "value": {"file": str(path), "on": ["cpu", "openmp"]},
        "source": "UNIFIED_CONFIG",
    }


def test_s000_23_a_target_that_is_off_takes_no_graph(file: File) -> None:
    """Without USE_CPU the graph runs op by op; a device that is forced and off is an error."""
    path = file("set(USE_CUDA ON)")
    compiled = torch.compile(
        lambda x: x.sin() + 1, backend="unified", options={"level": "O1", "config": path}
    )
    torch.testing.assert_close(compiled(torch.zeros(3)), torch.ones(3))
    (graph,) = kernel_dispatch.report(compiled)
    assert graph.provider == "eager"
    reasons = {(r.code, r.text) for no in graph.plan.rejected for r in no.reasons}
    assert ("provider-disabled", f"cpu is off in {path} (USE_CPU)") in reasons
    forced = torch.compile(
        lambda x: x + 1, backend="unified", options={"device": "cpu", "config": path}
    )
    with pytest.raises(BackendNotAvailableError, match="USE_CPU"):
        forced(torch.zeros(3))


def test_s000_23_doctor_shows_it(
    in_force: File, capsys: pytest.CaptureFixture[str], kernels_of_earlier_runs: Path
) -> None:
    path = in_force("set(USE_CPU ON)\nset(USE_OPENMP ON)")
    cli.main(["doctor", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    told = {(row["section"], row["name"]): row["text"] for row in rows}
    assert told["Settings", "config"] == f"file: {path}; on: cpu, openmp (from UNIFIED_CONFIG)"
    assert f"off in {path} (USE_MKL)" in told["Providers", "mkl"]
    assert f"mps is off in {path}" in told["Targets", "mps"]
    os.environ["UNIFIED_CONFIG"] = str(path) + ".gone"
    cli.main(["doctor", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    (row,) = [row for row in rows if (row["section"], row["name"]) == ("Settings", "config")]
    assert row["status"] == "problem"
    assert "cannot be read" in row["text"]
