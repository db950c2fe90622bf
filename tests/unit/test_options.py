"""How values of options are read, where that is more than a word from a list."""

from __future__ import annotations

import pytest

from kernel_dispatch.settings import resolve
from lowering.errors import SettingError

pytestmark = pytest.mark.quick

SIZES = {
    "auto": None,
    None: None,
    "off": 0,
    0: 0,
    4096: 4096,
    "512MB": 512 << 20,
    "1 GiB": 1 << 30,
    "2g": 2 << 30,
}


def test_sizes_of_memory() -> None:
    for value, size in SIZES.items():
        assert resolve(None, {"keep_memory": value}, {}).keep_memory == size, value


@pytest.mark.parametrize("value", [True, "-1", "1.5GB", "12x", "", "9999999999T"])
def test_what_is_no_size_of_memory(value: object) -> None:
    with pytest.raises(SettingError, match="keep_memory="):
        resolve(None, {"keep_memory": value}, {})
