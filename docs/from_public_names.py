"""The page of public names: what `import kernel_dispatch` offers, in the words of the code."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import kernel_dispatch

_HEAD = """# Python API

Every public name of `import kernel_dispatch`. Nothing has to be imported to use the backend itself.
Generated from the code by `python docs/generate.py`: edit the docstrings there.
"""
# Title -> (where more is told, names). Every public name is in exactly one group.
GROUPS = {
    "What happened": (
        "[Quickstart](quickstart.md), [debugging](debugging.md)",
        "report Report GraphReport Fallback Reason explain Explanation",
    ),
    "What would happen": (
        "[Targets](targets/README.md#the-plan-for-a-device-that-is-not-here)",
        "dry_run DryRun Plan GraphFacts",
    ),
    "Settings": (
        "[Settings](settings.md)",
        "configure Settings DispatchConfig Level list_levels list_options register reset",
    ),
    "Devices": ("[Selection](selection.md)", "available_targets Device DeviceType"),
    "One interface for every vendor": (
        "[Vendors](backends.md)",
        "get_backend get_optimizer detect_best_backend list_available_backends BackendFactory "
        "BackendType DeviceInfo OptimizationLevel OptimizationResult OptimizationStrategy",
    ),
    "The fourteen providers": (
        "[Providers](providers.md)",
        "get_available_backends is_backend_available get_backend_info get_default_backend "
        "set_default_backend list_backends BackendRegistry BackendInfo ProviderId",
    ),
    "The fastest verified candidate": ("[superoptimize](superoptimize.md)", "superoptimize"),
    "Errors and warnings": (
        "[Troubleshooting](troubleshooting.md)",
        "UnifiedError SettingError BackendNotAvailableError StrictModeError RegistrationError "
        "UnifiedWarning",
    ),
    "The backend itself": ("[Architecture](architecture.md)", "unified"),
}


def page() -> str:
    named = [name for _, names in GROUPS.values() for name in names.split()]
    public = set(kernel_dispatch.__all__) - {"__version__"}
    if sorted(named) != sorted(public):
        strange = sorted(set(named) ^ public) or "a name in two groups"
        raise SystemExit(f"docs/api.md cannot be made: GROUPS of {__file__} differ by {strange}")
    return "\n".join([_HEAD, *(_group(title, *group) for title, group in GROUPS.items())])


def _group(title: str, more: str, names: str) -> str:
    entries = [_entry(name, getattr(kernel_dispatch, name)) for name in names.split()]
    return "\n".join([f"## {title}\n\nMore: {more}.\n", *entries])


def _entry(name: str, value: Any) -> str:
    what = _first_paragraph(value)
    if not inspect.isclass(value):
        return f"### `{name}{_signature(value)}`\n\n{what}\n"
    members = _members(value)
    listed = "\n" + "\n".join(f"- {member}" for member in members) + "\n" if members else ""
    return f"### `{name}`\n\n{what}\n{listed}"


def _first_paragraph(value: Any) -> str:
    text = (inspect.getdoc(value) or "").partition("\n\n")[0]
    if not text:
        raise SystemExit(f"docs/api.md cannot be made: {value!r} has no docstring")
    return " ".join(text.split())


def _signature(function: Any, skip: int = 0) -> str:
    """Names and defaults; the annotations are in the code."""
    found = inspect.signature(function)
    bare = [
        one.replace(annotation=one.empty, default=_shown(one.default))
        for one in found.parameters.values()
    ]
    return str(found.replace(parameters=bare[skip:], return_annotation=found.empty))


def _shown(default: Any) -> Any:
    """Enumerations and functions by name: how Python prints them changes between its versions."""
    if isinstance(default, enum.Enum):
        return _Named(f"{type(default).__name__}.{default.name}")
    if callable(default) and default is not inspect.Parameter.empty:
        return _Named(f"{default.__module__}.{default.__qualname__}")
    return default


class _Named(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _members(value: type) -> list[str]:
    """Members of an enumeration, fields of a record, then methods that say what they do."""
    fields: list[str] = []
    if issubclass(value, enum.Enum):
        fields = [f"`{name}`" for name in value.__members__]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = [f"`{name}`" for name in names if not name.startswith("_")]
    told = [", ".join(fields)] if fields else []
    return told + [line for name, one in vars(value).items() if (line := _method(name, one))]


def _method(name: str, member: Any) -> str:
    inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    is_property = isinstance(inner, property)
    if name.startswith("_") or not (is_property or inspect.isfunction(inner)):
        return ""
    text = " ".join((inspect.getdoc(inner) or "").partition("\n\n")[0].split())
    skip = 0 if isinstance(member, staticmethod) else 1  # self, or the class
    shown = name if is_property else f"{name}{_signature(inner, skip)}"
    return f"`{shown}`" + (f": {text}" if text else "")
