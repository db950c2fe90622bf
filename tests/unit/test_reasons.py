"""Reasons are values with stable codes, and every code that the source uses is documented."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from lowering.errors import nearest, unknown
from lowering.reasons import CODES, Reason

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]


def used_codes() -> dict[str, str]:
    """First argument of every `Reason(...)` and of check()'s `no(...)`, with its place."""
    found = {}
    for package in ("kernel_dispatch", "lowering"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                name = getattr(node.func, "id", "")
                if name in ("Reason", "no") and isinstance(node.args[0], ast.Constant):
                    found[str(node.args[0].value)] = f"{file.name}:{node.lineno}"
    return found


def test_every_used_code_is_documented() -> None:
    used = used_codes()
    assert len(used) > 10
    assert set(used) <= set(CODES)


def test_codes_are_words_and_texts_are_sentences() -> None:
    for code, text in CODES.items():
        assert code == code.lower().replace("_", "-").strip()
        assert text[0].isupper()
        assert text.endswith(".")


def test_an_unknown_code_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="made-up"):
        Reason("made-up", "text")


def test_a_reason_is_a_value() -> None:
    reason = Reason("too-small", "3 ops", "model.py:7")
    assert str(reason) == "too-small: 3 ops [model.py:7]"
    assert str(Reason("too-small", "3 ops")) == "too-small: 3 ops"
    assert reason.as_dict() == {"code": "too-small", "text": "3 ops", "place": "model.py:7"}
    assert pickle.loads(pickle.dumps(reason)) == reason
    assert len({reason, Reason("too-small", "3 ops", "model.py:7")}) == 1


def test_nearest() -> None:
    assert nearest("cdua", ["cuda", "cpu"]) == "cuda"
    assert nearest("INDUCTR", ["Inductor"]) == "Inductor"
    assert nearest("zzz", ["cuda", "cpu"]) is None
    error = unknown("device", "cdua", ["cuda", "cpu", "cuda"], "options=")
    assert str(error) == (
        "unknown device 'cdua' (from options=). Did you mean 'cuda'? Accepted: cpu, cuda."
    )
