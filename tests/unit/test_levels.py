"""Levels: their order, their names, what each may use."""

from __future__ import annotations

import pytest

from lowering.errors import SettingError
from lowering.levels import ALIASES, CONTRACTS, Level

pytestmark = pytest.mark.quick


def test_levels_are_ordered_and_named() -> None:
    assert [str(level) for level in Level] == ["O0", "O1", "O2", "O3"]
    assert Level.O0 < Level.O1 < Level.O2 < Level.O3


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ("O2", Level.O2),
        (" o3 ", Level.O3),
        (0, Level.O0),
        ("2", Level.O2),
        (Level.O1, Level.O1),
        ("none", Level.O0),
        ("Conservative", Level.O1),
        ("balanced", Level.O2),
        ("AGGRESSIVE", Level.O3),
    ],
)
def test_parse(given: object, level: Level) -> None:
    assert Level.parse(given) is level


@pytest.mark.parametrize("given", ["O4", "", "fast", None, True, False, 4, -1, 1.5, "O-1", "0O"])
def test_parse_refuses(given: object) -> None:
    with pytest.raises(SettingError) as caught:
        Level.parse(given, "a test")
    assert repr(given) in str(caught.value)
    assert "from a test" in str(caught.value)
    assert "O0, O1, O2, O3" in str(caught.value)


def test_every_level_has_a_contract_and_an_alias() -> None:
    assert [contract.level for contract in CONTRACTS] == list(Level)
    assert all(ALIASES[contract.alias] is contract.level for contract in CONTRACTS)
    assert "bit-identical" in CONTRACTS[0].numerics
