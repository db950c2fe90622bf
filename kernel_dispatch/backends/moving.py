"""The same function applied to every tensor in whatever holds them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A like value with `change(tensor)` for each tensor in it: in lists, tuples, named tuples,
    mappings and dataclasses, however deep. Anything else is given back as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=change(value.data))  # its other parts index, on the CPU
    if isinstance(value, tuple):
        parts = [each_tensor(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, (list, set, frozenset)):
        return type(value)(each_tensor(one, change) for one in value)
    if isinstance(value, Mapping):
        return _mapping(value, change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change)
    return value


def _mapping(value: Mapping[Any, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = {key: each_tensor(one, change) for key, one in value.items()}
    if type(value) is dict or not isinstance(value, MutableMapping):
        return changed
    like = copy.copy(value)  # keeps an OrderedDict, a defaultdict's factory, a tokenizer's output
    for key, one in changed.items():
        like[key] = one
    return like


def _dataclass(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    like = copy.copy(value)
    for one in dataclasses.fields(value):
        if hasattr(value, one.name):  # frozen ones as well: the copy is ours
            object.__setattr__(like, one.name, each_tensor(getattr(value, one.name), change))
    return like
