"""openmp_random, called directly: the published generator, the distributions, nothing shared."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.regions import kernels

Tensor = torch.Tensor
MANY = 1 << 20
# What Philox4x32-10 gives for counter 0 under key 0 (Salmon et al., 2011: known answers).
FIRST = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
LANES = 16


def drawn(count: int, seed: int = 1, normal: bool = False) -> Tensor:
    return kernels().openmp_random([count], torch.tensor(seed), normal)


def test_the_published_numbers() -> None:
    assert drawn(4 * LANES, 0)[::LANES].tolist() == [(word >> 8) / 2**24 for word in FIRST]


def test_the_upper_half_of_a_seed_counts() -> None:
    assert not drawn(64, 5).equal(drawn(64, 5 + (1 << 32)))
    assert drawn(64, -3).equal(drawn(64, -3))


@pytest.mark.parametrize("normal", [False, True])
def test_a_number_depends_on_seed_and_place_alone(normal: bool) -> None:
    before = torch.get_num_threads()
    found = drawn(MANY, 7, normal)
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            assert drawn(MANY, 7, normal).equal(found)
    finally:
        torch.set_num_threads(before)
    for count in (1, 15, 16, 63, 64, 65, 4095, 4097, 20001):
        assert drawn(count, 7, normal).equal(found[:count])
    assert kernels().openmp_random([4, 5, 6], torch.tensor(7), normal).view(-1).equal(found[:120])
    assert drawn(0, 7, normal).shape == (0,)


def test_uniform_numbers() -> None:
    found = drawn(MANY).double()
    assert 0 <= found.min() < 1e-5
    assert 1 - 1e-5 < found.max() < 1
    _assert_distribution(found, lambda x: x)


def test_normal_numbers() -> None:
    found = drawn(MANY, normal=True).double()
    _assert_distribution(found, lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2))))
    for power, expected in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        spread = 5 * math.sqrt({1: 1, 2: 2, 3: 15, 4: 96}[power] / MANY)  # five deviations
        assert abs(found.pow(power).mean() - expected) < spread, power


@pytest.mark.parametrize("normal", [False, True])
def test_neighbours_have_nothing_in_common(normal: bool) -> None:
    found = drawn(MANY, normal=normal).double()
    for apart in (1, 2, 3, LANES, 2 * LANES, 3 * LANES, 4 * LANES, 64 * 64):
        pair = torch.stack([found[:-apart], found[apart:]])
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / math.sqrt(MANY), apart
    other = drawn(MANY, 2, normal).double()
    assert abs(torch.corrcoef(torch.stack([found, other]))[0, 1]) < 5 / math.sqrt(MANY)


def _assert_distribution(found: Tensor, below: object) -> None:
    """Kolmogorov's distance; one in a million samples is as far off as allowed."""
    expected = below(found.sort().values)  # type: ignore[operator]
    steps = torch.arange(1, MANY + 1, dtype=torch.float64) / MANY
    assert (expected - steps).abs().max() < 2.7 / math.sqrt(MANY)
