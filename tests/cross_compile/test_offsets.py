"""No kernel multiplies a place by a stride in 32 bits: past 2^31 elements that reads other memory.

What the compiler's own intermediate code says is followed from the program's number, ranges and
loops to the addresses.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import triton_kernels
from tests.support.triton_calls import CALLS
from triton_kernels import architectures, cross_compiling
from triton_kernels.launching import Launch
from triton_kernels.registration import OnPaper

_VALUE = re.compile(r"%[\w$.#]+")


def launches_of(name: str) -> list[Launch]:
    """Forward and backward, for an H100."""
    inputs = pytree.tree_map(_on_meta, CALLS[name](6))
    if name not in _FOR_INFERENCE:
        _first_floats(inputs).requires_grad_()
    with architectures.assume(architectures.named("sm90")), OnPaper() as paper:
        outputs = getattr(triton_kernels, name)(*inputs)
        for out in pytree.tree_leaves(outputs):
            if isinstance(out, torch.Tensor) and out.requires_grad:
                out.backward(torch.empty_like(out), retain_graph=True)
    return paper.launches


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _first_floats(inputs: Any) -> torch.Tensor:
    leaves = pytree.tree_leaves(inputs)
    return next(x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point())


_FOR_INFERENCE = (
    "decode_attention paged_decode_attention int8_weight_matmul scaled_matmul quantise_rows "
    "quantise_weight rms_norm_quantised".split()
)


def narrow_places(ir: str, within_tiles: bool = False) -> list[str]:
    """Lines that multiply a place (of a program, a range or a loop) by an argument in 32 bits, and
    whose result goes into an address. `within_tiles`: what is within a tile may be narrow."""
    places, arguments, suspects = set(), set(), {}
    bad = []
    for line in ir.splitlines():
        made, _, how = line.partition(" = ")
        result = (_VALUE.findall(made) or [""])[-1] if how else ""
        used = _VALUE.findall(how or line)
        if "tt.func" in line:
            arguments |= {
                name for name, kind in re.findall(r"(%\w+): (\w+)", line) if kind == "i32"
            }
        elif "scf.for" in line:
            places |= set(_VALUE.findall(line)[:2])
        elif "get_program_id" in how or ("make_range" in how and not within_tiles):
            places.add(result)
        elif "arith.constant" in how:
            continue
        elif "tt.addptr" in how:
            bad += [suspects[name] for name in used if name in suspects]
        elif "arith.muli" in how and "i32" in how.rpartition(":")[2]:
            mixed = any(n in places for n in used) and any(n in arguments for n in used)
            if mixed:
                suspects[result] = line.strip()
            places |= {result} if any(n in places for n in used) else set()
        else:
            places |= {result} if any(n in places for n in used) else set()
            if any(word in how for word in ("tt.splat", "tt.broadcast", "tt.expand_dims")):
                arguments |= {result} if any(n in arguments for n in used) else set()
            for name in used:
                if name in suspects and result:
                    suspects[result] = suspects[name]
    return bad


@pytest.mark.parametrize("name", CALLS)
def test_offsets_are_wide(name: str) -> None:
    launches = launches_of(name)
    assert launches
    for launch in launches:
        ir = cross_compiling.compile(launch, architectures.named("sm90")).ir
        # FAR is what a launcher says where a tile's own offsets do not fit into 32 bits.
        assert not narrow_places(ir, within_tiles="FAR" in launch.arguments), launch.name


def test_the_check_sees_a_narrow_offset() -> None:
    ir = """
  tt.func public @k(%x_ptr: !tt.ptr<f32>, %stride: i32) {
    %pid = tt.get_program_id x : i32
    %at = arith.muli %pid, %stride : i32
    %p = tt.addptr %x_ptr, %at : !tt.ptr<f32>, i32
    %wide = arith.extsi %pid : i32 to i64
    %s = arith.extsi %stride : i32 to i64
    %far = arith.muli %wide, %s : i64
    %q = tt.addptr %x_ptr, %far : !tt.ptr<f32>, i64
"""
    assert len(narrow_places(ir)) == 1
