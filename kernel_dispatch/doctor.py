"""`doctor`: what is here, what is missing, and the exact command that fixes it.

Three steps, kept apart so that tests can hand in any machine: `collect()` asks and never raises,
`diagnose()` turns the facts into rows and asks nothing, `render()` makes text of the rows.
Only what the user *asked for* can be a problem; an absent GPU is a fact.
"""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernel_dispatch import __version__, devices
from kernel_dispatch.settings import OPTIONS, resolve
from kernel_dispatch.terminal import Style
from lowering import machine, providers, targets
from lowering.contract import Probe, Provider, Target
from lowering.errors import UnifiedError, nearest
from lowering.levels import Level
from lowering.targets.xpu import ipex_status
from triton_kernels.availability import TritonStatus
from triton_kernels.availability import status as triton_status

DISTRIBUTION = "kernel-dispatch"
BACKEND = "kernel_dispatch.backend:unified"
_ROOT = Path(__file__).resolve().parent.parent
# From a checkout, the distribution to install is the checkout.
_SOURCE = f"-e {_ROOT}" if (_ROOT / "pyproject.toml").is_file() else DISTRIBUTION
_REINSTALL = f"pip install --force-reinstall --no-deps {_SOURCE}"
Window = tuple[tuple[int, int], tuple[int, int]]
T = TypeVar("T")


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
class Facts:
    """Everything that was asked, as plain data. `failed`: what could not be asked -> the error."""

    python: str = ""
    torch: str = ""
    window: Window | None = None
    entry_points: tuple[str, ...] = ()  # "module:name from distribution version"
    cpu: machine.CpuFacts | None = None
    threads: int = 1
    thread_advice: str = ""
    libraries: tuple[machine.Library, ...] = ()
    compiler: Probe | None = None
    triton: TritonStatus | None = None
    targets: tuple[tuple[Target, Probe], ...] = ()
    providers: tuple[tuple[Provider, Probe], ...] = ()
    broken_targets: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # why, distribution
    ipex: Probe | None = None
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


# --- asking ---------------------------------------------------------------------------------------


