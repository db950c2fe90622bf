"""What all kernels stand on: architectures, choices of configurations, launches, operators."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from triton_kernels import architectures, launching, tuning
from triton_kernels.architectures import KNOWN, SHIPPED
from triton_kernels.configurations import Config, power_of_two
from triton_kernels.errors import KernelArgumentError, UnknownArchitectureError, demand

pytestmark = pytest.mark.quick

FIRST, SECOND = Config({"BLOCK": 64}, warps=2), Config({"BLOCK": 128}, warps=4)
H100 = architectures.named("sm90")


@pytest.fixture(autouse=True)
def nothing_stored() -> None:
    tuning.keep_in(None)


# --- architectures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "name", "found"),
    [
        ("cuda", "sm90", "sm90"),
        ("cuda", "sm87", "sm86"),
        ("cuda", "sm103", "sm100"),
        ("cuda", "sm75", "sm80"),
        ("hip", "gfx942", "gfx942"),
        ("hip", "gfx908", "gfx90a"),
    ],
)
def test_a_gpu_that_is_not_in_the_table_is_taken_for_its_next_older_kin(
    backend: str, name: str, found: str
) -> None:
    assert architectures.nearest(backend, name).name == found


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(UnknownArchitectureError, match="Did you mean 'gfx942'"):
        architectures.named("gfx941")


def test_every_record_is_whole() -> None:
    assert set(SHIPPED) <= {one.name for one in KNOWN}
    for one in KNOWN:
        assert one.lanes in (32, 64)
        assert one.shared_bytes <= one.shared_bytes_per_unit
        assert one.flops_per_second["bfloat16"] > one.flops_per_second["float32"] > 0
        assert set(one.fp8) <= set(one.flops_per_second)
        assert one.matrix_instruction


def test_an_architecture_is_assumed_by_one_thread_only() -> None:
    seen = []
    with architectures.assume(architectures.named("gfx942")):
        assert architectures.of(torch.device("cpu")).name == "gfx942"
        thread = threading.Thread(target=lambda: seen.append(architectures.is_assumed()))
        thread.start()
        thread.join()
    assert seen == [False]
    assert not architectures.is_assumed()


# --- configurations and tuning --------------------------------------------------------------------


def test_options_of_amd_are_for_amd_only() -> None:
    config = Config({"BLOCK": 64}, warps=8, stages=1, waves_per_eu=2, matrix_instr_nonkdim=16)
    assert config.options(H100) == {"num_warps": 8, "num_stages": 1}
    amd = config.options(architectures.named("gfx942"))
    assert amd == {"num_warps": 8, "num_stages": 1, "waves_per_eu": 2, "matrix_instr_nonkdim": 16}
    assert "waves_per_eu=2" in str(config)


@pytest.mark.parametrize(
    ("size", "limits", "found"), [(0, {}, 1), (1, {}, 1), (5, {}, 8), (64, {}, 64),
                                  (5, {"at_least": 16}, 16), (500, {"at_most": 128}, 128)],
)  # fmt: skip
def test_powers_of_two(size: int, limits: dict[str, int], found: int) -> None:
    assert power_of_two(size, **limits) == found


def choose(*problem: object) -> Config:
    return tuning.choose("kernel", H100, problem, (FIRST, SECOND))


def test_the_first_candidate_is_taken_until_one_was_measured(tmp_path: Path) -> None:
    tuning.keep_in(tmp_path)
    assert choose(1024) is FIRST
    times = iter([3.0, 1.0])
    chosen = tuning.tune(lambda: choose(1024), H100, lambda run: (run(), next(times))[1])
    assert list(chosen) == ["kernel 1024"]
    assert choose(1024) is SECOND
    assert choose(2048) is FIRST
    tuning.keep_in(None)
    tuning.keep_in(tmp_path)  # as another process would find it
    assert choose(1024) is SECOND


def test_what_cannot_run_is_no_candidate(tmp_path: Path) -> None:
    tuning.keep_in(tmp_path)

    def too_large(run: object) -> float:
        if choose(1) is FIRST:
            raise RuntimeError("out of shared memory")
        return 9.0

    tuning.tune(lambda: choose(1), H100, too_large)
    assert choose(1) is SECOND


def test_nothing_to_choose_and_nothing_that_runs_store_nothing(tmp_path: Path) -> None:
    tuning.keep_in(tmp_path)
    assert tuning.tune(lambda: None, H100, lambda run: 1.0) == {}

    def broken(run: object) -> float:
        raise RuntimeError("no GPU")

    assert tuning.tune(lambda: choose(1), H100, broken) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"kernel 1": "a config of another version"}'])
def test_a_damaged_or_outdated_store_is_no_choice(tmp_path: Path, text: str) -> None:
    (tmp_path / "triton_sm90.json").write_text(text)
    tuning.keep_in(tmp_path)
    assert choose(1) is FIRST


# --- launches -------------------------------------------------------------------------------------


def kernel() -> None:
    """Never run: launches are recorded here."""


def test_launches_are_recorded_instead_of_run() -> None:
    with launching.recorded() as outer:
        launching.launch(kernel, (4, 2), FIRST, x=1)
        with launching.recorded() as inner:
            launching.launch(kernel, (1,), SECOND)
        launching.launch(kernel, (0, 8), FIRST)
    assert [(one.name, one.grid, one.config) for one in outer] == [("kernel", (4, 2), FIRST)]
    assert [one.config for one in inner] == [SECOND]


def test_a_broken_demand_says_so() -> None:
    demand(True, "not evaluated")
    with pytest.raises(KernelArgumentError, match="dim is 7"):
        demand(False, lambda: f"dim is {7}")
