"""The files of `examples/` run as they stand, small, and do what their docstrings say.

Those over `kernel_dispatch.backends` are in test_s002_41_43_examples.py, by their features' names.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import custom_target, hf_generate, time_your_model
from lowering.errors import UnifiedError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
NAMES = [file.stem for file in EXAMPLES]
MAY_IMPORT = {"torch", "transformers", "kernel_dispatch", "lowering"}

with_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate"
)


@pytest.fixture(scope="module")
def trainer() -> Any:
    return importlib.import_module("examples.hf_trainer")


@pytest.mark.quick
def test_they_are_all_here() -> None:
    wanted = "training_loop inference_pipeline backend_comparison custom_target"
    wanted += " hf_generate hf_trainer time_your_model"
    assert set(wanted.split()) <= set(NAMES)


@pytest.mark.quick
@pytest.mark.parametrize("file", EXAMPLES, ids=NAMES)
def test_an_example_says_what_it_shows_and_can_be_pasted(file: Path) -> None:
    """A docstring, a `main` whose arguments have defaults, and nothing to install beside."""
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree)
    (main,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    assert len(main.args.defaults) == len(main.args.args)
    assert main.returns is not None and ast.unparse(main.returns) != "None"
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) <= MAY_IMPORT


def test_a_custom_target_takes_what_its_rows_allow(capfd: pytest.CaptureFixture[str]) -> None:
    found = custom_target.main()
    assert found["targets"][0] == "acme"  # its priority is the highest
    taken, trained, wide = found["inference"], found["training"], found["float64"]
    assert (taken["target"], taken["provider"], taken["runs"]) == ("acme", "acmecc", 1)
    assert taken["notes"] == ["acme left out 1 operators"]
    assert (trained["target"], wide["target"]) == ("cpu", "cpu")
    assert "acmecc takes inference only: its kernels have no backward" in trained["why_not_acme"]
    assert wide["why_not_acme"] == "acmecc does not take float64"
    assert "inference: acme, computed by acmecc" in capfd.readouterr().out


def test_timing_covers_every_contender_and_verifies_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = time_your_model.main(levels=("O0", "O1"), rounds=3, width=32)
    assert [row.name for row in rows] == ["eager", "O0", "O1"]
    assert all(row.median_ms > 0 and row.speedup > 0 and row.first_call_s > 0 for row in rows)
    assert rows[0].speedup == 1
    assert "2 graphs, 0 fallbacks" in capsys.readouterr().out
    model, inputs = time_your_model.make(width=32)
    with pytest.raises(AssertionError, match="wrong is off by"):
        time_your_model.verify("wrong", lambda x: model(x) * 1.001, model, inputs)


def test_rounds_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never all calls of one contender and then all of another."""
    called: list[str] = []
    calls = {name: lambda x, name=name: called.append(name) or x for name in "abc"}
    times = time_your_model.time_in_rounds(calls, (torch.zeros(1),), rounds=4)
    assert {name: len(own) for name, own in times.items()} == {"a": 4, "b": 4, "c": 4}
    timed = called[9:]  # after three calls each to warm up
    assert all(set(timed[start : start + 3]) == set("abc") for start in range(0, 12, 3))


def test_the_commands_in_the_docstrings_name_what_is_there() -> None:
    """`kernel_dispatch bench examples/time_your_model.py:make` finds a model and its inputs."""
    from kernel_dispatch import user_code

    assert "bench examples/time_your_model.py:make" in str(time_your_model.__doc__)
    file = Path(time_your_model.__file__)
    model, inputs, _ = user_code.load(f"{file}:make")
    assert isinstance(model(*inputs), torch.Tensor)


def test_generate_gives_eagers_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    growing, static, wrapped = hf_generate.main(level="O1", tokens=6, layers=1)
    assert growing.same_tokens and static.same_tokens and wrapped.same_tokens
    assert (growing.graphs, static.graphs, wrapped.graphs) == (3, 2, 0)
    assert growing.more_graphs == static.more_graphs == 0
    assert (growing.runs, static.runs, wrapped.runs) == (12, 12, 0)  # 6 tokens, two prompts
    assert "OTHER TOKENS" not in capsys.readouterr().out


def test_generate_compiles_by_itself_with_the_backend_that_it_is_told() -> None:
    """What the docstring says of GPUs; a private switch of transformers has it done on CPUs."""
    from transformers import CompileConfig

    import kernel_dispatch

    prompt = torch.randint(2, 256, (1, 8))
    expected = hf_generate.write(hf_generate.make_model(layers=1), prompt, 5, "static")
    model = hf_generate.make_model(layers=1)
    assert CompileConfig().mode == "reduce-overhead"
    config = CompileConfig(backend="unified", mode=None, options={"level": "O1"})
    config._compile_all_devices = True
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=5,
        do_sample=False,
        cache_implementation="static",
        compile_config=config,
    )
    assert torch.equal(tokens, expected)
    (graph,) = kernel_dispatch.report()
    assert (graph.level, graph.runs) == ("O1", 4)  # the prompt is not compiled


@with_accelerate
def test_the_trainer_trains_a_compiled_model(trainer: Any) -> None:
    """Row 37 of what users ask: every way that works tracks eager, the refused one says why."""
    outcome = trainer.main(steps=6, level="O1")
    eager = outcome.losses.pop("eager")
    assert len(eager) == 6 and eager[-1] < eager[0]
    assert {"model.compile", "torch.compile"} <= set(outcome.losses)
    for losses in outcome.losses.values():
        assert losses == pytest.approx(eager, rel=1e-5)
    assert set(outcome.graphs.values()) == {1}
    assert "not a valid DynamoBackend" in outcome.refusal


@with_accelerate
def test_accelerate_asks_for_its_own_backend_by_name() -> None:
    """So `torch_compile=True` never reaches torch's default backend, as the docstring says."""
    from accelerate.utils import TorchDynamoPlugin

    passed = TorchDynamoPlugin(backend="inductor").to_kwargs()
    assert passed["backend"] == "inductor"
    with pytest.raises(ValueError, match="UNIFIED"):
        TorchDynamoPlugin(backend="unified")


@with_accelerate
def test_a_typo_in_a_trainer_is_ours_to_name(trainer: Any) -> None:
    with pytest.raises(UnifiedError, match="O2"):
        trainer.compiled_in_place(1, "O22")
