"""Operator -> rule. What has no rule here, and is not pointwise by torch's own word, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowering.bucketing.call import Call

Rule = Callable[[Call], Any]

# By name, as torch prints an operator: some of them exist in some versions of torch only.
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register
