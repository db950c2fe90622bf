"""What can be wrong with a call of a kernel: one class for each mistake."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from torch import Tensor


class KernelArgumentError(ValueError):
    """An argument does not fit: names it, its value, and what is accepted."""


class UnknownArchitectureError(ValueError):
    """No such GPU architecture."""

    @classmethod
    def of(cls, name: str, known: Iterable[str]) -> UnknownArchitectureError:
        names = list(known)
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return cls(f"unknown architecture {name!r}: one of {', '.join(names)}.{hint}")


def demand(holds: bool, message: str | Callable[[], str]) -> None:
    """Raise KernelArgumentError with this message unless the condition holds.

    A message with a number of the caller's in it is a function: Dynamo cannot put a size that may
    change into a string, and does not have to where nothing is wrong.
    """
    if not holds:
        raise KernelArgumentError(message if isinstance(message, str) else message())


def described(tensor: Tensor) -> str:
    """As messages name a tensor: float16[4, 8]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
