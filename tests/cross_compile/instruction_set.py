"""Builds our C++ kernels for an x86 instruction set below this machine's, and tests those; run by
test_instruction_sets.py. A process of its own, since a library is loaded once."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lowering.native import building, library


def build(march: str, folder: Path) -> Path:
    """With torch's command line, but for -march and what follows from this machine's CPU."""
    target = folder / f"kernels_{march}.so"
    command = building.options_text().replace("-march=native", f"-march={march}")
    command = re.sub(r"-m(avx|fma|f16c|amx)\S*|-D CPU_CAPABILITY_\w+", "", command)
    command = command.replace("-o kernels.so", f"-o {shlex.quote(str(target))}")
    subprocess.run(shlex.split(command), check=True)
    return target


def main(march: str, folder: str, *kernels: str) -> int:
    built = build(march, Path(folder))
    library.built = lambda: built
    tests = Path(__file__).parent.parent / "kernels"
    files = [str(tests / f"test_{name}_kernel.py") for name in kernels]
    return int(pytest.main(["-q", "-m", "not proof", "-k", "not lowered", *files]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
