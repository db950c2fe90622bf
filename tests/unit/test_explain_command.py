"""`kernel-dispatch explain`: what it finds, what it tells, and whose errors are whose."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.conftest import Run

pytestmark = pytest.mark.usefixtures("clean_environment", "shop")
quick = pytest.mark.quick
slow = pytest.mark.slow

SHOP = """
import torch

def build():
    return (lambda x: (x @ x).relu().sum()), (torch.randn(8, 8),)

def build_with_keywords():
    def scaled(x, *, by):
        return x * by
    return scaled, [torch.ones(3)], {"by": 2.0}

def badly_built():
    return torch.relu, torch.ones(3)

def work():
    return torch.ones(4).mul(2).sin()

def speak():
    print("a word from the user")
    return torch.ones(4).sin()

def no_tensors():
    return 3

def needs(a, b):
    return a * b

def boom():
    raise ValueError("bad stock")

def leave():
    raise SystemExit(5)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

class Sized(torch.nn.Module):
    def __init__(self, size):
        super().__init__()

number = 3
"""
NET = """
import torch

def example_inputs():
    return (torch.randn(2, 4),)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

net = Net()

def double(x):
    return x * 2

def boom(x):
    raise KeyError("no such key")
"""
ONE_TENSOR = """
import torch
example_inputs = torch.ones(3)
def double(x):
    return x * 2
"""
BY_NAME = """
import torch
example_inputs = {"x": torch.ones(3), "by": 3}
def scaled(x, by):
    return x * by
"""
TRAIN = """
import sys
import torch
import kd_shop  # a neighbour of the script

assert __name__ == "__main__"
print("arguments:", sys.argv[1:])

def step(x):
    return x.sin() + 1

if "unified" in sys.argv:
    torch.compile(step, backend="unified")(torch.randn(5))
elif "eager" in sys.argv:
    torch.compile(step, backend="eager")(torch.randn(5))
elif "default" in sys.argv:
    torch.compile(step)(torch.randn(5))
if "fail" in sys.argv:
    raise RuntimeError("late failure")
if "leave" in sys.argv:
    sys.exit(3)
