"""Bugs that people really write, as edits of one family's file: one module for each family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`what` is wrong after `right` (which stands in the file once) was replaced by `wrong`."""

    what: str
    right: str
    wrong: str
