"""What the compiler was asked once is not asked in the next process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="others are asked nothing, or one thing"
)

# Instead of the compiler, a list of what it was asked.
ASK = """
import sys
from pathlib import Path
from torch._inductor import config, cpu_vec_isa
from lowering import instruction_sets

asked = []
cpu_vec_isa.VecISA.check_build = lambda self, code: asked.append(str(self)) or {answer}
config.cpp.vec_isa_ok = None
instruction_sets.ask(Path(sys.argv[1]))
valid = cpu_vec_isa.valid_vec_isa_list()
bool(valid and valid[-1])
print(len(asked), [str(one) for one in valid])
"""


def ask(folder: Path, answer: bool = True) -> tuple[int, str]:
    """How many questions a new process asks, and what is valid there."""
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(answer=answer), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    asked, _, valid = done.stdout.strip().partition(" ")
    return int(asked), valid


def test_asked_once(tmp_path: Path) -> None:
    first, valid = ask(tmp_path)
    assert first > 0
    assert ask(tmp_path) == (0, valid)
    (file,) = tmp_path.iterdir()
    for damaged in ("", "{", '["a', "7"):
        file.write_text(damaged)
        assert ask(tmp_path) == (first, valid)


def test_what_was_refused_is_asked_again(tmp_path: Path) -> None:
    first, valid = ask(tmp_path, answer=False)
    assert first > 0
    assert valid == "[]"
    assert not list(tmp_path.iterdir())
    assert ask(tmp_path, answer=False) == (first, valid)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    first, valid = ask(tmp_path / "none")
    assert ask(tmp_path / "none") == (first, valid)
