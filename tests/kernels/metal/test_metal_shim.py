"""The Metal that runs on the CPU: it computes what Metal does, and refuses what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import metal_shim
from tests.support.metal_shim import ShaderError, compile_shader

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
PLACES = """
    uint at [[thread_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]])
"""


def shader(body: str) -> Any:
    """A kernel `run` with one output and the usual questions about its place."""
    return compile_shader(
        f"{HEAD}kernel void run(device float* out [[buffer(0)]],{PLACES}{{{body}}}"
    )


def test_the_functions_of_a_simdgroup() -> None:
    out = torch.zeros(40)
    shader("out[at] = simd_sum(float(at));").run(out, threads=40, group_size=40)
    assert out[:32].eq(sum(range(32))).all()
    assert out[32:].eq(sum(range(32, 40))).all()  # the last one has eight threads
    shader("out[at] = simd_max(at == 35 ? 9.0f : 1.0f);").run(out, threads=40, group_size=40)
    assert out.tolist() == [1.0] * 32 + [9.0] * 8
    out = torch.zeros(32)
    shader("out[at] = simd_shuffle_xor(float(at), 3);").run(out, threads=32, group_size=32)
    assert out.tolist() == [float(i ^ 3) for i in range(32)]


def test_places_in_a_grid_whose_sizes_do_not_divide() -> None:
    library = compile_shader(
        f"""{HEAD}
