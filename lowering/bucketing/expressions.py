"""Sizes as sympy expressions of symbols: read off without a guard, evaluated as ints or tensors."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

# The other modules take these names from here: sympy carries no types.
from sympy import Expr as Expr
from sympy import Integer as Integer
from sympy import Symbol as Symbol
from sympy import cancel, expand

from lowering.bucketing.refused import Refused


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def expression(size: Any) -> Expr:
    """Of an int, a float or a symbolic number. Reading `node.expr` adds no guard."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size.node.expr
    return sympy.sympify(size)


def shape_of(value: torch.Tensor) -> tuple[Expr, ...]:
    return tuple(expression(size) for size in value.shape)


def product(factors: Iterable[Expr]) -> Expr:
    return functools.reduce(operator.mul, factors, Integer(1))


def same(one: Expr, other: Expr) -> bool:
    return bool(one == other) or expand(one - other) == 0


def evaluate(expr: Expr, values: Mapping[Symbol, int]) -> int:
    """The number that a size is for these values of its symbols."""
    number = expr.xreplace({symbol: Integer(value) for symbol, value in values.items()})
    if not number.is_Integer:
        raise Refused(f"a size of {expr} is not known from the inputs' sizes")
    return int(number)


def grows(expr: Expr) -> bool:
    """Is it never smaller for a larger value of any of its symbols? (Symbols are not negative.)"""
    if expr.is_Symbol or expr.is_Integer:
        return True
    if expr.is_Add or _called(expr) == "Max":
        return all(map(grows, expr.args))
    if expr.is_Mul:
        number, rest = expr.as_coeff_Mul()
        if number != 1:
            return bool(number.is_Integer and number > 0) and grows(rest)
        return all(_is_no_difference(arg) and grows(arg) for arg in expr.args)
    if expr.is_Pow:
        base, exponent = expr.args
        return bool(exponent.is_Integer and exponent > 0) and _is_no_difference(base)
    if _called(expr) in ("FloorDiv", "CleanDiv"):
        return bool(expr.args[1].is_Integer and expr.args[1] > 0) and grows(expr.args[0])
    return False


def _is_no_difference(expr: Expr) -> bool:
    """Never negative, for what can be read off: a sum or quotient of what is not negative."""
    if expr.is_Symbol:
        return True
    if expr.is_Integer:
        return bool(expr >= 0)
    sums = expr.is_Add or expr.is_Mul or _called(expr) in ("FloorDiv", "CleanDiv")
    return sums and all(map(_is_no_difference, expr.args))


def as_tensor(expr: Expr, lengths: Mapping[Symbol, torch.Tensor]) -> Any:
    """The true value: a tensor where symbols are in it, else a Python number."""
    if expr.is_Symbol:
        if expr not in lengths:
            raise Refused(f"the value of {expr} is not known from the inputs' sizes")
        return lengths[expr]
    if expr.is_Integer:
        return int(expr)
    if expr.is_Number:
        return float(expr)
    compute = _OPERATIONS.get(_called(expr))
    if compute is None:
        raise Refused(f"the number {expr}, made of sizes, cannot be computed on the device")
    return compute(*(as_tensor(arg, lengths) for arg in expr.args))


def _called(expr: Expr) -> str:
    return type(expr).__name__


def _wide(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, torch.Tensor) else float(value)


def _divide(one: Any, other: Any) -> Any:
    return _wide(one) / _wide(other)


def _floor_divide(one: Any, other: Any) -> Any:
    return one // other


def _of_any(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    return lambda value: function(_wide(value)) if isinstance(value, torch.Tensor) else value


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "Add": lambda *terms: functools.reduce(operator.add, terms),
    "Mul": lambda *terms: functools.reduce(operator.mul, terms),
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloatPow": lambda base, exponent: _wide(base) ** exponent,
    "FloorDiv": _floor_divide,
    "CleanDiv": _floor_divide,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
    "IntTrueDiv": _divide,
    "FloatTrueDiv": _divide,
    "ToFloat": _wide,
    "OpaqueUnaryFn_sqrt": _of_any(torch.sqrt),
    "OpaqueUnaryFn_log": _of_any(torch.log),
    "OpaqueUnaryFn_log2": _of_any(torch.log2),
    "OpaqueUnaryFn_exp": _of_any(torch.exp),
}


def integer_content(expr: Expr) -> int:
    """The largest integer that divides every coefficient; 0 where it is no polynomial."""
    terms = sympy.Add.make_args(expand(expr))
    coefficients = [term.as_coeff_Mul()[0] for term in terms]
    if not all(coefficient.is_Integer for coefficient in coefficients):
        return 0
    return math.gcd(*(int(coefficient) for coefficient in coefficients))


def common_divisor(one: Expr, other: Expr) -> int:
    """Of the coefficients of two sizes."""
    return int(sympy.gcd(integer_content(one), integer_content(other)))


def quotient(size: Expr, part: Expr) -> Expr:
    return expand(cancel(expand(size) / part))


def divides(part: Expr, size: Expr) -> bool:
    """Is the size a multiple of the part, whatever the symbols are?"""
    if part.is_Integer:
        content = integer_content(size)
        return content > 0 and content % int(part) == 0
    return bool(sympy.denom(cancel(expand(size) / part)) == 1)
