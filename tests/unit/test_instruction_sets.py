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
import os, sys
from pathlib import Path
from torch._inductor import config, cpu_vec_isa
from lowering import instruction_sets

asked = []
cpu_vec_isa.VecISA.check_build = lambda self, code: asked.append(str(self)) or {answer}
config.cpp.vec_isa_ok = None
for folder in sys.argv[1:]:  # a process for each, which has no answer yet; imports take seconds
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    instruction_sets.ask(Path(folder))
    valid = cpu_vec_isa.valid_vec_isa_list()
    bool(valid and valid[-1])
    print(len(asked), [str(one) for one in valid], flush=True)
    os._exit(0)
"""


def ask(*folders: Path, answer: bool = True) -> list[tuple[int, str]]:
    """How many questions a new process asks, and what is valid there; one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(answer=answer), *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    told = [line.partition(" ") for line in done.stdout.splitlines()]
    return [(int(asked), valid) for asked, _, valid in told]


def test_asked_once(tmp_path: Path) -> None:
    ((first, valid),) = ask(tmp_path)
    assert first > 0
    (file,) = tmp_path.iterdir()
    folders = [tmp_path]
    for index, damaged in enumerate(("", "{", '["a', "7")):
        folders.append(tmp_path / str(index))
        folders[-1].mkdir()
        (folders[-1] / file.name).write_text(damaged)
    assert ask(*folders) == [(0, valid)] + 4 * [(first, valid)]


def test_what_was_refused_is_asked_again(tmp_path: Path) -> None:
    (first, valid), again = ask(tmp_path, tmp_path, answer=False)
    assert first > 0
    assert valid == "[]"
    assert not list(tmp_path.iterdir())
    assert again == (first, valid)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    first, again = ask(tmp_path / "none", tmp_path / "none")
    assert again == first
