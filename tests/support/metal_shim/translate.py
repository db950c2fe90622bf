"""A Metal shader as C++14: address spaces become checked memory, attributes become calls.

Everything else stays as it is and is compiled as it stands, so that what is tested is the shader.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# What a kernel may ask about its place. Those that count in the grid's dimensions have to be of one
# type in one kernel: Metal refuses another mixture.
_IN_DIMENSIONS = (
    "thread_position_in_grid",
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "threads_per_threadgroup",
)
_SINGLE = (
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
)
_KERNEL = re.compile(
    r"(?:\[\[max_total_threads_per_threadgroup\((\d+)\)\]\]\s*)?\bkernel\s+void\s+(\w+)\((.*?)\)\s*\{",
    re.DOTALL,
)
_MOST_THREADS = 1024


class ShaderError(Exception):
    """The shader, or a call of it, is not what Metal takes, or it did what no shader may do."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: `kind` is "buffer", "values" or "value", or what it asks."""

    name: str
    kind: str
    type: str
    written: bool = False


@dataclass(frozen=True)
class Signature:
    name: str
    parameters: tuple[Parameter, ...]
    most_threads: int

    @property
    def given(self) -> Sequence[Parameter]:
        """Those that the caller passes, in the order of their buffer index."""
        return [one for one in self.parameters if one.kind in ("buffer", "values", "value")]


def signatures(source: str) -> dict[str, Signature]:
    text = _without_comments(source)
    words = dict(re.findall(r"^#define (\w+) (\w+)$", text, re.MULTILINE))
    found = {}
    for most, name, inside in _KERNEL.findall(text):
        parameters = tuple(_parameter(part, words) for part in inside.split(","))
        _demand_one_type(name, parameters)
        found[name] = Signature(name, parameters, int(most or _MOST_THREADS))
    return found


def cpp(source: str, file: str) -> str:
    """The shader, and a function for each kernel that ctypes can call."""
    if "double" in _without_comments(source):
        raise ShaderError(f"{file}: Metal has no double")
    kernels = "".join(_callable(one) for one in signatures(source).values())
    return f'#line 1 "{file}"\n{_checked(source)}\n#line 1 "calls of {file}"\n{kernels}'


def _without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*", "", source)


def _parameter(text: str, words: dict[str, str]) -> Parameter:
    match = re.fullmatch(r"\s*(.+?)(\w+)\s*\[\[(\w+)(?:\((\d+)\))?\]\]\s*", text, re.DOTALL)
    if match is None:
        raise ShaderError(f"a parameter without an attribute: {text.strip()!r}")
    type_, name, attribute, _ = match.groups()
    type_ = " ".join(type_.split())
    if attribute in (*_IN_DIMENSIONS, *_SINGLE):
        return Parameter(name, attribute, type_)
    if attribute != "buffer":
        raise ShaderError(f"{name}: the attribute {attribute} is not known here")
    base = re.sub(r"\b(device|constant|const)\b|[*&\s]", "", type_)
    base = words.get(base, base)
    if type_.startswith("device"):
        return Parameter(name, "buffer", base, written="const" not in type_)
    if not type_.startswith("constant"):
        raise ShaderError(f"{name}: a buffer is device or constant, not {type_!r}")
    return Parameter(name, "values" if type_.endswith("*") else "value", base)


def _demand_one_type(kernel: str, parameters: Sequence[Parameter]) -> None:
    types = {one.type for one in parameters if one.kind in _IN_DIMENSIONS}
    if len(types) > 1:
        raise ShaderError(f"{kernel}: places in the grid are of one type, not {sorted(types)}")
    for one in parameters:
        if one.kind in _SINGLE and one.type not in ("uint", "ushort"):
            raise ShaderError(f"{kernel}: {one.kind} is a uint, not {one.type}")


def _checked(source: str) -> str:
    text = re.sub(r"\bdevice\s+(const\s+)?(\w+)\s*\*", r"shim::Buffer<\1\2>", source)
    text = re.sub(r"\bconstant\s+constexpr\b", "constexpr", text)
    text = re.sub(r"\bconstant\s+(\w+)\s*\*", r"shim::Buffer<const \1>", text)
    text = re.sub(r"\bconstant\s+(\w+)\s*&", r"const \1&", text)
    return re.sub(
        r"\bthreadgroup\s+(\w+)\s+(\w+)\[([^\]]+)\];",
        r"static shim::Shared<\1, (\3)> \2; \2.enter();",
        text,
    )


def _callable(kernel: Signature) -> str:
    arguments, index = [], 0
    for one in kernel.parameters:
        if one.kind == "buffer":
            const = "" if one.written else "const "
            arguments.append(f"shim::as_buffer<{const}{one.type}>(given[{index}])")
        elif one.kind == "values":
            arguments.append(f"shim::as_buffer<const {one.type}>(given[{index}])")
        elif one.kind == "value":
            arguments.append(f"shim::as_value<{one.type}>(given[{index}])")
        else:
            arguments.append(f"shim::place<{one.type}>(shim::{one.kind}())")
            continue
        index += 1
    return f"""
static void call_{kernel.name}(const void* arguments) {{
    const shim::Argument* given = static_cast<const shim::Argument*>(arguments);
    (void)given;
    {kernel.name}({", ".join(arguments)});
}}
extern "C" const char* launch_{kernel.name}(
    const void* arguments, const uint64_t* grid, const uint64_t* size, int order) {{
    return shim::launch(call_{kernel.name}, arguments, grid, size, order);
}}
"""
