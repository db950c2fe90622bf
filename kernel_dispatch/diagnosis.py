"""What the facts about a machine mean: one row each, with the exact command that fixes it.

Pure: `doctor` asks and prints, this file does neither, so tests can hand in any machine.
Only what the user *asked for* can be a problem; an absent GPU is a fact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_dispatch import __version__, calibrate_command
from kernel_dispatch.config.backend_file import BackendFile
from kernel_dispatch.options import OPTIONS
from lowering.contract import Probe, Provider, Target
from lowering.levels import Level
from lowering.libraries import Library
from lowering.machine import CpuFacts
from lowering.profile import SHAPES, MachineProfile, RateKey
from lowering.topology import Topology
from triton_kernels.availability import TritonStatus

DISTRIBUTION = "kernel-dispatch"
BACKEND = "kernel_dispatch.backend:unified"
_ROOT = Path(__file__).resolve().parent.parent
# From a checkout, the distribution to install is the checkout.
_SOURCE = f"-e {_ROOT}" if (_ROOT / "pyproject.toml").is_file() else DISTRIBUTION
_REINSTALL = f"pip install --force-reinstall --no-deps {_SOURCE}"
Window = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Row:
    """One line: a fact with its status. `fix` is the command that changes it."""

    section: str
    name: str
    status: str  # ok, info, warn, problem
    text: str
    fix: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "name": self.name,
            "status": self.status,
            "text": self.text,
            "fix": self.fix,
            "details": dict(self.details),
        }


@dataclass(frozen=True)
class Setting:
    """One option as the environment leaves it: its value and source, or what is wrong with it."""

    name: str
    env: str | None
    value: Any
    source: str
    error: str = ""


@dataclass(frozen=True)
class Calibration:
    """The machine profile that holds now, and those that do not."""

    profile: MachineProfile | None = None
    path: str = ""
    note: str = ""  # why there is none
    setting: str = "auto"
    others: tuple[str, ...] = ()  # where each differs, in words


@dataclass(frozen=True)
class Facts:
    """Everything that was asked, as plain data. `failed`: what could not be asked -> the error."""

    python: str = ""
    torch: str = ""
    window: Window | None = None
    entry_points: tuple[str, ...] = ()  # "module:name from distribution version"
    cpu: CpuFacts | None = None
    topology: Topology | None = None
    threads: int = 1
    thread_advice: str = ""
    libraries: tuple[Library, ...] = ()
    compiler: Probe | None = None
    triton: TritonStatus | None = None
    calibration: Calibration | None = None
    targets: tuple[tuple[Target, Probe], ...] = ()
    providers: tuple[tuple[Provider, Probe], ...] = ()
    broken_targets: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # why, distribution
    settings: tuple[Setting, ...] = ()
    unknown_variables: Mapping[str, str] = field(default_factory=dict)  # name -> nearest, or ""
    failed: Mapping[str, str] = field(default_factory=dict)

    def setting(self, name: str, default: Any) -> Any:
        """A setting's value; the default where the user's value is bad."""
        found = next((one for one in self.settings if one.name == name), None)
        return default if found is None or found.error else found.value

    @property
    def target(self) -> str:
        """Where graphs go: the forced target, else the first one that is here."""
        forced = str(self.setting("device", "auto")).partition(":")[0]
        if forced != "auto":
            return forced
        return next((target.name for target, found in self.targets if found.available), "cpu")


# --- the rows -------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> list[Row]:
    """The rows. Asks nothing; a fact of an unexpected shape costs its own section only."""
    rows: list[Row] = []
    for section, judge in _SECTIONS.items():
        try:
            rows += list(judge(facts))
        except Exception as error:  # noqa: BLE001  (third-party records: shape unknown)
            text = f"could not be shown: {type(error).__name__}: {error}"
            rows.append(Row(section, section, "warn", text))
    return rows + [
        Row("Not answered", what, "warn", f"could not be asked: {error}")
        for what, error in facts.failed.items()
    ]


def exit_code(rows: Iterable[Row]) -> int:
    return int(any(row.status == "problem" for row in rows))


def _versions(facts: Facts) -> Iterator[Row]:
    yield Row("Versions", DISTRIBUTION, "ok", __version__)
    yield _torch_row(facts)
    yield Row("Versions", "python", "ok", facts.python)
    yield _entry_point_row(facts)


def _torch_row(facts: Facts) -> Row:
    if facts.window is None:
        text = f"{facts.torch}; which torch is supported is in no package metadata here"
        return Row("Versions", "torch", "warn", text, _REINSTALL)
    low, high = (".".join(map(str, version)) for version in facts.window)
    match = re.match(r"(\d+)\.(\d+)", facts.torch)
    inside = match and facts.window[0] <= (int(match[1]), int(match[2])) < facts.window[1]
    if inside:
        return Row(
            "Versions", "torch", "ok", f"{facts.torch} (supported: from {low}, below {high})"
        )
    text = f"{facts.torch} is outside of what is supported: from {low}, below {high}"
    return Row("Versions", "torch", "problem", text, f'pip install "torch>={low},<{high}"')


def _entry_point_row(facts: Facts) -> Row:
    found, name = facts.entry_points, 'backend="unified"'
    if not found:
        text = "not registered: torch.compile does not know the name"
        return Row("Versions", name, "problem", text, _REINSTALL)
    shown = ", ".join(found)
    if len(found) > 1:
        text = f"registered {len(found)} times, and torch takes any of them: {shown}"
        return Row("Versions", name, "problem", text, _uninstall_others(found))
    if not found[0].startswith(BACKEND):
        text = f"registered by somebody else: {shown}"
        return Row("Versions", name, "problem", text, _uninstall_others(found))
    return Row("Versions", name, "ok", f"registered once: {shown}")


def _uninstall_others(entries: Iterable[str]) -> str:
    owners = (entry.partition(" from ")[2].partition(" ")[0] for entry in entries)
    others = sorted({owner for owner in owners if owner and owner != DISTRIBUTION})
    return f"pip uninstall -y {' '.join(others)}" if others else _REINSTALL


def _cpu(facts: Facts) -> Iterator[Row]:
    if facts.cpu is None:
        return
    cpu = facts.cpu
    quota = "none" if cpu.cgroup_cores is None else f"{cpu.cgroup_cores:g} cores"
    cores = (
        f"{cpu.effective_cores} effective ({cpu.logical_cores} logical, {cpu.affinity_cores} by "
        f"affinity, cgroup quota {quota})"
    )
    limit = cpu.memory_limit_bytes
    memory = gib(cpu.memory_bytes) + (f", cgroup limit {gib(limit)}" if limit else "")
    yield Row("CPU", "model", "ok", f"{cpu.model} ({cpu.vendor or 'vendor unknown'})")
    yield Row("CPU", "ISA", "ok", " ".join(sorted(cpu.isa)) or "none known")
    details = {
        "effective": cpu.effective_cores,
        "logical": cpu.logical_cores,
        "affinity": cpu.affinity_cores,
        "cgroup": cpu.cgroup_cores,
    }
    yield Row("CPU", "cores", "ok", cores, details=details)
    if facts.topology is not None:
        yield Row("CPU", "topology", "ok", str(facts.topology))
    memory_details = {"bytes": cpu.memory_bytes, "limit_bytes": limit}
    yield Row("CPU", "memory", "ok", memory, details=memory_details)
    yield _threads_row(facts)
    for dtype in _NATIVE:
        yield _dtype_row(dtype, cpu.isa)


def gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _threads_row(facts: Facts) -> Row:
    if facts.thread_advice:
        return Row("CPU", "torch threads", "warn", facts.thread_advice)
    return Row("CPU", "torch threads", "ok", f"{facts.threads}, which fits the cores")


# Instructions that multiply in the dtype itself: on x86, on ARM.
_NATIVE = {
    "bfloat16": ({"avx512_bf16", "amx_bf16"}, {"bf16"}),
    "float16": ({"avx512_fp16", "amx_fp16"}, {"asimdhp"}),
}


def _dtype_row(dtype: str, isa: frozenset[str]) -> Row:
    x86, arm = _NATIVE[dtype]
    if native := sorted(isa & (x86 | arm)):
        return Row("CPU", dtype, "ok", f"native, by {' '.join(native)}", details={"native": native})
    wanted = " or ".join(sorted(arm if "neon" in isa else x86))
    text = f"emulated (no {wanted}): computed by way of float32"
    return Row("CPU", dtype, "info", text, details={"native": []})


def _libraries(facts: Facts) -> Iterator[Row]:
    for library in facts.libraries:
        if library.name == "torch":
            kernels = library.detail.partition(": ")[2] or library.detail
            yield Row("Libraries of torch", "CPU kernels", "ok", kernels)
            continue
        text = " ".join(part for part in (library.version, f"({library.detail})") if part)
        status = "ok" if library.available else "info"
        details = {"version": library.version, "available": library.available}
        yield Row("Libraries of torch", library.name, status, text, details=details)


def _code_generators(facts: Facts) -> Iterator[Row]:
    section = "Code generators"
    if facts.compiler is not None:
        yield _compiler_row(facts, facts.compiler)
    triton = facts.triton
    if triton is None:
        return
    if triton.usable:
        how = "interpreted, TRITON_INTERPRET is set" if triton.interpreter else "with a GPU driver"
        yield Row(section, "Triton", "ok", f"{triton.version} {how}")
    else:
        # Only a GPU needs it, and a torch for GPUs brings its own.
        wanted = any(one.available and target.name in _GPUS for target, one in facts.targets)
        fix = "" if triton.importable else 'pip install "triton>=3.4"'
        yield Row(section, "Triton", "warn" if wanted else "info", triton.reason, fix)
    if triton.foreign_distribution:
        other = triton.foreign_distribution
        text = f"{other} provides this import name too, and overwrites files of {DISTRIBUTION}"
        fix = f"pip uninstall -y {other.replace(',', '')} && {_REINSTALL}"
        yield Row(section, "triton_kernels", "warn", text, fix)


def _compiler_row(facts: Facts, found: Probe) -> Row:
    section, name = "Code generators", "C++ compiler"
    if found.available:
        where = found.details.get("compiler", "")
        return Row(
            section, name, "ok", f"{found.version} at {where}, compiles", details=_details_of(found)
        )
    level = Level.parse(facts.setting("level", "O2"))
    needed = level >= Level.O2 and "inductor" not in facts.setting("disable", [])
    if facts.target != "cpu" or not needed:
        return Row(section, name, "warn", found.reason, found.fix, _details_of(found))
    text = f"{level} on the CPU generates C++, and cannot here: {found.reason}"
    return Row(section, name, "problem", text, found.fix, _details_of(found))


def _details_of(found: Probe) -> dict[str, Any]:
    return {"version": found.version, **found.details}


_GPUS = ("cuda", "rocm", "xpu")  # the targets whose code Triton generates


def _calibration(facts: Facts) -> Iterator[Row]:
    section, found = "Calibration", facts.calibration
    if found is None:
        return
    profile = found.profile
    if profile is None:
        then = "measured when a graph first needs it" if found.setting == "auto" else "off"
        aside = "".join(
            f"; there is one {other}, which does not hold here"
            for other in dict.fromkeys(found.others)
        )
        text = f"{found.note} ({then}): libraries are chosen by what such CPUs are known for{aside}"
        yield Row(section, "profile", "info", text, calibrate_command.COMMAND)
        return
    text = f"measured {profile.date} in {profile.seconds:.1f} s with {profile.conditions.threads} "
    text += f"threads, kept in {found.path}"
    if profile.disturbed:
        text += f"; {calibrate_command.disturbance(profile)}"
        yield Row(section, "profile", "warn", text, calibrate_command.COMMAND, profile.as_dict())
    else:
        yield Row(section, "profile", "ok", text, "", profile.as_dict())
    for kind, dtype in dict.fromkeys((key.kind, key.dtype) for key in sorted(profile.rates)):
        yield Row(section, f"{kind} {dtype}", "ok", _fastest(profile, kind, dtype))
    yield Row(section, "bandwidth", "ok", calibrate_command.bandwidths(profile))
    yield Row(section, "call overhead", "ok", f"{profile.call_us:.1f} us")


def _fastest(profile: MachineProfile, kind: str, dtype: str) -> str:
    """GFLOP/s of each provider, the fastest first, for each shape."""
    parts = []
    for shape in SHAPES.get(kind, ()):
        ranked = [
            f"{provider} {profile.rates[RateKey(kind, provider, dtype, shape)]:.0f}"
            for provider in profile.faster(kind, dtype, shape)
        ]
        if ranked:
            parts.append(f"{shape}: {', '.join(ranked)}")
    return "; ".join(parts) + " GFLOP/s"


def _targets(facts: Facts) -> Iterator[Row]:
    file = _file(facts)
    for target, found in facts.targets:
        notes = "".join(f"; {note}" for note in found.details.get("notes", ()))
        details = {"available": found.available, **_details_of(found)}
        if file is not None and (why := file.target_off(target.name)):
            yield Row("Targets", target.name, "info", f"takes no graph: {why}", "", details)
            continue
        if found.available:
            text = f"{shown_version(found)}{notes}"
            status = "warn" if notes and target.name in _GPUS else "ok"
            yield Row("Targets", target.name, status, text, found.fix, details)
            continue
        # Something was installed for this target and does not fit: worth more than "absent".
        status = "warn" if found.details.get("installed") else "info"
        yield Row("Targets", target.name, status, f"absent: {found.reason}", found.fix, details)
    for name, (why, owner) in facts.broken_targets.items():
        fix = f"pip install --upgrade {owner}, or: pip uninstall -y {owner}" if owner else ""
        yield Row("Targets", name, "warn", f"this target plug-in was left out: {why}", fix)


def _file(facts: Facts) -> BackendFile | None:
    """The configuration file in force, out of its row of settings."""
    value = facts.setting("config", None)
    return BackendFile(value["file"], frozenset(value["on"])) if value else None


def shown_version(found: Probe) -> str:
    """ "here", with what it calls itself and how many devices there are."""
    parts = [found.version] if found.version else []
    if count := found.details.get("device_count"):
        parts.append(f"{count} device{'s' * (count != 1)}")
    return "here" + (f": {', '.join(parts)}" if parts else "")


def _providers(facts: Facts) -> Iterator[Row]:
    disabled, file = facts.setting("disable", []), _file(facts)
    off = {} if file is None else file.providers_off()
    for provider, found in facts.providers:
        details = {"available": found.available, **_details_of(found)}
        notes = "".join(f"; {note}" for note in found.details.get("notes", ()))
        text = f"{found.version} ({provider.summary}){notes}".lstrip()
        if not found.available:
            text = f"absent: {found.reason}"
        if provider.name in disabled:
            text = f"disabled by you; {text}"
        if provider.name in off:
            text = f"{off[provider.name]}; {text}"
        unused = provider.name in disabled or provider.name in off
        status = "ok" if found.available and not unused else "info"
        if not found.available and found.details.get("installed"):
            status = "warn"  # installed and unfit is worth more than not installed
        yield Row("Providers", provider.name, status, text, found.fix, details)


def _settings_rows(facts: Facts) -> Iterator[Row]:
    for setting in facts.settings:
        yield _setting_row(facts, setting)
    known = ", ".join(option.env for option in OPTIONS if option.env)
    for name, guess in facts.unknown_variables.items():
        hint = f"did you mean {guess}?" if guess else f"accepted: {known}"
        yield Row("Settings", name, "warn", f"means nothing; {hint}", f"unset {name}")


def _setting_row(facts: Facts, setting: Setting) -> Row:
    details = {"env": setting.env, "value": setting.value, "source": setting.source}
    fix = f"unset {setting.env}" if setting.source != "default" else ""
    if setting.error:
        return Row("Settings", setting.name, "problem", setting.error, fix, details)
    if setting.name == "device":
        probe_fix, refused = refused_device(str(setting.value), setting.source, facts.targets)
        if refused:
            # Forcing it and lacking it: either get it, or stop forcing it.
            fix = f"{fix}, or: {probe_fix}" if probe_fix else fix
            return Row("Settings", setting.name, "problem", refused, fix, details)
    status = "info" if setting.source == "default" else "ok"
    text = f"{shown_value(setting.value)} (from {setting.source})"
    return Row("Settings", setting.name, status, text, "", details)


def shown_value(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {shown_value(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def refused_device(wish: str, source: str, here: Iterable[tuple[Target, Probe]]) -> tuple[str, str]:
    """The fix, and why a forced device cannot be had; two empty strings if it can."""
    name, _, index = wish.partition(":")
    by_name = {target.name: found for target, found in here}
    found = by_name.get(name)
    if found is None:  # "auto", or the targets could not be asked
        return "", ""
    available = ", ".join(name for name, one in by_name.items() if one.available)
    forced = f"device {wish!r} was forced (from {source})"
    if not found.available:
        return found.fix, f"{forced} and is not here: {found.reason}. Available: {available}."
    count = int(found.details.get("device_count", 1))
    if index and int(index) >= count:
        text = f"{forced}, and {name} has {count} device(s), numbered from 0."
        return "", f"{text} Available: {available}."
    return "", ""


_SECTIONS: dict[str, Callable[[Facts], Iterator[Row]]] = {
    "Versions": _versions,
    "CPU": _cpu,
    "Libraries of torch": _libraries,
    "Code generators": _code_generators,
    "Calibration": _calibration,
    "Targets": _targets,
    "Providers": _providers,
    "Settings": _settings_rows,
}
