"""Which guards can be answered by pins (native/pins.cpp), and what is to be pinned for them.

A guard asks something of a place: an attribute of a module, an entry of a dictionary, a weight. It
can be answered by pins if the place is reached by plain attributes and entries alone, whose
dictionaries tell of every change, and if what it asks cannot change without such a change.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowering.native import library

Arguments = Mapping[str, Any]


class Pin(enum.IntFlag):
    """What is to be pinned of a place. As in lowering/native/pins.cpp."""

    OBJECT = 1  # its class, and which dictionary holds its attributes
    ATTRIBUTES = 2  # that dictionary
    DICTIONARY = 4  # itself
    TYPE = 8  # its class, with all that this has
    TENSOR = 16  # its class and attributes, and what TENSOR_MATCH asks for
    ALONE = 32  # a tensor that no argument may be


@dataclass(eq=False)
class Place:
    """What guards ask about, as it is reached: an argument, or a part of another place."""

    number: int  # a holder's is smaller than that of what it holds
    holder: Place | None
    key: Any
    is_item: bool  # of a dictionary or tuple, not an attribute
    value: Any
    pins: Pin = field(default_factory=lambda: Pin(0))

    def as_step(self) -> tuple[int, Any, bool, type, int]:
        holder = -1 if self.holder is None else self.holder.number
        return holder, self.key, self.is_item, type(self.value), int(self.pins)


class Plan:
    """What to pin, and where to find it. It keeps none of it alive."""

    def __init__(self, places: Sequence[Place], variables: Arguments, others: list[str]) -> None:
        self._globals = variables
        self._starts = [place.key for place in places if place.holder is None]
        steps = [place.as_step() for place in places]
        self.pin = library.pin_plan(steps, variables, others)

    def whose(self, arguments: Arguments) -> tuple[int, ...]:
        """Of which objects; another module may be called with the same graph."""
        return tuple(
            [
                id(arguments[name] if name in arguments else self._globals.get(name))
                for name in self._starts
            ]
        )


class Parts(NamedTuple):
    pinned: list[Any]  # guards that pins answer
    asked: list[Any]  # those that torch is to ask in every call
    inputs: list[Any]  # of the latter, those of tensors that must not be the model's own
    plan: Plan


def divide(guards: Sequence[Any], arguments: Arguments, variables: Arguments) -> Parts:
    return _Planner(arguments, variables).divide(guards)


class _Planner:
    def __init__(self, arguments: Arguments, variables: Arguments) -> None:
        self._arguments = arguments
        self._globals = variables
        self._places: dict[tuple[int, bool, Any], Place] = {}
        self._of_source: dict[int, tuple[Any, Place | None]] = {}

    def divide(self, guards: Sequence[Any]) -> Parts:
        from torch._dynamo.source import LocalSource

        pinned, asked, alone = [], [], []
        for guard in guards:
            place = self._place_of(guard.originating_source)
            if place is None or guard.is_fsdp_module() or not self._answers(guard, place):
                asked.append(guard)
            elif Pin.ALONE in place.pins:
                alone.append((guard, place))
            else:
                pinned.append(guard)
        inputs = [guard for guard in asked if _kind(guard) == "TENSOR_MATCH"]
        sources = [guard.originating_source for guard in inputs]
        if all(type(source) is LocalSource for source in sources):
            pinned += [guard for guard, _ in alone]
            others = [source.local_name for source in sources]
        else:  # where inputs are would have to be looked up
            asked += [guard for guard, _ in alone]
            inputs, others = [], []
            for _, place in alone:
                place.pins &= ~Pin.ALONE
        plan = Plan(list(self._places.values()), self._globals, others)
        return Parts(pinned, asked, inputs, plan)

    def _answers(self, guard: Any, place: Place) -> bool:
        answer = _ANSWERS.get(_kind(guard))
        return answer is not None and answer(self, guard, place)

    # --- where a guard's source leads to ----------------------------------------------------------

    def _place_of(self, source: Any) -> Place | None:
        known = self._of_source.get(id(source))
        if known is None:
            # The source is kept, so that no other can have its number.
            known = self._of_source[id(source)] = (source, self._find(source))
        return known[1]

    def _find(self, source: Any) -> Place | None:
        from torch._dynamo import source as sources

        if type(source) is sources.LocalSource:
            return self._start(source.local_name, self._arguments)
        if type(source) is sources.GlobalSource and source.global_name not in self._arguments:
            return self._start(source.global_name, self._globals)
        if isinstance(source, sources.NNModuleSource):
            return self._place_of(source.base)
        holder = self._place_of(source.base) if hasattr(source, "base") else None
        if holder is None:
            return None
        if type(source).__name__ in _ATTRIBUTES:
            return self._attribute(holder, source.member)
        if isinstance(source, (sources.DictGetItemSource, sources.GetItemSource)):
            return self._item(holder, source.index)
        return None

    def _start(self, name: str, among: Arguments) -> Place | None:
        value = among.get(name)
        is_self = name == "self" and among is self._arguments
        if not isinstance(value, torch.nn.Module) and (not is_self or isinstance(value, Tensor)):
            return None  # others may be new ones in every call
        if _plain_attributes(value) is None:
            return None
        place = self._place(None, name, is_item=False, value=value)
        # Nothing holds it, and another object may have its address later: but not its attributes.
        place.pins |= Pin.OBJECT | Pin.ATTRIBUTES
        return place

    def _attribute(self, holder: Place, name: str) -> Place | None:
        attributes = _plain_attributes(holder.value)
        if attributes is None or name not in attributes:
            return None
        if _is_computed(type(holder.value), name):
            return None
        holder.pins |= Pin.OBJECT | Pin.ATTRIBUTES
        if not isinstance(holder.value, torch.nn.Module):  # torch asks as `getattr` does
            holder.pins |= Pin.TYPE
        return self._place(holder, name, is_item=False, value=attributes[name])

    def _item(self, holder: Place, key: Any) -> Place | None:
        value = holder.value
        if type(key) not in (str, int):
            return None
        if _is_plain_dictionary(value) and key in value:
            holder.pins |= Pin.DICTIONARY
        elif type(value) is not tuple or type(key) is not int or not 0 <= key < len(value):
            return None
        return self._place(holder, key, is_item=True, value=value[key])

    def _place(self, holder: Place | None, key: Any, *, is_item: bool, value: Any) -> Place:
        known = (id(holder), is_item, key)
        if known not in self._places:
            self._places[known] = Place(len(self._places), holder, key, is_item, value)
        return self._places[known]

    # --- what has to be pinned for a guard; False: pins can't answer it ---------------------------

    def _type(self, guard: Any, place: Place) -> bool:
        if type(place.value) not in (*_CONSTANTS, tuple):
            place.pins |= Pin.OBJECT
        return True

    def _constant(self, guard: Any, place: Place) -> bool:
        return _is_constant(place.value)

    def _length(self, guard: Any, place: Place) -> bool:
        return type(place.value) in (tuple, torch.Size) or self._entries(guard, place)

    def _entries(self, guard: Any, place: Place) -> bool:
        if not _is_plain_dictionary(place.value):
            return False
        place.pins |= Pin.DICTIONARY
        return True

    def _keys_in_order(self, guard: Any, place: Place) -> bool:
        # An OrderedDict can change its order without a change of its dictionary.
        return type(place.value) is dict and self._entries(guard, place)

    def _own_attributes(self, guard: Any, place: Place) -> bool:
        if _plain_attributes(place.value) is None:
            return False
        place.pins |= Pin.OBJECT | Pin.ATTRIBUTES
        return True

    def _has_attribute(self, guard: Any, place: Place) -> bool:
        value = place.value
        if not isinstance(value, torch.nn.Module) or _plain_attributes(value) is None:
            return False
        if type(value).__getattr__ is not torch.nn.Module.__getattr__:
            return False
        name = getattr(guard.create_fn, "keywords", {}).get("attr")
        if name is None or hasattr(type(_of_class(type(value), name)), "__get__"):
            return False  # a slot or a property, which may come and go
        for name in ("_parameters", "_buffers", "_modules"):  # where modules look, too
            inside = self._attribute(place, name)
            if inside is None or not self._entries(guard, inside):
                return False
        place.pins |= Pin.OBJECT | Pin.ATTRIBUTES | Pin.TYPE
        return True

    def _hooks(self, guard: Any, place: Place) -> bool:
        if torch._dynamo.config.skip_nnmodule_hook_guards:
            return True  # torch asks nothing
        return self._entries(guard, place)

    def _tensor(self, guard: Any, place: Place) -> bool:
        if type(place.value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return False
        place.pins |= Pin.TENSOR
        skips_weights = torch._dynamo.config.skip_no_tensor_aliasing_guards_on_parameters
        if not (skips_weights and type(place.value) is torch.nn.Parameter):
            place.pins |= Pin.ALONE
        return True


# Sources that mean nothing but an attribute.
_ATTRIBUTES = ("AttrSource", "ParamBufferSource", "UnspecializedParamBufferSource")

_ANSWERS: Mapping[str, Callable[[_Planner, Any, Place], bool]] = types.MappingProxyType(
    {
        "TYPE_MATCH": _Planner._type,
        "CONSTANT_MATCH": _Planner._constant,
        "EQUALS_MATCH": _Planner._constant,
        "SEQUENCE_LENGTH": _Planner._length,
        "DICT_CONTAINS": _Planner._entries,
        "DICT_NOT_CONTAINS": _Planner._entries,
        "DICT_KEYS_MATCH": _Planner._keys_in_order,
        "NOT_PRESENT_IN_GENERIC_DICT": _Planner._own_attributes,
        "HASATTR": _Planner._has_attribute,
        "EMPTY_NN_MODULE_HOOKS_DICT": _Planner._hooks,
        "TENSOR_MATCH": _Planner._tensor,
    }
)

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)


def _kind(guard: Any) -> str:
    made_by = guard.create_fn
    return str(getattr(made_by, "func", made_by).__name__)  # a partial has the function inside


def _is_constant(value: Any) -> bool:
    if type(value) in (tuple, torch.Size):
        return all(_is_constant(one) for one in value)
    return type(value) in _CONSTANTS


def _plain_attributes(value: Any) -> dict[str, Any] | None:
    """Of an object that finds them as objects do, or as modules do."""
    kind: Any = type(value)
    if isinstance(value, type) or kind.__getattribute__ is not object.__getattribute__:
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def _is_computed(kind: type, name: str) -> bool:
    """Has the class something of this name that goes before an attribute?"""
    found = _of_class(kind, name)
    return hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")


def _of_class(kind: type, name: str) -> Any:
    return next((c.__dict__[name] for c in kind.__mro__ if name in c.__dict__), None)


def _is_plain_dictionary(value: Any) -> bool:
    return isinstance(value, dict) and type(value).__getitem__ is dict.__getitem__
