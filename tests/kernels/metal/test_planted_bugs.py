"""A suite that stays green over a bug is no proof: every bug planted here has to turn it red."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lowering.metal import shaders
from tests.kernels.metal import (
    test_decode_attention,
    test_int8_matmul,
    test_rms_norm,
    test_rope,
)
from tests.kernels.metal.checking import drawn
from tests.support import metal_shim
from tests.support.metal_shim import ShaderError


@dataclass(frozen=True)
class Bug:
    family: str
    what: str
    right: str
    wrong: str
    count: int = 1  # how often `right` stands there; all of them go wrong


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BUGS = (
    Bug("rms_norm", "no barrier", BARRIER, ""),
    Bug("rms_norm", "rows of x as far apart as they are long", "row * x_stride", "row * columns"),
    Bug("rms_norm", "the mean over the threads", "float(columns) + eps", "float(threads.x) + eps"),
    Bug("rms_norm", "no eps", "float(columns) + eps", "float(columns)"),
    Bug("rms_norm", "one simdgroup of them", "lane < simdgroups ?", "lane < 1 ?"),
    Bug("rms_norm", "the sum is not rounded", "float(value) * float(value)", "1.0f"),
    Bug(
        "rms_norm",
        "the residual is forgotten",
        " + float(of_residual[column])",
        " - float(of_residual[column])",
    ),
    Bug("rope", "turned the other way", "- other * float(of_sin", "+ other * float(of_sin"),
    Bug("rope", "one cosine for both", "of_cos[second *", "of_cos[first *"),
    Bug("rope", "keys as queries", "head - query_heads", "head"),
    Bug("rope", "pairs side by side", "interleaved ? first + 1 : first + pairs", "first + 1"),
    Bug("rope", "a dense head", "second * x_strides[3]", "second"),
    Bug("rope", "the first sequence's angles", "batch * cos_strides[0] + ", ""),
    Bug("rope", "batch and token exchanged", "long(at.z) / tokens", "long(at.z) % tokens"),
    Bug("decode_attention", "no barrier", BARRIER, ""),
    Bug("decode_attention", "each head has keys of its own", "head / heads_per_key_head", "head"),
    Bug("decode_attention", "cache rows side by side", "row * key_strides[2]", "row * size"),
    Bug("decode_attention", "sums do not shrink", "held_sum[i] * shrink", "held_sum[i]"),
    Bug("decode_attention", "the total does not shrink", "total * shrink", "total"),
    Bug("decode_attention", "the last key is left out", "row < keys;", "row < keys - 1;"),
    Bug("decode_attention", "the mask hides what it shows", "!of_mask[", "of_mask["),
    Bug("decode_attention", "the mask of the first head", " + head * mask_strides[1]", ""),
    Bug("decode_attention", "nothing seen is divided", "whole == 0.0f ? 0.0f : ", ""),
    Bug("decode_attention", "infinity minus infinity", "higher == -INFINITY ? 0.0f : ", ""),
    Bug("decode_attention", "the size for the values'", "column < value_size", "column < size", 3),
    Bug("int8_matmul", "unsigned", "float(four_of_them.w)", "float(uchar(four_of_them.w))"),
    Bug("int8_matmul", "the scale of the next column", "scale[column]", "scale[column + 1]"),
    Bug("int8_matmul", "rows as far apart as they are long", "* x_stride", "* depth"),
    Bug("int8_matmul", "only the first eight rows", "long(group.y) * ROWS", "0"),
    Bug("int8_matmul", "more columns than there are", "if (column >= columns)", "if (false)"),
    Bug("int8_matmul", "no bias", "if (has_bias)", "if (false)"),
)


def _rms_norm() -> None:
    x, weight = drawn(6, 70)[::2], drawn(70, seed=1)
    test_rms_norm.holds(x, drawn(3, 70, seed=2), weight)
    test_rms_norm.holds(x * 1e-3, None, weight)


def _rope() -> None:
    cos, sin = test_rope.tables(2, 3, 12)
    query, key = drawn(2, 4, 3, 24)[..., ::2], drawn(2, 2, 3, 24, seed=1)[..., ::2]
    test_rope.holds(query, key, cos, sin)


def _decode_attention() -> None:
    query, key, value = test_decode_attention.problem(value_size=24)
    shown = drawn(2, 4, 1, 19, seed=5) > 0
    shown[0, 1] = False
    cache = torch.cat((key, key), -1)[..., :40]
    for mask in (None, shown, torch.zeros(1, 1, 1, 19).masked_fill(~shown[:1], float("-inf"))):
        test_decode_attention.holds(query, cache, value, mask, 1 / math.sqrt(40))


def _int8_matmul() -> None:
    x, bias = drawn(11, 3, 64)[:, 1], drawn(6, seed=1)
    test_int8_matmul.holds(x, *test_int8_matmul.packed(6, 64), bias)


CHECKS: dict[str, Callable[[], None]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "decode_attention": _decode_attention,
    "int8_matmul": _int8_matmul,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.family}: {bug.what}")
def test_a_planted_bug_turns_the_checks_red(bug: Bug) -> None:
    def compile_wrong(text: str) -> Any:
        assert text.count(bug.right) == bug.count, f"{text.count(bug.right)} times: {bug.right}"
        return metal_shim.compile_shader(text.replace(bug.right, bug.wrong))

    with shaders.compiled_by(compile_wrong), pytest.raises((AssertionError, ShaderError)) as red:
        CHECKS[bug.family]()
    assert "times: " not in str(red.value)


@pytest.mark.parametrize("family", CHECKS)
def test_the_checks_are_green_without_a_bug(family: str) -> None:
    """Or everything would be red for a reason of its own."""
    CHECKS[family]()