if "done" in sys.argv:
    sys.exit(0)
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, with what importing it leaves behind taken away again."""
    files = {
        "kd_shop.py": SHOP,
        "kd_net.py": NET,
        "kd_tensor.py": ONE_TENSOR,
        "kd_keywords.py": BY_NAME,
        "train.py": TRAIN,
        "kd_broken.py": "import no_such_dependency\n",
        "kd_raises.py": "1 / 0\n",
        "kd_pack/__init__.py": "",
        "kd_pack/inner.py": SHOP,
        "this.py": "import torch\ndef work():\n    return torch.ones(3).sin()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    modules, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("kd_", "explained_")):
            del sys.modules[name]


# --- explain module:function ----------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("target", "function"),
    [
        ("kd_shop:build", "build.<locals>.<lambda>"),
        ("kd_shop:build_with_keywords", "scaled"),
        ("kd_shop:work", "work"),
        ("kd_pack.inner:work", "work"),
        ("kd_net:Net", "Net.forward"),
        ("kd_net:net", "Net.forward"),
        ("kd_net:double", "double"),
        ("kd_tensor:double", "double"),
        ("kd_keywords:scaled", "scaled"),
        ("kd_shop.py:work", "work"),
        ("this.py:work", "work"),  # not the standard library's `this`
    ],
)
def test_explain_function(run: Run, target: str, function: str) -> None:
    done = run("explain", target, "--level", "O1", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["target"] == target
    (graph,) = told["graphs"]
    assert function in graph["function"]
    assert (graph["level"], graph["runs"]) == ("O1", 1)


@quick
def test_a_file_takes_no_other_modules_name(run: Run) -> None:
    assert run("explain", "this.py:work", "--level", "O0").code == 0
    assert not hasattr(sys.modules.get("this"), "work")


@quick
def test_explain_text_and_flags(run: Run) -> None:
    done = run("explain", "kd_shop:work", "--level", "O0", "--device", "cpu")
    assert done.code == 0
    assert "target cpu, provider eager, level O0" in done.out
    assert "not-requested" not in done.out
    told = run("explain", "kd_shop:work", "--level", "O0", "--device", "cpu", "--verbose").out
    assert "not-requested: cpu was forced" in told


@quick
def test_explain_reads_the_environment_and_flags_win(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_LEVEL", "O0")
    assert "level O0 (from UNIFIED_LEVEL)" in run("explain", "kd_shop:work").out
    assert "level O1" in run("explain", "kd_shop:work", "--level", "conservative").out


@quick
def test_what_the_user_prints_stays_out_of_the_json(run: Run) -> None:
    done = run("explain", "kd_shop:speak", "--level", "O0", "--json")
    assert json.loads(done.out)["called"]
    assert "a word from the user" in done.err
    assert "a word from the user" in run("explain", "kd_shop:speak", "--level", "O0").out


@quick
def test_backend_never_called_is_a_problem(run: Run) -> None:
    done = run("explain", "kd_shop:no_tensors", "--level", "O0")
    assert done.code == 1
    assert "never-called" in done.out
    assert not json.loads(run("explain", "kd_shop:no_tensors", "--json").out)["called"]


@quick
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kd_shop:bild"], "kd_shop has no 'bild'. Did you mean 'build'?"),
        (["kd_shop:Net.forwrd"], "no 'Net.forwrd'. Did you mean 'forward'?"),
        (["kd_shopp:build"], "no module 'kd_shopp'"),
        (["kd_shopp:build"], "Did you mean 'kd_shop'?"),
        (["kd_pack.iner:work"], "no module 'kd_pack.iner'"),
        (["kd_pack.iner:work"], "Did you mean 'kd_pack.inner'?"),
        (["kd_shoop.py:work"], "Did you mean 'kd_shop.py'?"),
        (["trian.py"], "there is no script 'trian.py'. Did you mean 'train.py'?"),
        (["kd_shop"], "'kd_shop' names no function: write module:function or script.py"),
        (["kd_shop:"], "names no function"),
        (["kd_shop:number"], "kd_shop:number is of type int"),
        (["kd_shop:needs"], "needs arguments (a, b), and kd_shop has no `example_inputs`"),
        (["kd_shop:Net"], "needs arguments (x)"),
        (["kd_shop:Sized"], "the class kd_shop:Sized needs arguments (size)"),
        (["kd_shop:badly_built"], "must be a tuple of arguments"),
        (["kd_shop:work", "--", "more"], "arguments after -- are for scripts"),
        (["kd_shop:work", "--all"], "--all is for scripts"),
        (["kd_shop:work", "--level", "O9"], "unknown level 'O9' (from --level)"),
        (["kd_shop:work", "--device", "cpuu"], "unknown device 'cpuu' (from --device)"),
        (["kd_shop:work", "--device", "cuda"], "'cuda' was forced (from --device) and is not"),
        (["train.py", "--device", "neuron"], "'neuron' was forced (from --device) and is not"),
    ],
)
def test_explain_usage_errors_are_one_line(run: Run, arguments: list[str], said: str) -> None:
    done = run("explain", *arguments)
    assert done.code == 2
    assert done.out == ""
    assert said in done.err
    assert done.err.startswith("kernel-dispatch: ")
    assert done.err.count("\n") == 1


@quick
def test_bad_environment_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_LEVEL", "O9")
    done = run("explain", "train.py")
    assert done.code == 2
    assert done.err.startswith("kernel-dispatch: unknown level 'O9' (from UNIFIED_LEVEL)")
    assert done.err.count("\n") == 1
    assert done.out == ""  # the script was not even started


@quick
@pytest.mark.parametrize(
    ("target", "what", "last", "first_file"),
    [
        ("kd_shop:boom", "kd_shop:boom() raised", "ValueError: bad stock", "kd_shop.py"),
        ("kd_net:boom", "kd_net:boom raised", "KeyError: 'no such key'", "kd_net.py"),
        ("kd_raises:f", "importing kd_raises raised", "ZeroDivisionError", "kd_raises.py"),
        ("kd_raises.py:f", "importing kd_raises.py raised", "ZeroDivisionError", "kd_raises.py"),
        ("kd_broken:f", "importing kd_broken raised", "'no_such_dependency'", "kd_broken.py"),
    ],
)
def test_the_users_traceback_starts_in_the_users_code(
    run: Run, target: str, what: str, last: str, first_file: str
) -> None:
    done = run("explain", target, "--level", "O0")
    assert done.code == 1
    lines = done.err.splitlines()
    assert lines[0] == f"kernel-dispatch: {what}"
    assert last in lines[-1]
    files = [line for line in lines if line.startswith("  File ")]
    assert first_file in files[0]


@quick
def test_a_function_that_leaves(run: Run) -> None:
    done = run("explain", "kd_shop:leave")
    assert done.code == 1
    assert "exit code 5" in done.err


@quick
def test_a_strict_failure_is_one_line_and_a_problem(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowering.errors import StrictModeError

    def refused(*_: Any, **__: Any) -> None:
        raise StrictModeError("graph 0/0 fell back")

    monkeypatch.setattr("kernel_dispatch.explaining.explain", refused)
    done = run("explain", "kd_shop:work")
    assert done == (1, "", "kernel-dispatch: graph 0/0 fell back\n")


# --- explain script.py ----------------------------------------------------------------------------


@quick
def test_script(run: Run) -> None:
    argv, path = sys.argv, list(sys.path)
    done = run("explain", "train.py", "--level", "O1", "--", "unified", "--level", "7")
    assert done.code == 0, done.err
    assert done.out.startswith("arguments: ['unified', '--level', '7']\n")
    assert "level O1" in done.out
    assert "step" in done.out
    assert (sys.argv, sys.path) == (argv, path)


@quick
@pytest.mark.parametrize("word", ["eager", "nothing"])
def test_script_that_never_uses_unified(run: Run, word: str) -> None:
    done = run("explain", "train.py", "--", word)
    assert done.code == 1
    assert "no graph of this script went through unified" in done.out
    assert 'backend="unified"' in done.out and "--all" in done.out
    told = json.loads(run("explain", "train.py", "--json", "--", word).out)
    assert (told["called"], "--all" in told["hint"]) == (False, True)


@quick
@pytest.mark.skipif(
    not hasattr(torch.compiler, "set_default_backend"), reason="this torch has no default backend"
)
def test_all_is_for_compile_calls_that_name_no_backend(run: Run) -> None:
    before = torch.compiler.get_default_backend()
    done = run("explain", "train.py", "--all", "--level", "O0", "--json", "--", "default", "fail")
    assert [graph["level"] for graph in json.loads(done.out)["graphs"]] == ["O0"]
    assert torch.compiler.get_default_backend() == before != "unified"
    assert run("explain", "train.py", "--all", "--", "eager").code == 1  # stays as written


@quick
def test_all_on_a_torch_without_default_backend(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.compiler, "set_default_backend", raising=False)
    done = run("explain", "train.py", "--all", "--", "default")
    assert done.code == 2
    assert f"torch {torch.__version__} does not have" in done.err


@quick
def test_script_that_fails_late_is_still_reported(run: Run) -> None:
    done = run("explain", "train.py", "--level", "O0", "--json", "--", "unified", "fail")
    told = json.loads(done.out)
    assert done.code == 1
    assert len(told["graphs"]) == 1
    assert told["raised"] == "RuntimeError: late failure"
    lines = done.err.splitlines()
    assert "kernel-dispatch: train.py raised" in lines
    assert lines[-1] == "RuntimeError: late failure"
    first = next(line for line in lines if line.startswith("  File "))
    assert "train.py" in first


@quick
@pytest.mark.parametrize(("word", "code"), [("leave", 1), ("done", 0)])
def test_script_that_leaves(run: Run, word: str, code: int) -> None:
    done = run("explain", "train.py", "--level", "O0", "--", "unified", word)
    assert done.code == code
    assert "1 graph" in done.out
    assert ("left with exit code 3" in done.err) is (code == 1)


@slow
def test_console_script_and_module_are_the_same() -> None:
    script = Path(sys.executable).parent / "kernel-dispatch"
    arguments = ["explain", "kd_shop:work", "--level", "O1", "--json"]
    by_script = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=120)
    module = [sys.executable, "-m", "kernel_dispatch", *arguments]
    by_module = subprocess.run(module, capture_output=True, text=True, timeout=120)
    for done in (by_script, by_module):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["graphs"][0]["runs"] == 1