def collect(environ: Mapping[str, str] | None = None) -> Facts:
    """Ask this machine. Whatever a probe raises becomes a line of its own."""
    environ = os.environ if environ is None else environ
    failed: dict[str, str] = {}

    def ask(what: str, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except Exception as error:  # noqa: BLE001  (one broken probe must not hide the others)
            failed[what] = f"{type(error).__name__}: {error}"
            return otherwise

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say, a row says
        return Facts(
            python=platform.python_version(),
            torch=str(torch.__version__),
            window=ask("torch window", torch_window, None),
            entry_points=ask("entry point", _entry_points, ()),
            cpu=ask("CPU", machine.cpu, None),
            threads=ask("threads", torch.get_num_threads, 1),
            thread_advice=ask("thread advice", machine.thread_advice, ""),
            libraries=ask("libraries", machine.libraries, ()),
            compiler=ask("C++ compiler", machine.toolchain_deep, None),
            triton=ask("triton", triton_status, None),
            targets=ask("targets", probed_targets, ()),
            providers=ask("providers", _probed_providers, ()),
            broken_targets=ask("target plug-ins", _broken_targets, {}),
            ipex=ask("ipex", ipex_status, None),
            settings=ask("settings", lambda: tuple(_settings(environ)), ()),
            unknown_variables=ask("variables", lambda: _unknown_variables(environ), {}),
            failed=failed,  # filled by the questions above
        )


def torch_window() -> Window | None:
    """(2, 8), (2, 16): from this version on, below that one; None where the metadata has none."""
    for line in metadata.requires(DISTRIBUTION) or []:
        if re.match(r"torch\b(?![-_.])", line) and "extra ==" not in line:
            low, high = (re.search(rf"{sign}(\d+)\.(\d+)", line) for sign in (">=", "<"))
            if low and high:
                return (int(low[1]), int(low[2])), (int(high[1]), int(high[2]))
    return None


def _entry_points() -> tuple[str, ...]:
    found = metadata.entry_points(group="torch_dynamo_backends", name="unified")
    return tuple(
        f"{entry.value} from {entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        for entry in found
    )


def probed_targets() -> tuple[tuple[Target, Probe], ...]:
    return tuple((target, _answer(devices.probe(target))) for target in targets.known())


def _probed_providers() -> tuple[tuple[Provider, Probe], ...]:
    known = providers.known()
    return tuple((known[name], _answer(devices.probe_provider(name))) for name in sorted(known))


def _broken_targets() -> dict[str, tuple[str, str]]:
    """Plug-ins that could not be loaded: entry point -> why, and who brought it."""
    owners = {
        entry.name: entry.dist.name
        for entry in metadata.entry_points(group=targets.GROUP)
        if entry.dist is not None
    }
    return {name: (why, owners.get(name, "")) for name, why in targets.broken.items()}


def _answer(found: object) -> Probe:
    """A third party's probe may give back anything."""
    if isinstance(found, Probe):
        return found
    return Probe.no(f"its probe gave {found!r}, not a lowering.contract.Probe")


def _settings(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Each option on its own, so that one bad value does not hide the next."""
    for option in OPTIONS:
        given = environ.get(option.env, "") if option.env else ""
        alone = {option.env: given} if option.env else {}
        try:
            row = resolve(environ=alone).as_dict()[option.name]
        except UnifiedError as error:
            yield Setting(option.name, option.env, given, option.env or "", str(error))
        else:
            yield Setting(option.name, option.env, row["value"], row["source"])


def _unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    known = [option.env for option in OPTIONS if option.env]
    unknown = sorted(name for name in environ if name.startswith("UNIFIED_") and name not in known)
    return {name: nearest(name, known) or "" for name in unknown}


# --- judging --------------------------------------------------------------------------------------


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


def _targets(facts: Facts) -> Iterator[Row]:
    for target, found in facts.targets:
        notes = "".join(f"; {note}" for note in found.details.get("notes", ()))
        details = {"available": found.available, **_details_of(found)}
        if found.available:
            text = f"{shown_version(found)}{notes}"
            status = "warn" if notes and target.name in _GPUS else "ok"
            yield Row("Targets", target.name, status, text, found.fix, details)
            continue
        # Something was installed for this target and does not fit: worth more than "absent".
        misfit = any(found.details.get(package) for package in ("torch_tpu", "torch_xla"))
        status = "warn" if misfit else "info"
        yield Row("Targets", target.name, status, f"absent: {found.reason}", found.fix, details)
    for name, (why, owner) in facts.broken_targets.items():
        fix = f"pip install --upgrade {owner}, or: pip uninstall -y {owner}" if owner else ""
        yield Row("Targets", name, "warn", f"this target plug-in was left out: {why}", fix)


def shown_version(found: Probe) -> str:
    """ "here", with what it calls itself and how many devices there are."""
    parts = [found.version] if found.version else []
    if count := found.details.get("device_count"):
        parts.append(f"{count} device{'s' * (count != 1)}")
    return "here" + (f": {', '.join(parts)}" if parts else "")


def _providers(facts: Facts) -> Iterator[Row]:
    disabled = facts.setting("disable", [])
    for provider, found in facts.providers:
        details = {"available": found.available, **_details_of(found)}
        text = f"{found.version} ({provider.summary})".lstrip()
        if not found.available:
            text = f"absent: {found.reason}"
        if provider.name in disabled:
            text = f"disabled by you; {text}"
        status = "ok" if found.available and provider.name not in disabled else "info"
        yield Row("Providers", provider.name, status, text, found.fix, details)
    if facts.ipex is not None:
        # Installed and unfit is worth a warning; not installed is as it should be.
        details = _details_of(facts.ipex)
        status = "warn" if details["version"] and not facts.ipex.available else "info"
        yield Row("Providers", "ipex", status, facts.ipex.reason, facts.ipex.fix, details)


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
    if isinstance(value, (list, dict)):
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
    "Targets": _targets,
    "Providers": _providers,
    "Settings": _settings_rows,
}


# --- telling --------------------------------------------------------------------------------------


def as_json(rows: list[Row]) -> str:
    """For programs: `exit_code`, how often each status, and every row with its details."""
    counts = {status: _count(rows, status) for status in ("ok", "info", "warn", "problem")}
    answer = {
        "version": __version__,
        "exit_code": exit_code(rows),
        "counts": counts,
        "rows": [row.as_dict() for row in rows],
    }
    return json.dumps(answer, indent=2, default=str)


def render(rows: list[Row], style: Style) -> str:
    """For people: a block per section, a line per row, the fix below it."""
    lines: list[str] = []
    wide = max((len(row.name) for row in rows), default=0)
    for section in dict.fromkeys(row.section for row in rows):
        lines += ["", style.bold(section)] if lines else [style.bold(section)]
        for row in (row for row in rows if row.section == section):
            lines += _row_lines(row, wide, style)
    return "\n".join([*lines, "", _summary(rows, style)])


def _row_lines(row: Row, wide: int, style: Style) -> list[str]:
    indent = " " * (wide + 6)
    # Compilers answer in several lines; the row keeps its shape.
    text = " ".join(row.text.split())
    if style.width and style.width > len(indent) + 20:
        text = textwrap.fill(
            text,
            style.width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,  # paths
            break_on_hyphens=False,  # package names
        ).lstrip()
    lines = [f"  {style.mark(row.status)} {row.name:<{wide}}  {text}"]
    if row.fix:  # never wrapped: it is there to be copied
        label = "fix" if row.status in ("warn", "problem") else "to get it"
        lines.append(f"{indent}{label}: {row.fix}")
    return lines


def _summary(rows: list[Row], style: Style) -> str:
    problems, warned = _count(rows, "problem"), _count(rows, "warn")
    verdict = f"{problems or 'No'} problem{'s' * (problems != 1)}"
    if warned:
        verdict += f", {warned} warning{'s' * (warned != 1)}"
    words = {"ok": "fine", "info": "for information", "warn": "warning", "problem": "problem"}
    legend = "  ".join(f"{style.mark(status)} {word}" for status, word in words.items())
    return f"{style.bold(verdict)}.   {legend}"


def _count(rows: Iterable[Row], status: str) -> int:
    return sum(row.status == status for row in rows)