kernel void run(
    device float* out [[buffer(0)]],
    constant long& width [[buffer(1)]],
    uint3 at [[thread_position_in_grid]],
    uint3 inside [[thread_position_in_threadgroup]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 size [[threads_per_threadgroup]])
{{
    uint place = 1000 * group.x + 100 * group.y + 10 * inside.x + inside.y;
    out[at.z * 15 + at.y * width + at.x] = float(100000 * size.x + 10000 * size.y + place);
}}"""
    )
    out = torch.zeros(2, 3, 5)
    library.run(out, 5, threads=[5, 3, 2], group_size=[4, 2, 1])
    assert out[0, 0, 0] == 420000
    assert out[0, 1, 3] == 420000 + 31
    assert out[1, 2, 4] == 110000 + 1100  # the corner that is left: one thread
    assert not out.isnan().any()


@pytest.mark.parametrize("order", metal_shim.ORDERS)
def test_a_barrier_makes_threadgroup_memory_common(order: str) -> None:
    body = """
    threadgroup float held[64];
    held[thread_index] = float(at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[at] = held[63 - thread_index];
    """
    out = torch.zeros(128)
    with metal_shim.threads_run(order):
        shader(body).run(out, threads=128, group_size=64)
    assert out.tolist() == [*range(63, -1, -1), *range(127, 63, -1)]


WRONG = {
    "race: a thread reads|never written": """
        threadgroup float held[64];
        held[thread_index] = 1.0f;
        out[at] = held[0];""",
    "race: two threads write": "threadgroup float held[1]; held[0] = float(lane); out[at] = 0.0f;",
    "race: a thread (writes|reads) what another": """
        threadgroup float held[1];
        if (thread_index == 0) { held[0] = 1.0f; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[at] = held[0];
        if (thread_index == 1) { held[0] = 2.0f; }""",
    "never written": "threadgroup float held[64]; out[at] = held[thread_index];",
    "threadgroup memory, which has 4": "threadgroup float held[4]; held[lane + 4] = 0.0f;",
    "same barrier": """
        if (simdgroup == 0) { threadgroup_barrier(mem_flags::mem_threadgroup); }
        out[at] = 0.0f;""",
    "same function": "out[at] = lane < 5 ? simd_sum(1.0f) : 0.0f;",
    "behind its storage": "out[at + 1] = 0.0f;",
    "before its storage": "out[long(at) - 1] = 0.0f;",
    "not there": "out[at] = simd_shuffle_xor(1.0f, 64);",
}


@pytest.mark.parametrize("order", metal_shim.ORDERS)
@pytest.mark.parametrize("told", WRONG)
def test_what_no_shader_may_do_is_an_error(told: str, order: str) -> None:
    with metal_shim.threads_run(order), pytest.raises(ShaderError, match=told):
        shader(WRONG[told]).run(torch.zeros(64), threads=64, group_size=64)


def test_memory_of_one_threadgroup_is_not_that_of_the_next() -> None:
    body = """
    threadgroup float held[32];
    if (at < 32) { held[thread_index] = 1.0f; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[at] = held[31 - thread_index];
    """
    with pytest.raises(ShaderError, match="never written"):
        shader(body).run(torch.zeros(64), threads=64, group_size=32)


def test_what_a_kernel_does_not_write_shows() -> None:
    out = torch.zeros(4)
    shader("if (at != 2) { out[at] = 1.0f; }").run(out, threads=4, group_size=4)
    assert out.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("bfloat", torch.bfloat16)])
def test_narrow_numbers_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    library = compile_shader(
        f"""{HEAD}kernel void run(
    device const float* x [[buffer(0)]], device {name}* out [[buffer(1)]],
    uint at [[thread_position_in_grid]]) {{ out[at] = {name}(x[at]); }}"""
    )
    exact = torch.arange(-500, 500, dtype=dtype).float() * 2.0**-4
    x = torch.cat((torch.randn(5000) * 100, exact, (exact[1:] + exact[:-1]) / 2))
    x = torch.cat((x, torch.tensor([float("inf"), float("-inf"), 1e30, 1e-40, -0.0])))
    out = torch.zeros(len(x), dtype=dtype)
    library.run(x, out, threads=len(x), group_size=64)
    assert torch.equal(out, x.to(dtype))


# --- the calling convention -----------------------------------------------------------------------


def a_kernel() -> Any:
    return compile_shader(
        f"""{HEAD}kernel void run(
    device const half* x [[buffer(0)]], device float* out [[buffer(1)]],
    constant long& count [[buffer(2)]], constant float& factor [[buffer(3)]],
    constant long* strides [[buffer(4)]], uint at [[thread_position_in_grid]])
{{ out[at] = factor * float(x[at * strides[1]]) + float(count); }}"""
    )


def good() -> tuple[Any, ...]:
    return torch.ones(8).half(), torch.zeros(4), 3, 0.5, (9, 2)


def test_arguments_go_as_torch_passes_them() -> None:
    x, out, *rest = good()
    x[6] = 5
    a_kernel().run(x, out, *rest, threads=4)
    assert out.tolist() == [3.5, 3.5, 3.5, 5.5]
    a_kernel().run(x[2:], out, *rest, threads=(3,), group_size=(2,))  # begins at the view
    assert out[:3].tolist() == [3.5, 3.5, 5.5]
    assert dir(a_kernel()) == ["run"]


BAD: dict[str, Callable[[], Any]] = {
    "Unsupported argument type": lambda: a_kernel().run(*good()[:2], None, 0.5, (9, 2), threads=4),
    "Empty list": lambda: a_kernel().run(*good()[:4], (), threads=4),
    "has 5 buffers, not 4": lambda: a_kernel().run(*good()[:4], threads=4),
    "read as long, and torch passes 3.0": lambda: a_kernel().run(
        *good()[:2], 3.0, 0.5, (9, 2), threads=4
    ),
    "read as float, and torch passes 1": lambda: a_kernel().run(
        *good()[:2], 3, 1, (9, 2), threads=4
    ),
    "not as torch.float32": lambda: a_kernel().run(torch.ones(8), *good()[1:], threads=4),
    "is a buffer, not": lambda: a_kernel().run(3, *good()[1:], threads=4),
    "is a value, not a tensor": lambda: a_kernel().run(
        *good()[:2], torch.ones(1), 0.5, (9, 2), threads=4
    ),
    "behind its storage": lambda: a_kernel().run(*good()[:4], (9,), threads=4),
    "positive": lambda: a_kernel().run(*good(), threads=0),
    "one to three": lambda: a_kernel().run(*good(), threads=[4, 1], group_size=[4]),
    "exceeds 1024": lambda: a_kernel().run(*good(), threads=4, group_size=2048),
    "Failed to create function": lambda: a_kernel().walk(*good(), threads=4),
    "does not compile": lambda: shader("nonsense;"),
    "no double": lambda: compile_shader(f"{HEAD}static double x;"),
    "without an attribute": lambda: compile_shader(f"{HEAD}kernel void run(long x) {{}}"),
    "of one type": lambda: compile_shader(
        f"{HEAD}kernel void run(uint a [[thread_position_in_grid]], "
        "uint2 b [[threads_per_threadgroup]]) {}"
    ),
}


@pytest.mark.parametrize("told", BAD)
def test_what_metal_refuses_or_would_misread(told: str) -> None:
    with pytest.raises((ShaderError, RuntimeError, ValueError, SyntaxError), match=told):
        BAD[told]()


def test_a_language_newer_than_metals_is_refused() -> None:
    with pytest.raises(SyntaxError, match="if constexpr"):
        shader("if constexpr (sizeof(float) == 4) { out[at] = 0.0f; }")
