"""The C++ kernels on CPUs without AVX-512, AVX or AMX: built for those, run here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowering import machine, toolchain

pytestmark = pytest.mark.proof


# march, what it needs of this CPU, which kernels: the generic code takes ten times as long.
BYTES = ("int8_linear", "quantized_layers")
LAYERS = ("linear", "grouped_linear", "embedding_bags", *BYTES)
HALVES = ("half_linear", "half_convolution", "grouped_linear", *BYTES)
SETS = {
    "AVX2": ("haswell", "avx2", (*LAYERS, "convolution", "winograd", "attention")),
    "no AVX": ("x86-64-v2", "sse4_1", (*LAYERS, "winograd")),
    "no AMX": ("cooperlake", "avx512_bf16", HALVES),
    "no VNNI": ("skylake-avx512", "avx512bw", BYTES),
}


@pytest.mark.parametrize("name", SETS)
def test_kernels_of_an_older_instruction_set(name: str, tmp_path: Path) -> None:
    march, needs, kernels = SETS[name]
    if needs not in machine.cpu().isa or not toolchain.probe().available:
        pytest.skip(f"needs an x86 CPU with {needs} and a compiler")
    script = "tests.cross_compile.instruction_set"
    command = [sys.executable, "-m", script, march, str(tmp_path), *kernels]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed > 25 * len(kernels), done.stdout
