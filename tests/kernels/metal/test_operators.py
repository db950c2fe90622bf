"""The operators around the shaders: layouts, and that no result is believed unseen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from lowering import observing
from lowering.metal import (
    decode_attention,
    int8_matmul,
    registration,
    rms_norm,
    rope,
    shaders,
)
from lowering.reasons import Reason
from tests.kernels.metal.checking import Tensor, drawn
from tests.support import metal_shim

FAMILIES = {
    one.__name__.rpartition(".")[2]: one for one in (rms_norm, rope, decode_attention, int8_matmul)
}


class Heard:
    """What a graph's report would be told."""

    tolerance = 1e-2
    keeps_memory = False

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []
        self.demoted: list[tuple[str, str, Reason]] = []

    def region_ran(self, region: str, provider: str, times: int = 1) -> None:
        self.ran += [(region, provider)] * times

    def kernels_ran(self, ran: int) -> None:
        raise AssertionError("a kernel of the CPU's library ran")

    def region_demoted(self, region: str, provider: str, reason: Reason) -> None:
        self.demoted.append((region, provider, reason))


def heard(run: Any, *args: Any) -> tuple[Any, Heard]:
    listener = Heard()
    return observing.listened(listener, run, args), listener


def inputs(family: str, dtype: torch.dtype = torch.float32) -> Sequence[Any]:
    turned = drawn(2, 3, 4, 8, dtype=dtype).transpose(1, 2)
    return {
        "rms_norm": (drawn(3, 5, 8).transpose(0, 1).to(dtype), None, drawn(8, dtype=dtype), 1e-6),
        "rope": (
            turned,
            turned[:, :2],
            *(drawn(2, 3, 8, dtype=dtype, seed=s) for s in (1, 2)),
            True,
        ),
        "decode_attention": (
            turned[:, :, :1],
            *(drawn(2, 2, 9, 8, dtype=dtype, seed=s) for s in (1, 2)),
            torch.ones(1, 1, 1, 9, dtype=torch.bool),
            0.3,
        ),
        "int8_matmul": (
            drawn(2, 3, 16, dtype=dtype),
            torch.ones(5, 16, dtype=torch.int8),
            drawn(5).abs(),
            None,
        ),
    }[family]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_operator_is_one_to_torch(family: str, dtype: torch.dtype) -> None:
    torch.library.opcheck(FAMILIES[family].OPERATOR, inputs(family, dtype))
    assert family in metal_shim.launched


@pytest.mark.parametrize("family", FAMILIES)
def test_off_the_gpu_the_meaning_is_computed_and_nothing_is_told(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shaders, "_injected", [])
    module, given = FAMILIES[family], inputs(family)
    found, listener = heard(module.OPERATOR, *given)
    assert not metal_shim.launched
    assert not listener.ran
    for got, right in zip(_leaves(found), _leaves(module.meaning(*given)), strict=True):
        assert torch.equal(got, right)


def test_the_first_results_of_a_size_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    meaning = registration._difference
    monkeypatch.setattr(registration, "_difference", lambda *a: compared.append(1) or meaning(*a))
    for columns in (40, 41, 63, 64, 65, 40):
        heard(rms_norm.OPERATOR, drawn(2, columns), None, None, 1e-6)
    assert len(compared) == 2  # up to 63, and from 64 on
    heard(rms_norm.OPERATOR, drawn(2, 40).half(), None, None, 1e-6)
    assert len(compared) == 3
    assert len(metal_shim.launched) == 7


@pytest.fixture
def wrong_shaders() -> Iterator[None]:
    def compile_wrong(text: str) -> Any:
        return metal_shim.compile_shader(text.replace("+ eps", "+ 2.0f * eps + 0.1f"))

    with shaders.compiled_by(compile_wrong):
        yield


@pytest.mark.usefixtures("wrong_shaders")
def test_a_wrong_kernel_is_found_out_and_its_results_never_seen() -> None:
    given = (drawn(2, 40), None, None, 1e-6)
    right = rms_norm.meaning(*given)[0]
    (found, _), listener = heard(rms_norm.OPERATOR, *given)
    assert torch.equal(found, right)
    assert not listener.ran
    ((region, provider, reason),) = listener.demoted
    assert (region, provider, reason.code) == ("norm", "metal", "refused-at-run")
    assert "off by" in reason.text
    (found, _), listener = heard(rms_norm.OPERATOR, drawn(2, 400), None, None, 1e-6)
    assert torch.equal(found, rms_norm.meaning(drawn(2, 400), None, None, 1e-6)[0])
    assert not listener.demoted  # told once
    assert metal_shim.launched == ["rms_norm"]


def test_a_kernel_that_does_not_compile_is_told_and_done_without() -> None:
    def refuse(text: str) -> Any:
        raise SyntaxError("program_source:1:1: error: unknown type name 'kernel'")

    given = (drawn(2, 40), None, None, 1e-6)
    with shaders.compiled_by(refuse):
        (found, _), listener = heard(rms_norm.OPERATOR, *given)
    assert torch.equal(found, rms_norm.meaning(*given)[0])
    ((_, _, reason),) = listener.demoted
    assert "unknown type name" in reason.text


def test_empty_tensors_launch_nothing() -> None:
    assert rms_norm.OPERATOR(drawn(0, 8), None, None, 1e-6)[0].shape == (0, 8)
    nothing = decode_attention.OPERATOR(drawn(1, 2, 1, 8), *[drawn(1, 2, 0, 8)] * 2, None, 0.3)
    assert nothing.shape == (1, 2, 1, 8)
    assert not nothing.any()
    weight = torch.ones(5, 16, dtype=torch.int8)
    assert int8_matmul.OPERATOR(drawn(0, 16), weight, drawn(5), None).shape == (0, 5)
    assert rope.OPERATOR(drawn(1, 2, 0, 8), drawn(1, 1, 0, 8), *[drawn(1, 0, 8)] * 2, False)
    assert not metal_shim.launched


def test_every_shader_is_held_to_what_the_device_has() -> None:
    """Threads of a threadgroup, and buffers of a kernel."""
    from tests.support.metal_shim.translate import signatures

    for family in FAMILIES:
        for one in signatures(shaders.source(family)).values():
            assert one.most_threads <= 512
            assert len(one.given) <= 31


def _leaves(results: Any) -> Sequence[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)
